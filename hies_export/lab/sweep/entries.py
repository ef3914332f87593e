"""Check the lines of a sweep's journal before the sweep resumes from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ...files import Rule, Schema, check, parse_json

RULE = Rule(
    "a journal must be lines of JSON written by hies-export sweep",
    "choose another folder or pass --overwrite to begin anew",
    shown=True,
)


class _First(Schema):
    """The first line of a journal."""

    asked: dict[str, str]


class _Line(Schema):
    """Any other line."""

    kind: str
    key: str
    value: dict[str, Any]


class _Result(Schema):
    metric: str
    quality: float
    quality_dense: float
    stability: float


class _Row(Schema):
    """A finished cell."""

    judged: str
    alpha: float | None
    samples: int
    result: _Result
    lost: dict[str, int] | None = None


class _Point(Schema):
    alpha: float
    quality: float | None
    stability: float


class _Alpha(Schema):
    """A finished alpha curve."""

    chosen: float
    curve: Annotated[list[_Point], Field(min_length=1)]


class _Timing(Schema):
    latency_ratio: float
    latency_low: float
    latency_high: float
    latency_noisy: bool


_VALUES = {"row": _Row, "alpha": _Alpha, "latency": _Timing}


def parse_first(line: bytes, path: Path) -> dict[str, str]:
    """Return `asked` of a journal's first line, or refuse it."""
    asked: dict[str, str] = parse_json(line, _First, RULE, where=f"line 1 of {path}")["asked"]
    return asked


def parse_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """Return what another line of a journal holds, or refuse it; lines are numbered from 1."""
    where = f"line {number} of {path}"
    entry: dict[str, Any] = parse_json(line, _Line, RULE, where=where)
    check(entry["value"], _VALUES.get(entry["kind"], dict[str, Any]), RULE, where=where)
    return entry
