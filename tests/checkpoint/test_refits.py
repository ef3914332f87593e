"""The refitted layers beside a plan: found, and refused if they are another plan's, damaged or another model's."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import digests
from support.cuts import random_cut
from support.models import bert, text_batch
from support.runs import hies

from hies_export import PlanError, PruningPlan, load, save_slim
from hies_export.checkpoint.save import REFIT, load_refit, read_refit
from hies_export.select.fingerprint import digest_tensors


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dense/, a run folder with plan.json and refit.safetensors, and slim/ with its refitted layers."""
    folder = tmp_path_factory.mktemp("made")
    bert(num_hidden_layers=2).save_pretrained(folder / "dense")
    slim, plan, modules = random_cut(load(folder / "dense"), text_batch())
    layers = {f"{m.consumer}.weight": torch.randn_like(slim.get_submodule(m.consumer).weight) for m in modules}
    slim.load_state_dict(layers, strict=False)
    (folder / "run").mkdir()
    save_file(layers, folder / "run" / REFIT)
    plan = replace(plan, compensation={"method": "least_squares", "refit": digest_tensors(layers)})
    (folder / "run" / "plan.json").write_text(plan.to_json())
    save_slim(slim, folder / "slim", plan=plan, batch=text_batch(), refitted=layers)
    return folder


@pytest.fixture
def project(made: Path, tmp_path: Path) -> Path:
    """A copy of them to change."""
    return shutil.copytree(made, tmp_path / "project")


def forget(plan: Path) -> None:
    """Make a plan that of a model that was not refitted."""
    plan.write_text(replace(PruningPlan.from_file(plan), compensation={}).to_json())


def test_they_are_found_beside_the_plan_or_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, dense, slim = project / "run" / "plan.json", project / "dense", project / "slim"
    want = digests(slim)
    # As `prune` writes it, with the refitted layers inside.
    assert hies("apply", plan, dense, "-o", slim, "--overwrite", "--refit", slim / REFIT) == 2
    assert "must not delete what is read" in " ".join(capsys.readouterr().err.split())
    assert digests(slim) == want
    del want[REFIT]
    assert hies("apply", plan, dense, "-o", project / "out") == 0
    captured = capsys.readouterr()
    assert REFIT in captured.out
    assert "NOT refitted" not in captured.err
    assert digests(project / "out") == want
    shutil.move(project / "run" / REFIT, project / "elsewhere")
    assert hies("apply", plan, dense, "-o", project / "named", "--refit", project / "elsewhere") == 0
    assert digests(project / "named") == want


@pytest.mark.parametrize("how", ["lost", "--no-refit", "--force", "not compensated"])
def test_what_was_not_refitted_is_said(how: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, out, said = project / "run" / "plan.json", project / "out", how != "not compensated"
    if how == "lost":
        (project / "run" / REFIT).unlink()
    elif not said:
        forget(plan)
    options = [how] if how.startswith("--") else []
    assert hies("apply", plan, project / "dense", "-o", out, *options) == 0
    assert ("NOT refitted" in " ".join(capsys.readouterr().err.split())) is said
    assert not PruningPlan.from_file(out / "hies_plan.json").compensation, "a plan says what the weights beside it are"
    cut, found = random_cut(load(project / "dense"), text_batch())[0].state_dict(), load(out).state_dict()
    assert all(torch.equal(cut[name], found[name]) for name in cut)


NO_TENSORS = "must be a safetensors file, but .* is none: (SafetensorError|FileNotFoundError)"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "another": (lambda file: save_file({n: t + 1e-3 for n, t in load_file(file).items()}, file), "whose digest is"),
    "not of this plan": (lambda file: forget(file.with_name("plan.json")), "this plan names none"),
    "cut short": (lambda file: file.write_bytes(file.read_bytes()[:-4]), NO_TENSORS),
    "absent": (Path.unlink, NO_TENSORS),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_others_are_refused(damage: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plan = project / "run" / REFIT, project / "run" / "plan.json"
    change, said = DAMAGE[damage]
    change(file)
    with pytest.raises(PlanError, match=said):
        read_refit(PruningPlan.from_file(plan), file)
    assert hies("apply", plan, project / "dense", "-o", project / "out", "--refit", file) == 2
    assert REFIT in capsys.readouterr().err
    assert not (project / "out").exists()


@pytest.mark.parametrize("change", ["name", "shape"])
def test_layers_that_do_not_fit_the_model_change_nothing(change: str, project: Path) -> None:
    tensors = load_file(project / "run" / REFIT)
    name, tensor = tensors.popitem()
    tensors |= {name: tensor[:, :-1].clone()} if change == "shape" else {"no.such.weight": tensor}
    save_file(tensors, project / "odd")
    plan = PruningPlan.from_file(project / "run" / "plan.json")
    plan = replace(plan, compensation={"method": "least_squares", "refit": digest_tensors(tensors)})
    slim = random_cut(load(project / "dense"), text_batch())[0]
    before = {name: tensor.clone() for name, tensor in slim.state_dict().items()}
    match = "and the model has no such parameter" if change == "name" else r"and the model has \[.*\] there"
    with pytest.raises(PlanError, match=match):
        load_refit(slim, read_refit(plan, project / "odd"))
    assert all(torch.equal(before[name], tensor) for name, tensor in slim.state_dict().items())


def test_the_digest_is_of_names_dtypes_shapes_and_numbers() -> None:
    one = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    others = [
        {"a": one["a"], "c": one["b"]},
        {"a": one["a"].view(3, 2), "b": one["b"]},
        {"a": one["a"].view(torch.int32), "b": one["b"]},
        {"a": one["a"] + 1, "b": one["b"]},
        {"a": one["a"]},
    ]
    assert digest_tensors(dict(reversed(one.items()))) == digest_tensors(one)
    assert len({digest_tensors(tensors) for tensors in (one, *others)}) == len(others) + 1
