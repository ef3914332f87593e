"""What to deploy: the fastest form that keeps the promise, again by hand; what is proposed, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest
from support.models import save_regressor
from support.references import same_in_onnxruntime
from support.runs import hies
from transformers import BertModel

from hies_export import DataError, ExportError, PlanError, RecipeError, RequestError, deploy
from hies_export.pipeline import deploy as deploy_module
from hies_export.pipeline import targets
from hies_export.pipeline.propose import propose_recipe
from hies_export.pipeline.resolve import resolve
from hies_export.recipe import PruningRecipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A regressor, whose predictions all differ, its data, and a recipe of both kinds."""
    prune = {
        "modules": ["attention", "mlp"],
        "criterion": "fisher",
        "budget": {"keep": 0.5},
        "compensation": {"samples": 60},
    }
    return save_regressor(tmp_path_factory.mktemp("deploy"), prune=prune)


def recipe_of(folder: Path, output: Path) -> PruningRecipe:
    return PruningRecipe.from_yaml(folder / "recipe.yaml", {"output": str(output)})


@pytest.mark.slow
def test_the_form_to_deploy_is_the_fastest_that_keeps_the_promise(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "SIZES", 3)
    monkeypatch.setattr(deploy_module, "WAYS", {"onnxruntime-cpu": ("float32",), "onnxruntime-cpu-int8": ("int8",)})
    report = deploy(recipe_of(folder, tmp_path / "out"), keep=0.4)
    found = report.details.deployment
    assert found is not None
    served, refused = found.ways
    # The tiny model has no layer that is worth 8 bits.
    assert (refused.runtime, refused.kept) == ("onnxruntime-cpu-int8", None)
    assert "16,384" in str(refused.problem)
    assert (served.kept, served.dense_ratio, len(served.judged)) == (1.0, 1.0, len(served.judged))
    assert 0 < served.flops < 1
    dense, slim = report.details.forms
    times = {0: 1.0, 1: slim.times[found.step].ratio}
    keeping = [number for number, form in enumerate((dense, slim)) if form.at_least >= 0.4]
    assert found.form == min(keeping, key=lambda number: times[number])
    rows = resolve(recipe_of(folder, tmp_path / "out")).prepared.rows.held_out
    same = same_in_onnxruntime(folder / "model", tmp_path / "out" / "onnx" / "model.onnx", rows, tolerance=0.02)
    low = binomtest(sum(same), len(same)).proportion_ci(0.95, method="exact").low
    assert slim.kept == pytest.approx(sum(same) / len(same), abs=1.5 / len(same))
    assert slim.at_least == pytest.approx(low, abs=0.02)
    assert slim.at_least >= 0.4
    assert slim.stability_low < slim.stability < slim.stability_high
    assert dense.stability_low < dense.stability == dense.stability_high == 1
    assert {"kept": slim.kept, "at_least": slim.at_least}.items() <= max(
        served.judged, key=lambda row: row["removed"] if row["at_least"] >= 0.4 else 0
    ).items()
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert written["details"]["deployment"]["form"] == found.form
    assert (tmp_path / "out" / "slim" / "config.json").is_file()


def test_where_no_cut_keeps_the_promise_the_dense_form_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy_module, "WAYS", {"onnxruntime-cpu": ("float32",)})
    said = "deploy the dense model on onnxruntime-cpu in float32, which takes 1.00 of the time .*: keep needs time"
    with pytest.raises(PlanError, match=said):
        deploy(recipe_of(folder, tmp_path / "out"), keep=0.5, minutes=0.0)
    assert list(tmp_path.iterdir()) == []


def test_a_runtime_that_fails_is_left_out_by_its_reason(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ExportError("ONNX Runtime must run the graph, and stopped")

    monkeypatch.setattr(deploy_module, "WAYS", {"onnxruntime-cpu": ("float32",)})
    monkeypatch.setattr(deploy_module, "predict_served", fail)
    with pytest.raises(PlanError, match="no runtime here serves the dense model: ONNX Runtime must run the graph"):
        deploy(recipe_of(folder, tmp_path / "out"), keep=0.4)
    assert "onnxruntime-cpu in float32 is left out: ONNX Runtime must run the graph, and stopped" in caplog.text
    with pytest.raises(RecipeError, match="runtimes to deploy on are onnxruntime-cpu, got torch"):
        deploy(recipe_of(folder, tmp_path / "out"), keep=0.5, runtimes=["torch"])
    assert list(tmp_path.iterdir()) == []


def test_a_model_and_its_rows_are_enough_for_a_recipe(folder: Path, tmp_path: Path) -> None:
    files = {"train": folder / "train.jsonl", "validation": folder / "validation.jsonl"}
    recipe = propose_recipe(str(folder / "model"), files=files, output=tmp_path)
    (column,) = recipe.data.text
    assert column in json.loads(files["train"].read_text().splitlines()[0])
    assert (recipe.task, recipe.data.label, recipe.evaluation.split) == ("text-classification", "label", "validation")
    alone = propose_recipe(str(folder / "model"), files={"rows": files["train"]}, output=tmp_path)
    assert (alone.calibration.split, alone.evaluation.split) == ("rows[:80%]", "rows[80%:]")
    pair = tmp_path / "pair.jsonl"
    rows = [{"sentence1": "a b", "sentence2": "c", "genre": "news", "score": 1.0} for _ in range(5)]
    pair.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = propose_recipe(str(folder / "model"), files={"train": pair}, output=tmp_path)
    assert (found.data.text, found.data.label) == (("sentence1", "sentence2"), None)
    named = propose_recipe(str(folder / "model"), files={"train": pair}, text=["genre"], label="score", output=tmp_path)
    assert (named.data.text, named.data.label) == (("genre",), "score")


def test_what_leaves_a_choice_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"one": "a", "two": "b", "three": "c"}) + "\n")
    with pytest.raises(DataError, match=r"columns to read .* the data set has one, two, three; name them with"):
        propose_recipe(str(folder / "model"), files={"train": rows}, output=tmp_path)
    images = PruningRecipe.from_yaml(folder / "recipe.yaml").with_overrides(
        {
            "task": "image-text-to-text",
            "data.text": [],
            "data.image": "image",
            "data.prompt": "?",
            "data.answer": "answer",
        }
        | {"data.label": None}
    )
    with pytest.raises(RequestError, match="deploy compares models that are one graph, got task: image-text-to-text"):
        deploy(images)
    half = PruningRecipe.from_yaml(folder / "recipe.yaml").with_overrides({"export.dtype": "float16"})
    with pytest.raises(RequestError, match="deploy exports what each runtime reads, got export: onnx, cpu, float16"):
        deploy(half)
    BertModel.from_pretrained(folder / "model").save_pretrained(tmp_path / "bare")
    with pytest.raises(RequestError, match=r"the model must be of a class that AutoModelFor.* names BertModel"):
        propose_recipe(str(tmp_path / "bare"), files={"train": rows}, output=tmp_path)
    assert hies("deploy", str(folder / "model")) == 2
    assert "deploy needs a recipe, or a model and --data; got" in capsys.readouterr().err
    assert hies("deploy", str(folder / "model"), "--data", "imdb", "--data", "train=x.jsonl") == 2
    assert "--data takes one Hub data set, or SPLIT=FILE once or more" in capsys.readouterr().err
    assert hies("deploy", str(folder / "recipe.yaml"), "--keep", "1") == 2
    assert "keep must be in (0, 1), a share of the predictions, got 1" in capsys.readouterr().err
