"""Make and check a `Pruning`: the model, rows and options that scoring, choosing, cutting and comparing take."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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

# Shapes as they are asked for: (batch, sequence), or (batch,) where the model or its rows say how long they are.
AskedShapes = Sequence[tuple[int, ...]]
# Kinds of rows whose predictions rank documents for queries.
SEARCHED = ("queries", "texts")

# Largest share of the judged rows that may be among those that units are fitted on. Even if the fitted rows lose
# nothing, the measured loss is then at least nine tenths of that on new rows.
MOST_SHARED = 0.1


@dataclass(frozen=True)
class Rows:
    """The batches of a pruning by use, shortest samples first where they are judged."""

    score: list[Batch]
    held_out: list[Batch] = field(default_factory=list)  # to choose alphas, criteria and sizes; disjoint from `score`
    refit: list[Batch] = field(default_factory=list)  # to refit cut models on, without labels of classes or numbers
    promise: list[Batch] = field(default_factory=list)  # what a cascade's promise is made on, and nothing else
    evaluation: list[Batch] = field(default_factory=list)  # what both models are compared on
    # Name of a field -> the same samples in the tokens of the whole vocabulary, if it was trimmed.
    untrimmed: Mapping[str, list[Batch]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """A dense model to prune, its rows, and how units are scored and selected; everything was checked.

    How the slim model is exported and timed is another value, the `Delivery`: `serve` and `time_cuts` are its methods.
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
        """The dense model as it was before any trimming of its vocabulary; sizes and promises are relative to it."""
        return self.model if self.trimming is None else self.trimming.dense

    @cached_property
    def flops_table(self) -> CostTable:
        """What every bundle of units saves of the FLOPs at the first shape."""
        batch = next(iter(self.shapes.values()))
        table = flops_table(self.model, self.scored, batch=batch, unit=self.options.unit)
        return replace(table, dense=self._share_after_trimming(lambda model: count_flops(model, batch)))

    def _share_after_trimming(self, count: Callable[[PreTrainedModel], int]) -> float:
        """Return the cost of the model, counted by a function, as a share of the untrimmed model's."""
        return 1.0 if self.trimming is None else count(self.model) / count(self.trimming.dense)

    @cached_property
    def counted_table(self) -> CostTable | None:
        """What every bundle of units saves of what the budget counts; None for a budget that counts no cost."""
        if self.budget.parameters is not None:
            table = parameters_table(self.model, self.scored, unit=self.options.unit)
            return replace(table, dense=self._share_after_trimming(count_parameters))
        return None if self.budget.flops is None else self.flops_table

    def flops_left(self, selection: Selection) -> float:
        """Return the share of the dense model's FLOPs that a selection leaves."""
        return self.flops_table.left(selection, self.scored, unit=self.options.unit)

    def shape_of(self, timed: TimedSection) -> Shape:
        """Return which of `shapes` a budget times: one with its batch and, if there is one, its sequence."""
        of_batch = [shape for shape in self.shapes if shape[0] == timed.batch]
        return next((shape for shape in of_batch if shape[1] == (timed.sequence or self.length)), of_batch[0])

    def judge(self, batches: Sequence[Batch], *, progress: Progress = SILENT, **fields: Any) -> Judge:
        """Return the judge of other models on these batches; `fields` are those of `Judge`, and replace those set here.

        Queries are judged `on_dense_index`, without batches of documents, unless `fields` has another index.
        """
        fields = {"metrics": self.metrics, "task": self.task, **fields}
        judge = Judge(batches, self.dense_predictions(batches, progress), **fields)
        return judge.on_dense_index() if judge.index == "dense" else judge

    def dense_predictions(self, batches: Sequence[Batch], progress: Progress = SILENT) -> Predictions:
        """Return the dense model's predictions of some batches; those of judged `rows` are predicted once.

        If the vocabulary was trimmed, they are of the model as it was, on the batches as it reads them.
        """
        model, inputs = self.model, batches
        for name, untrimmed in self.rows.untrimmed.items():
            if untrimmed and getattr(self.rows, name) is batches:
                model, inputs = self.dense, untrimmed
        for known_model, known_inputs, predictions in self.predicted:
            if known_model is model and known_inputs is inputs:
                return predictions
        predictions = predict(model, inputs, task=self.task, progress=progress)
        if self.trimming is not None and inputs is not batches and predictions.kind == "tokens":
            predictions = self.trimming.renumbered(predictions, self.task.references(inputs))
        if any(rows is batches for rows in (self.rows.held_out, self.rows.promise, self.rows.evaluation)):
            self.predicted.append((model, inputs, predictions))
            warn_if_no_better_than_commonest(self.task, predictions, batches)
        return predictions

    def rows_kind(self, batches: Sequence[Batch]) -> RowsKind | None:
        """Return how rows of texts to embed, or of candidates to rank, belong together; None for other tasks."""
        return kind_of_rows(batches, embeds=self.task.embeds)

    @property
    def promised_metric(self) -> str | None:
        """The metric of which `keep` keeps a share; None if it keeps a share of the predictions."""
        keep = self.budget.keep
        assert keep is not None
        return promised_metric(self.metrics, keep.metric, self.rows_kind(self.rows.held_out))


def promised_metric(metrics: Sequence[str], asked: str | None, kind: RowsKind | None) -> str | None:
    """Return the metric of which a promise keeps a share; None if it keeps a share of the predictions.

    `asked` is the metric that the promise names, if any, and `kind` how the held-out rows belong together.
    """
    if asked is not None:
        return asked
    # What is kept of rankings is a share of a metric, and so is that of metrics with `terms`.
    return metrics[0] if kind is not None or METRICS[metrics[0]].terms is not None else None


def make_pruning(
    model: PreTrainedModel,
    rows: Rows,
    options: PruneSection,
    *,
    task: Task,
    shapes: AskedShapes = (),
    fast: bool = False,
    **fields: Any,
) -> Pruning:
    """Return a pruning, after finding the modules that may lose units and checking that the model runs on the rows.

    The model is also checked at the shapes to time: the `shapes` given, or the usual ones, and that of a budget of
    time. Where a budget of time has no sequence, or a search of the fastest form no shapes, their length is that of the
    rows. `fields` are further fields of the pruning, taken as they are.
    """
    timed = None if options.budget is None else options.budget.timed
    length, first_batch = None, rows.score[0]
    if not task.in_parts and ((fast and not shapes) or (timed is not None and timed.sequence is None)):
        length = row_length(model, rows.held_out or rows.score)
    if task.in_parts:  # images and text: random tokens would contain no image tokens
        batches = _repeated_rows(first_batch, shapes, timed)
    else:
        batches = _random_batches(model, shapes, timed, length, first_batch)
    if task.predicts == "classes":
        warn_of_one_class(rows.score, "calibration", "heads are scored")
        warn_of_one_class(rows.held_out, "held-out", "cuts are judged")
        warn_of_one_class(rows.evaluation, "evaluated", "both models are judged")
    check_model(model, rows.score, task)
    check_shapes(model, batches)
    options = _without_refit_of_few_rows(options, rows)
    modules, scored, options = _find_modules(model, first_samples(first_batch), options)
    options = _with_sequential_decided(options, model, scored, first_samples(first_batch), task)
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
        **fields,
    )


def _without_refit_of_few_rows(options: PruneSection, rows: Rows) -> PruneSection:
    """Return the options without the default refit, and the criterion that assumes it, if rows are too few for one."""
    count = samples_of(rows.refit)
    if options.compensation is None or count >= HELD_OUT_EVERY or "compensation" in options.model_fields_set:
        return options
    logger.warning("nothing is refitted, as that takes %d rows or more, and there are %d", HELD_OUT_EVERY, count)
    criterion = options.criterion if "criterion" in options.model_fields_set else "fisher"
    return options.model_copy(update={"compensation": None, "criterion": criterion})


def _with_sequential_decided(
    options: PruneSection, model: PreTrainedModel, modules: Sequence[PrunableModule], sample: Batch, task: Task
) -> PruneSection:
    """Return the options with `compensation.sequential` decided, if it was left open."""
    compensation = options.compensation
    if compensation is None or compensation.sequential is not None:
        return options
    sequential = task.generative and compensation.method == "least_squares" and compensation.token_weights is None
    if sequential:
        try:
            residual_places(model, modules, sample)
        except RequestError:  # a layer runs more than once, or never, so the layers have no order to refit them in
            sequential = False
    return options.model_copy(update={"compensation": compensation.model_copy(update={"sequential": sequential})})


def _find_modules(
    model: PreTrainedModel, sample: Batch, options: PruneSection
) -> tuple[tuple[PrunableModule, ...], tuple[PrunableModule, ...], PruneSection]:
    """Return all modules of the kinds to prune, those of them that may lose units, and the options with these kinds.

    If the request named no kinds, a kind whose units cannot go is left out with a warning; heads must be able to go.
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


def _random_batches(
    model: PreTrainedModel, shapes: AskedShapes, timed: TimedSection | None, length: int | None, first_batch: Batch
) -> dict[Shape, Batch]:
    """Return a random batch for each shape, or for the usual ones, and for the shape of a budget of time.

    Texts have `length` tokens where no sequence is given, and images the size of those in `first_batch`.
    """
    image = image_shape(first_batch)
    wanted = model_shapes(model, shapes, sequence=length, image=image)
    if timed is not None:
        shape = timed.shape if timed.sequence or length is None else (timed.batch, length)
        wanted += model_shapes(model, [shape], image=image)
    return {shape: synthetic_batch(model, batch=shape[0], sequence=shape[1], image=image) for shape in wanted}


def _repeated_rows(batch: Batch, shapes: AskedShapes, timed: TimedSection | None) -> dict[Shape, Batch]:
    """Return copies of a batch's longest row for each shape, or for 1 and 8 rows, and for a budget of time."""
    check_sizes(shapes)
    longest = int(batch["attention_mask"].sum(-1).argmax()) if "attention_mask" in batch else 0
    row = {key: value[longest : longest + 1] for key, value in inputs_of(batch).items()}
    sizes = [shape[0] for shape in shapes] or [1, 8]
    if timed is not None:
        sizes.append(timed.batch)
    sequence = batch["input_ids"].shape[-1]
    return {(size, sequence): {key: value.repeat_interleave(size, 0) for key, value in row.items()} for size in sizes}


def _in_towers(
    model: PreTrainedModel, modules: tuple[PrunableModule, ...], towers: tuple[str, ...]
) -> tuple[PrunableModule, ...]:
    """Return the modules in the given towers of a composite model; by default in the language model."""
    tower_by_module = {module.name: tower_of(model, module) for module in modules}
    known = list(dict.fromkeys(tower_by_module.values()))
    unknown = [tower for tower in towers if tower not in known]
    if unknown:
        names = ", ".join(known)
        raise RequestError(f"prune.towers must be among {names}, the towers of this model, got {unknown[0]!r}")
    wanted = towers or (("language",) if "language" in known else tuple(known))
    return tuple(module for module in modules if tower_by_module[module.name] in wanted)


def check_pruning(pruning: Pruning, fewest: Looks = Looks()) -> None:  # noqa: B008 (it is frozen)
    """Refuse, before anything is computed, options that do not suit the model or its rows, by a RequestError.

    `fewest` says how often the held-out rows must be looked at for a promise at least, and so how many rows it takes.
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
    if budget.keep is not None and budget.keep.index and pruning.rows_kind(pruning.rows.held_out) not in SEARCHED:
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
    what = "rows" if pruning.rows_kind(pruning.rows.held_out) is None else "queries"
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
    short texts do, are not counted, because new rows may equal them too.
    """
    rows = pruning.rows
    by_use = [sample_contents(use) for use in (rows.score, rows.refit, rows.held_out, rows.promise, rows.evaluation)]
    judged = [*zip(("held-out", "held-out", "evaluated"), by_use[2:], strict=True)]
    counts = [Counter(chain.from_iterable(samples)) for samples in by_use]
    recurring = {content for count_by_content in counts for content, count in count_by_content.items() if count > 1}
    scored, refitted, held_out, promised, _ = counts
    fitted_on = {*scored, *refitted} - recurring
    chosen_on = {*scored, *refitted, *held_out, *promised} - recurring
    for name, samples in judged:
        known, use = fitted_on, "scored or refitted on"
        if name == "evaluated":
            known, use = chosen_on, "scored, refitted or chosen on"
        shared = sum(known.issuperset(sample) for sample in samples)
        if shared <= MOST_SHARED * len(samples):
            continue
        what = f"{shared:,} of the {len(samples):,} {name} rows are among those that units are {use}"
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
