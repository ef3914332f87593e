"""Run a recipe: calibrate -> score -> select -> cut -> save -> export -> measure -> report."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import processes
from ..checkpoint.folders import new_folder, refuse_existing
from ..checkpoint.refits import REFIT, RefittedLayers, digest_tensors, load_refit, write_refit
from ..checkpoint.save import save_slim
from ..checkpoint.stored import weight_files
from ..data.targets import samples_of, size_of
from ..errors import DropError, NonFiniteError
from ..evaluate.judge import Judge
from ..evaluate.lm_eval import run_benchmarks
from ..evaluate.metrics import METRICS
from ..evaluate.predict import predict
from ..gguf.export import GgufExport
from ..kinds import ATTENTION
from ..measure.contention import CpuWatch, OtherWork
from ..measure.counts import Both
from ..measure.environment import environment
from ..model.copies import round_each
from ..model.internals import dtypes_in
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
from ..units import PrunableModule
from ..values import PruningPlan
from .budgets import BudgetOutcome, CostOutcome, MaxDropOutcome
from .choose import Choice, choose, head_numbers, write_choice
from .export import Exported, check_exports, export, require_exporters
from .load import Source
from .measure import Measurements, measure_both
from .prepare import Prepared, prepare
from .provenance import KEY as RECORD
from .provenance import RunRecord
from .quality import Evaluation, Refit, evaluate
from .refitting import compensation_of, shared
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
        done = _Done(prepared, choice, pruned, evaluation, exported, measured, met, count, others)
        report = _report(recipe, done, clock.seconds, command)
        _write_report(folder, report, recipe)
        return report

    return processes.on_main(finish)


@dataclass(frozen=True)
class Pruned:
    """The slim model, and how it was checked.

    Attributes:
        slim: The slim model, with the values that were saved: it is rounded to the dtype of its checkpoint.
        plan: Its plan, which names the refitted layers where there are any.
        bytes: Size of the files of weights, of the dense and the slim checkpoint.
        fits: Result of the compensation for each layer; empty without compensation.
        cut_max_abs: Largest absolute difference of any output between the cut and the masked model.
        reload_max_abs: Largest absolute difference of any output between the slim model and its reloaded checkpoint.
    """

    slim: PreTrainedModel
    plan: PruningPlan
    bytes: Both[int]
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
    other_work: OtherWork | None


def _other_work(watch: CpuWatch) -> OtherWork | None:
    """Return what other work used while a single process computed for long, and warn if that mattered; else None."""
    seen = watch.seen() if processes.world() == 1 and watch.seconds >= LONG_SECONDS else None
    if seen is not None and seen.matters:
        logger.warning("%s while this run computed, which took longer than it does on an idle machine", seen)
    return seen


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
        "stability_of": _prediction_name(recipe, prepared.metrics[0]),
        "stability_tolerance": recipe.evaluation.stability_tolerance if prepared.regression else None,
        "custom_code": is_slim(done.pruned.slim),
        "family": {"dense": prepared.model.config.model_type, "slim": done.pruned.slim.config.model_type},
        "other_work": None if done.other_work is None else asdict(done.other_work),
        "flops_per_layer": asdict(done.measured.flops_per_layer),
        "auto_class": TASKS[recipe.task].auto_class,
        **_export_details(done.exported),
        "data": {
            "labels": plan.calibration["labels"],
            "calibration_samples": calibration.samples,
            "calibration_batch": calibration.batch_size,
            "calibration_batch_asked": min(recipe.calibration.batch_size, calibration.samples),
            "compensation_samples": sum(map(size_of, prepared.compensation)),
            "evaluation_samples": samples_of(prepared.evaluation),
            "evaluation_of": prepared.evaluation_of,
            "evaluation_rows": recipe.evaluation.rows,
            "evaluation_split": split,
            "held_out_samples": samples_of(prepared.held_out),
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
    refit: Refit | RefittedLayers | None = None,
    refit_file: Path | None = None,
    progress: Progress,
) -> Pruned:
    """Cut the dense model by a plan, compensate it if the recipe says so, and save it.

    The cut model is compared with the masked one, and the saved checkpoint with its reload. What is saved is rounded to
    the dtype of the checkpoint, and so is the model that is returned: what it is evaluated, exported and timed as is
    what the files hold.

    Args:
        prepared: The dense model and its data.
        plan: The units to keep.
        recipe: Says whether and how to compensate.
        folder: Where to save the checkpoint.
        overwrite: Replace an existing folder.
        compensation: How to compensate, where the recipe leaves that to the choice of the plan.
        refit: Refits from moments of the same dense model that were collected earlier; without it, and for
            `sequential`, moments are collected here. Or the refitted layers themselves.
        refit_file: Where to write the refitted layers of a compensated model; by default into `folder`.
        progress: Shows stages and loops.

    Raises:
        PlanError: The refitted layers are not of this model.
        NonFiniteError: A refitted weight is too large for the dtype to save in.
    """
    progress.stage("cut, and compare with the masked model")
    model, modules = prepared.model, prepared.sites
    batch = first_samples(prepared.calibration[0])
    slim = prune_units(model, plan, modules)
    cut_max_abs = compare_cut(model, slim, plan, modules, batch)
    fits = _compensate(prepared, slim, plan, recipe, compensation=compensation, refit=refit, progress=progress)
    dtypes = _round(slim, prepared.source.dtype)
    refitted = None
    if isinstance(refit, RefittedLayers) or recipe.prune.compensation is not None:
        names = refit.tensors if isinstance(refit, RefittedLayers) else _refitted(slim, modules, fits)
        refitted = {name: _as_stored(slim.get_parameter(name), dtypes.get(name)) for name in names}
    plan = _as_compensated(plan, recipe, refitted)
    progress.stage("save, load again and compare")

    def save() -> tuple[float, int]:
        if refitted is not None and refit_file is not None:
            write_refit(refitted, refit_file)
        max_abs = save_slim(
            slim,
            folder,
            plan=plan,
            batch=batch,
            processor=prepared.processor,
            dtype=prepared.source.dtype,
            refitted=refitted if refit_file is None else None,
            overwrite=overwrite,
        )
        return max_abs, sum(file.stat().st_size for file in weight_files(folder))

    reload_max_abs, size = processes.on_main(save)
    _warn_if_larger(size, prepared.source)
    return Pruned(slim, plan, Both(prepared.source.bytes, size), fits, cut_max_abs, reload_max_abs)


def _compensate(
    prepared: Prepared,
    slim: PreTrainedModel,
    plan: PruningPlan,
    recipe: PruningRecipe,
    *,
    compensation: Compensation | None,
    refit: Refit | RefittedLayers | None,
    progress: Progress,
) -> list[LayerFit]:
    """Refit a cut model in place, as the recipe says, or put refitted layers into it; see `prune`."""
    section = recipe.prune.compensation
    if isinstance(refit, RefittedLayers):
        load_refit(slim, refit)
        return []
    if section is None:
        return []
    progress.stage("refit the output projections")
    if refit and not section.sequential:
        return refit(slim, plan.kept)
    how, rows, modules = compensation or compensation_of(section), prepared.compensation, prepared.sites
    options: dict[str, Any] = {"limit_bytes": section.limit_bytes, "progress": progress}
    return shared(slim, modules, lambda: compensate(prepared.model, slim, plan, modules, rows, how, **options))


def _as_compensated(plan: PruningPlan, recipe: PruningRecipe, refitted: Mapping[str, Tensor] | None) -> PruningPlan:
    """Return a plan that says of the model that is saved with it whether it is compensated, and names its refit."""
    if refitted is None:
        # Of a plan that was made for a compensated model, only the cut was done.
        return replace(plan, compensation={})
    section = recipe.prune.compensation
    method = plan.compensation["method"] if section is None else section.method
    return replace(plan, compensation={"method": method, "refit": digest_tensors(refitted)})


def _warn_if_larger(size: int, source: Source) -> None:
    """Warn if a slim checkpoint has more bytes than its source."""
    if size > source.bytes:
        logger.warning(
            "the slim checkpoint has %.1f MB, more than the %.1f MB of its source, because it is saved in %s; set "
            "save_dtype: auto to save in the dtype of the source",
            size / 1e6,
            source.bytes / 1e6,
            str(source.dtype).removeprefix("torch."),
        )


def _refitted(slim: PreTrainedModel, modules: Sequence[PrunableModule], fits: Sequence[LayerFit]) -> list[str]:
    """Return the names of the parameters that refits changed."""
    consumers = {module.name: module.consumer for module in modules}
    names = []
    for fit in fits:
        found = [name for name, _ in slim.get_submodule(consumers[fit.name]).named_parameters(recurse=False)]
        changed = {"none": (), "bias": ("bias",)}.get(fit.method, ("weight", "bias"))
        names += [f"{consumers[fit.name]}.{name}" for name in found if name in changed]
    return names


def _round(slim: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Round a model, in place, to the dtype it is saved in; return the dtype of every parameter there.

    Raises:
        NonFiniteError: A number is too large for that dtype.
    """
    if dtype == slim.dtype:
        return {}
    dtypes = dtypes_in(slim, dtype)
    if overflown := round_each(slim, dtypes):
        raise NonFiniteError(
            f"weights must fit the dtype they are saved in, but {overflown[0]} has numbers too large for "
            f"{str(dtype).removeprefix('torch.')}; set save_dtype: float32, or raise compensation.ridge"
        )
    return dtypes


def _as_stored(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    return parameter.detach().to(device="cpu", dtype=dtype or parameter.dtype).contiguous()


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
        DropError: The metric is worse than the budget allows: compensation did harm.
    """
    if not isinstance(budget, MaxDropOutcome):
        return budget
    progress.stage("evaluate the slim model on the held-out rows")
    judge = Judge.on(prepared.model, prepared.held_out, metrics=(budget.metric,), regression=prepared.regression)
    value = judge.of(predict(slim, prepared.held_out)).metrics[budget.metric]
    lost = quality_loss(budget.metric, budget.dense, value)
    if lost > budget.by:
        raise DropError(
            f"{budget.metric} on the held-out rows may get worse by {budget.by:g}, and the model that was judged kept "
            f"to it, but the compensated one lost {lost:.4g}; compensate on more samples, or not at all"
        )
    return replace(budget, slim=value)


def _prediction_name(recipe: PruningRecipe, metric: str) -> str:
    """Return the report's word for one prediction: "choice", "answer", "next token" or "prediction"."""
    if METRICS[metric].of == "choices":
        return "choice"
    if recipe.data.answer is not None:
        return "answer"
    return "next token" if recipe.task == "text-generation" else "prediction"
