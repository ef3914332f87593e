"""The whole line on tiny models, through the command line, as a user types it."""

import importlib.util
import json
import pkgutil
import re
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.families import architecture
from support.hub import Hub
from support.loading import load_pruning
from support.models import bert, save_text_model, write_rows
from support.reading import share_same
from support.runs import hies, small_project
from support.tolerance import assert_near, assert_same_plan, near
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertModel

import hies_export
from hies_export import PruningPlan, PruningRecipe, RequestError, bench
from hies_export.evaluate.predict import predict
from hies_export.forms.runtimes.pytorch import TorchRuntime
from hies_export.report.report import CUT, KEPT, Report

SUMMARY = {
    *("model", "task", "criterion", "alpha", "seed", "heads", "parameters", "bytes", "flops", "quality", "stability"),
    *("cut_max_abs", "reload_max_abs", "onnx_max_abs", "seconds", "latency", "environment"),
    *("cache_bytes_per_token", "exported"),
}


def settings(changes: dict[str, Any]) -> list[str]:
    """Return options of the command line for changes of a recipe."""
    return [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return small_project(tmp_path)


def test_run_writes_everything_and_tells_the_truth(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, project = finished, finished.parent
    stdout = (project / "printed.txt").read_text()
    assert sorted(p.name for p in out.iterdir()) == [
        *("onnx", "plan.json", "recipe.yaml", "report.html", "report.json", "report.md", "scores.json", "slim")
    ]
    assert {p.name for p in (out / "slim").iterdir()} >= {
        *("config.json", "model.safetensors", "modeling_hies.py", "hies_plan.json", "README.md", "tokenizer.json")
    }
    assert (out / "onnx" / "model.onnx").is_file()
    # Reading rows sets how a tokenizer cuts and pads; it is saved as it came.
    for kept in ("slim", "onnx"):
        assert (out / kept / "tokenizer.json").read_bytes() == (project / "model" / "tokenizer.json").read_bytes()
    summary = json.loads(stdout.splitlines()[-1])
    assert set(summary) == SUMMARY
    report = json.loads((out / "report.json").read_text())
    assert {k: report[k] for k in SUMMARY} == summary
    assert summary["heads"]["total"] == 12
    assert summary["heads"]["removed"] == 5 == 12 - sum(summary["heads"]["kept_per_layer"])
    assert summary["cut_max_abs"] < 1e-4
    assert summary["reload_max_abs"] < 1e-5
    assert summary["onnx_max_abs"] < 1e-3
    assert summary["exported"] == {
        **{"file": "onnx/model.onnx", "format": "onnx", "quantize": None, "layers": None, "float_neurons": None},
        **{"bytes": summary["bytes"]["onnx"], "stability": summary["stability"]},
        "quality": {"metric": "accuracy", "value": summary["quality"]["slim"]},
    }
    assert [(r["runtime"], r["batch"], r["sequence"]) for r in summary["latency"]] == [
        ("torch", 2, 16),
        ("onnxruntime-cpu", 2, 16),
    ]
    assert [row["provider"] for row in summary["latency"]] == ["cpu", "CPUExecutionProvider"]
    # 40 % of 12 heads of width 8 in a 48-wide model: q, k, v rows with bias and o columns.
    assert summary["parameters"]["dense"] - summary["parameters"]["slim"] == 5 * 8 * (3 * 49 + 48)
    for which, folder in (("dense", project / "model"), ("slim", out / "slim")):
        stored = (folder / "model.safetensors").stat().st_size
        assert summary["bytes"][which] == stored
        assert 0 < stored - 4 * summary["parameters"][which] < 10_000, "float32, and a header"

    # Quality and stability, again, by hand.
    rows = [json.loads(line) for line in (project / "validation.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(out / "slim")
    batch = tokenizer([r["sentence"] for r in rows], [r["other"] for r in rows], padding=True, return_tensors="pt")
    labels = torch.tensor([r["label"] for r in rows])
    dense = AutoModelForSequenceClassification.from_pretrained(project / "model")(**batch).logits.argmax(-1)
    slim = hies_export.load(out / "slim")(**batch).logits.argmax(-1)
    assert summary["quality"] == {
        "metric": "accuracy",
        "dense": pytest.approx((dense == labels).double().mean().item()),
        "slim": pytest.approx((slim == labels).double().mean().item()),
    }
    assert summary["stability"] == pytest.approx((slim == dense).double().mean().item())

    # What a person reads is the same.
    marks = re.findall(rf"^ *\d+  ((?:[{KEPT}{CUT}] ?)+) ", stdout, re.MULTILINE)
    assert [line.count(KEPT) for line in marks] == summary["heads"]["kept_per_layer"]
    for text in ((out / "report.md").read_text(), (out / "slim" / "README.md").read_text()):
        assert "| attention heads | 12 | 7 | -41.7% |" in text
    assert hies("report", out, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == summary


@pytest.mark.usefixtures("untraced")
def test_the_recipe_in_the_folder_of_a_run_gives_the_same_run(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"prune.min_heads": 2, "prune.compensation.method": "bias", "measure.runtimes": "[torch]"}
    assert hies("run", project / "recipe.yaml", *settings(changes)) == 0
    first = Report.from_file(project / "out")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.copy(project / "out" / "recipe.yaml", elsewhere / "again.yaml")
    monkeypatch.chdir(elsewhere)
    assert hies("run", "again.yaml", "-o", "again") == 0
    again = Report.from_file(elsewhere / "again")
    plans = [PruningPlan.from_file(folder / "plan.json") for folder in (elsewhere / "again", project / "out")]
    # The digest of refitted layers is of bytes, which some processors round differently.
    assert_same_plan(*(replace(plan, compensation={}) for plan in plans))
    assert_near([again.quality[w] for w in ("dense", "slim")], [first.quality[w] for w in ("dense", "slim")])
    assert again.stability == near(first.stability)
    asked, asked_again = (
        PruningRecipe.from_yaml(folder / "recipe.yaml") for folder in (project / "out", elsewhere / "again")
    )
    assert asked_again.model_dump(exclude={"output"}) == asked.model_dump(exclude={"output"})
    assert again.model == first.model == str(project / "model")
    assert again.details.run == {"command": "hies-export run again.yaml -o again", "commit": None}


@pytest.mark.usefixtures("untraced")
def test_the_report_of_a_model_on_the_hub_has_its_commit(hub: Hub, project: Path) -> None:
    files = {file.name: file.read_bytes() for file in (project / "model").iterdir()}
    commits = hub.add("user/classifier", files).branches
    commits["half"] = [replace(commits["main"][0], sha="c0ffee" + 34 * "0")]
    changes = {"model": "user/classifier", "measure.runtimes": "[torch]", "revision": "half"}
    assert hies("run", project / "recipe.yaml", *settings(changes)) == 0
    assert Report.from_file(project / "out").details.run["commit"] == commits["half"][0].sha


def test_a_checkpoint_and_an_export_are_benched(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--shape", "2x8", "--repeats", 2, "--runtime", "onnxruntime-cpu", "--json")
    assert hies("bench", finished.parent / "model", finished / "onnx", *options) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["latency"]
    assert (row["batch"], row["sequence"], row["runtime"]) == (2, 8, "onnxruntime-cpu")
    assert row["flops_ratio"] < 1
    assert row["realised"] is not None


@pytest.mark.usefixtures("untraced")
def test_alpha_chosen_on_data_and_compensation(project: Path) -> None:
    write_rows(project / "train.jsonl", 60)
    asked = {"prune.alpha": "auto", "prune.compensation.samples": 60, "measure.runtimes": "[torch]"}
    assert hies("run", project / "recipe.yaml", *settings(asked)) == 0
    report = Report.from_file(project / "out")
    tried = report.details.tried
    (chosen,) = (one for one in tried if one.chosen)
    assert (len(tried), chosen.alpha) == (12, report.alpha)
    assert json.loads((project / "out" / "plan.json").read_text())["alpha"] == report.alpha
    written = json.loads((project / "out" / "scores.json").read_text())
    assert written["tried"] == [asdict(one) for one in tried]
    # It was chosen by what the compensated model makes of the held-out rows.
    prepared = load_pruning(PruningRecipe.from_yaml(project / "recipe.yaml", asked | {"measure.runtimes": ["torch"]}))
    rows, slim = prepared.rows.held_out, hies_export.load(project / "out" / "slim")
    expected = share_same(predict(prepared.model, rows), predict(slim, rows))
    assert chosen.stability == pytest.approx(expected)
    assert {fit.method for fit in report.details.compensation} <= {"least_squares", "bias", "none"}
    assert len(report.details.compensation) == sum(kept < 6 for kept in report.heads["kept_per_layer"])
    assert report.cut_max_abs < 1e-4


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("labelled", [True, False])
def test_label_sets(labelled: bool, project: Path) -> None:
    save_text_model(project / "tags", num_labels=4, problem_type="multi_label_classification")
    write_rows(project / "train.jsonl", 12, lambda i: [i % 4])
    write_rows(project / "validation.jsonl", 20, lambda i: [*range(i % 4)])
    how = {"model": project / "tags", "measure.runtimes": "[torch]", "data.label": "label" if labelled else "null"}
    assert hies("run", project / "recipe.yaml", *settings(how)) == 0
    report = Report.from_file(project / "out")
    rows = [json.loads(line) for line in (project / "validation.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(project / "tags")
    texts = ([row[column] for row in rows] for column in ("sentence", "other"))
    inputs = tokenizer(*texts, padding=True, return_tensors="pt")
    load = partial(AutoModelForSequenceClassification.from_pretrained, trust_remote_code=True)
    with torch.no_grad():
        logits = [load(folder)(**inputs).logits for folder in (project / "tags", project / "out" / "slim")]
    dense, slim = (found.sigmoid() > 0.5 for found in logits)
    assert report.stability == pytest.approx((dense == slim).all(-1).float().mean().item())
    wanted = torch.tensor([[label in row["label"] for label in range(4)] for row in rows]) if labelled else dense
    f1 = 2 * (slim & wanted).sum() / (slim.sum() + wanted.sum()).clamp(min=1)
    assert report.quality["slim"] == pytest.approx(f1.item())
    # Of the model with itself, a metric says nothing to others.
    assert report.details.data.evaluation_labelled == labelled
    assert report.details.data.labels == ("data" if labelled else "predictions")
    text = (project / "out" / "report.md").read_text()
    assert "same label set" in text
    assert ("micro F1" in text) == labelled


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no rows to choose alpha on": ({"prune.alpha": "auto", "calibration.samples": 12}, "beyond the 12 to score on"),
    "missing file": ({"data.files.train": "nowhere.jsonl"}, "nowhere.jsonl"),
    "missing split": ({"calibration.split": "trian"}, "the split must be one of"),
    "slice": ({"calibration.split": "train[5]"}, "a slice of a split must be like train[:80%]"),
    "missing column": ({"data.text": "sentense"}, "but it has sentence, other, label"),
    "label out of range": ({"data.files.validation": "many.jsonl"}, "labels must be in [0, 2)"),
    "empty split": ({"data.files.train": "empty.jsonl"}, "empty"),
    "runtime not here": ({"measure.runtimes": ["onnxruntime-cuda"]}, 'install it with: pip install "hies-export[gpu]"'),
    "shape": ({"measure.shapes": [[1]]}, "must be batch and sequence, got [1]"),
    "task of the model": (
        {"task": "image-classification", "data.text": [], "data.image": "sentence"},
        "needs a model fine-tuned for it",
    ),
    "not cuttable": ({"model": "longformer"}, "(longformer) cannot be cut"),
    "not fine-tuned": ({"model": "headless"}, "is a BertModel of type 'bert'; fine-tune it for the task"),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the files and models of `BAD`."""
    folder = small_project(tmp_path_factory.mktemp("refused"))
    (folder / "empty.jsonl").write_text("")
    write_rows(folder / "many.jsonl", 9, lambda i: i)
    save_text_model(folder / "longformer")
    architecture("Longformer", num_hidden_layers=1, attention_window=[4])().save_pretrained(folder / "longformer")
    save_text_model(folder / "headless")
    BertModel.from_pretrained(folder / "headless").save_pretrained(folder / "headless")
    return folder


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_any_calibration(name: str, refused: Path) -> None:
    overrides, message = BAD[name]
    here = {k: str(refused / v) if k.startswith(("data.files", "model")) else v for k, v in overrides.items()}
    with pytest.raises(RequestError, match=re.escape(message)):
        load_pruning(PruningRecipe.from_yaml(refused / "recipe.yaml", here))


def full_disk(patch: pytest.MonkeyPatch) -> None:
    write = Mock(side_effect=OSError(28, "No space left on device"))
    patch.setattr("hies_export.pipeline.reporting.render_markdown", write)  # the last file of all


def interrupt(patch: pytest.MonkeyPatch) -> None:
    # Elsewhere no handler can be set, and the signal would end the tests.
    assert threading.current_thread() is threading.main_thread()
    # While it measures, with everything else written.
    # To this thread: one that the kernel gives to another thread is handled a little later, maybe after the run.
    patch.setattr(TorchRuntime, "run", lambda *_: signal.raise_signal(signal.SIGINT))


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("happens", "code", "message"),
    [(full_disk, 1, "No space left on device"), (interrupt, 130, "nothing half-written")],
)
def test_what_stops_a_run_is_said_and_leaves_nothing(
    happens: Callable[[pytest.MonkeyPatch], None],
    code: int,
    message: str,
    project: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happens(monkeypatch)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert hies("run", project / "recipe.yaml", "--set", "measure.runtimes=[torch]") == code
    assert message in capsys.readouterr().err
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert sorted(p.name for p in project.iterdir()) == ["model", "recipe.yaml", "train.jsonl", "validation.jsonl"]


def test_bench_refuses_what_cannot_be_compared(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "model.onnx").touch()
    monkeypatch.chdir(project)
    for arguments, message in (
        ((project / "nowhere", "model"), "a model to time must be a checkpoint, an export or a run"),
        (("model", "--runtime", "tourch"), "did you mean 'torch'"),
        (("model", "--dtype", "int4"), "a dtype must be one of float32, float16, bfloat16 on torch, got 'int4'"),
        (("model", "--runtime", "onnxruntime-cuda"), 'pip install "hies-export[gpu]"'),
        (("model", "--shape", "2000000x16"), "a shape must have at most 16,777,216 tokens"),
        (("model", "--shape", "1x65"), "sequence must be in 1..64"),
        ((".", "--dtype", "float16"), "is an ONNX folder with its own"),
    ):
        assert hies("bench", *arguments) == 2
        assert message in capsys.readouterr().err


def test_models_of_different_sizes_read_tokens_and_rows_of_the_smaller(tmp_path: Path) -> None:
    bert(num_hidden_layers=1).save_pretrained(tmp_path / "large")
    bert(num_hidden_layers=1, vocab_size=7, max_position_embeddings=24).save_pretrained(tmp_path / "small")
    for first, second in (("large", "small"), ("small", "large")):
        rows = bench(tmp_path / first, tmp_path / second, repeats=2)
        assert [(row.batch, row.sequence) for row in rows] == [(1, 24), (8, 24)]


def test_what_bench_prints_is_shown_again(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--shape", "2x8", "--repeats", 2, "--dtype", "float16", "--dtype", "float32")
    assert hies("bench", project / "model", *options, "--json") == 0
    *said, written = capsys.readouterr().out.splitlines()
    rows = json.loads(written)["latency"]
    assert [row["dtype"] for row in rows] == ["float16", "float32"]
    (project / "bench.json").write_text(written)
    assert hies("report", project / "bench.json", "--html", project / "bench.html", "--json") == 0
    *again, values = capsys.readouterr().out.splitlines()
    assert again == said
    assert json.loads(values)["latency"] == rows
    page = (project / "bench.html").read_text()
    assert ">torch 2 x 8 float16</text>" in page
    assert hies("report", project / "bench.json", "--figures", project / "figures") == 2
    assert "figures are drawn for a run" in capsys.readouterr().err
    assert not (project / "figures").exists()


def test_public_names_are_complete() -> None:
    errors = {name for name in hies_export.__all__ if name.endswith("Error")}
    assert set(hies_export.__all__) - errors == set(hies_export._HOMES)
    for module in pkgutil.walk_packages(hies_export.__path__, "hies_export."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    # A module of the same name would hide it.
    assert not [name for name in hies_export.__all__ if isinstance(getattr(hies_export, name), ModuleType)]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hies_export.nothing  # noqa: B018
