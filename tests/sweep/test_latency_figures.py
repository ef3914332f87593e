"""Figures of quality and stability against measured time, on rows made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="matplotlib, the extra 'plots', is not installed")

from hies_export.sweep import curves as figures
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


def test_points_are_means_over_seeds_at_the_measured_time() -> None:
    figure = figures.latency_curves(rows(), "stability")
    assert [axis.get_title() for axis in figure.axes] == ["scalars", "weighted least squares"]
    for axis in figure.axes:
        assert axis.xaxis_inverted()
        assert len(axis.containers) == 6
        line, _, bars = axis.containers[0]
        assert list(line.get_xdata()) == pytest.approx([90, 70])
        assert list(line.get_ydata()) == pytest.approx([81, 61])
        across = bars[0].get_segments()
        assert [tuple(end[0] for end in segment) for segment in across] == [
            pytest.approx((85, 100)),
            pytest.approx((65, 80)),
        ]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[:3] == ["fisher, heads only", "fisher, neurons only", "fisher, heads and neurons"]


def test_a_colour_per_method_and_a_dash_per_kind() -> None:
    lines = [container[0] for container in figures.latency_curves(rows(), "quality").axes[0].containers]
    assert len({line.get_color() for line in lines}) == 2
    assert [line.get_linestyle() for line in lines] == [":", "--", "-"] * 2
    alone = figures.latency_curves(rows(criteria=("kwon",)), "quality").axes[0].containers
    assert len({container[0].get_color() for container in alone}) == 3


def test_without_times_there_is_no_such_figure_and_flops_fall_to_the_right(tmp_path: Path) -> None:
    found = [{name: value for name, value in row.items() if "latency" not in name} for row in rows()]
    assert figures.latency_curves(found, "quality") is None
    axis = figures.curves(found, "stability").axes[0]
    assert axis.xaxis_inverted()
    assert axis.get_xlabel() == "FLOPs left, %"
    plan = {"criterion": "his", "alpha": None, "sparsity": None, "flops_target": 0.8, "modules": "attention+mlp"}
    details = {
        "his": {"a": [0.1, 0.4], "a.mlp": [0.2, 0.3, 0.5]},
        "entropy": {"a": [0.5, 0.4]},
        "plans": [plan | {"kept": {"a": [1], "a.mlp": [0]}}, plan | {"modules": "mlp", "kept": {"a": [0, 1]}}],
    }
    (tmp_path / "sweep.json").write_text(json.dumps(found))
    (tmp_path / "details.json").write_text(json.dumps(details))
    names = {path.stem for path in figures.draw_figures(tmp_path)}
    assert names == {"quality", "stability", "head-maps", "importance-3d", "seeds"}
    (maps, *_) = figures.head_maps(details).axes
    assert maps.get_title() == "HIS: 80% of the FLOPs"


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
