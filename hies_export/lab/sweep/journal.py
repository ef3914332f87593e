"""Write each finished cell of a sweep as a line of JSON, so that the sweep can continue after `kill -9`.

Every worker writes its own journal, so that no file has two writers, and reads those of all workers as one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from ...errors import OutputExistsError, RequestError
from .entries import parse_first, parse_line

logger = logging.getLogger(__name__)

# `journal.jsonl` is the name from before a sweep could have several workers.
NAMES = "journal*.jsonl"
FORMAT = 1


class Journal:
    """The journals in a sweep's folder, and the one that this worker writes, open inside a `with` block.

    The first line of a journal has a digest of every field that decides the results, `asked`. They must match: the
    journal of another recipe is refused, and so is a non-empty folder without a journal. `rows` and `alphas` are by
    `Cell.key`, `latency` by `Stopwatch.key`.
    """

    def __init__(self, folder: Path, *, asked: Mapping[str, Any], overwrite: bool = False):
        self.rows: dict[str, dict[str, Any]] = {}
        self.alphas: dict[str, dict[str, Any]] = {}
        self.latency: dict[str, dict[str, Any]] = {}
        self._folder, self._path = folder, folder / f"journal-{_worker()}.jsonl"
        self._file: BinaryIO | None = None
        self._digests = {field: _digest(value) for field, value in asked.items()}
        # Bytes and lines read of each journal.
        self._done: dict[Path, tuple[int, int]] = {}
        # In this order: a worker that begins beside this one writes its journal before anything else.
        occupied = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
        found = sorted(folder.glob(NAMES))
        if occupied and not found:
            raise OutputExistsError(
                f"a sweep needs a folder that is new or holds journals of a sweep, but {folder} holds something else; "
                "choose another, or move or delete that one yourself"
            )
        for path in found if overwrite else ():
            path.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        self.refresh()
        if overwrite or not found:
            self._open()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        if error is not None and not isinstance(error, RequestError) and self.rows:
            logger.warning(
                "%d finished rows are kept in %s; run the same command again to resume", len(self.rows), self._folder
            )

    def add(self, key: str, value: Mapping[str, Any], *, kind: str = "row") -> None:
        """Write the entry of a finished cell to disk, or one of another kind: an "alpha" curve, or a "latency"."""
        self._take(self._append({"kind": kind, "key": key, "value": value}))

    def refresh(self) -> Journal:
        """Read what other workers have written since the last time, and return the journal."""
        for path in sorted(self._folder.glob(NAMES)):
            if path != self._path:
                self._read(path)
        return self

    def reread(self) -> None:
        """Read all journals from the start, so that every worker takes the same row of a cell that has two."""
        for entries in (self.rows, self.alphas, self.latency):
            entries.clear()
        self._done.clear()
        for path in sorted(self._folder.glob(NAMES)):
            self._read(path)

    def _open(self) -> BinaryIO:
        """Create this worker's journal with its first line."""
        self._file = self._path.open("xb")
        self._append({"kind": "sweep", "format": FORMAT, "asked": self._digests})
        return self._file

    def _append(self, line: dict[str, Any]) -> dict[str, Any]:
        """Write a line to disk, and return it as it will be read."""
        file = self._file or self._open()
        text = json.dumps(line) + "\n"
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
        return dict(json.loads(text))

    def _take(self, line: dict[str, Any]) -> None:
        """Remember a line; the first line of a cell counts."""
        entries = {"row": self.rows, "alpha": self.alphas, "latency": self.latency}.get(line["kind"])
        if entries is not None:
            entries.setdefault(line["key"], line["value"])

    def _read(self, path: Path) -> None:
        """Read the complete lines of a journal that were not there the last time.

        A last line without its end was being written, or its writer was killed: its cell is not finished.
        """
        read_bytes, read_lines = self._done.get(path, (0, 0))
        with path.open("rb") as file:
            file.seek(read_bytes)
            content = file.read()
        complete = content.rfind(b"\n") + 1
        lines = content[:complete].splitlines()
        if not lines:
            return
        for number, line in enumerate(lines, read_lines + 1):
            if number == 1:
                self._check_first(line, path)
            else:
                self._take(parse_line(line, path, number))
        self._done[path] = read_bytes + complete, read_lines + len(lines)

    def _check_first(self, line: bytes, path: Path) -> None:
        """Refuse the journal of another recipe."""
        asked = parse_first(line, path)
        differ = [field for field in {**asked, **self._digests} if asked.get(field) != self._digests.get(field)]
        if differ:
            raise RequestError(
                f"the journal in {path.parent} must be of the same recipe to go on with it, but it has another "
                f"{', '.join(differ)}; choose another folder or pass --overwrite to begin anew"
            )


def _worker() -> str:
    """Return a name for this worker that no other has, such as "node3-4711-09af83c1"."""
    host = re.sub(r"[^A-Za-z0-9.]+", "-", socket.gethostname())[:60]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
