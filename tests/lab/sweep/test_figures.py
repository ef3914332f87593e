"""Figures of sweeps over shares of heads, and over FLOPs and measured time, on rows made by hand."""

import itertools
import re
import statistics
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from support.sweeps import sweep_row, write_sweep

from hies_export.errors import RequestError
from hies_export.lab.sweep.charts import line_styles, sweep_frontier
from hies_export.lab.sweep.results import render_markdown, sweep_tables
from hies_export.lab.sweep.svg import draw_sweep, head_maps
from hies_export.report.figures import write_figures


def rows(sizes: tuple[int, ...], seeds: tuple[int, ...], alphas: tuple[float, ...]) -> list[dict[str, Any]]:
    methods = [("his", None), *(("hies", alpha) for alpha in alphas)]
    fields = itertools.product(sizes, seeds, ("none", "least_squares"), methods, (0.3, 0.5, 0.7))
    return [
        sweep_row(name, alpha=alpha, sparsity=s, seed=seed, calibration_samples=size, compensation=compensation)
        | {"quality": 0.9 - s * (alpha or 0.5), "stability": 1 - s + 0.01 * seed}
        for size, seed, compensation, (name, alpha), s in fields
    ]


# The second layer has fewer heads.
DETAILS = {
    "his": {"a": [0.1, 0.4, 0.9], "b": [0.2, 0.3]},
    "entropy": {"a": [0.5, 0.4, 0.3], "b": [0.2, 0.1]},
    "normalize": "model",
    "plans": [
        {"criterion": c, "alpha": a, "sparsity": s, "kept": {"a": [1, 2], "b": [0, 1] if s < 0.5 else [1]}}
        for c, a in (("his", None), ("hies", 0.3))
        for s in (0.2, 0.4, 0.6)
    ],
}


def texts(svg: str, kind: str = "text") -> list[str]:
    """Return the texts of a figure, which has to be XML."""
    return [e.text or "" for e in ET.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{kind}")]


def test_every_figure_of_a_full_sweep_is_drawn_the_same_twice(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, rows((8, 16), (0, 1), (0.2, 0.5, 0.8)), DETAILS)
    found = draw_sweep(folder)
    names = ("quality", "stability", "head-maps", "alpha-sensitivity", "calibration-size", "seeds")
    assert list(found) == [f"{name}.svg" for name in names]
    assert draw_sweep(folder) == found
    assert [f.read_text() for f in write_figures(found, tmp_path / "figures")] == list(found.values())
    # A line per budget in each of four charts, a point per given alpha in each line.
    assert len(re.findall(r'<g class="line [^>]*data-s="70% heads removed">', found["alpha-sensitivity.svg"])) == 4
    said = texts(found["alpha-sensitivity.svg"], "title")
    assert said.count("hies (α 0.8), 70% cut: quality 34.00 ± 0.00 over 2 seeds") == 2
    assert {"8", "16"} <= set(texts(found["calibration-size.svg"]))
    assert "his, 50% cut: stability 51.00" in texts(found["seeds.svg"], "title")


def test_figures_without_data_are_left_out(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, rows((8,), (0,), (0.2,)), DETAILS)
    assert set(draw_sweep(folder)) == {"quality.svg", "stability.svg", "head-maps.svg"}


def test_samples_of_their_own_are_no_second_calibration_size(tmp_path: Path) -> None:
    found = rows((8,), (0,), (0.2,))
    found += [{**r, "criterion": "slicegpt", "calibration_samples": 512} for r in found if r["criterion"] == "his"]
    assert "calibration-size.svg" not in draw_sweep(write_sweep(tmp_path, found, DETAILS))


def test_every_method_has_a_line_of_its_own(tmp_path: Path) -> None:
    his = [r for r in rows((8,), (0,), ()) if r["compensation"] == "none"]
    found = [{**r, "criterion": f"criterion {number}"} for number in range(13) for r in his]
    svg = draw_sweep(write_sweep(tmp_path, found, DETAILS))["stability.svg"]
    lines = re.findall(r'<g class="line (c\d)" data-s="[^"]*"><path d="[^"]*" style="([^"]*)"', svg)
    assert len(lines) == len(set(lines)) == 13


def test_head_maps_cross_out_the_heads_that_go() -> None:
    svg = head_maps(DETAILS)
    titles = [text for text in texts(svg) if "removed" in text]
    assert len(titles) == 6
    *_, last = svg.split('<svg class="map')
    # A cell, and a cross where the head goes: the first of both layers.
    cells = re.findall(r'fill-opacity="([\d.]+)" data-i="(\d),(\d)"/>\s*(<path)?', last)
    assert [(layer, head) for _, layer, head, cross in cells if cross] == [("0", "0"), ("1", "0")]
    # By hand: HIS^ of the first head is 0, its entropy the greatest; HIES of the last is the largest of all.
    assert (cells[0][0], cells[-1][0]) == ("0.06", "1.00")
    assert titles[-1].endswith(f"(empty: 0, full: {0.3 * 0.25 + 0.7:.2g})")


def test_no_finished_sweep_no_figures(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="must be finished to be shown"):
        draw_sweep(tmp_path)


# ---- FLOPs and measured time --------------------------------------------------------------------------------

MODULES = ("attention", "mlp", "attention+mlp")


def timed_rows(*, criteria: tuple[str, ...] = ("fisher", "kwon")) -> list[dict[str, Any]]:
    """Return rows in which time is a tenth above the share of FLOPs, and stability that share and a bit by seed."""
    fields = itertools.product(("scalars", "weighted"), criteria, MODULES, (0.8, 0.6), (0, 1))
    return [
        sweep_row(
            criterion, modules=modules, compensation=compensation, seed=seed, heads_removed=None, flops_ratio=None
        )
        | {"flops_target": flops, "quality": flops, "stability": flops + 0.02 * seed}
        | {"latency_ratio": flops + 0.1, "latency_low": flops + 0.05, "latency_high": flops + 0.2}
        for compensation, criterion, modules, flops, seed in fields
    ]


def draw_timed(folder: Path, found: list[dict[str, Any]]) -> dict[str, str]:
    return draw_sweep(write_sweep(folder, found, TIMED_DETAILS))


PLAN = {"criterion": "his", "alpha": None, "sparsity": None, "flops_target": 0.8, "modules": "attention+mlp"}
TIMED_DETAILS = {
    "his": {"a": [0.1, 0.4], "a.mlp": [0.2, 0.3, 0.5]},
    "entropy": {"a": [0.5, 0.4]},
    "normalize": "model",
    "plans": [PLAN | {"kept": {"a": [1], "a.mlp": [0]}}, PLAN | {"modules": "mlp", "kept": {"a": [0, 1]}}],
}


def test_agreement_against_time_has_a_point_per_method_and_budget_and_the_frontier() -> None:
    found = [row | {"latency_ratio": row["latency_ratio"] + 0.01 * row["seed"]} for row in timed_rows()]
    # Another method is slower and keeps more, one is too noisy to compare.
    found += [row | {"criterion": "slow", "latency_ratio": 0.95, "stability": 0.96} for row in found[:2]]
    found += [row | {"criterion": "noisy", "latency_noisy": True, "stability": 1.0} for row in found[:2]]
    figure = sweep_frontier(found, line_styles(found))
    assert figure is not None
    means: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for row in found:
        if not row.get("latency_noisy"):
            key = row["criterion"], row["modules"], row["compensation"], row["flops_target"]
            means.setdefault(key, []).append((row["latency_ratio"], row["stability"]))
    points = [(1.0, 1.0), *(tuple(map(statistics.fmean, zip(*values, strict=True))) for values in means.values())]
    assert len(figure.found) == len(points) == 1 + 2 * 2 * 3 * 2 + 1
    best = {
        (round(time, 6), round(same, 6))
        for time, same in points
        if not any(t <= time and s >= same and (t < time or s > same) for t, s in points)
    }
    line = [figure.found[number] for number in figure.best]
    assert {(round(one.time, 6), round(one.same, 6)) for one in line} == best
    # Those have names and intervals, the others neither.
    assert [one for one in figure.found if one.name] == sorted(line, key=figure.found.index)
    assert len(line) == len(best) == 4
    assert {"".join(one.series[:1]) for one in figure.found} == {"", *line_styles(found)} - {
        name for name in line_styles(found) if name.startswith("noisy")
    }
    assert sweep_frontier([row | {"latency_ratio": None} for row in found], line_styles(found)) is None


def test_without_times_there_is_no_such_figure(tmp_path: Path) -> None:
    drawn = draw_timed(tmp_path, timed_rows())
    assert {"quality-latency.svg", "frontier.svg"} < set(drawn)
    written = texts(drawn["frontier.svg"])
    assert {"fisher, heads only", "measured time, share of the dense model's"} <= set(written)
    # A mark is that of a method, whatever it removes.
    assert [text for text in written if text in ("fisher", "kwon")] == ["fisher", "kwon"]
    found = draw_timed(
        tmp_path, [{name: value for name, value in row.items() if "latency" not in name} for row in timed_rows()]
    )
    assert set(found) == {"quality.svg", "stability.svg", "head-maps.svg", "seeds.svg"}


def test_tables_have_a_column_per_share_of_flops_the_smallest_cut_first() -> None:
    text = render_markdown(sweep_tables(timed_rows()))
    assert "| FLOPs left | 80% | 60% |" in text
    assert "| kwon (neurons only) + scalars | **81.00** ± 1.41 | **61.00** ± 1.41 |" in text


def test_samples_tell_rows_apart_only_where_the_grid_gave_them() -> None:
    # How many rows reach the tokens that `compensated` takes differs by seed.
    found = [row | {"calibration_samples": 8 + row["seed"]} for row in timed_rows(criteria=("fisher", "compensated"))]
    text = render_markdown(sweep_tables(found))
    assert "| compensated (neurons only) + scalars | <u>81.00</u> ± 1.41 | <u>61.00</u> ± 1.41 |" in text
    assert "fisher (neurons only, 8 samples) + scalars" in text
