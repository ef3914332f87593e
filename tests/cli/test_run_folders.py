"""Commands that are given the folder of a run, or of something else, where they need a part of it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.models import causal_lm, generative_tokenizer
from support.runs import without_tracing

import hies_export
from hies_export.checkpoint.folders import Contents, contents
from hies_export.errors import RequestError

TAKEN = "is the folder of a run: using its {}"


def test_inspect_and_export_take_the_slim_model(finished: Path, tmp_path: Path, told: Any) -> None:
    code, err, shown = told("inspect", finished, "--json")
    assert (code, shown["model"], shown["slim"]) == (0, str(finished / "slim"), True)
    assert TAKEN.format("slim/") in err
    assert shown["cut"]["heads"] == {"total": 12, "removed": 5}
    with without_tracing():
        code, err, _ = told("export", finished, "-o", tmp_path / "onnx")
    assert code == 0
    assert TAKEN.format("slim/") in err
    assert (tmp_path / "onnx" / "tokenizer.json").is_file()


def test_generate_takes_the_slim_model(tmp_path: Path, told: Any) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.json").write_text("{}")
    causal_lm().save_pretrained(tmp_path / "run" / "slim")
    generative_tokenizer().save_pretrained(tmp_path / "run" / "slim")
    code, err, shown = told("generate", tmp_path / "run", "--prompt", "a", "--max-new-tokens", "2", "--json")
    assert (code, shown["folder"]) == (0, str(tmp_path / "run" / "slim"))
    assert TAKEN.format("slim/") in err
    with pytest.raises(RequestError, match=rf"run is the folder of a run; give {tmp_path}/run/slim$"):
        hies_export.generate_text(tmp_path / "run", ["a"])


def test_apply_takes_the_plan(finished: Path, tmp_path: Path, told: Any) -> None:
    code, err, shown = told("apply", finished, finished.parent / "model", "-o", tmp_path / "slim", "--json")
    assert (code, shown["heads"]["removed"]) == (0, 5)
    assert TAKEN.format("plan.json") in err
    assert told("apply", finished, finished.parent / "model", "-o", tmp_path / "slim", "--overwrite")[0] == 0
    # A plan of the dense model is not one of the slim model.
    assert told("apply", finished, finished, "-o", tmp_path / "more")[0] == 2


def test_bench_compares_the_dense_and_the_slim_model_of_a_run(finished: Path, told: Any) -> None:
    code, err, found = told("bench", finished, "--shape", "1x8", "--repeats", "2", "--json")
    assert (code, found["a"], found["b"]) == (0, str(finished.parent / "model"), str(finished / "slim"))
    assert f"A is its dense model, {finished.parent / 'model'}; B is {finished / 'slim'}" in err


@pytest.fixture
def compared(monkeypatch: Any, told: Any) -> Any:
    """Run `bench` without timing anything; return the two models that it would time, and what it says."""
    taken: list[tuple[str, str]] = []
    monkeypatch.setattr("hies_export.pipeline.bench.bench", lambda a, b, **_: taken.append((a, b)) or [])

    def run(*command: str | Path) -> tuple[tuple[str, str], str]:
        said = told("bench", *command)[1]
        return taken[-1], said

    return run


def test_bench_without_the_dense_model_measures_the_noise(finished: Path, tmp_path: Path, compared: Any) -> None:
    values = json.loads((finished / "report.json").read_text())
    values["model"] = str(tmp_path / "nowhere")
    (tmp_path / "slim").symlink_to(finished / "slim")
    (tmp_path / "report.json").write_text(json.dumps(values))
    both, said = compared(tmp_path)
    assert both == (str(tmp_path / "slim"), str(tmp_path / "slim"))
    assert "its dense model is gone: its slim model is timed" in said


def test_bench_takes_the_commit_of_the_dense_model_that_the_run_read(
    finished: Path, tmp_path: Path, compared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    values = json.loads((run / "report.json").read_text())
    values["model"] = "me/dense"
    values["details"]["run"]["commit"] = "c0ffee"
    (run / "report.json").write_text(json.dumps(values))
    fetched: list[Any] = []
    fetch = "hies_export.report.provenance.fetch_whole"
    monkeypatch.setattr(fetch, lambda model, revision: fetched.append((model, revision)) or finished.parent / "model")
    assert compared(run)[0] == (str(finished.parent / "model"), str(run / "slim"))
    assert fetched == [("me/dense", "c0ffee")]


def test_bench_of_two_takes_the_slim_model_of_a_run(finished: Path, compared: Any) -> None:
    graph, slim, dense = (str(path) for path in (finished / "onnx", finished / "slim", finished.parent / "model"))
    ort = ("--runtime", "onnxruntime-cpu")
    for asked, both in (
        ((finished, finished, *ort), (slim, slim)),
        ((finished, dense), (slim, dense)),
        ((graph, graph, *ort), (graph, graph)),
    ):
        assert compared(*asked)[0] == both, asked


NO_CHECKPOINTS = {
    "sweep.json": "the folder of a sweep",
    "journal-a-1.jsonl": "the folder of a sweep",
    "plan.json": "a folder of scores and their plan",
    "report.json": "the folder of a run without it",
    "thesis.md": "something else",
}


@pytest.mark.parametrize("command", [("generate", "--prompt", "a"), ("bench",), ("export", "-o", "x")])
def test_what_is_no_checkpoint_is_named(command: tuple[str, ...], tmp_path: Path, told: Any) -> None:
    for file, what in NO_CHECKPOINTS.items():
        folder = tmp_path / file
        folder.mkdir()
        (folder / file).touch()
        code, err, _ = told(command[0], folder, *command[1:])
        assert (code, f"{folder} is {what}" in err) == (2, True), err


def test_the_slim_model_nearby_is_named(finished: Path, told: Any) -> None:
    with pytest.raises(RequestError, match=rf"but {finished} is the folder of a run; give {finished}/slim$"):
        hies_export.load(finished)
    code, err, _ = told("export", finished / "onnx", "-o", "nowhere")
    assert (code, f"{finished / 'onnx'} is an ONNX folder; give {finished / 'slim'}" in err) == (2, True)
    code, err, _ = told("push", finished / "slim", "user/repo")
    assert (code, f"{finished / 'slim'} is a checkpoint; give {finished}" in err) == (2, True)


def test_a_checkpoint_with_a_graph_beside_it_and_what_was_pushed_are_checkpoints(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "model.onnx", "report.json", "plan.json", "openvino_model.xml"):
        (tmp_path / name).touch()
    assert contents(tmp_path) is Contents.CHECKPOINT
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.onnx").unlink()
    (tmp_path / "openvino_model.bin").touch()
    assert contents(tmp_path) is Contents.OPENVINO
    assert contents("user/repository") is Contents.NOTHING
