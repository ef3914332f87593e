"""Where the FLOPs are, layer by layer, as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PARTS = ("projections", "products", "other")


def layer_table(
    dense: Sequence[Mapping[str, Any]], slim: Sequence[Mapping[str, Any]] | None = None
) -> tuple[list[str], list[list[str]]]:
    """Header and lines of MFLOPs per layer, with a line of sums.

    Args:
        dense: From `flops_per_layer`.
        slim: Of the slim model, whose parts are then shown beside the dense one's, "dense → slim".
    """
    models = [list(rows) for rows in (dense, slim) if rows is not None]
    sums = [{"layer": "all", **{part: sum(row[part] for row in rows) for part in PARTS}} for rows in models]
    lines = []
    for rows in (*zip(*models, strict=True), tuple(sums)):
        cells = [[row[part] for row in rows] for part in PARTS]
        cells.append([sum(row[part] for part in PARTS) for row in rows])
        shown = [" → ".join(dict.fromkeys(f"{value / 1e6:.4g}" for value in cell)) for cell in cells]
        lines.append([rows[0]["layer"] or "outside the layers", *shown])
    return ["MFLOPs", "projections", "attention products", "other", "all"], lines
