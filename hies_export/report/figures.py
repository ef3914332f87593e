"""The pictures of a run, drawn once for its page, for the card of a push, and as files for papers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..checkpoint.folders import refuse_other_file, replace_file
from ..forms.time import TimedRow
from .drawing import ACCENT, BEGINNING, GREY, INK, LINE, SECOND, canvas, svg_of
from .frontier import draw_frontier, frontier_figure
from .report import CUT, NeuronCount, Report
from .tables import row_name

CAPTIONS = {
    "frontier.svg": "Agreement with the dense model against time, and the frontier that nothing else beats on both",
    "latency.svg": "Time of the slim model relative to the dense one; grey: the dense one against itself, the control",
    "heads.svg": "Heads, layers down: filled ones stay, crossed ones were cut",
    "neurons.svg": "Feed-forward neurons that stay in every layer; grey: cut",
    "score.svg": "Score of every head: the lowest are cut first",
    "his.svg": "Importance (HIS): how strongly the loss changes with the head",
    "entropy.svg": "Attention entropy: 0 if a head attends to one token, 1 if to all alike",
}
# The height of a layer, and the width of a head, in points.
_CELL = 16


def draw_report(report: Report) -> dict[str, str]:
    """Return the pictures of `CAPTIONS`, file name -> SVG; those that the run has no numbers for are left out."""
    return dict(_drawn(report))


def _drawn(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the pictures of a report by name."""
    marks, heads, neurons = report.details.head_map, report.details.heads, report.details.neurons
    if figure := frontier_figure(report):
        yield "frontier.svg", draw_frontier(figure)
    if report.latency:
        yield "latency.svg", draw_latency(report.latency)
    if marks:
        plan = {module: [float(mark != CUT) for mark in line] for module, line in marks.items()}
        yield "heads.svg", _draw_heads(marks, plan, "Heads that stay")
    if neurons:
        yield "neurons.svg", _draw_neurons(neurons)
    for name in ("score", "his", "entropy"):
        if numbers := {module: heads[module][name] for module in marks if heads.get(module, {}).get(name)}:
            yield f"{name}.svg", _draw_heads(marks, numbers, CAPTIONS[f"{name}.svg"], ends=True)


def _draw_heads(
    marks: Mapping[str, str], numbers: Mapping[str, Sequence[float]], text: str, *, ends: bool = False
) -> str:
    """Return a map of the heads, layers down: crossed if cut, and the fuller the larger their number is.

    `ends` writes the smallest and the largest number below the map.
    """
    low, high = (end(number for of_module in numbers.values() for number in of_module) for end in (min, max))
    places, shades, cut = [], [], []
    for layer, (module, line) in enumerate(marks.items()):
        of_heads = numbers.get(module) or [low] * len(line)  # no number if the module was not scored
        for head, (mark, number) in enumerate(zip(line, of_heads, strict=False)):
            places.append((head, layer))
            shades.append(1.0 if low == high else 0.06 + 0.94 * (number - low) / (high - low))
            if mark == CUT:
                cut.append((head, layer))
    widest = max(map(len, marks.values()))
    with canvas(_CELL * widest, _CELL * len(marks)) as axes:
        axes.set(xlim=(-0.5, widest - 0.5), ylim=(len(marks) - 0.5, -0.5), xticks=[], yticks=range(len(marks)))
        cells = {"marker": "s", "s": (_CELL - 2) ** 2, "color": ACCENT, "clip_on": False}
        axes.scatter(*zip(*places, strict=True), alpha=shades, lw=0, **cells)
        if cut:
            axes.plot(*zip(*cut, strict=True), "x", color=INK, ms=6, gid="cut")
        if ends:
            axes.set_xlabel(f"empty: {low:.2g}, full: {high:.2g}", loc="left")
        return svg_of(axes, text)


def _draw_neurons(counts: Mapping[str, NeuronCount]) -> str:
    """Return a bar per block, layers down: the share of its neurons that stay."""
    with canvas(240, _CELL * len(counts)) as axes:
        axes.set(xlim=(0, 1), ylim=(len(counts) - 0.5, -0.5), xticks=[], yticks=range(len(counts)))
        for layer, count in enumerate(counts.values()):
            axes.barh(layer, 1, 0.6, color=GREY, alpha=0.35)
            axes.barh(layer, count.kept / count.total, 0.6, color=ACCENT)
            axes.text(1.03, layer, f"{count.kept:,} of {count.total:,}", va="center")
        return svg_of(axes, CAPTIONS["neurons.svg"])


def draw_latency(rows: Sequence[TimedRow], names: tuple[str, str] = ("dense", "slim")) -> str:
    """Return a bar per row: the ratio of two models with its interval, and the control's interval around 1."""
    first, second = names
    # One noisy row must not squeeze all the others.
    longest = max(1.05, *(min(row.ratio_high, 1.5) if row.noisy else row.ratio_high for row in rows))
    with canvas(330, 22 * len(rows)) as axes:
        axes.set_yticks(range(len(rows)), map(row_name, rows))
        axes.set(xlabel=f"{second} / {first}; orange: its 95 % interval; grey: {first} / {first}, the control")
        axes.set(xlim=(0, longest), ylim=(len(rows) - 0.5, -0.5))
        axes.grid(axis="x", color=LINE)
        axes.axvline(1, color=INK, lw=1.5)
        for number, row in enumerate(rows):
            faint = 0.3 if row.noisy else 1.0
            axes.barh(number, row.ratio, 0.6, color=ACCENT, alpha=faint)
            axes.barh(number, row.control_high - row.control_low, 0.6, left=row.control_low, color=GREY, alpha=0.5)
            axes.hlines(number, row.ratio_low, row.ratio_high, color=SECOND, lw=3, alpha=faint)
            text = "noisy" if row.noisy else f"{row.ratio:.3f}"
            axes.annotate(text, (1, number), (8, 0), ("axes fraction", "data"), "offset points", va="center", color=INK)
        return svg_of(axes, f"Time of {second} relative to {first}")


def write_figures(figures: Mapping[str, str], folder: Path) -> list[Path]:
    """Write figures, file name -> SVG, each whole or not at all; refuse, by an OutputExistsError, other files."""
    for name in figures:  # before any is written
        refuse_other_file(folder / name, "a figure of hies-export", lambda text: text.startswith(BEGINNING))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in figures.items():
        replace_file(folder / name, text)
    return [folder / name for name in figures]
