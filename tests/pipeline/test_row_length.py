"""The length that is timed where a request names none: that of the user's own rows, counted by hand."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from support.loading import load_pruning
from support.models import bert, image_batch, save_project, vit

from hies_export import PruningRecipe
from hies_export.pipeline.delivery import timed_on_rows
from hies_export.pipeline.load_recipe import load_recipe
from hies_export.units.shapes import row_length


def masked(*lengths: int) -> dict[str, torch.Tensor]:
    mask = torch.tensor([[position < length for position in range(max(lengths))] for length in lengths]).long()
    return {"input_ids": torch.ones_like(mask), "attention_mask": mask}


def test_the_length_is_the_median_of_the_real_tokens_rounded_up() -> None:
    assert row_length(bert(), [masked(3, 9, 30), masked(17, 11)]) == 16
    assert row_length(bert(), [{"input_ids": torch.ones(2, 8, dtype=torch.long)}]) == 8
    choices = {name: value[:, None].repeat(1, 2, 1) for name, value in masked(5, 17, 19).items()}
    assert row_length(bert(), [choices, masked(1, 2)]) == 16
    assert row_length(vit(), [image_batch()]) is None


def test_the_length_is_one_that_the_model_takes() -> None:
    longest = bert().config.max_position_embeddings
    short = bert(max_position_embeddings=longest - 3)
    assert row_length(short, [masked(longest - 4)]) == longest - 3


def test_of_queries_and_documents_only_queries_count() -> None:
    batch = masked(5, 60, 6, 50) | {"query": torch.tensor([0, -1, 1, -1]), "document": torch.tensor([-1, 0, -1, 1])}
    assert row_length(bert(), [batch]) == 8


def recipe_of(folder: Path, budget: dict[str, Any], shapes: list[list[int]]) -> PruningRecipe:
    """A project whose calibration rows have 6 to 14 words, in two sentences, and three special tokens."""
    save_project(
        folder,
        train=60,
        validation=40,
        calibration={"samples": 20, "batch_size": 10},
        prune={"budget": budget, "criterion": "l2"},
        measure={"runtimes": ["torch"], "shapes": shapes, "repeats": 2},
    )
    return PruningRecipe.from_yaml(folder / "recipe.yaml")


def words(file: Path) -> int:
    """Return the median number of tokens of a file's rows."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return round(statistics.median(len(f"{row['sentence']} {row['other']}".split()) + 3 for row in rows))


@pytest.mark.parametrize(
    ("timed", "shapes", "wanted"),
    [
        ({}, [], [(1, 16), (8, 16)]),
        ({"batch": 3}, [[3, 30]], [(3, 30), (3, 16)]),
        ({"batch": 3, "sequence": 20}, [[2, 30]], [(2, 30), (3, 20)]),
        ({"batch": 3, "sequence": 20}, [], [(1, 64), (8, 64), (3, 20)]),
    ],
)
def test_a_budget_of_time_without_a_sequence_times_the_rows_length(
    timed: dict[str, int], shapes: list[list[int]], wanted: list[tuple[int, int]], tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, {"latency": {"ratio": 0.8, "runtime": "torch", **timed}}, shapes)
    assert 8 < words(tmp_path / "train.jsonl") <= 16
    resolved, delivery = load_recipe(recipe)
    assert list(resolved.shapes) == wanted
    assert (resolved.length is None) == ("sequence" in timed)
    batch = delivery.timed_on(resolved).batch["input_ids"]
    assert batch.shape == (timed.get("batch", 8), timed.get("sequence", 16))


@pytest.mark.parametrize(("shapes", "wanted"), [([], [(1, 16), (8, 16)]), ([[2, 30]], [(2, 30)])])
def test_what_to_deploy_is_timed_at_the_rows_length(
    shapes: list[list[int]], wanted: list[tuple[int, int]], tmp_path: Path
) -> None:
    prepared = load_pruning(recipe_of(tmp_path, {"heads": 0.5}, shapes).to_deploy(keep=0.5))
    assert list(prepared.shapes) == wanted
    assert timed_on_rows(prepared) == (not shapes)


def test_other_budgets_count_flops_as_before(tmp_path: Path) -> None:
    prepared = load_pruning(recipe_of(tmp_path, {"flops": 0.8}, []))
    assert (list(prepared.shapes), prepared.length) == ([(1, 64), (8, 64)], None)
