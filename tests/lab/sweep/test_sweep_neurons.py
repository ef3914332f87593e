"""Sweeps over heads and neurons: rows against runs of their own, baselines by hand, times, and what is refused."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.loading import load_pruning
from support.models import causal_lm, save_stories
from support.reading import share_same
from support.sweeps import save_sweep_project
from transformers import BertConfig

from hies_export import PlanError, PruningRecipe, RecipeError, RequestError, compensate, count_flops, prune_units
from hies_export.cli.main import main
from hies_export.evaluate.predict import predict
from hies_export.kinds import MLP
from hies_export.pipeline.choose import choose
from hies_export.pipeline.stages import calibrate, cut_beside
from hies_export.slim.refit import Compensation
from hies_export.tasks import TextClassification
from hies_lab.sweep.grid import SweepGrid
from hies_lab.sweep.stopwatch import LatencyRequest
from hies_lab.sweep.sweep import sweep

pytestmark = pytest.mark.filterwarnings("ignore::hies_export.slim.refit.FewTokensWarning")

CRITERIA = ("his", "fisher", "l2", "activation", "random", "hies", "compensated", "kwon", "flap")


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sweep_project(tmp_path_factory.mktemp("project"), modules=["attention", "mlp"], budget={"flops": 0.7})


@pytest.fixture(scope="module")
def swept(recipe_file: Path) -> Path:
    """The folder of a sweep over everything that removes whole units; beside it one over compensations."""
    folder, recipe = recipe_file.parent / "swept", PruningRecipe.from_yaml(recipe_file)
    shared: dict[str, Any] = {"alphas": (0.5,), "seeds": (0,), "calibration_sizes": (8,)}
    refits = ("least_squares", "weighted", "scalars", "sequential")
    some = SweepGrid(**shared, flops=(0.7,), criteria=("hies", "l2", "fisher"), compensations=refits, modules=("both",))
    sweep(recipe, some, recipe_file.parent / "some")
    every = SweepGrid(**shared, flops=(0.8, 0.7), criteria=CRITERIA, modules=("attention", "mlp", "both"))
    sweep(recipe, every, folder)
    return folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "sweep.json").read_text())  # type: ignore[no-any-return]


def test_there_is_a_row_for_every_cell_within_reach(swept: Path) -> None:
    rows = rows_of(swept)
    assert all(row["flops_ratio"] <= row["flops_target"] for row in rows)
    assert all(row["sparsity"] is None for row in rows)
    targets = {name: {r["flops_target"] for r in rows if r["modules"] == name} for name in ("attention", "mlp")}
    # HIES does not score neurons alone.
    assert not [r for r in rows if r["criterion"] == "hies" and r["modules"] == "mlp"]
    both = [r for r in rows if r["modules"] == "attention+mlp"]
    assert len(both) == len(CRITERIA) * 2
    assert {r["criterion"] for r in both if r["neurons_removed"] and r["heads_removed"]} > {"fisher", "kwon", "flap"}
    assert not any(r["neurons_removed"] for r in rows if r["modules"] == "attention")
    assert not any(r["heads_removed"] for r in rows if r["modules"] == "mlp")
    assert targets == {"attention": {0.8, 0.7}, "mlp": {0.8, 0.7}}


@pytest.mark.parametrize(
    ("criterion", "compensation"),
    [("hies", "least_squares"), ("fisher", "weighted"), ("l2", "scalars"), ("l2", "sequential")],
)
def test_rows_are_what_a_run_of_each_finds(recipe_file: Path, swept: Path, criterion: str, compensation: str) -> None:
    (row,) = (
        row
        for row in rows_of(swept.parent / "some")
        if (row["criterion"], row["compensation"], row["modules"], row["flops_target"])
        == (criterion, compensation, "attention+mlp", 0.7)
    )
    recipe = PruningRecipe.from_yaml(recipe_file, {"prune.criterion": criterion})
    prepared = load_pruning(recipe)
    evaluation = prepared.rows.evaluation
    plan = choose(prepared, calibrate(prepared)).plan
    assert (row["heads_removed"], row["neurons_removed"]) == (plan.removed, plan.removed_neurons)
    slim = prune_units(prepared.model, plan, prepared.modules)
    if compensation != "none":
        special = {"weighted": Compensation(token_weights=0.3), "sequential": Compensation(sequential=True)}
        how = special.get(compensation) or Compensation(compensation)
        compensate(prepared.model, slim, plan, prepared.modules, prepared.rows.refit, how)
    dense, found = predict(prepared.model, evaluation), predict(slim, evaluation)
    assert row["stability"] == share_same(dense, found)
    batch = next(iter(prepared.shapes.values()))
    assert row["flops_ratio"] == pytest.approx(count_flops(slim, batch) / count_flops(prepared.model, batch))


def test_a_journal_goes_on_where_time_was_not_asked_for(recipe_file: Path, tmp_path: Path) -> None:
    recipe = PruningRecipe.from_yaml(recipe_file)
    some: dict[str, Any] = {"criteria": ("l2",), "flops": (0.8,), "seeds": (0,), "calibration_sizes": (8,)}
    grid = SweepGrid(**some, modules=("mlp",), compensations=("none", "scalars"))
    plain = sweep(recipe, grid, tmp_path / "out")
    assert "latency_ratio" not in plain.rows[0]
    request = LatencyRequest("torch", (1, 8), repeats=1)
    timed = sweep(recipe, grid, tmp_path / "out", latency=request)
    assert timed.evaluations == 0
    again = sweep(recipe, grid, tmp_path / "out", latency=request)
    assert timed.rows == again.rows
    assert [{k: v for k, v in row.items() if "latency" not in k} for row in timed.rows] == plain.rows
    # As many units in every module take as much time: measured once.
    one, other = ([row[f"latency_{part}"] for part in ("low", "ratio", "high")] for row in timed.rows)
    assert one == other == sorted(one)
    assert (tmp_path / "out" / "journal.jsonl").read_text().count('"kind": "latency"') == 1


def test_budgets_out_of_reach_are_left_out_or_refused(recipe_file: Path, tmp_path: Path) -> None:
    recipe = PruningRecipe.from_yaml(recipe_file)
    some: dict[str, Any] = {"criteria": ("l2",), "seeds": (0,), "calibration_sizes": (8,)}
    grid = SweepGrid(**some, flops=(0.8, 0.45), modules=("mlp", "both"))
    found = sweep(recipe, grid, tmp_path / "out")
    assert [(r["modules"], r["flops_target"]) for r in found.rows] == [
        *(("mlp", 0.8), ("attention+mlp", 0.8), ("attention+mlp", 0.45))
    ]
    with pytest.raises(PlanError, match="FLOPs at most 0.01 of dense, but cutting all heads and neurons"):
        sweep(recipe, SweepGrid(**some, flops=(0.01,)), tmp_path / "other")
    with pytest.raises(PlanError, match=r"at most 0.45 of dense, but cutting all (heads|neurons) that"):
        sweep(recipe, SweepGrid(**some, flops=(0.45,), modules=("attention", "mlp")), tmp_path / "third")
    with pytest.raises(RecipeError, match=r"criterion hies scores heads, but prune.modules is \[mlp\]"):
        sweep(recipe, SweepGrid(**some | {"criteria": ("hies",)}, flops=(0.8,), modules=(MLP,)), tmp_path / "fourth")


def test_every_problem_of_a_grid_is_said_at_once(recipe_file: Path, tmp_path: Path) -> None:
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


def test_shares_of_heads_are_of_heads_alone_whatever_the_recipe_cuts(recipe_file: Path, tmp_path: Path) -> None:
    recipe = PruningRecipe.from_yaml(recipe_file)
    assert recipe.prune.modules == ("attention", "mlp")
    found = sweep(recipe, SweepGrid(criteria=("l2",), sparsities=(0.5,), seeds=(0,)), tmp_path / "out")
    (row,) = found.rows
    dense = BertConfig.from_pretrained(recipe.model)
    half = dense.num_hidden_layers * dense.num_attention_heads // 2
    assert (row["modules"], row["heads_removed"], row["neurons_removed"]) == ("attention", half, 0)


def test_the_command_takes_flops_modules_and_a_runtime(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--criteria", "kwon,flap", "--flops", "0.8", "--modules", "mlp,both", "--seeds", "0"]
    options += ["--compensations", "scalars", "--latency", "torch", "--json"]
    assert main(["sweep", str(recipe_file), "-o", str(tmp_path / "out"), *options]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(printed.splitlines()[-1])["rows"]
    assert [(r["criterion"], r["modules"]) for r in rows] == [
        *(("kwon", "mlp"), ("kwon", "attention+mlp"), ("flap", "mlp"), ("flap", "attention+mlp"))
    ]
    assert all(row["latency_ratio"] > 0 for row in rows)
    assert "kwon differs from the original" in printed
    assert main(["sweep", str(recipe_file), "--flops", "0.8", "--sparsities", "0.5"]) == 2
    assert "a sweep takes sparsities or flops, got both" in capsys.readouterr().err


def test_a_llama_without_biases_is_judged_with_those_that_flap_adds(tmp_path: Path) -> None:
    prune = {"modules": ["attention", "mlp"], "compensation": {"samples": 12}, "budget": {"flops": 0.8}}
    drawn: dict[str, Any] = {"calibration": {"samples": 8}, "evaluation": {"split": "train", "samples": 8}}
    recipe = PruningRecipe.from_yaml(save_stories(tmp_path, lines=120, prune=prune, **drawn))
    names = ("flap", "wanda-sp", "martra")
    some: dict[str, Any] = {"flops": (0.8,), "seeds": (0,), "calibration_sizes": (8,), "modules": ("both", "mlp")}
    grid = SweepGrid(**some, criteria=names, compensations=("none", "bias"))
    with cut_models() as cut:
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
    assert all(module.bias is None for module in causal_lm().modules() if hasattr(module, "in_features"))


@contextmanager
def cut_models() -> Iterator[list[Any]]:
    """Collect the slim models that sweeps evaluate inside the block."""
    found: list[Any] = []

    def keep(model: Any, *args: Any, **options: Any) -> Any:
        found.append(cut_beside(model, *args, **options))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hies_export.pipeline.stages.cut_beside", keep)
        yield found
