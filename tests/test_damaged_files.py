"""What the tool says of files that were damaged in ways that people reported."""

import json
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
from hies_export.onnx.generator import OnnxGenerator
from hies_export.report.report import Report
from hies_export.stream.skeleton import read_tensors
from hies_export.sweep.journal import Journal
from hies_export.values import PruningPlan


def change(file: Path, *place: Any, to: Any) -> None:
    """Replace a value in a JSON file."""
    whole = value = json.loads(file.read_text())
    for key in place[:-1]:
        value = value[key]
    value[place[-1]] = to
    file.write_text(json.dumps(whole))


@pytest.fixture(scope="module")
def plan() -> PruningPlan:
    return random_cut(bert(), text_batch())[1]


@pytest.mark.parametrize(
    ("place", "to", "message"),
    [
        (("units", 0), "a", r"units\[0\] must be a valid integer, got 'a'"),
        (("units", 0), 1.5, r"units\[0\] must be a valid integer, got 1.5"),
        (("units",), [0, 99], r"units must be ascending indices in \[0, 6\), at least one, got \[0, 99\]"),
        (("units",), [-1, 2], r"ascending indices in \[0, 6\)"),
        (("units",), [], r"ascending indices in \[0, 6\), at least one, got \[\]"),
        (("total",), 10**12, r"total must be less than or equal to 1048576, got 1000000000000"),
        (("groups",), 4, "total must be a multiple of groups, got 6 and 4"),
        (("kind",), "mouth", "kind must be 'attention' or 'mlp', got 'mouth'"),
    ],
)
def test_units_of_a_plan(plan: PruningPlan, place: Any, to: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plan.to_json())
    change(tmp_path / "plan.json", "kept", next(iter(plan.kept)), *place, to=to)
    with pytest.raises(PlanError, match=r"a plan must be JSON written by hies_export .*plan.json kept\[.*" + message):
        PruningPlan.from_file(tmp_path / "plan.json")
    assert hies("inspect", tmp_path / "plan.json") == 2


def test_fields_of_a_plan(plan: PruningPlan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    for name, to, message in (("model", 5, "model must be an object, got 5"), ("x", 1, "x Extra inputs are not")):
        file.write_text(plan.to_json())
        change(file, name, to=to)
        with pytest.raises(PlanError, match=message):
            PruningPlan.from_file(file)
    file.write_bytes(plan.to_json().encode().replace(b"attention", b"att\xff"))
    with pytest.raises(PlanError, match=r"plan.json is no JSON: invalid unicode code point at line \d+"):
        PruningPlan.from_file(file)


@pytest.fixture(scope="module")
def slim_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slim")
    random_cut(bert(), text_batch())[0].save_pretrained(folder)
    return folder


@pytest.fixture
def slim(slim_files: Path, tmp_path: Path) -> Path:
    for file in slim_files.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


LAYER = "encoder.layer.0.attention.self"


@pytest.mark.parametrize(
    ("place", "to", "message"),
    [
        (("linear",), 5, "hies_export.linear must be an object, got 5"),
        (("linear",), {"encoder.layer.9.x": [4, 4]}, "names 'encoder.layer.9.x', which is not a linear layer"),
        (("linear",), {"embeddings.LayerNorm": [4, 4]}, "'embeddings.LayerNorm', which is not a linear"),
        (("linear",), {f"{LAYER}.query": [4]}, r"query'\] List should have at least 2 items"),
        (("linear",), {f"{LAYER}.query": [0, 48]}, r"query'\]\[0\] must be greater than or equal to 1, got 0"),
        (("attributes",), {"nowhere": {"num_attention_heads": 2}}, "'nowhere', which is not a module of"),
        (("attributes",), {LAYER: {"forward": 2}}, "names 'forward', which is not a number of its Bert"),
        (("attributes",), {LAYER: {"num_attention_heads": "2"}}, "must be a valid integer, got '2'"),
    ],
)
def test_the_block_of_a_slim_checkpoint(slim: Path, place: Any, to: Any, message: str) -> None:
    change(slim / "config.json", "hies_export", *place, to=to)
    with pytest.raises(RequestError, match=r"the config of a model must be .*" + message):
        load(slim)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_text("[1]"), r"in .*config.json the whole must be an object, got \[1\]"),
        (lambda file: change(file, "architectures", to=5), "architectures must be a valid list, got 5"),
        (lambda file: change(file, "hidden_size", to="wide"), "hidden_size"),
        (lambda file: change(file, "num_attention_heads", to=5), r"no BertFor\w+ can be built of .*not a multiple"),
        (lambda file: change(file, "num_hidden_layers", to=10**9), "num_hidden_layers must be at most 10000, got"),
        (
            lambda file: change(file, "pruned_heads", to={"0": [1, "x"]}),
            r"pruned_heads\['0'\]\[1\] must be a valid int",
        ),
        (lambda file: change(file, "pruned_heads", to={"x": [1]}), "pruned_heads"),
        (lambda file: change(file, "pruned_heads", to={"0": [77]}), "names head 77 of layer 0, which had 6"),
    ],
)
def test_a_config(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)
    damage(tmp_path / "config.json")
    with pytest.raises(RequestError, match=message):
        load(tmp_path)


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


def test_the_header_of_safetensors(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for header, message in (
        (b"[1]", "the whole must be an object"),
        (b"[" * 3000, "recursion limit exceeded"),
        (b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}', r"a.shape\[0\] must be a valid integer"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}', r"data_offsets\[0\] must be greater than"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "'a' has 4 bytes in .* its shape makes 8"),
    ):
        file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
        with pytest.raises(RequestError, match=f"weights must be a safetensors file, but .*{message}"):
            read_tensors(tmp_path)
    file.write_bytes((2**40).to_bytes(8, "little") + data[8:])
    with pytest.raises(RequestError, match="its header is longer than the file"):
        read_tensors(tmp_path)


def test_a_generation_config(tmp_path: Path) -> None:
    causal_lm().save_pretrained(tmp_path)
    change(tmp_path / "generation_config.json", "eos_token_id", to={"x": 1})
    message = "generation_config.json eos_token_id must be a valid integer, got {'x': 1}"
    with pytest.raises(RequestError, match=message):
        load(tmp_path)
    (tmp_path / "model.onnx").write_text("")
    with pytest.raises(RequestError, match=message):
        OnnxGenerator.from_folder(tmp_path)


LAYER = {"layer": "a", "projections": 1, "products": 1, "other": 1}


@pytest.mark.parametrize(
    ("place", "to", "message"),
    [
        (("parameters", "dense"), 0, "parameters.dense must be greater than 0, got 0"),
        (("details", "head_map"), {"a": 5}, "details.head_map.a must be a valid string, got 5"),
        (("details", "neurons"), {"a": {"kept": 1}}, "details.neurons.a.total is missing"),
        (("details", "metrics"), {"f1": {"dense": 1}}, "details.metrics.f1.slim is missing"),
        (("details", "uncompensated"), {"metrics": {}, "stability": 1}, "must have the first metric, 'accuracy'"),
        (("details", "budget"), {"kind": "flops"}, "details.budget.target is missing"),
        (("details", "data"), {"labels": "data"}, "details.data.calibration_samples is missing"),
        (("details", "flops_per_layer"), {"dense": [], "slim": [LAYER], "shape": [1, 2]}, "as many layers"),
        (("latency", 0, "ratio"), float("nan"), r"latency\[0\].ratio must be a finite number, got nan"),
    ],
)
def test_a_report(place: Any, to: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(make_report().to_json())
    change(tmp_path / "report.json", *place, to=to)
    with pytest.raises(RequestError, match=f"a report must be a report.json or a run's folder.*{message}"):
        Report.from_file(tmp_path)
    assert hies("report", tmp_path) == 2


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
