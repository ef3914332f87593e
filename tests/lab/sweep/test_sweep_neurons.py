"""Sweeps over heads and neurons: rows against runs of their own, times, and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.loading import load_pruning
from support.models import save_stories
from support.reading import share_same
from support.sweeps import save_sweep_project, sweep_row

from hies_export import (
    CompensationSection,
    PlanError,
    PruningRecipe,
    RecipeError,
    RequestError,
    compensate,
    count_flops,
    prune_units,
)
from hies_export.calibrate.moments import MomentStore
from hies_export.cli.main import main
from hies_export.evaluate.predict import predict
from hies_export.kinds import MLP
from hies_export.pipeline.choose import choose
from hies_export.pipeline.stages import calibrate, cut_beside
from hies_export.tasks import TextClassification
from hies_lab.baselines.kwon import scale_units
from hies_lab.sweep.grid import SweepGrid
from hies_lab.sweep.stopwatch import LatencyRequest
from hies_lab.sweep.sweep import sweep

CRITERIA = ("hies", "l2", "fisher", "compensated", "kwon", "flap")


@pytest.fixture(autouse=True)
def _no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than a small sweep."""
    monkeypatch.setattr("hies_lab.sweep.sweep.write_page", lambda folder: None)


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sweep_project(tmp_path_factory.mktemp("project"), modules=["attention", "mlp"], budget={"flops": 0.7})


def test_there_is_a_row_for_every_cell_within_reach(recipe_file: Path, tmp_path: Path) -> None:
    recipe = PruningRecipe.from_yaml(recipe_file)
    some: dict[str, Any] = {"criteria": CRITERIA, "alphas": (0.5,), "seeds": (0,), "calibration_sizes": (8,)}
    grid = SweepGrid(**some, flops=(0.7, 0.45), modules=("attention", "mlp", "both"))
    found = sweep(recipe, grid, tmp_path / "out").rows
    assert all(row["flops_ratio"] <= row["flops_target"] for row in found)
    assert all(row["sparsity"] is None for row in found)
    # No kind alone leaves 0.45 of the FLOPs.
    assert [r["modules"] for r in found if r["flops_target"] == 0.45] == ["attention+mlp"] * len(CRITERIA)
    rows = [row for row in found if row["flops_target"] == 0.7]
    names = {modules: [r["criterion"] for r in rows if r["modules"] == modules] for modules in ("attention", "mlp")}
    # HIES does not score neurons alone.
    assert names == {"attention": [*CRITERIA], "mlp": [*CRITERIA[1:]]}
    assert not any(r["neurons_removed"] for r in rows if r["modules"] == "attention")
    assert not any(r["heads_removed"] for r in rows if r["modules"] == "mlp")
    both = [r for r in rows if r["modules"] == "attention+mlp"]
    assert [r["criterion"] for r in both] == [*CRITERIA]
    assert {r["criterion"] for r in both if r["neurons_removed"] and r["heads_removed"]} >= {"fisher", "kwon", "flap"}
    some["criteria"] = ("l2",)
    with pytest.raises(PlanError, match=r"at most 0.45 of dense, but cutting all (heads|neurons) that"):
        sweep(recipe, SweepGrid(**some, flops=(0.45,), modules=("attention", "mlp")), tmp_path / "other")
    some["criteria"] = ("hies",)
    with pytest.raises(RecipeError, match=r"criterion hies scores heads, but prune.modules is \[mlp\]"):
        sweep(recipe, SweepGrid(**some, flops=(0.8,), modules=(MLP,)), tmp_path / "third")


def test_rows_are_what_a_run_of_each_finds(recipe_file: Path, tmp_path: Path) -> None:
    # With a ridge of the recipe, because rounding decides among ridges that are as good on so few rows.
    ridge = 0.1
    refits = {
        "weighted": CompensationSection(token_weights=0.3, ridge=ridge),
        "scalars": None,
        "sequential": CompensationSection(sequential=True, ridge=ridge),
        "least_squares": CompensationSection(ridge=ridge),
    }
    some: dict[str, Any] = {"alphas": (0.5,), "seeds": (0,), "calibration_sizes": (8,), "modules": ("both",)}
    grid = SweepGrid(**some, flops=(0.7,), criteria=("hies", "l2"), compensations=tuple(refits))
    recipe = PruningRecipe.from_yaml(recipe_file, {"prune.compensation.ridge": ridge})
    rows = sweep(recipe, grid, tmp_path / "out").rows
    for criterion, checked in (("hies", ["least_squares"]), ("l2", ["weighted", "scalars", "sequential"])):
        prepared = load_pruning(PruningRecipe.from_yaml(recipe_file, {"prune.criterion": criterion}))
        evaluation = prepared.rows.evaluation
        dense = predict(prepared.model, evaluation)
        plan = choose(prepared, calibrate(prepared)).plan
        for compensation in checked:
            (row,) = (r for r in rows if (r["criterion"], r["compensation"]) == (criterion, compensation))
            assert (row["heads_removed"], row["neurons_removed"]) == (plan.removed, plan.removed_neurons)
            slim = prune_units(prepared.model, plan, prepared.modules)
            if (how := refits[compensation]) is None:
                moments = MomentStore(prepared.model, prepared.modules, prepared.rows.refit)
                scale_units(slim, plan.kept, prepared.modules, moments)
            else:
                compensate(prepared.model, slim, plan, prepared.modules, prepared.rows.refit, how)
            assert row["stability"] == share_same(dense, predict(slim, evaluation)), compensation
            batch = next(iter(prepared.shapes.values()))
            ratio = count_flops(slim, batch) / count_flops(prepared.model, batch)
            assert row["flops_ratio"] == pytest.approx(ratio)


def test_a_journal_goes_on_where_time_was_not_asked_for(recipe_file: Path, tmp_path: Path) -> None:
    recipe = PruningRecipe.from_yaml(recipe_file)
    some: dict[str, Any] = {"criteria": ("l2",), "flops": (0.8,), "seeds": (0,), "calibration_sizes": (8,)}
    grid = SweepGrid(**some, modules=("mlp",), compensations=("none", "scalars"))
    plain = sweep(recipe, grid, tmp_path / "out")
    assert "latency_ratio" not in plain.rows[0]
    request = LatencyRequest("torch", (1, 8), repeats=1)
    timed = sweep(recipe, grid, tmp_path / "out", latency=request)
    assert timed.evaluations == 0
    assert timed.rows == sweep(recipe, grid, tmp_path / "out", latency=request).rows
    assert [{k: v for k, v in row.items() if "latency" not in k} for row in timed.rows] == plain.rows
    # As many units in every module take as much time: measured once.
    one, other = ([row[f"latency_{part}"] for part in ("low", "ratio", "high")] for row in timed.rows)
    assert one == other == sorted(one)
    assert (tmp_path / "out" / "journal.jsonl").read_text().count('"kind": "latency"') == 1


def test_every_problem_of_a_grid_is_said_at_once() -> None:
    wrong = {
        *("at least one of seeds, got none", "did you mean 'his' or 'hies'?", "got 1.0", "got 'best'"),
        *("shares of heads, got flops", "sparsities or flops, got both", "in (0, 1), got 1.5", "at least 1, got 0"),
        *("did you mean 'mlp'?", "did you mean 'scalars'?", "in (0, 1), got 0"),
    }
    with pytest.raises(RecipeError, match="problems") as caught:
        SweepGrid(
            **{"criteria": ("hiss", "slicegpt"), "alphas": (1.0, "best"), "sparsities": (0.0,), "flops": (1.5,)},
            **{"seeds": (), "calibration_sizes": (0,), "compensations": ("scalar",), "modules": ("mpl",)},
        )
    assert {part for part in wrong if part not in str(caught.value)} == set()
    with pytest.raises(RecipeError, match="sparsities are shares of heads, but modules are both; give flops"):
        SweepGrid(modules=("both",))
    with pytest.raises(RecipeError, match="a criterion must be one of .* got 'auto'"):
        SweepGrid(criteria=("auto",))
    with pytest.raises(RequestError, match="runtime must be one of .*, got 'onnx'"):
        LatencyRequest("onnx").check(TextClassification)


def test_the_command_takes_flops_modules_and_a_runtime(
    recipe_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def swept(_: PruningRecipe, grid: SweepGrid, *__: Any, latency: LatencyRequest, **___: Any) -> Any:
        asked.append((grid.criteria, grid.flops, grid.modules, grid.compensations, latency.runtime))
        return SimpleNamespace(rows=[sweep_row("kwon", flops_target=0.8)], seconds={}, evaluations=1)

    monkeypatch.setattr("hies_lab.sweep.sweep.sweep", swept)
    options = ["--criteria", "l2,kwon", "--flops", "0.8", "--modules", "mlp,both", "--compensations", "scalars"]
    assert main(["sweep", str(recipe_file), *options, "--latency", "torch"]) == 0
    assert asked == [(("l2", "kwon"), (0.8,), ("mlp", "both"), ("scalars",), "torch")]
    assert "kwon differs from the original" in capsys.readouterr().out
    assert main(["sweep", str(recipe_file), "--flops", "0.8", "--sparsities", "0.5"]) == 2
    assert "a sweep takes sparsities or flops, got both" in capsys.readouterr().err


def test_a_llama_without_biases_is_judged_with_those_that_flap_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[Any] = []

    def keep(model: Any, *args: Any, **options: Any) -> Any:
        cut.append(cut_beside(model, *args, **options))
        return cut[-1]

    monkeypatch.setattr("hies_export.pipeline.stages.cut_beside", keep)
    prune = {"modules": ["attention", "mlp"], "compensation": {"samples": 12}, "budget": {"flops": 0.8}}
    drawn: dict[str, Any] = {"calibration": {"samples": 8}, "evaluation": {"split": "train", "samples": 8}}
    recipe = PruningRecipe.from_yaml(save_stories(tmp_path, lines=120, prune=prune, **drawn))
    some: dict[str, Any] = {"flops": (0.8,), "seeds": (0,), "calibration_sizes": (8,), "modules": ("both", "mlp")}
    grid = SweepGrid(**some, criteria=("flap", "wanda-sp", "martra"), compensations=("none", "bias"))
    rows = sweep(recipe, grid, tmp_path / "swept").rows
    # Martra scores neurons alone.
    assert [(r["criterion"], r["modules"]) for r in rows[:5]] == [
        *(("flap", "attention+mlp"), ("flap", "mlp"), ("wanda-sp", "attention+mlp"), ("wanda-sp", "mlp")),
        ("martra", "mlp"),
    ]
    assert all(r["flops_ratio"] <= 0.8 for r in rows)
    assert {r["calibration_samples"] for r in rows} == {0, 12}
    plain, biased = rows[:5], rows[5:]
    assert [r["neurons_removed"] for r in plain] == [r["neurons_removed"] for r in biased]
    assert all(one["quality"] != other["quality"] for one, other in zip(plain, biased, strict=True))
    # Without a compensation they are masked, not cut.
    layers = [[layer for name, layer in of.named_modules() if name.endswith("down_proj")] for of in cut]
    assert [{layer.bias is not None for layer in of} for of in layers] == [{True}] * 5
    # Under the last three, every block loses the same share.
    assert [len({layer.in_features for layer in of}) for of in layers[2:]] == [1, 1, 1]
