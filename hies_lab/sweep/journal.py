"""Write each finished cell of a sweep as a line of JSON, so that the sweep can continue after `kill -9`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

from pydantic import Field

from hies_export.errors import OutputExistsError, RequestError
from hies_export.files import Rule, Schema, check, parse_json

logger = logging.getLogger(__name__)

NAME = "journal.jsonl"
RULE = Rule(
    "a journal must be lines of JSON written by hies-export sweep",
    "choose another folder or pass --overwrite to begin anew",
    shown=True,
)


class _First(Schema):
    """The first line."""

    asked: dict[str, str]


class _Line(Schema):
    """Any other line, whose value is as in `_VALUES`."""

    kind: str
    key: str
    value: dict[str, Any]


class _Result(Schema):
    metric: str
    quality: float
    quality_dense: float
    stability: float


class _Row(Schema):
    judged: str
    alpha: float | None
    samples: int
    result: _Result
    kept: dict[str, list[int]] | None = None
    lost: dict[str, int] | None = None


class _Point(Schema):
    alpha: float
    quality: float | None
    stability: float


class _Alpha(Schema):
    chosen: float
    curve: Annotated[list[_Point], Field(min_length=1)]


class _Timing(Schema):
    latency_ratio: float
    latency_low: float
    latency_high: float
    latency_noisy: bool


_VALUES = {"row": _Row, "alpha": _Alpha, "latency": _Timing}


class Journal:
    """The journal in a sweep's folder, which one process writes inside a `with` block.

    The first line has a digest of every field that decides the results, `asked`. They must match: the journal of
    another recipe, or of other files, is refused, and so is a non-empty folder without a journal. `rows` and `alphas`
    are by `Shared.key`, `latency` by what was timed and how.
    """

    def __init__(self, folder: Path, *, asked: Mapping[str, Any], overwrite: bool = False):
        self.rows: dict[str, dict[str, Any]] = {}
        self.alphas: dict[str, dict[str, Any]] = {}
        self.latency: dict[str, dict[str, Any]] = {}
        self._by_kind = {"row": self.rows, "alpha": self.alphas, "latency": self.latency}
        self._folder, self._path = folder, folder / NAME
        self._digests = {field: digest(value) for field, value in asked.items()}
        occupied = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
        if occupied and not self._path.is_file():
            raise OutputExistsError(
                f"a sweep needs a folder that is new or holds the journal of a sweep, but {folder} holds something "
                "else; choose another, or move or delete that one yourself"
            )
        folder.mkdir(parents=True, exist_ok=True)
        complete = self._read() if occupied and not overwrite else 0
        self._file = self._path.open("ab")
        # What a kill left of a last line goes, and with `overwrite` everything.
        self._file.truncate(complete)
        if not complete:
            self._append({"kind": "sweep", "asked": self._digests})

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if error is not None and not isinstance(error, RequestError) and self.rows:
            logger.warning(
                "%d finished rows are kept in %s; run the same command again to resume", len(self.rows), self._folder
            )

    def add(self, key: str, value: Mapping[str, Any], *, kind: str = "row") -> None:
        """Write the entry of a finished cell to disk, or one of another kind: an "alpha" curve, or a "latency"."""
        self._by_kind[kind][key] = self._append({"kind": kind, "key": key, "value": value})["value"]

    def _append(self, line: dict[str, Any]) -> dict[str, Any]:
        """Write a line to disk, and return it as it will be read."""
        text = json.dumps(line) + "\n"
        self._file.write(text.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        return dict(json.loads(text))

    def _read(self) -> int:
        """Read the complete lines, and return how many bytes they are.

        A last line without its end was being written when its writer was killed: its cell is not finished.
        """
        content = self._path.read_bytes()
        complete = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:complete].splitlines(), 1):
            where = f"line {number} of {self._path}"
            if number == 1:
                self._check_asked(parse_json(line, _First, RULE, where=where)["asked"])
                continue
            entry = parse_json(line, _Line, RULE, where=where)
            check(entry["value"], _VALUES.get(entry["kind"], dict[str, Any]), RULE, where=where)
            self._by_kind.setdefault(entry["kind"], {})[entry["key"]] = entry["value"]
        return complete

    def _check_asked(self, asked: Mapping[str, str]) -> None:
        """Refuse the journal of another recipe."""
        differ = [field for field in {**asked, **self._digests} if asked.get(field) != self._digests.get(field)]
        if differ:
            raise RequestError(
                f"the journal in {self._folder} must be of the same recipe to go on with it, but it has another "
                f"{', '.join(differ)}; choose another folder or pass --overwrite to begin anew"
            )


def digest(value: Any) -> str:
    """Return a short hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
