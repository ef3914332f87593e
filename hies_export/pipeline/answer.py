"""The choice of a search for the fastest form, which a run then cuts, writes and measures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..cascade.export import CascadeOptions
from ..evaluate.judge import Judge
from ..measure.exports import Exporter
from ..measure.forms import Forms
from ..recipe import PruneSection, TimedSection
from ..report.details import Deployment, DeployWay, Form, SizeTried, deciding_step, relative_times
from .cut import Choice


@dataclass(frozen=True)
class DenseForms:
    """The dense model in all forms: their results, the judge on the held-out rows, and the forms themselves."""

    ways: list[DeployWay]
    judge: Judge
    forms: Forms


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What was decided before a run's own stages.

    Attributes:
        choice: The cut; None leaves it to the stages.
        cascade: How to join both models; None for no cascade.
        sizes: The sizes of cascades that were tried.
        served: What the cut was judged on; None for what its budget says.
    """

    choice: Choice | None = None
    cascade: CascadeOptions | None = None
    sizes: tuple[SizeTried, ...] = ()
    served: TimedSection | None = None


@dataclass(frozen=True, kw_only=True)
class Answer(Decided):
    """The largest cut that keeps the promise in one form, and the results of all forms.

    If no cut does, `choice` removes nothing. `options` are those that the cut was chosen by, and `exporter` writes it;
    `dense` also records the cuts that were searched for.
    """

    options: PruneSection
    exporter: Exporter
    promise: float
    dense: DenseForms
    began: float  # by time.monotonic

    @property
    def ways(self) -> list[tuple[str, str]]:
        """The ways that work, the dense float32 graph first."""
        return [(way.runtime, way.bits) for way in self.dense.ways if way.problem is None]

    def outcome(self, forms: Sequence[Form], file_of: Callable[[Form], str]) -> Deployment:
        """Return the form to deploy: the fastest that keeps the promise, with its file."""
        step = deciding_step(forms) or 0
        ratios = relative_times(forms, step)
        kept = [n for n, form in enumerate(forms) if form.at_least is not None and form.at_least >= self.promise]
        best = min(kept, key=lambda number: ratios[number], default=None)
        file = None if best is None else file_of(forms[best])
        return Deployment(self.promise, best, step, self.dense.ways, time.monotonic() - self.began, file)
