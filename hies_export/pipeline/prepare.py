"""Find the units that a model can lose, and refuse a request that does not fit it before anything is computed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from ..data.batches import Batch, image_shape, inputs_of, sample_contents, samples_of, size_of
from ..errors import RecipeError, RequestError
from ..evaluate.interval import CONFIDENCE
from ..evaluate.metrics import METRICS
from ..evaluate.predict import Predictor, predict
from ..evaluate.ranking import RowsKind, keeps_predictions, kind_of_rows
from ..forms.exports import Exporter
from ..forms.form import predictor
from ..forms.measure.shapes import RowLength, check_shapes, model_shapes, row_length
from ..kinds import ATTENTION
from ..model.tokens import first_samples, synthetic_batch
from ..recipe.budget import TimedSection
from ..recipe.sections import ExportSection, MeasureSection
from ..score.criteria import AUTO, COMPENSATED, COMPENSATED_NAMES, CRITERIA
from ..select.constraints import check_budget, check_constraints
from ..slim.cut import how_to_skip
from ..tasks import Task
from ..units.find import find_modules
from ..units.heads import tower_of
from ..units.units import PrunableModule
from .accept import check_model
from .draw import Looks
from .recipe import PruneSection

logger = logging.getLogger(__name__)

# Rows may be fitted and judge as well up to this share: even if nothing is lost on them, what is promised is too good
# by a tenth of what it lets go at most.
MOST_SHARED = 0.1


@dataclass(frozen=True)
class Rows:
    """The batches that decide which units a model loses."""

    calibration: list[Batch]  # what units are scored on
    held_out: list[Batch]  # what alpha, the criterion or the sparsity is chosen on, disjoint from `calibration`
    compensation: list[Batch]  # what cut models are refitted on, without labels of classes or numbers
    promised: list[Batch] = field(default_factory=list)  # what a cascade's threshold is chosen on, and nothing else


@dataclass(frozen=True)
class Judged:
    """How predictions are compared: metrics, the most important first, and what the model predicts."""

    metrics: tuple[str, ...]
    task: Task

    def promised(self, asked: str | None, kind: RowsKind | None) -> str | None:
        """Return the metric of which a promise keeps a share; None if it keeps a share of the predictions.

        `asked` is the metric that it names, if it does, and `kind` what the held-out rows are to each other.
        """
        first = self.metrics[0]
        of_first = not keeps_predictions(kind) or METRICS[first].terms is not None
        return first if asked is None and of_first else asked


@dataclass(frozen=True)
class Prepared:
    """A dense model with its prunable modules, the batches that decide which units it loses, and how it is served."""

    model: PreTrainedModel
    processor: Any  # tokenizer, image processor, or processor of both; None if there is none
    task: Task
    modules: tuple[PrunableModule, ...]  # all of the kinds to prune
    scored: tuple[PrunableModule, ...]  # those that may lose units
    rows: Rows
    judged: Judged
    measured: dict[tuple[int, int], Batch]  # to time with, by (batch, sequence); FLOPs are counted on the first
    length: RowLength | None  # of the rows, where it stands for a length that was not given
    exporter: Exporter  # for runtimes that read exports
    timing: MeasureSection  # how often cuts are run, for a budget of time
    seed: int  # of the criterion `random`; plans record it

    @property
    def sample(self) -> Batch:
        """Two rows of the first calibration batch, enough to compare models on and to trace them."""
        return first_samples(self.rows.calibration[0])

    @property
    def on_rows(self) -> bool:
        """Whether a deployment is timed on rows as they come: no shapes are given, and a row is one forward pass."""
        return self.length is not None and not self.task.generative

    def predictor(self, served: TimedSection | None) -> Predictor:
        """Return what predicts as a model is served: exported, on its runtime; torch does where none is named."""
        return predict if served is None else predictor(self.exporter, served.runtime, served.dtype)


def prepare(
    model: PreTrainedModel,
    rows: Rows,
    *,
    kinds: Sequence[str],
    towers: tuple[str, ...] = (),
    processor: Any,
    task: Task,
    judged: Judged,
    shapes: Sequence[tuple[int, ...]] = (),
    timed: TimedSection | None = None,
    deploys: bool = False,
    export: ExportSection | None = None,
    timing: MeasureSection | None = None,
    seed: int = 0,
) -> Prepared:
    """Find the modules of a model that may lose units, and check that it runs on the rows, and at the shapes to time.

    These are the `shapes` given, and that of a budget that is `timed`. If that has no sequence, or if no shapes are
    given for a search of what `deploys` best, the length is that of the rows.

    Only `towers` of a composite model lose units, by default the language model if there is one, and of an
    encoder-decoder all.
    """
    length = None
    if not task.in_parts and ((deploys and not shapes) or (timed is not None and timed.sequence is None)):
        length = row_length(model, rows.held_out or rows.calibration)
    shapes = _shapes(model, shapes, task, timed, length, image_shape(rows.calibration[0]))
    measured = _measured(model, shapes, rows.calibration[0], task)
    check_model(model, rows.calibration, judged.task)
    check_shapes(model, measured)
    modules = find_modules(model, first_samples(rows.calibration[0]), kinds=kinds)
    scored = _in_towers(model, modules, towers)
    for kind in kinds:
        if kind not in {module.kind for module in scored}:
            raise RequestError(f"prune.modules names {kind}, but the towers to prune have none; change prune.modules")
    sample, refitted_on = first_samples(rows.calibration[0]), rows.compensation or rows.calibration
    exporter = Exporter(export or ExportSection(), sample, processor, refitted_on)
    return Prepared(
        model=model,
        processor=processor,
        task=task,
        modules=modules,
        scored=scored,
        rows=rows,
        judged=judged,
        measured=measured,
        length=length,
        exporter=exporter,
        timing=timing or MeasureSection(),
        seed=seed,
    )


def _shapes(
    model: PreTrainedModel,
    shapes: Sequence[tuple[int, ...]],
    task: Task,
    timed: TimedSection | None,
    length: RowLength | None,
    image: Sequence[int] | None,
) -> list[tuple[int, ...]]:
    """Return the shapes for which a request needs batches: those given, or the usual ones, and its budget's."""
    if task.in_parts:
        return [*(shapes or ((1,), (8,))), *([] if timed is None else [timed.shape])]
    tokens = None if length is None else length.tokens
    found = model_shapes(model, shapes, sequence=tokens, image=image)
    if timed is None:
        return [*found]
    shape = timed.shape if timed.sequence or tokens is None else (timed.batch, tokens)
    return [*found, *model_shapes(model, [shape], image=image)]


def _measured(
    model: PreTrainedModel, shapes: Sequence[tuple[int, ...]], calibration: Batch, task: Task
) -> dict[tuple[int, int], Batch]:
    """Return a batch for each shape: random tokens or pixels in the rows' size, or copies of their longest sample."""
    if not task.in_parts:
        image = image_shape(calibration)
        return {
            (size, tokens): synthetic_batch(model, batch=size, sequence=tokens, image=image) for size, tokens in shapes
        }
    # Random tokens would contain no image tokens, and say nothing of how long targets are beside their sources.
    masks = [calibration[name].sum(-1) for name in ("attention_mask", "decoder_attention_mask") if name in calibration]
    longest = max(range(size_of(calibration)), key=lambda row: sum(int(mask[row]) for mask in masks))
    sources = [key for key in inputs_of(calibration) if not key.startswith("decoder_")]
    read = calibration["input_ids" if "input_ids" in sources else sources[0]]
    return {
        (shape[0], read.shape[-1]): {
            key: value[longest : longest + 1].repeat(shape[0], *[1] * (value.dim() - 1))
            for key, value in inputs_of(calibration).items()
        }
        for shape in shapes
    }


def check_options(prepared: Prepared, options: PruneSection, *, criteria: Sequence[str] | None = None) -> None:
    """Refuse, before anything is computed, options that do not suit the model, or `criteria` in place of theirs."""
    _warn_without_compensation(options)
    _check_criteria(options, prepared.scored, (options.criterion,) if criteria is None else criteria)
    _check_enough_rows(prepared, options)
    if options.goal.heads is None:
        check_constraints(prepared.scored, options.constraints)
    else:
        check_budget(prepared.scored, heads=options.goal.heads, constraints=options.constraints)
    if ATTENTION in options.constraints.skippable:
        how_to_skip(prepared.model, prepared.scored)


def _check_enough_rows(prepared: Prepared, options: PruneSection) -> None:
    """Refuse a promise that the held-out rows are too few to confirm even if all predictions stayed."""
    keep, count = options.goal.keep, samples_of(prepared.rows.held_out)
    if keep is None or keep.predictions is None:
        return
    kind = kind_of_rows(prepared.rows.held_out, embeds=prepared.task.embeds)
    metric, what = prepared.judged.promised(keep.metric, kind), "rows" if keeps_predictions(kind) else "queries"
    if count < (needed := Looks().rows(keep.predictions, metric)):
        raise RequestError(
            f"keep: {keep.predictions:g} can be promised with {100 * CONFIDENCE:g} % confidence from {needed:,} "
            f"held-out {what} or more, and there are {count:,}; raise keep.samples, give more rows, or ask for less"
        )


def check_apart(
    prepared: Prepared, options: PruneSection | None, evaluation: Sequence[Batch] = (), *, cascades: bool = False
) -> bool:
    """Refuse a promise about rows that the model is fitted on, and warn of such rows where nothing is promised.

    Rows are told by what the model reads of them, whichever files they come from. Those that recur among rows drawn
    from one split, as short texts do, say nothing: new rows may be like them too. Returns whether others are shared.
    """
    rows = prepared.rows
    drawn = (rows.calibration, rows.compensation, rows.held_out, rows.promised, evaluation)
    parts = [sample_contents(part) for part in drawn]
    times = [Counter(content for sample in part for content in sample) for part in parts]
    recurring = {content for part in times for content, count in part.items() if count > 1}
    fitted, chosen = (set().union(*part) - recurring for part in (times[:2], times[:4]))
    for judged, name, known, of in (
        (parts[2], "held-out", fitted, "scored or refitted on"),
        (parts[3], "held-out", fitted, "scored or refitted on"),
        (parts[4], "evaluated", chosen, "scored, refitted or chosen on"),
    ):
        count, shared = len(judged), sum(known.issuperset(sample) for sample in judged)
        if shared <= MOST_SHARED * count:
            continue
        what = f"{shared:,} of the {count:,} {name} rows are among those that units are {of}"
        how = "give files that share no rows, or slices such as train[:80%] and train[80%:]"
        if cascades or (options is not None and options.goal.kind in ("keep", "max_drop")):
            raise RequestError(f"a promise must be judged on rows of its own, but {what}; {how}")
        logger.warning("%s, and new rows may keep less; %s", what, how)
        return True
    return False


def _warn_without_compensation(options: PruneSection) -> None:
    """Warn if the criterion assumes a refit that is not asked for."""
    if options.criterion in (*COMPENSATED_NAMES, AUTO) and options.compensation is None:
        logger.warning(
            "%s ranks units by the errors that least squares leaves, but prune.compensation is not set, so "
            "nothing makes up for them; add compensation: {method: least_squares}",
            options.criterion,
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
    alone = "language" in known and not model.config.is_encoder_decoder  # there, it is the decoder's tower
    wanted = towers or (("language",) if alone else tuple(known))
    return tuple(module for module in modules if of[module.name] in wanted)


def _check_criteria(options: PruneSection, modules: Sequence[PrunableModule], criteria: Sequence[str]) -> None:
    """Refuse criteria that cannot score the modules: of heads if only neurons go, or of whole key/value groups."""
    by_query = options.constraints.unit == "query"
    grouped = any(module.group_size > 1 for module in modules)
    if by_query and not grouped:
        logger.warning(
            "unit: query is the same as unit: group here, because every head of this model has its own keys and "
            "values: a removed head takes its part of the cache along"
        )
    for name in criteria:
        criterion = CRITERIA.get(name)
        if criterion and not set(criterion.kinds) & set(options.modules):
            able = [known.name for known in CRITERIA.values() if set(known.kinds) & set(options.modules)]
            raise RecipeError(
                [
                    f"criterion {name} scores heads, but prune.modules is [{', '.join(options.modules)}]; choose one "
                    f"of {', '.join((*able, COMPENSATED, AUTO))}"
                ]
            )
        if name in (*COMPENSATED_NAMES, AUTO) and by_query and grouped:
            raise RecipeError([f"criterion {name} removes whole key/value groups, got unit: query; set unit: group"])
