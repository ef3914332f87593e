"""Load what a recipe names, and check before any computing that the run can be done."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..checkpoint.classes import find_model_class, load_config
from ..data.batches import Columns, check_rows, draw_samples, load_processor, make_batches
from ..data.lengths import by_length
from ..data.rows import load_rows
from ..data.targets import is_regression
from ..errors import RequestError, require_package
from ..evaluate.lm_eval import check_benchmarks
from ..evaluate.metrics import check_metrics, default_metrics
from ..model.auto import auto_classes
from ..model.tokens import synthetic_batch
from ..prunable.attention import find_attention, tower_of
from ..recipe import PruningRecipe
from ..runtimes.registry import RUNTIMES, check_runtime
from ..score.criteria import COMPENSATED, uses_alpha
from ..select.constraints import Constraints, check_budget, check_constraints
from ..tasks import AUTO_CLASSES, GENERATIVE
from ..values import PrunableModule
from .bench import check_dtypes, model_shapes

logger = logging.getLogger(__name__)

# How many rows alpha: auto is judged on.
HELD_OUT_SAMPLES = 256
# What a drop is judged on: one of 0.01 is lost in the noise of fewer.
DROP_SAMPLES = 1024


@dataclass(frozen=True)
class Prepared:
    """A recipe's model and data, loaded and found to fit together.

    Attributes:
        model: The dense model, in evaluation mode.
        processor: What turns its rows into tensors.
        sites: All of its attention modules.
        scored: Those that may lose heads.
        calibration: Batches to score on.
        held_out: Batches to choose alpha or sparsity on, which heads are not scored on; empty unless alpha is auto or
            the budget is a max_drop. Like the evaluation's, shortest samples first: they are gone through many times.
        compensation: Batches to refit on, without labels; empty when the recipe asks for none.
        evaluation: Batches to judge on.
        metrics: Names of the metrics, the report's first.
        regression: Whether the model predicts a number.
        runtimes: Names of the runtimes to measure on.
        measured: Batches to measure with, by (batch, sequence).
    """

    model: PreTrainedModel
    processor: Any
    sites: tuple[PrunableModule, ...]
    scored: tuple[PrunableModule, ...]
    calibration: list[dict[str, Tensor]]
    held_out: list[dict[str, Tensor]]
    compensation: list[dict[str, Tensor]]
    evaluation: list[dict[str, Tensor]]
    metrics: tuple[str, ...]
    regression: bool
    runtimes: tuple[str, ...]
    measured: dict[tuple[int, int], dict[str, Tensor]]


def prepare(recipe: PruningRecipe, *, loaded: Prepared | None = None) -> Prepared:
    """Load model and data; cheap checks come first, so that a wrong request fails at once.

    Args:
        recipe: What to load.
        loaded: From a recipe that differs only in its calibration; model and evaluation batches are taken from there.

    Raises:
        RequestError: Something the recipe names is missing or does not fit; the message says what.
    """
    hub: dict[str, Any] = {} if recipe.revision is None else {"revision": recipe.revision}
    config = load_config(recipe.model, **hub)
    model_class = task_class(recipe.model, config, task=recipe.task, **hub)
    regression = recipe.task == "text-classification" and is_regression(config)
    data, calibration, compensation = recipe.data, recipe.calibration, recipe.prune.compensation
    metrics = recipe.evaluation.metrics or default_metrics(
        regression=regression, task=recipe.task, answers=data.answer is not None
    )
    drop = recipe.prune.budget.max_drop
    judged = metrics if drop is None else tuple(dict.fromkeys((*metrics, drop.metric)))
    check_metrics(judged, regression=regression, task=recipe.task)
    if recipe.prune.criterion == COMPENSATED and compensation is None:
        logger.warning(
            "%s ranks heads by what least squares cannot make up for, but prune.compensation is not set, so nothing "
            "makes up for them; add compensation: {method: least_squares}",
            COMPENSATED,
        )
    runtimes = _runtimes(recipe)
    if recipe.evaluation.lm_eval:
        check_benchmarks(recipe.evaluation.lm_eval)
    columns = Columns(text=data.text, image=data.image, label=data.label, prompt=data.prompt, answer=data.answer)
    processor = load_processor(recipe.model, task=recipe.task, revision=recipe.revision)
    shared: dict[str, Any] = {
        "config": config,
        "task": recipe.task,
        "processor": processor,
        "max_length": data.max_length,
        "packing": data.packing,
    }

    def draw(split: str, samples: int | None, seed: int | None = None) -> datasets.Dataset:
        # What generates text has samples that are not rows: blocks of packed text, questions about an image.
        generative = recipe.task in GENERATIVE
        options: dict[str, Any] = {"samples": samples, "shuffle_seed": seed}
        rows = load_rows(name=data.name, files=data.files, split=split, **({} if generative else options))
        check_rows(rows, columns=columns, config=config, task=recipe.task)
        return draw_samples(rows, columns=columns, **shared, **options) if generative else rows

    auto = recipe.prune.alpha == "auto" and uses_alpha(recipe.prune.criterion)
    held_out_samples = DROP_SAMPLES if drop is not None else HELD_OUT_SAMPLES if auto else 0
    compensation_samples = 0 if compensation is None else compensation.samples
    # One draw: first the rows to score on, then those to choose alpha on; refitting starts from the first again.
    most = max(calibration.samples + held_out_samples, compensation_samples)
    drawn = draw(calibration.split, most, calibration.seed)
    if held_out_samples and len(drawn) <= calibration.samples:
        what, remedy = ("alpha: auto", "set alpha") if auto else ("max_drop", "choose another budget")
        raise RequestError(
            f"{what} needs samples beyond the {calibration.samples} to score on, but the split "
            f"{calibration.split!r} has {len(drawn)}; lower calibration.samples or {remedy}"
        )

    def part(start: int, count: int) -> datasets.Dataset:
        return drawn.select(list(range(start, min(start + count, len(drawn)))))

    if loaded is None:
        evaluation_rows = draw(recipe.evaluation.split, recipe.evaluation.samples)
        model = load_dense(recipe.model, model_class, dtype=recipe.dtype, device_map=recipe.device_map, **hub)
    else:
        model = loaded.model
    shared["config"] = model.config
    shapes = [] if recipe.task == "image-text-to-text" else model_shapes(model, recipe.measure.shapes)
    timed = recipe.prune.budget.latency
    if timed is not None and recipe.task != "image-text-to-text":
        shapes = list(dict.fromkeys([*shapes, *model_shapes(model, [timed.shape])]))

    def batches(rows: datasets.Dataset, columns: Columns, batch_size: int) -> list[dict[str, Tensor]]:
        return make_batches(rows, columns=columns, batch_size=batch_size, **shared) if len(rows) else []

    def sorted_batches(rows: datasets.Dataset, batch_size: int) -> list[dict[str, Tensor]]:
        made = batches(rows, columns, batch_size)
        return made and by_length(made, config=model.config)

    if recipe.task in GENERATIVE:
        columns = replace(columns, label=None)  # the right choices are chosen
    size = calibration.batch_size
    calibration_batches = batches(part(0, calibration.samples), columns, size)
    _warn_of_one_class(calibration_batches, regression=regression)
    sites = find_attention(model, few(calibration_batches[0]))
    scored = _in_towers(model, sites, recipe.prune.towers)
    constraints = constraints_of(recipe)
    if recipe.prune.budget.heads is None:
        check_constraints(scored, constraints)
    else:
        check_budget(scored, heads=recipe.prune.budget.heads, constraints=constraints)
    if recipe.task == "image-text-to-text":
        wanted = recipe.measure.shapes or ((1,), (8,))
        measured = _repeated(calibration_batches[0], wanted if timed is None else (*wanted, timed.shape))
    else:
        measured = {s: synthetic_batch(model, batch=s[0], sequence=s[1]) for s in shapes}
    return Prepared(
        model=model,
        processor=processor,
        sites=sites,
        scored=scored,
        calibration=calibration_batches,
        held_out=sorted_batches(part(calibration.samples, held_out_samples), size),
        compensation=batches(part(0, compensation_samples), replace(columns, label=None), size),
        evaluation=loaded.evaluation if loaded else sorted_batches(evaluation_rows, recipe.evaluation.batch_size),
        metrics=tuple(metrics),
        regression=regression,
        runtimes=runtimes,
        measured=measured,
    )


def _warn_of_one_class(batches: list[dict[str, Tensor]], *, regression: bool) -> None:
    """Say so where all rows that heads are scored on are of one class: what tells others apart counts for nothing."""
    labels = [batch["labels"] for batch in batches if "labels" in batch]
    if regression or not labels or labels[0].dim() > 1:
        return
    classes = torch.cat(labels)
    if len(classes) > 1 and len(classes.unique()) == 1:
        logger.warning(
            "all %d calibration rows are of class %d, so heads are scored by that class alone; raise "
            "calibration.samples, change calibration.seed, or shuffle the split",
            len(classes),
            classes[0].item(),
        )


def _runtimes(recipe: PruningRecipe) -> tuple[str, ...]:
    """The runtimes to measure on, all of them installed.

    The parts of a vision-language model are no single graph that could be timed.
    """
    runtimes = recipe.measure.runtimes
    timed = recipe.prune.budget.latency
    if timed is not None:
        runtimes = tuple(dict.fromkeys((*runtimes, timed.runtime)))
    for name in runtimes:
        check_runtime(name)
    check_dtypes(recipe.measure.dtypes, runtimes)
    if recipe.task != "image-text-to-text":
        return runtimes
    exported = [name for name in runtimes if not RUNTIMES[name].reads_models]
    if exported and ("runtimes" in recipe.measure.model_fields_set or timed is not None):
        raise RequestError(
            f"a vision-language model, which is exported in parts, can be timed on torch only, but measure.runtimes "
            f"or the budget names {', '.join(exported)}; set it to torch"
        )
    return tuple(name for name in runtimes if name not in exported)


def _in_towers(
    model: PreTrainedModel, sites: tuple[PrunableModule, ...], towers: tuple[str, ...]
) -> tuple[PrunableModule, ...]:
    """The attention modules in some towers of a composite model; by default those of the language model."""
    of = {site.name: tower_of(model, site) for site in sites}
    known = list(dict.fromkeys(of.values()))
    for tower in towers:
        if tower not in known:
            raise RequestError(
                f"prune.towers must be among {', '.join(known)}, the towers of this model, got {tower!r}"
            )
    wanted = towers or (("language",) if "language" in known else tuple(known))
    return tuple(site for site in sites if of[site.name] in wanted)


def _repeated(
    batch: dict[str, Tensor], shapes: tuple[tuple[int, ...], ...]
) -> dict[tuple[int, int], dict[str, Tensor]]:
    """The longest sample of a batch, as often as each shape's batch says: random tokens would have no image in them."""
    longest = int(batch["attention_mask"].sum(-1).argmax())
    sample = {key: value[longest : longest + 1] for key, value in batch.items() if key != "labels"}
    sizes = dict.fromkeys(shape[0] for shape in shapes)
    sequence = batch["input_ids"].shape[1]
    return {
        (size, sequence): {key: value.repeat(size, *[1] * (value.dim() - 1)) for key, value in sample.items()}
        for size in sizes
    }


def constraints_of(recipe: PruningRecipe) -> Constraints:
    """Return what a recipe's selections are subject to."""
    prune = recipe.prune
    return Constraints(
        allocation=prune.allocation,
        unit=prune.unit,
        min_heads=prune.min_heads,
        keep_layers=prune.keep_layers,
        multiple_of=prune.multiple_of,
    )


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


def load_dense(
    path: str | Path, model_class: Any, *, dtype: str | None = None, device_map: str | None = None, **hub: Any
) -> PreTrainedModel:
    """Load the model to prune, on the GPU if there is one.

    Args:
        path: Folder or Hub id, dense or slim.
        model_class: From `task_class`.
        dtype: Name of a torch dtype, or "auto" for the checkpoint's own; float32 on CPU and "auto" on GPU by default.
        device_map: As in `from_pretrained`; None for one device.
        **hub: Where and how to look on the Hub, as in `from_pretrained`.

    Raises:
        MissingRuntimeError: A device_map is given, and accelerate is not installed.
        RequestError: The checkpoint lacks weights.
    """
    if device_map is not None:
        require_package("accelerate", who="device_map needs", package="accelerate", extra="big")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = dtype or ("float32" if device == "cpu" else "auto")
    model, info = model_class.from_pretrained(
        path,
        dtype=name if name == "auto" else getattr(torch, name),
        device_map=device_map,
        output_loading_info=True,
        **hub,
    )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise RequestError(
            f"a checkpoint must hold all weights of its model, but {path} lacks {len(missing)}, e.g. {missing[0]}; "
            "they would be random"
        )
    return (model if device_map is not None else model.to(device)).eval()
