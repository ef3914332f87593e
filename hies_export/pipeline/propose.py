"""Propose a recipe for a model and a data set, given nothing else."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets

from ..checkpoint.classes import CODE, load_config
from ..checkpoint.sentence import is_sentence_transformer
from ..data.rows import hub_splits, load_rows, taken_from
from ..errors import DataError, RequestError, listed
from ..files import Rule, check
from ..model.tokens import refuse_encoder_decoder
from ..recipe.sections import Columns
from ..tasks import TASKS, Task
from ..tasks.classification import CLASSIFIED
from ..tasks.given import usual_columns
from ..tasks.registry import task_by_class
from .recipe import PruningRecipe

logger = logging.getLogger(__name__)

# Splits to evaluate on, the best first; without "train", the first split is scored on and the others are evaluated.
_EVALUATED = ("validation", "validation_matched", "dev", "test")
# Rows to score on, to evaluate, and to refit on.
_SCORED, _JUDGED, _REFITTED = 256, 2000, 1024
# The same for a decoder, whose rows are blocks of text: each has many tokens, and a corpus may have few. A pass over
# 160 of them takes a small language model minutes.
_SCORED_BLOCKS, _JUDGED_BLOCKS, _REFITTED_BLOCKS = 64, 64, 160
# Blocks of text at once: the logits and gradients of 32 blocks of a small language model take 15 GB.
_BLOCKS_AT_ONCE = 4
# Timed runs of blocks of text: 30, as of other rows, take a small language model nine minutes on two cores.
_REPEATS_OF_BLOCKS = 10
# Rows that show whether labels are those of the model.
_LOOKED_AT = 1000
# If a data set has no such split, a fifth of the only one is evaluated: drawn, unless its rows are a running text.
_FIRST, _LAST = "[:80%]", "[80%:]"
# Text columns of data sets that have others too.
_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("query", "document"),
    ("query", "passage"),
    ("text",),
    ("sentence",),
)
_NAMED = Rule(
    "columns must be named as in a recipe's data", """quote a text, as in --set 'data.prompt="Q: {question}"'"""
)
# Columns that tell the queries of a reranker apart.
_GROUPS = ("group", "query_id", "query")


def propose_recipe(
    model: str,
    *,
    name: str | None = None,
    files: Mapping[str, Path] | None = None,
    budget: Mapping[str, Any] | None = None,
    sections: Mapping[str, Any] | None = None,
    output: Path,
    **named: Any,
) -> PruningRecipe:
    """Return a recipe for a model and its data: to prune within a budget, or to deploy if none is given.

    Args:
        model: Checkpoint folder or Hub id; the class in its config determines the task.
        name: Hub data set, its configuration last; or
        files: Split -> file.
        budget: How much is removed; see `Budget`.
        sections: Sections of the recipe that decide this in place of a budget, or beside it, such as `vocabulary`.
        output: Folder of the result.
        named: Columns, by the fields of `Columns`; by default those of the data set, if there is only one choice.

    Raises:
        RequestError: The model's class belongs to no supported task.
        DataError: There is more than one choice of splits or columns; the message names them.
    """
    embeds = is_sentence_transformer(model)
    config = None if embeds else load_config(model)
    task = TASKS["feature-extraction"] if embeds else _task_of(model, config)
    splits = list(hub_splits(str(name)) if files is None else files)
    first = "train" if "train" in splits else splits[0]
    last = next((split for split in _EVALUATED if split in splits and split != first), None)
    calibration_split, evaluation_split = (first, last) if last is not None else (f"{first}{_FIRST}", f"{first}{_LAST}")
    source: dict[str, Any] = {"name": name} if files is None else {"files": dict(files)}
    if last is None and task.a_row_is_a_sample:
        source["shuffled"] = True
    rows = load_rows(**source, split=calibration_split, samples=_LOOKED_AT)
    evaluated_rows = load_rows(**source, split=evaluation_split, samples=_LOOKED_AT)
    columns = _columns(named, task, config, rows, evaluated_rows)
    if task.generative:
        samples_to_score, samples_to_judge, refitted = _SCORED_BLOCKS, _JUDGED_BLOCKS, _REFITTED_BLOCKS
        batch_size: dict[str, Any] = {"batch_size": _BLOCKS_AT_ONCE}
        measure: dict[str, Any] = {"measure": {"repeats": _REPEATS_OF_BLOCKS}}
    else:
        # At most as many as there are: no run should warn of a count that nobody chose. Two thirds of few rows are left
        # for the promise, which may have to be made on them.
        samples_to_score = max(1, min(_SCORED, taken_from(rows) // 3))
        samples_to_judge = min(_JUDGED, taken_from(evaluated_rows))
        refitted = max(5, min(_REFITTED, taken_from(rows)))
        batch_size, measure = {}, {}
    of_queries = columns.get("query") or columns.get("group")
    # Of a slice of whole queries, the number of rows is not known in advance.
    judges_all = source.get("shuffled") and of_queries and taken_from(evaluated_rows) < _JUDGED
    prune: dict[str, Any] = {} if budget is None else {"budget": budget}
    if not (isinstance(budget, Mapping) and "heads" in budget):
        prune["compensation"] = {"method": "least_squares", "samples": refitted}
    if not sections:
        sections = {"deploy": {}} if budget is None else {}
    return PruningRecipe(
        model=model,
        task=task.name,
        data={**source, **columns},
        calibration={"split": calibration_split, "samples": samples_to_score, **batch_size},
        evaluation={"split": evaluation_split, "samples": None if judges_all else samples_to_judge, **batch_size},
        prune=prune,
        **measure,
        **sections,
        output=output,
    )


def _columns(
    named: Mapping[str, Any], task: type[Task], config: Any, rows: datasets.Dataset, evaluated: datasets.Dataset
) -> dict[str, Any]:
    """Return the columns to read by fields of `Columns`: those named, else the only ones of the rows that fit."""
    given = check({key: value for key, value in named.items() if value}, Columns, _NAMED, where="the columns")
    columns: dict[str, Any] = given.model_dump(exclude_unset=True)
    label_named = columns.get("label") is not None
    if columns.keys() <= {"label", "document", "group"}:  # what each row is read from was not named
        usual = usual_columns(rows, task, preferred=_PAIRS)
        if usual is None:
            raise DataError(
                f"{task.name} needs to know which columns to read ({task.needs}), and the data set has "
                f"{listed(rows.column_names)}; name them with --text COLUMN and --set data.label=COLUMN, or as in "
                """--set 'data.prompt="Question: {question}"' --set data.answer=COLUMN"""
            )
        columns = {key: value for key, value in usual.items() if value} | columns
    predicts = task(config).predicts
    if predicts == "numbers" and len(columns.get("text", ())) == 2 and "group" not in columns:
        groups = [name for name in _GROUPS if name in rows.column_names]
        if groups:
            columns["group"] = groups[0]
    if predicts in CLASSIFIED and columns.get("label") and not label_named:
        return _without_foreign_labels(columns, task(config), rows, evaluated)
    return columns


def _without_foreign_labels(columns: dict[str, Any], task: Task, *splits: datasets.Dataset) -> dict[str, Any]:
    """Return the columns, without that of the labels if some rows have labels that the model does not know."""
    try:
        for rows in splits:
            task.to_read(Columns(**columns)).check_rows(rows)
    except DataError as error:
        why = str(error).partition(";")[0]
        logger.warning("the column %r is not read, as answers are kept without labels: %s", columns["label"], why)
        return {name: column for name, column in columns.items() if name != "label"}
    return columns


def _task_of(model: str, config: Any) -> type[Task]:
    """Return the task that the model class in a config is for; refuse encoder-decoders and classes of no task."""
    name = (getattr(config, "architectures", None) or [""])[0]
    refuse_encoder_decoder(config, name)
    task = task_by_class(name, config, embeds=True)
    if task is None:
        has_code = getattr(config, "auto_map", None)
        remedy = CODE if has_code else "give a checkpoint with the head that it was fine-tuned with"
        raise RequestError(
            f"the model must be of a class that {', '.join(task.auto_class for task in TASKS.values())} loads, but the "
            f"config of {model} names {name or 'none'}; {remedy}"
        )
    return task
