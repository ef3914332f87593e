"""Quickstart: its training, on one thread whatever the number of threads, and its run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tolerance import assert_near
from transformers import ViTConfig

from hies_export.cli import digits
from hies_export.cli.digits import MODEL, prepare_quickstart
from hies_export.cli.main import main
from hies_export.progress import Silent


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def train(folder: Path, *, threads: int) -> dict[str, torch.Tensor]:
    folder.mkdir()
    torch.set_num_threads(threads)
    prepare_quickstart(folder, epochs=1)
    assert torch.get_num_threads() == threads
    return load_file(folder / MODEL / "model.safetensors")


@pytest.mark.usefixtures("threads")
def test_the_weights_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    one, two = (train(tmp_path / str(count), threads=count) for count in (1, 2))
    assert one.keys() == two.keys()
    # Training amplifies rounding, most where gradients are nothing else, as of the keys' biases.
    assert_near(*(torch.cat([weight.flatten() for weight in found.values()]) for found in (two, one)), within=1e-3)


class Interrupted(Silent):
    def track(self, items: object, name: str) -> Iterator[int]:  # type: ignore[override]
        assert torch.get_num_threads() == 1
        raise RuntimeError("stopped")


@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_comes_back_when_training_is_interrupted(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    with pytest.raises(RuntimeError, match="stopped"):
        prepare_quickstart(tmp_path, progress=Interrupted())
    assert torch.get_num_threads() == 2


def quickly(folder: Path, **options: Any) -> Path:
    """Prepare the quickstart of half the layers, with fewer passes over the images; time torch alone, and briefly.

    The graph of the slim model is written and compared all the same, and that of the dense model is not needed.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "ViTConfig", lambda **sizes: ViTConfig(**(sizes | {"num_hidden_layers": 2})))
        path = prepare_quickstart(folder, epochs=10, **options)
    text = path.read_text()
    measured = "measure: {runtimes: [torch, onnxruntime-cpu], shapes: [[1], [64]], repeats: 50}"
    assert text.count(measured) == 1
    path.write_text(text.replace(measured, "measure: {runtimes: [torch], shapes: [[64]], repeats: 2}"))
    return path


@pytest.mark.slow
def test_quickstart(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hies_export.cli.digits.prepare_quickstart", quickly)
    monkeypatch.chdir(tmp_path)
    assert main(["quickstart", "-o", "quick start", "--json"]) == 0
    printed = capsys.readouterr().out
    summary = json.loads(printed.splitlines()[-1])
    assert summary["model"] == str(tmp_path / "quick start" / "vit-digits")
    report = json.loads((tmp_path / "quick start" / "run" / "report.json").read_text())
    assert report["model"] == summary["model"]
    assert "hies-export inspect 'quick start/run/slim'" in printed
    # How well it learns depends on the processor; the recipe promises nothing of the slim model but its FLOPs.
    assert summary["quality"]["slim"] > summary["quality"]["dense"] - 0.25
    assert summary["flops"]["slim"] <= 0.5 * summary["flops"]["dense"]
    assert summary["heads"]["removed"] > 0
    assert summary["neurons"]["removed"] > 0
    assert {p.name for p in (tmp_path / "quick start").iterdir()} == {"digits", "recipe.yaml", "run", "vit-digits"}


def test_a_run_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "hies_export.cli.digits.prepare_quickstart",
        lambda folder, **_: (folder / "recipe.yaml").write_text("model: nowhere"),
    )
    assert main(["quickstart", "-o", str(tmp_path / "quick")]) == 2
    assert not [*tmp_path.iterdir()]
    old = tmp_path / "quick" / "hies_plan.json"
    old.parent.mkdir()
    old.touch()
    assert main(["quickstart", "-o", str(tmp_path / "quick"), "--overwrite"]) == 2
    assert [*tmp_path.rglob("*")] == [old.parent, old]
