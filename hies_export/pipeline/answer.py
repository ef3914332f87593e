"""What a search for the fastest form has chosen, which a run then cuts, writes and measures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..report.details import Deployment, DeployWay, Form
from ..report.frontier import deciding_step
from .choose import Choice
from .options import PruneOptions


@dataclass(frozen=True)
class Answer:
    """The largest cut that keeps the promise as one way serves it, and what was found of every way.

    `options` are those that the cut was chosen by.
    """

    options: PruneOptions
    choice: Choice
    promise: float
    tried: list[DeployWay]
    began: float  # by time.monotonic

    @property
    def ways(self) -> list[tuple[str, str]]:
        """The ways that work, the dense float32 graph first."""
        return [(way.runtime, way.bits) for way in self.tried if way.problem is None]

    def outcome(self, forms: Sequence[Form]) -> Deployment:
        """Return which of the forms to deploy: the fastest that keeps the promise."""
        step = deciding_step(forms) or 0
        kept = [form for form in forms if form.at_least is not None and form.at_least >= self.promise]
        # The first form's own ratio is that of its control.
        best = min(kept, key=lambda form: 1.0 if form is forms[0] else form.times[step].ratio, default=None)
        found = None if best is None else forms.index(best)
        return Deployment(self.promise, found, step, self.tried, time.monotonic() - self.began)
