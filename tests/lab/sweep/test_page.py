"""sweep.html: that points lie where the numbers say, what the page leads with, and how a real browser shows it."""

import itertools
import json
import math
import re
import statistics
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import sweeps
from support.browser import Browser

from hies_export.cli.main import main
from hies_lab.sweep.charts import (
    Chart,
    alpha_axis,
    budget_axis,
    chart,
    draw_chart,
    line_styles,
    sweep_frontier,
    time_axis,
)
from hies_lab.sweep.page import lead_text, read_sweep, render_sweep, write_page
from hies_lab.sweep.results import line_name, render_markdown, sweep_tables
from hies_lab.sweep.schemas import SweepAbout

ABOUT = SweepAbout(
    model="/where/it/is/minilm",
    task="text-classification",
    calibration_split="train",
    evaluation_split="validation",
    evaluation_samples=600,
    evaluation_of=872,
    shape=[8, 128],
    environment={"cpu": "a processor", "torch": "2.13.0"},
)
QUALITY = {"his": 0.8, "hies": 0.82, "random": 0.6, "slicegpt": 0.85}


def row(criterion: str, sparsity: float, seed: int, **fields: Any) -> dict[str, Any]:
    quality = QUALITY.get(criterion, 0.7) - 0.2 * sparsity**2 + 0.013 * seed
    of_cut = {"flops_ratio": 1 - sparsity / 3, "heads_removed": round(72 * sparsity)}
    by = {"alpha_by": "auto"} if criterion == "hies" else {}
    made = sweeps.sweep_row(
        criterion, sparsity=sparsity, seed=seed, quality=quality, stability=quality + 0.05, **of_cut
    )
    return made | by | fields


def rows(criteria: Sequence[str] = ("his", "hies", "random"), **fields: Any) -> list[dict[str, Any]]:
    return [row(c, s, seed, **fields) for c in criteria for s in (0.1, 0.3, 0.5, 0.7) for seed in (0, 1, 2)]


def drawn(found: list[dict[str, Any]], quantity: str = "quality") -> Chart:
    return chart(found, quantity, budget_axis(found), line_styles(found), name=lambda r: line_name(r, found))


def places(svg: str, kind: str) -> list[tuple[float, float]]:
    """Where the marks of a kind are."""
    found = [e for e in ET.fromstring(svg).iter() if (e.get("id") or "").partition("|")[0] == kind]
    return [(float(use.get("x", "")), float(use.get("y", ""))) for e in found for use in e.iter() if use.get("x")]


def timed_rows(criteria: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return rows in which time is a tenth above the share of FLOPs, and stability that share and a bit by seed."""
    kinds, compensations = ("attention", "mlp", "attention+mlp"), ("scalars", "weighted")
    return [
        sweeps.sweep_row(c, modules=modules, compensation=by, seed=seed, heads_removed=None, flops_ratio=None)
        | {"flops_target": flops, "quality": flops, "stability": flops + 0.02 * seed}
        | {"latency_ratio": flops + 0.1 + 0.01 * seed, "latency_low": flops + 0.05, "latency_high": flops + 0.2}
        for by, c, modules, flops, seed in itertools.product(compensations, criteria, kinds, (0.8, 0.6), (0, 1))
    ]


@pytest.mark.parametrize("quantity", ["quality", "stability"])
def test_points_are_means_over_seeds_with_their_deviation(quantity: str) -> None:
    found = rows()
    made = drawn(found, quantity)
    assert {line.name for line in made.lines} == {"his", "hies (α auto)", "random"}
    for line in made.lines:
        assert len(line.points) == 4
        for point, sparsity in zip(line.points, (0.1, 0.3, 0.5, 0.7), strict=True):
            alike = [r for r in found if (r["criterion"], r["sparsity"]) == (line.name.split()[0], sparsity)]
            values = [100 * r[quantity] for r in alike]
            assert (point.x, point.y) == pytest.approx((sparsity, statistics.fmean(values)))
            assert point.y - point.low == pytest.approx(statistics.stdev(values))
            assert point.high == pytest.approx(min(point.y + statistics.stdev(values), made.most))
    assert [text for _, text in made.axis.ticks] == ["10\n97", "30\n90", "50\n83", "70\n77"]
    assert made.dense == (None if quantity == "stability" else pytest.approx(90))
    svg = draw_chart(made)
    assert svg == draw_chart(made)
    assert svg.count('<g id="line|') == svg.count('<g id="band|') == 3
    assert '<g id="band|' not in draw_chart(drawn([r for r in found if r["seed"] == 0], quantity))
    x, y = zip(*places(svg, "point"), strict=True)
    points = [point for line in made.lines for point in line.points]
    assert len(x) == len(points) == 12
    # Deeper cuts are on the right, larger numbers at the top; both axes are straight.
    right, up = (x[3] - x[0]) / 0.6, (y[0] - y[3]) / (points[0].y - points[3].y)
    assert right > 0 > up
    for at, height, point in zip(x, y, points, strict=True):
        assert at - x[0] == pytest.approx((point.x - 0.1) * right, abs=0.01)
        assert height - y[0] == pytest.approx((point.y - points[0].y) * up, abs=0.01)


def test_deeper_cuts_are_on_the_right_whatever_the_budget() -> None:
    found = [r | {"flops_target": 1 - r["sparsity"], "sparsity": None, "modules": "attention"} for r in rows()]
    places, texts = zip(*drawn(found).axis.ticks, strict=True)
    assert (list(places), texts) == (sorted(places), ("90", "70", "50", "30"))
    # Of times, less is on the left.
    timed = [row("his", s, 0, latency_ratio=1 - s / 2) for s in (0.1, 0.3)]
    assert [time_axis(timed).at(r) for r in timed] == pytest.approx([95, 85])


def test_large_perplexities_are_drawn_by_their_logarithm() -> None:
    found = [
        row("his", s, 0, metric="perplexity", quality=q, quality_dense=6.0)
        for s, q in ((0.1, 7.0), (0.3, 11.0), (0.5, 900.0))
    ]
    made = drawn(found)
    assert made.logarithmic
    svg = draw_chart(made)
    assert {">10<", ">100<", ">500<"} <= set(re.findall(">[0-9]+<", svg))
    y = [height for _, height in places(svg, "point")]
    assert (y[0] - y[1]) / (y[0] - y[2]) == pytest.approx(math.log(11 / 7) / math.log(900 / 7), abs=0.01)
    assert not drawn(rows()).logarithmic


def test_an_infinite_perplexity_has_no_deviation_and_is_the_worst() -> None:
    found = [
        row(criterion, s, seed, metric="perplexity", quality=q + seed, quality_dense=6.0)
        for criterion in ("his", "hies")
        for s, q in ((0.1, 7.0), (0.5, math.inf))
        for seed in (0, 1)
    ]
    assert "| his | **7.50** ± 0.71 | **inf** |" in render_markdown(sweep_tables(found))
    y = [height for _, height in places(draw_chart(drawn(found)), "point")]
    assert max(y[1::2]) < min(y[::2])
    timed = [r | {"latency_ratio": 0.9, "latency_low": 0.8, "latency_high": 1.0} for r in found]
    page = render_sweep(timed, ABOUT, name="x")
    assert "inf" in page
    assert not re.search(r"\bnan\b", page)


def test_budgets_that_differ_are_written_differently() -> None:
    found = [row(c, s, 0) for c in ("his", "random") for s in (0.12, 0.125, 0.995)]
    assert "| heads removed | 12% | 12.5% | 99.5% |" in render_markdown(sweep_tables(found))
    assert lead_text(found).startswith("With 12.5% of the heads removed, his keeps")


def test_of_many_methods_the_best_and_ours_have_colours() -> None:
    criteria = [f"criterion-{number}" for number in range(9)]
    worse = [row(c, 0.5, 0, stability=0.9 - 0.01 * place) for place, c in enumerate(criteria)]
    ours = [row("his", 0.5, 0, stability=0.2), row("hies", 0.5, 0, stability=0.3)]
    styles = line_styles(worse + ours)
    coloured = [name for name, style in styles.items() if style.colour is not None]
    assert coloured == [*criteria[:6], "hies (α auto)", "his"]
    assert len(set(styles.values())) == 9
    # A colour for a method, and dashes for what it removes.
    kinds = [row("his", 0.5, 0, modules=m) for m in ("attention", "mlp", "attention+mlp")]
    assert {style.colour for style in line_styles(kinds).values()} == {0}
    assert len({style.dash for style in line_styles(kinds).values()}) == 3


def test_it_leads_with_what_keeps_most_predictions() -> None:
    assert lead_text(rows(("his", "hies", "random", "slicegpt"))) == (
        "With 50% of the heads removed, hies (α auto) keeps 83.3% of the predictions; accuracy is 78.30 (dense 90.00). "
        "Of 3 methods it keeps most at every budget."
    )
    assert lead_text([row("random", 0.3, 1)]).endswith("accuracy is 59.50 (dense 90.00).")


def test_the_page_has_every_row_and_says_where_it_comes_from() -> None:
    found = [r | {"neurons_removed": 100, "modules": "attention+mlp"} for r in rows()]
    page = render_sweep(found, ABOUT, name="folder")
    text = " ".join(re.sub(r"<style>.*?</style>|<script>.*?</script>|<[^>]+>", " ", page, flags=re.DOTALL).split())
    assert "minilm: 3 ways to prune, compared" in text
    assert "/where" not in page
    assert "600 of 872 samples of validation, drawn" in text
    assert "Every row (36)" in text
    assert "22 + 100" in text  # 30 % of 72 heads, and the neurons
    assert len(re.findall(r"<b>\d", page)) == 8  # the best of every column of both tables
    assert not re.search(r"https?://|<img|<link rel=.?stylesheet", page.replace("http-equiv", ""))
    assert "HIES by alpha" not in page


def test_older_sweeps_and_names_that_look_like_elements() -> None:
    # Each method at a budget and with a compensation of its own: of the other there is nothing to show.
    found = [row("<img src=x>", 0.3, 0, neurons_removed=2), row("his", 0.5, 0, compensation="scalars")]
    page = render_sweep(found, SweepAbout(), name="<b>folder")
    assert "&lt;b&gt;folder: 2 ways" in page
    assert not re.search("<img|<b>folder", page)
    assert re.search(r">\s*–\s*<", page)


def test_given_alphas_have_a_chart_of_their_own() -> None:
    given = [
        row("hies", s, 0, alpha=a, alpha_by="given", quality=0.8 - (a - 0.6) ** 2)
        for a in (0.1, 0.6, 0.9)
        for s in (0.3, 0.5)
    ]
    assert "HIES by alpha" in render_sweep([*given, row("his", 0.3, 0)], ABOUT, name="x")
    made = chart(given, "quality", alpha_axis(given), line_styles(given), name=lambda r: line_name(r, given))
    assert [text for _, text in made.axis.ticks] == ["0.1", "0.6", "0.9"]


def test_agreement_against_time_has_a_point_per_method_and_budget() -> None:
    found = timed_rows(("fisher", "kwon"))
    # Another method is slower and keeps more, one is too noisy to compare.
    found += [row | {"criterion": "slow", "latency_ratio": 0.95, "stability": 0.96} for row in found[:2]]
    found += [row | {"criterion": "noisy", "latency_noisy": True, "stability": 1.0} for row in found[:2]]
    figure = sweep_frontier(found, line_styles(found))
    assert figure is not None
    means = [(1.0, 1.0), *([(0.905, 0.81), (0.705, 0.61)] * 12), (0.95, 0.96)]
    assert [(one.time, one.same) for one in figure.found] == [pytest.approx(mean) for mean in means]
    # Those on the frontier have names and intervals, the others neither.
    assert figure.named == figure.best
    assert {round(point.same, 6) for point in figure.best} == {1.0, 0.96, 0.81, 0.61}
    assert {"".join(one.series[:1]) for one in figure.found} == {"", *line_styles(found)} - {
        name for name in line_styles(found) if name.startswith("noisy")
    }
    assert sweep_frontier([row | {"latency_ratio": None} for row in found], line_styles(found)) is None


def test_tables_have_a_column_per_share_of_flops_and_a_row_per_size_that_the_grid_gave() -> None:
    # How many rows reach the tokens that `compensated` takes differs by seed.
    found = [row | {"calibration_samples": 8 + row["seed"]} for row in timed_rows(("fisher", "compensated"))]
    text = render_markdown(sweep_tables(found))
    assert "| FLOPs left | 80% | 60% |" in text
    assert "| compensated (neurons only) + scalars | <u>81.00</u> ± 1.41 | <u>61.00</u> ± 1.41 |" in text
    assert "fisher (neurons only, 8 samples) + scalars" in text


FEW = [row(criterion, share, 0) for criterion in ("his", "hies", "random") for share in (0.3, 0.5)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sweeps.write_sweep(tmp_path / "swept", FEW, {"about": ABOUT.model_dump()})


def test_a_sweep_is_shown_again_and_its_page_renewed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--show", str(folder), "--json"]) == 0
    out, err = capsys.readouterr()
    *lines, result = out.splitlines()
    assert json.loads(result) == {"rows": FEW}
    assert lines[0].startswith("With 50% of the heads removed, hies (α auto) keeps")
    page = (folder / "sweep.html").read_text()
    assert page == render_sweep(*read_sweep(folder), name="swept")
    assert "sweep.html" in err
    (folder / "sweep.html").write_text("mine")
    assert main(["sweep", "--show", str(folder)]) == 2
    assert (folder / "sweep.html").read_text() == "mine"
    assert main(["report", str(folder)]) == 2
    assert f"needs the folder of a finished run, but {folder} is the folder of a sweep" in capsys.readouterr().err
    (folder / "sweep.json").unlink()  # as in a sweep that was stopped
    assert main(["sweep", "--show", str(folder)]) == 2
    assert "must be finished to be shown" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it_whole_and_a_tap_shows_one_method(
    browser: Browser, folder: Path, tmp_path: Path, width: int
) -> None:
    script = (
        "document.querySelector('button[data-s=random]').click();"
        "[document.documentElement.scrollWidth, innerWidth, document.querySelectorAll('g.line.on').length,"
        "Math.min(...[...document.querySelectorAll('.charts svg text')].map(e => e.getBoundingClientRect().height))]"
    )
    *found, smallest = browser.look(tmp_path, write_page(folder).read_text(), script, width=width)
    assert found == [width, width, 2]
    assert smallest > 10
