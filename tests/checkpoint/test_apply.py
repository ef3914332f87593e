"""Cutting a checkpoint by a plan, against rows picked by hand and the cut of the model in memory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from support.checkpoints import MODELS, batch_for, digests
from support.cuts import random_neurons, random_plan
from support.families import decoder
from support.models import bert, save_text_model
from support.runs import hies
from support.tolerance import assert_same_plan

from hies_export import Kept, PruningPlan, apply_plan, find_attention, find_modules, load, prune_units
from hies_export.checkpoint.beside import complete_settings
from hies_export.checkpoint.save import REFIT
from hies_export.errors import PlanError, ReloadMismatchError, RequestError
from hies_export.kinds import ATTENTION, BOTH, MLP
from hies_export.select.fingerprint import digest_tensors, fingerprint


def plan_for(folder: Path) -> PruningPlan:
    model = load(folder)
    return random_plan(find_attention(model, batch_for(model)), uniform=False)


def change_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize(
    ("name", "kinds", "uniform"),
    [
        *((name, (ATTENTION,), False) for name in MODELS),
        *((name, BOTH, True) for name in ("gpt2, transposed", "llama bfloat16, tied")),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_the_files_are_those_of_the_model_in_memory(
    name: str, kinds: tuple[str, ...], uniform: bool, tmp_path: Path
) -> None:
    """Every second consumer is refitted, to random numbers."""
    MODELS[name]().save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense")
    modules = find_modules(model, batch_for(model), kinds=kinds)
    plan = PruningPlan("random", kept=random_neurons(modules, uniform=uniform), model=fingerprint(model, modules))
    slim = prune_units(model, plan, modules)
    refitted = {}
    for module in modules[::2]:
        for parameter, values in slim.get_submodule(module.consumer).named_parameters(recurse=False):
            torch.nn.init.normal_(values)
            refitted[f"{module.consumer}.{parameter}"] = values.detach().clone()
    save_file(refitted, tmp_path / REFIT)
    plan = replace(plan, compensation={"method": "least_squares", "refit": digest_tensors(refitted)})
    slim.save_pretrained(tmp_path / "memory")
    complete_settings(slim, tmp_path / "memory")

    applied = apply_plan(plan, tmp_path / "dense", tmp_path / "applied", refit=tmp_path / REFIT)
    assert digests(tmp_path / "applied") == digests(tmp_path / "memory")
    assert PruningPlan.from_file(tmp_path / "applied" / "hies_plan.json") == plan
    sizes = [sum(p.stat().st_size for p in (tmp_path / n).glob("*.safetensors")) for n in ("dense", "applied")]
    assert [applied.dense_bytes, applied.slim_bytes] == sizes


@pytest.mark.parametrize("kind", BOTH)
def test_rows_and_columns_by_hand(kind: str, tmp_path: Path) -> None:
    """Keep two of three groups of two heads, eight wide, or four of 64 neurons, in the middle layer of three."""
    decoder("Phi3")().save_pretrained(tmp_path / "dense", max_shard_size="30KB")
    neurons = [0, 5, 6, 63]
    if kind == MLP:
        all_of, some, block = Kept(tuple(range(64)), 64, kind=MLP), Kept(tuple(neurons), 64, kind=MLP), "mlp"
        produced, consumed = {"gate_up_proj": [*neurons, *(64 + n for n in neurons)]}, {"down_proj": neurons}
    else:
        all_of, some, block = Kept(tuple(range(6)), 6, 3), Kept((0, 1, 4, 5), 6, 3), "self_attn"
        # Rows of six queries, three keys and three values.
        heads, consumed_heads = (0, 1, 4, 5, 6, 8, 9, 11), (0, 1, 4, 5)
        produced = {"qkv_proj": [head * 8 + i for head in heads for i in range(8)]}
        consumed = {"o_proj": [head * 8 + i for head in consumed_heads for i in range(8)]}
    kept = {f"model.layers.{i}.{block}": some if i == 1 else all_of for i in range(3)}
    apply_plan(PruningPlan("by hand", kept=kept), tmp_path / "dense", tmp_path / "slim")
    dense: dict[str, Any] = {}
    for shard in (tmp_path / "dense").glob("*.safetensors"):
        dense |= load_file(shard)
    slim = load_file(tmp_path / "slim" / "model.safetensors")
    assert dense.keys() == slim.keys()
    for name, tensor in dense.items():
        layer = name.split(".")[-2] if "layers.1." in name else ""
        expected = tensor[produced[layer]] if layer in produced else tensor
        expected = tensor[:, consumed[layer]] if layer in consumed else expected
        assert torch.equal(slim[name], expected)


def test_files_that_are_narrower_than_their_config_stay_so(tmp_path: Path) -> None:
    """Else the slim checkpoint could be larger than its source."""
    bert(num_hidden_layers=2).to(torch.float16).save_pretrained(tmp_path / "dense")
    change_config(tmp_path / "dense", dtype="float32")
    applied = apply_plan(plan_for(tmp_path / "dense"), tmp_path / "dense", tmp_path / "slim")
    assert {t.dtype for t in load_file(tmp_path / "slim" / "model.safetensors").values()} == {torch.float16}
    assert applied.slim_bytes < applied.dense_bytes


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return save_text_model(tmp_path / "dense", num_hidden_layers=2)


def test_a_model_in_the_cache_of_the_hub_needs_no_network(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(dense)
    repository = tmp_path / "hub" / "models--someone--tiny"
    for folder in ("snapshots", "refs"):
        (repository / folder).mkdir(parents=True)
    dense.rename(repository / "snapshots" / "abc")
    (repository / "refs" / "main").write_text("abc")
    (tmp_path / "plan.json").write_text(plan.to_json())
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert constants.HF_HUB_OFFLINE
    assert hies("apply", tmp_path / "plan.json", "someone/tiny", "-o", tmp_path / "slim", "--json") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["heads"]["removed"] == plan.removed
    assert result["bytes"]["slim"] < result["bytes"]["dense"]


def test_a_plan_for_other_weights_is_refused_unless_forced(tmp_path: Path) -> None:
    model = decoder("Llama")()
    modules = find_attention(model, batch_for(model))
    plan = replace(random_plan(modules, uniform=False), model=fingerprint(model, modules))
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(1.01)
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(PlanError, match="those of model.layers.0.self_attn.o_proj differ from"):
        apply_plan(plan, tmp_path / "other", tmp_path / "slim")
    assert not (tmp_path / "slim").exists()
    apply_plan(plan, tmp_path / "other", tmp_path / "slim", force=True)
    written = PruningPlan.from_file(tmp_path / "slim" / "hies_plan.json")
    assert_same_plan(written, replace(plan, model=fingerprint(model, modules)))


def test_a_checkpoint_that_does_not_load_again_replaces_none(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, slim = plan_for(dense), tmp_path / "slim"
    apply_plan(plan, dense, slim)
    apply_plan(plan, dense, slim, overwrite=True)
    whole = digests(slim)

    def differ(*_: object) -> None:
        raise ReloadMismatchError("another model")

    monkeypatch.setattr("hies_export.checkpoint.save.check_reload", differ)
    with pytest.raises(ReloadMismatchError, match="another model"):
        apply_plan(plan, dense, slim, overwrite=True)
    assert digests(slim) == whole
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense", "slim"]


def test_a_quantised_checkpoint(dense: Path, tmp_path: Path) -> None:
    plan = plan_for(dense)
    change_config(dense, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(RequestError, match="is quantised; give the checkpoint that it was made from"):
        apply_plan(plan, dense, tmp_path / "slim")
