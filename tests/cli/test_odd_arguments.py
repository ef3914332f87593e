"""Values that no command can use end in a sentence and exit code 2, before anything is loaded."""

from pathlib import Path
from typing import Any

import pytest
from support.models import save_project


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_project(tmp_path_factory.mktemp("project"), train=6, validation=4, prune={"budget": {"heads": 0.5}})


@pytest.fixture
def said(told: Any) -> Any:
    """Run a command that ends with exit code 2, and return what it prints on standard error."""

    def run(*arguments: object) -> str:
        code, error, _ = told(*arguments)
        assert code == 2, error
        assert len(error) < 5000
        return str(error)

    return run


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("bench model --repeats 1.5", "must be a whole number from 1 to 2147483647, got '1.5'"),
        ("deploy model --keep nan", "must be a number from 0 to 1, got 'nan'"),
        ("bench model --shape 8by8", "argument --shape: must be BATCHxSEQUENCE, or BATCH for images, got '8by8'"),
    ],
)
def test_numbers(command: str, message: str, said: Any) -> None:
    assert message in said(*command.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("prune.alpha=[0.1", "--set prune.alpha must be plain YAML: "),
        ("=5", "--set takes KEY=VALUE, got '=5'"),
        ("a." * 2000 + "b=5", "a is not a field of the recipe"),
        ("data.files=[a]", "data.files must be a mapping, got ['a']"),
        ("measure.shapes=[[99999, 99999]]", "must have at most 16,777,216 tokens or images, got [99999, 99999]"),
    ],
)
def test_changes_of_a_recipe(change: str, message: str, folder: Path, said: Any) -> None:
    assert message in said("score", folder / "recipe.yaml", "--set", change)
