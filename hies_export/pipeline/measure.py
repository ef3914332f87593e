"""Export, count, judge and time both models of a run, and name the form to deploy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.sentence import write_served
from ..data.batches import Batch
from ..evaluate.judge import Judge
from ..forms.deployment import Deployment, DeployWay
from ..forms.form import Form, Forms
from ..forms.formats import Export, add_graphs, link_files, runtime_of
from ..forms.judged import ExportedFile, Judged, frontier, judge_exported, keep_file, with_times
from ..forms.judged import judge as judge_forms
from ..forms.measured import LatencyRow, Measurements, budget_rows, measure_both
from ..forms.runtimes.base import RUNTIMES
from ..forms.time import Timed, fastest, ratios, rows_by_shape
from ..forms.time import time as time_forms
from ..model.text_encoder import TextEncoder
from ..recipe.budget import Found, Outcome
from ..recipe.sections import ExportSection
from ..units.counts import Both, Shape
from .delivery import Delivery, Saved, on_rows
from .fastest import Decision, answers_of, looks_of, quick_times
from .pruning import Pruning
from .stages import Slim

# Sizes of the batches in which forms are timed on the rows.
BATCHES = (1, 8, 32)
# So many of the forms that keep the promise of a deployment, the fastest, are timed in all sizes.
CANDIDATES = 2
# How often each of them is loaded for that.
LOADS = 3


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Both models in all forms: counted, judged, timed; and which to deploy.

    Attributes:
        sizes: What was counted, and the times on every runtime that the recipe names.
        exported: The slim model's export.
        file: The file of that export, with its quality on the evaluation rows.
        forms: Both models in several runtimes and bits.
        deployment: Which of them to deploy, if that was asked.
        compound: What the report's summary and its details say of the compound, by its name; empty without one.
        outcome: The budget, with what was counted or timed of it.
    """

    sizes: Measurements
    exported: Export
    file: ExportedFile
    forms: list[Judged]
    deployment: Deployment | None
    compound: tuple[Mapping[str, Any], Mapping[str, Any]]
    outcome: Outcome | None


def measure(
    pruning: Pruning, delivery: Delivery, forms: Forms, decision: Decision, slim: Slim, saved: Saved, folder: Path
) -> Measured:
    """Export the slim model into the folder of a run, and judge and time it there beside the dense one.

    Both are counted, and timed on every runtime that the recipe names. All forms of both, in fewer bits and joined in a
    compound, are then judged and timed beside each other.
    """
    if delivery.deploy is not None:
        in_int8 = any(
            way.bits == "int8" and way.bits not in RUNTIMES[way.runtime].calibrated for way in _ways(decision)
        )
        export = delivery.export.model_copy(update={"quantize": "int8" if in_int8 else None})
        delivery = replace(delivery, exporter=replace(delivery.exporter, options=export))
        forms.exporter = delivery.exporter
    dense = "dense" if pruning.trimming is None else "whole"
    forms.add(dense, pruning.dense)
    forms.map(dense)
    exports = _export(pruning, delivery, forms, slim, folder)
    assert delivery.source is not None
    with pruning.clock("measure"):
        stored = Both(delivery.source.bytes, saved.bytes)
        how: dict[str, Any] = {"modules": pruning.modules, "batches": pruning.shapes, "stored": stored}
        sizes = measure_both(forms, delivery.measure, dense=dense, **how)
        judge = pruning.judge(pruning.rows.evaluation, index=None)
        on_dense_index = judge.on_dense_index()
        joined = _join(pruning, forms, decision, folder)
        running = _forms(pruning, delivery, forms, decision, joined, same=not slim.plan.removes)
        judged = _judge(pruning, delivery, running, decision, on_dense_index)
        best, step = None, 0
        if running:
            judged, best, step = _time(pruning, delivery, decision, running, judged, joined=joined is not None)
        deployment = None
        if delivery.deploy is not None:
            deployment = _deployment(pruning, delivery, forms, decision, judge, judged, best, step, folder)
        compound = (
            _compound(pruning, delivery, forms, decision, judge, joined, judged[-1].stability) if joined else ({}, {})
        )
        file = judge_exported(forms.export("slim", delivery.export), folder, on_dense_index, judged)
    add_graphs(exports.values(), folder / "slim")
    if isinstance(slim.model, TextEncoder):
        _serve(slim.model, exports, judged, deployment, folder)
    return Measured(
        sizes=sizes,
        exported=exports[delivery.export.unquantized],
        file=file,
        forms=judged,
        deployment=deployment,
        compound=compound,
        outcome=_with_cost(pruning, delivery, forms, decision.choice.outcome, sizes),
    )


def _ways(decision: Decision) -> list[DeployWay]:
    return [way for way in decision.ways if way.problem is None]


def _export(
    pruning: Pruning, delivery: Delivery, forms: Forms, slim: Slim, folder: Path
) -> dict[ExportSection, Export]:
    """Export the slim model into the folder of a run, and quantise the export if asked."""
    options, plain = delivery.export, delivery.export.unquantized
    with pruning.clock("export"):
        pruning.progress.stage(f"export to {plain.format.upper()}, and compare with torch")
        found = {plain: forms.exporter.export(slim.model, folder / plain.format, plain)}
        if options.quantize:
            pruning.progress.stage(f"quantise to {options.quantize}, and compare with float32")
            place = folder / f"{options.format}-{options.quantize}"
            found[options] = forms.exporter.quantize(found[plain], place, options)
    forms.add("slim", slim.model, found)
    forms.map("slim")
    return found


def _join(pruning: Pruning, forms: Forms, decision: Decision, folder: Path) -> Export | None:
    """Write the compound of both models into the folder of a run, if one is asked for."""
    if (asked := decision.compound) is None:
        return None
    pruning.progress.stage(f"join both models in a {asked.name}, and compare it with them")
    slim, dense = (forms.plain(name) for name in ("slim", "dense"))
    return asked.join(slim, dense, folder / asked.folder, batches=pruning.rows.promise, answers=answers_of(pruning))


def _forms(
    pruning: Pruning, delivery: Delivery, forms: Forms, decision: Decision, joined: Export | None, *, same: bool
) -> list[Form]:
    """Return all forms of a run, the dense float32 graph first; where nothing was cut, those of the dense model alone.

    When the time that `deploy` gives is nearly over, these are the form to deploy and the dense ones beside it.
    """
    if pruning.task.in_parts:  # models in several graphs have no forms
        return []
    if delivery.deploy is None:
        ways = delivery.measure.ways_to_judge(delivery.export, decision.compound)
    else:
        ways = [(way.runtime, way.bits) for way in _ways(decision)]
        if _hurried(delivery, decision) and decision.choice.served is not None:
            ways = [
                way for way in ways if way in (ways[0], (decision.choice.served.runtime, decision.choice.served.dtype))
            ]
    # A form with a calibration of its own is made of the slim model only if the dense one keeps the promise in it.
    broken = {
        (way.runtime, way.bits)
        for way in decision.ways
        if delivery.deploy
        and way.bits in RUNTIMES[way.runtime].calibrated
        and (way.at_least or 0.0) < delivery.deploy.keep
    }
    found = []
    for way in ways:
        names = ("dense",) if same or way in broken else ("dense", "slim")
        found += [forms.form(name, *way) for name in names]
    if decision.compound is not None and joined is not None:
        found.append(decision.compound.form(joined))
    return found


def _judge(
    pruning: Pruning, delivery: Delivery, running: Sequence[Form], decision: Decision, judge: Judge
) -> list[Judged]:
    if delivery.deploy is None:
        return judge_forms(running, judge, progress=pruning.progress)
    held_out = pruning.judge(pruning.rows.held_out, confidence=looks_of(pruning, delivery).confidence)
    known = {(way.runtime, way.bits): way for way in _ways(decision)}
    found = []
    for form in running:
        way = known.get((form.runtime, str(form.bits)))
        dense = way if form.model == "dense" else None
        # Nothing is promised of the slim model where the dense one breaks the promise, see `Looks`.
        broken = form.model == "slim" and way is not None and (way.at_least or 0.0) < delivery.deploy.keep
        (judged,) = judge_forms([form], judge, None if dense or broken else held_out, progress=pruning.progress)
        found.append(judged if dense is None else replace(judged, kept=dense.kept, at_least=dense.at_least))
    return found


def _hurried(delivery: Delivery, decision: Decision) -> bool:
    """Return whether less time is left than trying the slim model in all forms, and timing them, would take."""
    return delivery.deadline - time.monotonic() < 2 * decision.dense_seconds


def _time(
    pruning: Pruning,
    delivery: Delivery,
    decision: Decision,
    running: Sequence[Form],
    judged: Sequence[Judged],
    *,
    joined: bool,
) -> tuple[list[Judged], int | None, int]:
    """Return judged forms with their times, which one to deploy, and the step that decides; see `fastest`.

    Of a deployment, all are timed briefly. Those on the frontier, the dense float32 graph and the candidates to deploy
    are then timed beside each other in all sizes.
    """
    pruning.progress.stage("time all forms of both models")
    how: dict[str, Any] = {"progress": pruning.progress}
    if not joined and not (delivery.deploy and on_rows(pruning)):
        batches: Mapping[Shape, Sequence[Batch]] = {shape: [batch] for shape, batch in pruning.shapes.items()}
        how |= {"repeats": delivery.measure.repeats, "min_seconds": delivery.measure.min_seconds, "decode": True}
    else:
        assert delivery.in_order is not None
        batches = rows_by_shape({size: delivery.in_order(size) for size in BATCHES})
    if delivery.deploy is None:
        return with_times(judged, time_forms(running, batches, **how)), None, 0
    briefly = quick_times(pruning, delivery, running, compounds=joined)
    found = with_times(judged, briefly)
    able = [n for n, form in enumerate(judged) if form.at_least is not None and form.at_least >= delivery.deploy.keep]
    if _hurried(delivery, decision):
        return found, *fastest(briefly, able)
    times = ratios(briefly)
    best_of_all = frontier(times, [form.stability for form in judged])
    chosen = sorted({0, *best_of_all, *sorted(able, key=times.__getitem__)[:CANDIDATES]})
    pruning.progress.stage(f"time the {len(chosen)} forms that may be deployed, in all sizes")
    timed = time_forms([running[number] for number in chosen], batches, loads=LOADS, **how)
    for number, form in zip(chosen, with_times([judged[number] for number in chosen], timed), strict=True):
        found[number] = form
    best, step = fastest(timed, [place for place, number in enumerate(chosen) if number in able])
    return found, None if best is None else chosen[best], step


def _deployment(
    pruning: Pruning,
    delivery: Delivery,
    forms: Forms,
    decision: Decision,
    judge: Judge,
    judged: list[Judged],
    best: int | None,
    step: int,
    folder: Path,
) -> Deployment:
    """Name the fastest form that keeps the promise, and keep its file in the folder of the run."""
    assert delivery.deploy is not None
    seconds, ranking = time.monotonic() - delivery.began, None
    if best is not None and pruning.task.embeds:
        form = forms.form(judged[best].model, judged[best].runtime, judged[best].bits)
        ranking = judge.ranking(form.predict(judge.batches, judge.task))
    # Last, as it moves what the form reads.
    same = all(form.model == "dense" for form in judged)
    file = None if best is None else keep_file(forms, judged[best], folder, same=same)
    return Deployment(delivery.deploy.keep, best, step, list(decision.ways), seconds, file, ranking)


def _compound(
    pruning: Pruning,
    delivery: Delivery,
    forms: Forms,
    decision: Decision,
    judge: Judge,
    joined: Export,
    stability: float,
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    asked = decision.compound
    assert asked is not None
    part = forms.export("slim", delivery.export.unquantized.model_copy(update={"quantize": joined.how.quantize}))
    parts = Both(forms.plain("dense").bytes, part.bytes)
    summary, facts = asked.facts(joined, judge.batches, parts=parts, stability=stability, tried=decision.sizes)
    return {asked.name: summary}, {asked.name: facts}


def _serve(
    model: TextEncoder,
    exports: Mapping[ExportSection, Export],
    judged: list[Judged],
    found: Deployment | None,
    folder: Path,
) -> None:
    """Write `served/`, which sentence-transformers runs: the file to deploy, or else the last of the exports."""
    form = None if found is None or found.form is None else judged[found.form]
    if found is None or (form is not None and RUNTIMES[form.runtime].reads_models):
        exported = [*exports.values()][-1]
        file, runtime, dtype = exported.file, runtime_of(exported.how), None
    elif form is not None and found.file is not None:
        bits = form.bits if form.bits in RUNTIMES[form.runtime].hints else None
        file, runtime, dtype = folder / found.file, form.runtime, bits
    else:
        return
    if runtime is None:
        return
    link_files(file.parent, folder / "served")
    write_served(folder / "served", model, file=file.name, runtime=runtime, dtype=dtype)


def _with_cost(
    pruning: Pruning, delivery: Delivery, forms: Forms, outcome: Outcome | None, sizes: Measurements
) -> Outcome | None:
    """Return the outcome of a budget of cost with what was counted or timed; others stay as they are."""
    if outcome is None or outcome.budget.ratio is None:
        return outcome
    asked = outcome.budget.latency
    if asked is None:
        counted = sizes.flops.ratio if outcome.budget.flops is not None else sizes.parameters.ratio
        return replace(outcome, found=Found(counted), noisy=None)
    found: Timed | LatencyRow
    if pruning.trimming is not None:  # the rows are relative to the model with all its tokens
        both = [forms.form(name, asked.runtime, asked.dtype) for name in ("dense", "slim")]
        found = delivery.timed_on(pruning).time(both, pruning.progress)[1]
    else:
        found = budget_rows(asked, sizes.latency)[0]
    return replace(outcome, found=Found(found.ratio), noisy=found.noisy)
