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
from .delivery import Delivery, Saved, timed_on_rows
from .fastest import Decision, looks_of, quick_times
from .pruning import Pruning
from .stages import Slim

# Sizes of the batches in which forms are timed on the rows.
BATCHES = (1, 8, 32)
# Number of the fastest forms that keep the promise of a deployment to time in all sizes, and how often each is loaded.
CANDIDATES, LOADS = 2, 3


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Both models in all forms: counted, judged, timed; and which to deploy."""

    saved: Saved
    sizes: Measurements  # what was counted, and the times on every runtime that the recipe names
    exported: Export  # of the slim model
    file: ExportedFile  # of that export, with its quality on the evaluation rows
    forms: list[Judged]  # both models in several runtimes and bits
    deployment: Deployment | None  # which of them to deploy, if that was asked
    # What the report's summary and its details say of the compound, by its name; empty without one.
    compound: tuple[Mapping[str, Any], Mapping[str, Any]]
    outcome: Outcome | None  # the budget, with what was counted or timed of it


class Measuring:
    """How the slim model of a run is exported into its folder, and measured beside the dense one.

    Both are counted, and timed on every runtime that the recipe names. All forms of both, in fewer bits and joined in a
    compound, are then judged and timed beside each other. `ways` are those of a deployment that serve the dense model.
    """

    def __init__(self, pruning: Pruning, delivery: Delivery, forms: Forms, decision: Decision, folder: Path):
        self.pruning, self.delivery, self.forms, self.folder = pruning, delivery, forms, folder
        self.decision, self.deploy = decision, delivery.deploy
        self.ways = [way for way in decision.ways if way.problem is None]

    def run(self, slim: Slim, saved: Saved) -> Measured:
        """Export the slim model, and count, judge and time both."""
        pruning, delivery, forms, folder = self.pruning, self.delivery, self.forms, self.folder
        if self.deploy is not None:  # the export of the run has the bits that were tried
            in_int8 = any(way.bits == "int8" and way.bits not in RUNTIMES[way.runtime].calibrated for way in self.ways)
            options = forms.exporter.options.model_copy(update={"quantize": "int8" if in_int8 else None})
            forms.exporter = replace(forms.exporter, options=options)
        dense = "dense" if pruning.trimming is None else "whole"
        forms.add(dense, pruning.dense)
        forms.map_weights(dense)
        exports = self._export(slim)
        assert delivery.source is not None
        with pruning.clock("measure"):
            stored = Both(delivery.source.bytes, saved.bytes)
            sizes = measure_both(forms, delivery.measure, batches=pruning.shapes, stored=stored, dense=dense)
            judge = pruning.judge(pruning.rows.evaluation, index=None)
            on_dense_index = judge.on_dense_index()
            joined = self._join()
            running = self._forms(joined, same=not slim.plan.removes)
            judged = self._judge(running, on_dense_index)
            best, step = None, 0
            if running:
                judged, best, step = self._time(running, judged, joined=joined is not None)
            deployment = self._deployment(judge, judged, best, step)
            compound = self._compound(judge, joined, judged[-1].stability) if joined else ({}, {})
            file = judge_exported(forms.export("slim", forms.exporter.options), folder, on_dense_index, judged)
        add_graphs(exports.values(), folder / "slim")
        if isinstance(slim.model, TextEncoder):
            self._serve(slim.model, exports, judged, deployment)
        return Measured(
            saved=saved,
            sizes=sizes,
            exported=exports[forms.exporter.options.unquantized],
            file=file,
            forms=judged,
            deployment=deployment,
            compound=compound,
            outcome=self._with_cost(sizes),
        )

    def _export(self, slim: Slim) -> dict[ExportSection, Export]:
        """Export the slim model into the folder of a run, and quantise the export if asked."""
        progress, exporter = self.pruning.progress, self.forms.exporter
        options, plain = exporter.options, exporter.options.unquantized
        with self.pruning.clock("export"):
            progress.stage(f"export to {plain.format.upper()}, and compare with torch")
            found = {plain: exporter.export(slim.model, self.folder / plain.format, plain)}
            if options.quantize:
                progress.stage(f"quantise to {options.quantize}, and compare with float32")
                place = self.folder / f"{options.format}-{options.quantize}"
                found[options] = exporter.quantize(found[plain], place, options)
        self.forms.add("slim", slim.model, found)
        self.forms.map_weights("slim")
        return found

    def _join(self) -> Export | None:
        """Write the compound of both models into the folder of a run; None if none is asked for."""
        if (asked := self.decision.compound) is None:
            return None
        self.pruning.progress.stage(f"join both models in a {asked.name}, and compare it with them")
        slim, dense, rows = self.forms.plain("slim"), self.forms.plain("dense"), self.pruning.rows.promise
        answers = self.pruning.dense_predictions(rows).values
        return asked.join(slim, dense, self.folder / asked.folder, batches=rows, answers=answers)

    def _forms(self, joined: Export | None, *, same: bool) -> list[Form]:
        """Return all forms of a run, the dense float32 graph first, and that of the compound last, if one was `joined`.

        If both models are the `same`, the others are those of the dense one alone. There are none of a model that is
        exported as several graphs.
        """
        if self.pruning.task.in_parts:
            return []
        compound = self.decision.compound
        if self.deploy is None:
            pairs = self.delivery.measure.ways_to_judge(self.forms.exporter.options, compound)
        else:
            pairs = [(way.runtime, way.bits) for way in self.ways]
        # A form with a calibration of its own is made of the slim model only if the dense one keeps the promise in it.
        broken = {
            (way.runtime, way.bits)
            for way in self.ways
            if way.bits in RUNTIMES[way.runtime].calibrated and self._breaks(way)
        }
        found = []
        for pair in pairs:
            names = ("dense",) if same or pair in broken else ("dense", "slim")
            found += [self.forms.form(name, *pair) for name in names]
        if compound is not None and joined is not None:
            found.append(compound.form(joined))
        return found

    def _judge(self, running: Sequence[Form], judge: Judge) -> list[Judged]:
        """Judge forms on the evaluation rows, and those of a deployment by what they keep on the held-out rows too."""
        pruning = self.pruning
        if self.deploy is None:
            return judge_forms(running, judge, progress=pruning.progress)
        held_out = pruning.judge(pruning.rows.held_out, confidence=looks_of(pruning, self.delivery).confidence)
        known = {(way.runtime, way.bits): way for way in self.ways}
        found = []
        for form in running:
            way = known.get((form.runtime, str(form.bits)))
            dense = way if form.model == "dense" else None
            # Nothing is promised of the slim model where the dense one breaks the promise, see `Looks`.
            broken = form.model == "slim" and way is not None and self._breaks(way)
            (judged,) = judge_forms([form], judge, None if dense or broken else held_out, progress=pruning.progress)
            found.append(judged if dense is None else replace(judged, kept=dense.kept, at_least=dense.at_least))
        return found

    def _breaks(self, way: DeployWay) -> bool:
        """Return whether the dense model breaks the promise of a deployment in a way."""
        return self.deploy is not None and (way.at_least or 0.0) < self.deploy.keep

    def _time(
        self, running: Sequence[Form], judged: Sequence[Judged], *, joined: bool
    ) -> tuple[list[Judged], int | None, int]:
        """Return judged forms with their times, which one to deploy, and the step that decides; see `fastest`.

        Of a deployment, all are timed briefly. Those on the frontier, the dense float32 graph and the candidates to
        deploy are then timed beside each other in all sizes.
        """
        pruning, delivery = self.pruning, self.delivery
        pruning.progress.stage("time all forms of both models")
        how: dict[str, Any] = {"progress": pruning.progress}
        if not joined and not (self.deploy and timed_on_rows(pruning)):
            batches: Mapping[Shape, Sequence[Batch]] = {shape: [batch] for shape, batch in pruning.shapes.items()}
            how |= {"repeats": delivery.measure.repeats, "decode": True}
        else:
            assert delivery.in_order is not None
            batches = rows_by_shape({size: delivery.in_order(size) for size in BATCHES})
        if self.deploy is None:
            return with_times(judged, time_forms(running, batches, **how)), None, 0
        briefly = quick_times(pruning, delivery, running, compounds=joined)
        found = with_times(judged, briefly)
        able = [n for n, form in enumerate(judged) if form.at_least is not None and form.at_least >= self.deploy.keep]
        times = ratios(briefly)
        best_of_all = frontier(times, [form.stability for form in judged])
        chosen = sorted({0, *best_of_all, *sorted(able, key=times.__getitem__)[:CANDIDATES]})
        pruning.progress.stage(f"time the {len(chosen)} forms that may be deployed, in all sizes")
        timed = time_forms([running[number] for number in chosen], batches, loads=LOADS, **how)
        for number, form in zip(chosen, with_times([judged[number] for number in chosen], timed), strict=True):
            found[number] = form
        best, step = fastest(timed, [place for place, number in enumerate(chosen) if number in able])
        return found, None if best is None else chosen[best], step

    def _deployment(self, judge: Judge, judged: list[Judged], best: int | None, step: int) -> Deployment | None:
        """Return which form to deploy, whose file is kept in the folder of the run; None if that was not asked."""
        if self.deploy is None:
            return None
        seconds, ranking, file = time.monotonic() - self.delivery.began, None, None
        if best is not None:
            found = judged[best]
            if self.pruning.task.embeds:
                form = self.forms.form(found.model, found.runtime, found.bits)
                ranking = judge.ranking(form.predict(judge.batches, judge.task))
            # Last, as it moves what the form reads.
            file = keep_file(self.forms, found, self.folder, same=all(form.model == "dense" for form in judged))
        return Deployment(self.deploy.keep, best, step, list(self.decision.ways), seconds, file, ranking)

    def _compound(self, judge: Judge, joined: Export, stability: float) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return what the report's summary and its details say of the compound, by its name."""
        asked, plain = self.decision.compound, self.forms.exporter.options.unquantized
        assert asked is not None
        part = self.forms.export("slim", plain.model_copy(update={"quantize": joined.how.quantize}))
        parts, tried = Both(self.forms.plain("dense").bytes, part.bytes), self.decision.sizes
        summary, facts = asked.facts(joined, judge.batches, parts=parts, stability=stability, tried=tried)
        return {asked.name: summary}, {asked.name: facts}

    def _serve(
        self,
        model: TextEncoder,
        exports: Mapping[ExportSection, Export],
        judged: list[Judged],
        found: Deployment | None,
    ) -> None:
        """Write `served/`, which sentence-transformers runs: the file to deploy, or else the last of the exports."""
        form = None if found is None or found.form is None else judged[found.form]
        if found is None or (form is not None and RUNTIMES[form.runtime].reads_models):
            exported = [*exports.values()][-1]
            file, runtime, dtype = exported.file, runtime_of(exported.how), None
        elif form is not None and found.file is not None:
            bits = form.bits if form.bits in RUNTIMES[form.runtime].hints else None
            file, runtime, dtype = self.folder / found.file, form.runtime, bits
        else:
            return
        if runtime is None:
            return
        link_files(file.parent, self.folder / "served")
        write_served(self.folder / "served", model, file=file.name, runtime=runtime, dtype=dtype)

    def _with_cost(self, sizes: Measurements) -> Outcome | None:
        """Return the outcome of the choice; that of a budget of cost with what was counted or timed."""
        outcome = self.decision.choice.outcome
        if outcome is None or outcome.budget.ratio is None:
            return outcome
        asked = outcome.budget.latency
        if asked is None:
            counted = sizes.flops.ratio if outcome.budget.flops is not None else sizes.parameters.ratio
            return replace(outcome, found=Found(counted))
        found: Timed | LatencyRow
        if self.pruning.trimming is not None:  # the rows are relative to the model with all its tokens
            both = [self.forms.form(name, asked.runtime, asked.dtype) for name in ("dense", "slim")]
            found = self.delivery.timed_on(self.pruning).time(both, self.pruning.progress)[1]
        else:
            found = budget_rows(asked, sizes.latency)[0]
        return replace(outcome, found=Found(found.ratio), noisy=found.noisy)
