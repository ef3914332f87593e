"""Make the `Pruning` and the `Delivery` of a recipe: load what it names, and check that this allows what it asks for.

Cheap checks come first, so that an impossible request fails early. No stage after this one sees the recipe.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import PreTrainedModel

from ..calibrate.walk import device_of_blocks
from ..checkpoint.beside import fetch, fetch_whole
from ..checkpoint.classes import load_config, refuse_quantised
from ..checkpoint.load import class_for_task, device_to_prune_on, load_dense, source_of
from ..checkpoint.sentence import EMBEDDER, RERANKER, kind_in, load_sentence
from ..data.batches import Batch, check_one_size, is_of_documents
from ..data.processors import load_processor, settle_padding, tokenizer_of
from ..data.rows import load_rows, taken_from
from ..errors import RequestError
from ..evaluate.metrics import check_metrics
from ..evaluate.ranking import RowsKind
from ..forms.cascade.export import CascadeForm
from ..forms.measured import MeasureOptions
from ..forms.runtimes.base import GPU_HALF_STEP, RUNTIMES, check_dtypes, check_one_graph, check_runtime
from ..forms.time import ROWS
from ..kinds import MLP
from ..model.internals import commit_of
from ..model.text_encoder import TextEncoder, Unwrapped
from ..progress import SILENT, Progress
from ..recipe.sections import ExportSection, VocabularySection
from ..tasks import TASKS, FeatureExtraction, Task
from ..tasks.given import unlabelled
from ..vocabulary.kept import check_request
from .delivery import Delivery, check_bits, exporter_of
from .draw import Drawn, Splits, all_looks, draw, draw_evaluated, hold_out, promise_in
from .pruning import Pruning, Rows, check_apart, check_pruning, make_pruning, promised_metric
from .recipe import PruningRecipe
from .trimming import Reading, Texts, read_tokens, texts_in, texts_of, trim


def load_recipe(recipe: PruningRecipe, *, progress: Progress = SILENT) -> tuple[Pruning, Delivery]:
    """Load model and rows, and check that the recipe can be run; raise a RequestError if not."""
    began = time.monotonic()
    progress.stage("read the data")
    checkpoint = _Checkpoint.find(recipe)
    metrics, timed_in = _metrics(recipe, checkpoint.task()), _runtimes_and_dtypes(recipe)
    model, reading = None, checkpoint.reading()
    if recipe.vocabulary:
        model, reading = _load_trimmed(checkpoint, reading, recipe.vocabulary, progress)
    splits, drawn, evaluated = _draw(recipe, reading, metrics)
    if model is None:  # after the draw, which may be refused
        model = checkpoint.load(reading, progress)
    reading.task.config = model.config
    rows = read_drawn(recipe, reading, drawn)
    evaluation, untrimmed = reading.to_judge(evaluated, recipe.evaluation.batch_size)
    rows = replace(rows, evaluation=evaluation, untrimmed={**rows.untrimmed, "evaluation": untrimmed})
    progress.stage("find the units that may go")
    cascade, dtype = None, recipe.save_dtype or recipe.dtype
    if (asked := recipe.cascade) is not None:
        cascade = CascadeForm(disagreement=asked.disagreement, bits=recipe.export.quantize or "float32")
        cascade.check(model, rows.promise)  # whether they allow its promise
    source = source_of(model, checkpoint.folder, checkpoint.config, asked=dtype)

    def in_order(size: int) -> list[Batch]:
        first = evaluated.select(range(min(len(evaluated), ROWS)))
        # Documents are embedded once, and queries while somebody waits.
        return [batch for batch in reading.read(first, size=size, use="time") if not is_of_documents(batch)]

    delivery = Delivery(
        exporter=exporter_of(recipe.export, rows, reading.processor),
        given=checkpoint.given or Unwrapped(model),
        measure=MeasureOptions(timed_in, recipe.measure.repeats),
        cascade=cascade,
        deploy=recipe.deploy,
        source=source,
        dense=recipe.model,
        splits=splits,
        reading=reading,
        in_order=in_order,
        evaluation_of=taken_from(evaluated),
        began=began,
    )
    pruning = make_pruning(
        model,
        rows,
        recipe.options,
        task=reading.task,
        shapes=recipe.measure.shapes,
        fast=recipe.deploy is not None,
        processor=reading.processor,
        metrics=metrics,
        serve=delivery.serve,
        time_cuts=delivery.time_cuts,
        dtype=source.dtype,
        trimming=None if reading.trimming is None else reading.trimming.with_judged_rows(untrimmed, evaluation),
        seed=recipe.calibration.seed,
        progress=progress,
    )
    pruning = _with_aligned_neurons(pruning, recipe.export)
    _check(pruning, delivery)
    return pruning, delivery


def _load_trimmed(
    checkpoint: _Checkpoint, dense: Reading, vocabulary: VocabularySection, progress: Progress
) -> tuple[PreTrainedModel, Reading]:
    """Load the model, trim its vocabulary, and return it with how rows are read by it and by the untrimmed model."""
    texts = _texts(checkpoint.recipe, vocabulary, dense.task)
    untrimmed = checkpoint.load(dense, progress)
    progress.stage("trim the vocabulary")
    model, processor, trimming = trim(untrimmed, dense.processor, texts)
    dense.task.config = trimming.dense.config
    task = checkpoint.to_read(checkpoint.task(model), processor)
    return model, Reading(task, processor, dense.task, trimming)


def _draw(recipe: PruningRecipe, reading: Reading, metrics: Sequence[str]) -> tuple[Splits, Drawn, datasets.Dataset]:
    """Return the splits with the rows held out for a promise, the samples drawn by use, and those to evaluate on."""
    # By the untrimmed task, so that trimming changes nothing about where blocks of text are cut.
    load, keep = partial(reading.dense.load, **recipe.data.source), recipe.goal.keep
    metric = None if keep is None else promised_metric(metrics, keep.metric, _kind_of_rows(recipe))
    splits = Splits(recipe.data, recipe.calibration, recipe.evaluation, recipe.held_out)
    splits = hold_out(splits, promise_in(recipe, reading.task, metric), load)
    return splits, draw(splits, load, recipe.options, recipe.cascade), draw_evaluated(splits, load)


def _check(pruning: Pruning, delivery: Delivery) -> None:
    """Refuse a loaded model or rows that do not allow what the recipe asks for."""
    task, rows = pruning.task, pruning.rows
    fewest = all_looks(type(task), delivery.deploy, classifies=False)[-1]  # the fewest looks, for classifiers too
    check_pruning(pruning, fewest)
    check_bits(pruning.model, [runtime for runtime, _ in delivery.measure.ways])
    if task.images and not task.text:
        check_one_size([*rows.score, *rows.held_out, *rows.refit, *rows.evaluation])
    check_apart(pruning)


def _texts(recipe: PruningRecipe, asked: VocabularySection, task: Task) -> Texts:
    """Return the texts whose tokens stay, those of `asked.files` or else of the calibration split, after checks."""
    if asked.files:
        texts = texts_in(asked.files, task)
    else:
        split = recipe.calibration.split
        rows = load_rows(**recipe.data.source, split=split, numbered=True)
        task.check_rows(rows)
        used = texts_of(rows, task.columns_of_text)
        if recipe.data.prompt:
            used.append(recipe.data.prompt)
        texts = Texts(used, read_tokens(task, rows), f"the split {split}")
    check_request(tokenizer_of(task.processor), texts.used)
    return texts


def _with_aligned_neurons(pruning: Pruning, export: ExportSection) -> Pruning:
    """Return a pruning with the default of `multiple_of.neurons`, see `MultipleOf`: 8 in half precision on a GPU."""
    model, multiple_of = pruning.model, pruning.options.multiple_of
    on_gpu = device_of_blocks(model).type == "cuda" and model.dtype in (torch.float16, torch.bfloat16)
    for_gpu = export.provider != "cpu" and export.dtype == "float16"
    divides_all = all(module.units % GPU_HALF_STEP == 0 for module in pruning.modules if module.kind == MLP)
    if multiple_of.neurons is not None or not (on_gpu or for_gpu) or not divides_all:
        return pruning
    aligned = multiple_of.model_copy(update={"neurons": GPU_HALF_STEP})
    return replace(pruning, options=pruning.options.model_copy(update={"multiple_of": aligned}))


def read_drawn(recipe: PruningRecipe, reading: Reading, drawn: Drawn) -> Rows:
    """Return batches of the drawn samples by use, without those to evaluate on."""
    size = recipe.calibration.batch_size
    held_out, untrimmed = reading.to_judge(drawn.held_out, size)
    return Rows(
        score=reading.read(drawn.scoring, size=size),
        held_out=held_out,
        refit=unlabelled(reading.read(drawn.compensation, size=size), reading.task),
        # The cascades of `deploy` keep the promise that its cuts keep.
        promise=reading.to_judge(drawn.promised, size)[0] if recipe.deploy is None else held_out,
        untrimmed={"held_out": untrimmed},
    )


def as_drawn(recipe: PruningRecipe, splits: Splits | None) -> PruningRecipe:
    """Return the recipe with the held-out and evaluated rows that `hold_out` chose, for another run on the same."""
    if splits is None or splits.held_out is None:
        return recipe
    return recipe.model_copy(update={"held_out": splits.held_out, "evaluation": splits.evaluation})


def refit_rows(recipe: PruningRecipe) -> list[Batch]:
    """Return batches of the rows that a recipe refits on if it holds none out, without loading its model."""
    reading = _Checkpoint.find(recipe).reading()
    calibration, compensation = recipe.calibration, recipe.options.compensation
    assert compensation is not None
    options: dict[str, Any] = {"samples": compensation.samples, "shuffle_seed": calibration.seed}
    rows = reading.task.load(**recipe.data.source, split=calibration.split, **options)
    return unlabelled(reading.read(rows, size=calibration.batch_size), reading.task)


def _metrics(recipe: PruningRecipe, task: Task) -> tuple[str, ...]:
    """Return the names of the metrics to report, after checking that they and that of the budget fit the task."""
    given, rows, trimmed = recipe.evaluation.metrics, _kind_of_rows(recipe), recipe.vocabulary is not None
    budgeted = () if recipe.goal.metric is None else (recipe.goal.metric,)
    judges_choices = task.generative and recipe.data.label is not None
    usual = task.usual_metrics(rows=rows, answers=recipe.data.answer is not None, choices=judges_choices)
    if trimmed:  # perplexity is of tokens, and so depends on the vocabulary
        usual = tuple("nats_per_character" if name == "perplexity" else name for name in usual)
    metrics = tuple(given or usual)
    predicts = "choices" if judges_choices else task.predicts
    names, labels = tuple(dict.fromkeys((*metrics, *budgeted))), getattr(task.config, "num_labels", None)
    check_metrics(names, predicts=predicts, rows=rows, labels=labels, trimmed=trimmed)
    return metrics


def _kind_of_rows(recipe: PruningRecipe) -> RowsKind | None:
    """Return how rows of texts to embed, or of candidates to rank, belong together; None for other tasks."""
    data = recipe.data
    if data.group is not None:
        return "groups" if data.label is None else "graded"
    if not TASKS[recipe.task].embeds:
        return None
    if data.query is not None:
        return "queries"
    return "texts" if data.label is None else "pairs"


def runtimes_of(recipe: PruningRecipe) -> tuple[str, ...]:
    """Return the runtimes to measure on, with that of a budget of time; none for `deploy`, which measures all forms."""
    if recipe.deploy is not None:
        return ()
    names, timed = recipe.measure.runtimes, recipe.goal.timed
    return names if timed is None else tuple(dict.fromkeys((*names, timed.runtime)))


def _runtimes_and_dtypes(recipe: PruningRecipe) -> tuple[tuple[str, str | None], ...]:
    """Return (runtime, dtype) pairs to measure, after checks that they can be run; a dtype of None is the model's."""
    names, task, timed = runtimes_of(recipe), TASKS[recipe.task], recipe.goal.timed
    for name in names:
        check_runtime(name, task=task)
    if timed is not None and timed.dtype is not None:
        check_dtypes([timed.dtype], [timed.runtime])
    if "runtimes" in recipe.measure.model_fields_set or timed is not None:
        check_one_graph(names, task)
    # Runtimes of ONNX cannot time a vision-language model, which is exported as several graphs.
    pairs: list[tuple[str, str | None]] = [
        (name, None) for name in names if RUNTIMES[name].reads_models or not task.in_parts
    ]
    if timed is not None:
        pairs.append((timed.runtime, timed.dtype))
    return tuple(dict.fromkeys(pairs))


@dataclass(frozen=True)
class _Checkpoint:
    """The checkpoint of a recipe: where its files are, its config and class, or what sentence-transformers loaded."""

    recipe: PruningRecipe
    folder: Path  # of a Hub id, that in the cache
    config: Any
    model_class: type[PreTrainedModel] | None = None  # None for a model of sentence-transformers
    given: Unwrapped | None = None  # that model, which is loaded already

    @classmethod
    def find(cls, recipe: PruningRecipe) -> _Checkpoint:
        """Find the checkpoint, and check that its class fits the task; one of sentence-transformers is loaded."""
        folder = fetch(recipe.model, revision=recipe.revision)
        embeds = TASKS[recipe.task].embeds
        # Of sentence-transformers, embedding models and rerankers are known; a reranker is a classifier.
        kind = kind_in(folder) if embeds or recipe.task == "text-classification" else None
        if embeds and kind == RERANKER:
            raise RequestError(
                f"{recipe.task} needs a {EMBEDDER}, but {recipe.model} is a {kind}; its task is text-classification"
            )
        if not embeds:
            config = load_config(folder)
            refuse_quantised(config, recipe.model)
            model_class = class_for_task(folder, config, task=recipe.task)
            if kind != RERANKER:
                return cls(recipe, folder, config, model_class)

        def load(model_class: type[PreTrainedModel], folder: Path, config: Any) -> PreTrainedModel:
            refuse_quantised(config, folder)
            return load_dense(folder, model_class, config=config, dtype=recipe.dtype)

        given = load_sentence(recipe.model, device=device_to_prune_on(), load=load, revision=recipe.revision)
        assert given.folder is not None
        return cls(recipe, given.folder, given.model.config, given=given)

    def load(self, reading: Reading, progress: Progress) -> PreTrainedModel:
        """Return the dense model; one of text then knows the padding token of its tokenizer."""
        progress.stage("load the model")
        if self.given is None:
            folder = fetch_whole(self.recipe.model, revision=commit_of(self.folder))
            model = load_dense(folder, self.model_class, dtype=self.recipe.dtype)
        else:
            model = self.given.model
        if reading.task.text:
            settle_padding(model, tokenizer_of(reading.processor))
        return model

    def task(self, model: PreTrainedModel | None = None) -> Task:
        """Return the task of the dense model, or of a trimmed `model`, with the recipe's tolerance."""
        if model is None and self.given is not None:
            model = self.given.model
        if isinstance(model, TextEncoder):
            return FeatureExtraction(self.config, reader=model.reader)
        return TASKS[self.recipe.task](self.config, tolerance=self.recipe.evaluation.stability_tolerance)

    def reading(self) -> Reading:
        """Return how rows are read with the whole vocabulary."""
        if self.given is None:
            processor = load_processor(self.folder, task=TASKS[self.recipe.task])
        else:
            processor = self.given.processor
        task = self.to_read(self.task(), processor)
        return Reading(task, processor, task, None)

    def to_read(self, task: Task, processor: Any) -> Task:
        """Return a task that reads the columns of the recipe."""
        columns = self.recipe.data
        if columns.max_length is None and self.given is not None:
            columns = columns.model_copy(update={"max_length": self.given.max_length})
        return task.to_read(columns, processor)
