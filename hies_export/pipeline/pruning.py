"""Hold all that choosing, cutting and comparing need: a `Pruning`, made and checked before the first computation."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ..calibrate.moments import HELD_OUT_EVERY
from ..calibrate.residual import residual_places
from ..data.batches import Batch, image_shape, inputs_of, sample_contents, samples_of
from ..errors import RecipeError, RequestError, UnsupportedModelError
from ..evaluate.interval import CONFIDENCE, LEAST_FOR_LOSS, Looks
from ..evaluate.judge import Judge, warn_if_no_better_than_commonest
from ..evaluate.metrics import METRICS
from ..evaluate.predict import Predictor, predict
from ..evaluate.promise import loss_words
from ..evaluate.ranking import RowsKind, kind_of_rows
from ..kinds import ATTENTION, KINDS
from ..model.tokens import first_samples, synthetic_batch
from ..progress import SILENT, Clock, Progress
from ..recipe.budget import Budget, TimedSection
from ..score.criteria import AUTO, COMPENSATED, CRITERIA, Chain
from ..select.constraints import check_budget, check_constraints
from ..select.cost import CostTable, check_reachable
from ..slim.bundles import flops_table, parameters_table
from ..slim.refit import Refits, check_biases
from ..tasks import Predictions, Task
from ..units.counts import Shape, count_flops, count_parameters
from ..units.find import find_modules
from ..units.heads import tower_of
from ..units.shapes import check_shapes, check_sizes, model_shapes, row_length
from ..units.units import PrunableModule, Selection
from .accept import check_model, warn_of_one_class
from .options import PruneSection

if TYPE_CHECKING:
    from .trimming import Trimming

logger = logging.getLogger(__name__)

# Kinds of rows whose predictions rank documents for queries.
SEARCHED = ("queries", "texts")

# Largest share of the judged rows that may be among those that units are fitted on. Even if the fitted rows lose
# nothing, the measured loss is then at least nine tenths of that on new rows.
MOST_SHARED = 0.1
# Largest share of the judged rows that may repeat others without a warning: short texts recur by themselves.
MOST_REPEATED = 0.25


@dataclass(frozen=True)
class Rows:
    """The batches of a pruning by use, shortest samples first where they are judged."""

    score: list[Batch]
    # What alphas, criteria and sizes are chosen on; disjoint from `score`.
    held_out: list[Batch] = field(default_factory=list)
    # What cut models are refitted on, without labels of classes or numbers.
    refit: list[Batch] = field(default_factory=list)
    # What the promise of a compound is made on, and nothing else.
    promise: list[Batch] = field(default_factory=list)
    # What both models are compared on.
    evaluation: list[Batch] = field(default_factory=list)
    # Name of a field -> the same samples in the tokens of the whole vocabulary, if it was trimmed.
    untrimmed: Mapping[str, list[Batch]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """A dense model to prune, its rows, and how units are scored and selected; everything was checked.

    How the slim model is delivered is another value, the `Delivery`. What choosing needs of it is given as functions.
    """

    model: PreTrainedModel
    processor: Any  # reads the model's inputs; None if nothing does
    task: Task
    modules: tuple[PrunableModule, ...]  # all of the kinds to prune
    scored: tuple[PrunableModule, ...]  # those that may lose units
    rows: Rows
    options: PruneSection  # without a budget, a plan says what stays
    metrics: tuple[str, ...]  # how predictions are compared, the most important first
    shapes: Mapping[Shape, Batch]  # by (batch, sequence), to count or time on; FLOPs are counted on the first
    length: int | None = None  # of the rows in tokens; None unless it stands for a sequence that was not given
    serve: Callable[[TimedSection], Predictor]  # returns what predicts where a model is served
    time_cuts: Callable[[Pruning], CostTable]  # times cuts where the budget says: what every bundle of units saves
    dtype: torch.dtype | None = None  # that the slim model is rounded to; None for that of the dense one
    trimming: Trimming | None = None  # of the vocabulary; `model` is then without the tokens that went
    fast: bool = False  # whether the fastest form is searched for
    seed: int = 0  # of the criterion `random`; plans record it
    progress: Progress = SILENT
    clock: Clock = field(default_factory=Clock)  # seconds by kind of work
    chains: MutableMapping[str, Chain] | None = None  # what was ranked, by module, where a run keeps that
    fits: Refits | None = None  # what was refitted, likewise
    # A model, batches of `rows`, and its predictions of them; added when they are first asked for.
    predicted: list[tuple[PreTrainedModel, Sequence[Batch], Predictions]] = field(default_factory=list, repr=False)

    @property
    def budget(self) -> Budget:
        """How much to remove; an AssertionError where there is no budget, because a plan says what stays."""
        return self.options.goal

    @property
    def cuts_once(self) -> bool:
        """Whether the budget alone says how much goes: nothing is searched or timed for it."""
        return not self.fast and not self.budget.searched and self.budget.timed is None

    @property
    def sample(self) -> Batch:
        """Two rows to score on, enough to compare models on and to trace them."""
        return first_samples(self.rows.score[0])

    @property
    def dense(self) -> PreTrainedModel:
        """The model with all its tokens, which sizes and promises are held against."""
        return self.model if self.trimming is None else self.trimming.dense

    @cached_property
    def flops_table(self) -> CostTable:
        """What every bundle of units saves of the FLOPs at the first shape."""
        batch = next(iter(self.shapes.values()))
        table = flops_table(self.model, self.scored, batch=batch, unit=self.options.unit)
        return replace(table, dense=self._trimmed_to(lambda model: count_flops(model, batch)))

    def _trimmed_to(self, count: Callable[[PreTrainedModel], int]) -> float:
        """Return the share of the untrimmed model's count that trimming the vocabulary left."""
        return 1.0 if self.trimming is None else count(self.model) / count(self.trimming.dense)

    @cached_property
    def counted_table(self) -> CostTable | None:
        """What every bundle of units saves of what the budget counts; None for a budget that counts no cost."""
        if self.budget.parameters is not None:
            table = parameters_table(self.model, self.scored, unit=self.options.unit)
            return replace(table, dense=self._trimmed_to(count_parameters))
        return None if self.budget.flops is None else self.flops_table

    def flops_left(self, selection: Selection) -> float:
        """Return the share of the dense model's FLOPs that a selection leaves."""
        return self.flops_table.left(selection, self.scored, unit=self.options.unit)

    def shape_of(self, timed: TimedSection) -> Shape:
        """Return which of `shapes` a budget times: one with its batch and, if there is one, its sequence."""
        of_batch = [shape for shape in self.shapes if shape[0] == timed.batch]
        return next((shape for shape in of_batch if shape[1] == (timed.sequence or self.length)), of_batch[0])

    def judge(self, batches: Sequence[Batch], *, progress: Progress = SILENT, **how: Any) -> Judge:
        """Return the judge of other models on some rows; `how` are fields of `Judge`.

        With the index "dense", which is the default, the judge leaves out batches of documents.
        """
        dense = self.dense_predictions(batches, progress)
        judge = Judge(batches, dense, **{"metrics": self.metrics, "task": self.task, **how})
        return judge.on_dense_index() if judge.index == "dense" else judge

    def dense_predictions(self, batches: Sequence[Batch], progress: Progress = SILENT) -> Predictions:
        """Return the dense model's predictions of some batches; those of judged `rows` are predicted once.

        If the vocabulary was trimmed, they are of the model as it was, on the batches as it reads them.
        """
        own = next((of for name, of in self.rows.untrimmed.items() if getattr(self.rows, name) is batches), None)
        model, read = (self.dense, own) if own else (self.model, batches)
        for of, rows, predictions in self.predicted:
            if of is model and rows is read:
                return predictions
        found = predict(model, read, task=self.task, progress=progress)
        if self.trimming is not None and own and found.kind == "tokens":
            found = self.trimming.renumbered(found, self.task.references(read))
        if any(rows is batches for rows in (self.rows.held_out, self.rows.promise, self.rows.evaluation)):
            self.predicted.append((model, read, found))
            warn_if_no_better_than_commonest(self.task, found, batches)
        return found

    def kind(self, batches: Sequence[Batch]) -> RowsKind | None:
        """Return how rows of texts to embed, or of candidates to rank, belong together; None for other tasks."""
        return kind_of_rows(batches, embeds=self.task.embeds)

    @property
    def promised_metric(self) -> str | None:
        """The metric of which `keep` keeps a share; None if it keeps a share of the predictions."""
        keep = self.budget.keep
        assert keep is not None
        return promised_metric(self.metrics, keep.metric, self.kind(self.rows.held_out))


def promised_metric(metrics: Sequence[str], asked: str | None, kind: RowsKind | None) -> str | None:
    """Return the metric of which a promise keeps a share; None if it keeps a share of the predictions.

    `asked` is the metric that the promise names, if any, and `kind` how the held-out rows belong together.
    """
    # What is kept of rankings is a share of a metric.
    of_first = kind is not None or METRICS[metrics[0]].terms is not None
    return metrics[0] if asked is None and of_first else asked


def make_pruning(
    model: PreTrainedModel,
    rows: Rows,
    options: PruneSection,
    *,
    task: Task,
    shapes: Sequence[tuple[int, ...]] = (),
    fast: bool = False,
    **known: Any,
) -> Pruning:
    """Find the modules of a model that may lose units, and check that it runs on the rows, and at the shapes to time.

    These are the `shapes` given, or the usual ones, and that of a budget of time. Where a budget of time has no
    sequence, or a search of the fastest form no shapes, their length is that of the rows.
    """
    timed = None if options.budget is None else options.budget.timed
    length, first = None, rows.score[0]
    if not task.in_parts and ((fast and not shapes) or (timed is not None and timed.sequence is None)):
        length = row_length(model, rows.held_out or rows.score)
    batches = _batches_to_time(model, shapes, task, timed, length, first)
    if task.predicts == "classes":
        warn_of_one_class(rows.score, "calibration", "heads are scored")
        warn_of_one_class(rows.held_out, "held-out", "cuts are judged")
        warn_of_one_class(rows.evaluation, "evaluated", "both models are judged")
    check_model(model, rows.score, task)
    check_shapes(model, batches)
    options = _with_enough_to_refit(options, rows)
    modules, scored, options = _find_modules(model, first_samples(first), options)
    options = _with_order(options, model, scored, first_samples(first), task)
    return Pruning(
        model=model,
        task=task,
        modules=modules,
        scored=scored,
        rows=rows,
        options=options,
        shapes=batches,
        length=length,
        fast=fast,
        **known,
    )


def _with_enough_to_refit(options: PruneSection, rows: Rows) -> PruneSection:
    """Return the options without the default refit, if there are too few rows for one."""
    count = samples_of(rows.refit)
    if options.compensation is None or count >= HELD_OUT_EVERY or "compensation" in options.model_fields_set:
        return options
    logger.warning("nothing is refitted, as that takes %d rows or more, and there are %d", HELD_OUT_EVERY, count)
    criterion = options.criterion if "criterion" in options.model_fields_set else "fisher"
    return options.model_copy(update={"compensation": None, "criterion": criterion})


def _with_order(
    options: PruneSection, model: PreTrainedModel, modules: Sequence[PrunableModule], sample: Batch, task: Task
) -> PruneSection:
    """Return the options with `compensation.sequential` decided, if it was left open."""
    how = options.compensation
    if how is None or how.sequential is not None:
        return options
    sequential = task.generative and how.method == "least_squares" and how.token_weights is None
    if sequential:
        try:
            residual_places(model, modules, sample)
        except RequestError:  # a layer runs more than once, or never
            sequential = False
    return options.model_copy(update={"compensation": how.model_copy(update={"sequential": sequential})})


def _find_modules(
    model: PreTrainedModel, sample: Batch, options: PruneSection
) -> tuple[tuple[PrunableModule, ...], tuple[PrunableModule, ...], PruneSection]:
    """Return the modules of the kinds to prune, those that may lose units, and the options with these kinds.

    If nobody named the kinds, units that cannot go are left alone, but for heads.
    """
    by_default = "modules" not in options.model_fields_set
    modules: tuple[PrunableModule, ...] = ()
    why = "the towers to prune have none"
    for kind in options.modules:
        try:
            modules += find_modules(model, sample, kinds=(kind,))
        except UnsupportedModelError as error:
            if kind == ATTENTION or not by_default:
                raise
            why = str(error)
    scored = _in_towers(model, modules, options.towers)
    for kind in options.modules:
        if any(module.kind == kind for module in scored):
            continue
        if kind == ATTENTION or not by_default:
            raise RequestError(f"prune.modules names {kind}, but the towers to prune have none; change prune.modules")
        options = options.model_copy(update={"modules": tuple(other for other in options.modules if other != kind)})
        left = " and ".join(KINDS[other].units for other in options.modules)
        logger.warning("only %s are removed, as %s cannot be: %s", left, KINDS[kind].units, why)
    return modules, scored, options


def _batches_to_time(
    model: PreTrainedModel,
    shapes: Sequence[tuple[int, ...]],
    task: Task,
    timed: TimedSection | None,
    length: int | None,
    first: Batch,
) -> dict[Shape, Batch]:
    """Return a batch for each shape that is given, or for the usual ones, and for the shape of a budget of time.

    They have random tokens, or random pixels in the size of the images of `first`, or copies of its longest sample.
    """
    if not task.in_parts:
        image = image_shape(first)
        wanted = model_shapes(model, shapes, sequence=length, image=image)
        if timed is not None:
            shape = timed.shape if timed.sequence or length is None else (timed.batch, length)
            wanted = [*wanted, *model_shapes(model, [shape], image=image)]
        random = partial(synthetic_batch, model, image=image)
        return {(size, sequence): random(batch=size, sequence=sequence) for size, sequence in wanted}
    check_sizes(shapes)
    # Random tokens would contain no image tokens.
    longest = int(first["attention_mask"].sum(-1).argmax()) if "attention_mask" in first else 0
    return {
        (shape[0], first["input_ids"].shape[-1]): {
            key: value[longest : longest + 1].repeat(shape[0], *[1] * (value.dim() - 1))
            for key, value in inputs_of(first).items()
        }
        for shape in (*(shapes or ((1,), (8,))), *([] if timed is None else [timed.shape]))
    }


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


def check_pruning(pruning: Pruning, fewest: Looks = Looks()) -> None:  # noqa: B008 (it is frozen)
    """Refuse, before anything is computed, options that do not suit the model or its rows, by a RequestError.

    `fewest` are the looks that a promise takes at least, and so how many held-out rows.
    """
    options, budget = pruning.options, pruning.budget
    if options.criterion in (COMPENSATED, AUTO) and options.compensation is None:
        logger.warning(
            "%s ranks units by the errors that least squares leaves, but prune.compensation is not set, so "
            "nothing makes up for them; add compensation: {method: least_squares}",
            options.criterion,
        )
    check_criteria(pruning, options.criterion)
    if options.compensation is not None:
        check_biases(pruning.model, pruning.scored, options.compensation.method)
    if budget.keep is not None and budget.keep.index and pruning.kind(pruning.rows.held_out) not in SEARCHED:
        raise RequestError(
            "keep.index says which vectors of documents queries search, and only embeddings of queries and "
            "documents, or of texts alone, have these; leave it out"
        )
    _check_enough_rows(pruning, fewest)
    if budget.heads:
        check_budget(pruning.scored, heads=budget.heads, constraints=options)
    else:
        check_constraints(pruning.scored, options)
    if (table := pruning.counted_table) is not None and budget.ratio is not None:
        if table.dense <= budget.ratio:
            raise RequestError(
                f"the budget asks for {table.what} at most {budget.ratio:g} of dense, and the tokens that went leave "
                f"{table.dense:.3f} as it is: nothing else has to go; ask for less, or leave the budget out"
            )
        check_reachable(pruning.scored, table, ratio=budget.ratio / table.dense, constraints=options)


def _check_enough_rows(pruning: Pruning, fewest: Looks) -> None:
    """Refuse a promise for which there are too few held-out rows, even if all predictions stayed."""
    keep, count = pruning.budget.keep, samples_of(pruning.rows.held_out)
    if keep is None:
        return
    what = "rows" if pruning.kind(pruning.rows.held_out) is None else "queries"
    if keep.predictions is None:
        asked, needed = loss_words(keep), LEAST_FOR_LOSS
    else:
        asked, needed = f"{keep.predictions:g}", fewest.rows(keep.predictions, pruning.promised_metric)
    if count < needed:
        raise RequestError(
            f"keep: {asked} can be promised with {100 * CONFIDENCE:g} % confidence from {needed:,} held-out {what} or "
            f"more, and there are {count:,}; raise keep.samples, give more rows, or ask for less"
        )


def check_apart(pruning: Pruning) -> None:
    """Refuse a promise about rows that the model is fitted on, and warn of such rows where nothing is promised.

    Rows are identified by what the model reads, whichever files they come from. Rows that recur within one use, as
    short texts do, are not counted, because new rows may equal them too; of many that are judged it warns, as intervals
    count each row for itself.
    """
    rows = pruning.rows
    uses = [sample_contents(use) for use in (rows.score, rows.refit, rows.held_out, rows.promise, rows.evaluation)]
    judged = [*zip(("held-out", "held-out", "evaluated"), uses[2:], strict=True)]
    for name, samples in judged:
        if (repeats := len(samples) - len(set(samples))) > MOST_REPEATED * len(samples):
            logger.warning(
                "%s of the %s %s rows repeat others, so what stays is only known for new rows that repeat as often; "
                "leave copies out, such as those of an oversampled class, before the data are split",
                *(f"{repeats:,}", f"{len(samples):,}", name),
            )
            break
    times = [Counter(chain.from_iterable(samples)) for samples in uses]
    recurring = {content for use in times for content, count in use.items() if count > 1}
    fitted, chosen = (set().union(*use) - recurring for use in (times[:2], times[:4]))
    for name, samples in judged:
        known, of = (
            (chosen, "scored, refitted or chosen on") if name == "evaluated" else (fitted, "scored or refitted on")
        )
        count, shared = len(samples), sum(known.issuperset(sample) for sample in samples)
        if shared <= MOST_SHARED * count:
            continue
        what = f"{shared:,} of the {count:,} {name} rows are among those that units are {of}"
        how = "give files that share no rows, or slices such as train[:80%] and train[80%:]"
        if rows.promise or pruning.budget.searched:
            raise RequestError(f"a promise must be judged on rows of its own, but {what}; {how}")
        logger.warning("%s, and new rows may keep less; %s", what, how)
        return


def check_criteria(pruning: Pruning, *criteria: str) -> None:
    """Refuse criteria that score no units of the kinds to prune."""
    options = pruning.options
    for name in criteria:
        if name in CRITERIA and not set(CRITERIA[name].kinds) & set(options.modules):
            able = [known.name for known in CRITERIA.values() if set(known.kinds) & set(options.modules)]
            raise RecipeError(
                f"criterion {name} scores heads, but prune.modules is [{', '.join(options.modules)}]; choose one "
                f"of {', '.join((*able, COMPENSATED, AUTO))}"
            )
