"""Record a budget: what was asked for, what was predicted for the plan, and what was measured on the slim model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..measure.counts import Both, FlopCount
from ..measure.rows import LatencyRow


@dataclass(frozen=True)
class BudgetOutcome:
    """A budget, and how the run met it.

    Attributes:
        kind: Name of the budget's field in the recipe: "heads", "flops", "parameters", "latency" or "max_drop".
    """

    kind: str

    def details(self) -> dict[str, Any]:
        """Return the fields that are not None, for report.json."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class HeadsOutcome(BudgetOutcome):
    """A budget of heads.

    Attributes:
        target: Share of the heads to remove, in [0, 1].
    """

    target: float | None


@dataclass(frozen=True)
class CostOutcome(BudgetOutcome):
    """A budget of FLOPs, parameters or time, as a share of the dense model's.

    Attributes:
        target: Largest share allowed.
        predicted: Share that the cost table predicts.
        runtime, batch, sequence: Where time is measured; None for what is counted.
        table: The timed cuts behind the prediction, `CostTable.measured`; None for what is counted.
        measured: Share that was counted or timed; None until then.
        noisy: Whether the control shows that `measured` is unreliable; None for what is counted.
    """

    target: float
    predicted: float
    runtime: str | None = None
    batch: int | None = None
    sequence: int | None = None
    table: tuple[Mapping[str, Any], ...] | None = None
    measured: float | None = None
    noisy: bool | None = None

    def with_measured(self, *, flops: FlopCount, parameters: Both[int], latency: Iterable[LatencyRow]) -> CostOutcome:
        """Return the outcome with `measured` and, for time, `noisy` filled in from the slim model's measurements."""
        counted = {"flops": flops, "parameters": parameters}
        if self.kind in counted:
            return replace(self, measured=counted[self.kind].ratio)
        wanted = (self.runtime, self.batch, self.sequence)
        rows = (row for row in latency if row.phase != "decode")
        row = next(row for row in rows if (row.runtime, row.batch, row.sequence) == wanted)
        return replace(self, measured=row.ratio, noisy=row.noisy)


@dataclass(frozen=True)
class MaxDropOutcome(BudgetOutcome):
    """The result of a `max_drop` budget: the largest cut whose metric, on held-out rows, is within the allowed loss.

    Attributes:
        metric: Name of the metric.
        by: Largest loss allowed, in the metric's own unit.
        dense: Metric of the dense model.
        refitted: Metric of the chosen selection, cut and refitted; None if selections were evaluated masked.
        masked: Metric of the chosen selection, masked; None if selections were evaluated refitted.
        samples: Number of held-out samples.
        judged: The selections that were tried, see `MaxDropChoice`.
        slim: Metric of the slim model; None until it is evaluated.
    """

    metric: str
    by: float
    dense: float
    refitted: float | None
    masked: float | None
    samples: int
    judged: tuple[Mapping[str, Any], ...]
    slim: float | None = None
