"""What a run that removes heads and neurons writes: report.json against its plan and its slim model."""

import json
from pathlib import Path

import pytest
from support.runs import run_project
from transformers import BertForSequenceClassification

from hies_export.studies.explore import read_exploration
from hies_export.values import PruningPlan


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a budget of FLOPs over both kinds."""
    prune = {"modules": ["attention", "mlp"], "criterion": "his", "budget": {"flops": 0.8}}
    return run_project(tmp_path_factory.mktemp("project"), train=40, validation=20, prune=prune)


def test_the_summary_counts_both_kinds(ran: Path) -> None:
    report = json.loads((ran / "report.json").read_text())
    plan = PruningPlan.from_file(ran / "plan.json")
    # Of 3 layers with 6 heads and 64 neurons.
    for name, kind, total in (("heads", "attention", 18), ("neurons", "mlp", 192)):
        kept = [len(kept.units) for kept in plan.kept.values() if kept.kind == kind]
        assert report[name] == {"total": total, "removed": total - sum(kept), "kept_per_layer": kept}
        assert report[name]["removed"] > 0
    dense = BertForSequenceClassification.from_pretrained(ran.parent / "model")
    width, head = dense.config.hidden_size, dense.config.hidden_size // 6
    # A head has rows and a bias in q, k and v, and columns of the output; a neuron a row, a bias and a column.
    gone = report["heads"]["removed"] * (4 * width * head + 3 * head) + report["neurons"]["removed"] * (2 * width + 1)
    assert report["parameters"]["dense"] - report["parameters"]["slim"] == gone


def test_details_have_the_neurons_of_layers_and_the_numbers_of_heads(ran: Path) -> None:
    report = json.loads((ran / "report.json").read_text())
    layers = [f"bert.encoder.layer.{i}" for i in range(3)]
    kept = report["neurons"]["kept_per_layer"]
    assert report["details"]["neurons"] == {
        name: {"kept": count, "total": 64} for name, count in zip(layers, kept, strict=True)
    }
    heads = [f"{name}.attention.self" for name in layers]
    assert list(report["details"]["head_map"]) == list(report["details"]["heads"]) == heads
    assert "## Neurons" in (ran / "report.md").read_text()
    assert (ran / "report.html").read_text().count('class="stays"') == 3
    assert "feed-forward neurons of" in (ran / "slim" / "README.md").read_text()


def test_the_page_knows_what_the_run_measured(ran: Path) -> None:
    exploration = read_exploration(ran)
    report = json.loads((ran / "report.json").read_text())
    ratio = report["flops"]["slim"] / report["flops"]["dense"]
    assert exploration.flops_ratio(exploration.plan) == pytest.approx(ratio, abs=1e-9)
    assert exploration.ranks_neurons
