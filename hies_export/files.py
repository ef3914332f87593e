"""Read JSON files against a schema, and refuse damaged ones in a sentence.

Every JSON file that this package reads goes through `read_json`. A schema is a pydantic model, by default a `Schema`:
strict about types, and indifferent to fields that it does not know.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import from_json

from .errors import RequestError, quoted, refusing, shortened

MEGABYTE = 10**6
# Control characters in JSON: escaped, except tab and line breaks; or as bytes, which JSON allows for U+007F to U+009F.
_CONTROL = re.compile(
    rb"(?<!\\)(?:\\\\)*\\(?:[bf]|u00(?:0[0-8bcef]|1[0-9a-f]|7f|[89][0-9a-f]))|\x7f|\xc2[\x80-\x9f]", re.IGNORECASE
)


class Schema(BaseModel):
    """Base of the schemas of files: types are strict (1 is no text, true no integer), unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


@dataclass(frozen=True)
class Rule:
    """What a file must be, in the words of its refusal."""

    must: str  # beginning of the sentence, such as "a plan must be JSON that hies_export wrote"
    remedy: str  # end of the sentence: what to do
    error: type[RequestError] = RequestError  # class of the refusal
    megabytes: int = 64  # largest size of the file
    shown: bool = False  # whether its text is printed in terminals, where control characters act as commands

    def refused(self, problem: str) -> RequestError:
        """Return, without raising it, the error that says what is wrong."""
        return self.error(f"{self.must}, but {problem}; {self.remedy}")


def read_json(path: str | Path, schema: Any, rule: Rule) -> Any:
    """Return the parsed content of a JSON file, not converted, after checking it against a schema.

    Raises:
        RequestError: Of the rule's class: the file cannot be read, is too large, or breaks the schema.
    """
    must = f"{rule.must}, but {quoted(str(path))} cannot be read"
    with refusing(must, rule.remedy, rule.error), Path(path).open("rb") as stream:
        data = stream.read(rule.megabytes * MEGABYTE + 1)
    if len(data) > rule.megabytes * MEGABYTE:
        raise rule.refused(f"{path} has more than {rule.megabytes} MB")
    return parse_json(data, schema, rule, where=str(path))


def parse_json(data: str | bytes, schema: Any, rule: Rule, *, where: str) -> Any:
    """Return the content of a JSON text, or of its UTF-8 bytes, as `read_json` does; errors call it `where`."""
    with refusing(f"{rule.must}, but {where} is no JSON", rule.remedy, rule.error):
        value = from_json(data)
    data = data.encode() if isinstance(data, str) else data
    if rule.shown and (control := _CONTROL.search(data)):
        raise rule.refused(f"{where} has a control character at byte {control.start()}")
    check(value, schema, rule, where=where)
    return value


def check(value: Any, schema: Any, rule: Rule, *, where: str) -> Any:
    """Return a parsed value as the schema converts it, or raise the rule's error, which calls it `where`."""
    try:
        return _adapter(schema).validate_python(value)
    except ValidationError as error:
        first, *more = error.errors(include_url=False)
        # The message of a "value_error", raised by a validator of ours, quotes the input already.
        got = "" if first["type"] in ("missing", "value_error") else f", got {quoted(first['input'])}"
        says = "is not known" if first["type"] == "extra_forbidden" else first["msg"]
        field = ".".join(map(str, first["loc"]))  # empty if the value as a whole is wrong
        problem = shortened(f"{field}: {says}{got}" if field else f"{says}{got}")
        raise rule.refused(f"in {where} {problem}" + (f" (and {len(more)} more)" if more else "")) from error


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)
