"""Load the model and data of a recipe, and check that the run is possible before anything is computed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import datasets
import torch
from transformers import PreTrainedModel

from ..checkpoint.classes import load_config
from ..data.batches import Batch
from ..data.generation import GenerationReader
from ..data.lengths import by_length
from ..data.processors import load_processor
from ..data.reader import Columns, Reader
from ..data.registry import reader_for
from ..data.rows import taken_from
from ..data.targets import is_regression
from ..errors import RecipeError, RequestError
from ..evaluate.lm_eval import check_benchmarks
from ..evaluate.metrics import METRICS, check_metrics, default_metrics
from ..model.tokens import first_samples, synthetic_batch
from ..prunable.attention import tower_of
from ..prunable.find import find_modules
from ..recipe import PruningRecipe
from ..runtimes.registry import RUNTIMES, check_runtime, check_task
from ..score.criteria import AUTO, COMPENSATED, COMPENSATED_NAMES, CRITERIA, uses_alpha
from ..select.constraints import Constraints, check_budget, check_constraints
from ..tasks import TASKS
from ..units import PrunableModule
from .bench import check_dtypes, check_runs, check_shapes, model_shapes
from .devices import check_device_map
from .load import Source, load_dense, source_of, task_class

logger = logging.getLogger(__name__)

# Held-out rows on which `alpha: auto` is chosen.
HELD_OUT_SAMPLES = 256
# Held-out rows on which `criterion: auto` is chosen: its candidates differ by few predictions.
AUTO_SAMPLES = 512
# Held-out rows on which `max_drop` is checked: on fewer rows, noise would hide a loss of 0.01.
MAX_DROP_SAMPLES = 1024
# Whatever seed a run has, its quality is that of the same rows.
EVALUATION_SEED = 0


@dataclass(frozen=True)
class Prepared:
    """The model and data of a recipe, loaded and checked.

    Attributes:
        model: The dense model, in evaluation mode.
        processor: The tokenizer or image processor that turns rows into tensors.
        sites: All modules of the model of the kinds to prune.
        scored: The modules that may lose units.
        calibration: Batches to score on.
        held_out: Batches to choose alpha or sparsity on, disjoint from `calibration`; empty unless alpha is auto or the
            budget is max_drop. Shortest samples first, because they are predicted many times.
        compensation: Batches to refit on, without labels; empty if the recipe does not compensate.
        evaluation: Batches to evaluate on, shortest samples first.
        evaluation_of: How many samples the evaluation split has.
        metrics: Names of the metrics; the first is the report's quality.
        regression: Whether the model predicts a number.
        runtimes: Names of the runtimes to measure on.
        measured: Batches to count FLOPs and time with, by (batch, sequence).
        source: How the dense model is stored.
    """

    model: PreTrainedModel
    processor: Any
    sites: tuple[PrunableModule, ...]
    scored: tuple[PrunableModule, ...]
    calibration: list[Batch]
    held_out: list[Batch]
    compensation: list[Batch]
    evaluation: list[Batch]
    evaluation_of: int
    metrics: tuple[str, ...]
    regression: bool
    runtimes: tuple[str, ...]
    measured: dict[tuple[int, int], Batch]
    source: Source


@dataclass(frozen=True)
class _Samples:
    """The samples drawn from the calibration split, by use."""

    scoring: datasets.Dataset
    held_out: datasets.Dataset
    compensation: datasets.Dataset


@dataclass(frozen=True)
class Draws:
    """Numbers of samples to draw from the calibration split.

    Attributes:
        seed: Seed of the order in which samples are drawn.
        scoring: Number of samples to score units on.
        held_out: Number of samples, after those, to choose alpha or sparsity on.
        compensation: Number of samples to refit on, from the start again.
        apart: Whether to take held-out samples that are not refitted on either, as far as there are enough.
    """

    seed: int
    scoring: int
    held_out: int
    compensation: int
    apart: bool = False

    @classmethod
    def of(cls, recipe: PruningRecipe) -> Draws:
        """Return the draws of a run of the recipe."""
        prune = recipe.prune
        held_out = HELD_OUT_SAMPLES if prune.alpha == "auto" and uses_alpha(prune.criterion) else 0
        if prune.criterion == AUTO:
            held_out = AUTO_SAMPLES
        return cls(
            seed=recipe.calibration.seed,
            scoring=recipe.calibration.samples,
            held_out=held_out if prune.budget.max_drop is None else MAX_DROP_SAMPLES,
            compensation=0 if prune.compensation is None else prune.compensation.samples,
            apart=prune.criterion == AUTO,
        )


def prepare(
    recipe: PruningRecipe,
    *,
    draws: Draws | None = None,
    loaded: Prepared | None = None,
    criteria: Sequence[str] | None = None,
) -> Prepared:
    """Load model and data. Cheap checks come first, so that an invalid request fails early.

    Args:
        recipe: The recipe.
        draws: Samples to draw from the calibration split; by default those of a run of the recipe.
        loaded: An earlier result for the same recipe with other draws; its model and evaluation batches are reused.
        criteria: Criteria that must suit the model and the kinds of modules; by default the recipe's.

    Raises:
        RequestError: A part of the recipe is missing or does not fit; the message names it.
    """
    hub: dict[str, Any] = {} if recipe.revision is None else {"revision": recipe.revision}
    config = load_config(recipe.model, **hub)
    model_class = task_class(recipe.model, config, task=recipe.task, **hub)
    regression = TASKS[recipe.task].may_regress and is_regression(config)
    metrics = _check_metrics(recipe, regression=regression)
    _warn_without_compensation(recipe)
    runtimes = _check_runtimes(recipe)
    check_device_map(recipe.device_map)
    reader = _reader(recipe, config)
    samples = _draw(recipe, reader, draws or Draws.of(recipe))
    if loaded is None:
        source: dict[str, Any] = {"name": recipe.data.name, "files": recipe.data.files}
        wanted = recipe.evaluation
        seed = EVALUATION_SEED if wanted.samples is not None and wanted.rows == "drawn" else None
        judged = reader.load(wanted.split, samples=wanted.samples, shuffle_seed=seed, in_order=True, **source)
        _warn_of_fewer("evaluation.samples", wanted.samples or 0, taken_from(judged), wanted.split)
        model = load_dense(recipe.model, model_class, dtype=recipe.dtype, device_map=recipe.device_map, **hub)
    else:
        model = loaded.model
    shapes = _shapes(recipe, model)
    # A tokenizer without a padding token changes the configuration, which must be the model's own.
    reader = replace(reader, config=model.config)
    size, judging = recipe.calibration.batch_size, reader
    if isinstance(reader, GenerationReader) and METRICS[metrics[0]].of == "choices":
        judging = reader.of_choices()
    calibration = reader.batches(samples.scoring, batch_size=size)
    _warn_of_one_class(calibration, regression=regression)
    measured = _measured(model, shapes, calibration[0])
    check_runs(model, first_samples(calibration[0]), "the calibration rows")
    check_shapes(model, measured)
    modules = find_modules(model, first_samples(calibration[0]), kinds=recipe.prune.modules)
    scored = _in_towers(model, modules, recipe.prune.towers)
    _check_kinds(recipe, scored, (recipe.prune.criterion,) if criteria is None else criteria)
    _check_budget(recipe, scored)
    return Prepared(
        model=model,
        processor=reader.processor,
        sites=modules,
        scored=scored,
        calibration=calibration,
        held_out=_shortest_first(judging, samples.held_out, size),
        compensation=reader.unlabelled().batches(samples.compensation, batch_size=size),
        evaluation=loaded.evaluation if loaded else _shortest_first(judging, judged, recipe.evaluation.batch_size),
        evaluation_of=loaded.evaluation_of if loaded else taken_from(judged),
        metrics=metrics,
        regression=regression,
        runtimes=runtimes,
        measured=measured,
        source=loaded.source if loaded else source_of(model, recipe, config, **hub),
    )


def _check_kinds(recipe: PruningRecipe, modules: tuple[PrunableModule, ...], criteria: Sequence[str]) -> None:
    """Refuse criteria that cannot score the modules, and towers without modules of a kind.

    Raises:
        RecipeError: A criterion scores heads and the recipe prunes neurons only, or needs whole key/value groups.
        RequestError: The chosen towers have no modules of a kind that the recipe names.
    """
    prune = recipe.prune
    grouped = any(module.group_size > 1 for module in modules)
    if prune.unit == "query" and not grouped:
        logger.warning(
            "unit: query is the same as unit: group here, because every head of this model has keys and values of its "
            "own: a head that goes takes its part of a cache along"
        )
    for name in criteria:
        criterion = CRITERIA.get(name)
        if criterion and not set(criterion.kinds) & set(prune.modules):
            able = [known.name for known in CRITERIA.values() if set(known.kinds) & set(prune.modules)]
            raise RecipeError(
                [
                    f"criterion {name} scores heads, but prune.modules is [{', '.join(prune.modules)}]; choose one of "
                    f"{', '.join((*able, COMPENSATED, AUTO))}"
                ]
            )
        if name in (*COMPENSATED_NAMES, AUTO) and prune.unit == "query" and grouped:
            raise RecipeError([f"criterion {name} removes whole key/value groups, got unit: query; set unit: group"])
    for kind in prune.modules:
        if kind not in {module.kind for module in modules}:
            raise RequestError(f"prune.modules names {kind}, but the towers to prune have none; change prune.modules")


def _check_budget(recipe: PruningRecipe, modules: tuple[PrunableModule, ...]) -> None:
    """Refuse constraints that are out of range, and a share of heads larger than they allow to remove."""
    if recipe.prune.budget.heads is None:
        check_constraints(modules, constraints_of(recipe))
    else:
        check_budget(modules, heads=recipe.prune.budget.heads, constraints=constraints_of(recipe))


def _check_metrics(recipe: PruningRecipe, *, regression: bool) -> tuple[str, ...]:
    """Return the names of the metrics, the report's first, after checking that metrics and benchmarks fit the task."""
    drop = recipe.prune.budget.max_drop
    named = (*recipe.evaluation.metrics, *(() if drop is None else (drop.metric,)))
    # Of choices, metrics of tokens judge the right ones alone.
    of_tokens = any(name in METRICS and METRICS[name].of == "tokens" for name in named)
    choices = TASKS[recipe.task].generative and recipe.data.label is not None and not of_tokens
    metrics = recipe.evaluation.metrics or default_metrics(
        regression=regression, task=recipe.task, answers=recipe.data.answer is not None, choices=choices
    )
    judged = metrics if drop is None else tuple(dict.fromkeys((*metrics, drop.metric)))
    check_metrics(judged, regression=regression, task=recipe.task, choices=choices)
    if recipe.evaluation.lm_eval:
        check_benchmarks(recipe.evaluation.lm_eval)
    return tuple(metrics)


def _check_runtimes(recipe: PruningRecipe) -> tuple[str, ...]:
    """Return the names of the runtimes to measure on, after checking that all are installed.

    ONNX runtimes are left out for a vision-language model, which is exported as several graphs.
    """
    runtimes = recipe.measure.runtimes
    timed = recipe.prune.budget.latency
    if timed is not None:
        runtimes = tuple(dict.fromkeys((*runtimes, timed.runtime)))
    for name in runtimes:
        check_runtime(name)
        check_task(name, recipe.task)
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
    """Warn if the criterion assumes compensation and the recipe has none."""
    if recipe.prune.criterion in (*COMPENSATED_NAMES, AUTO) and recipe.prune.compensation is None:
        logger.warning(
            "%s ranks units by the errors that least squares leaves, but prune.compensation is not set, so "
            "nothing makes up for them; add compensation: {method: least_squares}",
            recipe.prune.criterion,
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
    """Load the samples of the calibration split, and divide them by use."""
    split = recipe.calibration.split
    source: dict[str, Any] = {"name": recipe.data.name, "files": recipe.data.files}
    own = None
    if draws.held_out and recipe.held_out is not None:
        count = recipe.held_out.samples or draws.held_out
        own = reader.load(recipe.held_out.split, samples=count, shuffle_seed=draws.seed, **source)
        draws = replace(draws, held_out=0)
    most = max(draws.scoring + draws.held_out, draws.compensation + draws.held_out * draws.apart)
    drawn = reader.load(split, samples=most, shuffle_seed=draws.seed, **source)
    if draws.held_out and len(drawn) <= draws.scoring:
        max_drop = recipe.prune.budget.max_drop is not None
        what, remedy = ("alpha: auto", "set alpha")
        if recipe.prune.criterion == AUTO:
            what, remedy = "criterion: auto", "choose a criterion"
        if max_drop:
            what, remedy = "max_drop", "choose another budget"
        raise RequestError(
            f"{what} needs samples beyond the {draws.scoring} to score on, but the split {split!r} has {len(drawn)}; "
            f"lower calibration.samples, name other rows as held_out, or {remedy}"
        )

    _warn_of_fewer("calibration.samples", draws.scoring, len(drawn), split)
    section = recipe.prune.compensation
    # The default is as many as there are, up to a number.
    if section is not None and "samples" in section.model_fields_set:
        _warn_of_fewer("prune.compensation.samples", draws.compensation, len(drawn), split)
    if own is not None and recipe.held_out is not None and recipe.held_out.samples is not None:
        _warn_of_fewer("held_out.samples", recipe.held_out.samples, len(own), recipe.held_out.split)

    def part(start: int, count: int) -> datasets.Dataset:
        return drawn.select(list(range(start, min(start + count, len(drawn)))))

    behind = max(draws.scoring, min(draws.compensation, len(drawn) - draws.held_out) if draws.apart else 0)
    return _Samples(
        scoring=part(0, draws.scoring),
        held_out=part(behind, draws.held_out) if own is None else own,
        compensation=part(0, draws.compensation),
    )


def _warn_of_fewer(field: str, asked: int, there: int, split: str) -> None:
    """Warn if a split has fewer samples than a field of the recipe asks for."""
    if there < asked:
        logger.warning("%s is %s, but the split %r has only %s: all are used", field, f"{asked:,}", split, f"{there:,}")


def _shortest_first(reader: Reader, samples: datasets.Dataset, batch_size: int) -> list[Batch]:
    return by_length(reader.batches(samples, batch_size=batch_size), config=reader.config)


def _warn_of_one_class(batches: Sequence[Batch], *, regression: bool) -> None:
    """Warn if all calibration rows are of one class: scores then ignore what distinguishes the others."""
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
    model: PreTrainedModel, modules: tuple[PrunableModule, ...], towers: tuple[str, ...]
) -> tuple[PrunableModule, ...]:
    """Return the modules in the given towers of a composite model; by default in the language model."""
    of = {module.name: tower_of(model, module) for module in modules}
    known = list(dict.fromkeys(of.values()))
    for tower in towers:
        if tower not in known:
            raise RequestError(
                f"prune.towers must be among {', '.join(known)}, the towers of this model, got {tower!r}"
            )
    wanted = towers or (("language",) if "language" in known else tuple(known))
    return tuple(module for module in modules if of[module.name] in wanted)


def _shapes(recipe: PruningRecipe, model: PreTrainedModel) -> list[tuple[int, int | None]]:
    """Return the (batch, sequence) pairs to measure; the sequence is None if it follows from the prompts."""
    timed = recipe.prune.budget.latency
    if TASKS[recipe.task].in_parts:
        wanted = recipe.measure.shapes or ((1,), (8,))
        return [(shape[0], None) for shape in (wanted if timed is None else (*wanted, timed.shape))]
    budgeted = [] if timed is None else model_shapes(model, [timed.shape])
    return [*model_shapes(model, recipe.measure.shapes), *budgeted]


def _measured(
    model: PreTrainedModel, shapes: Sequence[tuple[int, int | None]], calibration: Batch
) -> dict[tuple[int, int], Batch]:
    """Return a batch for each shape: random tokens or pixels, or copies of the longest calibration sample."""
    measured: dict[tuple[int, int], Batch] = {}
    for size, sequence in shapes:
        if sequence is None:
            # Random tokens would contain no image tokens.
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
    """Return the constraints of a recipe's selections."""
    prune = recipe.prune
    return Constraints(
        allocation=prune.allocation,
        unit=prune.unit,
        min_heads=prune.min_heads,
        keep_layers=prune.keep_layers,
        multiple_of=prune.multiple_of.heads,
        neurons_multiple_of=prune.multiple_of.neurons,
    )
