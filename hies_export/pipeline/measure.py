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
from ..forms.judge import ExportedFile, Judged, frontier, judge_exported, keep_file, with_times
from ..forms.judge import judge as judge_forms
from ..forms.measured import LatencyRow, Measurements, budget_rows, measure_both
from ..forms.runtimes.base import RUNTIMES
from ..forms.time import Timed, fastest, ratios, rows_by_shape
from ..forms.time import time as time_forms
from ..model.text_encoder import TextEncoder
from ..recipe.budget import Found, Outcome
from ..recipe.sections import ExportSection
from ..units.counts import Both, Shape
from .fastest import answers_of, looks_of, quick_times
from .job import Job
from .stages import Choice, Saved, Slim

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


def measure(job: Job, forms: Forms, choice: Choice, slim: Slim, saved: Saved, folder: Path) -> Measured:
    """Export the slim model into the folder of a run, and judge and time it there beside the dense one.

    Both are counted, and timed on every runtime that the recipe names. All forms of both, in fewer bits and joined in a
    compound, are then judged and timed beside each other.
    """
    if job.deploy is not None:
        in_int8 = any(way.bits == "int8" and way.bits not in RUNTIMES[way.runtime].calibrated for way in _ways(choice))
        export = job.export.model_copy(update={"quantize": "int8" if in_int8 else None})
        job = replace(job, exporter=replace(job.exporter, options=export))
        forms.exporter = job.exporter
    dense = "dense" if job.trimming is None else "whole"
    forms.add(dense, job.dense)
    forms.map(dense)
    exports = _export(job, forms, slim, folder)
    assert job.source is not None
    with job.clock("measure"):
        stored = Both(job.source.bytes, saved.bytes)
        how: dict[str, Any] = {"modules": job.modules, "batches": job.shapes, "stored": stored}
        sizes = measure_both(forms, job.measure, dense=dense, **how)
        judge = job.judge(job.rows.evaluation, index=None)
        on_dense_index = judge.on_dense_index()
        joined = _join(job, forms, choice, folder)
        running = _forms(job, forms, choice, joined, same=not slim.plan.removes)
        judged = _judge(job, running, choice, on_dense_index)
        best, step = None, 0
        if running:
            judged, best, step = _time(job, choice, running, judged, joined=joined is not None)
        deployment = None
        if job.deploy is not None:
            deployment = _deployment(job, forms, choice, judge, judged, best, step, folder)
        compound = _compound(job, forms, choice, judge, joined, judged[-1].stability) if joined else ({}, {})
        file = judge_exported(forms.export("slim", job.export), folder, on_dense_index, judged)
    add_graphs(exports.values(), folder / "slim")
    if isinstance(slim.model, TextEncoder):
        _serve(slim.model, exports, judged, deployment, folder)
    return Measured(
        sizes=sizes,
        exported=exports[job.export.unquantized],
        file=file,
        forms=judged,
        deployment=deployment,
        compound=compound,
        outcome=_with_cost(job, forms, choice.outcome, sizes),
    )


def _ways(choice: Choice) -> list[DeployWay]:
    return [way for way in choice.ways if way.problem is None]


def _export(job: Job, forms: Forms, slim: Slim, folder: Path) -> dict[ExportSection, Export]:
    """Export the slim model into the folder of a run, and quantise the export if asked."""
    options, plain = job.export, job.export.unquantized
    with job.clock("export"):
        job.progress.stage(f"export to {plain.format.upper()}, and compare with torch")
        found = {plain: forms.exporter.export(slim.model, folder / plain.format, plain)}
        if options.quantize:
            job.progress.stage(f"quantise to {options.quantize}, and compare with float32")
            place = folder / f"{options.format}-{options.quantize}"
            found[options] = forms.exporter.quantize(found[plain], place, options)
    forms.add("slim", slim.model, found)
    forms.map("slim")
    return found


def _join(job: Job, forms: Forms, choice: Choice, folder: Path) -> Export | None:
    """Write the compound of both models into the folder of a run, if one is asked for."""
    if (asked := choice.compound) is None:
        return None
    job.progress.stage(f"join both models in a {asked.name}, and compare it with them")
    slim, dense = (forms.plain(name) for name in ("slim", "dense"))
    return asked.join(slim, dense, folder / asked.folder, batches=job.rows.promise, answers=answers_of(job))


def _forms(job: Job, forms: Forms, choice: Choice, joined: Export | None, *, same: bool) -> list[Form]:
    """Return all forms of a run, the dense float32 graph first; where nothing was cut, those of the dense model alone.

    When the time that `deploy` gives is nearly over, these are the form to deploy and the dense ones beside it.
    """
    if job.task.in_parts:  # models in several graphs have no forms
        return []
    if job.deploy is None:
        ways = job.measure.ways_to_judge(job.export, choice.compound)
    else:
        ways = [(way.runtime, way.bits) for way in _ways(choice)]
        if _hurried(job, choice) and choice.served is not None:
            ways = [way for way in ways if way in (ways[0], (choice.served.runtime, choice.served.dtype))]
    # A form with a calibration of its own is made of the slim model only if the dense one keeps the promise in it.
    broken = {
        (way.runtime, way.bits)
        for way in choice.ways
        if job.deploy and way.bits in RUNTIMES[way.runtime].calibrated and (way.at_least or 0.0) < job.deploy.keep
    }
    found = []
    for way in ways:
        names = ("dense",) if same or way in broken else ("dense", "slim")
        found += [forms.form(name, *way) for name in names]
    if choice.compound is not None and joined is not None:
        found.append(choice.compound.form(joined))
    return found


def _judge(job: Job, running: Sequence[Form], choice: Choice, judge: Judge) -> list[Judged]:
    if job.deploy is None:
        return judge_forms(running, judge, progress=job.progress)
    held_out = job.judge(job.rows.held_out, confidence=looks_of(job).confidence)
    known = {(way.runtime, way.bits): way for way in _ways(choice)}
    found = []
    for form in running:
        way = known.get((form.runtime, str(form.bits)))
        dense = way if form.model == "dense" else None
        # Nothing is promised of the slim model where the dense one breaks the promise, see `Looks`.
        broken = form.model == "slim" and way is not None and (way.at_least or 0.0) < job.deploy.keep
        (judged,) = judge_forms([form], judge, None if dense or broken else held_out, progress=job.progress)
        found.append(judged if dense is None else replace(judged, kept=dense.kept, at_least=dense.at_least))
    return found


def _hurried(job: Job, choice: Choice) -> bool:
    """Return whether less time is left than trying the slim model in all forms, and timing them, would take."""
    return job.deadline - time.monotonic() < 2 * choice.dense_seconds


def _time(
    job: Job, choice: Choice, running: Sequence[Form], judged: Sequence[Judged], *, joined: bool
) -> tuple[list[Judged], int | None, int]:
    """Return judged forms with their times, which one to deploy, and the step that decides; see `fastest`.

    Of a deployment, all are timed briefly. Those on the frontier, the dense float32 graph and the candidates to deploy
    are then timed beside each other in all sizes.
    """
    job.progress.stage("time all forms of both models")
    how: dict[str, Any] = {"progress": job.progress}
    if not joined and not (job.deploy and job.on_rows):
        batches: Mapping[Shape, Sequence[Batch]] = {shape: [batch] for shape, batch in job.shapes.items()}
        how |= {"repeats": job.measure.repeats, "min_seconds": job.measure.min_seconds, "decode": True}
    else:
        assert job.rows.in_order is not None
        batches = rows_by_shape({size: job.rows.in_order(size) for size in BATCHES})
    if job.deploy is None:
        return with_times(judged, time_forms(running, batches, **how)), None, 0
    briefly = quick_times(job, running, compounds=joined)
    found = with_times(judged, briefly)
    able = [n for n, form in enumerate(judged) if form.at_least is not None and form.at_least >= job.deploy.keep]
    if _hurried(job, choice):
        return found, *fastest(briefly, able)
    times = ratios(briefly)
    best_of_all = frontier(times, [form.stability for form in judged])
    chosen = sorted({0, *best_of_all, *sorted(able, key=times.__getitem__)[:CANDIDATES]})
    job.progress.stage(f"time the {len(chosen)} forms that may be deployed, in all sizes")
    timed = time_forms([running[number] for number in chosen], batches, loads=LOADS, **how)
    for number, form in zip(chosen, with_times([judged[number] for number in chosen], timed), strict=True):
        found[number] = form
    best, step = fastest(timed, [place for place, number in enumerate(chosen) if number in able])
    return found, None if best is None else chosen[best], step


def _deployment(
    job: Job,
    forms: Forms,
    choice: Choice,
    judge: Judge,
    judged: list[Judged],
    best: int | None,
    step: int,
    folder: Path,
) -> Deployment:
    """Name the fastest form that keeps the promise, and keep its file in the folder of the run."""
    assert job.deploy is not None
    seconds, ranking = time.monotonic() - job.began, None
    if best is not None and job.task.embeds:
        form = forms.form(judged[best].model, judged[best].runtime, judged[best].bits)
        ranking = judge.ranking(form.predict(judge.batches, judge.task))
    # Last, as it moves what the form reads.
    same = all(form.model == "dense" for form in judged)
    file = None if best is None else keep_file(forms, judged[best], folder, same=same)
    return Deployment(job.deploy.keep, best, step, list(choice.ways), seconds, file, ranking)


def _compound(
    job: Job, forms: Forms, choice: Choice, judge: Judge, joined: Export, stability: float
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    asked = choice.compound
    assert asked is not None
    part = forms.export("slim", job.export.unquantized.model_copy(update={"quantize": joined.how.quantize}))
    parts = Both(forms.plain("dense").bytes, part.bytes)
    summary, facts = asked.facts(joined, judge.batches, parts=parts, stability=stability, tried=choice.sizes)
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


def _with_cost(job: Job, forms: Forms, outcome: Outcome | None, sizes: Measurements) -> Outcome | None:
    """Return the outcome of a budget of cost with what was counted or timed; others stay as they are."""
    if outcome is None or outcome.budget.ratio is None:
        return outcome
    asked = outcome.budget.latency
    if asked is None:
        counted = sizes.flops.ratio if outcome.budget.flops is not None else sizes.parameters.ratio
        return replace(outcome, found=Found(counted), noisy=None)
    found: Timed | LatencyRow
    if job.trimming is not None:  # the rows are relative to the model with all its tokens
        both = [forms.form(name, asked.runtime, asked.dtype) for name in ("dense", "slim")]
        found = job.timed_on.time(both, job.progress)[1]
    else:
        found = budget_rows(asked, sizes.latency)[0]
    return replace(outcome, found=Found(found.ratio), noisy=found.noisy)
