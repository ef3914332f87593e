"""Make the `Pruning` and the `Delivery` of a model in memory and its batches; see `prune`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..data.batches import Batch
from ..data.rows import common_values, fixed_permutation, has_one_value, number_rows, run_end, side_by_side
from ..errors import RequestError
from ..evaluate.metrics import check_metrics
from ..evaluate.ranking import kind_of_rows
from ..late import datasets, is_data_set
from ..model.text_encoder import TextEncoder, Unwrapped
from ..progress import Progress
from ..recipe.sections import ComparisonSection, ExportSection
from ..tasks import Task
from ..tasks.given import batches_of, first_rows, split_held_out, unlabelled, usual_columns
from ..tasks.registry import refuse_unknown
from .accept import check_in_memory
from .options import PruneSection
from .pruning import Pruning, Rows, check_apart, check_pruning, make_pruning

if TYPE_CHECKING:
    from .delivery import Delivery


def accept_model(given: Unwrapped, processor: Any) -> Unwrapped:
    """Return a model with this processor, by default its own, after checking that it can be pruned in memory."""
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
    return replace(given, processor=processor)


def make_pruning_in_memory(
    given: Unwrapped,
    options: PruneSection,
    rows: Rows,
    *,
    task: Task,
    evaluation: ComparisonSection,
    shape: tuple[int, ...] | None,
    seed: int,
    progress: Progress,
) -> Pruning:
    """Return the pruning of a model in memory, checked before anything is computed.

    `rows` are from `read_rows`; the other arguments are as for `prune`. The options have no budget if a plan is given.
    """
    model = given.model
    timed = None if options.budget is None else options.budget.timed
    if timed is not None:
        from ..forms.runtimes.base import check_dtypes, check_one_graph, check_runtime

        check_runtime(timed.runtime, task=type(task))
        check_one_graph([timed.runtime], type(task))
        check_dtypes([] if timed.dtype is None else [timed.dtype], [timed.runtime])
    kind, choices = kind_of_rows(rows.held_out, embeds=task.embeds), any("choice" in batch for batch in rows.held_out)
    metrics = evaluation.metrics or task.usual_metrics(rows=kind, choices=choices)
    budgeted = () if options.budget is None or options.budget.metric is None else (options.budget.metric,)
    predicts, labels = "choices" if choices else task.predicts, getattr(model.config, "num_labels", None)
    check_metrics((*metrics, *budgeted), predicts=predicts, rows=kind, labels=labels)
    # Made when first asked for, as it imports exporters, and only once, as its exporter keeps graphs of other cuts.
    delivery = cache(partial(delivery_of, rows, given))
    pruning = make_pruning(
        model,
        rows,
        options,
        task=task,
        shapes=() if shape is None else (shape,),
        processor=given.processor,
        metrics=tuple(metrics),
        serve=lambda served: delivery().serve(served),
        time_cuts=lambda pruning: delivery().time_cuts(pruning),
        seed=seed,
        progress=progress,
    )
    if options.budget is not None:
        check_pruning(pruning)
        if timed is not None:
            from .delivery import check_bits

            check_bits(model, [timed.runtime])
        check_apart(pruning)
    return pruning


def delivery_of(rows: Rows, given: Unwrapped) -> Delivery:
    """Return how a model in memory is delivered; exporters and runtimes are imported only here."""
    from .delivery import Delivery, exporter_of

    return Delivery(exporter=exporter_of(ExportSection(), rows, given.processor), given=given)


def read_rows(
    given: Unwrapped,
    options: PruneSection,
    batches: Any,
    *,
    held_out: Any,
    compensation_batches: Any,
    task: Task,
    columns: Mapping[str, Any] | None,
) -> Rows:
    """Return the batches by use, as the task reads them; arguments are as for `prune`.

    If `held_out` is None, a quarter of `batches` is held out. A data set is divided before it is read if its rows can
    be, and rows of one query or group stay together.
    """
    model, processor, max_length = given.model, given.processor, given.max_length
    read = partial(batches_of, model, task=task, processor=processor, columns=columns, max_length=max_length)
    fields = columns
    if columns is None and task.embeds and is_data_set(batches):
        fields = usual_columns(batches, type(task))
    together = None if fields is None else fields.get("query") or fields.get("group")  # the column, if any
    to_divide = held_out is None and is_data_set(batches) and len(batches) > 1
    if to_divide and (task.a_row_is_a_sample or task.rows_together or together is not None):
        batches, held_out = _divided(number_rows(batches, source="batches"), together)
    score_rows = read(batches, what="batches")
    held_out_rows: list[Batch] = []
    if held_out is None:
        score_rows, held_out_rows = split_held_out(score_rows)
    elif not isinstance(held_out, (list, tuple)) or held_out:  # an empty list asks for none
        held_out_rows = read(held_out, what="held_out", use="judge")
    if not held_out_rows and (choice := options.judged_on_held_out):
        raise RequestError(f"{choice} is chosen on held-out rows, and there are none; pass held_out=, or more batches")
    refit_rows: list[Batch] = []
    if options.compensation is not None:
        refit_rows = score_rows
        if compensation_batches is not None:
            refit_rows = read(compensation_batches, what="compensation_batches")
        refit_rows = first_rows(unlabelled(refit_rows, task), options.compensation.samples)
    return Rows(score_rows, held_out_rows, refit_rows)


def _divided(rows: datasets.Dataset, together: str | None) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Return a random three quarters of the rows to score on, and a quarter to hold out; None if all are of one query.

    Rows with the same value in the column `together` stay on one side. Of those without a value, which are documents to
    search in, a quarter is held out too.
    """
    order = fixed_permutation(len(rows))
    values = order  # without a column, every row is a group of its own
    if together is not None and has_one_value(rows, together):  # other columns are refused when they are read
        order, values = side_by_side(order, common_values(rows, together))
    grouped = sum(value is not None for value in values) or len(rows)  # rows with a value come first
    # From the end, as many rows as a quarter, or more so that no group is divided.
    split = grouped - run_end(values[:grouped][::-1].tolist(), max(1, grouped // 4))
    split_of_others = len(rows) - (len(rows) - grouped) // 4
    if not split:
        return rows, None
    scored = np.concatenate([order[:split], order[grouped:split_of_others]])
    held_out = np.concatenate([order[split:grouped], order[split_of_others:]])
    return rows.select(np.sort(scored)), rows.select(np.sort(held_out))
