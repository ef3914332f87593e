"""Place the picture of agreement against time: a point for every form of both models, and the frontier through them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .details import deciding_step, relative_times
from .report import Report
from .rows import form_name, form_step

WIDTH = 600
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 585, 16, 296
# Where the number of a point may stand beside it, the best first, in units of the SVG.
_BESIDE = [
    (0, -16),
    (0, 26),
    (16, 5),
    (-16, 5),
    (14, -12),
    (-14, -12),
    (14, 20),
    (-14, 20),
    (30, 5),
    (-30, 5),
    (0, -32),
]


class FrontierPoint(NamedTuple):
    """A form: its place and intervals, the place of its number, its name, and what it says on its own."""

    x: float
    y: float
    x_ends: tuple[float, float]
    y_low: float
    label: tuple[float, float]
    model: str
    name: str
    note: str
    chosen: bool


@dataclass(frozen=True)
class FrontierFigure:
    """Agreement upwards, time to the right; `line` is the frontier, and `promise` the height of what was promised."""

    points: Sequence[FrontierPoint]
    line: Sequence[tuple[float, float]]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    promise: float | None
    axis: str


def frontier_figure(report: Report) -> FrontierFigure | None:
    """Return the picture of a report's forms at the shape that decides; None where there are none, or time is noisy."""
    forms, found = report.details.forms, report.details.deployment
    step = deciding_step(forms)
    if step is None:
        return None
    times = relative_times(forms, step)
    lows = [form.stability if form.stability_low is None else form.stability_low for form in forms]
    least = min([*lows, *([] if found is None else [found.promise])])
    x_from, y_from = math.floor(10 * (min(0.9, *times) - 0.03)) / 10, 1 - _round_up((1 - least) * 1.02)
    x_to = max(1.0, *(form.times[step].ratio_high for form in forms))

    def across(ratio: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (ratio - x_from) / (x_to - x_from)

    def up(share: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (share - y_from) / (1 - y_from)

    places = [(across(ratio), up(form.stability)) for ratio, form in zip(times, forms, strict=True)]
    labels = _beside(places)
    points = [
        FrontierPoint(
            *place,
            x_ends=(across(max(form.times[step].ratio_low, x_from)), across(form.times[step].ratio_high)),
            y_low=up(low),
            label=label,
            model=form.model,
            name=form_name(form, forms),
            note=f"{form_name(form, forms)}: {time:.2f} of the time, {form.stability:.1%} same",
            chosen=found is not None and found.form == number,
        )
        for number, (form, time, place, low, label) in enumerate(zip(forms, times, places, lows, labels, strict=True))
    ]
    best, line = 0.0, []
    for number in sorted(range(len(forms)), key=lambda number: (times[number], -forms[number].stability)):
        if forms[number].stability > best:
            best = forms[number].stability
            line.append(places[number])
    x_steps = range(math.ceil(10 * x_from), math.floor(10 * x_to) + 1)
    return FrontierFigure(
        points=points,
        line=line,
        x_ticks=[(across(number / 10), f"{number / 10:.1f}") for number in x_steps],
        y_ticks=[(up(share), f"{100 * share:.4g}%") for share in (y_from, (1 + y_from) / 2, 1.0)],
        promise=None if found is None else up(found.promise),
        axis=f"share of dense {forms[0].bits}'s time at {form_step(forms[0].times[step])}".replace(" x ", " × "),
    )


def _round_up(share: float) -> float:
    """Return a round share that is at least as large."""
    return next((step for step in (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5) if step >= share), 1.0)


def _beside(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return where the number of each point stands, off all points and the numbers before it where that can be."""
    taken = list(places)
    labels = []
    for x, y in places:
        free = [(x + right, y + down) for right, down in _BESIDE]
        apart = (spot for spot in free if all(abs(spot[0] - a) > 13 or abs(spot[1] - 5 - b) > 14 for a, b in taken))
        label = next((spot for spot in apart if _LEFT - 30 < spot[0] < WIDTH - 8 and spot[1] > 10), free[0])
        labels.append(label)
        taken.append((label[0], label[1] - 5))
    return labels
