"""Resolve a recipe: load the model and the rows that it names, and turn its sections into plain options.

Cheap checks come first, so that an impossible request fails early. No stage after this one sees the recipe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import datasets

from ..cascade.cascade import check_classes
from ..cascade.promise import check_rows, confidence_of_each
from ..checkpoint.classes import load_config
from ..data.batches import Batch, by_length
from ..data.generation import GenerationReader
from ..data.processors import load_processor
from ..data.reader import Columns, Reader
from ..data.registry import reader_for
from ..data.rows import taken_from
from ..data.targets import is_regression, samples_of
from ..errors import RequestError
from ..evaluate.interval import rate_rows_needed
from ..evaluate.lm_eval import check_benchmarks
from ..evaluate.metrics import METRICS, check_metrics, default_metrics
from ..measure.exports import ExportOptions
from ..measure.on_rows import ROWS
from ..measure.timing import Timing
from ..recipe import BudgetSection, CompensationSection, PruneSection, PruningRecipe
from ..runtimes.registry import RUNTIMES, check_dtypes, check_runtime
from ..score.criteria import AUTO
from ..select.constraints import Constraints
from ..tasks import TASKS
from .load import Source, check_device_map, load_dense, source_of, task_class
from .measure import MeasureOptions
from .options import (
    Budget,
    CascadeOptions,
    DropBudget,
    KeepBudget,
    LatencyBudget,
    PruneOptions,
    RefitOptions,
    TimedBudget,
)
from .prepare import Judged, Prepared, Rows, check_options, prepare, shapes_to_measure
from .propose import with_held_out

logger = logging.getLogger(__name__)

# Held-out rows on which `alpha: auto` is chosen.
HELD_OUT_SAMPLES = 256
# Held-out rows on which `criterion: auto` is chosen: its candidates differ by few predictions.
AUTO_SAMPLES = 512
# Held-out rows on which `max_drop` is checked: on fewer rows, noise would hide a loss of 0.01.
MAX_DROP_SAMPLES = 1024
# Quality is judged on the same rows, whatever the seed of a run.
EVALUATION_SEED = 0


@dataclass(frozen=True)
class Benchmarks:
    """Names or files of lm-eval's tasks, how many documents of each, and how many go through the model at once."""

    tasks: tuple[str, ...]
    samples: int | None
    batch_size: int


@dataclass(frozen=True)
class Resolved:
    """The loaded model and rows of a recipe, and its requests as plain options."""

    prepared: Prepared
    options: PruneOptions
    evaluation: list[Batch]  # shortest samples first
    evaluation_of: int  # samples that the evaluation split has
    in_order: Callable[[int], list[Batch]]  # the same samples as they come, in batches of a size
    measure: MeasureOptions
    benchmarks: Benchmarks
    source: Source
    cascade: CascadeOptions | None = None


@dataclass(frozen=True)
class Draws:
    """Numbers of samples to draw from the calibration split, in the order of a seed."""

    seed: int
    scoring: int
    held_out: int  # after those to score on
    compensation: int  # from the start again
    apart: bool = False  # whether held-out samples are kept out of the refit too, if there are enough
    promised: int = 0  # held-out samples for a promise, after those for choices

    @classmethod
    def of(cls, options: PruneOptions, *, samples: int, promised: int = 0) -> Draws:
        """Return the draws of a run, by the number of samples to score on and to make a promise on."""
        by_choice = {
            "max_drop": MAX_DROP_SAMPLES,
            "keep": 0 if options.budget.keep is None else options.budget.keep.samples,
            "criterion: auto": AUTO_SAMPLES,
            "alpha: auto": HELD_OUT_SAMPLES,
            None: 0,
        }
        return cls(
            seed=options.seed,
            scoring=samples,
            held_out=by_choice[options.judged_on_held_out] + promised,
            compensation=0 if options.compensation is None else options.compensation.samples,
            apart=options.criterion == AUTO or promised > 0,
            promised=promised,
        )


def resolve(
    recipe: PruningRecipe,
    *,
    options: PruneOptions | None = None,
    draws: Draws | None = None,
    loaded: Resolved | None = None,
    criteria: Sequence[str] | None = None,
    runtimes: tuple[str, ...] | None = None,
) -> Resolved:
    """Load model and rows, and check that the recipe can be run; every argument is by default what the recipe says.

    All `criteria` must suit the model. A model that is already `loaded` is not read again.
    """
    options = options or options_of(recipe)
    if (asked := recipe.cascade) is not None:
        needed = rate_rows_needed(asked.disagreement, confidence_of_each(len(asked.flops)))
        what = f"a disagreement of at most {100 * asked.disagreement:g} %"
        recipe = with_held_out(recipe, needed, what, most=asked.samples)
    hub: dict[str, Any] = {} if recipe.revision is None else {"revision": recipe.revision}
    config = load_config(recipe.model, **hub)
    model_class = task_class(recipe.model, config, task=recipe.task, **hub)
    task = TASKS[recipe.task]
    regression = task.may_regress and is_regression(config)
    judged = Judged(_metrics(recipe, regression=regression), regression, recipe.evaluation.stability_tolerance)
    names = _checked_runtimes(recipe, runtimes_of(recipe, runtimes))
    measure = MeasureOptions(_ways(recipe, names), _timing(recipe))
    check_device_map(recipe.device_map)
    reader = _reader(recipe, config)
    promised = 0 if asked is None else asked.samples
    draws = draws or Draws.of(options, samples=recipe.calibration.samples, promised=promised)
    load = partial(reader.load, name=recipe.data.name, files=recipe.data.files)
    scoring, held_out, compensation = _draw(recipe, load, options, draws)
    first = min(draws.held_out - draws.promised, len(held_out) // 2) if draws.promised else len(held_out)
    places = list(range(len(held_out)))
    held_out, apart = held_out.select(places[:first]), held_out.select(places[first:])
    if loaded is None:
        rows = _evaluated(recipe, load)
        model = load_dense(recipe.model, model_class, dtype=recipe.dtype, device_map=recipe.device_map, **hub)
    else:
        model = loaded.prepared.model
    shapes = shapes_to_measure(model, recipe.measure.shapes, task, options.budget.timed)
    # A tokenizer without a padding token changes the configuration, which must be the model's own.
    reader = replace(reader, config=model.config)
    size, judging = recipe.calibration.batch_size, reader
    if isinstance(reader, GenerationReader) and METRICS[judged.metrics[0]].of == "choices":
        judging = reader.of_choices()
    prepared = prepare(
        model,
        Rows(
            calibration=reader.batches(scoring, batch_size=size),
            held_out=_shortest_first(judging, held_out, size),
            compensation=reader.unlabelled().batches(compensation, batch_size=size),
            promised=_shortest_first(judging, apart, size),
        ),
        kinds=options.modules,
        towers=options.towers,
        processor=reader.processor,
        task=task,
        judged=judged,
        shapes=shapes,
    )
    check_options(prepared, options, criteria=criteria)
    cascade = None
    if asked is not None:
        quantize: Literal["int8"] | None = "int8" if options.export.quantize else None
        confidence = confidence_of_each(len(asked.flops))
        cascade = CascadeOptions(asked.disagreement, asked.flops, quantize, confidence=confidence)
        check_classes(model, model)
        check_rows(samples_of(prepared.rows.promised), asked.disagreement, confidence)
    if loaded is not None:
        return replace(loaded, prepared=prepared, options=options)
    evaluation = _shortest_first(judging, rows, recipe.evaluation.batch_size)
    source = source_of(model, recipe.model, config, asked=recipe.save_dtype or recipe.dtype, **hub)
    benchmarks = Benchmarks(recipe.evaluation.lm_eval, recipe.evaluation.samples, recipe.evaluation.batch_size)
    return Resolved(
        prepared,
        options,
        evaluation,
        taken_from(rows),
        _in_order(judging, rows),
        measure,
        benchmarks,
        source,
        cascade,
    )


def rows_in_order(recipe: PruningRecipe) -> Callable[[int], list[Batch]]:
    """Return a function of a batch size that gives batches of the first 512 evaluation rows, in their order."""
    hub: dict[str, Any] = {} if recipe.revision is None else {"revision": recipe.revision}
    reader = _reader(recipe, load_config(recipe.model, **hub))
    rows = _evaluated(recipe, partial(reader.load, name=recipe.data.name, files=recipe.data.files))
    return _in_order(reader, rows)


def _in_order(reader: Reader, rows: datasets.Dataset) -> Callable[[int], list[Batch]]:
    return lambda size: reader.batches(rows.select(range(min(len(rows), ROWS))), batch_size=size)


def prune_options(
    section: PruneSection, *, seed: int = 0, timing: Timing | None = None, export: ExportOptions | None = None
) -> PruneOptions:
    """Return the options that a section describes."""
    return PruneOptions(
        budget=_budget(section.budget),
        modules=section.modules,
        criterion=section.criterion,
        alpha=None if section.alpha == "auto" else section.alpha,
        normalize=section.normalize,
        constraints=Constraints(
            allocation=section.allocation,
            unit=section.unit,
            min_heads=section.min_heads,
            keep_layers=section.keep_layers,
            multiple_of=section.multiple_of.heads,
            neurons_multiple_of=section.multiple_of.neurons,
        ),
        towers=section.towers,
        steps=section.steps,
        compensation=refit_options(section.compensation),
        timing=timing or Timing(),
        export=export or ExportOptions(),
        seed=seed,
    )


def _budget(section: BudgetSection) -> Budget:
    timed, drop = section.latency, section.max_drop
    return Budget(
        heads=section.heads,
        flops=section.flops,
        parameters=section.parameters,
        latency=None if timed is None else LatencyBudget(**timed.model_dump()),
        max_drop=None if drop is None else DropBudget(drop.metric, drop.by),
        keep=_keep(section),
    )


def _keep(section: BudgetSection) -> KeepBudget | None:
    """Return the promise; if it names a runtime, models are judged and timed there."""
    asked = section.keep
    if asked is None:
        return None
    served = None
    if asked.runtime is not None:
        served = TimedBudget(runtime=asked.runtime, batch=asked.batch, sequence=asked.sequence, dtype=asked.dtype)
    return KeepBudget(asked.predictions, asked.metric, asked.by, served=served, timed=served, samples=asked.samples)


def refit_options(section: CompensationSection | None) -> RefitOptions | None:
    """Return how to refit, None for no section."""
    if section is None:
        return None
    return RefitOptions(
        method=section.method,
        ridge=section.ridge,
        sequential=section.sequential,
        token_weights=section.token_weights,
        samples=section.samples,
        limit_bytes=round(section.memory_gb * (1 << 30)),
    )


def options_of(recipe: PruningRecipe) -> PruneOptions:
    """Return how a recipe prunes, as plain options."""
    return prune_options(
        recipe.prune, seed=recipe.calibration.seed, timing=_timing(recipe), export=export_options(recipe)
    )


def export_options(recipe: PruningRecipe) -> ExportOptions:
    """Return what a recipe exports to, as plain options."""
    return ExportOptions(**recipe.export.model_dump())


def _timing(recipe: PruningRecipe) -> Timing:
    return Timing(repeats=recipe.measure.repeats, min_seconds=recipe.measure.min_seconds)


def _metrics(recipe: PruningRecipe, *, regression: bool) -> tuple[str, ...]:
    """Return the names of the metrics, the report's first, after checking that metrics and benchmarks fit the task."""
    asked = recipe.prune.budget.max_drop or recipe.prune.budget.keep
    extra = () if asked is None or asked.metric is None else (asked.metric,)
    named = (*recipe.evaluation.metrics, *extra)
    # For questions with choices, token metrics judge only the right choices.
    of_tokens = any(name in METRICS and METRICS[name].of == "tokens" for name in named)
    choices = TASKS[recipe.task].generative and recipe.data.label is not None and not of_tokens
    metrics = recipe.evaluation.metrics or default_metrics(
        regression=regression, task=recipe.task, answers=recipe.data.answer is not None, choices=choices
    )
    check_metrics(tuple(dict.fromkeys((*metrics, *extra))), regression=regression, task=recipe.task, choices=choices)
    if recipe.evaluation.lm_eval:
        check_benchmarks(recipe.evaluation.lm_eval)
    return tuple(metrics)


def runtimes_of(recipe: PruningRecipe, wanted: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Return the names of the runtimes to measure on, and the runtime of a latency budget."""
    names, timed = recipe.measure.runtimes if wanted is None else wanted, recipe.prune.budget.timed
    return names if timed is None else tuple(dict.fromkeys((*names, timed.runtime)))


def _checked_runtimes(recipe: PruningRecipe, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the runtimes that can be measured on, after checking that all are installed.

    ONNX runtimes are left out for a vision-language model, which is exported as several graphs.
    """
    task, timed = TASKS[recipe.task], recipe.prune.budget.timed
    for name in names:
        check_runtime(name, task=task.name)
    check_dtypes(recipe.measure.dtypes, names)
    if timed is not None and timed.dtype is not None:
        check_dtypes([timed.dtype], [timed.runtime])
    exported = [name for name in names if not RUNTIMES[name].reads_models] if task.in_parts else []
    if exported and ("runtimes" in recipe.measure.model_fields_set or timed is not None):
        raise RequestError(
            f"a vision-language model, which is exported in parts, can be timed on torch only, but measure.runtimes "
            f"or the budget names {', '.join(exported)}; set it to torch"
        )
    return tuple(name for name in names if name not in exported)


def _ways(recipe: PruningRecipe, names: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    """Return each runtime to measure on with each dtype that it can compute in, and those of a latency budget."""
    ways = [
        (name, dtype)
        for dtype in recipe.measure.dtypes or (None,)
        for name in names
        if dtype is None or dtype in RUNTIMES[name].dtypes
    ]
    timed = recipe.prune.budget.timed
    return tuple(dict.fromkeys([*ways, *([] if timed is None else [(timed.runtime, timed.dtype)])]))


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


def _evaluated(recipe: PruningRecipe, load: Callable[..., datasets.Dataset]) -> datasets.Dataset:
    """Return the samples to evaluate on."""
    wanted = recipe.evaluation
    if recipe.held_out_of_evaluation:
        _, rows = _divided(recipe, load)
        rows = rows.select(range(min(len(rows), wanted.samples or len(rows))))
        _warn_of_fewer("evaluation.samples", wanted.samples or 0, len(rows), wanted.split)
        return rows
    seed = EVALUATION_SEED if wanted.samples is not None and wanted.rows == "drawn" else None
    rows = load(wanted.split, samples=wanted.samples, shuffle_seed=seed, in_order=True)
    _warn_of_fewer("evaluation.samples", wanted.samples or 0, taken_from(rows), wanted.split)
    return rows


def _divided(recipe: PruningRecipe, load: Callable[..., datasets.Dataset]) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return the samples of the evaluated split to hold out, and the others, in the same random order for every run."""
    assert recipe.held_out is not None
    rows = load(recipe.evaluation.split, samples=None, shuffle_seed=EVALUATION_SEED)
    count = recipe.held_out.samples or len(rows) // 2
    if not 0 < count < len(rows):
        raise RequestError(
            f"held_out and evaluation share the split {recipe.evaluation.split!r}, so fewer than its {len(rows):,} "
            f"samples can be held out, got held_out.samples: {count:,}; hold out fewer"
        )
    return rows.select(range(count)), rows.select(range(count, len(rows)))


def _draw(
    recipe: PruningRecipe, load: Callable[..., datasets.Dataset], options: PruneOptions, draws: Draws
) -> tuple[datasets.Dataset, datasets.Dataset, datasets.Dataset]:
    """Return the samples of the calibration split to score on, to choose on and to refit on."""
    split = recipe.calibration.split
    own = None
    if draws.held_out and recipe.held_out is not None:
        count = recipe.held_out.samples or draws.held_out
        if recipe.held_out_of_evaluation:
            own, _ = _divided(recipe, load)
            own = own.select(range(min(count, len(own))))
        else:
            own = load(recipe.held_out.split, samples=count, shuffle_seed=draws.seed)
        draws = replace(draws, held_out=0)
    most = max(draws.scoring + draws.held_out, draws.compensation + draws.held_out * draws.apart)
    drawn = load(split, samples=most, shuffle_seed=draws.seed)
    if draws.held_out and len(drawn) <= draws.scoring:
        what = options.judged_on_held_out or "alpha: auto"
        remedy = {"criterion: auto": "choose a criterion", "alpha: auto": "set alpha"}.get(
            what, "choose another budget"
        )
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
    held_out = part(behind, draws.held_out) if own is None else own
    return part(0, draws.scoring), held_out, part(0, draws.compensation)


def _warn_of_fewer(field: str, asked: int, there: int, split: str) -> None:
    """Warn if a split has fewer samples than a field of the recipe asks for."""
    if there < asked:
        logger.warning("%s is %s, but the split %r has only %s: all are used", field, f"{asked:,}", split, f"{there:,}")


def _shortest_first(reader: Reader, samples: datasets.Dataset, batch_size: int) -> list[Batch]:
    return by_length(reader.batches(samples, batch_size=batch_size), config=reader.config)
