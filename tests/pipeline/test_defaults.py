"""What is pruned, and how, where the budget alone is given; and the recipe that a run leaves behind."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import decoder
from support.models import bert, text_batch

from hies_export import PruningRecipe, RecipeError, UnsupportedModelError, prune
from hies_export.pipeline.options import PruneSection

PAPER = (("attention",), "hies", None)
SMALLER = (("attention", "mlp"), "compensated", "least_squares")


def method_of(section: PruneSection) -> tuple[Any, ...]:
    return section.modules, section.criterion, section.compensation and section.compensation.method


@pytest.mark.parametrize(
    ("fields", "method"),
    [
        ({"budget": {"heads": 0.4}}, PAPER),
        ({"budget": {"flops": 0.6}}, SMALLER),
        ({"budget": {"keep": 0.99}}, SMALLER),
        ({}, SMALLER),  # a deployment
        # What is said stays.
        ({"budget": {"flops": 0.6}, "modules": ["attention"]}, (("attention",), *SMALLER[1:])),
        ({"budget": {"flops": 0.6}, "criterion": "his"}, (SMALLER[0], "his", SMALLER[2])),
        ({"budget": {"flops": 0.6}, "compensation": None}, (*SMALLER[:2], None)),
        ({"budget": {"heads": 0.4}, "compensation": {"method": "bias"}}, (*PAPER[:2], "bias")),
    ],
)
def test_the_budget_says_how_to_prune(fields: dict[str, Any], method: tuple[Any, ...]) -> None:
    assert method_of(PruneSection.model_validate(fields)) == method


def test_another_budget_has_its_own_defaults() -> None:
    data = {"files": {"train": "train.jsonl"}, "text": "sentence"}
    recipe = PruningRecipe(model="m", task="text-classification", data=data, prune={"budget": {"flops": 0.6}})
    assert method_of(recipe.options) == SMALLER
    assert method_of(recipe.with_overrides({"prune.budget": {"heads": 0.4}}).options) == PAPER


def test_a_number_alone_is_no_budget() -> None:
    with pytest.raises(RecipeError, match=r"\{flops: 0.6\} leaves .* \{heads: 0.6\} removes"):
        prune(bert(), [text_batch()], budget=0.6)  # type: ignore[arg-type]


def test_the_first_call_removes_both_kinds_and_refits() -> None:
    result = prune(bert(), [text_batch(4, 10 + i) for i in range(8)], budget={"flops": 0.6})
    assert {kept.kind for kept in result.plan.kept.values()} == {"attention", "mlp"}
    assert result.plan.criterion == "compensated"
    assert result.plan.compensation["method"] == "least_squares"
    assert result.flops.slim <= 0.6 * result.flops.dense


def test_nothing_is_refitted_on_fewer_rows_than_a_refit_takes(caplog: pytest.LogCaptureFixture) -> None:
    result = prune(bert(), [text_batch(4, 10)], budget={"flops": 0.8})
    assert "nothing is refitted, as that takes 5 rows or more, and there are 3" in caplog.text
    assert (result.plan.criterion, result.slim.fits, result.plan.compensation) == ("fisher", [], {})


def test_neurons_that_cannot_go_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = decoder("Mixtral", num_local_experts=3)()
    batches = [{"input_ids": torch.randint(0, 40, (4, 12))} for _ in range(6)]
    with caplog.at_level(logging.WARNING, "hies_export"):
        result = prune(model, batches, budget={"flops": 0.95})
    assert {kept.kind for kept in result.plan.kept.values()} == {"attention"}
    assert "only heads are removed" in caplog.text
    with pytest.raises(UnsupportedModelError, match="experts"):
        prune(model, batches, budget={"flops": 0.95}, modules=("attention", "mlp"))


def test_a_checkpoint_without_a_tokenizer_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prune(bert(), [text_batch(4, 10)], budget={"heads": 0.5}).save_pretrained(tmp_path / "slim")
    assert "pass processor= to save_pretrained" in caplog.text
