"""The recipe a command runs: the file's, changed by `--set` and `-o`."""

import argparse
from pathlib import Path

import pytest
import yaml

from hies_export.cli.arguments import add_recipe, read_recipe
from hies_export.recipe import PruningRecipe

RECIPE = {
    "model": "model",
    "task": "text-classification",
    "data": {"files": {"train": "a.jsonl"}, "text": ["sentence"], "label": "label"},
    "prune": {"alpha": 0.5, "budget": {"heads": 0.4}},
    "output": "out",
}


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(RECIPE))
    return file


def read(*arguments: object) -> PruningRecipe:
    parser = argparse.ArgumentParser()
    add_recipe(parser)
    return read_recipe(parser.parse_args([str(argument) for argument in arguments]))


def test_without_options_it_is_the_file(recipe_file: Path) -> None:
    assert read(recipe_file) == PruningRecipe.from_yaml(recipe_file)


def test_values_are_yaml_and_all_are_applied(recipe_file: Path, tmp_path: Path) -> None:
    changes = ("--set", "prune.budget={heads: 0.25}", "--set", "measure.shapes=[[1, 8]]", "--set", "prune.alpha=auto")
    recipe = read(recipe_file, *changes, "-o", tmp_path / "elsewhere")
    assert recipe.prune.budget.heads == 0.25
    assert [list(shape) for shape in recipe.measure.shapes] == [[1, 8]]
    assert recipe.prune.alpha == "auto"
    assert recipe.output == tmp_path / "elsewhere"
