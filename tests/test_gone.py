"""What went is refused by its sentence, wherever it could be asked for."""

import re
from typing import Any

import pytest
import yaml

from hies_export import prune
from hies_export.cli.main import main
from hies_export.errors import RecipeError
from hies_export.pipeline.recipe import PruningRecipe
from hies_export.recipe.gone import COMMANDS, FIELDS

RECIPE = {
    "model": "some/model",
    "task": "text-classification",
    "data": {"name": "nyu-mll/glue/sst2", "text": "sentence", "label": "label"},
    "prune": {"budget": {"heads": 0.3}},
}


def nested(dotted: str, value: Any) -> Any:
    for name in reversed(dotted.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_or_a_value_of_one(name: str) -> None:
    dotted, _, value = name.partition(": ")
    fields = nested(dotted, yaml.safe_load(value or "1"))
    sentence = f"{name} {FIELDS[name]}"
    with pytest.raises(RecipeError, match=re.escape(sentence)):
        PruningRecipe(**{**RECIPE, **fields})
    if "prune" in fields:
        with pytest.raises(RecipeError, match=re.escape(sentence.removeprefix("prune."))):
            prune(None, [], **{"budget": {"heads": 0.3}, **fields["prune"]})


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_or_an_option_of_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *options = name.split()
    with pytest.raises(SystemExit, match="^2$"):
        main([command, "some/model", *(f"{option}=1" for option in options)])
    assert f"hies-export: error: {COMMANDS[name]}\n" in capsys.readouterr().err


def test_other_keywords_of_prune_are_python_s_own() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'stepz'"):
        prune(None, [], stepz=1)  # type: ignore[call-arg]
