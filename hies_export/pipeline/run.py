"""The whole line: recipe -> calibrate -> score -> select -> cut -> save -> export -> measure -> report.

`prepare`, `choice`, `quality`, `gains` and this file are the only places where a recipe is unpacked; every stage is a
function that can be called without one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..checkpoint.folders import new_folder, refuse_existing
from ..checkpoint.save import save_slim
from ..data.targets import size_of
from ..errors import DropError
from ..evaluate.predict import predict
from ..measure.environment import environment
from ..progress import Progress, Silent
from ..recipe import PruningRecipe
from ..report.card import read_card, render_card
from ..report.html import render_html
from ..report.markdown import render_markdown
from ..report.report import Quality, Report, UnitCounts
from ..report.rows import head_map
from ..runtimes.ort import require_onnxruntime
from ..slim.check import check_cut
from ..slim.config import is_slim
from ..slim.cut import prune_heads
from ..slim.refit import LayerFit, compensate_heads
from ..tasks import AUTO_CLASSES
from ..values import PruningPlan
from .choose import choose, head_numbers, write_choice
from .gains import export, measure_gains, measured_budget
from .prepare import Prepared, few, prepare
from .quality import Refit, evaluate, held_out_metric
from .search import metric_drop


def run(recipe: PruningRecipe, *, overwrite: bool = False, progress: Progress | None = None) -> Report:
    """Do the whole line and write `recipe.output`: scores.json, plan.json, slim/, onnx/ and report.json, .md and .html.

    The folder appears only when everything is done and checked.

    Args:
        recipe: What to do.
        overwrite: Replace an existing output folder.
        progress: Told about stages and loops.

    Returns:
        The report that was written.

    Raises:
        RequestError: The recipe, the data or the model does not allow the run; raised before anything is computed.
        StepError: A step failed; nothing is left behind.
    """
    progress = progress or Silent()
    refuse_existing(recipe.output, overwrite=overwrite)
    require_onnxruntime()
    progress.stage("load")
    prepared = prepare(recipe)
    with new_folder(recipe.output, overwrite=overwrite) as folder:
        seconds = _Stopwatch()
        with seconds("score"):
            choice = choose(prepared, recipe, progress=progress)
        statistics, plan = choice.statistics, choice.plan
        write_choice(folder, choice)
        with seconds("cut"):
            slim, fits, cut_max_abs, reload_max_abs = prune(
                prepared, plan, recipe, folder / "slim", refit=choice.refit, progress=progress
            )
            choice = replace(choice, refit=None)  # its moments may be gigabytes
            budget = confirm_drop(prepared, slim, recipe, choice.budget, progress=progress)
        quality = evaluate(prepared, slim, plan, recipe, progress=progress)
        with seconds("export"):
            progress.stage("export")
            onnx = export(prepared, slim, recipe, folder / "onnx")
        with seconds("measure"):
            gains = measure_gains(prepared, slim, onnx, recipe, progress=progress)
        report = Report(
            model=recipe.model,
            task=recipe.task,
            criterion=plan.criterion,
            alpha=plan.alpha,
            seed=plan.seed,
            heads=UnitCounts(plan.heads, plan.removed, [len(kept.query) for kept in plan.kept.values()]),
            parameters=gains["parameters"],
            bytes=gains["bytes"],
            flops=gains["flops"],
            cache_bytes_per_token=gains["cache_bytes_per_token"],
            quality=Quality(metric=prepared.metrics[0], **quality["metrics"][prepared.metrics[0]]),
            stability=quality["stability"],
            cut_max_abs=cut_max_abs,
            reload_max_abs=reload_max_abs,
            onnx_max_abs=onnx.max_abs,
            seconds=seconds.spent,
            latency=gains["latency"],
            environment=environment(),
            details={
                "base_model": None if Path(recipe.model).exists() else recipe.model,
                "head_map": head_map(plan),
                "heads": head_numbers(choice),
                "budget": measured_budget(budget, gains),
                "metrics": quality["metrics"],
                "benchmarks": quality["benchmarks"],
                "uncompensated": quality["uncompensated"],
                "compensation": [asdict(fit) for fit in fits],
                "alpha_curve": choice.alpha_curve,
                "stability_of": _predicted(recipe),
                "stability_tolerance": recipe.evaluation.stability_tolerance if prepared.regression else None,
                "custom_code": is_slim(slim),
                "flops_per_layer": gains["flops_per_layer"],
                "auto_class": AUTO_CLASSES[recipe.task],
                "onnx": {"inputs": onnx.inputs, "outputs": onnx.outputs, "fused": onnx.fused_ops},
                "data": {
                    "labels": plan.calibration["labels"],
                    "calibration_samples": statistics.samples,
                    "calibration_batch": statistics.batch_size,
                    "calibration_batch_asked": min(recipe.calibration.batch_size, statistics.samples),
                    "evaluation_samples": sum(map(size_of, prepared.evaluation)),
                    "evaluation_split": recipe.evaluation.split,
                    **_data_source(recipe),
                    "fingerprint": statistics.fingerprint,
                },
            },
        )
        origin = read_card(recipe.model) if Path(recipe.model).exists() else {"base_model": recipe.model}
        (folder / "slim" / "README.md").write_text(render_card(report, origin=origin), encoding="utf-8")
        (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
        (folder / "report.html").write_text(render_html(report), encoding="utf-8")
        (folder / "report.md").write_text(render_markdown(report), encoding="utf-8")
    return report


def confirm_drop(
    prepared: Prepared, slim: PreTrainedModel, recipe: PruningRecipe, budget: Mapping[str, Any], *, progress: Progress
) -> dict[str, Any]:
    """Judge the model that was cut, and refitted, on the rows that its number of heads was chosen on.

    Returns:
        What there is to say of the budget, with `slim`, its metric.

    Raises:
        DropError: It got worse by more than the budget allows: the refit did harm.
    """
    drop = recipe.prune.budget.max_drop
    if drop is None:
        return dict(budget)
    progress.stage("confirm")
    dense_logits = predict(prepared.model, prepared.held_out)
    value = held_out_metric(prepared, recipe, dense_logits, predict(slim, prepared.held_out))
    lost = metric_drop(drop.metric, budget["dense"], value)
    if lost > drop.by:
        raise DropError(
            f"{drop.metric} on the held-out rows may get worse by {drop.by:g}, and the model that was judged kept to "
            f"it, but the compensated one lost {lost:.4g}; compensate on more samples, or not at all"
        )
    return {**budget, "slim": value}


def _data_source(recipe: PruningRecipe) -> dict[str, str | None]:
    """The Hub data set, or the file, that quality was judged on."""
    split = recipe.evaluation.split.partition("[")[0]
    return {"name": recipe.data.name, "file": recipe.data.files[split].name if recipe.data.files else None}


def _predicted(recipe: PruningRecipe) -> str:
    """What a prediction is, whose share that stays the same is the stability."""
    if recipe.data.answer is not None:
        return "answer"
    return "next token" if recipe.task == "text-generation" else "prediction"


def prune(
    prepared: Prepared,
    plan: PruningPlan,
    recipe: PruningRecipe,
    folder: Path,
    *,
    overwrite: bool = False,
    refit: Refit | None = None,
    progress: Progress,
) -> tuple[PreTrainedModel, list[LayerFit], float, float]:
    """Cut by a plan, check against the masked model, compensate if the recipe says so, save, check the reload.

    With `refit`, of the same dense model, moments are not collected again; `sequential` has to.

    Returns:
        The slim model, what compensation did, and the largest output differences of the cut and of the reload.
    """
    progress.stage("cut")
    batch = few(prepared.calibration[0])
    slim = prune_heads(prepared.model, plan, prepared.sites)
    cut_max_abs = check_cut(prepared.model, slim, plan, batch)
    fits, compensation = [], recipe.prune.compensation
    if compensation is not None:
        progress.stage("compensate")
        if refit and not compensation.sequential:
            fits = refit(slim, plan)
        else:
            fits = compensate_heads(
                prepared.model,
                slim,
                plan,
                prepared.sites,
                prepared.compensation,
                **compensation.model_dump(exclude={"samples"}),
                progress=lambda batches: progress.track(batches, "compensate"),
            )
    progress.stage("save")
    reload_max_abs = save_slim(slim, folder, plan=plan, batch=batch, processor=prepared.processor, overwrite=overwrite)
    return slim, fits, cut_max_abs, reload_max_abs


class _Stopwatch:
    """`with seconds("cut"): ...` adds to `seconds.spent["cut"]`."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def __call__(self, name: str) -> _Stopwatch:
        self._name = name
        return self

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.spent[self._name] = time.perf_counter() - self._started
