"""Refitted layers written into a checkpoint on disk, against the same in memory; and those that are refused."""

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import MODELS, batch_for, digests
from support.cuts import random_neurons, random_plan
from support.models import bert, text_batch
from support.runs import hies
from torch import Tensor
from transformers import PreTrainedModel

from hies_export.checkpoint.loading import load
from hies_export.checkpoint.refits import REFIT, digest_tensors, load_refit, read_refit
from hies_export.checkpoint.save import save_slim
from hies_export.checkpoint.settings import complete_settings
from hies_export.errors import PlanError, RequestError
from hies_export.kinds import ATTENTION, KINDS
from hies_export.prunable.find import find_modules
from hies_export.slim.cut import prune_units
from hies_export.stream.apply import apply_plan
from hies_export.units import PrunableModule
from hies_export.values import PruningPlan


def refitted(slim: PreTrainedModel, modules: Sequence[PrunableModule]) -> dict[str, Tensor]:
    """Give every second consumer other numbers, in place, and return its parameters."""
    changed = {}
    for module in modules[::2]:
        for name, parameter in slim.get_submodule(module.consumer).named_parameters(recurse=False):
            with torch.no_grad():
                parameter.copy_(torch.randn_like(parameter))
            changed[f"{module.consumer}.{name}"] = parameter.detach().clone()
    return changed


def compensated(plan: PruningPlan, tensors: dict[str, Tensor], file: Path) -> PruningPlan:
    """Write refitted layers, and return the plan that names them."""
    save_file(tensors, file)
    return replace(plan, compensation={"method": "least_squares", "refit": digest_tensors(tensors)})


@pytest.mark.parametrize(
    ("name", "uniform", "shard", "kinds"),
    [
        *((name, uniform, "50GB", (ATTENTION,)) for name in MODELS for uniform in (False, True)),
        *(("vit, older names", True, "20KB", (ATTENTION,)), ("llama groups", False, "20KB", (ATTENTION,))),
        *((name, False, "50GB", KINDS) for name in ("bert", "gpt2, transposed", "llama bfloat16, tied")),
    ],
)
def test_the_files_are_those_of_the_refitted_model(
    name: str, uniform: bool, shard: str, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    """Older names on disk, fused and transposed weights and merged experts: each consumer is the refitted one."""
    MODELS[name]().save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense")
    modules = find_modules(model, batch_for(model), kinds=kinds)
    plan = PruningPlan("random", kept=random_neurons(modules, uniform=uniform))
    slim = prune_units(model, plan, modules)
    before = {name: tensor.clone() for name, tensor in slim.state_dict().items()}
    plan = compensated(plan, refitted(slim, modules), tmp_path / REFIT)
    slim.save_pretrained(tmp_path / "memory", max_shard_size=shard)
    complete_settings(slim, tmp_path / "memory")
    apply_plan(plan, tmp_path / "dense", tmp_path / "disk", refit=tmp_path / REFIT, max_shard_size=shard)
    assert digests(tmp_path / "disk") == digests(tmp_path / "memory")
    assert PruningPlan.from_file(tmp_path / "disk" / "hies_plan.json") == plan
    again = load(tmp_path / "disk").state_dict()
    changed = {name for name in before if not torch.equal(before[name], again[name])}
    assert changed == set(load_file(tmp_path / REFIT)), "nothing else changes"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """dense/, and a run folder with plan.json and refit.safetensors."""
    bert().save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense")
    modules = find_modules(model, text_batch())
    plan = random_plan(modules, uniform=False)
    slim = prune_units(model, plan, modules)
    (tmp_path / "run").mkdir()
    plan = compensated(plan, refitted(slim, modules), tmp_path / "run" / REFIT)
    (tmp_path / "run" / "plan.json").write_text(plan.to_json())
    slim.save_pretrained(tmp_path / "slim")
    return tmp_path


def test_apply_finds_what_lies_beside_the_plan(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hies("apply", project / "run" / "plan.json", project / "dense", "-o", project / "out") == 0
    assert digests(project / "out") == digests(project / "slim")
    captured = capsys.readouterr()
    assert "refit.safetensors" in captured.out
    assert "NOT refitted" not in captured.err
    shutil.move(project / "run" / REFIT, project / "elsewhere")
    plan, dense = project / "run" / "plan.json", project / "dense"
    assert hies("apply", plan, dense, "-o", project / "named", "--refit", project / "elsewhere") == 0
    assert digests(project / "named") == digests(project / "slim")


@pytest.mark.parametrize("how", ["lost", "--no-refit", "--force"])
def test_without_them_it_is_said_in_every_place(how: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if how == "lost":
        (project / "run" / REFIT).unlink()
    options = [how] if how.startswith("--") else []
    assert hies("apply", project / "run" / "plan.json", project / "dense", "-o", project / "out", *options) == 0
    assert "NOT refitted" in " ".join(capsys.readouterr().err.split())
    assert "**not** refitted here" in (project / "out" / "README.md").read_text()
    written = PruningPlan.from_file(project / "out" / "hies_plan.json")
    assert not written.compensation, "a plan says what the weights beside it are"
    model = load(project / "dense")
    modules = find_modules(model, text_batch())
    prune_units(model, PruningPlan.from_file(project / "run" / "plan.json").kept, modules).save_pretrained(
        project / "cut"
    )
    assert digests(project / "out") | digests(project / "cut") == digests(project / "out")


def test_a_plan_that_was_not_compensated_leaves_a_file_beside_it_alone(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = project / "run" / "plan.json"
    file.write_text(replace(PruningPlan.from_file(file), compensation={}).to_json())
    with caplog.at_level(logging.WARNING):
        assert hies("apply", file, project / "dense", "-o", project / "out") == 0
    assert not [record for record in caplog.records if "refit" in record.getMessage()]
    assert not (project / "out" / "README.md").exists()
    with pytest.raises(PlanError, match="this plan names none, got .*elsewhere"):
        apply_plan(PruningPlan.from_file(file), project / "dense", project / "again", refit=project / "elsewhere")


def test_what_is_read_is_never_replaced(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, dense, out = project / "run" / "plan.json", project / "dense", project / "out"
    of_plan = PruningPlan.from_file(plan)
    layers = load_file(project / "run" / REFIT)
    # As `prune` writes it, with the refitted layers inside.
    save_slim(load(project / "slim"), out, plan=of_plan, batch=text_batch(), refitted=layers)
    assert hies("apply", plan, dense, "-o", out, "--overwrite", "--refit", out / REFIT) == 2
    assert "must not delete what is read" in " ".join(capsys.readouterr().err.split())
    assert (out / REFIT).read_bytes() == (project / "run" / REFIT).read_bytes()


def test_a_method_is_a_word(project: Path) -> None:
    file = project / "run" / "plan.json"
    written = json.loads(file.read_text())
    written["compensation"]["method"] = '<img src="http://x/y.png">'
    file.write_text(json.dumps(written))
    with pytest.raises(PlanError, match="compensation.method"):
        PruningPlan.from_file(file)


@pytest.mark.parametrize("damage", ["another", "cut short", "no tensors", "absent"])
def test_other_refitted_layers_are_refused(damage: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = project / "run" / REFIT
    if damage == "another":
        tensors = load_file(file)
        next(iter(tensors.values())).view(-1)[-1] += 1e-3
        save_file(tensors, file)
    elif damage == "absent":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-4] if damage == "cut short" else b"nothing")
    plan = project / "run" / "plan.json"
    assert hies("apply", plan, project / "dense", "-o", project / "out", "--refit", file) == 2
    assert "refit.safetensors" in " ".join(capsys.readouterr().err.split())
    assert not (project / "out").exists()
    said = {"cut short": "cut short or damaged", "no tensors": "must be a safetensors file"}
    with pytest.raises(RequestError, match=said.get(damage, "refitted layers must be")):
        read_refit(PruningPlan.from_file(plan), file)


@pytest.mark.parametrize("change", ["name", "shape"])
def test_layers_that_do_not_fit_the_model_are_refused(change: str, project: Path) -> None:
    plan = PruningPlan.from_file(project / "run" / "plan.json")
    tensors = load_file(project / "run" / REFIT)
    name = next(name for name in tensors if name.endswith("weight"))
    tensor = tensors.pop(name)
    tensors[name if change == "shape" else "no.such.weight"] = tensor[:, :-1].clone() if change == "shape" else tensor
    plan = compensated(plan, tensors, project / "odd")
    match = "and the model has no such parameter" if change == "name" else r"and the model has \[.*\] there"
    with pytest.raises(PlanError, match=match):
        apply_plan(plan, project / "dense", project / "out", refit=project / "odd")
    model = load(project / "dense")
    slim = prune_units(model, plan.kept, find_modules(model, text_batch()))
    before = {name: tensor.clone() for name, tensor in slim.state_dict().items()}
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
