"""Run a recipe: calibrate -> score -> select -> cut -> save -> export -> measure -> report."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from .. import processes
from ..checkpoint.folders import new_folder, refuse_existing
from ..checkpoint.save import save_slim
from ..data.targets import size_of
from ..errors import DropError
from ..evaluate.judge import Judge
from ..evaluate.lm_eval import run_benchmarks
from ..evaluate.predict import predict
from ..gguf.export import GgufExport
from ..kinds import ATTENTION
from ..measure.environment import environment
from ..model.tokens import first_samples
from ..progress import SILENT, Clock, Progress
from ..recipe import PruningRecipe
from ..report.card import read_card, render_card
from ..report.html import render_html
from ..report.maps import head_map, neuron_counts
from ..report.markdown import render_markdown
from ..report.report import Quality, Report, plan_counts
from ..slim.check import compare_cut
from ..slim.config import is_slim
from ..slim.cut import prune_units
from ..slim.refit import Compensation, LayerFit, compensate
from ..tasks import TASKS
from ..values import PruningPlan
from .budgets import BudgetOutcome, CostOutcome, MaxDropOutcome
from .choose import Choice, choose, head_numbers, write_choice
from .export import Exported, check_exports, export, require_exporters
from .measure import Measurements, measure_both
from .prepare import Prepared, prepare
from .provenance import KEY as RECORD
from .provenance import RunRecord
from .quality import Evaluation, Refit, evaluate
from .refitting import compensation_of, shared
from .search import quality_loss


def run(
    recipe: PruningRecipe, *, overwrite: bool = False, command: str | None = None, progress: Progress = SILENT
) -> Report:
    """Run a recipe and write `recipe.output`: scores.json, plan.json, slim/, onnx/ (or gguf/), report.json, .md, .html.

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
        progress.stage("load")
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
    clock = Clock()
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
            progress=progress,
        )
        choice = replace(choice, refit=None)  # its moments may be gigabytes
        budget = confirm_max_drop(prepared, pruned.slim, recipe, choice.budget, progress=progress)
    evaluation = evaluate_run(prepared, pruned.slim, choice.plan, recipe, progress=progress)
    count = processes.world()

    def finish() -> Report:
        write_choice(folder, choice)
        with clock("export"):
            progress.stage("export")
            exported = export(prepared, pruned.slim, recipe, folder / recipe.export.format)
        with clock("measure"):
            measured = measure_both(prepared, pruned.slim, exported, recipe, progress=progress)
        met = budget
        if isinstance(met, CostOutcome):
            met = met.with_measured(flops=measured.flops, parameters=measured.parameters, latency=measured.latency)
        done = _Done(prepared, choice, pruned, evaluation, exported, measured, met, count)
        report = _report(recipe, done, clock.seconds, command)
        _write_report(folder, report, recipe)
        return report

    return processes.on_main(finish)


@dataclass(frozen=True)
class Pruned:
    """The slim model, and how it was checked.

    Attributes:
        slim: The slim model.
        fits: Result of the compensation for each layer; empty without compensation.
        cut_max_abs: Largest absolute difference of any output between the cut and the masked model.
        reload_max_abs: Largest absolute difference of any output between the slim model and its reloaded checkpoint.
    """

    slim: PreTrainedModel
    fits: list[LayerFit]
    cut_max_abs: float
    reload_max_abs: float


@dataclass(frozen=True)
class _Done:
    """Everything that the stages of a run returned."""

    prepared: Prepared
    choice: Choice
    pruned: Pruned
    evaluation: Evaluation
    exported: Exported
    measured: Measurements
    budget: BudgetOutcome
    processes: int


def _report(recipe: PruningRecipe, done: _Done, seconds: dict[str, float], command: str | None) -> Report:
    """Return the report of a run."""
    plan, measured, evaluation = done.choice.plan, done.measured, done.evaluation
    metric = done.prepared.metrics[0]
    heads, neurons = plan_counts(plan)
    return Report(
        model=recipe.model,
        task=recipe.task,
        criterion=plan.criterion,
        alpha=plan.alpha,
        seed=plan.seed,
        heads=heads,
        neurons=neurons,
        parameters=measured.parameters,
        bytes=measured.bytes,
        flops=measured.flops,
        cache_bytes_per_token=measured.cache_bytes_per_token,
        quality=Quality(metric=metric, **asdict(evaluation.metrics[metric])),
        stability=evaluation.stability,
        cut_max_abs=done.pruned.cut_max_abs,
        reload_max_abs=done.pruned.reload_max_abs,
        **_export_differences(done.exported),
        seconds=seconds,
        latency=measured.latency,
        environment={**environment(), "processes": done.processes},
        details=_details(recipe, done, command),
    )


def _details(recipe: PruningRecipe, done: _Done, command: str | None) -> dict[str, Any]:
    """Return the `details` of a report: what its HTML and Markdown show beyond the summary."""
    prepared, plan, evaluation = done.prepared, done.choice.plan, asdict(done.evaluation)
    calibration, split = done.choice.statistics.calibration, recipe.evaluation.split
    file = recipe.data.files[split.partition("[")[0]].name if recipe.data.files else None
    # What is known of every neuron would fill megabytes.
    heads = {name: numbers for name, numbers in head_numbers(done.choice).items() if plan.kept[name].kind == ATTENTION}
    neurons = neuron_counts(plan)
    return {
        "base_model": None if Path(recipe.model).exists() else recipe.model,
        "head_map": head_map(plan),
        "heads": heads,
        **({"neurons": neurons} if neurons else {}),
        "budget": done.budget.details(),
        "metrics": evaluation["metrics"],
        "benchmarks": evaluation["benchmarks"],
        "uncompensated": evaluation["uncompensated"],
        "compensation": [asdict(fit) for fit in done.pruned.fits],
        "alpha_curve": done.choice.alpha_curve,
        "tried": [asdict(tried) for tried in done.choice.tried],
        "stability_of": _prediction_name(recipe),
        "stability_tolerance": recipe.evaluation.stability_tolerance if prepared.regression else None,
        "custom_code": is_slim(done.pruned.slim),
        "flops_per_layer": asdict(done.measured.flops_per_layer),
        "auto_class": TASKS[recipe.task].auto_class,
        **_export_details(done.exported),
        "data": {
            "labels": plan.calibration["labels"],
            "calibration_samples": calibration.samples,
            "calibration_batch": calibration.batch_size,
            "calibration_batch_asked": min(recipe.calibration.batch_size, calibration.samples),
            "evaluation_samples": sum(map(size_of, prepared.evaluation)),
            "evaluation_of": prepared.evaluation_of,
            "evaluation_rows": recipe.evaluation.rows,
            "evaluation_split": split,
            "held_out_samples": sum(map(size_of, prepared.held_out)),
            "held_out_split": recipe.calibration.split if recipe.held_out is None else recipe.held_out.split,
            "held_out_further": recipe.held_out is None,
            "name": recipe.data.name,
            "file": file,
            "fingerprint": calibration.fingerprint,
        },
        RECORD: asdict(
            RunRecord.of(recipe, command=command, commit=getattr(prepared.model.config, "_commit_hash", None))
        ),
    }


def _export_differences(exported: Exported) -> dict[str, float | None]:
    """Return how far the exported model's outputs are from torch's, as fields of a report."""
    if not isinstance(exported, GgufExport):
        return {"onnx_max_abs": exported.max_abs}
    return {"onnx_max_abs": None, "gguf_max_abs": exported.parity.max_abs if exported.parity else None}


def _export_details(exported: Exported) -> dict[str, Any]:
    """Return what the details of a report say of the exported model."""
    if isinstance(exported, GgufExport):
        parity = asdict(exported.parity) if exported.parity else None
        return {"gguf": {"architecture": exported.architecture, "types": exported.types, "parity": parity}}
    return {"onnx": {"inputs": exported.inputs, "outputs": exported.outputs, "fused": exported.fused_ops}}


def _write_report(folder: Path, report: Report, recipe: PruningRecipe) -> None:
    """Write report.json, report.html and report.md, and the model card of slim/."""
    origin = read_card(recipe.model) if Path(recipe.model).exists() else {"base_model": recipe.model}
    (folder / "slim" / "README.md").write_text(render_card(report, origin=origin), encoding="utf-8")
    (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
    (folder / "report.html").write_text(render_html(report), encoding="utf-8")
    (folder / "report.md").write_text(render_markdown(report), encoding="utf-8")


def prune(
    prepared: Prepared,
    plan: PruningPlan,
    recipe: PruningRecipe,
    folder: Path,
    *,
    overwrite: bool = False,
    compensation: Compensation | None = None,
    refit: Refit | None = None,
    progress: Progress,
) -> Pruned:
    """Cut the dense model by a plan, compensate it if the recipe says so, and save it.

    The cut model is compared with the masked one, and the saved checkpoint with its reload.

    Args:
        prepared: The dense model and its data.
        plan: The units to keep.
        recipe: Says whether and how to compensate.
        folder: Where to save the checkpoint.
        overwrite: Replace an existing folder.
        compensation: How to compensate, where the recipe leaves that to the choice of the plan.
        refit: Refits from moments of the same dense model that were collected earlier. Without it, and for
            `sequential`, moments are collected here.
        progress: Shows stages and loops.
    """
    progress.stage("cut")
    model, modules = prepared.model, prepared.sites
    batch = first_samples(prepared.calibration[0])
    slim = prune_units(model, plan, modules)
    cut_max_abs = compare_cut(model, slim, plan, modules, batch)
    fits, section = [], recipe.prune.compensation
    if section is not None:
        progress.stage("compensate")
        if refit and not section.sequential:
            fits = refit(slim, plan.kept)
        else:
            how, limit = compensation or compensation_of(section), section.limit_bytes
            options: dict[str, Any] = {"limit_bytes": limit, "progress": progress}
            rows = prepared.compensation
            fits = shared(slim, modules, lambda: compensate(model, slim, plan, modules, rows, how, **options))
    progress.stage("save")
    reload_max_abs = processes.on_main(
        lambda: save_slim(slim, folder, plan=plan, batch=batch, processor=prepared.processor, overwrite=overwrite)
    )
    return Pruned(slim, fits, cut_max_abs, reload_max_abs)


def evaluate_run(
    prepared: Prepared, slim: PreTrainedModel, plan: PruningPlan, recipe: PruningRecipe, *, progress: Progress
) -> Evaluation:
    """Evaluate the slim model on the evaluation batches and on the recipe's benchmarks."""
    progress.stage("evaluate")
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
        DropError: The metric is worse than the budget allows: compensation did harm.
    """
    if not isinstance(budget, MaxDropOutcome):
        return budget
    progress.stage("confirm")
    judge = Judge.on(prepared.model, prepared.held_out, metrics=(budget.metric,), regression=prepared.regression)
    value = judge.of(predict(slim, prepared.held_out)).metrics[budget.metric]
    lost = quality_loss(budget.metric, budget.dense, value)
    if lost > budget.by:
        raise DropError(
            f"{budget.metric} on the held-out rows may get worse by {budget.by:g}, and the model that was judged kept "
            f"to it, but the compensated one lost {lost:.4g}; compensate on more samples, or not at all"
        )
    return replace(budget, slim=value)


def _prediction_name(recipe: PruningRecipe) -> str:
    """Return the report's word for one prediction: "answer", "next token" or "prediction"."""
    if recipe.data.answer is not None:
        return "answer"
    return "next token" if recipe.task == "text-generation" else "prediction"
