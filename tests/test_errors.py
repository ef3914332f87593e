"""The tree of errors that is drawn, and what it promises."""

import json
import pickle
import re
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
    foreign_failure,
    listed,
    require_package,
)


def drawn_tree() -> dict[str, str | None]:
    """Name -> name of the parent, read from the indentation of the drawing."""
    parents: dict[str, str | None] = {}
    above: dict[int, str] = {}
    for prefix, name in re.findall(r"^    ([│├└─ ]*)(\w+)", errors.__doc__ or "", re.MULTILINE):
        depth = len(prefix) // 4
        above[depth] = name
        parents[name] = above.get(depth - 1) if depth else None
    return parents


def test_the_drawing_is_the_tree() -> None:
    defined = [value for value in vars(errors).values() if getattr(value, "__module__", "") == errors.__name__]
    classes = [value for value in defined if isinstance(value, type)]
    tree = {value.__name__: None if value is HiesError else value.__bases__[0].__name__ for value in classes}
    assert drawn_tree() == tree


def test_exit_codes_follow_the_branches() -> None:
    for name in drawn_tree():
        error = getattr(errors, name)
        assert error.exit_code == (2 if issubclass(error, RequestError) else 1)
        assert issubclass(error, (RequestError, StepError)) or error is HiesError


def test_all_problems_of_a_recipe_are_in_its_message() -> None:
    assert str(RecipeError(["one"])) == "one"
    found = pickle.loads(pickle.dumps(RecipeError(["one", "two"])))  # as from another process
    assert (found.problems, str(found)) == (("one", "two"), "2 problems:\n  - one\n  - two")


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


def test_an_error_of_a_library_is_a_sentence_and_our_own_mistake_is_not() -> None:
    with pytest.raises(ValueError, match="Expecting") as of_library:
        json.loads("{")
    assert str(foreign_failure(of_library.value)).startswith("JSONDecodeError: Expecting property name")
    with pytest.raises(KeyError, match="missing") as own:
        {}["missing"]
    assert foreign_failure(own.value) is None
