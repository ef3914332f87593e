"""Say what a budget asked for, what was predicted of the selection, and what was measured of the slim model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..measure.counts import FlopCount
from ..measure.rows import LatencyRow


@dataclass(frozen=True)
class BudgetOutcome:
    """A budget, and how the run kept it.

    Attributes:
        kind: Its field in the recipe: "heads", "flops", "latency" or "max_drop".
    """

    kind: str

    def details(self) -> dict[str, Any]:
        """Return the fields that are known, for report.json."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class HeadsOutcome(BudgetOutcome):
    """A share of the heads.

    Attributes:
        target: The share to remove.
    """

    target: float | None


@dataclass(frozen=True)
class CostOutcome(BudgetOutcome):
    """A share of the dense model's FLOPs or time.

    Attributes:
        target: The share at the most.
        predicted: The share that the cost table predicts.
        runtime, batch, sequence: Where time counts; None for FLOPs.
        table: The cuts that were timed; None for FLOPs.
        measured: The share that was counted or timed.
        noisy: Whether the machine was too busy for that time to mean much; None for FLOPs.
    """

    target: float
    predicted: float
    runtime: str | None = None
    batch: int | None = None
    sequence: int | None = None
    table: tuple[Mapping[str, float], ...] | None = None
    measured: float | None = None
    noisy: bool | None = None

    def with_measured(self, flops: FlopCount, latency: Iterable[LatencyRow]) -> CostOutcome:
        """Return the outcome with what was counted or timed of the slim model."""
        if self.kind == "flops":
            return replace(self, measured=flops.ratio)
        wanted = (self.runtime, self.batch, self.sequence)
        rows = (row for row in latency if row.phase != "decode")
        row = next(row for row in rows if (row.runtime, row.batch, row.sequence) == wanted)
        return replace(self, measured=row.ratio, noisy=row.noisy)


@dataclass(frozen=True)
class MaxDropOutcome(BudgetOutcome):
    """As much as a metric on held-out rows allows.

    Attributes:
        metric: Its name.
        by: How much worse it may get.
        dense: Of the dense model.
        refitted: Of the selection, judged cut and refitted; None where it was judged masked.
        masked: Of the selection, judged masked; None where it was judged refitted.
        samples: Number of held-out samples.
        judged: What was tried.
        slim: Of the slim model.
    """

    metric: str
    by: float
    dense: float
    refitted: float | None
    masked: float | None
    samples: int
    judged: tuple[Mapping[str, Any], ...]
    slim: float | None = None
