"""Figures of quality and stability against measured time, on rows made by hand."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hies_export.sweep.charts import line_styles
from hies_export.sweep.figures import draw_sweep
from hies_export.sweep.page import timed_panels
from hies_export.sweep.tables import render_markdown, sweep_tables

ROW: dict[str, Any] = {
    "alpha": None,
    "alpha_by": None,
    "sparsity": None,
    "calibration_samples": 8,
    "flops_ratio": None,
    "heads_removed": None,
    "metric": "accuracy",
    "quality_dense": 0.9,
}
MODULES = ("attention", "mlp", "attention+mlp")


def rows(*, criteria: tuple[str, ...] = ("fisher", "kwon")) -> list[dict[str, Any]]:
    """Return rows in which time is a tenth above the share of FLOPs, and stability that share and a bit by seed."""
    return [
        {**ROW, "criterion": criterion, "flops_target": flops, "modules": modules, "compensation": compensation}
        | {"seed": seed, "quality": flops, "stability": flops + 0.02 * seed}
        | {"latency_ratio": flops + 0.1, "latency_low": flops + 0.05, "latency_high": flops + 0.2}
        for compensation in ("scalars", "weighted")
        for criterion in criteria
        for modules in MODULES
        for flops in (0.8, 0.6)
        for seed in (0, 1)
    ]


PLAN = {"criterion": "his", "alpha": None, "sparsity": None, "flops_target": 0.8, "modules": "attention+mlp"}
DETAILS = {
    "his": {"a": [0.1, 0.4], "a.mlp": [0.2, 0.3, 0.5]},
    "entropy": {"a": [0.5, 0.4]},
    "plans": [PLAN | {"kept": {"a": [1], "a.mlp": [0]}}, PLAN | {"modules": "mlp", "kept": {"a": [0, 1]}}],
}


def draw(folder: Path, found: list[dict[str, Any]]) -> dict[str, str]:
    (folder / "sweep.json").write_text(json.dumps(found))
    (folder / "details.json").write_text(json.dumps(DETAILS))
    return draw_sweep(folder)


def test_points_are_means_over_seeds_at_the_measured_time() -> None:
    panels = timed_panels(rows(), line_styles(rows()))
    assert [panel.title for panel in panels] == ["scalars", "weighted least squares"]
    for chart in (panel.charts[0] for panel in panels):
        # A share of the FLOPs is at the time that is a tenth above it, and less time is on the right.
        places = {tick.text: tick.place for tick in chart.x}
        assert places["90"] < places["80"] < places["70"]
        assert [line.name for line in chart.lines][:3] == [
            *("fisher, heads only", "fisher, neurons only", "fisher, heads and neurons"),
        ]
        assert len(chart.lines) == 6
        for line in chart.lines:
            assert [point.x for point in line.points] == pytest.approx([places["90"], places["70"]])
            assert [re.search(r"stability (\S+)", point.note)[1] for point in line.points] == ["81.00", "61.00"]  # type: ignore[index]


def test_a_colour_per_method_and_a_dash_per_kind() -> None:
    styles = line_styles(rows())
    assert len({style.colour for style in styles.values()}) == 2
    assert [style.dash for style in styles.values()] == ["2 4", "7 4", ""] * 2


def test_without_times_there_is_no_such_figure_and_flops_fall_to_the_right(tmp_path: Path) -> None:
    assert {"quality-latency.svg", "stability-latency.svg"} < set(draw(tmp_path, rows()))
    found = draw(tmp_path, [{name: value for name, value in row.items() if "latency" not in name} for row in rows()])
    assert set(found) == {"quality.svg", "stability.svg", "head-maps.svg", "seeds.svg"}
    ticks = {
        text: float(x) for x, text in re.findall(r'<text x="([\d.]+)" y="267" [^>]*>(\d+)<', found["stability.svg"])
    }
    assert ticks["80"] < ticks["60"]
    assert "FLOPs left, %" in found["stability.svg"]
    assert "HIS: 80% of the FLOPs" in found["head-maps.svg"]


def test_tables_have_a_column_per_share_of_flops_the_smallest_cut_first() -> None:
    text = render_markdown(sweep_tables(rows()))
    assert "| FLOPs left | 80% | 60% |" in text
    assert "| kwon (neurons only) + scalars | **81.00** ± 1.41 | **61.00** ± 1.41 |" in text


def test_samples_tell_rows_apart_only_where_the_grid_gave_them() -> None:
    # How many rows reach the tokens that `compensated` takes differs by seed.
    found = [row | {"calibration_samples": 8 + row["seed"]} for row in rows(criteria=("fisher", "compensated"))]
    text = render_markdown(sweep_tables(found))
    assert "| compensated (neurons only) + scalars | <u>81.00</u> ± 1.41 | <u>61.00</u> ± 1.41 |" in text
    assert "fisher (neurons only, 8 samples) + scalars" in text
