"""Give all figures one palette and style, and write them as PNG and SVG. Needs matplotlib, the extra `plots`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import require_package

# Okabe and Ito's palette, which colour-blind readers can tell apart too; a marker each for print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
# From nothing to the first colour, as the cells of the pages are shaded.
SHADES = ("#FFFFFF", COLOURS[0])
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "grid.alpha": 0.3,
    "svg.hashsalt": "hies_export",
}


def require_matplotlib() -> None:
    """Check that figures can be drawn.

    Raises:
        MissingRuntimeError: matplotlib is not installed.
    """
    who, otherwise = "figures need", ", or do without them"
    require_package("matplotlib", who=who, package="matplotlib", extra="plots", otherwise=otherwise)


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure; sizes are in inches."""
    # Not pyplot: it would keep every figure, and choose a window system.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def head_map(
    axis: Any,
    values: Mapping[str, Sequence[float]],
    cut: Mapping[str, Sequence[int]],
    *,
    title: str,
    colours: Sequence[str] = SHADES,
    limits: tuple[float, float] = (0.0, 1.0),
) -> Any:
    """Draw a number per head, layers down and heads across, with crosses on the heads that are cut.

    Args:
        axis: Where to draw.
        values: Per attention module, a number for each head.
        cut: Per attention module, the heads that are cut.
        title: Text over the map.
        colours: Of the smallest and of the largest number.
        limits: These two numbers.

    Returns:
        The image, for a colour bar.
    """
    from matplotlib.colors import LinearSegmentedColormap

    grid = head_grid(values)
    low, high = limits
    shades = LinearSegmentedColormap.from_list("shades", list(colours))
    image = axis.imshow(grid, cmap=shades, aspect="auto", vmin=low, vmax=high, origin="upper")
    crosses = [(head, layer) for layer, heads in enumerate(cut.values()) for head in heads]
    # White on a dark rim shows on every colour.
    for colour, width in (("black", 2.8), ("white", 1.4)):
        marks = {"marker": "x", "color": colour, "s": 22, "linewidths": width}
        axis.scatter([x for x, _ in crosses], [y for _, y in crosses], **marks)
    axis.set_title(title, fontsize=9)
    axis.grid(False)
    axis.set_xticks(range(0, len(grid[0]), max(1, len(grid[0]) // 6)))
    axis.set_yticks(range(0, len(grid), max(1, len(grid) // 6)))
    return image


def head_grid(values: Mapping[str, Sequence[float]]) -> list[list[float]]:
    """Return the numbers as (layers, heads), with NaN where a layer has fewer heads."""
    heads = max(len(line) for line in values.values())
    return [[*line, *[math.nan] * (heads - len(line))] for line in values.values()]


def write_figures(drawings: Mapping[str, Callable[[], Any]], folder: Path) -> list[Path]:
    """Draw figures and write each as PNG and SVG, always the same bytes, each file whole or not at all.

    Args:
        drawings: File name -> function that returns the figure, or None where there is nothing to draw.
        folder: Where to write; made if need be.

    Returns:
        The files that were written.
    """
    import matplotlib as mpl

    written = []
    with mpl.rc_context(_STYLE):
        for name, draw in drawings.items():
            figure = draw()
            if figure is None:
                continue
            folder.mkdir(parents=True, exist_ok=True)
            for ending, metadata in (("png", None), ("svg", {"Date": None})):
                path = folder / f"{name}.{ending}"
                temporary = folder / f".{os.getpid()}-{path.name}"
                figure.savefig(temporary, dpi=150, metadata=metadata)
                temporary.replace(path)
                written.append(path)
    return written
