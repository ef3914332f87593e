"""Keep the results of judged cuts on disk until a deployment is written, so that an interrupted one can resume."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from ..errors import OutputExistsError, RequestError
from ..measure.machine import machine_facts
from ..units import Selection
from .provenance import Request, RunRecord

logger = logging.getLogger(__name__)

_FIRST = TypeAdapter(dict[str, str])
_LINE = TypeAdapter(tuple[str, FiniteFloat, FiniteFloat])


class CutJournal:
    """The results of judged cuts, in a file beside an output; used as a context manager.

    The file is `NAME.unfinished.jsonl`. It is deleted when the block ends, and when the request is refused; an
    interruption or a failed stage leaves it for the next attempt. Its first line has a digest of everything that a
    cut's result depends on: the recipe without promise and output, model, data, machine and versions. A file with
    another digest is started again.
    """

    def __init__(self, asked: Request, commit: str | None = None):
        self.path = asked.output.with_name(f"{asked.output.name}.unfinished.jsonl")
        record = RunRecord.of(asked, commit=commit)
        fields = {name: value for name, value in record.recipe.items() if name not in ("deploy", "prune")}
        fields["prune"] = {name: value for name, value in record.recipe["prune"].items() if name != "budget"}
        whole = json.dumps([fields, dict(record.digests), machine_facts()], sort_keys=True, default=str)
        self._digest = hashlib.sha256(whole.encode()).hexdigest()
        self._known = self._read()
        self.found = len(self._known)

    def __enter__(self) -> CutJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, RequestError):
            self.path.unlink(missing_ok=True)
        elif self._known:
            logger.warning(
                "the results of %d judged cuts are kept in %s; run the same command again to resume",
                len(self._known),
                self.path,
            )

    def __len__(self) -> int:
        return len(self._known)

    def recall(
        self, selection: Selection, how: tuple[Any, ...], judge: Callable[[], tuple[float, ...]]
    ) -> tuple[float, float]:
        """Return the two numbers of a cut, by how it is refitted and served; judge it if they are not known."""
        kept = json.dumps([how, [list(kept.units) for kept in selection.values()]])
        key = hashlib.sha256(kept.encode()).hexdigest()
        if key not in self._known:
            found, end = judge()
            self._add(key, found, end)
        return self._known[key]

    def _read(self) -> dict[str, tuple[float, float]]:
        """Return the results in the file of an earlier attempt; an incomplete last line is ignored."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        first, *lines = content[: content.rfind(b"\n") + 1].splitlines() or [b""]
        try:
            digest = _FIRST.validate_json(first)["hies_export.deploy"]
            if digest == self._digest:
                return {key: (found, end) for key, found, end in map(_LINE.validate_json, lines)}
        except (ValidationError, KeyError):
            raise OutputExistsError(
                f"deploy must keep its results in {self.path}, but that is a file of something else; move it away, or "
                "choose another output"
            ) from None
        logger.warning("%s is of another model, recipe or machine; its cuts are judged again", self.path)
        return {}

    def _add(self, key: str, found: float, end: float) -> None:
        """Write the numbers of a cut to disk."""
        if not self._known:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({"hies_export.deploy": self._digest}) + "\n", encoding="utf-8")
        self._known[key] = (found, end)
        with self.path.open("rb+") as file:
            # After a killed attempt, the last line may lack its end.
            file.truncate(file.read().rfind(b"\n") + 1)
            file.seek(0, os.SEEK_END)
            file.write((json.dumps([key, found, end]) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
