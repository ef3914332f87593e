"""The whole line: recipe -> calibrate -> score -> select -> cut -> save -> export -> measure -> report.

This is the only place where a recipe is unpacked; every stage is a function that can be called without one.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import measure
from .calibrate import collect_statistics
from .compare import latency_row, model_shapes
from .cut import auto_classes, check_cut, is_slim, prune_heads
from .data import Columns, check_rows, is_regression, load_processor, make_batches
from .errors import RequestError
from .evaluate_model import compute_metrics, predict, references, stability
from .export import export_onnx
from .folders import new_folder, refuse_existing
from .layout import find_attention
from .loading import find_model_class, load_config
from .metrics import check_metrics, default_metrics
from .recipe import PruningRecipe
from .report import Report, head_map, render_card, render_markdown
from .rows import load_rows
from .runtimes import require_onnxruntime
from .save import save_slim
from .score import score_heads
from .select import check_budget, select_heads
from .values import AttentionSite, HeadScores, HeadStatistics, PruningPlan, dump_json

T = TypeVar("T")

AUTO_CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
}


class Progress(Protocol):
    """What a run tells about itself while it works."""

    def stage(self, name: str) -> None:
        """A stage begins."""

    def track(self, items: Sequence[T], name: str) -> Iterable[T]:
        """Wrap a loop, e.g. in a progress bar."""


class Silent:
    """Progress that says nothing."""

    def stage(self, name: str) -> None:
        """Say nothing."""

    def track(self, items: Sequence[T], name: str) -> Iterable[T]:
        """Iterate, and say nothing."""
        return items


@dataclass(frozen=True)
class Prepared:
    """A recipe's model and data, loaded and found to fit together.

    Attributes:
        model: The dense model, in evaluation mode.
        processor: Its tokenizer or image processor.
        sites: Its attention modules.
        calibration: Batches to score on.
        evaluation: Batches to judge on.
        metrics: Names of the metrics, the report's first.
        regression: Whether the model predicts a number.
        shapes: (batch, sequence) pairs to measure.
    """

    model: PreTrainedModel
    processor: Any
    sites: tuple[AttentionSite, ...]
    calibration: list[dict[str, Tensor]]
    evaluation: list[dict[str, Tensor]]
    metrics: tuple[str, ...]
    regression: bool
    shapes: list[tuple[int, int]]


def run(recipe: PruningRecipe, *, overwrite: bool = False, progress: Progress | None = None) -> Report:
    """Do the whole line and write `recipe.output`: scores.json, plan.json, slim/, onnx/, report.json, report.md.

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
    if any(name.startswith("onnxruntime") for name in recipe.measure.runtimes):
        require_onnxruntime()
    prepared = prepare(recipe, progress=progress)
    with new_folder(recipe.output, overwrite=overwrite) as folder:
        statistics, scores, plan = choose(prepared, recipe, progress=progress)
        write_choice(folder, statistics, scores, plan)
        report = _finish(prepared, recipe, statistics, plan, folder, progress)
        (folder / "slim" / "README.md").write_text(render_card(report), encoding="utf-8")
        (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
        (folder / "report.md").write_text(render_markdown(report), encoding="utf-8")
    return report


def prepare(recipe: PruningRecipe, *, progress: Progress | None = None) -> Prepared:
    """Load model and data and check, before any computing, that the run can be done.

    Raises:
        RequestError: Something the recipe names is missing or does not fit; the message says what.
    """
    progress = progress or Silent()
    progress.stage("load")
    hub: dict[str, Any] = {} if recipe.revision is None else {"revision": recipe.revision}
    config = load_config(recipe.model, **hub)
    task_class(recipe.model, task=recipe.task, **hub)
    regression = recipe.task == "text-classification" and is_regression(config)
    metrics = recipe.evaluation.metrics or default_metrics(regression=regression)
    check_metrics(metrics, regression=regression)
    columns = Columns(text=recipe.data.text, image=recipe.data.image, label=recipe.data.label)
    source: dict[str, Any] = {"name": recipe.data.name, "files": recipe.data.files}
    calibration = recipe.calibration
    calibration_rows = load_rows(
        **source, split=calibration.split, samples=calibration.samples, shuffle_seed=calibration.seed
    )
    evaluation_rows = load_rows(**source, split=recipe.evaluation.split, samples=recipe.evaluation.samples)
    for rows in (calibration_rows, evaluation_rows):
        check_rows(rows, columns=columns, config=config, task=recipe.task)
    processor = load_processor(recipe.model, task=recipe.task, revision=recipe.revision)
    model = load_dense(recipe.model, task=recipe.task, dtype=recipe.dtype, revision=recipe.revision)
    options = {
        "columns": columns,
        "config": model.config,
        "task": recipe.task,
        "processor": processor,
        "max_length": recipe.data.max_length,
    }
    calibration_batches = make_batches(calibration_rows, batch_size=calibration.batch_size, **options)
    evaluation_batches = make_batches(evaluation_rows, batch_size=recipe.evaluation.batch_size, **options)
    sites = find_attention(model, few(calibration_batches[0]))
    check_budget(sites, **budget_options(recipe))
    return Prepared(
        model=model,
        processor=processor,
        sites=sites,
        calibration=calibration_batches,
        evaluation=evaluation_batches,
        metrics=tuple(metrics),
        regression=regression,
        shapes=model_shapes(model, recipe.measure.shapes),
    )


def task_class(path: str | Path, *, task: str, **hub: Any) -> type[PreTrainedModel]:
    """The model class of a checkpoint, which must be one for the task.

    Raises:
        RequestError: It is for something else.
    """
    model_class = find_model_class(path, **hub)
    if AUTO_CLASSES[task] not in auto_classes(model_class.__name__, load_config(path, **hub).model_type):
        raise RequestError(
            f"{task} needs a model fine-tuned for it (one that {AUTO_CLASSES[task]} loads), but {path} is a "
            f"{model_class.__name__}; fine-tune it for the task first, or change the task"
        )
    return model_class


def load_dense(
    path: str | Path, *, task: str, dtype: str | None = None, revision: str | None = None
) -> PreTrainedModel:
    """Load the model to prune, on the GPU if there is one.

    Args:
        path: Folder or Hub id, dense or slim.
        task: What the model must have been fine-tuned for.
        dtype: Name of a torch dtype, or "auto" for the checkpoint's own; float32 on CPU and "auto" on GPU by default.
        revision: Revision on the Hub.

    Raises:
        RequestError: The checkpoint is for another task, or lacks weights.
    """
    hub: dict[str, Any] = {} if revision is None else {"revision": revision}
    model_class: Any = task_class(path, task=task, **hub)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = dtype or ("float32" if device == "cpu" else "auto")
    model, info = model_class.from_pretrained(
        path, dtype=name if name == "auto" else getattr(torch, name), output_loading_info=True, **hub
    )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise RequestError(
            f"a checkpoint must hold all weights of its model, but {path} lacks {len(missing)}, e.g. {missing[0]}; "
            "they would be random"
        )
    return model.to(device).eval()


def budget_options(recipe: PruningRecipe) -> dict[str, Any]:
    """What `select_heads` needs to know of a recipe."""
    prune = recipe.prune
    return {
        "heads": prune.budget.heads,
        "allocation": prune.allocation,
        "min_heads": prune.min_heads,
        "keep_layers": prune.keep_layers,
    }


def few(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first two samples of a batch: enough to find out where the heads are."""
    return {key: value[:2] for key, value in batch.items()}


def choose(
    prepared: Prepared, recipe: PruningRecipe, *, progress: Progress | None = None
) -> tuple[HeadStatistics, HeadScores, PruningPlan]:
    """Calibrate, score, select."""
    progress = progress or Silent()
    progress.stage("score")
    statistics = collect_statistics(
        prepared.model,
        prepared.calibration,
        prepared.sites,
        progress=lambda batches: progress.track(batches, "score"),
    )
    prune, seed = recipe.prune, recipe.calibration.seed
    scores = score_heads(statistics, criterion=prune.criterion, alpha=prune.alpha, normalize=prune.normalize, seed=seed)
    plan = select_heads(
        scores,
        prepared.sites,
        **budget_options(recipe),
        seed=seed,
        calibration={
            "samples": statistics.samples,
            "labels": statistics.labels,
            "fingerprint": statistics.fingerprint,
        },
    )
    return statistics, scores, plan


def write_choice(folder: Path, statistics: HeadStatistics, scores: HeadScores, plan: PruningPlan) -> None:
    """Write scores.json (statistics and scores per head) and plan.json."""
    written = {
        "criterion": scores.criterion,
        "parameters": scores.parameters,
        "scores": scores.scores,
        "his": statistics.his,
        "entropy": statistics.entropy,
        "weight_l2": statistics.weight_l2,
        "samples": statistics.samples,
        "labels": statistics.labels,
        "fingerprint": statistics.fingerprint,
    }
    (folder / "scores.json").write_text(dump_json(written), encoding="utf-8")
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")


def prune(
    prepared: Prepared,
    plan: PruningPlan,
    folder: Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> tuple[PreTrainedModel, float, float]:
    """Cut by a plan, check against the masked model, save, check the reload.

    Returns:
        The slim model, and the largest output differences of the cut and of the reload.
    """
    progress = progress or Silent()
    progress.stage("cut")
    batch = prepared.calibration[0]
    slim = prune_heads(prepared.model, plan, prepared.sites)
    cut_max_abs = check_cut(prepared.model, slim, plan, batch)
    progress.stage("save")
    reload_max_abs = save_slim(slim, folder, plan=plan, batch=batch, processor=prepared.processor, overwrite=overwrite)
    return slim, cut_max_abs, reload_max_abs


def _finish(
    prepared: Prepared,
    recipe: PruningRecipe,
    statistics: HeadStatistics,
    plan: PruningPlan,
    folder: Path,
    progress: Progress,
) -> Report:
    started = time.perf_counter()
    slim, cut_max_abs, reload_max_abs = prune(prepared, plan, folder / "slim", progress=progress)
    cut_seconds = time.perf_counter() - started

    progress.stage("evaluate")
    dense = prepared.model
    dense_logits = predict(dense, prepared.evaluation, progress=lambda b: progress.track(b, "evaluate dense"))
    slim_logits = predict(slim, prepared.evaluation, progress=lambda b: progress.track(b, "evaluate slim"))
    tolerance = recipe.evaluation.stability_tolerance
    quality = judge(dense_logits, slim_logits, prepared)

    progress.stage("export")
    started = time.perf_counter()
    export_options: dict[str, Any] = {"provider": recipe.export.provider, "dtype": recipe.export.dtype}
    onnx = export_onnx(
        slim,
        folder / "onnx",
        batch=few(prepared.calibration[0]),
        processor=prepared.processor,
        **export_options,
    )
    export_seconds = time.perf_counter() - started

    progress.stage("measure")
    started = time.perf_counter()
    shapes = prepared.shapes
    batches = {s: measure.synthetic_batch(dense, batch=s[0], sequence=s[1]) for s in shapes}
    flops = {s: (measure.count_flops(dense, b), measure.count_flops(slim, b)) for s, b in batches.items()}
    with tempfile.TemporaryDirectory(prefix=".dense-onnx-", dir=folder) as temporary:
        dense_onnx = Path(temporary) / "onnx"
        if any(name.startswith("onnxruntime") for name in recipe.measure.runtimes):
            export_onnx(dense, dense_onnx, batch=few(prepared.calibration[0]), **export_options)
        latency = [
            latency_row(
                name,
                *((dense, slim) if name == "torch" else (dense_onnx, onnx.folder)),
                batch=batches[shape],
                sequence=shape[1],
                flops_ratio=flops[shape][1] / flops[shape][0],
                repeats=recipe.measure.repeats,
            )
            for name, shape in progress.track([(n, s) for n in recipe.measure.runtimes for s in shapes], "measure")
        ]
    measure_seconds = time.perf_counter() - started
    first = shapes[0]
    return Report(
        model=recipe.model,
        task=recipe.task,
        criterion=plan.criterion,
        alpha=plan.alpha,
        seed=plan.seed,
        heads={
            "total": plan.heads,
            "removed": plan.removed,
            "kept_per_layer": [len(kept.query) for kept in plan.kept.values()],
        },
        parameters={"dense": measure.count_parameters(dense), "slim": measure.count_parameters(slim)},
        bytes={
            "dense": measure.parameter_bytes(dense),
            "slim": measure.parameter_bytes(slim),
            "onnx": onnx.bytes,
        },
        flops={"dense": flops[first][0], "slim": flops[first][1], "shape": list(first)},
        quality={"metric": prepared.metrics[0], **quality[prepared.metrics[0]]},
        stability=stability(dense_logits, slim_logits, regression=prepared.regression, tolerance=tolerance),
        cut_max_abs=cut_max_abs,
        reload_max_abs=reload_max_abs,
        onnx_max_abs=onnx.max_abs,
        seconds={
            "score": statistics.seconds,
            "cut": cut_seconds,
            "export": export_seconds,
            "measure": measure_seconds,
        },
        latency=latency,
        environment=measure.environment(),
        details={
            "head_map": head_map(plan),
            "metrics": quality,
            "stability_tolerance": tolerance if prepared.regression else None,
            "custom_code": is_slim(slim),
            "auto_class": AUTO_CLASSES[recipe.task],
            "onnx": {"inputs": onnx.inputs, "outputs": onnx.outputs, "fused": onnx.fused_ops},
            "data": {
                "labels": statistics.labels,
                "calibration_samples": statistics.samples,
                "evaluation_samples": len(dense_logits),
                "evaluation_split": recipe.evaluation.split,
                "fingerprint": statistics.fingerprint,
            },
        },
    )


def judge(dense_logits: Tensor, slim_logits: Tensor, prepared: Prepared) -> dict[str, dict[str, float]]:
    """Metric -> its dense and slim value, over the evaluation batches.

    Without labels the dense model's predictions are the reference, and its own value is perfect by definition.
    """
    if "labels" in prepared.evaluation[0]:
        expected = references(prepared.evaluation)
    else:
        expected = dense_logits.flatten() if prepared.regression else dense_logits.argmax(-1)
    options: dict[str, Any] = {"names": prepared.metrics, "regression": prepared.regression}
    dense = compute_metrics(dense_logits, expected, **options)
    slim = compute_metrics(slim_logits, expected, **options)
    return {name: {"dense": dense[name], "slim": slim[name]} for name in prepared.metrics}
