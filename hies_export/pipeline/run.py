"""Run a recipe: calibrate -> score -> select -> cut -> save -> export -> measure -> report."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from .. import processes
from ..checkpoint.folders import new_folder, refuse_existing
from ..checkpoint.refits import REFIT
from ..errors import DropError
from ..evaluate.judge import Judge
from ..evaluate.lm_eval import run_benchmarks
from ..evaluate.predict import predict
from ..measure.contention import CpuWatch, OtherWork
from ..progress import SILENT, Clock, Progress
from ..recipe import PruningRecipe
from ..report.report import Report
from ..values import PruningPlan
from .budgets import BudgetOutcome, CostOutcome, MaxDropOutcome
from .choose import choose, write_choice
from .export import check_exports, export, require_exporters
from .measure import measure_both
from .prepare import Prepared, prepare
from .prune import prune
from .quality import Evaluation, evaluate
from .reporting import Finished, build_report, write_report
from .search import quality_loss

logger = logging.getLogger(__name__)

# A run that computes for less is not worth a warning of other work.
LONG_SECONDS = 10.0


def run(
    recipe: PruningRecipe, *, overwrite: bool = False, command: str | None = None, progress: Progress = SILENT
) -> Report:
    """Run a recipe and write `recipe.output`: scores.json, plan.json, slim/, onnx/ (or gguf/), report.json, .md, .html.

    If the recipe compensates, the refitted layers are in `refit.safetensors` beside the plan.

    The folder appears only when all stages have succeeded. If the environment names several processes, as under
    accelerate, they share the work; the first one writes, and all return its report.

    Args:
        recipe: The recipe.
        overwrite: Replace an existing output folder, unless it is, holds or lies inside the model or the data.
        command: The command line, which the report records.
        progress: Shows stages and loops.

    Returns:
        The report that was written.

    Raises:
        RequestError: The recipe, the data or the model does not allow the run; raised before anything is computed.
        StepError: A stage failed; no output folder is left behind.
    """
    with processes.together():
        refuse_existing(recipe.output, overwrite=overwrite, inputs=recipe.inputs)
        require_exporters(recipe)
        progress.stage("load the model and the data")
        prepared = prepare(recipe)
        check_exports(prepared, recipe)
        with output_folder(recipe, overwrite=overwrite) as folder:
            return _run(prepared, recipe, folder, command, progress)


def output_folder(recipe: PruningRecipe, *, overwrite: bool) -> AbstractContextManager[Path]:
    """Return a `new_folder` for the recipe's output; of several processes only the first makes it, and writes."""
    if processes.rank() > 0:
        return nullcontext(Path(recipe.output))
    return new_folder(recipe.output, overwrite=overwrite)


def _run(prepared: Prepared, recipe: PruningRecipe, folder: Path, command: str | None, progress: Progress) -> Report:
    """Run all stages, and write what they return into the folder."""
    clock, watch = Clock(), CpuWatch()
    with clock("score"):
        choice = choose(prepared, recipe, progress=progress)
    with clock("cut"):
        pruned = prune(
            prepared,
            choice.plan,
            recipe,
            folder / "slim",
            compensation=choice.compensation,
            refit=choice.refit,
            refit_file=folder / REFIT,
            progress=progress,
        )
        choice = replace(choice, plan=pruned.plan, refit=None)  # its moments may be gigabytes
        budget = confirm_max_drop(prepared, pruned.slim, recipe, choice.budget, progress=progress)
    evaluation = evaluate_run(prepared, pruned.slim, choice.plan, recipe, progress=progress)
    count, others = processes.world(), _other_work(watch)

    def finish() -> Report:
        write_choice(folder, choice)
        with clock("export"):
            kind = "ONNX" if recipe.export.format == "onnx" else "GGUF"
            progress.stage(f"export to {kind}, and compare with torch")
            exported = export(prepared, pruned.slim, recipe, folder / recipe.export.format)
        with clock("measure"):
            measured = measure_both(prepared, pruned.slim, exported, recipe, stored=pruned.bytes, progress=progress)
        met = budget
        if isinstance(met, CostOutcome):
            met = met.with_measured(flops=measured.flops, parameters=measured.parameters, latency=measured.latency)
        done = Finished(prepared, choice, pruned, evaluation, exported, measured, met, count, others)
        report = build_report(recipe, done, clock.seconds, command)
        write_report(folder, report, recipe)
        return report

    return processes.on_main(finish)


def _other_work(watch: CpuWatch) -> OtherWork | None:
    """Return what other work used while a single process computed for long, and warn if that mattered; else None."""
    seen = watch.seen() if processes.world() == 1 and watch.seconds >= LONG_SECONDS else None
    if seen is not None and seen.matters:
        logger.warning("%s while this run computed, which took longer than it does on an idle machine", seen)
    return seen


def evaluate_run(
    prepared: Prepared, slim: PreTrainedModel, plan: PruningPlan, recipe: PruningRecipe, *, progress: Progress
) -> Evaluation:
    """Evaluate the slim model on the evaluation batches and on the recipe's benchmarks."""
    progress.stage("evaluate both models")
    asked = recipe.evaluation
    judge = Judge.on(
        prepared.model,
        prepared.evaluation,
        metrics=prepared.metrics,
        regression=prepared.regression,
        tolerance=asked.stability_tolerance,
        progress=progress,
    )

    def benchmark(model: PreTrainedModel) -> dict[str, float]:
        size = asked.batch_size
        options: dict[str, Any] = {"samples": asked.samples, "batch_size": size}
        return processes.on_main(lambda: run_benchmarks(model, prepared.processor, asked.lm_eval, **options))

    return evaluate(
        judge,
        prepared.model,
        slim,
        modules=prepared.sites,
        uncompensated=plan.kept if recipe.prune.compensation else None,
        benchmark=benchmark if asked.lm_eval else None,
        progress=progress,
    )


def confirm_max_drop(
    prepared: Prepared, slim: PreTrainedModel, recipe: PruningRecipe, budget: BudgetOutcome, *, progress: Progress
) -> BudgetOutcome:
    """Evaluate the slim model on the held-out rows that its number of heads was chosen on.

    Returns:
        The outcome with the slim model's metric; the outcome of any other budget unchanged.

    Raises:
        DropError: The metric is worse than the budget allows: compensation, or rounding to `save_dtype`, did harm.
    """
    if not isinstance(budget, MaxDropOutcome):
        return budget
    progress.stage("evaluate the slim model on the held-out rows")
    judge = Judge.on(prepared.model, prepared.held_out, metrics=(budget.metric,), regression=prepared.regression)
    value = judge.of(predict(slim, prepared.held_out)).metrics[budget.metric]
    lost = quality_loss(budget.metric, budget.dense, value)
    if lost > budget.by:
        what, remedy = "compensated", "compensate on more samples, or not at all"
        if recipe.prune.compensation is None:
            what, remedy = "rounded", "set save_dtype: float32"
        raise DropError(
            f"{budget.metric} on the held-out rows may get worse by {budget.by:g}, and the model that was judged kept "
            f"to it, but the {what} one lost {lost:.4g}; {remedy}"
        )
    return replace(budget, slim=value)
