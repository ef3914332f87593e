"""Write each finished cell of a sweep as a line of JSON, so that the sweep can continue after `kill -9`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import OutputExistsError, RequestError
from .entries import parse_first, parse_line

NAME = "journal.jsonl"
FORMAT = 1


class Journal:
    """The journal of a sweep's folder, open inside a `with` block.

    Its first line has a digest of every field that decides the results. They must match: the journal of another recipe
    is refused.

    Attributes:
        rows: Entries of the finished cells, by `Cell.key`.
        alphas: Finished alpha curves, by `Cell.key`.
        latency: Finished timings, by `Stopwatch.key`.

    Args:
        folder: Folder of the journal; created if it does not exist.
        asked: The fields that decide the results, with values that JSON can hold.
        overwrite: Discard an existing journal.

    Raises:
        OutputExistsError: The folder holds something, but no journal.
        RequestError: The journal belongs to another recipe, or is not readable; the message says which.
    """

    def __init__(self, folder: Path, *, asked: Mapping[str, Any], overwrite: bool = False):
        self.rows: dict[str, dict[str, Any]] = {}
        self.alphas: dict[str, dict[str, Any]] = {}
        self.latency: dict[str, dict[str, Any]] = {}
        self._path = folder / NAME
        digests = {field: _digest(value) for field, value in asked.items()}
        there = self._path.is_file()
        if not there and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OutputExistsError(
                f"a sweep needs a folder that is new or holds its {NAME}, but {folder} holds something else; choose "
                "another, or move or delete that one yourself"
            )
        found = there and not overwrite
        complete = self._read(digests) if found else 0
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("r+b" if complete else "wb")
        # Remove a last line that was only written in part when the process was killed.
        self._file.truncate(complete)
        self._file.seek(complete)
        if not complete:
            self._write({"kind": "sweep", "format": FORMAT, "asked": digests})

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, key: str, row: Mapping[str, Any]) -> None:
        """Write the entry of a finished cell to disk."""
        self._write({"kind": "row", "key": key, "value": row})

    def add_alpha(self, key: str, curve: Mapping[str, Any]) -> None:
        """Write an alpha curve to disk."""
        self._write({"kind": "alpha", "key": key, "value": curve})

    def add_latency(self, key: str, timing: Mapping[str, Any]) -> None:
        """Write a timing to disk."""
        self._write({"kind": "latency", "key": key, "value": timing})

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line) + "\n"
        self._file.write(text.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._take(json.loads(text))

    def _take(self, line: dict[str, Any]) -> None:
        if line["kind"] == "row":
            self.rows[line["key"]] = line["value"]
        elif line["kind"] == "alpha":
            self.alphas[line["key"]] = line["value"]
        elif line["kind"] == "latency":
            self.latency[line["key"]] = line["value"]

    def _read(self, digests: Mapping[str, str]) -> int:
        """Read the complete lines, and return their size in bytes."""
        content = self._path.read_bytes()
        complete = content.rfind(b"\n") + 1
        lines = content[:complete].splitlines()
        if not lines:
            return 0
        asked = parse_first(lines[0], self._path)
        for number, line in enumerate(lines[1:], 2):
            self._take(parse_line(line, self._path, number))
        differ = [field for field in {**asked, **digests} if asked.get(field) != digests.get(field)]
        if differ:
            raise RequestError(
                f"the journal in {self._path.parent} must be of the same recipe to go on with it, but it has another "
                f"{', '.join(differ)}; choose another folder or pass --overwrite to begin anew"
            )
        return complete


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
