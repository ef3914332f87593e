"""What a run that removes heads and neurons writes: report.json against its plan and its slim model."""

import json
from pathlib import Path

import pytest
from support.runs import run_project

from hies_export.studies.explore import read_exploration


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a budget of FLOPs over both kinds."""
    prune = {"modules": ["attention", "mlp"], "criterion": "his", "budget": {"flops": 0.8}}
    return run_project(tmp_path_factory.mktemp("project"), train=40, validation=20, prune=prune)


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
