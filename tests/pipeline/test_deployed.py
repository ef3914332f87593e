"""What a run says of its exported files, against the files run by ONNX Runtime alone and judged by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support.models import save_project, save_text_model
from support.runs import hies
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hies_export.errors import RequestError
from hies_export.pipeline.push import _contents
from hies_export.pipeline.recipe import PruningRecipe
from hies_export.pipeline.run import run
from hies_export.report.report import Report

ROWS = 24
# Wide enough for layers that are worth 8 bits.
SHAPE = {
    **{"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 192},
    "initializer_range": 0.1,
}


def make_project(folder: Path, **sections: object) -> Path:
    """Write a project whose model has layers of more than 16,384 weights, and return its recipe."""
    save_project(
        folder,
        train=12,
        validation=ROWS,
        calibration={"samples": 8, "batch_size": 4},
        evaluation={"batch_size": 5},
        **{
            "prune": {"alpha": 0.5, "budget": {"heads": 0.25}, "allocation": "uniform"},
            "measure": {"shapes": [[2, 16], [1, 8]], "repeats": 6},
        }
        | sections,
    )
    torch.manual_seed(0)
    save_text_model(folder / "model", **SHAPE)
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that also writes 8 bits."""
    recipe = make_project(tmp_path_factory.mktemp("int8"), export={"quantize": "int8"})
    assert hies("run", recipe) == 0
    return recipe.parent / "out"


def predicted(file: Path, project: Path) -> np.ndarray:
    """The class of every validation row, one row at a time, by ONNX Runtime as its own users run it."""
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names, tokenizer = {node.name for node in session.get_inputs()}, AutoTokenizer.from_pretrained(project / "model")
    found = []
    for line in (project / "validation.jsonl").read_text().splitlines():
        row = json.loads(line)
        given = tokenizer(row["sentence"], row["other"], return_tensors="np")
        given["token_type_ids"] = given.get("token_type_ids", np.zeros_like(given["input_ids"]))
        found.append(session.run(["logits"], {k: v for k, v in given.items() if k in names})[0].argmax())
    return np.array(found)


def test_the_quantised_file_is_judged_as_it_is_deployed(quantised: Path) -> None:
    summary = json.loads((quantised / "report.json").read_text())
    found, project = summary["exported"], quantised.parent
    file = quantised / found["file"]
    assert found["file"] == "onnx-int8/model_quantized.onnx"
    assert (found["format"], found["quantize"], found["float_neurons"]) == ("onnx", "int8", 0)
    assert found["bytes"] == file.stat().st_size < summary["bytes"]["onnx"]
    kinds = [node.op_type for node in onnx.load(file).graph.node]
    layers = {"int8": kinds.count("MatMulIntegerToFloat"), "float32": kinds.count("MatMul") + kinds.count("Gemm")}
    assert found["layers"] == layers
    labels = [json.loads(line)["label"] for line in (project / "validation.jsonl").read_text().splitlines()]
    own, dense = predicted(file, project), AutoModelForSequenceClassification.from_pretrained(project / "model")
    assert found["quality"] == {"metric": "accuracy", "value": pytest.approx(np.mean(own == labels))}
    tokenizer, wanted = AutoTokenizer.from_pretrained(project / "model"), []
    for line in (project / "validation.jsonl").read_text().splitlines():
        row = json.loads(line)
        with torch.no_grad():
            given = tokenizer(row["sentence"], row["other"], return_tensors="pt")
            wanted.append(dense(**given).logits.argmax().item())
    assert found["stability"] == pytest.approx(np.mean(own == np.array(wanted)))


def test_all_forms_of_both_models_stand_side_by_side(quantised: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report.from_file(quantised)
    forms = report.details.forms
    assert [(form.model, form.bits) for form in forms] == [
        *(("dense", "float32"), ("slim", "float32"), ("dense", "int8"), ("slim", "int8"))
    ]
    assert forms[0].stability == 1.0
    assert forms[0].quality == report.quality.dense
    assert forms[1].stability == report.stability
    assert forms[1].bytes == report.bytes.onnx
    # Layers of the slim attention are too small for 8 bits.
    assert forms[3].bytes == report.exported.bytes < forms[1].bytes
    assert forms[2].bytes < forms[0].bytes / 2
    assert [[(at.batch, at.sequence, at.phase) for at in form.times] for form in forms] == [
        [(2, 16, "forward"), (1, 8, "forward")]
    ] * 4
    assert hies("report", quantised) == 0
    shown = capsys.readouterr().out
    page, card = (quantised / "report.html").read_text(), (quantised / "slim" / "README.md").read_text()
    for text in (shown, page, card, (quantised / "report.md").read_text()):
        assert all(name in text for name in ("dense float32", "slim float32", "dense int8", "slim int8"))
    assert "onnx-int8" in card
    pushed = _contents(quantised, report, "somebody/model", None, {})
    assert {"onnx/model.onnx", "onnx-int8/model_quantized.onnx", "onnx-int8/ort_config.json"} <= set(pushed)


def test_a_dtype_that_is_timed_is_judged(tmp_path: Path) -> None:
    measure = {"runtimes": ["torch"], "dtypes": ["float32", "bfloat16"], "shapes": [[2, 16]]}
    report = run(PruningRecipe.from_yaml(make_project(tmp_path, measure={**measure, "repeats": 4})))
    forms = report.details.forms
    assert [(form.model, form.runtime, form.bits) for form in forms] == [
        *(("dense", "torch", "float32"), ("slim", "torch", "float32")),
        *(("dense", "torch", "bfloat16"), ("slim", "torch", "bfloat16")),
    ]
    assert forms[2].bytes is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "GGUF": ({"format": "gguf"}, "quantize belongs to format: onnx, got int8 for gguf; set dtype: q8_0 or q4_0"),
    "a GPU": ({"provider": "cuda"}, "needs provider: cpu and dtype: float32, got cuda and float32; leave them out"),
    "half": ({"dtype": "float16"}, "needs provider: cpu and dtype: float32, got cpu and float16; leave them out"),
}


@pytest.mark.parametrize(("fields", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_quantised_is_refused_by_the_recipe(
    tmp_path: Path, fields: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_project(tmp_path, export={"quantize": "int8", **fields})
    assert hies("run", recipe) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "asked", [{"export": {"quantize": "int8"}}, {"measure": {"runtimes": ["onnxruntime-cpu-int8"]}}]
)
def test_a_model_of_small_layers_is_refused_before_the_work(asked: dict[str, Any], tmp_path: Path) -> None:
    recipe = make_project(tmp_path, **asked)
    save_text_model(tmp_path / "model")
    with pytest.raises(RequestError, match="needs a linear layer of 16,384 weights or more"):
        run(PruningRecipe.from_yaml(recipe))
    assert not (tmp_path / "out").exists()


def test_a_cut_that_leaves_only_small_layers_is_no_mistake_in_the_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 96 x 192 weights are worth 8 bits, 96 x 96 are not.
    prune = {
        "modules": ["mlp"],
        "criterion": "l2",
        "budget": {"flops": 0.8},
        "allocation": "uniform",
        "compensation": None,
    }
    recipe = make_project(tmp_path, export={"quantize": "int8"}, prune=prune)
    save_text_model(tmp_path / "model", **SHAPE | {"hidden_size": 96})
    assert hies("run", recipe) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "the slim model has no form in fewer bits: int8 needs a linear layer of 16,384 weights" in said
    assert not (tmp_path / "out").exists()
