"""Recipe files that are damaged; and those that are not, against PyYAML."""

import random
import string
from pathlib import Path
from typing import Any

import pytest
import yaml

from hies_export.errors import RecipeError
from hies_export.pipeline.recipe import PruningRecipe, parse_yaml

RECIPES = sorted((Path(__file__).parents[1] / "recipes").rglob("*.yaml"))


def test_our_own_recipes_read_as_pyyaml_reads_them() -> None:
    assert len(RECIPES) > 3
    for path in RECIPES:
        text = path.read_text(encoding="utf-8")
        assert parse_yaml(text, source="r") == yaml.safe_load(text)


def tree(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(8 if depth < 4 else 6)
    if kind == 6:
        return [tree(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind == 7:
        return {f"k{i} é": tree(chance, depth + 1) for i in range(chance.randrange(4))}
    words = ("", "no", "2020-01-01", "1_0", "x: y", "<<", "=", "a\nb", "".join(chance.sample(string.printable[:95], 9)))
    plain = (None, chance.random() < 0.5, chance.randint(-99, 10**9), chance.uniform(-5, 5), chance.choice(words))
    return plain[min(kind, 4)]


@pytest.mark.parametrize("seed", range(10))
def test_whatever_pyyaml_writes_comes_back(seed: int) -> None:
    wanted = tree(random.Random(seed))
    assert parse_yaml(yaml.safe_dump(wanted, allow_unicode=True), source="r") == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\n\na: 3", "found duplicate key .a..*line 4"),
        ("\nx: !!int abc", "abc"),
        ("x: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("a: " + "[" * 3000, ""),
        ("a: 1\nb: " + "9" * 5000, ""),
        ("a: 1\nb: \0", "not allowed"),
        ("a: 1\n---\nb: 1", "expected a single document in the stream"),
    ],
)
def test_what_is_not_plain_is_refused_with_the_file(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=f"must be plain YAML: .*{said}") as error:
        PruningRecipe.from_yaml(path)
    assert str(path) in str(error.value)
    assert len(str(error.value)) < 2000


def test_files_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(RecipeError, match="recipe.yaml must be a file that can be read: UnicodeDecodeError"):
        PruningRecipe.from_yaml(path)
    for name in (".", "a\0b", "x" * 300):
        with pytest.raises(RecipeError, match="there is no file"):
            PruningRecipe.from_yaml(tmp_path / name)


def test_values_are_of_yaml_1_2() -> None:
    assert parse_yaml("{a: no, b: 1e-3, on: 1}", source="r") == {**{"a": "no", "b": 0.001, "on": 1}}


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({f"field {i}": i for i in range(100)}, 103),  # and the three that must be given
        ({"model": [["x" * 1000] * 10] * 10}, 3),
        ({"x" * 60_000: 1}, 4),
        ({"prune": {"criterion": "x" * 60_000}}, 4),
    ],
)
def test_messages_are_bounded(fields: dict[str, Any], count: int) -> None:
    with pytest.raises(RecipeError, match=rf"^{count} problems:\n") as error:
        PruningRecipe(**fields)
    assert len(str(error.value)) < 10_000
    assert len(error.value.problems) == count
    assert count < 100 or str(error.value).endswith("  - and 83 more")
