import json
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from hies_export.errors import DataError, RequestError
from hies_export.files import Rule, Schema, check, parse_json, read_json


class Inner(Schema):
    counts: list[Annotated[int, Field(ge=0)]]
    name: str | list[str] | None = None


class Outer(Schema):
    parts: dict[str, Inner]


RULE = Rule("a thing must be JSON", "make another", DataError, megabytes=1)
GOOD = '{"parts": {"a.b": {"counts": [1, 2], "unknown": 3}}, "more": null}'


def test_a_value_comes_back_as_the_file_has_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(GOOD)
    found = read_json(tmp_path / "file", Outer, RULE)
    assert found == {"parts": {"a.b": {"counts": [1, 2], "unknown": 3}}, "more": None}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it is no JSON: EOF while parsing a value at line 1 column 0"),
        ("[1", "it is no JSON: EOF while parsing a list at line 1 column 2"),
        ("\0", "it is no JSON: expected value"),
        (b'{"a": "\xff"}', "it is no JSON: invalid unicode code point at line 1 column 8"),
        ('"\\ud800"', "it is no JSON: "),
        ("[" * 3000, "it is no JSON: recursion limit exceeded"),
        ("1" * 5000, "it is no JSON: number out of range"),
        ("[1]", r"in it the whole must be an object, got \[1\]"),
        ("{}", "in it parts is missing;"),
        ('{"parts": {"a.b": {}}}', r"in it parts\['a.b'\].counts is missing;"),
        (GOOD.replace("2]", '"2"]'), r"in it parts\['a.b'\].counts\[1\] must be a valid integer, got '2';"),
        (GOOD.replace("2]", "true]"), r"counts\[1\] must be a valid integer, got True;"),
        (GOOD.replace("1, 2", "-1, -2"), r"counts\[0\] must be greater than or equal to 0, got -1 \(and 1 more\);"),
        (GOOD.replace('"unknown"', '"name"'), r"parts\['a.b'\].name must be a valid string, got 3 \(and 1 more\);"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(text: Any, problem: str) -> None:
    with pytest.raises(DataError, match=f"^a thing must be JSON, but .*{problem}.*make another$"):
        parse_json(text, Outer, RULE, where="it")


def test_long_values_and_names_are_not_quoted_whole() -> None:
    inner = {"counts": "x" * 10_000}
    for large in ({"parts": {"n" * 10_000: 5}}, {"parts": {"a": inner}}, [["y" * 10_000] * 1000] * 9):
        with pytest.raises(DataError, match="must be") as caught:
            check(large, Outer, RULE, where="it")
        assert len(str(caught.value)) < 1000


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b" " * (10**6 + 1))
    for name, problem in (
        ("none", "there is no file .*none"),
        (".", r"cannot be read \(Is a directory\)"),
        ("nul\0", r"'.*nul\\x00' cannot be read \(embedded null byte\)"),
        ("n" * 5000, r"cannot be read \(File name too long\)"),
        ("large", "has more than 1 MB"),
    ):
        with pytest.raises(RequestError, match=f"a thing must be JSON, but .*{problem}; make another"):
            read_json(tmp_path / name, Outer, RULE)


@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("before", ["", "a", "\\", "\\\\", "\\u001b", '"'])
def test_control_characters_are_refused_where_text_is_shown(before: str, ascii: bool) -> None:
    """ESC and its like are commands to a terminal, also as U+0080 to U+009F."""
    shown = replace(RULE, shown=True)
    for code in (*range(0x100), 0x1F600):
        text = json.dumps({f"{before}{chr(code)}": chr(code)}, ensure_ascii=ascii)
        assert parse_json(text, Any, RULE, where="it") == json.loads(text)
        if unicodedata.category(chr(code)) == "Cc" and chr(code) not in "\t\n\r":
            with pytest.raises(DataError, match="a thing must be JSON, but it has a control character at byte"):
                parse_json(text, Any, shown, where="it")
        else:
            assert parse_json(text, Any, shown, where="it") == json.loads(text)
