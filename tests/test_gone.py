"""Commands and keywords that went, or never were; fields that went are in test_recipe.py."""

import pytest

from hies_export import prune
from hies_export.cli.main import main
from hies_export.recipe.gone import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_or_an_option_of_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *options = name.split()
    with pytest.raises(SystemExit, match="^2$"):
        main([command, "some/model", *(f"{option}=1" for option in options)])
    assert f"hies-export: error: {COMMANDS[name]}\n" in capsys.readouterr().err


def test_other_keywords_of_prune_are_python_s_own() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'stepz'"):
        prune(None, [], stepz=1)  # type: ignore[call-arg]
