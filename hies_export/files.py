"""Read JSON files against a schema, and refuse damaged ones in a sentence: the file, the place, what must be there.

Every JSON file that this package reads goes through `read_json`. A schema is a pydantic model, by default a `Schema`:
strict about types, and indifferent to fields that it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json

from .errors import LONGEST_VALUE, RequestError, quoted

MEGABYTE = 10**6
# Control characters in JSON: escaped, except tab and line breaks; or as bytes, which JSON allows for U+007F to U+009F.
_CONTROL = re.compile(
    rb"(?<!\\)(?:\\\\)*\\(?:[bf]|u00(?:0[0-8bcef]|1[0-9a-f]|7f|[89][0-9a-f]))|\x7f|\xc2[\x80-\x9f]", re.IGNORECASE
)


class Schema(BaseModel):
    """Base of the schemas of files: 1 is no text, "1" no number, true no integer; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


@dataclass(frozen=True)
class Rule:
    """What a file must be, in the words of its refusal.

    Attributes:
        must: Beginning of the sentence, such as "a plan must be JSON that hies_export wrote".
        remedy: End of the sentence: what to do.
        error: Class of the refusal.
        megabytes: Largest size of the file.
        shown: Whether its text is printed in terminals, where control characters act as commands.
    """

    must: str
    remedy: str
    error: type[RequestError] = RequestError
    megabytes: int = 64
    shown: bool = False

    def refused(self, problem: str) -> RequestError:
        """Return the error that says what is wrong."""
        return self.error(f"{self.must}, but {problem}; {self.remedy}")


def read_json(path: str | Path, schema: Any, rule: Rule) -> Any:
    """Return the unchanged content of a JSON file, after checking it against a schema."""
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(rule.megabytes * MEGABYTE + 1)
    except FileNotFoundError as error:
        raise rule.refused(f"there is no file {path}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise rule.refused(
            f"{quoted(str(path))} cannot be read ({getattr(error, 'strerror', None) or error})"
        ) from error
    if len(data) > rule.megabytes * MEGABYTE:
        raise rule.refused(f"{path} has more than {rule.megabytes} MB")
    return parse_json(data, schema, rule, where=str(path))


def parse_json(data: str | bytes, schema: Any, rule: Rule, *, where: str) -> Any:
    """Return the content of a JSON text, or of its bytes in UTF-8; see `read_json`. A refusal calls it `where`."""
    try:
        value = from_json(data)
    except ValueError as error:
        raise rule.refused(f"{where} is no JSON: {error}") from error
    control = _CONTROL.search(data if isinstance(data, bytes) else data.encode()) if rule.shown else None
    if control is not None:
        raise rule.refused(f"{where} has a control character at byte {control.start()}")
    check(value, schema, rule, where=where)
    return value


def check(value: Any, schema: Any, rule: Rule, *, where: str) -> Any:
    """Return a parsed value as the schema converts it, or raise the rule's error."""
    try:
        return _adapter(schema).validate_python(value)
    except ValidationError as error:
        raise rule.refused(f"in {where} {_problems(error, value)}") from error


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def _problems(error: ValidationError, value: Any) -> str:
    """Return the first problem that a schema finds in a value, and how many more there are."""
    found = error.errors(include_url=False)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return _objection(found[0], value) + more


def _objection(problem: ErrorDetails, value: Any) -> str:
    if problem["type"] == "missing":
        return f"{_place(problem['loc'][:-1], value, problem['loc'][-1])} is missing"
    place = _place(problem["loc"], value)
    if problem["type"] == "value_error":
        return f"{place}: {problem['ctx']['error']}"
    wanted = problem["msg"].replace("Input should", "must", 1)
    wanted = wanted.replace("a valid dictionary", "an object").replace("a dictionary", "an object")
    return f"{place} {re.split(' or (?:an )?instance of', wanted)[0]}, got {quoted(problem['input'])}"


def _place(location: Sequence[int | str], value: Any, *last: int | str) -> str:
    """Return a place in a JSON value as text, such as `kept["layer.0"].units[3]`.

    `location` comes from pydantic, which also names the members of unions that it tried; these are left out. `last`
    follows, and is not in the value.
    """
    parts: list[int | str] = []
    for part in location:
        if isinstance(part, int) if isinstance(value, list) else isinstance(value, dict) and part in value:
            parts.append(part)
            value = value[part]
    text = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" if _is_plain(part) else f"[{quoted(part)}]"
        for part in (*parts, *last)
    )
    return text.removeprefix(".") or "the whole"


def _is_plain(name: str) -> bool:
    return name.isidentifier() and len(name) <= LONGEST_VALUE
