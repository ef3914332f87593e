"""What tasks have in common, and what models of no task get."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.generative import padded
from support.models import bert, causal_lm, image_batch, text_batch, vit
from support.reports import make_report
from support.sentences import bert_encoder
from transformers import BertConfig, BertForMultipleChoice, PreTrainedModel

from hies_export.data.reader import Columns, Reader
from hies_export.evaluate.metrics import METRICS
from hies_export.model.sentence import Pooling, TextEncoder
from hies_export.report.card import render_card
from hies_export.tasks import COLUMNS, TASKS, Task
from hies_export.tasks.behaviour import Behaviour
from hies_export.tasks.by_shape import ByShape
from hies_export.tasks.classes import Classes, Labels, Numbers
from hies_export.tasks.feature_extraction import Embeddings
from hies_export.tasks.image_text_to_text import Answers
from hies_export.tasks.models import behaviour_of
from hies_export.tasks.tokens import Tokens


def test_a_recipe_is_checked_against_its_task_before_torch_is_imported() -> None:
    code = """
import sys
from hies_export.pipeline.recipe import PruningRecipe
try:
    PruningRecipe(model="m", task="text-classification", data={"name": "glue/sst2"}, prune={"budget": {"heads": 0.5}})
except Exception as error:
    print(error)
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "text-classification needs data.text" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


def test_every_field_that_names_a_column_is_read_by_a_task() -> None:
    assert set(COLUMNS) == set(Columns.__dataclass_fields__)
    assert set(COLUMNS) == {name for task in TASKS.values() for names in task.columns for name in names}


@pytest.mark.parametrize("behaviour", [Classes(), Labels(), Numbers(), Tokens(), Answers(), Embeddings()])
def test_the_usual_metrics_of_a_behaviour_are_known(behaviour: Behaviour) -> None:
    usual = [behaviour.usual_metrics(answers=answers, choices=choices) for answers in (0, 1) for choices in (0, 1)]
    assert {metric for names in (*usual, *behaviour.of_rows.values()) for metric in names} <= set(METRICS)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_task_has_what_others_ask_it_for(task: Task) -> None:
    config = BertConfig()
    assert hasattr(transformers, task.auto_class)
    assert issubclass(type(task.behaviour(config)), Behaviour)
    metrics = task.behaviour(config).usual_metrics(rows="texts" if task.embeds else None)
    assert metrics
    assert set(metrics) <= set(METRICS)
    assert re.fullmatch(r"[a-z]+( [a-z]+)*", task.behaviour(config).word)
    if not task.columns:  # it is pruned in memory only
        return
    assert issubclass(task.reader_class, Reader)
    assert task.needs.startswith("data.")
    report = replace(make_report(), task=task.name)
    snippet = render_card(report).partition("In ONNX Runtime")[2]
    named = "OnnxGenerator" if task.generative else "sentence_embedding" if task.embeds else task.ort_class
    assert str(named) in snippet


def test_a_model_behaves_as_those_of_its_task() -> None:
    encoder = TextEncoder(bert_encoder(), [Pooling(["mean"])])
    found = [type(behaviour_of(model)) for model in (bert(), vit(), causal_lm(), encoder)]
    assert found == [Classes, Classes, Tokens, Embeddings]
    assert isinstance(behaviour_of(BertForMultipleChoice(bert().config)), ByShape)
    assert isinstance(behaviour_of(SimpleNamespace()), ByShape)


@pytest.mark.parametrize("make", [bert, vit, causal_lm])
@pytest.mark.parametrize("labelled", [True, False])
def test_shapes_tell_what_a_task_says(make: Callable[[], PreTrainedModel], labelled: bool) -> None:
    model = make()
    batch: dict[str, torch.Tensor] = {bert: text_batch, vit: image_batch}.get(make, lambda: padded([9, 4], "left"))()
    labels = batch.pop("labels")
    batch |= {"labels": labels} if labelled else {}
    found = model(**batch)
    of_task, by_shape = behaviour_of(model), ByShape()
    output = of_task.output(found)
    assert by_shape.output(found) is output
    for one, other in [
        (of_task.own_labels(model, batch, output), by_shape.own_labels(model, batch, output)),
        (of_task.losses(labels), by_shape.losses(labels)),
        (of_task.effect(model, batch, output, 0), by_shape.effect(model, batch, output, 0)),
    ]:
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["logits", "sentence_embedding"])
def test_without_a_task_an_output_is_told_by_its_name(name: str) -> None:
    found: Any = SimpleNamespace(last_hidden_state=0, **{name: torch.ones(1)})
    assert ByShape().output(found) is getattr(found, name)


LABEL_SETS, NUMBERS = "multi_label_classification", "regression"


@pytest.mark.parametrize("make", [bert, vit])
@pytest.mark.parametrize(
    ("problem", "labels", "kind"),
    [
        (None, 3, "classes"),
        (None, 1, "numbers"),
        ("single_label_classification", 2, "classes"),
        (LABEL_SETS, 3, "labels"),
        (LABEL_SETS, 1, "labels"),
        (NUMBERS, 1, "numbers"),
    ],
)
def test_the_problem_type_says_what_a_classifier_predicts(
    make: Callable[..., PreTrainedModel], problem: str | None, labels: int, kind: str
) -> None:
    model = make(num_labels=labels, problem_type=problem)
    assert behaviour_of(model).predicts == kind


def test_the_effect_on_label_sets_measures_the_change_of_all_logits() -> None:
    model = bert(problem_type=LABEL_SETS, num_labels=4)
    behaviour, change = behaviour_of(model), torch.randn(4000, 4).mul(torch.tensor([1.0, 0.0, 2.0, 0.5]))
    found = behaviour.effect(model, {}, change, 7).square().mean()
    assert found.item() == pytest.approx(change.square().sum(-1).mean().item(), rel=0.1)
    one = torch.randn(5, 1)
    assert torch.equal(behaviour.effect(model, {}, one, 0), one[:, 0])
