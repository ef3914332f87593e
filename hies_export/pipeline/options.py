"""The options of pruning as plain values, which know nothing of recipes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..cascade.export import CascadeOptions
from ..measure.exports import ExportOptions
from ..measure.timing import Timing
from ..score.criteria import AUTO, uses_alpha
from ..select.constraints import Constraints
from ..slim.refit import Compensation


@dataclass(frozen=True, kw_only=True)
class TimedBudget:
    """What a budget times: a runtime, the rows of a batch and their tokens, and the dtype, as in recipes."""

    runtime: str
    batch: int
    sequence: int | None
    dtype: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, sequence), or (batch,)."""
        return (self.batch,) if self.sequence is None else (self.batch, self.sequence)


@dataclass(frozen=True, kw_only=True)
class LatencyBudget(TimedBudget):
    """At most `ratio` of the dense model's time; `of` is as in a recipe's `LatencyBudget`."""

    ratio: float
    of: Literal["same", "float32"] = "same"


@dataclass(frozen=True)
class KeepBudget:
    """Remove as much as possible while the held-out rows keep a promise, by the end of a 95 % interval.

    The promise is a share of the predictions, or that a metric gets worse by at most `by`. `served` says what predicts
    (torch if None), and `timed` whose time is saved (FLOPs are if None).
    """

    predictions: float | None = None
    metric: str | None = None
    by: float | None = None
    served: TimedBudget | None = None
    timed: TimedBudget | None = None
    samples: int = 1024  # held-out rows that a recipe draws


@dataclass(frozen=True)
class DropBudget:
    """Remove as much as possible until `metric` gets worse by `by`, in its own unit, on held-out rows."""

    metric: str
    by: float


@dataclass(frozen=True)
class Budget:
    """How much is removed: exactly one of these, as in a recipe's `budget`."""

    heads: float | None = None
    flops: float | None = None
    parameters: float | None = None
    latency: LatencyBudget | None = None
    max_drop: DropBudget | None = None
    keep: KeepBudget | None = None

    @property
    def kind(self) -> str:
        """Name of the field that is given."""
        return next(name for name in type(self).__dataclass_fields__ if getattr(self, name) is not None)

    @property
    def ratio(self) -> float | None:
        """Largest share of the dense model's cost that may be left; None for `heads`, `max_drop` and `keep`."""
        return self.latency.ratio if self.latency is not None else self.flops or self.parameters

    @property
    def timed(self) -> TimedBudget | None:
        """What the budget times; None for one that times nothing."""
        return self.latency if self.keep is None else self.keep.timed

    @property
    def metric(self) -> str | None:
        """Name of the metric that the budget limits; None if it limits none."""
        asked = self.max_drop or self.keep
        return None if asked is None else asked.metric


@dataclass(frozen=True, kw_only=True)
class SizedCascade(CascadeOptions):
    """A cascade of the slim and the dense model, and the shares of the FLOPs to try, as in a recipe's `cascade`."""

    flops: tuple[float, ...] = ()


@dataclass(frozen=True)
class RefitOptions:
    """How cut models are refitted: the fields of `Compensation`, the rows to refit on, and the memory for moments."""

    method: str = "least_squares"
    ridge: float | None = None
    sequential: bool = False
    token_weights: float | None = None  # None leaves it to `criterion: auto`, or is 1
    samples: int = 512
    limit_bytes: int = 4 << 30

    def compensation(self, token_weights: float | None = None) -> Compensation:
        """Return the `Compensation`, with the given weights of tokens if the options leave them open."""
        weights = self.token_weights or token_weights or 1.0
        return Compensation(self.method, ridge=self.ridge, sequential=self.sequential, token_weights=weights)


@dataclass(frozen=True)
class PruneOptions:
    """How units are scored, selected and compensated; the fields are those of a recipe's `prune` section.

    A budget of time runs each cut as `timing` says, exported as `export` says.
    """

    budget: Budget
    modules: tuple[str, ...] = ("attention",)
    criterion: str = "hies"
    alpha: float | None = 0.9  # None for `auto`
    normalize: str = "model"
    constraints: Constraints = field(default_factory=Constraints)
    towers: tuple[str, ...] = ()
    steps: int = 1
    compensation: RefitOptions | None = None
    timing: Timing = field(default_factory=Timing)
    export: ExportOptions = field(default_factory=ExportOptions)
    seed: int = 0  # of the criterion `random`; plans record it

    @property
    def judged_on_held_out(self) -> str | None:
        """What is chosen on held-out rows, for messages; None if nothing is."""
        if self.budget.max_drop is not None or self.budget.keep is not None:
            return self.budget.kind
        if self.criterion == AUTO:
            return "criterion: auto"
        return "alpha: auto" if self.alpha is None and uses_alpha(self.criterion) else None
