"""What a run saves: the dtype and the bytes of its checkpoint, and the refitted layers that make `apply` repeat it."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import metadata_load
from safetensors.torch import load_file
from support.loading import load_pruning
from support.models import save_project, save_text_model
from support.runs import hies, without_tracing
from support.tolerance import assert_near, assert_same_plan
from transformers import PreTrainedModel

from hies_export import PruningPlan, PruningRecipe, Report, load
from hies_export.checkpoint.save import REFIT
from hies_export.evaluate.predict import predict
from hies_export.pipeline import run as running
from hies_export.pipeline.pruning import Pruning
from hies_export.pipeline.stages import compare


@pytest.fixture(scope="module")
def evaluated() -> list[PreTrainedModel]:
    """The slim model that the run of `project` evaluated."""
    return []


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, evaluated: list[PreTrainedModel]) -> Path:
    """A project with a model in float16, which was run with compensation into out/."""
    folder = save_project(
        tmp_path_factory.mktemp("project"),
        train=40,
        validation=20,
        calibration={"samples": 8, "batch_size": 4},
        prune={"alpha": 0.5, "budget": {"heads": 0.4}, "compensation": {"samples": 32}},
        measure={"runtimes": ["torch"], "shapes": [[2, 16]], "repeats": 2},
    )
    save_text_model(folder / "model", num_hidden_layers=2)
    load(folder / "model").half().save_pretrained(folder / "model")
    for name in ("LICENSE", "notice.txt", "USE_POLICY.md", "vocab.txt", "notes.txt"):
        (folder / "model" / name).write_text(f"the dense model's {name}")
    (folder / "model" / "README.md").write_text("---\nlicense: mit\n---\nthe dense model's")

    def compared(pruning: Pruning, slim: PreTrainedModel, **how: Any) -> Any:
        evaluated.append(slim)
        return compare(pruning, slim, **how)

    with pytest.MonkeyPatch.context() as patch, without_tracing():
        patch.setattr(running, "compare", compared)
        assert hies("run", folder / "recipe.yaml") == 0
    return folder


@pytest.fixture(scope="module")
def pruned(project: Path) -> Path:
    """The folder that `hies-export prune` writes for the same recipe."""
    assert hies("prune", project / "recipe.yaml", "-o", project / "pruned") == 0
    return project / "pruned"


ROUNDED = 1e-3  # of the largest weight: the last bit of float16, in which refitted weights are saved


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir() if file.is_file()}


def test_a_slim_checkpoint_has_the_dtype_of_its_source(project: Path) -> None:
    report = Report.from_file(project / "out")
    slim = project / "out" / "slim"
    assert {tensor.dtype for tensor in load_file(weights(slim)).values()} == {torch.float16}
    assert report.bytes.dense == weights(project / "model").stat().st_size
    assert report.bytes.slim == weights(slim).stat().st_size < report.bytes.dense
    assert report.reload_max_abs < 1e-5
    assert report.cut_max_abs < 1e-5, "in float32"


def test_what_is_evaluated_is_what_was_saved(project: Path, evaluated: list[PreTrainedModel]) -> None:
    """The model that is judged, exported and timed has the numbers of the files, in float32."""
    saved = load(project / "out" / "slim", dtype=torch.float32)
    assert_near(evaluated[0].state_dict(), saved.state_dict())
    prepared = load_pruning(PruningRecipe.from_yaml(project / "recipe.yaml"))
    judge = prepared.judge(prepared.rows.evaluation)
    quality = judge.of(predict(saved, prepared.rows.evaluation))
    report = Report.from_file(project / "out")
    assert report.quality.slim == quality.metrics[report.quality.metric]
    assert report.stability == quality.stability


def test_the_licence_and_the_vocabulary_come_along(project: Path, pruned: Path) -> None:
    for slim in (project / "out" / "slim", pruned):
        for name in ("LICENSE", "notice.txt", "USE_POLICY.md", "vocab.txt"):
            assert (slim / name).read_text() == f"the dense model's {name}"
        assert not (slim / "notes.txt").exists()
        card = (slim / "README.md").read_text()
        assert metadata_load(slim / "README.md")["license"] == "mit"
        assert "the dense model's" not in card


def test_apply_gives_the_bytes_of_a_compensated_run(project: Path, tmp_path: Path) -> None:
    """All but what a run adds: the card, the graphs, and a tokenizer saved by itself."""
    out = project / "out"
    refit = load_file(out / REFIT)
    assert {tensor.dtype for tensor in refit.values()} == {torch.float16}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in refit} == {"dense"}, "consumers only"
    assert hies("apply", out / "plan.json", project / "model", "-o", tmp_path / "slim") == 0
    one, other = digests(out / "slim"), digests(tmp_path / "slim")
    same = {name for name in one if one[name] == other.get(name)}
    assert same >= {"model.safetensors", "config.json", "modeling_hies.py", "hies_plan.json"}
    assert one.keys() - same <= {"README.md", "tokenizer.json", "tokenizer_config.json"}


def test_prune_writes_the_refitted_layers_with_its_plan(project: Path, pruned: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", REFIT):
        first = project / "out" / ("slim" if name != REFIT else "") / name
        assert_near(load_file(pruned / name), load_file(first), within=ROUNDED)
    assert load(pruned).dtype == torch.float16, "what lies beside the weights is not read"
    assert hies("apply", pruned / "hies_plan.json", project / "model", "-o", tmp_path / "again") == 0
    assert weights(tmp_path / "again").read_bytes() == weights(pruned).read_bytes()


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        (["save_dtype=bfloat16"], torch.bfloat16),
        (["dtype=float32"], torch.float32),
        (["dtype=float32", "save_dtype=auto"], torch.float16),
    ],
)
def test_a_recipe_says_otherwise(fields: list[str], dtype: torch.dtype, project: Path, tmp_path: Path) -> None:
    settings = [part for field in fields for part in ("--set", field)]
    assert hies("prune", project / "recipe.yaml", "-o", tmp_path / "slim", *settings) == 0
    assert load(tmp_path / "slim").dtype == dtype
    larger = weights(tmp_path / "slim").stat().st_size > weights(project / "model").stat().st_size
    assert larger is (dtype == torch.float32)


def test_a_refit_that_the_dtype_cannot_hold_is_refused(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def huge(pruning: Pruning, choice: object, slim: torch.nn.Module) -> list[object]:
        with torch.no_grad():
            slim.classifier.bias.fill_(1e6)
        return []

    monkeypatch.setattr("hies_export.pipeline.stages._refit", huge)
    assert hies("prune", project / "recipe.yaml", "-o", tmp_path / "slim") == 1
    assert "too large for float16; set save_dtype" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "slim").exists()


def test_score_chooses_the_plan_of_prune_and_says_what_for(project: Path, pruned: Path, tmp_path: Path) -> None:
    assert hies("score", project / "recipe.yaml", "-o", tmp_path / "scored") == 0
    written = json.loads((tmp_path / "scored" / "plan.json").read_text())
    assert written["compensation"] == {"method": "least_squares"}
    plans = (PruningPlan.from_file(file) for file in (tmp_path / "scored/plan.json", pruned / "hies_plan.json"))
    assert_same_plan(*(replace(plan, compensation={}) for plan in plans))
