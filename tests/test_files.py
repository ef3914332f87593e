import json
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from hies_export.errors import DataError, HiesError, RequestError, refusing
from hies_export.files import Rule, Schema, check, parse_json, read_json


class Inner(Schema):
    counts: list[Annotated[int, Field(ge=0)]]


class Outer(Schema):
    parts: dict[str, Inner]


RULE = Rule("a thing must be JSON", "make another", DataError, megabytes=1)
GOOD = '{"parts": {"a": {"counts": [1, 2], "unknown": 3}}, "more": null}'


def test_a_value_comes_back_as_the_file_has_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(GOOD)
    assert read_json(tmp_path / "file", Outer, RULE) == json.loads(GOOD)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1", "is no JSON: ValueError: EOF while parsing a list at line 1 column 2"),
        (b'{"a": "\xff"}', "is no JSON: ValueError: invalid unicode code point"),
        ("[" * 3000, "is no JSON: ValueError: recursion limit exceeded"),
        ("[1]", r"Input should be a valid dictionary.*, got \[1\]"),
        ('{"parts": {"a": {}}}', "parts.a.counts: Field required"),
        (GOOD.replace("1, 2", '-1, "2"'), r"parts.a.counts.0: Input should be .* equal to 0, got -1 \(and 1 more\)"),
        (" " * (10**6 + 1), "has more than 1 MB"),
        (None, "cannot be read: FileNotFoundError"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(text: Any, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=rf"^a thing must be JSON, but .*{file}'? {problem}.*; make another$"):
        read_json(file, Outer, RULE)


def test_long_values_and_names_are_not_quoted_whole() -> None:
    for large in (
        {"parts": {"n" * 10_000: 5}},
        {"parts": {"a": {"counts": "x" * 10_000}}},
        [["y" * 10_000] * 1000] * 9,
    ):
        with pytest.raises(DataError, match="Input should be") as caught:
            check(large, Outer, RULE, where="it")
        assert len(str(caught.value)) < 1200


def test_an_error_of_a_library_becomes_one_sentence_with_its_root_cause() -> None:
    def fail(error: Exception, cause: Exception | None = None) -> None:
        with refusing("it must load, but does not", "try another", DataError):
            raise error from cause

    with pytest.raises(DataError, match="^it must load, but does not: KeyError: 'two'; try another$"):
        fail(ValueError("one"), KeyError("two"))
    with pytest.raises(RequestError, match="^ours$"):
        fail(RequestError("ours"))
    for error in (MemoryError(), RuntimeError("CUDA out of memory")):  # another file would not help
        with pytest.raises(type(error)) as caught:  # MemoryError has no text
            fail(error)
        assert not isinstance(caught.value, HiesError)


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
