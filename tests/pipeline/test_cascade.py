"""What a run says of its cascade and of its files in fewer bits, judged by hand on the rows that it evaluated."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support.loading import load_pruning
from support.models import save_project, save_text_model
from support.runs import deploy_on, hies
from transformers import AutoModelForSequenceClassification

from hies_export import PruningRecipe, Report, RequestError, run
from hies_export.forms.time import time
from hies_export.pipeline import choose as choosing
from hies_export.pipeline import fastest
from hies_export.pipeline.push import _contents

SHAPE = {
    **{"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 192},
    "initializer_range": 0.1,
}


def make_project(folder: Path, **sections: object) -> Path:
    """Write a project whose model has layers of more than 16,384 weights, and return its recipe."""
    usual: dict[str, object] = {
        "calibration": {"samples": 8, "batch_size": 4},
        "evaluation": {"batch_size": 5},
        "prune": {"alpha": 0.5, "budget": {"heads": 0.5}, "allocation": "uniform"},
        "cascade": {"disagreement": 0.2},
        "measure": {"shapes": [[2, 16]], "repeats": 2, "runtimes": []},
    }
    save_project(folder, train=24, validation=60, **(usual | sections))
    torch.manual_seed(0)
    save_text_model(folder / "model", **SHAPE)
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in 8 bits."""
    recipe = make_project(tmp_path_factory.mktemp("cascade"), export={"quantize": "int8"})
    assert hies("run", recipe) == 0
    return recipe.parent / "out"


def test_a_run_judges_its_files_on_the_evaluated_rows(folder: Path) -> None:
    summary = json.loads((folder / "report.json").read_text())
    found, file = summary["cascade"], folder / "onnx-cascade" / "model.onnx"
    alone, in_8_bits = summary["exported"], folder / "onnx-int8" / "model_quantized.onnx"
    evaluated = load_pruning(PruningRecipe.from_yaml(folder.parent / "recipe.yaml"))
    dense = AutoModelForSequenceClassification.from_pretrained(folder.parent / "model")
    session, of_slim = (
        onnxruntime.InferenceSession(one, providers=["CPUExecutionProvider"]) for one in (file, in_8_bits)
    )
    same, passed, own, right = [], [], [], []
    for batch in evaluated.rows.evaluation:
        usual = {"token_type_ids": torch.zeros_like(batch["input_ids"]), **batch}
        given = {node.name: usual[node.name].numpy() for node in session.get_inputs()}
        logits, unsure = session.run(["logits", "passed_on"], given)
        with torch.no_grad():
            wanted = dense(**{name: value for name, value in batch.items() if name != "labels"}).logits
        same += (logits.argmax(-1) == wanted.argmax(-1).numpy()).tolist()
        passed += unsure.tolist()
        (slim,) = of_slim.run(["logits"], given)
        own += (slim.argmax(-1) == wanted.argmax(-1).numpy()).tolist()
        right += (slim.argmax(-1) == batch["labels"].numpy()).tolist()
    # Two thirds of the rows make the promise.
    assert (found["rows"], len(same)) == (40, 20)
    assert found["stability"] == pytest.approx(np.mean(same))
    assert found["passed_on"] == pytest.approx(np.mean(passed))
    assert (found["disagreement"], found["confidence"]) == (0.2, 0.95)
    assert found["bytes"] == file.stat().st_size
    facts = summary["details"]["cascade"]
    assert facts["bound"] <= 0.2
    assert facts["max_abs"] < 1e-3
    assert facts["parts"]["slim"] == alone["bytes"] == in_8_bits.stat().st_size < summary["bytes"]["onnx"]
    # Embeddings of the dense part are the slim one's.
    assert found["bytes"] < facts["parts"]["dense"] + facts["parts"]["slim"]
    assert alone["file"] == "onnx-int8/model_quantized.onnx"
    assert (alone["format"], alone["quantize"], alone["float_neurons"]) == ("onnx", "int8", 0)
    kinds = [node.op_type for node in onnx.load(in_8_bits).graph.node]
    layers = {"int8": kinds.count("MatMulIntegerToFloat"), "float32": kinds.count("MatMul") + kinds.count("Gemm")}
    assert alone["layers"] == layers
    assert alone["stability"] == pytest.approx(np.mean(own))
    assert alone["quality"] == {"metric": "accuracy", "value": pytest.approx(np.mean(right))}


def test_it_stands_beside_both_models_in_every_rendering(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report.from_file(folder)
    assert [(form.model, form.bits) for form in report.details.forms] == [
        *(("dense", "float32"), ("slim", "float32"), ("dense", "int8"), ("slim", "int8"), ("cascade", "int8"))
    ]
    for form in report.details.forms:
        assert [(at.batch, at.phase) for at in form.times] == [(1, "rows"), (8, "rows"), (20, "rows")]
    dense, slim, dense_8, slim_8, _ = report.details.forms
    assert (dense.stability, dense.quality) == (1.0, report.quality.dense)
    assert (slim.stability, slim.bytes) == (report.stability, report.bytes.onnx)
    # Layers of the slim attention are too small for 8 bits.
    assert slim_8.bytes == report.exported.bytes < slim.bytes
    assert dense_8.bytes < dense.bytes / 2
    assert hies("report", folder) == 0
    for text in (capsys.readouterr().out, *((folder / name).read_text() for name in ("report.md", "slim/README.md"))):
        shown = " ".join(text.split())
        assert all(f"{form.model} {form.bits}" in shown for form in report.details.forms)
    pushed = _contents(folder, report, "somebody/model", {})
    files = {"onnx/model.onnx", "onnx-int8/model_quantized.onnx", "onnx-int8/ort_config.json"}
    assert files | {"onnx-cascade/model.onnx"} <= set(pushed)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too few rows": ({"cascade": {"disagreement": 0.01}}, "from 299 held-out rows or more, and there are 16"),
    "no share": ({"cascade": {"disagreement": 0}}, "cascade.disagreement must be greater than 0, got 0"),
    "half": ({"export": {"dtype": "float16"}}, "cascade needs export: onnx for provider cpu in float32"),
    "8 bits in GGUF": (
        {"export": {"quantize": "int8", "format": "gguf"}, "cascade": None},
        "quantize belongs to format: onnx, got int8 for gguf; set dtype",
    ),
    "no budget": ({"prune": {}}, "prune.budget must be given"),
    "numbers": ({"model": "numbers"}, "one class for each row, and BertForSequenceClassification does not"),
}


@pytest.mark.parametrize(("sections", "said"), REFUSED.values(), ids=REFUSED)
def test_a_recipe_that_cannot_be_met_is_refused(
    tmp_path: Path,
    sections: dict[str, Any],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_text_model(tmp_path / "numbers", num_labels=1)
    assert hies("run", make_project(tmp_path, **sections)) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_deploy_tries_cascades(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "SIZES", 3)
    deploy_on(monkeypatch)
    monkeypatch.setattr(fastest, "FLOPS_TO_TRY", (0.8, 0.6, 0.01))

    def timed(forms: Any, rows: Any, **_: Any) -> Any:
        """Take the last one for the fastest."""
        assert [size for size, _ in rows] == [2]
        return [[replace(one, ratio=1 - index / 10, ratio_low=0.0)] for index, (one,) in enumerate(time(forms, rows))]

    monkeypatch.setattr(fastest, "time_forms", timed)
    prune_section = {"criterion": "fisher", "compensation": None}
    recipe = make_project(tmp_path, prune=prune_section, cascade=None, deploy={"keep": 0.6})
    report: Any = PruningRecipe.from_yaml(recipe).run()
    found, facts, deployment = report.cascade, report.details.cascade, report.details.deployment
    assert found.disagreement == pytest.approx(0.4)
    *running, missed = facts.tried
    assert [(round(size.flops, 1), size.problem) for size in running] == [(0.8, None), (0.6, None)]
    # One that fails leaves the others.
    assert (missed.flops, missed.differ, "FLOPs at most 0.01 of dense" in missed.problem) == (0.01, None, True)
    assert report.flops.ratio == pytest.approx(running[1].flops, abs=0.01)
    *_, cascade = report.details.forms
    assert (cascade.model, cascade.bits) == ("cascade", "float32")
    assert cascade.at_least >= 0.6
    # The dense form may be the fastest of models so small.
    named = {"cascade": "onnx-cascade/model.onnx"}.get(report.details.forms[deployment.form].model, deployment.file)
    assert deployment.file == named
    assert (tmp_path / "out" / str(deployment.file)).is_file()
    with pytest.raises(RequestError, match="deploy tries cascades by itself, got a section cascade; leave it out"):
        PruningRecipe.from_yaml(recipe, {"cascade": {"disagreement": 0.1}})


@pytest.mark.parametrize(
    "asked", [{"export": {"quantize": "int8"}}, {"measure": {"runtimes": ["onnxruntime-cpu-int8"]}}]
)
def test_a_model_of_small_layers_is_refused_before_the_work(asked: dict[str, Any], tmp_path: Path) -> None:
    recipe = make_project(tmp_path, cascade=None, **asked)
    save_text_model(tmp_path / "model")
    with pytest.raises(RequestError, match="needs a linear layer of 16,384 weights or more"):
        run(PruningRecipe.from_yaml(recipe))
    assert not (tmp_path / "out").exists()


def test_a_cut_that_leaves_only_small_layers_is_no_mistake_in_the_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 96 x 192 weights are worth 8 bits, 96 x 96 are not.
    prune = {"modules": ["mlp"], "criterion": "l2", "budget": {"flops": 0.8}}
    prune |= {"allocation": "uniform", "compensation": None}
    recipe = make_project(tmp_path, export={"quantize": "int8"}, prune=prune, cascade=None)
    save_text_model(tmp_path / "model", **SHAPE | {"hidden_size": 96})
    assert hies("run", recipe) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "the slim model has no form in fewer bits: int8 needs a linear layer of 16,384 weights" in said
    assert not (tmp_path / "out").exists()
