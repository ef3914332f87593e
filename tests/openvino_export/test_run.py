"""Runs and deployments with a form in 8 bits on OpenVINO: files, judged and timed forms, budgets, the command."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer
from support.models import save_project
from support.runs import hies
from support.sentences import WIDTH, dense, sentence_folder

from hies_export.checkpoint.sentence import read_served
from hies_export.forms.machine import machine_facts
from hies_export.forms.runtimes.base import load_runtime


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    for package in ("openvino", "nncf"):
        pytest.importorskip(package, reason="the extra openvino is not installed")
    return


QUICK = {
    "calibration": {"samples": 8, "batch_size": 4},
    "prune": {"criterion": "l2", "budget": {"heads": 0.25}, "compensation": {"method": "least_squares", "samples": 12}},
    "measure": {"runtimes": [], "shapes": [[2, 16]], "repeats": 2},
}


@pytest.mark.slow
def test_a_run_writes_judges_and_times_it(tmp_path: Path) -> None:
    export = {"format": "openvino", "quantize": "int8"}
    folder = save_project(tmp_path, train=16, validation=20, **QUICK, export=export)
    assert hies("run", folder / "recipe.yaml") == 0
    out = folder / "out"
    assert (out / "onnx" / "model.onnx").is_file()
    assert {"openvino_model.xml", "openvino_model.bin"} <= {path.name for path in (out / "openvino-int8").iterdir()}
    linked = {path.name for path in (out / "slim" / "openvino").iterdir()}
    assert linked == {"openvino_model.xml", "openvino_model.bin"}
    report = json.loads((out / "report.json").read_text())
    assert report["environment"]["openvino"] == machine_facts()["openvino"] is not None
    exported = report["exported"]
    assert (exported["format"], exported["quantize"], exported["file"]) == (
        *("openvino", "int8"),
        "openvino-int8/openvino_model.xml",
    )
    assert exported["layers"]["int8"] > 0
    # Refitted on 12 rows, which it is calibrated on too.
    settings = json.loads((out / "openvino-int8" / "openvino_config.json").read_text())
    assert settings["quantization"]["rows"] == 12
    forms = report["details"]["forms"]
    assert [(form["model"], form["runtime"], form["bits"]) for form in forms] == [
        *((model, "onnxruntime-cpu", "float32") for model in ("dense", "slim")),
        *((model, "openvino", "int8") for model in ("dense", "slim")),
    ]
    assert all(form["times"] and form["stability"] is not None for form in forms)
    assert (forms[3]["quality"], forms[3]["bytes"]) == (exported["quality"]["value"], exported["bytes"])


def test_the_command_calibrates_on_the_rows_it_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_project(tmp_path, train=8, validation=4)
    call = ("export", folder / "model", "--format", "openvino", "-o", tmp_path / "made")
    assert hies(*call) == 2
    assert "format: openvino needs quantize: int8, got None" in " ".join(capsys.readouterr().err.split())
    assert hies(*call, "--quantize", "int8") == 2
    assert "needs rows to calibrate on; give --data train=FILE" in " ".join(capsys.readouterr().err.split())
    data = ("--data", f"train={folder / 'train.jsonl'}", "--text", "sentence", "--text", "other")
    assert hies(*call, "--quantize", "int8", *data, "--json") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["files"] == ["openvino_model.xml", "openvino_model.bin"]
    assert load_runtime("openvino", tmp_path / "made", threads=1).dtype == "int8"
    assert hies("bench", folder / "model", tmp_path / "made", "--shape", "1x16", "--repeats", "2", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["latency"]
    assert (row["runtime"], row["dtype"]) == ("openvino", "float32 / int8")
    assert hies("bench", tmp_path / "made", "--runtime", "onnxruntime-cpu") == 2
    assert "needs an ONNX folder, but" in (err := " ".join(capsys.readouterr().err.split()))
    assert "is an OpenVINO folder; use openvino" in err


def test_sentence_transformers_runs_an_embedding_model_in_8_bits(tmp_path: Path) -> None:
    source = sentence_folder(tmp_path / "dense", [dense(WIDTH, 12), ("Normalize", {}, {})])
    texts = [f"a{number % 7} b{number % 11} c{number}" for number in range(60)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"sentence": text}) + "\n" for text in texts))
    data = ("--data", f"train={tmp_path / 'train.jsonl'}", "--text", "sentence")
    out = tmp_path / "served"
    assert hies("export", source, "--format", "openvino", "--quantize", "int8", *data, "-o", out) == 0
    served = read_served(out)
    assert (served.file, served.runtime) == ("openvino_model.xml", "openvino")
    ours, theirs = (
        SentenceTransformer(str(folder), device="cpu", trust_remote_code=True).encode(texts) for folder in (out, source)
    )
    assert ((ours * theirs).sum(1) > 0.99).all()
