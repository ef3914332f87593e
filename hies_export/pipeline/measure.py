"""Export, count, judge and time both models of a run, and name the form to deploy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpoint.sentence import write_served
from ..evaluate.judge import Judge
from ..forms.cascade.export import CascadeFacts, CascadeSummary
from ..forms.deployment import Deployment
from ..forms.form import Form, Forms
from ..forms.formats import Export, add_graphs, link_files, runtime_of
from ..forms.judged import ExportedFile, Judged, frontier, judge_exported, keep_file, with_times
from ..forms.judged import judge as judge_forms
from ..forms.measured import Measurements, budget_rows, measure_both
from ..forms.runtimes.base import RUNTIMES
from ..forms.time import fastest, ratios, rows_by_shape
from ..forms.time import time as time_forms
from ..model.text_encoder import TextEncoder
from ..recipe.budget import Found, Outcome
from ..recipe.sections import ExportSection
from ..units.counts import Both
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
    cascade: tuple[CascadeSummary, CascadeFacts] | None  # what the report's summary and its details say of one
    outcome: Outcome | None  # the budget, with what was counted or timed of it


class _TimedForms(NamedTuple):
    """All forms with their times, and of a deployment which is best, see `forms.time.fastest`."""

    judged: list[Judged]
    best: int | None = None  # index of the form to deploy; None if none keeps the promise
    step: int = 0  # index of the times that decide, the same in all forms


class Measuring:
    """How the slim model of a run is exported into its folder, and measured beside the dense one.

    Both are counted, and timed on every runtime that the recipe names. Then all forms of both (a form is a model on a
    runtime in some bits) and their cascade are judged and timed beside each other. Of a deployment, `ways` are the
    runtimes and bits that the dense model runs in, and `broken` those of them in which it breaks the promise.
    """

    def __init__(self, pruning: Pruning, delivery: Delivery, forms: Forms, decision: Decision, folder: Path):
        self.pruning, self.delivery, self.forms, self.folder = pruning, delivery, forms, folder
        self.decision, self.deploy = decision, delivery.deploy
        self.ways = [way for way in decision.ways if way.problem is None]
        keep = 0.0 if self.deploy is None else self.deploy.keep
        self.broken = {(way.runtime, way.bits) for way in self.ways if (way.at_least or 0.0) < keep}

    def run(self, slim: Slim, saved: Saved) -> Measured:
        """Export the slim model, and count, judge and time both."""
        pruning, delivery, forms, folder = self.pruning, self.delivery, self.forms, self.folder
        if self.deploy is not None:  # the export of the run has the bits that were tried
            in_int8 = any(way.bits == "int8" and way.bits not in RUNTIMES[way.runtime].calibrated for way in self.ways)
            options = forms.exporter.options.model_copy(update={"quantize": "int8" if in_int8 else None})
            forms.exporter = replace(forms.exporter, options=options)
        # Sizes are relative to the model with all its tokens; "dense" is the one that was pruned, perhaps trimmed.
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
            to_judge = self._forms(joined, same=not slim.plan.removes)
            timed = _TimedForms(self._judge(to_judge, on_dense_index))
            if to_judge:
                timed = self._time(to_judge, timed.judged, joined=joined is not None)
            deployment = self._deployment(timed)
            cascade = self._cascade(judge, joined, timed.judged[-1].stability) if joined else None
            file = judge_exported(forms.export("slim", forms.exporter.options), folder, on_dense_index, timed.judged)
        add_graphs(exports.values(), folder / "slim")
        if isinstance(slim.model, TextEncoder):
            best = None if timed.best is None else timed.judged[timed.best]
            self._serve(slim.model, exports, best, None if deployment is None else deployment.file)
        return Measured(
            saved=saved,
            sizes=sizes,
            exported=exports[forms.exporter.options.unquantized],
            file=file,
            forms=timed.judged,
            deployment=deployment,
            cascade=cascade,
            outcome=self._with_cost(sizes),
        )

    def _export(self, slim: Slim) -> dict[ExportSection, Export]:
        """Export the slim model into the folder of a run, and quantise the export if asked; return both by options."""
        progress, exporter = self.pruning.progress, self.forms.exporter
        options, plain = exporter.options, exporter.options.unquantized
        with self.pruning.clock("export"):
            progress.stage(f"export to {plain.format.upper()}, and compare with torch")
            exports = {plain: exporter.export(slim.model, self.folder / plain.format, plain)}
            if options.quantize:
                progress.stage(f"quantise to {options.quantize}, and compare with float32")
                folder = self.folder / f"{options.format}-{options.quantize}"
                exports[options] = exporter.quantize(exports[plain], folder, options)
        self.forms.add("slim", slim.model, exports)
        self.forms.map_weights("slim")
        return exports

    def _join(self) -> Export | None:
        """Export the cascade of both models into the folder of a run; return None if none is asked for."""
        if (cascade := self.decision.cascade) is None:
            return None
        self.pruning.progress.stage(f"join both models in a {cascade.name}, and compare it with them")
        slim, dense, rows = self.forms.plain("slim"), self.forms.plain("dense"), self.pruning.rows.promise
        answers = self.pruning.dense_predictions(rows).values
        return cascade.join(slim, dense, self.folder / cascade.folder, batches=rows, answers=answers)

    def _forms(self, joined: Export | None, *, same: bool) -> list[Form]:
        """Return all forms of a run, the dense float32 graph first, and that of the cascade last, if one was `joined`.

        If both models are the `same`, the others are those of the dense one alone. A model of several graphs has none.
        """
        if self.pruning.task.in_parts:
            return []
        cascade = self.decision.cascade
        if self.deploy is None:
            pairs = self.delivery.measure.ways_to_judge(self.forms.exporter.options, cascade)
        else:
            pairs = [(way.runtime, way.bits) for way in self.ways]
        forms = []
        for runtime, bits in pairs:
            forms.append(self.forms.form("dense", runtime, bits))
            # Calibrated bits are made of the slim model only if the dense one keeps the promise in them.
            left_out = bits in RUNTIMES[runtime].calibrated and (runtime, bits) in self.broken
            if not (same or left_out):
                forms.append(self.forms.form("slim", runtime, bits))
        if cascade is not None and joined is not None:
            forms.append(cascade.form(joined))
        return forms

    def _judge(self, forms: Sequence[Form], judge: Judge) -> list[Judged]:
        """Judge forms on the evaluation rows, and those of a deployment by what they keep on the held-out rows too."""
        pruning = self.pruning
        if self.deploy is None:
            return judge_forms(forms, judge, progress=pruning.progress)
        held_out = pruning.judge(pruning.rows.held_out, confidence=looks_of(pruning, self.delivery).confidence)
        ways = {(way.runtime, way.bits): way for way in self.ways}
        all_judged = []
        for form in forms:
            pair = form.runtime, str(form.bits)
            # The search has judged the dense model on these rows. Where it breaks the promise, see `Looks`, nothing is
            # promised of the slim one.
            judged_before = ways.get(pair) if form.model == "dense" else None
            broken = form.model == "slim" and pair in self.broken
            on_held_out = None if judged_before or broken else held_out
            (judged,) = judge_forms([form], judge, on_held_out, progress=pruning.progress)
            if judged_before is not None:
                judged = replace(judged, kept=judged_before.kept, at_least=judged_before.at_least)
            all_judged.append(judged)
        return all_judged

    def _time(self, forms: Sequence[Form], judged: Sequence[Judged], *, joined: bool) -> _TimedForms:
        """Time judged forms, a cascade among them if `joined`, and find the one to deploy.

        Of a deployment, all are timed briefly. Those on the frontier, the dense float32 graph and the candidates to
        deploy are then timed beside each other in all sizes.
        """
        pruning, delivery = self.pruning, self.delivery
        pruning.progress.stage("time all forms of both models")
        options: dict[str, Any] = {"progress": pruning.progress}
        if joined or (self.deploy and timed_on_rows(pruning)):
            assert delivery.in_order is not None
            batches = rows_by_shape({size: delivery.in_order(size) for size in BATCHES})
        else:
            batches = {shape: [batch] for shape, batch in pruning.shapes.items()}
            options |= {"repeats": delivery.measure.repeats, "decode": True}
        if self.deploy is None:
            return _TimedForms(with_times(judged, time_forms(forms, batches, **options)))
        brief_times = quick_times(pruning, delivery, forms, cascades=joined)
        found = with_times(judged, brief_times)
        keeping = [index for index, form in enumerate(judged) if (form.at_least or 0.0) >= self.deploy.keep]
        relative = ratios(brief_times)
        candidates = sorted(keeping, key=lambda index: relative[index])[:CANDIDATES]
        chosen = sorted({0, *frontier(relative, [form.stability for form in judged]), *candidates})
        pruning.progress.stage(f"time the {len(chosen)} forms that may be deployed, in all sizes")
        times = time_forms([forms[index] for index in chosen], batches, loads=LOADS, **options)
        for index, form in zip(chosen, with_times([judged[index] for index in chosen], times), strict=True):
            found[index] = form
        best, step = fastest(times, [position for position, index in enumerate(chosen) if index in keeping])
        return _TimedForms(found, None if best is None else chosen[best], step)

    def _deployment(self, timed: _TimedForms) -> Deployment | None:
        """Return which form to deploy, whose file is kept in the folder of the run; None if that was not asked."""
        if self.deploy is None:
            return None
        seconds, file = time.monotonic() - self.delivery.began, None
        if timed.best is not None:
            same = all(form.model == "dense" for form in timed.judged)
            file = keep_file(self.forms, timed.judged[timed.best], self.folder, same=same)
        return Deployment(self.deploy.keep, timed.best, timed.step, list(self.decision.ways), seconds, file)

    def _cascade(self, judge: Judge, joined: Export, stability: float) -> tuple[CascadeSummary, CascadeFacts]:
        """Return what the report's summary and its details say of the cascade."""
        cascade, plain = self.decision.cascade, self.forms.exporter.options.unquantized
        assert cascade is not None
        slim = self.forms.export("slim", plain.model_copy(update={"quantize": joined.how.quantize}))
        bytes_alone, tried = Both(self.forms.plain("dense").bytes, slim.bytes), self.decision.sizes
        return cascade.facts(joined, judge.batches, parts=bytes_alone, stability=stability, tried=tried)

    def _serve(
        self, model: TextEncoder, exports: Mapping[ExportSection, Export], best: Judged | None, best_file: str | None
    ) -> None:
        """Write `served/`, which sentence-transformers runs: the file to deploy, or else the last export."""
        if self.deploy is None or (best is not None and RUNTIMES[best.runtime].reads_models):
            exported = [*exports.values()][-1]
            file, runtime, dtype = exported.file, runtime_of(exported.how), None
        elif best is not None and best_file is not None:
            bits = best.bits if best.bits in RUNTIMES[best.runtime].hints else None
            file, runtime, dtype = self.folder / best_file, best.runtime, bits
        else:
            return  # no form keeps the promise
        if runtime is None:
            return  # none reads the export
        link_files(file.parent, self.folder / "served")
        write_served(self.folder / "served", model, file=file.name, runtime=runtime, dtype=dtype)

    def _with_cost(self, sizes: Measurements) -> Outcome | None:
        """Return the choice's outcome, if it has one; for a budget of cost, with what was counted or timed."""
        outcome = self.decision.choice.outcome
        if outcome is None or outcome.budget.ratio is None:  # a budget of heads or a promise
            return outcome
        latency = outcome.budget.latency
        if latency is None:
            counted = sizes.flops.ratio if outcome.budget.flops is not None else sizes.parameters.ratio
            return replace(outcome, found=Found(counted))
        if self.pruning.trimming is None:
            timed = budget_rows(latency, sizes.latency)[0]
        else:  # those rows are relative to the untrimmed model, and the budget to the trimmed one
            both = [self.forms.form(name, latency.runtime, latency.dtype) for name in ("dense", "slim")]
            _, timed = self.delivery.timed_on(self.pruning).time(both, self.pruning.progress)
        return replace(outcome, found=Found(timed.ratio), noisy=timed.noisy)
