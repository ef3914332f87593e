"""Hold what is asked of pruning as plain values, which know nothing of recipes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..measure.exports import ExportOptions
from ..measure.timing import Timing
from ..score.criteria import AUTO, uses_alpha
from ..select.constraints import Constraints
from ..slim.refit import Compensation


@dataclass(frozen=True)
class LatencyBudget:
    """At most `ratio` of the dense model's time, on a runtime, for a batch of so many rows of so many tokens.

    `dtype` and `of` are as in a recipe's `LatencyBudget`.
    """

    ratio: float
    runtime: str
    batch: int
    sequence: int | None
    dtype: str | None = None
    of: Literal["same", "float32"] = "same"

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, sequence), or (batch,)."""
        return (self.batch,) if self.sequence is None else (self.batch, self.sequence)


@dataclass(frozen=True)
class DropBudget:
    """As much as can go until `metric` gets worse by `by`, in its own unit, on held-out rows."""

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

    @property
    def kind(self) -> str:
        """Name of the field that is given."""
        return next(name for name in type(self).__dataclass_fields__ if getattr(self, name) is not None)

    @property
    def ratio(self) -> float | None:
        """Largest share of the dense model's cost that may be left; None for `heads` and `max_drop`."""
        return self.latency.ratio if self.latency is not None else self.flops or self.parameters


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
        """Return the `Compensation`, with the given weights of tokens where the options leave them open."""
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
        """What is chosen on held-out rows, for messages; None where nothing is."""
        if self.budget.max_drop is not None:
            return "max_drop"
        if self.criterion == AUTO:
            return "criterion: auto"
        return "alpha: auto" if self.alpha is None and uses_alpha(self.criterion) else None
