"""The stages of a run: calibrate -> score -> select -> cut -> save -> export -> measure -> report."""

from __future__ import annotations

import logging
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from .. import processes
from ..checkpoint.folders import new_folder
from ..checkpoint.refits import REFIT
from ..cost.latency import compare_with_full
from ..evaluate.judge import Judge
from ..evaluate.lm_eval import run_benchmarks
from ..measure.contention import CpuWatch, OtherWork
from ..measure.counts import Both
from ..measure.exports import Exported, Exporter, ExportOptions
from ..measure.forms import Forms
from ..outcomes import CostOutcome
from ..progress import Clock, Progress
from ..recipe import PruneSection, PruningRecipe
from ..report.report import Report
from ..units import Selection
from .answer import Answer, Decided
from .cascade import answers_of, choose_size
from .cut import save, warn_if_larger
from .deployed import judge_deployed
from .measure import Measurements, measure_both
from .prepare import Prepared
from .prune import PruneResult, prune_prepared
from .reporting import Finished, build_report, write_report
from .resolve import Resolved
from .search import Evaluation, evaluate
from .targets import timed_on

logger = logging.getLogger(__name__)

# Shorter runs do not warn of other work.
LONG_SECONDS = 10.0


def output_folder(recipe: PruningRecipe, *, overwrite: bool) -> AbstractContextManager[Path]:
    """Return a `new_folder` for the recipe's output; of several processes only the first makes it, and writes."""
    if processes.rank() > 0:
        return nullcontext(Path(recipe.output))
    return new_folder(recipe.output, overwrite=overwrite)


def run_stages(
    resolved: Resolved,
    recipe: PruningRecipe,
    folder: Path,
    command: str | None,
    progress: Progress,
    *,
    answer: Answer | None = None,
) -> Report:
    """Run all stages, and write their results into the folder; an `answer` is a choice that was already made."""
    clock, watch = Clock(), CpuWatch()
    if answer is not None:
        # The search has scored the units, and judged cuts.
        clock.seconds["score"] = time.monotonic() - answer.began
    prepared, options, dtype = resolved.prepared, resolved.options, resolved.source.dtype
    decided: Decided = answer or _decide(resolved, clock, progress)
    result = prune_prepared(
        prepared,
        options,
        choice=decided.choice,
        compensation=options.compensation,
        served=decided.served,
        dtype=dtype,
        clock=clock,
        progress=progress,
    )
    with clock("cut"):
        progress.stage("save, load again and compare")
        place, refit_file = folder / "slim", folder / REFIT
        written: dict[str, Any] = {"processor": prepared.processor, "dense": resolved.source.folder, "dtype": dtype}
        saved = save(result.slim, prepared, place, refit_file=refit_file, **written)
        warn_if_larger(saved, resolved.source)
    uncompensated = result.plan.kept if options.compensation else None
    progress.stage("evaluate both models")
    judge = Judge.on(prepared.model, resolved.evaluation, **asdict(prepared.judged), progress=progress)
    evaluation = evaluate_run(resolved, judge, result.model, uncompensated=uncompensated, progress=progress)
    answers = None if decided.cascade is None else answers_of(prepared)
    count, others = processes.world(), _other_work(watch)

    def finish() -> Report:
        assert result.choice is not None
        result.choice.write(folder)
        exporter = prepared.exporter
        exports = _export(exporter, result.model, folder, clock, progress)
        # In the folder of the run, so that all exports are read from the same disk.
        with clock("measure"), tempfile.TemporaryDirectory(prefix=".dense-", dir=folder) as temporary:
            forms = Forms({}, exporter, Path(temporary), progress)
            forms.add("dense", prepared.model, None if answer is None else answer.dense.forms.exports_of("dense"))
            forms.add("slim", result.model, exports)
            stored = Both(resolved.source.bytes, saved.bytes)
            measured = measure_both(
                forms, resolved.measure, modules=prepared.modules, batches=prepared.measured, stored=stored
            )
            same = not any(kept.removed for kept in result.plan.kept.values())
            deployed = judge_deployed(resolved, forms, judge, decided, answers, folder, same=same)
        done = Finished(
            resolved=resolved,
            result=_with_cost(result, prepared, options, measured, progress),
            saved=saved,
            evaluation=evaluation,
            exported=exports[exporter.options.unquantized],
            deployed=deployed,
            measured=measured,
            processes=count,
            other_work=others,
        )
        report = build_report(recipe, done, clock.seconds, command)
        write_report(folder, report, recipe)
        return report

    return processes.on_main(finish)


def _decide(resolved: Resolved, clock: Clock, progress: Progress) -> Decided:
    """Choose the cut by the time of its cascade, if that was asked for; else leave it to the stages."""
    asked = resolved.cascade
    if asked is None or not resolved.shares:
        return Decided(cascade=asked)
    with clock("score"):
        return choose_size(resolved.prepared, resolved.options, asked, resolved.shares, resolved.source.dtype, progress)


def _export(
    exporter: Exporter, model: PreTrainedModel, folder: Path, clock: Clock, progress: Progress
) -> dict[ExportOptions, Exported]:
    """Export the slim model into the folder of a run, and quantise the export if asked."""
    options = exporter.options
    kind = "ONNX" if options.format == "onnx" else "GGUF"
    with clock("export"):
        progress.stage(f"export to {kind}, and compare with torch")
        found = {options.unquantized: exporter.export(model, folder / options.format, options.unquantized)}
        if options.quantize:
            progress.stage(f"quantise to {options.quantize}, and compare with float32")
            found[options] = exporter.quantize(found[options.unquantized], folder / f"onnx-{options.quantize}")
    return found


def _with_cost(
    result: PruneResult, prepared: Prepared, options: PruneSection, measured: Measurements, progress: Progress
) -> PruneResult:
    """Fill in the measured result of a budget of cost; other budgets stay as they are."""
    budget = result.budget
    if not isinstance(budget, CostOutcome):
        return result
    budget = budget.with_measured(flops=measured.flops, parameters=measured.parameters, latency=measured.latency)
    if budget.of == "float32":
        timed = compare_with_full(result.model, prepared.model, timed_on(prepared, options), progress=progress)
        budget = replace(budget, measured=timed.ratio.median, noisy=timed.noisy)
    return replace(result, budget=budget)


def _other_work(watch: CpuWatch) -> OtherWork | None:
    """Return the processor time of other work in a long run of one process, and warn if it matters; else None."""
    seen = watch.seen() if processes.world() == 1 and watch.seconds >= LONG_SECONDS else None
    if seen is not None and seen.matters:
        logger.warning("%s while this run computed, which took longer than it does on an idle machine", seen)
    return seen


def evaluate_run(
    resolved: Resolved,
    judge: Judge,
    slim: PreTrainedModel,
    *,
    uncompensated: Selection | None = None,
    progress: Progress,
) -> Evaluation:
    """Evaluate a slim model on the evaluation batches and the benchmarks, and a selection that is only cut."""
    prepared, asked = resolved.prepared, resolved.benchmarks

    def benchmark(model: PreTrainedModel) -> dict[str, float]:
        how: dict[str, Any] = {"samples": asked.samples, "batch_size": asked.batch_size}
        return processes.on_main(lambda: run_benchmarks(model, prepared.processor, asked.tasks, **how))

    return evaluate(
        judge,
        prepared.model,
        slim,
        modules=prepared.modules,
        uncompensated=uncompensated,
        benchmark=benchmark if asked.tasks else None,
        progress=progress,
    )
