import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from hies_export.errors import RequestError
from hies_export.report.figures import write_figures
from hies_export.sweep.figures import draw_sweep, head_maps

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


def texts(svg: str, kind: str = "text") -> list[str]:
    """Return the texts of a figure, which has to be XML."""
    return [e.text or "" for e in ET.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{kind}")]


def test_every_figure_of_a_full_sweep_is_drawn_the_same_twice(tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path, rows((8, 16), (0, 1), (0.2, 0.5, 0.8)))
    found = draw_sweep(folder)
    names = ("quality", "stability", "head-maps", "alpha-sensitivity", "calibration-size", "seeds")
    assert list(found) == [f"{name}.svg" for name in names]
    assert draw_sweep(folder) == found
    assert [f.read_text() for f in write_figures(found, tmp_path / "figures")] == list(found.values())
    # A line per budget in each of four charts, a point per given alpha in each line.
    assert len(re.findall(r'<g class="line [^>]*data-s="70% heads removed">', found["alpha-sensitivity.svg"])) == 4
    said = texts(found["alpha-sensitivity.svg"], "title")
    assert [note for note in said if note.startswith("hies (α 0.8), 70% cut: quality")] == [
        "hies (α 0.8), 70% cut: quality 34.00 ± 0.00 over 2 seeds"
    ] * 2
    assert {"8", "16", "calibration samples"} <= set(texts(found["calibration-size.svg"]))
    assert "his, 50% cut: stability 51.00" in texts(found["seeds.svg"], "title")


def test_figures_without_data_are_left_out(tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path, rows((8,), (0,), (0.2,)))
    assert set(draw_sweep(folder)) == {"quality.svg", "stability.svg", "head-maps.svg"}


def test_samples_of_their_own_are_no_second_calibration_size(tmp_path: Path) -> None:
    found = rows((8,), (0,), (0.2,))
    found += [{**r, "criterion": "slicegpt", "calibration_samples": 512} for r in found if r["criterion"] == "his"]
    assert "calibration-size.svg" not in draw_sweep(sweep_folder(tmp_path, found))


def test_every_method_has_a_line_of_its_own(tmp_path: Path) -> None:
    his = [r for r in rows((8,), (0,), ()) if r["compensation"] == "none"]
    found = [{**r, "criterion": f"criterion {number}"} for number in range(13) for r in his]
    svg = draw_sweep(sweep_folder(tmp_path, found))["stability.svg"]
    lines = re.findall(
        r'<g class="line (c\d)" data-s="[^"]*">\s*<polyline points="[^"]*"( stroke-dasharray="6 3")?', svg
    )
    assert len(lines) == len(set(lines)) == 13


def test_curves_show_the_mean_of_the_seeds_in_percent(tmp_path: Path) -> None:
    svg = draw_sweep(sweep_folder(tmp_path, rows((8,), (0, 2), (0.2,))))["stability.svg"]
    titles = [text for text in texts(svg) if "predictions kept" in text]
    assert titles == ["no compensation: predictions kept, %", "least squares: predictions kept, %"]
    assert [note for note in texts(svg, "title") if note.startswith("his")] == [
        f"his, {cut}% cut: stability {mean}.00 ± 1.41 over 2 seeds" for cut, mean in ((30, 71), (50, 51), (70, 31))
    ] * 2


def test_head_maps_cross_out_the_heads_that_go() -> None:
    svg = head_maps(DETAILS)
    titles = [text for text in texts(svg) if "removed" in text]
    assert [title.partition(" (")[0] for title in titles] == [
        f"{label}: {cut}% removed" for label in ("HIS", "HIES, α 0.3") for cut in (20, 40, 60)
    ]
    assert titles[0].endswith("(empty: 0, full: 1)")
    *_, last = svg.split('<svg class="map')
    # A cell, and a cross where the head goes: the first of both layers.
    cells = re.findall(r'fill-opacity="([\d.]+)" data-i="(\d),(\d)"/>\s*(<path)?', last)
    assert [(layer, head) for _, layer, head, cross in cells if cross] == [("0", "0"), ("1", "0")]
    # By hand: HIS^ of the first head is 0, its entropy the greatest; HIES of the last is the largest of all.
    assert (cells[0][0], cells[-1][0]) == ("0.06", "1.00")
    assert titles[-1].endswith(f"(empty: 0, full: {0.3 * 0.25 + 0.7:.2g})")


def test_no_finished_sweep_no_figures(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="drawn from a finished sweep"):
        draw_sweep(tmp_path)
