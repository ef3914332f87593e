"""Errors: their exit codes, and what they say."""

from collections.abc import Callable

import pytest
from support.models import bert

from hies_export import errors, export_gguf, load_runtime
from hies_export.errors import (
    HiesError,
    RecipeError,
    RequestError,
    StepError,
    did_you_mean,
    listed,
    require_package,
)


def test_exit_codes_follow_the_branches() -> None:
    for error in (value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, HiesError)):
        assert error.exit_code == (2 if issubclass(error, RequestError) else 1)
        assert issubclass(error, (RequestError, StepError)) or error is HiesError


def test_all_problems_of_a_recipe_are_in_its_message() -> None:
    assert str(RecipeError(["one"])) == "one"
    assert str(RecipeError(["one", "two"])) == "2 problems:\n  - one\n  - two"


# What needs a package, by the extra that installs it.
NEEDS: dict[str, Callable[[], object]] = {
    "gguf": lambda: export_gguf(bert(), "out", tokenizer=None),
    "openvino": lambda: load_runtime("openvino", "model"),
}


@pytest.mark.parametrize("extra", NEEDS)
def test_a_missing_package_comes_with_the_command_that_installs_it(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_package("torch", who="models need", package="torch", extra="cpu")
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    message = rf"needs .*, which is not installed; install it with: pip install \"hies-export\[{extra}\]\"$"
    with pytest.raises(errors.MissingRuntimeError, match=message):
        NEEDS[extra]()


def test_words_in_messages() -> None:
    assert did_you_mean("tourch", ["torch", "onnxruntime-cpu"]) == "; did you mean 'torch'?"
    assert did_you_mean("xyz", ["torch"]) == ""
    assert did_you_mean("heis", ["his", "hies", "l2"]) == "; did you mean 'his' or 'hies'?"
    assert did_you_mean("text", ["Text", "Label"]) == "; did you mean 'Text'?"
    assert listed(range(3)) == "0, 1, 2"
    assert listed(range(22)).endswith("18, 19 and 2 more")
