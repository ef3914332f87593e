"""What tasks have in common, and what models of no task get."""

import re
from dataclasses import replace

import pytest
import torch
import transformers
from support.models import bert, causal_lm, vit, word_tokenizer
from support.reports import make_report
from support.sentences import bert_encoder, embedder
from transformers import BertConfig, BertForMultipleChoice

from hies_export.errors import RequestError
from hies_export.evaluate.metrics import METRICS
from hies_export.recipe.sections import Columns
from hies_export.report.card import render_card
from hies_export.tasks import (
    COLUMNS,
    TASKS,
    FeatureExtraction,
    ImageClassification,
    Task,
    TextClassification,
    TextGeneration,
    task_of,
)


def test_every_field_that_names_a_column_is_read_by_a_task() -> None:
    assert set(COLUMNS) == set(Columns.model_fields) - {"max_length", "bos"}
    assert set(COLUMNS) == {name for task in TASKS.values() for names in task.reads for name in names.split()}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_task_has_what_others_ask_it_for(task: type[Task]) -> None:
    made = task(BertConfig())
    assert hasattr(transformers, task.auto_class)
    assert made.usual_metrics(rows="texts" if task.embeds else None)
    usual = [made.usual_metrics(answers=answers, choices=choices) for answers in (0, 1) for choices in (0, 1)]
    assert {metric for names in (*usual, *made.of_rows.values()) for metric in names} <= set(METRICS)
    assert re.fullmatch(r"[a-z]+( [a-z]+)*", made.word)
    if not task.reads:  # it is pruned in memory only
        return
    assert task.needs.startswith("data.")
    report = replace(make_report(), task=task.name)
    snippet = render_card(report).partition("In ONNX Runtime")[2]
    named = "generate_text" if task.generative else "sentence_embedding" if task.embeds else task.ort_class
    assert str(named) in snippet


def test_a_model_has_the_task_of_its_class() -> None:
    encoder = embedder(bert_encoder(), word_tokenizer(["a"]))
    found = [type(task_of(model)) for model in (bert(), vit(), causal_lm(), encoder)]
    assert found == [TextClassification, ImageClassification, TextGeneration, FeatureExtraction]
    for unknown in (BertForMultipleChoice(bert().config), torch.nn.Linear(2, 2)):
        with pytest.raises(RequestError, match=f"the model must be .*, got {type(unknown).__name__}"):
            task_of(unknown)


LABEL_SETS = "multi_label_classification"


@pytest.mark.parametrize(
    ("problem", "labels", "kind"),
    [
        (None, 3, "classes"),
        (None, 1, "numbers"),
        ("single_label_classification", 2, "classes"),
        (LABEL_SETS, 3, "labels"),
        (LABEL_SETS, 1, "labels"),
        ("regression", 1, "numbers"),
    ],
)
def test_the_problem_type_says_what_a_classifier_predicts(problem: str | None, labels: int, kind: str) -> None:
    for make in (bert, vit):
        assert task_of(make(num_labels=labels, problem_type=problem)).predicts == kind


def test_the_effect_on_label_sets_measures_the_change_of_all_logits() -> None:
    model = bert(problem_type=LABEL_SETS, num_labels=4)
    task, change = task_of(model), torch.randn(4000, 4).mul(torch.tensor([1.0, 0.0, 2.0, 0.5]))
    found = task.effect(model, {}, change, 7).square().mean()
    assert found.item() == pytest.approx(change.square().sum(-1).mean().item(), rel=0.1)
    one = torch.randn(5, 1)
    assert torch.equal(task.effect(model, {}, one, 0), one[:, 0])
