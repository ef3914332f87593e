"""Load what a recipe names, and check before any computing that the run can be done."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import datasets
import torch
from transformers import PreTrainedModel

from ..checkpoint.classes import load_config
from ..data.lengths import by_length
from ..data.processors import load_processor
from ..data.reader import Batch, Columns, Reader
from ..data.registry import reader_for
from ..data.targets import is_regression
from ..errors import RequestError
from ..evaluate.lm_eval import check_benchmarks
from ..evaluate.metrics import check_metrics, default_metrics
from ..model.tokens import first_samples, synthetic_batch
from ..prunable.attention import tower_of
from ..prunable.find import find_modules
from ..recipe import PruningRecipe
from ..runtimes.registry import RUNTIMES, check_runtime
from ..score.criteria import COMPENSATED, uses_alpha
from ..select.constraints import Constraints, check_budget, check_constraints
from ..tasks import TASKS
from ..values import PrunableModule
from .bench import check_dtypes, model_shapes
from .load import load_dense, task_class

logger = logging.getLogger(__name__)

# How many rows alpha: auto is judged on.
HELD_OUT_SAMPLES = 256
# How many rows a quality loss is judged on: one of 0.01 is lost in the noise of fewer.
MAX_DROP_SAMPLES = 1024


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
    calibration: list[Batch]
    held_out: list[Batch]
    compensation: list[Batch]
    evaluation: list[Batch]
    metrics: tuple[str, ...]
    regression: bool
    runtimes: tuple[str, ...]
    measured: dict[tuple[int, int], Batch]


@dataclass(frozen=True)
class _Samples:
    """What is drawn from the calibration split: those to score on, those after them, and those to refit on."""

    scoring: datasets.Dataset
    held_out: datasets.Dataset
    compensation: datasets.Dataset


@dataclass(frozen=True)
class Draws:
    """How many samples of the calibration split are used for what.

    Attributes:
        seed: Of the order that samples are drawn in.
        scoring: To score units on.
        held_out: To choose alpha or sparsity on.
        compensation: To refit on.
    """

    seed: int
    scoring: int
    held_out: int
    compensation: int

    @classmethod
    def of(cls, recipe: PruningRecipe) -> Draws:
        """Return what a run of the recipe draws."""
        prune = recipe.prune
        automatic = prune.alpha == "auto" and uses_alpha(prune.criterion)
        return cls(
            seed=recipe.calibration.seed,
            scoring=recipe.calibration.samples,
            held_out=MAX_DROP_SAMPLES if prune.budget.max_drop is not None else HELD_OUT_SAMPLES * automatic,
            compensation=0 if prune.compensation is None else prune.compensation.samples,
        )


def prepare(recipe: PruningRecipe, *, draws: Draws | None = None, loaded: Prepared | None = None) -> Prepared:
    """Load model and data; cheap checks come first, so that a wrong request fails at once.

    Args:
        recipe: What to load.
        draws: What to draw of the calibration split; by default what a run of the recipe draws.
        loaded: From the same recipe with other draws; model and evaluation batches are taken from there.

    Raises:
        RequestError: Something the recipe names is missing or does not fit; the message says what.
    """
    hub: dict[str, Any] = {} if recipe.revision is None else {"revision": recipe.revision}
    config = load_config(recipe.model, **hub)
    model_class = task_class(recipe.model, config, task=recipe.task, **hub)
    regression = TASKS[recipe.task].may_regress and is_regression(config)
    metrics = _check_metrics(recipe, regression=regression)
    _warn_without_compensation(recipe)
    runtimes = _check_runtimes(recipe)
    reader = _reader(recipe, config)
    samples = _draw(recipe, reader, draws or Draws.of(recipe))
    if loaded is None:
        source: dict[str, Any] = {"name": recipe.data.name, "files": recipe.data.files}
        judged = reader.load(recipe.evaluation.split, samples=recipe.evaluation.samples, **source)
        model = load_dense(recipe.model, model_class, dtype=recipe.dtype, device_map=recipe.device_map, **hub)
    else:
        model = loaded.model
    shapes = _shapes(recipe, model)
    # A tokenizer without a padding token changes the configuration, which must be the model's own.
    reader = replace(reader, config=model.config)
    size = recipe.calibration.batch_size
    calibration = reader.batches(samples.scoring, batch_size=size)
    _warn_of_one_class(calibration, regression=regression)
    sites = find_modules(model, first_samples(calibration[0]))
    scored = _in_towers(model, sites, recipe.prune.towers)
    _check_budget(recipe, scored)
    return Prepared(
        model=model,
        processor=reader.processor,
        sites=sites,
        scored=scored,
        calibration=calibration,
        held_out=_shortest_first(reader, samples.held_out, size),
        compensation=reader.unlabelled().batches(samples.compensation, batch_size=size),
        evaluation=loaded.evaluation if loaded else _shortest_first(reader, judged, recipe.evaluation.batch_size),
        metrics=metrics,
        regression=regression,
        runtimes=runtimes,
        measured=_measured(model, shapes, calibration[0]),
    )


def _check_budget(recipe: PruningRecipe, modules: tuple[PrunableModule, ...]) -> None:
    """Refuse constraints that are out of range, and a share of the heads that they do not leave."""
    if recipe.prune.budget.heads is None:
        check_constraints(modules, constraints_of(recipe))
    else:
        check_budget(modules, heads=recipe.prune.budget.heads, constraints=constraints_of(recipe))


def _check_metrics(recipe: PruningRecipe, *, regression: bool) -> tuple[str, ...]:
    """Return the names of the metrics, the report's first, all of which fit the task; check the benchmarks too."""
    metrics = recipe.evaluation.metrics or default_metrics(
        regression=regression, task=recipe.task, answers=recipe.data.answer is not None
    )
    drop = recipe.prune.budget.max_drop
    judged = metrics if drop is None else tuple(dict.fromkeys((*metrics, drop.metric)))
    check_metrics(judged, regression=regression, task=recipe.task)
    if recipe.evaluation.lm_eval:
        check_benchmarks(recipe.evaluation.lm_eval)
    return tuple(metrics)


def _check_runtimes(recipe: PruningRecipe) -> tuple[str, ...]:
    """Return the runtimes to measure on, all of them installed.

    The parts of a vision-language model are no single graph that could be timed.
    """
    runtimes = recipe.measure.runtimes
    timed = recipe.prune.budget.latency
    if timed is not None:
        runtimes = tuple(dict.fromkeys((*runtimes, timed.runtime)))
    for name in runtimes:
        check_runtime(name)
    check_dtypes(recipe.measure.dtypes, runtimes)
    if not TASKS[recipe.task].in_parts:
        return runtimes
    exported = [name for name in runtimes if not RUNTIMES[name].reads_models]
    if exported and ("runtimes" in recipe.measure.model_fields_set or timed is not None):
        raise RequestError(
            f"a vision-language model, which is exported in parts, can be timed on torch only, but measure.runtimes "
            f"or the budget names {', '.join(exported)}; set it to torch"
        )
    return tuple(name for name in runtimes if name not in exported)


def _warn_without_compensation(recipe: PruningRecipe) -> None:
    """Warn when the criterion counts on a compensation that the recipe does not ask for."""
    if recipe.prune.criterion == COMPENSATED and recipe.prune.compensation is None:
        logger.warning(
            "%s ranks heads by what least squares cannot make up for, but prune.compensation is not set, so nothing "
            "makes up for them; add compensation: {method: least_squares}",
            COMPENSATED,
        )


def _reader(recipe: PruningRecipe, config: Any) -> Reader:
    data = recipe.data
    return reader_for(
        recipe.task,
        columns=Columns(text=data.text, image=data.image, label=data.label, prompt=data.prompt, answer=data.answer),
        config=config,
        processor=load_processor(recipe.model, task=recipe.task, revision=recipe.revision),
        max_length=data.max_length,
        packing=data.packing,
    )


def _draw(recipe: PruningRecipe, reader: Reader, draws: Draws) -> _Samples:
    """Draw all samples of the calibration split at once."""
    split = recipe.calibration.split
    most = max(draws.scoring + draws.held_out, draws.compensation)
    source: dict[str, Any] = {"name": recipe.data.name, "files": recipe.data.files}
    drawn = reader.load(split, samples=most, shuffle_seed=draws.seed, **source)
    if draws.held_out and len(drawn) <= draws.scoring:
        max_drop = recipe.prune.budget.max_drop is not None
        what, remedy = ("max_drop", "choose another budget") if max_drop else ("alpha: auto", "set alpha")
        raise RequestError(
            f"{what} needs samples beyond the {draws.scoring} to score on, but the split {split!r} has {len(drawn)}; "
            f"lower calibration.samples or {remedy}"
        )

    def part(start: int, count: int) -> datasets.Dataset:
        return drawn.select(list(range(start, min(start + count, len(drawn)))))

    return _Samples(
        scoring=part(0, draws.scoring),
        held_out=part(draws.scoring, draws.held_out),
        compensation=part(0, draws.compensation),
    )


def _shortest_first(reader: Reader, samples: datasets.Dataset, batch_size: int) -> list[Batch]:
    return by_length(reader.batches(samples, batch_size=batch_size), config=reader.config)


def _warn_of_one_class(batches: Sequence[Batch], *, regression: bool) -> None:
    """Warn when all rows to score on are of one class: what tells it from the others then counts for nothing."""
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


def _in_towers(
    model: PreTrainedModel, sites: tuple[PrunableModule, ...], towers: tuple[str, ...]
) -> tuple[PrunableModule, ...]:
    """Return the attention modules in some towers of a composite model; by default those of the language model."""
    of = {site.name: tower_of(model, site) for site in sites}
    known = list(dict.fromkeys(of.values()))
    for tower in towers:
        if tower not in known:
            raise RequestError(
                f"prune.towers must be among {', '.join(known)}, the towers of this model, got {tower!r}"
            )
    wanted = towers or (("language",) if "language" in known else tuple(known))
    return tuple(site for site in sites if of[site.name] in wanted)


def _shapes(recipe: PruningRecipe, model: PreTrainedModel) -> list[tuple[int, int | None]]:
    """Return the (batch, sequence) pairs to measure; the sequence is None where it follows from the prompts."""
    timed = recipe.prune.budget.latency
    if TASKS[recipe.task].in_parts:
        wanted = recipe.measure.shapes or ((1,), (8,))
        return [(shape[0], None) for shape in (wanted if timed is None else (*wanted, timed.shape))]
    budgeted = [] if timed is None else model_shapes(model, [timed.shape])
    return [*model_shapes(model, recipe.measure.shapes), *budgeted]


def _measured(
    model: PreTrainedModel, shapes: Sequence[tuple[int, int | None]], calibration: Batch
) -> dict[tuple[int, int], Batch]:
    """Return a batch of each shape: random tokens or pixels, or the longest calibration sample again and again."""
    measured: dict[tuple[int, int], Batch] = {}
    for size, sequence in shapes:
        if sequence is None:
            # Random tokens would have no image in them.
            longest = int(calibration["attention_mask"].sum(-1).argmax())
            measured[size, calibration["input_ids"].shape[1]] = {
                key: value[longest : longest + 1].repeat(size, *[1] * (value.dim() - 1))
                for key, value in calibration.items()
                if key != "labels"
            }
        else:
            measured[size, sequence] = synthetic_batch(model, batch=size, sequence=sequence)
    return measured


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
