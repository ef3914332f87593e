"""Recipe files that are damaged or hostile, against PyYAML for those that are neither."""

import random
import string
from pathlib import Path
from typing import Any

import pytest
import yaml

from hies_export.errors import RecipeError
from hies_export.pipeline.recipe import MOST_BYTES, PruningRecipe, parse_yaml, read_yaml

RECIPES = sorted((Path(__file__).parents[1] / "recipes").rglob("*.yaml"))
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_our_own_recipes_read_as_pyyaml_reads_them() -> None:
    assert len(RECIPES) > 3
    for path in RECIPES:
        assert read_yaml(path) == yaml.safe_load(path.read_text(encoding="utf-8"))


def tree(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(8 if depth < 4 else 6)
    if kind == 6:
        return [tree(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind == 7:
        return {f"k{i} é": tree(chance, depth + 1) for i in range(chance.randrange(4))}
    words = ("", "no", "2020-01-01", "1_0", "x: y", "<<", "=", "a\nb", "".join(chance.sample(string.printable[:95], 9)))
    plain = (None, chance.random() < 0.5, chance.randint(-99, 10**9), chance.uniform(-5, 5), chance.choice(words))
    return plain[min(kind, 4)]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_pyyaml_writes_comes_back(seed: int) -> None:
    wanted = tree(random.Random(seed))
    assert parse_yaml(yaml.safe_dump(wanted, allow_unicode=True), source="r") == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\n1: 2", "in line 2: a key must be printable text, .* got '1'"),
        ("a: 1\n? [b]\n: 2", "in line 2: a key must be printable text, .* got a list or a mapping"),
        ("a: 1\n<<: {b: 1}", "in line 2: a key must be printable text, .* got '<<'"),
        ('"a\\0": 1', r"in line 1: a key must be printable text, .* got 'a\\x00'"),
        ("a: 1\nb: 2\n\na: 3", "in line 4: .*found duplicate key .a."),
        ("a: {b: 1, b: 1}", "in line 1: .*found duplicate key .b."),
        ("\nx: !!int abc", "in line 2: 'abc' is no number"),
        ("a: &a 1\nb: &a 2", r"in line 1: anchors \(&\) and aliases \(\*\) are not allowed"),
        ("x: !!python/object/apply:os.system [ls]", r"in line 1: tags \(!\) are not allowed"),
        (BOMB, r"in line 1: anchors \(&\) and aliases \(\*\) are not allowed"),
        ("a: &a 1\nb: *a", r"in line 1: anchors \(&\) and aliases \(\*\) are not allowed"),
        ("a: " + "[" * 3000, "in line 1: values may be at most 20 levels deep"),
        ("- " * 3000 + "a", "in line 1: values may be at most 20 levels deep"),
        ("a: 1\nb: " + "9" * 5000, "in line 2: a number may have at most 40 characters"),
        ("a: 0x_", "in line 1: '0x_' is no number"),
        ("a: !!int ''", "in line 1: '' is no number"),
        ("a: [1,\n", "in line 2: while parsing a flow sequence, expected ',' or ']'|while parsing a flow node"),
        ("a: b: c", "in line 1: mapping values are not allowed here"),
        ("a: 1\nb: \0", "in line 2: the character 0x0 is not allowed"),
        ("a: 1\n---\nb: 1", "in line 2: .*expected a single document in the stream"),
        ("x" * (MOST_BYTES + 1), "must have at most 64 KiB, got more"),
    ],
)
def test_what_is_not_plain_is_refused_with_file_and_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=said) as error:
        PruningRecipe.from_yaml(path)
    assert str(path) in str(error.value)
    assert len(str(error.value)) < 2000


def test_files_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    for content, said in (
        (b"a: 1\nb: \xff\n", "recipe.yaml must be plain YAML, but in line 2: a byte is not UTF-8"),
        ("a: 1".encode("utf-16"), "in line 1: a byte is not UTF-8"),
        (b"\xff" * (MOST_BYTES + 1), "must have at most 64 KiB, got more"),
    ):
        path.write_bytes(content)
        with pytest.raises(RecipeError, match=said):
            PruningRecipe.from_yaml(path)
    for name in (".", "a\0b", "x" * 300):
        with pytest.raises(RecipeError, match="there is no file"):
            PruningRecipe.from_yaml(tmp_path / name)


def test_values_are_of_yaml_1_2() -> None:
    assert parse_yaml("{a: no, b: 1e-3, c: 2020-01-01, on: 1}", source="r") == {
        **{"a": "no", "b": 0.001, "c": "2020-01-01", "on": 1}
    }


def test_a_date_is_text_where_text_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: 2020-99-99\nx: 2020-99-99")
    with pytest.raises(RecipeError, match="x is not a field of the recipe"):
        PruningRecipe.from_yaml(path)


@pytest.mark.parametrize(
    "fields",
    [
        {f"field {i}": i for i in range(100)},
        {"model": "x" * 60000},
        {"x" * 60000: 1},
        {"model": [["x" * 1000] * 10] * 10},
        {"prune": {"criterion": "x" * 60000}},
        {"data": {"files": {"x" * 30000: "x" * 30000}}},
    ],
)
def test_messages_are_bounded(fields: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"^\d+ problems:\n") as error:
        PruningRecipe(**fields)
    assert len(str(error.value)) < 10_000
    if len(fields) > 20:
        assert str(error.value).endswith("  - and 84 more")  # 100, and the four that must be given
        assert len(error.value.problems) == 104
