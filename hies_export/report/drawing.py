"""The style of all pictures: axes of matplotlib, written as SVG, and within a page in the colours of the page."""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, LINE, CARD = "#14140f", "#66655f", "#e2e1db", "#ffffff"
ACCENT, SECOND, GREY = "#0072b2", "#d55e00", "#8c8c8c"
# The CSS variable of a page that each colour becomes.
VARIABLES = {INK: "ink", MUTED: "muted", LINE: "line", CARD: "card", ACCENT: "accent", SECOND: "second", GREY: "other"}
# How a picture of this package begins.
BEGINNING = '<svg class="hies-export" '


@contextmanager
def canvas(width: float, height: float) -> Iterator[Axes]:
    """Yield frameless axes of a size in points, in a figure that `svg_of` makes as large as what is drawn."""
    import matplotlib
    from matplotlib.figure import Figure

    # DejaVu Sans comes with matplotlib and is wider than the fonts of pages: what fits in it fits there.
    text = {"font.size": 9.5, "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "text.parse_math": False}
    colours = dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color", "text.color"), MUTED)
    svg = {"svg.fonttype": "none", "svg.hashsalt": "hies-export"}
    with matplotlib.rc_context({**text, **colours, **svg}), warnings.catch_warnings():
        # A browser has glyphs that this font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        axes = Figure((width / 72, height / 72), facecolor=CARD).add_axes((0, 0, 1, 1))
        axes.spines[:].set_visible(False)
        axes.tick_params(which="both", length=0, pad=6)
        axes.set_axisbelow(True)
        yield axes


def svg_of(axes: Axes, text: str) -> str:
    """Return the figure of axes, described by `text`, as an SVG file; call it within the block of `canvas`."""
    out = io.StringIO()
    nothing: dict[str, Any] = dict.fromkeys(("Date", "Type", "Format", "Creator"))
    axes.get_figure(root=True).savefig(out, format="svg", bbox_inches="tight", pad_inches=0.06, metadata=nothing)
    return f'{BEGINNING}role="img" aria-label="{html.escape(text)}" ' + out.getvalue().partition("<svg ")[2]


def for_page(svg: str, variables: Mapping[str, str] = VARIABLES) -> Markup:
    """Return a picture as an element of a page, whose colours are CSS variables, which change in dark mode."""
    element = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    for colour, name in variables.items():
        element = element.replace(f": {colour}", f": var(--{name})")
    return Markup(element)
