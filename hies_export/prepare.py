"""Load what a recipe names, and check before any computing that the run can be done."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor
from transformers import PreTrainedModel

from .compare import model_shapes
from .cut import auto_classes
from .data import Columns, check_rows, load_processor, make_batches
from .errors import RequestError
from .labels import is_regression
from .layout import find_attention
from .loading import find_model_class, load_config
from .metrics import check_metrics, default_metrics
from .recipe import PruningRecipe
from .rows import load_rows
from .score import uses_alpha
from .select import check_budget
from .values import AttentionSite

# How many rows alpha: auto is judged on.
HELD_OUT_SAMPLES = 256

AUTO_CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
}


@dataclass(frozen=True)
class Prepared:
    """A recipe's model and data, loaded and found to fit together.

    Attributes:
        model: The dense model, in evaluation mode.
        processor: Its tokenizer or image processor.
        sites: Its attention modules.
        calibration: Batches to score on.
        held_out: Batches to choose alpha on, which heads are not scored on; empty unless alpha is auto.
        compensation: Batches to refit on, without labels; empty when the recipe asks for none.
        evaluation: Batches to judge on.
        metrics: Names of the metrics, the report's first.
        regression: Whether the model predicts a number.
        shapes: (batch, sequence) pairs to measure.
    """

    model: PreTrainedModel
    processor: Any
    sites: tuple[AttentionSite, ...]
    calibration: list[dict[str, Tensor]]
    held_out: list[dict[str, Tensor]]
    compensation: list[dict[str, Tensor]]
    evaluation: list[dict[str, Tensor]]
    metrics: tuple[str, ...]
    regression: bool
    shapes: list[tuple[int, int]]


def prepare(recipe: PruningRecipe) -> Prepared:
    """Load model and data; cheap checks come first, so that a wrong request fails at once.

    Raises:
        RequestError: Something the recipe names is missing or does not fit; the message says what.
    """
    hub: dict[str, Any] = {} if recipe.revision is None else {"revision": recipe.revision}
    config = load_config(recipe.model, **hub)
    model_class = task_class(recipe.model, config, task=recipe.task, **hub)
    regression = recipe.task == "text-classification" and is_regression(config)
    metrics = recipe.evaluation.metrics or default_metrics(regression=regression)
    check_metrics(metrics, regression=regression)
    columns = Columns(text=recipe.data.text, image=recipe.data.image, label=recipe.data.label)
    source: dict[str, Any] = {"name": recipe.data.name, "files": recipe.data.files}
    calibration, compensation = recipe.calibration, recipe.prune.compensation
    held_out_samples = HELD_OUT_SAMPLES if recipe.prune.alpha == "auto" and uses_alpha(recipe.prune.criterion) else 0
    compensation_samples = 0 if compensation is None else compensation.samples
    # One draw: first the rows to score on, then those to choose alpha on; refitting starts from the first again.
    most = max(calibration.samples + held_out_samples, compensation_samples)
    drawn = load_rows(**source, split=calibration.split, samples=most, shuffle_seed=calibration.seed)
    if held_out_samples and len(drawn) <= calibration.samples:
        raise RequestError(
            f"alpha: auto needs rows beyond the {calibration.samples} calibration samples, but the split "
            f"{calibration.split!r} has {len(drawn)}; lower calibration.samples or set alpha"
        )

    def part(start: int, count: int) -> datasets.Dataset:
        return drawn.select(list(range(start, min(start + count, len(drawn)))))

    evaluation_rows = load_rows(**source, split=recipe.evaluation.split, samples=recipe.evaluation.samples)
    for rows in (drawn, evaluation_rows):
        check_rows(rows, columns=columns, config=config, task=recipe.task)
    processor = load_processor(recipe.model, task=recipe.task, revision=recipe.revision)
    model = load_dense(recipe.model, model_class, dtype=recipe.dtype, **hub)
    shapes = model_shapes(model, recipe.measure.shapes)
    options: dict[str, Any] = {
        "config": model.config,
        "task": recipe.task,
        "processor": processor,
        "max_length": recipe.data.max_length,
    }

    def batches(rows: datasets.Dataset, columns: Columns, batch_size: int) -> list[dict[str, Tensor]]:
        return make_batches(rows, columns=columns, batch_size=batch_size, **options) if len(rows) else []

    size = calibration.batch_size
    calibration_batches = batches(part(0, calibration.samples), columns, size)
    sites = find_attention(model, few(calibration_batches[0]))
    check_budget(sites, **budget_options(recipe))
    return Prepared(
        model=model,
        processor=processor,
        sites=sites,
        calibration=calibration_batches,
        held_out=batches(part(calibration.samples, held_out_samples), columns, size),
        compensation=batches(part(0, compensation_samples), replace(columns, label=None), size),
        evaluation=batches(evaluation_rows, columns, recipe.evaluation.batch_size),
        metrics=tuple(metrics),
        regression=regression,
        shapes=shapes,
    )


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
    """The first two samples of a batch: enough to find out where the heads are, or to trace a graph."""
    return {key: value[:2] for key, value in batch.items()}


def task_class(path: str | Path, config: Any, *, task: str, **hub: Any) -> type[PreTrainedModel]:
    """The model class of a checkpoint, which must be one for the task.

    Raises:
        RequestError: It is for something else.
    """
    model_class = find_model_class(path, **hub)
    if AUTO_CLASSES[task] not in auto_classes(model_class.__name__, config.model_type):
        raise RequestError(
            f"{task} needs a model fine-tuned for it (one that {AUTO_CLASSES[task]} loads), but {path} is a "
            f"{model_class.__name__}; fine-tune it for the task first, or change the task"
        )
    return model_class


def load_dense(path: str | Path, model_class: Any, *, dtype: str | None = None, **hub: Any) -> PreTrainedModel:
    """Load the model to prune, on the GPU if there is one.

    Args:
        path: Folder or Hub id, dense or slim.
        model_class: From `task_class`.
        dtype: Name of a torch dtype, or "auto" for the checkpoint's own; float32 on CPU and "auto" on GPU by default.
        **hub: Where and how to look on the Hub, as in `from_pretrained`.

    Raises:
        RequestError: The checkpoint lacks weights.
    """
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
