"""Repeat a run from its report, and compare the new results with the report."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..checkpoint.folders import refuse_existing
from ..errors import ReproductionError, RequestError
from ..measure.rows import LatencyRow
from ..progress import SILENT, Progress
from ..report.report import Report
from ..values import PruningPlan
from .provenance import RunRecord
from .run import run

logger = logging.getLogger(__name__)

# What may differ on another machine or with other versions: rounding turns over a few choices between units that are
# nearly equal.
UNITS, SCORES, METRICS, STABILITY, SIZES = 0.02, 0.01, 0.01, 0.02, 0.02
# How much scores, metrics and stability may differ on the same machine. Units and counts may not differ.
ROUNDED = 1e-4


@dataclass(frozen=True)
class Compared:
    """One quantity of a run, as recorded and as repeated."""

    name: str
    recorded: str
    again: str
    difference: float | None = None  # None if it has no meaning
    allowed: float | None = None  # None if the quantity is only shown

    @property
    def holds(self) -> bool:
        """Whether the difference is allowed; NaN never is."""
        return self.allowed is None or (self.difference is not None and self.difference <= self.allowed)


@dataclass(frozen=True)
class Reproduction:
    """The comparison of a run with its repetition in another folder."""

    rows: tuple[Compared, ...]
    same_machine: bool  # whether hardware, threads and versions are those of the run, so that all must be equal
    output: Path

    def check(self) -> None:
        """Refuse a repetition with other results."""
        if different := [row.name for row in self.rows if not row.holds]:
            raise ReproductionError(
                f"a repeated run must give the results of its report, but {', '.join(different)} differ; compare it "
                f"with {self.output}"
            )


def reproduce(
    folder: Path, output: Path, *, overwrite: bool = False, command: str | None = None, progress: Progress = SILENT
) -> Reproduction:
    """Repeat a recorded run in a new folder, and compare plan, scores, metrics and sizes.

    On the same machine with the same versions, units and sizes must be equal, and scores, metrics and stability within
    1e-4: some processors round a product differently when it is repeated. Elsewhere units may differ by 2 % of all,
    scores by 1 % of the largest, metrics by 1 % of themselves, stability by 0.02, and sizes by 2 %. Time and the digest
    of refitted layers are shown but not judged. Neither is a choice that depends on measured time: under a latency
    budget, in a deployment, or in a cascade that chose its size.
    """
    folder = folder / "run" if not (folder / "report.json").exists() and (folder / "run").is_dir() else folder
    report = Report.from_file(folder)
    record = RunRecord.from_report(report, folder)
    request = record.request_at(folder, output)
    refuse_existing(output, overwrite=overwrite, inputs={"run": folder})
    before = _read(folder)
    record.check_inputs(request)
    again = run(request, overwrite=overwrite, command=command, progress=progress)
    differ = [name for name in again.environment if again.environment[name] != report.environment.get(name)]
    for name in differ:
        logger.warning(
            "the run was made with %s %s, and this is %s", name, report.environment.get(name), again.environment[name]
        )
    rows = [*_choice_rows(before, _read(output)), *_quality_rows(report, again), *_size_rows(report, again)]
    details = report.details
    by_latency = details.budget is not None and details.budget.kind == "latency"
    if by_latency or details.deployment is not None or (details.cascade is not None and details.cascade.tried):
        rows = [row if row.name in _BEFORE_CHOOSING else replace(row, allowed=None) for row in rows]
    if not differ:
        rows = [row if row.allowed is None else _tightened(row) for row in rows]
    return Reproduction((*rows, *_latency_rows(report, again)), not differ, output)


@dataclass(frozen=True)
class _Files:
    """What a run wrote beside its report."""

    plan: PruningPlan
    scores: Mapping[str, list[float]]


# Rows that do not depend on which units were chosen.
_BEFORE_CHOOSING = ("calibration batches", "criterion", "scores")


def _read(folder: Path) -> _Files:
    """Return the plan and the scores of a run."""
    file = folder / "scores.json"
    try:
        written = TypeAdapter(dict[str, Any]).validate_json(file.read_bytes())
        scores = TypeAdapter(dict[str, list[float]]).validate_python(written.get("scores"))
    except (OSError, ValidationError) as error:
        raise RequestError(
            f"a run must have its scores.json to be compared, but {file} is not one ({error}); make the run anew"
        ) from error
    return _Files(PruningPlan.from_file(folder / "plan.json"), scores)


def _choice_rows(one: _Files, other: _Files) -> Iterator[Compared]:
    """Compare the calibration batches, the scores, and the kept units."""
    fingerprints = [str(files.plan.calibration.get("fingerprint"))[:12] for files in (one, other)]
    yield _equal("calibration batches", *fingerprints)
    yield _equal("criterion", one.plan.criterion, other.plan.criterion)
    yield _equal("alpha", str(one.plan.alpha), str(other.plan.alpha))
    largest = [max((abs(v) for values in files.scores.values() for v in values), default=0.0) for files in (one, other)]
    apart = math.inf
    if {k: len(v) for k, v in one.scores.items()} == {k: len(v) for k, v in other.scores.items()}:
        pairs = ((a, b) for k, v in one.scores.items() for a, b in zip(v, other.scores[k], strict=True))
        apart = max((abs(a - b) for a, b in pairs), default=0.0) / (largest[0] or 1.0)
    yield Compared("scores", f"to {largest[0]:.6g}", f"to {largest[1]:.6g}", apart, SCORES)
    kept = [{(name, unit) for name, k in files.plan.kept.items() for unit in k.units} for files in (one, other)]
    total = sum(k.total for k in one.plan.kept.values())
    yield Compared("units kept", f"{len(kept[0]):,}", f"{len(kept[1]):,}", len(kept[0] ^ kept[1]) / total, UNITS)
    refits = [files.plan.refit for files in (one, other)]
    if refits[0] is not None:
        # A digest is of bytes, which rounding changes; quality tells whether that matters.
        before, now = (str(refit)[:12] for refit in refits)
        yield Compared("refitted layers", before, now, float(refits[0] != refits[1]), None if refits[1] else 0.0)


def _quality_rows(one: Report, other: Report) -> Iterator[Compared]:
    """Compare all metrics and benchmarks of both models, and the stability."""
    for which in ("dense", "slim"):
        yield _number(f"{one.quality.metric}, {which}", one.quality[which], other.quality[which], METRICS)
    for kind in ("metrics", "benchmarks"):
        again = getattr(other.details, kind)
        for name, values in getattr(one.details, kind).items():
            if name != one.quality.metric:
                for which in ("dense", "slim"):
                    found = again.get(name, {}).get(which, math.nan)
                    yield _number(f"{name}, {which}", values[which], found, METRICS)
    a, b = one.stability, other.stability
    yield Compared("stability", f"{a:.6g}", f"{b:.6g}", abs(a - b), STABILITY)


def _size_rows(one: Report, other: Report) -> Iterator[Compared]:
    """Compare parameters and FLOPs."""
    for name in ("parameters", "flops"):
        for which in ("dense", "slim"):
            recorded, again = (getattr(getattr(report, name), which) for report in (one, other))
            yield _number(f"{name}, {which}", recorded, again, SIZES)


def _latency_rows(one: Report, other: Report) -> Iterator[Compared]:
    """Show both ratios of every row of `latency`."""

    def name(row: LatencyRow) -> str:
        return f"time slim / dense, {row.runtime}, {row.dtype}, {row.phase}, {row.batch} x {row.sequence}"

    again = {name(row): f"{row.ratio:.3f}" for row in other.latency}
    for row in one.latency:
        yield Compared(name(row), f"{row.ratio:.3f}", again.get(name(row), "not measured"))


def _number(name: str, one: float, other: float, allowed: float) -> Compared:
    """Compare two numbers, relative to the first."""
    difference = 0.0 if one == other else abs(one - other) / (abs(one) or 1.0)
    return Compared(name, f"{one:.6g}", f"{other:.6g}", difference, allowed)


def _equal(name: str, one: str, other: str) -> Compared:
    """Compare two texts, which must be equal."""
    return Compared(name, one, other, float(one != other), 0.0)


def _tightened(row: Compared) -> Compared:
    allowed = ROUNDED if row.name == "stability" or row.allowed in (SCORES, METRICS) else 0.0
    return replace(row, allowed=allowed)
