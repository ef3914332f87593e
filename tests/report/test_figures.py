from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hies_export.errors import RequestError

pytest.importorskip("matplotlib", reason="matplotlib, the extra 'plots', is not installed")

from hies_export.sweep import curves as figures

ROW = {"metric": "accuracy", "quality_dense": 0.9, "flops_ratio": 0.9, "heads_removed": 3}


def rows(sizes: tuple[int, ...], seeds: tuple[int, ...], alphas: tuple[float, ...]) -> list[dict[str, Any]]:
    methods = [("his", None, None), *(("hies", a, "given") for a in alphas)]
    return [
        {
            **{"criterion": c, "alpha": a, "alpha_by": by, "sparsity": s, "seed": seed, "calibration_samples": size},
            **{"compensation": k, "quality": 0.9 - s * (0.5 if a is None else a), "stability": 1 - s + 0.01 * seed},
            **ROW,
        }
        for size in sizes
        for seed in seeds
        for k in ("none", "least_squares")
        for c, a, by in methods
        for s in (0.3, 0.5, 0.7)
    ]


# The second layer has fewer heads.
DETAILS = {
    "his": {"a": [0.1, 0.4, 0.9], "b": [0.2, 0.3]},
    "entropy": {"a": [0.5, 0.4, 0.3], "b": [0.2, 0.1]},
    "plans": [
        {"criterion": c, "alpha": a, "sparsity": s, "kept": {"a": [1, 2], "b": [0, 1] if s < 0.5 else [1]}}
        for c, a in (("his", None), ("hies", 0.3))
        for s in (0.2, 0.4, 0.6)
    ],
}


def sweep_folder(folder: Path, found: list[dict[str, Any]]) -> Path:
    (folder / "sweep.json").write_text(json.dumps(found))
    (folder / "details.json").write_text(json.dumps(DETAILS))
    return folder


def test_every_figure_of_a_full_sweep_is_drawn_the_same_twice(tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path, rows((8, 16), (0, 1), (0.2, 0.5, 0.8)))
    written = figures.draw_figures(folder)
    names = ("quality", "stability", "head-maps", "importance-3d", "alpha-sensitivity", "calibration-size", "seeds")
    assert sorted(p.name for p in written) == sorted(f"{n}.{e}" for n in names for e in ("png", "svg"))
    before = {p: p.read_bytes() for p in written}
    figures.draw_figures(folder)
    assert {p: p.read_bytes() for p in written} == before


def test_figures_without_data_are_left_out(tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path, rows((8,), (0,), (0.2,)))
    names = {p.stem for p in figures.draw_figures(folder)}
    assert names == {"quality", "stability", "head-maps", "importance-3d"}


def test_samples_of_their_own_are_no_second_calibration_size(tmp_path: Path) -> None:
    found = rows((8,), (0,), (0.2,))
    found += [{**r, "criterion": "slicegpt", "calibration_samples": 512} for r in found if r["criterion"] == "his"]
    assert "calibration-size" not in {p.stem for p in figures.draw_figures(sweep_folder(tmp_path, found))}


def test_every_method_has_a_line_of_its_own() -> None:
    his = [r for r in rows((8,), (0,), ()) if r["compensation"] == "none"]
    found = [{**r, "criterion": f"criterion {number}"} for number in range(13) for r in his]
    (axis,) = figures.curves(found, "stability").axes
    assert len({(line.get_color(), line.get_linestyle()) for line in axis.get_lines()}) == 13


def test_curves_show_the_mean_of_the_seeds_in_percent() -> None:
    figure = figures.curves(rows((8,), (0, 2), (0.2,)), "stability")
    none, compensated = figure.axes
    assert (none.get_title(), compensated.get_title()) == ("no compensation", "least squares")
    his = none.get_lines()[0]
    assert list(his.get_xdata()) == pytest.approx([30, 50, 70])
    assert list(his.get_ydata()) == pytest.approx([71, 51, 31])


def test_the_best_and_the_worst_alpha_are_named() -> None:
    figure = figures.alpha_sensitivity(rows((8,), (0,), (0.2, 0.5, 0.8)))
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels[0].startswith("best: α 0.2")
    assert labels[1].startswith("median: α 0.5")
    assert labels[2].startswith("worst: α 0.8")


def test_head_maps_cross_out_the_heads_that_go() -> None:
    figure = figures.head_maps(DETAILS)
    last = figure.axes[5]
    assert last.get_title() == "HIES, α 0.3: 60% removed"
    assert sorted(map(tuple, last.collections[0].get_offsets().tolist())) == [(0.0, 0.0), (0.0, 1.0)]
    # By hand: HIS^ of the first head is 0, its entropy the greatest.
    assert figure.axes[0].images[0].get_array()[0, 0] == 0
    assert last.images[0].get_array()[0, 0] == pytest.approx(0.0)
    assert last.images[0].get_array()[1, 1] == pytest.approx(0.3 * 0.25 + 0.7)


def test_no_finished_sweep_no_figures(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="drawn from a finished sweep"):
        figures.draw_figures(tmp_path)
