"""Exploring runs that removed neurons: what the sliders choose, what it costs, and what is drawn."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reports import make_report

from hies_export.calibrate.statistics import Calibration, Statistics
from hies_export.lab.studies.explore import Exploration, lost_share, read_exploration
from hies_export.lab.ui.app import draw, save
from hies_export.select.plan import PruningPlan
from hies_export.units.units import Kept

HEADS = ("layer.0.attention", "layer.1.attention")
BLOCKS = ("layer.0", "layer.1")
HIS = {
    **dict(zip(HEADS, ([4.0, 1.0, 3.0, 2.0], [8.0, 7.0, 6.0, 5.0]), strict=True)),
    **dict(zip(BLOCKS, ([0.5, 0.1, 0.4, 0.9, 0.8], [0.2, 0.7, 0.3, 1.0, 0.6]), strict=True)),
}
PLAN = PruningPlan(
    kept={
        HEADS[0]: Kept((0, 2, 3), 4),
        HEADS[1]: Kept((0, 1, 2, 3), 4),
        BLOCKS[0]: Kept((3, 4), 5, kind="mlp"),
        BLOCKS[1]: Kept((0, 1, 2, 3, 4), 5, kind="mlp"),
    },
    criterion="hies",
    alpha=0.5,
)


def explored(*, ranked: tuple[str, ...] = HEADS + BLOCKS) -> Exploration:
    his = {name: torch.tensor(values, dtype=torch.float64) for name, values in HIS.items() if name in ranked}
    entropy = {name: torch.linspace(0, 1, 4, dtype=torch.float64) for name in HEADS if name in ranked}
    statistics = Statistics({"his": his, "entropy": entropy}, Calibration(8, "data", "f"))
    return Exploration("m", statistics, "model", PLAN, 0.03, "8 x 128", "accuracy", flops_per_neuron=0.01)


def test_heads_and_neurons_are_ranked_among_themselves() -> None:
    exploration = explored()
    plan = exploration.plan_at(0.99, 0.25, "global", neurons=0.4)
    assert {name: kept.units for name, kept in plan.kept.items()} == {
        HEADS[0]: (0, 2),  # HIS 1 and 2 go
        HEADS[1]: (0, 1, 2, 3),
        BLOCKS[0]: (0, 3, 4),  # 0.1 and 0.4 go
        BLOCKS[1]: (1, 3, 4),  # 0.2 and 0.3 go
    }
    assert [kept.kind for kept in plan.kept.values()] == ["attention", "attention", "mlp", "mlp"]
    assert exploration.flops_ratio(plan) == pytest.approx(1 - 2 * 0.03 - 4 * 0.01)
    assert lost_share(exploration.statistics["his"], plan) == pytest.approx((1 + 2 + 1.0) / (36 + 5.5))
    uniform = exploration.plan_at(0.99, 0.25, "uniform", neurons=0.6)
    assert [len(kept.units) for kept in uniform.kept.values()] == [3, 3, 2, 2]


def test_neurons_can_stay_as_they_are_or_all_stay() -> None:
    own = {name: PLAN.kept[name] for name in BLOCKS}
    assert explored().plan_at(0.5, 0.25, "global").of_kind("mlp") == own
    assert explored().plan_at(0.5, 0.25, "global", neurons=0.0).removed_neurons == 0
    unranked = explored(ranked=HEADS)
    assert (unranked.ranks_neurons, explored().ranks_neurons) == (False, True)
    assert unranked.plan_at(0.5, 0.25, "global", neurons=0.9).of_kind("mlp") == own


def test_the_page_draws_both() -> None:
    page = draw(explored(), 0.99, 0.25, "global", 0.4)
    text = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    assert "heads kept 6 of 8" in text
    assert "neurons kept 6 of 10" in text
    assert "FLOPs at 8 x 128, of dense 0.900" in text
    assert page.count("<path") == 2
    assert page.count('class="stays"') == 2
    assert "layer.1: 3 of 5 neurons kept (60%)" in page
    assert "as in its own plan" in draw(explored(ranked=HEADS), 0.5, 0.25, "global", 0.4)
    only_heads = replace(explored(ranked=HEADS), plan=replace(PLAN, kept=PLAN.of_kind("attention")))
    assert "eurons" not in draw(only_heads, 0.5, 0.25, "global")
    only_neurons = replace(explored(ranked=BLOCKS), plan=replace(PLAN, kept=PLAN.of_kind("mlp")))
    page = draw(only_neurons, 0.5, 0.25, "global", 0.4)
    assert "heads" not in page
    assert page.count('class="stays"') == 2


def test_a_plan_with_other_neurons_is_saved_under_its_own_name(tmp_path: Path) -> None:
    text = save(explored(), tmp_path, 0.5, 0.25, "global", 0.4)
    (file,) = tmp_path.iterdir()
    assert file.name == "plan-alpha0.5-global-0.25-neurons-0.4.json"
    assert "Saved: 2 of 8 heads and 4 of 10 neurons removed. To apply it:" in text
    assert PruningPlan.from_file(file).kept == explored().plan_at(0.5, 0.25, "global", neurons=0.4).kept
    save(explored(ranked=HEADS), tmp_path, 0.5, 0.25, "global", 0.4)
    assert (tmp_path / "plan-alpha0.5-global-0.25.json").is_file()


def test_a_run_says_what_a_head_and_a_neuron_cost(tmp_path: Path) -> None:
    names = {"scores": HIS, "his": HIS, "weight_l2": HIS, "entropy": {name: [0.1, 0.2, 0.3, 0.4] for name in HEADS}}
    written = {**names, "parameters": {}, "samples": 8, "labels": "data", "fingerprint": "f", "alpha_curve": []}
    (tmp_path / "scores.json").write_text(json.dumps(written))
    (tmp_path / "plan.json").write_text(PLAN.to_json())

    def layer(*millions: int) -> dict[str, Any]:
        names = ("projections", "products", "feed_forward", "other")
        return {"layer": "layer.0"} | {name: number * 10**6 for name, number in zip(names, millions, strict=True)}

    layers = {"dense": [layer(300, 100, 500, 100)], "slim": [layer(260, 90, 350, 100)], "shape": [8, 128]}
    report = make_report(
        neurons=5, flops_per_layer=layers, budget={"kind": "flops", "target": 0.8, "predicted": 0.8, "measured": 0.8}
    )
    (tmp_path / "report.json").write_text(report.to_json())
    exploration = read_exploration(tmp_path)
    # Of 1e9 operations, one head saved 5e7, and three neurons 1.5e8. The report says 8e8 are left.
    assert exploration.flops_per_head == pytest.approx(0.05)
    assert exploration.flops_per_neuron == pytest.approx(0.05)
    assert exploration.flops_ratio(PLAN) == pytest.approx(0.8)
    assert exploration.ranks_neurons
