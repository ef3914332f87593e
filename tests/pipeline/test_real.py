"""The real thing: fine-tuned models on real data, and the quickstart."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.runs import without_tracing
from transformers import AutoModelForSequenceClassification, AutoTokenizer, ViTConfig

import hies_export
from hies_export.cli import digits
from hies_export.cli.digits import prepare_quickstart
from hies_export.cli.main import main
from hies_export.report.report import Report


def real_recipe(shared: Path, task: str, folder: Path) -> Path:
    data = shared / "data" / task
    recipe = {
        "model": str(shared / "models" / f"minilm-{task}"),
        "task": "text-classification",
        "data": {
            "files": {s: str(data / f"{s}.jsonl.gz") for s in ("train", "validation")},
            "text": "sentence" if task == "sst2" else ["sentence1", "sentence2"],
            "label": "label",
            "max_length": 128,
        },
        "evaluation": {
            "samples": 600 if task == "sst2" else 300,
            "rows": "first",
            "metrics": ["accuracy", "f1"] if task == "sst2" else ["pearson", "spearman"],
        },
        "prune": {"criterion": "hies", "alpha": 0.9, "budget": {"heads": 0.3}},
        "measure": {"runtimes": ["torch"], "shapes": [[1, 16]], "repeats": 2},
        "output": "out",
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("task", "metric", "dense"), [("stsb", "pearson", 0.9220), ("sst2", "accuracy", 0.8817)])
def test_minilm_loses_30_percent_of_its_heads(
    task: str, metric: str, dense: float, shared: Path, tmp_path: Path
) -> None:
    # Its graph takes longer than all the rest; that of a real model is compared in test_run_generation.
    with without_tracing():
        assert main(["run", str(real_recipe(shared, task, tmp_path))]) == 0
    report = Report.from_file(tmp_path / "out")
    assert report.heads["removed"] == 22
    assert report.quality["metric"] == metric
    assert report.quality["dense"] == pytest.approx(dense, abs=2e-4)
    assert abs(report.quality["slim"] - report.quality["dense"]) < 0.01
    assert report.cut_max_abs < 1e-4
    assert report.reload_max_abs < 1e-5

    # The logits of the first rows, by hand, from the dense checkpoint with the same heads masked.
    slim_folder = tmp_path / "out" / "slim"
    tokenizer = AutoTokenizer.from_pretrained(slim_folder)
    text = "the film is a delight", "a delightful film"
    batch = tokenizer(*text[: 1 if task == "sst2" else 2], return_tensors="pt")
    model = AutoModelForSequenceClassification.from_pretrained(
        shared / "models" / f"minilm-{task}", dtype=torch.float32, attn_implementation="eager"
    )
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())["kept"]
    for name, kept in plan.items():
        projection = model.get_submodule(name.removesuffix("self") + "output.dense")
        for head in set(range(12)) - set(kept["units"]):
            projection.weight.data[:, head * 32 : (head + 1) * 32] = 0
    with torch.no_grad():
        expected = model(**batch).logits
        found = hies_export.load(slim_folder, dtype=torch.float32)(**batch).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def quickly(folder: Path, **options: Any) -> Path:
    """Prepare the quickstart of half the layers, with fewer passes over the images; time torch alone, and briefly.

    The graph of the slim model is written and compared all the same, and that of the dense model is not needed.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "ViTConfig", lambda **sizes: ViTConfig(**(sizes | {"num_hidden_layers": 2})))
        path = prepare_quickstart(folder, epochs=20, **options)
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
    # It worked in a hidden folder, which is gone.
    assert summary["model"] == "quick start/vit-digits"
    report = json.loads((tmp_path / "quick start" / "run" / "report.json").read_text())
    assert report["model"] == summary["model"]
    assert report["details"]["run"]["recipe"]["model"] == str(tmp_path / "quick start" / "vit-digits")
    assert "hies-export inspect 'quick start/run/slim'" in printed
    # How well it learns depends on the processor; the recipe promises nothing of the slim model but its FLOPs.
    assert summary["quality"]["slim"] > summary["quality"]["dense"] - 0.05
    assert summary["flops"]["slim"] <= 0.5 * summary["flops"]["dense"]
    assert summary["heads"]["removed"] > 0
    assert summary["neurons"]["removed"] > 0
    assert {p.name for p in (tmp_path / "quick start").iterdir()} == {"digits", "recipe.yaml", "run", "vit-digits"}
    # What it says to try next works.
    recipe = str(tmp_path / "quick start" / "recipe.yaml")
    options = [
        "--set",
        "prune.allocation=uniform",
        "--set",
        "prune.criterion=fisher",
        "--set",
        "calibration.samples=64",
        "-o",
        str(tmp_path / "uniform"),
    ]
    with without_tracing():
        assert main(["run", recipe, *options]) == 0
    # A uniform ViT is a plain checkpoint.
    assert "auto_map" not in json.loads((tmp_path / "uniform" / "slim" / "config.json").read_text())
    assert not (tmp_path / "uniform" / "slim" / "modeling_hies.py").exists()
