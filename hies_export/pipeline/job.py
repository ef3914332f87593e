"""Make the `Job` of a model: all that is known before the first computation, and checked.

`job_in_memory` makes it from a model and its batches; `load_job`, in a file of its own, from a recipe.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import datasets
import numpy as np
import torch
from transformers import PreTrainedModel

from ..calibrate.moments import HELD_OUT_EVERY
from ..calibrate.residual import residual_places
from ..checkpoint.load import Source, check_in_memory
from ..checkpoint.sentence import Unwrapped
from ..data.batches import Batch, image_shape, inputs_of, sample_contents, samples_of
from ..data.rows import common_values, drawn_order, has_one_value, number_rows, side_by_side, whole
from ..errors import RecipeError, RequestError, UnsupportedModelError
from ..evaluate.interval import CONFIDENCE
from ..evaluate.judge import Judge, warn_if_no_better_than_commonest
from ..evaluate.metrics import METRICS, check_metrics
from ..evaluate.predict import Predictor, predict
from ..evaluate.promise import loss_words
from ..evaluate.ranking import RowsKind, keeps_predictions, kind_of_rows
from ..forms.form import Compound, predictor
from ..forms.formats import Exporter, Given
from ..forms.latency import TimedOn
from ..forms.measured import MeasureOptions
from ..forms.onnx.quantize import check_quantizable
from ..forms.runtimes.base import RUNTIMES, check_dtypes, check_one_graph, check_runtime
from ..kinds import ATTENTION, MLP
from ..model.text_encoder import TextEncoder
from ..model.tokens import first_samples, synthetic_batch
from ..progress import SILENT, Clock, Progress
from ..recipe.budget import Budget, TimedSection
from ..recipe.sections import ComparisonSection, DeploySection, EvaluationSection, ExportSection
from ..report.provenance import Request
from ..score.criteria import AUTO, COMPENSATED, CRITERIA
from ..select.constraints import check_budget, check_constraints
from ..select.cost import CostTable, check_reachable
from ..slim.bundles import flops_table, parameters_table
from ..slim.refit import check_biases
from ..tasks import Predictions, Task, task_of
from ..tasks.given import batches_of, first_rows, split_held_out, unlabelled, usual_columns
from ..tasks.registry import refuse_unknown
from ..units.counts import Shape, count_flops, count_parameters
from ..units.find import find_modules
from ..units.heads import tower_of
from ..units.shapes import RowLength, check_shapes, check_sizes, model_shapes, row_length
from ..units.units import PrunableModule, Selection
from ..vocabulary.recut import in_new_numbers
from .accept import check_model, warn_of_one_class
from .draw import LEAST_FOR_LOSS, Splits, all_looks
from .journal import Journal
from .recipe import PruneSection
from .trimming import PER_SAMPLE, Reading, Trimming, beside_whole, recut_of, trim_in_memory

logger = logging.getLogger(__name__)

# Largest share of the judged rows that may be among those that units are fitted on. Even if the fitted rows lose
# nothing, the measured loss is then at least nine tenths of that on new rows.
MOST_SHARED = 0.1
# Largest share of the judged rows that may repeat others without a warning: short texts recur by themselves.
MOST_REPEATED = 0.25


@dataclass(frozen=True)
class Rows:
    """The batches of a job by use, shortest samples first where they are judged.

    Attributes:
        score: What units are scored on.
        held_out: What alphas, criteria and sizes are chosen on; disjoint from `score`.
        refit: What cut models are refitted on, without labels of classes or numbers.
        promise: What the promise of a compound is made on, and nothing else.
        evaluation: What both models are compared on.
        in_order: The first evaluation rows as they come, in batches of a size, to time on; None in memory.
        splits: Where they were read from; None in memory.
        evaluation_of: How many samples the evaluated split has.
        in_dense: Name of a field -> the same samples in the tokens of the whole vocabulary, if it was trimmed.
    """

    score: list[Batch]
    held_out: list[Batch] = field(default_factory=list)
    refit: list[Batch] = field(default_factory=list)
    promise: list[Batch] = field(default_factory=list)
    evaluation: list[Batch] = field(default_factory=list)
    in_order: Callable[[int], list[Batch]] | None = None
    splits: Splits | None = None
    evaluation_of: int = 0
    in_dense: Mapping[str, list[Batch]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A dense model to prune, its rows, and what is asked for; everything was checked.

    Attributes:
        model, processor, task: The model, what reads its inputs (None if nothing does), and what it predicts.
        modules, scored: All modules of the kinds to prune, and those that may lose units.
        rows: The batches by use.
        options: How units are scored and selected; without a budget, a plan says what stays.
        metrics: How predictions are compared, the most important metric first.
        shapes: A batch to time with by (batch, sequence); FLOPs are counted on the first.
        length: Length of the rows; None unless it stands for a sequence that was not given.
        exporter: What exports models for runtimes that read files, by the options of the recipe.
        given: What the model was taken from, such as a SentenceTransformer; it also wraps slim models.
        measure: Which runtimes to time on, and how often.
        evaluation: How it is judged.
        compound: How to join both models.
        deploy: What to search for in place of a budget.
        source: How the dense model is stored; None in memory.
        asked: The fields of the recipe, for the report; None in memory.
        trimming: The model as it was, if its vocabulary was trimmed: `model` is without the tokens that went.
        reading: How rows are read; None in memory.
        seed: Seed of the criterion `random`; plans record it.
        began: When it began to be made, by `time.monotonic`.
        progress, clock: Where stages are shown, and their seconds by kind of work.
        journal: What was ranked and refitted so far, kept on the disk while a recipe runs.
        predicted: A model, batches of `rows`, and its predictions of them; added when they are first asked for.
    """

    model: PreTrainedModel
    processor: Any
    task: Task
    modules: tuple[PrunableModule, ...]
    scored: tuple[PrunableModule, ...]
    rows: Rows
    options: PruneSection
    metrics: tuple[str, ...]
    shapes: Mapping[Shape, Batch]
    exporter: Exporter
    given: Unwrapped
    length: RowLength | None = None
    measure: MeasureOptions = field(default_factory=lambda: MeasureOptions(()))
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    compound: Compound | None = None
    deploy: DeploySection | None = None
    source: Source | None = None
    asked: Request | None = None
    trimming: Trimming | None = None
    reading: Reading | None = None
    seed: int = 0
    began: float = 0.0
    progress: Progress = SILENT
    clock: Clock = field(default_factory=Clock)
    journal: Journal = field(default_factory=Journal)
    predicted: list[tuple[PreTrainedModel, Sequence[Batch], Predictions]] = field(default_factory=list, repr=False)

    @property
    def deadline(self) -> float:
        """When `deploy` should end, by `time.monotonic`."""
        minutes = None if self.deploy is None else self.deploy.minutes
        return math.inf if minutes is None else self.began + 60 * minutes

    @property
    def budget(self) -> Budget:
        """The budget of the options: how much is removed."""
        return self.options.goal

    @property
    def cuts_once(self) -> bool:
        """Whether the budget alone says how much goes: nothing is searched or timed for it."""
        return self.deploy is None and not self.budget.searched and self.budget.timed is None

    @property
    def sample(self) -> Batch:
        """Two rows to score on, enough to compare models on and to trace them."""
        return first_samples(self.rows.score[0])

    @property
    def dtype(self) -> torch.dtype | None:
        """What a slim model is saved in; None for the dtype of the dense one."""
        return None if self.source is None else self.source.dtype

    @property
    def export(self) -> ExportSection:
        """The options that the slim model is exported by."""
        return self.exporter.options

    @property
    def on_rows(self) -> bool:
        """Whether a deployment is timed on rows as they come: no shapes are given, and a row is one forward pass."""
        return self.length is not None and not self.task.generative

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
        """Return which of `shapes` a budget times: one of its batch and, if there is one, of its sequence."""
        rows = None if self.length is None else self.length.tokens
        of_batch = [shape for shape in self.shapes if shape[0] == timed.batch]
        return next((shape for shape in of_batch if shape[1] == (timed.sequence or rows)), of_batch[0])

    @property
    def timed_on(self) -> TimedOn:
        """Where a budget of time is measured."""
        timed = self.budget.timed
        assert timed is not None
        return TimedOn(
            runtime=timed.runtime,
            batch=self.shapes[self.shape_of(timed)],
            exporter=self.exporter,
            dtype=timed.dtype,
            repeats=self.measure.repeats,
            min_seconds=self.measure.min_seconds,
        )

    def judge(self, batches: Sequence[Batch], *, progress: Progress = SILENT, **how: Any) -> Judge:
        """Return the judge of other models on some rows; see `Judge.on` for other options."""
        dense = self.dense_predictions(batches, progress)
        return Judge.on(self.model, batches, **{"metrics": self.metrics, "task": self.task, "dense": dense, **how})

    def dense_predictions(self, batches: Sequence[Batch], progress: Progress = SILENT) -> Predictions:
        """Return the dense model's predictions of some batches; those of judged `rows` are predicted once.

        If the vocabulary was trimmed, they are of the model as it was, on the batches as it reads them.
        """
        in_dense = next((own for name, own in self.rows.in_dense.items() if getattr(self.rows, name) is batches), None)
        model, read = (self.dense, in_dense) if in_dense else (self.model, batches)
        for of, rows, predictions in self.predicted:
            if of is model and rows is read:
                return predictions
        found = predict(model, read, task=self.task, progress=progress)
        if self.trimming is not None and in_dense and found.kind == "tokens":
            found = in_new_numbers(found, self.task.references(read), self.trimming.kept)
        if any(rows is batches for rows in (self.rows.held_out, self.rows.promise, self.rows.evaluation)):
            self.predicted.append((model, read, found))
            warn_if_no_better_than_commonest(self.task, found, batches)
        return found

    def kind(self, batches: Sequence[Batch]) -> RowsKind | None:
        """Return what rows of texts to embed, or of candidates to rank, are to each other."""
        return kind_of_rows(batches, embeds=self.task.embeds)

    @property
    def promised_metric(self) -> str | None:
        """The metric of which `keep` keeps a share; None if it keeps a share of the predictions."""
        keep = self.budget.keep
        assert keep is not None
        return promised_metric(self.metrics, keep.metric, self.kind(self.rows.held_out))

    def predictor(self, served: TimedSection | None) -> Predictor:
        """Return what predicts as a model is served: exported, on its runtime; torch does where none is named."""
        return predict if served is None else predictor(self.exporter, served.runtime, served.dtype)


def promised_metric(metrics: Sequence[str], asked: str | None, kind: RowsKind | None) -> str | None:
    """Return the metric of which a promise keeps a share; None if it keeps a share of the predictions.

    `asked` is the metric that it names, if it does, and `kind` what the held-out rows are to each other.
    """
    of_first = not keeps_predictions(kind) or METRICS[metrics[0]].terms is not None
    return metrics[0] if asked is None and of_first else asked


def make_job(
    model: PreTrainedModel,
    rows: Rows,
    options: PruneSection,
    *,
    task: Task,
    processor: Any,
    shapes: Sequence[tuple[int, ...]] = (),
    deploy: DeploySection | None = None,
    export: ExportSection | None = None,
    **known: Any,
) -> Job:
    """Find the modules of a model that may lose units, and check that it runs on the rows, and at the shapes to time.

    These are the `shapes` given, and that of a budget that is timed. If that has no sequence, or if no shapes are given
    for a search of what `deploy` asks for, the length is that of the rows.
    """
    timed = None if options.budget is None else options.budget.timed
    length, first = None, rows.score[0]
    if not task.in_parts and ((deploy is not None and not shapes) or (timed is not None and timed.sequence is None)):
        length = row_length(model, rows.held_out or rows.score)
    wanted = _shapes(model, shapes, task, timed, length, image_shape(first))
    batches = _shaped(model, wanted, first, task)
    if task.predicts == "classes":
        warn_of_one_class(rows.score, "calibration", "heads are scored")
        warn_of_one_class(rows.held_out, "held-out", "cuts are judged")
        warn_of_one_class(rows.evaluation, "evaluated", "both models are judged")
    check_model(model, rows.score, task)
    check_shapes(model, batches)
    options = _with_enough_to_refit(options, rows)
    modules, scored, options = _find_modules(model, first_samples(first), options)
    options = _with_order(options, model, scored, first_samples(first), task)
    given = Given(first_samples(first), processor, rows.refit or rows.score)
    return Job(
        model=model,
        processor=processor,
        task=task,
        modules=modules,
        scored=scored,
        rows=rows,
        options=options,
        shapes=batches,
        exporter=Exporter(export or ExportSection(), given),
        length=length,
        deploy=deploy,
        **known,
    )


def _with_enough_to_refit(options: PruneSection, rows: Rows) -> PruneSection:
    """Return the options without a refit that nobody asked for, if there are too few rows for one."""
    count = samples_of(rows.refit)
    if options.compensation is None or count >= HELD_OUT_EVERY or "compensation" in options.model_fields_set:
        return options
    logger.warning("nothing is refitted, as that takes %d rows or more, and there are %d", HELD_OUT_EVERY, count)
    criterion = options.criterion if "criterion" in options.model_fields_set else "fisher"
    return options.model_copy(update={"compensation": None, "criterion": criterion})


def _with_order(
    options: PruneSection, model: PreTrainedModel, modules: Sequence[PrunableModule], sample: Batch, task: Task
) -> PruneSection:
    """Return the options with whether layers are refitted one after the other, if that was left open."""
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

    If nobody named the kinds, neurons that cannot go are left alone.
    """
    by_default = "modules" not in options.model_fields_set
    modules: tuple[PrunableModule, ...] = ()
    why = "the towers to prune have none"
    for kind in options.modules:
        try:
            modules += find_modules(model, sample, kinds=(kind,))
        except UnsupportedModelError as error:
            if kind != MLP or not by_default:
                raise
            why = str(error)
    scored = _in_towers(model, modules, options.towers)
    for kind in options.modules:
        if any(module.kind == kind for module in scored):
            continue
        if kind != MLP or not by_default:
            raise RequestError(f"prune.modules names {kind}, but the towers to prune have none; change prune.modules")
        logger.warning("only heads are removed, as neurons cannot be: %s", why)
        options = options.model_copy(update={"modules": (ATTENTION,)})
    return modules, scored, options


def job_in_memory(
    given: Unwrapped,
    options: PruneSection,
    batches: Any,
    *,
    held_out: Any,
    compensation_batches: Any,
    processor: Any,
    columns: Mapping[str, Any] | None,
    vocabulary: Mapping[str, Any] | Sequence[str] | None,
    evaluation: ComparisonSection,
    shape: tuple[int, ...] | None,
    seed: int,
    progress: Progress,
) -> Job:
    """Return the job of a model in memory, see `prune`; without a budget in the options, of one that a plan cuts."""
    model, processor = given.model, processor or given.processor
    if torch.is_inference_mode_enabled():
        raise RequestError(
            "pruning takes gradients, which torch.inference_mode() rules out; call it outside of that block, or inside "
            "of torch.no_grad(), which it may be in"
        )
    refuse_unknown(model)
    check_in_memory(model)
    if processor is not given.processor and isinstance(model, TextEncoder):
        model.read_by(processor)
    trimming = None
    if vocabulary is not None:
        given_rows = {"batches": batches, "held_out": held_out, "compensation_batches": compensation_batches}
        task = task_of(model)
        model, processor, trimming = trim_in_memory(model, processor, given_rows, columns, vocabulary, task)

    def read(model: PreTrainedModel, processor: Any) -> tuple[Task, Rows]:
        task = task_of(model, tolerance=evaluation.stability_tolerance, threshold=evaluation.threshold)
        how = {"task": task, "processor": processor, "columns": columns, "max_length": given.max_length}
        of = partial(batches_of, model, **how)
        fields = columns
        if columns is None and task.embeds and isinstance(batches, datasets.Dataset):
            fields = usual_columns(batches, type(task))
        together = None if fields is None else fields.get("query") or fields.get("group")
        return task, _rows_in_memory(of, task, options, batches, held_out, compensation_batches, together)

    if trimming is None:
        task, rows = read(model, processor)
    else:
        task, rows = _read_for_both(read, model, processor, trimming)
        trimming = trimming.on(rows.in_dense.get("held_out", []), rows.held_out)
    timed = None if options.budget is None else options.budget.timed
    if timed is not None:
        check_runtime(timed.runtime, task=type(task))
        check_one_graph([timed.runtime], type(task))
        check_dtypes([] if timed.dtype is None else [timed.dtype], [timed.runtime])
    kind = kind_of_rows(rows.held_out, embeds=task.embeds)
    usual = task.usual_metrics(rows=kind)
    metrics = evaluation.metrics or (usual if trimming is None else beside_whole(usual))
    limited = options.budget and options.budget.metric
    how: dict[str, Any] = {"predicts": task.predicts, "rows": kind, "labels": getattr(model.config, "num_labels", None)}
    check_metrics((*metrics, *([limited] if limited else [])), **how, trimmed=trimming is not None)
    job = make_job(
        model,
        rows,
        options,
        task=task,
        shapes=() if shape is None else (shape,),
        processor=processor,
        given=given,
        metrics=tuple(metrics),
        trimming=trimming,
        seed=seed,
        progress=progress,
    )
    if options.budget is not None:
        check_job(job)
        check_apart(job)
    return job


def _read_for_both(
    read: Callable[[PreTrainedModel, Any], tuple[Task, Rows]],
    model: PreTrainedModel,
    processor: Any,
    trimming: Trimming,
) -> tuple[Task, Rows]:
    """Return the task of a model without the tokens that went, and its rows, with the held-out ones for both models."""
    whole, dense = read(trimming.dense, trimming.processor)
    # Texts to embed come in the order of their lengths, which are others in other tokens.
    if whole.predicts in PER_SAMPLE and not whole.embeds:
        task, rows = read(model, processor)
        return task, replace(rows, in_dense={"held_out": dense.held_out})
    recut = recut_of(trimming, whole, processor, model.config).batches
    in_dense, held_out = recut(dense.held_out)
    rows = Rows(recut(dense.score)[1], held_out, recut(dense.refit)[1], in_dense={"held_out": in_dense})
    return task_of(model, tolerance=whole.tolerance, threshold=whole.threshold), rows


def _rows_in_memory(
    read: Callable[..., list[Batch]],
    task: Task,
    options: PruneSection,
    batches: Any,
    held_out: Any,
    compensation_batches: Any,
    together: str | None,
) -> Rows:
    divided = held_out is None and isinstance(batches, datasets.Dataset) and len(batches) > 1
    if divided and (task.a_row_is_a_sample or task.rows_together or together is not None):
        batches, held_out = _divided(number_rows(batches, source="batches"), together)
    score = read(batches, what="batches")
    apart: list[Batch] = []
    if held_out is None:
        score, apart = split_held_out(score)
    elif not isinstance(held_out, (list, tuple)) or held_out:
        apart = read(held_out, what="held_out", use="judge")
    if not apart and (choice := options.judged_on_held_out):
        raise RequestError(f"{choice} is chosen on held-out rows, and there are none; pass held_out=, or more batches")
    refit: list[Batch] = []
    if options.compensation is not None:
        given = compensation_batches
        refit = score if given is None else read(given, what="compensation_batches")
        refit = first_rows(unlabelled(refit, task), options.compensation.samples)
    return Rows(score, apart, refit)


def _divided(rows: datasets.Dataset, together: str | None) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Return rows, and a drawn quarter of them, which is held out: none if they are of one query.

    Rows, not batches: queries and documents, or windows of one text, must come together. Rows of one value in the
    column `together` are on one side. Of those without one, documents to search in, a quarter is held out too.
    """
    order = values = drawn_order(len(rows))
    if together is not None and has_one_value(rows, together):  # what reads other columns refuses them
        values = np.array(common_values(rows, together), dtype=object)
        order = side_by_side(order, values)
        values = values[order]
    there = sum(value is not None for value in values) or len(rows)
    first = there - whole(values[:there][::-1].tolist(), max(1, there // 4))
    end = len(rows) - (len(rows) - there) // 4
    if not first:
        return rows, None
    parts = [*range(first), *range(there, end)], [*range(first, there), *range(end, len(rows))]
    scored, held_out = (rows.select(np.sort(order[part])) for part in parts)
    return scored, held_out


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
        check_sizes(shapes)
        return [*(shapes or ((1,), (8,))), *([] if timed is None else [timed.shape])]
    tokens = None if length is None else length.tokens
    found = model_shapes(model, shapes, sequence=tokens, image=image)
    if timed is None:
        return [*found]
    shape = timed.shape if timed.sequence or tokens is None else (timed.batch, tokens)
    return [*found, *model_shapes(model, [shape], image=image)]


def _shaped(
    model: PreTrainedModel, shapes: Sequence[tuple[int, ...]], read: Batch, task: Task
) -> dict[tuple[int, int], Batch]:
    """Return a batch for each shape: random tokens or pixels in the rows' size, or copies of their longest sample."""
    if not task.in_parts:
        random = partial(synthetic_batch, model, image=image_shape(read))
        return {(size, tokens): random(batch=size, sequence=tokens) for size, tokens in shapes}
    # Random tokens would contain no image tokens.
    longest = int(read["attention_mask"].sum(-1).argmax()) if "attention_mask" in read else 0
    sequence = read["input_ids"].shape[-1]
    return {
        (shape[0], sequence): {
            key: value[longest : longest + 1].repeat(shape[0], *[1] * (value.dim() - 1))
            for key, value in inputs_of(read).items()
        }
        for shape in shapes
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


def check_job(job: Job) -> Job:
    """Refuse, before anything is computed, options that do not suit the model."""
    options, budget = job.options, job.budget
    _warn_without_compensation(options)
    check_criteria(job, options.criterion)
    if options.compensation is not None:
        check_biases(job.model, job.scored, options.compensation.method)
    _check_enough_rows(job)
    timed = [*(name for name, _ in job.measure.ways), *([] if budget.timed is None else [budget.timed.runtime])]
    if any(RUNTIMES[name].bits == ("int8",) for name in timed):
        check_quantizable(job.model, "int8")
    if not budget.heads:
        check_constraints(job.scored, options.constraints)
    else:
        check_budget(job.scored, heads=budget.heads, constraints=options.constraints)
    if (table := job.counted_table) is not None and budget.ratio is not None:
        if table.dense <= budget.ratio:
            raise RequestError(
                f"the budget asks for {table.what} at most {budget.ratio:g} of dense, and the tokens that went leave "
                f"{table.dense:.3f} as it is: nothing else has to go; ask for less, or leave the budget out"
            )
        check_reachable(job.scored, table, ratio=budget.ratio / table.dense, constraints=options.constraints)
    return job


def _check_enough_rows(job: Job) -> None:
    """Refuse a promise that the held-out rows are too few for: of a share, even if all predictions stayed."""
    keep, count = job.budget.keep, samples_of(job.rows.held_out)
    if keep is None:
        return
    what = "rows" if keeps_predictions(job.kind(job.rows.held_out)) else "queries"
    if keep.predictions is None:
        asked, needed = loss_words(keep), LEAST_FOR_LOSS
    else:
        fewest = all_looks(type(job.task), job.deploy, classifies=False)[-1]
        asked, needed = f"{keep.predictions:g}", fewest.rows(keep.predictions, job.promised_metric)
    if count < needed:
        raise RequestError(
            f"keep: {asked} can be promised with {100 * CONFIDENCE:g} % confidence from {needed:,} held-out {what} or "
            f"more, and there are {count:,}; raise keep.samples, give more rows, or ask for less"
        )


def check_apart(job: Job) -> bool:
    """Refuse a promise about rows that the model is fitted on, and warn of such rows where nothing is promised.

    Rows are identified by what the model reads, whichever files they come from. Rows that recur within one use, as
    short texts do, are not counted, because new rows may equal them too. Returns whether a warning was logged.
    """
    rows = job.rows
    drawn = (rows.score, rows.refit, rows.held_out, rows.promise, rows.evaluation)
    parts = [sample_contents(part) for part in drawn]
    _warn_of_repeats(parts[2:])
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
        if job.compound is not None or job.budget.searched:
            raise RequestError(f"a promise must be judged on rows of its own, but {what}; {how}")
        logger.warning("%s, and new rows may keep less; %s", what, how)
        return True
    return False


def _warn_of_repeats(parts: Sequence[Sequence[tuple[bytes, ...]]]) -> None:
    """Warn if many judged rows repeat others, as intervals count each row for itself."""
    for name, samples in zip(("held-out", "held-out", "evaluated"), parts, strict=True):
        if (repeats := len(samples) - len(set(samples))) > MOST_REPEATED * len(samples):
            logger.warning(
                "%s of the %s %s rows repeat others, so what stays is only known for new rows that repeat as often; "
                "leave copies out, such as those of an oversampled class, before the data are split",
                *(f"{repeats:,}", f"{len(samples):,}", name),
            )
            return


def _warn_without_compensation(options: PruneSection) -> None:
    """Warn if the criterion assumes a refit that is not asked for."""
    if options.criterion in (COMPENSATED, AUTO) and options.compensation is None:
        logger.warning(
            "%s ranks units by the errors that least squares leaves, but prune.compensation is not set, so "
            "nothing makes up for them; add compensation: {method: least_squares}",
            options.criterion,
        )


def check_criteria(job: Job, *criteria: str) -> None:
    """Refuse criteria that cannot score the modules: of heads if only neurons go, or of whole key/value groups."""
    options = job.options
    by_query = options.constraints.unit == "query"
    grouped = any(module.group_size > 1 for module in job.scored)
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
        if name in (COMPENSATED, AUTO) and by_query and grouped:
            raise RecipeError([f"criterion {name} removes whole key/value groups, got unit: query; set unit: group"])
