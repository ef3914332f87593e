"""What the tool says of files that were damaged in ways that people reported."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cuts import random_cut
from support.models import bert, causal_lm, save_project, text_batch
from support.reports import make_report
from support.runs import hies

from hies_export.checkpoint.loading import load
from hies_export.errors import PlanError, RequestError
from hies_export.lab.sweep.journal import Journal
from hies_export.onnx.generator import OnnxGenerator
from hies_export.report.report import Report
from hies_export.values import PruningPlan


def change(file: Path, *place: Any, to: Any) -> None:
    """Replace a value in a JSON file."""
    whole = value = json.loads(file.read_text())
    for key in place[:-1]:
        value = value[key]
    value[place[-1]] = to
    file.write_text(json.dumps(whole))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file, or a checkpoint, of every kind in `KINDS`."""
    folder = tmp_path_factory.mktemp("files")
    slim, plan, _ = random_cut(bert(), text_batch())
    slim.save_pretrained(folder / "slim")
    bert().save_pretrained(folder / "dense")
    causal_lm().save_pretrained(folder / "decoder")
    (folder / "plan.json").write_text(plan.to_json())
    (folder / "report.json").write_text(make_report().to_json())
    return folder


# What is damaged -> what reads it, the error, and how its sentence begins.
KINDS: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "plan.json": (PruningPlan.from_file, PlanError, "a plan must be JSON written by hies_export .*plan.json .*"),
    "report.json": (Report.from_file, RequestError, "a report must be a report.json or a run's folder.*"),
    "slim/config.json": (lambda file: load(file.parent), RequestError, "the config of a model must be .*"),
    "dense/config.json": (lambda file: load(file.parent), RequestError, ""),
    "decoder/generation_config.json": (lambda file: load(file.parent), RequestError, ""),
}
GENERATION = "generation_config.json eos_token_id must be a valid integer, got {'x': 1}"
MODULE, LAYER = "bert.encoder.layer.0.attention.self", "encoder.layer.0.attention.self"
KEPT, UNITS = ("kept", MODULE), ("kept", MODULE, "units")
LINEAR, ATTRIBUTES = ("hies_export", "linear"), ("hies_export", "attributes")
PER_LAYER = {"dense": [], "slim": [{"layer": "a", "projections": 1, "products": 1, "other": 1}], "shape": [1, 2]}


@pytest.mark.parametrize(
    ("kind", "place", "to", "message"),
    [
        ("plan.json", (*UNITS, 0), "a", r"kept\[.*units\[0\] must be a valid integer, got 'a'"),
        ("plan.json", (*UNITS, 0), 1.5, r"units\[0\] must be a valid integer, got 1.5"),
        ("plan.json", UNITS, [0, 99], r"units must be ascending indices in \[0, 6\), at least one, got \[0, 99\]"),
        ("plan.json", UNITS, [-1, 2], r"ascending indices in \[0, 6\)"),
        ("plan.json", UNITS, [], r"ascending indices in \[0, 6\), at least one, got \[\]"),
        ("plan.json", (*KEPT, "total"), 10**12, r"total must be less than or equal to 1048576, got 1000000000000"),
        ("plan.json", (*KEPT, "groups"), 4, "total must be a multiple of groups, got 6 and 4"),
        ("plan.json", (*KEPT, "kind"), "mouth", "kind must be 'attention' or 'mlp', got 'mouth'"),
        ("plan.json", ("model",), 5, "model must be an object, got 5"),
        ("plan.json", ("compensation",), {"method": '<img src="http://x/y.png">'}, "compensation.method"),
        ("plan.json", ("x",), 1, "x Extra inputs are not"),
        ("slim/config.json", LINEAR, 5, "hies_export.linear must be an object, got 5"),
        ("slim/config.json", LINEAR, {"encoder.layer.9.x": [4, 4]}, "'encoder.layer.9.x', which is not a linear layer"),
        ("slim/config.json", LINEAR, {"embeddings.LayerNorm": [4, 4]}, "'embeddings.LayerNorm', which is not a linear"),
        ("slim/config.json", LINEAR, {f"{LAYER}.query": [4]}, r"query'\] List should have at least 2 items"),
        ("slim/config.json", LINEAR, {f"{LAYER}.query": [0, 48]}, r"query'\]\[0\] must be greater than or eq.* got 0"),
        ("slim/config.json", ATTRIBUTES, {"nowhere": {"heads": 2}}, "'nowhere', which is not a module of"),
        ("slim/config.json", ATTRIBUTES, {LAYER: {"forward": 2}}, "names 'forward', which is not a number of its Bert"),
        ("slim/config.json", ATTRIBUTES, {LAYER: {"num_attention_heads": "2"}}, "must be a valid integer, got '2'"),
        ("dense/config.json", (), [1], r"in .*config.json the whole must be an object, got \[1\]"),
        ("dense/config.json", ("architectures",), 5, "architectures must be a valid list, got 5"),
        ("dense/config.json", ("hidden_size",), "wide", "hidden_size"),
        ("dense/config.json", ("num_attention_heads",), 5, r"no BertFor\w+ can be built of .*not a multiple"),
        ("dense/config.json", ("num_hidden_layers",), 10**9, "num_hidden_layers must be at most 10000, got"),
        ("dense/config.json", ("pruned_heads",), {"0": [1, "x"]}, r"pruned_heads\['0'\]\[1\] must be a valid int"),
        ("dense/config.json", ("pruned_heads",), {"x": [1]}, "pruned_heads"),
        ("dense/config.json", ("pruned_heads",), {"0": [77]}, "names head 77 of layer 0, which had 6"),
        ("decoder/generation_config.json", ("eos_token_id",), {"x": 1}, GENERATION),
        ("report.json", ("parameters", "dense"), 0, "parameters.dense must be greater than 0, got 0"),
        ("report.json", ("details", "head_map"), {"a": 5}, "details.head_map.a must be a valid string, got 5"),
        ("report.json", ("details", "neurons"), {"a": {"kept": 1}}, "details.neurons.a.total is missing"),
        ("report.json", ("details", "metrics"), {"f1": {"dense": 1}}, "details.metrics.f1.slim is missing"),
        ("report.json", ("details", "uncompensated"), {"metrics": {}, "stability": 1}, "the first metric, 'accuracy'"),
        ("report.json", ("details", "budget"), {"kind": "flops"}, "details.budget.target is missing"),
        ("report.json", ("details", "data"), {"labels": "a"}, "details.data.calibration_samples is missing"),
        ("report.json", ("details", "flops_per_layer"), PER_LAYER, "as many layers"),
        ("report.json", ("latency", 0, "ratio"), float("nan"), r"latency\[0\].ratio must be a finite number, got nan"),
    ],
)
def test_a_value_that_does_not_fit(kind: str, place: Any, to: Any, message: str, files: Path, tmp_path: Path) -> None:
    file = shutil.copytree(files, tmp_path / "copy") / kind
    change(file, *place, to=to) if place else file.write_text(json.dumps(to))
    read, error, beginning = KINDS[kind]
    with pytest.raises(error, match=beginning + message):
        read(file)
    if command := {"plan.json": "inspect", "report.json": "report"}.get(kind):
        assert hies(command, file) == 2


def test_a_plan_that_is_no_utf8(files: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes((files / "plan.json").read_bytes().replace(b"attention", b"att\xff"))
    with pytest.raises(PlanError, match=r"plan.json is no JSON: invalid unicode code point at line \d+"):
        PruningPlan.from_file(file)


@pytest.mark.parametrize("command", ["run", "inspect", "export", "bench"])
def test_truncated_weights(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = save_project(tmp_path, train=40, validation=20, prune={"budget": {"heads": 0.5}})
    weights = project / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    given = {"run": ["recipe.yaml"], "export": ["model", "-o", project / "onnx"]}.get(command, ["model"])
    assert hies(command, project / given[0], *given[1:]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "cannot be loaded: SafetensorError: " in said
    assert "incomplete" in said


def test_weights_that_do_not_fit_the_config(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["classifier.bias"] = torch.zeros(7)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(RequestError, match=r"shapes that the config describes, .* classifier.bias is \[7\] for \[3\]"):
        load(tmp_path)
    del weights["classifier.bias"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(RequestError, match=r"parameter must be in the files, but .* has no classifier.bias; they"):
        load(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"[1]",
        b"[" * 3000,
        b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b"long",
    ],
)
def test_the_header_of_safetensors(header: bytes, tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    length = 2**40 if header == b"long" else len(header)
    file.write_bytes(length.to_bytes(8, "little") + header + data[8 + int.from_bytes(data[:8], "little") :])
    with pytest.raises(RequestError, match=r"cannot be loaded: SafetensorError.*\(model.safetensors\); save or fetch"):
        load(tmp_path)


def test_a_generation_config_beside_a_graph(tmp_path: Path) -> None:
    causal_lm().save_pretrained(tmp_path)
    change(tmp_path / "generation_config.json", "eos_token_id", to={"x": 1})
    (tmp_path / "model.onnx").write_text("")
    with pytest.raises(RequestError, match=GENERATION):
        OnnxGenerator.from_folder(tmp_path)


@pytest.mark.parametrize("lacking", ["head_map", "heads", "metrics", "alpha_curve", "uncompensated"])
def test_a_report_shows_what_it_has(lacking: str, tmp_path: Path) -> None:
    values = json.loads(make_report().to_json())
    del values["details"][lacking]
    (tmp_path / "report.json").write_text(json.dumps(values))
    assert hies("report", tmp_path, "--html", tmp_path / "page.html") == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"asked": []}, "line 1 of .* asked must be an object"),
        ({"asked": {"a": 1}}, "line 1 of .* asked.a must be a valid string, got 1"),
        ([1], "line 2 of .* the whole must be an object"),
        ({"kind": "row", "key": "a", "value": {"judged": "a"}}, "line 2 of .* alpha is missing"),
        ({"kind": "alpha", "key": "a", "value": {"chosen": 0.5, "curve": []}}, "line 2 of .* curve List should have"),
    ],
)
def test_a_journal(line: Any, message: str, tmp_path: Path) -> None:
    with Journal(tmp_path, asked={}):
        pass
    (file,) = tmp_path.glob("journal*.jsonl")
    head = "" if isinstance(line, dict) and "asked" in line else file.read_text()
    file.write_text(f"{head}{json.dumps(line)}\n")
    with pytest.raises(RequestError, match=f"a journal must be lines of JSON written by hies-export sweep.*{message}"):
        Journal(tmp_path, asked={})
