"""Draw with matplotlib, as SVG whose colours follow those of the page; place the cells and bars of the templates."""

from __future__ import annotations

import html
import io
import itertools
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..forms.time import TimedRow
from .report import CUT, NeuronCount

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

INK, MUTED, LINE, CARD = "#14140f", "#66655f", "#e2e1db", "#ffffff"
ACCENT, SECOND, GREY = "#0072b2", "#d55e00", "#8c8c8c"
# Colours of series, by number.
SERIES = (ACCENT, SECOND, "#009e73", "#b8578f", "#b87a00", "#3f9bd1", INK, "#7a7972")
MARKERS = ("o", "s", "D", "^")
# What each colour becomes on a dark page.
DARK = {
    **{INK: "#f2f1ec", MUTED: "#a3a29a", LINE: "#34342f", CARD: "#1c1c1a", ACCENT: "#56b4e9", SECOND: "#e8833a"},
    **{"#009e73": "#2fc195", "#b8578f": "#dd8fbc", "#b87a00": "#e6ad33", "#3f9bd1": "#8fd0f5", "#7a7972": "#a3a29a"},
}
# Where a name may stand: its side, across and up, and how far away; what it costs to cover a point or another name.
_SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
_AWAY = (9, 20, 34, 50)
_COVERS = 100.0

Place = tuple[float, float]


class Drawing:
    """A figure with axes, in units of the SVG, whose elements have CSS classes and tooltips."""

    def __init__(self, figure: Figure, axes: Axes):
        self.figure, self.axes = figure, axes
        self._elements: dict[str, tuple[str, str, str]] = {}  # gid -> CSS class, tooltip, series

    def gid(self, kind: str, note: str = "", series: str = "") -> str:
        """Register an element's CSS class, tooltip and series, and return the id to draw it with in matplotlib."""
        gid = f"part-{len(self._elements)}"
        self._elements[gid] = (kind, note, series)
        return gid

    def svg(self, kind: str, text: str, *, tight: bool = False) -> str:
        """Return the figure, described by `text`, as an SVG element; a `tight` one is as large as what is drawn."""
        out = io.StringIO()
        size: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": 0.06} if tight else {}
        self.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None}, **size)
        svg = re.sub(r"(?s)<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", out.getvalue())
        box = re.search(r'viewBox="([^"]*)"', svg)
        assert box is not None

        def group_tag(tag: re.Match[str]) -> str:
            """Return a <g> tag with class, series and tooltip in place of its id; an empty or unknown one without."""
            gid, slash = tag.groups()
            if gid not in self._elements or slash:
                return f"<g{slash}>"
            css_class, note, series = self._elements[gid]
            data = f' data-s="{html.escape(series)}"' if series else ""
            return f'<g class="{css_class}"{data}>' + (f"<title>{html.escape(note)}</title>" if note else "")

        body = re.sub(r'<g id="([^"]*)"[^>]*?(/?)>', group_tag, svg.partition("<svg")[2].partition(">")[2])
        # Nothing is drawn beyond the axes that has to be hidden, and a page has a font of its own.
        body = re.sub(r'(?s)<clipPath.*?</clipPath>| clip-path="[^"]*"', "", body).replace("xlink:href", "href")
        body = re.sub(r"font: (?:(\w+) )?([\d.]+px) [^;\"]*", r"font-weight: \1; font-size: \2", body)
        body = re.sub(r"font-family: [^;\"]*;? ?|font-weight: ; ", "", body)
        body = re.sub(r"<g/>|<defs>\s*</defs>", "", re.sub(r"\s*\n\s*", " ", body).replace("> <", "><"))
        return f'<svg class="{kind}" viewBox="{box[1]}" role="img" aria-label="{html.escape(text)}">' + body.strip()


@contextmanager
def canvas(width: float, height: float, *, size: float, within: tuple[float, float, float, float]) -> Iterator[Drawing]:
    """Yield an empty drawing with text of a font `size`, and frameless axes.

    The axes are `within` a left, bottom, right and top margin; lengths are in units of the SVG, 72 to an inch.
    """
    import matplotlib
    from matplotlib.figure import Figure

    plain = {"svg.fonttype": "none", "svg.hashsalt": f"{width}", "text.parse_math": False, "font.size": size}
    colours = dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color", "text.color"), MUTED)
    # DejaVu Sans comes with matplotlib and is wider than the fonts of pages: what fits in it fits there.
    fonts = {"font.family": "DejaVu Sans", "font.sans-serif": ["DejaVu Sans"]}
    with matplotlib.rc_context({**plain, **colours, **fonts}), warnings.catch_warnings():
        # A browser has glyphs that this font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure((width / 72, height / 72), dpi=72)
        left, bottom, right, top = within
        across, up = 1 - (left + right) / width, 1 - (bottom + top) / height  # shares of the figure
        axes = figure.add_axes((left / width, bottom / height, across, up))
        axes.spines[:].set_visible(False)
        axes.tick_params(which="both", length=0)
        yield Drawing(figure, axes)


def colour_of(kind: str) -> str:
    """Return the colour of a CSS class: "slim", "other", "peer" or "rest", or "c" and the number of a series."""
    known = {"slim": ACCENT, "other": MUTED, "peer": SECOND, "rest": GREY}
    return known[kind] if kind in known else SERIES[int(kind[1:])]


def for_page(svg: str) -> str:
    """Return a drawing whose colours are the page's CSS variables, which change in dark mode."""
    names = {INK: "ink", MUTED: "muted", LINE: "line", CARD: "card", ACCENT: "accent", SECOND: "second"}
    names |= {colour: f"c{number}" for number, colour in enumerate(SERIES) if colour not in names}
    variables = {colour: f"var(--{name})" for colour, name in names.items()}
    return re.sub(r"#[0-9a-f]{6}\b(?=[;\"])", lambda colour: variables.get(colour[0], colour[0]), svg)


def place_names(
    axes: Axes, points: Sequence[Place], names: Sequence[Text], lines: Sequence[Sequence[Place]]
) -> list[tuple[int, str]]:
    """Move names beside their points, the most important first; return the numbers that replace names, with the names.

    A name may cross a line, but covers no point and no other name; a thin line leads to one that is further away.
    Without room for a name, its first line is tried, and then a number, from 1, stands for it.
    """
    from matplotlib.path import Path
    from matplotlib.transforms import Bbox

    to_screen, to_data = axes.transData.transform, axes.transData.inverted().transform
    discs = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in to_screen(points)]
    paths = [Path(to_screen(line)) for line in lines]
    left, bottom, right, top = axes.bbox.extents
    within = Bbox.from_extents(left - 2, bottom - 2, right + 16, top + 46)
    taken: list[Bbox] = []

    def settle(name: Text, text: str, *, most: float, distances: Sequence[int] = _AWAY) -> bool:
        """Move a name, as `text`, to where its penalty is least; return False if that is not below `most`."""
        name.set_text(text)
        point, size = name.get_position(), name.get_window_extent().size
        x, y = to_screen(point)
        best, lowest, line_end = None, most, None
        for away, (rank, (across, up)) in itertools.product(distances, enumerate(_SIDES)):
            reach = away * (0.75 if across and up else 1)
            near = x + across * reach, y + up * reach
            box = Bbox.from_bounds(*(near - size * (1 - np.array((across, up))) / 2), *size)
            if not (within.x0 <= box.x0 and box.x1 <= within.x1 and within.y0 <= box.y0 and box.y1 <= within.y1):
                continue
            covered, misread = box.count_overlaps([*taken, *discs]), False
            led = away > _AWAY[0]  # by a thin line
            if led:
                lead = Path([near, (x + across * 7, y + up * 7)])
                covered += sum(lead.intersects_bbox(other, filled=False) for other in taken)
            else:
                # Without a line, a name that is nearer to another point seems to belong to that one.
                misread = min(_gap(box, *to_screen(other)) for other in points) < _gap(box, x, y)
            crossed = sum(path.intersects_bbox(box, filled=False) for path in paths)
            penalty = _COVERS * covered + (30.0 if misread else 0.0) + 4.0 * crossed + rank / 2 + away / 4
            if penalty < lowest:
                best, lowest, line_end = box, penalty, near if led else None
        if best is None:
            return False
        taken.append(best.padded(3))
        name.set(position=to_data((best.x0, best.y0)), ha="left", va="bottom")
        if line_end is not None:
            pair = zip(point, to_data(line_end), strict=True)
            axes.plot(*pair, color=MUTED, lw=0.8, ls=(0, (1, 3)), clip_on=False, zorder=2)
        return True

    homeless = []
    for name in names:
        full = name.get_text()
        if not settle(name, full, most=_COVERS) and not settle(name, full.partition("\n")[0], most=_COVERS):
            homeless.append((name, full))
    for number, (name, _) in enumerate(homeless, 1):
        settle(name, str(number), most=math.inf, distances=(*_AWAY, 70, 95, 125))
    return [(number, full) for number, (_, full) in enumerate(homeless, 1)]


def _gap(box: Any, x: float, y: float) -> float:
    """Return the distance of a point from a box; 0 inside."""
    return math.hypot(max(box.x0 - x, x - box.x1, 0.0), max(box.y0 - y, y - box.y1, 0.0))


class UnitCell(NamedTuple):
    """A unit in a map: how full its cell is, from 0 to 1, and whether it was cut."""

    shade: float
    cut: bool


@dataclass(frozen=True)
class MapFigure:
    """A map of all units, layers down and units across."""

    kind: str  # CSS class
    title: str
    note: str
    rows: Sequence[Sequence[UnitCell]]
    ends: tuple[str, ...] = ()  # the numbers of an empty and of a full cell; none for the plan

    @property
    def widest(self) -> int:
        """Units of the layer that has most."""
        return max(len(row) for row in self.rows)


class Bar(NamedTuple):
    """The bar of a layer: the share of its units that stay, the text beside it, and its tooltip."""

    share: float
    text: str
    note: str


@dataclass(frozen=True)
class BarFigure:
    """A bar per layer, layers down."""

    title: str
    note: str
    rows: Sequence[Bar]
    text_width: int  # of the longest text, in units of the SVG


@dataclass(frozen=True)
class Scale:
    """The axis of a chart of bars: shares of the dense model's value, from 0 to `high`, which is above 1."""

    high: float

    def __call__(self, share: float) -> float:
        """Return the place of a share in percent of the width; one outside the axis is at its end."""
        return 100 * min(max(share, 0.0), self.high) / self.high

    @classmethod
    def of(cls, times: Iterable[TimedRow], shares: Iterable[float] = ()) -> Scale:
        """Return a scale with room for all times with their intervals, and for other shares."""
        ends = [1.05, *shares]
        for time in times:
            highest = max(time.ratio_high, time.control_high)
            # One noisy row must not squeeze all the others.
            ends.append(min(highest, 1.5) if time.noisy else highest)
        return cls(max(ends) + 0.01)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """The places and texts of at most nine shares, from 0 on in the first step of 0.2, 0.5, 1, 2, ... that fits."""
        step = next(s * 10**power for power in range(-1, 20) for s in (2, 5, 10) if self.high / (s * 10**power) <= 8)
        shares = [step * number for number in range(int(self.high / step) + 1)]
        return [(self(share), f"{share:.3g}") for share in shares]


def number_figure(
    marks: Mapping[str, str], numbers: Mapping[str, Sequence[float]], kind: str, *, title: str, note: str
) -> MapFigure:
    """Return the map of a number of units: a cell is empty for the smallest or no number, and full for the largest."""
    values = list(itertools.chain.from_iterable(numbers.values()))
    low, high = min(values), max(values)
    rows = []
    for module, line in marks.items():
        cells = [*numbers.get(module, ())]
        cells += [low] * (len(line) - len(cells))  # without numbers, such as of a module that was not scored
        pairs = zip(line, cells, strict=False)
        rows.append([UnitCell((value - low) / (high - low or 1), mark == CUT) for mark, value in pairs])
    return MapFigure(kind, title, note, rows, (f"{low:.2g}", f"{high:.2g}"))


def neuron_bars(counts: Mapping[str, NeuronCount]) -> BarFigure | None:
    """Return a bar of the neurons of every block that stay; None without blocks."""
    if not counts:
        return None
    totals = {count.total for count in counts.values()}
    bars = []
    for module, count in counts.items():
        share, text = count.kept / count.total, f"{count.kept:,} of {count.total:,}"
        note = f"{module}: {text} neurons kept ({share:.0%})"
        bars.append(Bar(share, f"{count.kept:,}" if len(totals) == 1 else text, note))
    every = f" of {totals.pop():,} in every layer" if len(totals) == 1 else ""
    return BarFigure("Neurons", f"kept{every}; grey: cut", bars, 8 + 7 * max(len(bar.text) for bar in bars))
