"""Exploring a finished run or sweep: plans as `run` makes them, FLOPs as counted, predictions, and the page itself."""

import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.browser import Browser
from support.cuts import plan_of
from support.models import causal_lm

import hies_export
from hies_export import PruningPlan, RequestError, Statistics, count_flops
from hies_export.calibrate.statistics import Calibration
from hies_export.cli.main import main
from hies_export.lab.studies.explore import Exploration, estimate, lost_share, read_exploration
from hies_export.lab.ui.app import draw, save
from hies_export.model.tokens import synthetic_batch
from hies_export.report.report import CUT


@pytest.fixture(scope="module")
def swept(ran: Path) -> Path:
    folder = ran.parent / "sweep"
    options = ["--criteria", "hies,his,random", "--alphas", "0.2,0.7", "--sparsities", "0.2,0.5", "--seeds", "3"]
    options += ["--compensations", "none,bias", "--no-figures"]
    assert main(["sweep", str(ran.parent / "recipe.yaml"), "-o", str(folder), *options]) == 0
    return folder


def test_a_saved_plan_is_the_one_a_run_would_make(ran: Path, tmp_path: Path) -> None:
    exploration = read_exploration(ran)
    for alpha, share, allocation in ((0.25, 0.3, "global"), (0.9, 0.5, "uniform")):
        text = save(exploration, tmp_path, alpha, share, allocation)
        options = [f"prune.alpha={alpha}", f"prune.budget.heads={share}", f"prune.allocation={allocation}"]
        other = tmp_path / f"scored-{alpha}"
        settings = [part for option in options for part in ("--set", option)]
        assert main(["score", str(ran.parent / "recipe.yaml"), "-o", str(other), *settings]) == 0
        (saved,) = tmp_path.glob(f"plan-alpha{alpha}-*.json")
        assert saved.read_bytes() == (other / "plan.json").read_bytes()
        assert str(saved) in text
    slim = tmp_path / "slim"
    assert main(["apply", str(saved), str(ran.parent / "model"), "-o", str(slim)]) == 0
    assert PruningPlan.from_file(saved).removed == 9 == PruningPlan.from_file(slim / "hies_plan.json").removed


def test_flops_are_those_of_a_real_cut(ran: Path) -> None:
    exploration = read_exploration(ran)
    dense = hies_export.load(ran.parent / "model")
    batch = synthetic_batch(dense, batch=2, sequence=16)
    sites = hies_export.find_attention(dense, batch)
    for share, allocation in ((0.1, "global"), (0.7, "global"), (0.34, "uniform")):
        plan = exploration.plan_at(0.5, share, allocation)
        slim = hies_export.prune_units(dense, plan, sites)
        counted = count_flops(slim, batch) / count_flops(dense, batch)
        assert exploration.flops_ratio(plan) == pytest.approx(counted, abs=1e-9)


def test_groups_go_together_and_query_heads_apart() -> None:
    model = causal_lm(hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
    sites = hies_export.find_attention(model, synthetic_batch(model, batch=2, sequence=8))
    values = {site.name: torch.rand(6, dtype=torch.float64) for site in sites}
    entropy = {name: v.flip(0) for name, v in values.items()}
    statistics = Statistics({"his": values, "entropy": entropy}, Calibration(4, "data", "f"))
    scores = hies_export.score_units(statistics, alpha=0.3)
    for unit in ("group", "query"):
        made = plan_of(scores, sites, heads=0.34, unit=unit)
        exploration = Exploration("m", statistics, "model", made, 0.01, "", "accuracy")
        found = exploration.plan_at(0.3, 0.34, "global")
        assert (exploration.unit, found.kept) == (unit, made.kept)


def test_a_run_measured_its_search_for_alpha_and_itself(ran: Path) -> None:
    exploration = read_exploration(ran)
    own, search = exploration.measured
    report = json.loads((ran / "report.json").read_text())
    assert own.quality == (report["quality"]["dense"], report["quality"]["slim"])
    assert own.lost[0] == 0
    curve = json.loads((ran / "scores.json").read_text())["alpha_curve"]
    assert search.stability == tuple(point["stability"] for point in curve)
    # The share of HIS that goes, by hand, at the run's own alpha.
    chosen = next(i for i, point in enumerate(curve) if point["alpha"] == report["alpha"])
    his = json.loads((ran / "scores.json").read_text())["his"]
    marks = report["details"]["head_map"]
    gone = sum(v for name, line in marks.items() for v, mark in zip(his[name], line, strict=True) if mark == CUT)
    assert search.lost[chosen] == pytest.approx(gone / sum(map(sum, his.values()))) == own.lost[1]


def test_a_sweep_measured_its_plans_by_compensation(swept: Path) -> None:
    exploration = read_exploration(swept)
    rows = json.loads((swept / "sweep.json").read_text())
    assert len(exploration.measured) == 2
    for measured, compensation in zip(exploration.measured, ("none", "bias"), strict=True):
        own = [r for r in rows if r["compensation"] == compensation and r["criterion"] != "random"]
        assert measured.quality == (own[0]["quality_dense"], *(row["quality"] for row in own))
        for row, lost in zip(own, measured.lost[1:], strict=True):
            if row["criterion"] == "hies":
                plan = exploration.plan_at(row["alpha"], row["sparsity"], "global")
                assert lost_share(exploration.statistics["his"], plan) == pytest.approx(lost)
                assert exploration.flops_ratio(plan) == pytest.approx(row["flops_ratio"])


def test_predictions_never_get_better_by_losing_importance() -> None:
    lost, quality = (0.0, 0.1, 0.2, 0.4), (0.90, 0.80, 0.84, 0.50)
    # 0.80 and 0.84 break the order and are pooled; in between it is linear.
    assert estimate(lost, quality, 0.15).value == pytest.approx(0.82)
    assert estimate(lost, quality, 0.3).value == pytest.approx((0.82 + 0.50) / 2)
    found = [estimate(lost, quality, at / 50).value for at in range(21)]
    assert all(b <= a for a, b in itertools.pairwise(found))
    # Left out in turn: 0 -> 0.82 pooled, 0.1 -> 0.87, 0.2 -> 0.70, 0.4 -> 0.82 pooled.
    errors = (0.08, 0.07, 0.14, 0.32)
    assert estimate(lost, quality, 0.1).error == pytest.approx(sum(errors) / 4)
    assert estimate(lost[:3], quality[:3], 0.1).error is None


@pytest.mark.parametrize(
    ("at", "higher", "bound", "value"),
    [
        (0.05, True, "at least", 0.9),
        (0.5, True, "at most", 0.5),
        (0.05, False, "at most", 3.0),
        (0.5, False, "at least", 7.0),
    ],
)
def test_beyond_what_was_measured_there_are_bounds(at: float, higher: bool, bound: str, value: float) -> None:
    values = (0.9, 0.5) if higher else (3.0, 7.0)
    found = estimate((0.1, 0.4), values, at, higher_is_better=higher)
    assert (found.bound, found.value) == (bound, value)


def test_what_is_drawn(ran: Path) -> None:
    exploration = read_exploration(ran)
    page = draw(exploration, 0.5, 0.5, "uniform")
    assert "9 of 18" in page
    assert page.count("<rect") == 18
    assert len(re.findall(r'<path[^>]* d="M[^"]*l8 8', page)) == 9
    assert re.search(r"masked, on \d+ further rows of train", page)
    for text in (draw(exploration, 0.5, 0.95, "global"), draw(exploration, 0.5, 0.01, "global")):
        assert "the budget" in text
        assert "<svg" not in text
    assert "No quality is predicted" in draw(
        Exploration("m", exploration.statistics, "model", exploration.plan, 0.01, "", "accuracy"), 0.5, 0.5, "global"
    )


def test_what_compensation_means_for_a_plan_is_said_loudly(ran: Path, tmp_path: Path) -> None:
    own = PruningPlan.from_file(ran / "plan.json")
    folder = Path(shutil.copytree(ran, tmp_path / "out"))
    compensation = {"method": "least_squares", "refit": "0" * 64}
    (folder / "plan.json").write_text(replace(own, compensation=compensation).to_json())
    plain, exploration = read_exploration(ran), read_exploration(folder)
    assert all("cut and compensated" in measured.how for measured in exploration.measured)
    assert not any("masked" in measured.how for measured in exploration.measured)
    for found, said in ((plain, False), (exploration, True)):
        page = draw(found, 0.5, 0.5, "uniform")
        assert ("apply does NOT compensate this plan" in page) is said
        message = save(found, folder, 0.5, 0.5, "uniform")
        assert ("apply does NOT compensate this plan" in message) is said
        saved = PruningPlan.from_file(folder / "plan-alpha0.5-uniform-0.5.json")
        assert saved.compensation == ({"method": "least_squares"} if said else {}), "so that apply says it as well"
    assert own.alpha is not None
    message = save(exploration, folder, own.alpha, 0.4, "global")
    assert "refit.safetensors beside it" in message
    saved = PruningPlan.from_file(folder / f"plan-alpha{own.alpha:g}-global-0.4.json")
    assert (saved.kept, saved.compensation) == (own.kept, compensation)


def test_names_are_text_on_the_page(ran: Path, tmp_path: Path) -> None:
    exploration = replace(read_exploration(ran), model="<img src=m>", shape="<img src=x>")
    measured = replace(exploration.measured[0], how="<img src=x>")
    page = draw(replace(exploration, measured=(measured,)), 0.5, 0.5, "uniform")
    assert page.count("&lt;img src=x&gt;") == 2
    assert "<img" not in page + save(exploration, tmp_path, 0.5, 0.5, "uniform")


def test_a_folder_that_is_not_a_run(tmp_path: Path, ran: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError, match=r"needs the folder of a finished run .* but .* is neither; give"):
        read_exploration(tmp_path)
    for name in ("scores.json", "sweep.json"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(RequestError, match=r"must be"):
            read_exploration(tmp_path)
    assert main(["ui", str(ran.parent / "nothing")]) == 2
    assert "nothing is not there" in " ".join(capsys.readouterr().err.split())


@pytest.fixture
def address(ran: Path) -> Iterator[str]:
    """The page of the run, served by the command line in a process of its own."""
    pytest.importorskip("gradio", reason="no Gradio here: pip install gradio")
    command = [sys.executable, "-m", "hies_export", "ui", str(ran), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[0]
        server.send_signal(signal.SIGINT)
        assert server.wait(300) in (0, 130)


SLIDE = """(() => { const n = document.querySelectorAll('input[type=number]')[%d];
 Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(n, '%s');
 n.dispatchEvent(new Event('input', {bubbles: true})); n.dispatchEvent(new Event('change', {bubbles: true}));
 n.dispatchEvent(new Event('blur', {bubbles: true})); })()"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_sliders_redraw_and_save(width: int, browser: Browser, address: str, ran: Path) -> None:
    browser.show(address, width=width)
    browser.wait("document.querySelectorAll('.hies rect').length == 18")
    assert browser.ask("document.querySelectorAll('.hies .map path').length") == 7  # as the run made it
    browser.ask(SLIDE % (1, "0.5"))
    browser.wait("document.querySelectorAll('.hies .map path').length == 9")
    assert "9 of 18" in browser.ask("document.querySelector('.hies').innerText")
    before = browser.ask("document.querySelector('.hies .map').outerHTML")
    browser.ask(SLIDE % (0, "0.05"))
    browser.wait(f"document.querySelector('.hies .map').outerHTML != {json.dumps(before)}")
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
    plan = ran / "plan-alpha0.05-global-0.5.json"
    plan.unlink(missing_ok=True)
    browser.ask("[...document.querySelectorAll('button')].find(b => b.innerText == 'Save this plan').click()")
    browser.wait("document.body.innerText.includes('hies-export apply')")
    assert PruningPlan.from_file(plan).kept == read_exploration(ran).plan_at(0.05, 0.5, "global").kept
    asked = [e["params"]["request"]["url"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith((address, "data:", "blob:", "about:"))] == []
    errors = [e for e in browser.events if e.get("method") in ("Runtime.exceptionThrown",)]
    assert not errors, errors
