"""A budget, and how a run met it: choosing predicts it, the run measures it, and the report shows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ..evaluate.interval import CONFIDENCE
from ..evaluate.judge import Judge
from ..evaluate.metrics import counted_by, quality_loss, title_of
from ..forms.measure.counts import Both, FlopCount
from ..forms.measure.rows import LatencyRow
from ..tasks import Predictions


@dataclass(frozen=True)
class BudgetOutcome:
    """A budget, and how the run met it; `kind` is its field in the recipe."""

    kind: str

    def details(self) -> dict[str, Any]:
        """Return the fields that are not None, for report.json."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class HeadsOutcome(BudgetOutcome):
    """A budget of heads; `target` is the share of them to remove, in [0, 1]."""

    kind: Literal["heads"]
    target: float | None = None


@dataclass(frozen=True)
class CostOutcome(BudgetOutcome):
    """A budget of FLOPs, parameters or time, as shares of the dense model's; `measured` is None until it is known.

    Only for time: where and in which dtype it is measured, the timed cuts behind the prediction (`CostTable.measured`),
    whether the control shows that the measurement is unreliable, and the dense model of the ratio: "same" is in the
    same bits, "float32" in float32.
    """

    kind: Literal["flops", "parameters", "latency"]
    target: float
    predicted: float
    runtime: str | None = None
    batch: int | None = None
    sequence: int | None = None
    table: tuple[Mapping[str, Any], ...] | None = None
    measured: float | None = None
    noisy: bool | None = None
    dtype: str | None = None
    of: Literal["same", "float32"] | None = None

    def with_measured(self, *, flops: FlopCount, parameters: Both[int], latency: Iterable[LatencyRow]) -> CostOutcome:
        """Return the outcome with `measured` and, for time, `noisy` filled in from the slim model's measurements."""
        counted = {"flops": flops, "parameters": parameters}
        if self.kind in counted:
            return replace(self, measured=counted[self.kind].ratio)
        wanted = (self.runtime, self.batch, self.sequence)
        rows = (row for row in latency if row.phase != "decode" and self.dtype in (None, row.dtype))
        row = next(row for row in rows if (row.runtime, row.batch, row.sequence) == wanted)
        return replace(self, measured=row.ratio, noisy=row.noisy)


@dataclass(frozen=True, kw_only=True)
class PromiseOutcome(BudgetOutcome, ABC):
    """A promise about predictions on `samples` held-out rows, and the largest cut that keeps it.

    It is the promise of a search as well. `having` returns it with what a cut has, and `met` then tells whether the cut
    keeps it. `slim` is None until that is known. `judged` are the cuts that were tried, see `Judged.row`.
    """

    samples: int
    judged: tuple[Mapping[str, Any], ...] = ()
    slim: float | None = None

    @property
    @abstractmethod
    def judging(self) -> dict[str, Any]:
        """Options of the `Judge` that decides, beside those of the run."""

    @abstractmethod
    def numbers(self, judge: Judge, predictions: Predictions) -> tuple[float, ...]:
        """Return what decides about predictions, for `having`."""

    @abstractmethod
    def having(self, *numbers: float) -> PromiseOutcome:
        """Return the promise with the numbers of a cut."""

    @property
    @abstractmethod
    def met(self) -> bool:
        """Whether the slim model keeps the promise."""

    @property
    @abstractmethod
    def asked(self) -> str:
        """The promise in words."""

    @property
    @abstractmethod
    def found(self) -> str:
        """What the slim model has, in words."""

    @property
    @abstractmethod
    def row(self) -> dict[str, float]:
        """What the slim model has, by name."""

    @abstractmethod
    def problem(self, judged: Sequence[PromiseOutcome]) -> str:
        """Return why no cut keeps the promise, given what the cuts that were judged have."""


@dataclass(frozen=True, kw_only=True)
class MaxDropOutcome(PromiseOutcome):
    """The largest cut that loses at most `by` of a metric, in its own unit; a point estimate.

    The chosen selection was evaluated either refitted or masked.
    """

    kind: Literal["max_drop"] = "max_drop"
    metric: str
    by: float
    dense: float
    refitted: float | None = None
    masked: float | None = None

    @property
    def judging(self) -> dict[str, Any]:
        """The metric."""
        return {"metrics": (self.metric,)}

    def numbers(self, judge: Judge, predictions: Predictions) -> tuple[float, ...]:
        """Return the metric."""
        return (judge.of(predictions).metrics[self.metric],)

    def having(self, *numbers: float) -> MaxDropOutcome:
        """Return the promise with the metric of a cut."""
        return replace(self, slim=numbers[0])

    @property
    def lost(self) -> float:
        """How much worse the slim model is."""
        assert self.slim is not None
        return quality_loss(self.metric, self.dense, self.slim)

    @property
    def met(self) -> bool:
        """Whether the slim model keeps to it."""
        return self.lost <= self.by

    @property
    def asked(self) -> str:
        """The request in words."""
        return f"a loss of at most {self.by:g} of {self.metric}"

    @property
    def found(self) -> str:
        """What the slim model has, in words."""
        return f"one of {self.lost:.4g}"

    @property
    def row(self) -> dict[str, float]:
        """The metric, by its name."""
        assert self.slim is not None
        return {self.metric: self.slim}

    def problem(self, judged: Sequence[PromiseOutcome]) -> str:
        """Return by how much even the best cut is worse."""
        least = min((one.lost for one in judged if isinstance(one, MaxDropOutcome)), default=0.0)
        return (
            f"max_drop allows {self.metric} to get worse by {self.by:g}, but on the held-out rows even the "
            f"smallest cut makes it worse by {least:.4g} (dense {self.dense:.4g}); allow more, or use compensation "
            "with a budget of heads"
        )


@dataclass(frozen=True, kw_only=True)
class KeepOutcome(PromiseOutcome):
    """The largest cut that keeps a promise by the end of an interval.

    The promise is a share of `predictions` that stay, each a `word`, or of a `metric` of rankings or entities, or that
    a `metric` gets worse by at most `by`. Embeddings are judged on an `index`, see `Judge`. `slim` is that share, or
    that loss, of the slim model, and `slim_end` the end of its interval. `confidence` is that of each interval, see
    `confidence_of_each`. If time is saved in place of FLOPs, `predicted` is the remaining share of the time on
    `runtime`.
    """

    kind: Literal["keep"] = "keep"
    predictions: float | None = None
    metric: str | None = None
    by: float | None = None
    index: Literal["dense", "slim"] | None = None
    confidence: float = CONFIDENCE
    slim_end: float | None = None
    predicted: float | None = None
    runtime: str | None = None
    batch: int | None = None
    sequence: int | None = None
    dtype: str | None = None
    word: str = "prediction"

    def __post_init__(self) -> None:
        if (self.predictions is None) == (self.by is None) or (self.by is not None and self.metric is None):
            raise ValueError("keep must have predictions, or metric and by")

    @property
    def judging(self) -> dict[str, Any]:
        """The metric and the index, if they are promised, and which intervals decide."""
        promised = {} if self.metric is None else {"metrics": (self.metric,)}
        if self.index is not None:
            promised["index"] = self.index  # type: ignore[assignment]
        return {**promised, "confidence": self.confidence, "as_of": self.samples}

    def numbers(self, judge: Judge, predictions: Predictions) -> tuple[float, ...]:
        """Return the share that stays, or the loss, and the end of its interval."""
        return judge.lost(predictions) if self.predictions is None else judge.kept(predictions)

    def having(self, *numbers: float) -> KeepOutcome:
        """Return the promise with the share, or the loss, of a cut, and the end of its interval."""
        found, end = numbers
        return replace(self, slim=found, slim_end=end)

    @property
    def met(self) -> bool:
        """Whether the slim model keeps the promise."""
        assert self.slim_end is not None
        if self.predictions is not None:
            return self.slim_end >= self.predictions
        assert self.by is not None
        return self.slim_end <= self.by

    @property
    def asked(self) -> str:
        """The promise in words."""
        if self.predictions is None:
            return f"at most {self.by:g} of {self.what}"
        return f"{100 * self.predictions:g} % of {self.what}"

    @property
    def what(self) -> str:
        """What is kept: "the predictions", "the sentences" or "the entities", or the metric with its index."""
        index = {None: "", "dense": " with your index as it is", "slim": " with everything re-embedded"}
        return self._counted or f"{title_of(str(self.metric))}{index[self.index]}"

    @property
    def stays(self) -> str:
        """The words after a percentage: "of the sentences stay", or "of nDCG@10 stays"."""
        return f"of {self._counted} stay" if self._counted else f"of {title_of(str(self.metric))} stays"

    @property
    def _counted(self) -> str | None:
        """What is counted, such as "the sentences"; None if the promise is about the value of a metric."""
        counted = f"{self.word}s" if self.metric is None else counted_by(self.metric)
        return None if counted is None or self.by is not None else f"the {counted}"

    @property
    def found(self) -> str:
        """What the slim model has, in words."""
        sure = f"with {100 * CONFIDENCE:g} % confidence"
        if self.confidence > CONFIDENCE:
            sure += ", corrected for all cuts tried"
        if self.predictions is None:
            return f"a loss of {self.slim:.4g} (at most {self.slim_end:.4g} {sure})"
        assert self.slim is not None
        assert self.slim_end is not None
        return f"{100 * self.slim:.2f} % (at least {100 * self.slim_end:.2f} % {sure})"

    @property
    def row(self) -> dict[str, float]:
        """The share that stays, or the loss, and the end of its interval, by name."""
        assert self.slim is not None
        assert self.slim_end is not None
        if self.predictions is None:
            return {"lost": self.slim, "at_most": self.slim_end}
        return {"kept": self.slim, "at_least": self.slim_end}

    def problem(self, judged: Sequence[PromiseOutcome]) -> str:
        """Return what the mildest cut has, which is judged last."""
        if not judged:
            return "keep needs time to judge a cut, and there was none; allow more"
        return (
            f"keep asks for {self.asked} on {self.samples:,} held-out rows, and the mildest cut has "
            f"{judged[-1].found}; ask for less, compensate, or give more held-out rows, which narrow the interval"
        )


Outcome = HeadsOutcome | CostOutcome | MaxDropOutcome | KeepOutcome
