"""Checkpoints as transformers 4 leaves them, made by hand, against the dense model with the same heads masked."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import gpt2
from support.models import bert, image_batch, shake, text_batch, vit
from support.tolerance import assert_near
from transformers import PreTrainedModel, ViTModel

import hies_export
from hies_export import Kept, PrunableModule, PruningPlan, find_attention, masked_units, prune_units
from hies_export.checkpoint.load import load_version4
from hies_export.cli.main import main
from hies_export.data.batches import first_output
from hies_export.errors import RequestError

PRUNED = {0: [1, 4], 2: [0, 2, 3, 5]}  # of 6 heads in each of 3 layers, 8 wide
# Names of layers as transformers 4 writes them: heads are rows of the former, and columns of the latter.
ROWS = {
    "bert": ["bert.encoder.layer.{}.attention.self." + n for n in ("query", "key", "value")],
    "vit": ["vit.encoder.layer.{}.attention.attention." + n for n in ("query", "key", "value")],
}
COLUMNS = {name: rows[0].rpartition(".attention.")[0] + ".attention.output.dense" for name, rows in ROWS.items()}
COLUMNS["vit"] = "vit.encoder.layer.{}.attention.output.dense"


def vit_alone() -> PreTrainedModel:
    """A base model: its tensors have no prefix, so transformers does not rename them for a class from outside."""
    return shake(ViTModel(vit().config))


def save_pruned(model: PreTrainedModel, folder: Path, pruned: dict[int, list[int]] = PRUNED) -> Path:
    """Save a model as transformers 4 does after `model.prune_heads(pruned)`."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    prefix = f"{model.config.model_type}." if model.base_model is model else ""
    for layer, heads in pruned.items():
        stay = torch.tensor([f for h in range(6) if h not in heads for f in range(8 * h, 8 * h + 8)])
        for name in ROWS[model.config.model_type]:
            for kind in ("weight", "bias"):
                key = f"{name.format(layer)}.{kind}".removeprefix(prefix)
                weights[key] = weights[key][stay].contiguous()
        key = (COLUMNS[model.config.model_type].format(layer) + ".weight").removeprefix(prefix)
        weights[key] = weights[key][:, stay].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, {str(layer): heads for layer, heads in pruned.items()})
    return folder


def write_config(folder: Path, pruned: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pruned_heads": pruned}))


def plan_by_hand(modules: Sequence[PrunableModule], pruned: dict[int, list[int]]) -> PruningPlan:
    stay = [tuple(head for head in range(6) if head not in pruned.get(layer, ())) for layer in range(3)]
    return PruningPlan("by hand", kept={m.name: Kept(units, 6) for m, units in zip(modules, stay, strict=True)})


def masked(model: PreTrainedModel, batch: dict[str, torch.Tensor], pruned: dict[int, list[int]]) -> torch.Tensor:
    modules = find_attention(model, batch)
    with masked_units(model, plan_by_hand(modules, pruned), modules):
        return first_output(model, batch)


@pytest.mark.parametrize("make", [bert, vit, vit_alone])
def test_it_loads_as_the_masked_model_and_becomes_a_slim_checkpoint(make: Any, tmp_path: Path) -> None:
    model = make()
    batch = text_batch(labels=False) if make is bert else image_batch(labels=False)
    folder = save_pruned(model, tmp_path / "old")
    with pytest.raises(RuntimeError, match="size mismatch|ignore_mismatched_sizes"):
        type(model).from_pretrained(folder)
    expected = masked(model, batch, PRUNED)
    loaded = hies_export.load(folder)
    torch.testing.assert_close(first_output(loaded, batch), expected, atol=1e-5, rtol=1e-5)
    loaded.save_pretrained(tmp_path / "by hand")
    assert main(["upgrade", str(folder), "-o", str(tmp_path / "slim")]) == 0
    for name in ("by hand", "slim"):
        again = hies_export.load(tmp_path / name)
        assert not hasattr(again.config, "pruned_heads")
        assert_near(first_output(again, batch), first_output(loaded, batch))
    plan = PruningPlan.from_file(tmp_path / "slim" / "hies_plan.json")
    assert [list(kept.units) for kept in plan.kept.values()] == [[0, 2, 3, 5], [0, 1, 2, 3, 4, 5], [1, 4]]


def test_as_many_heads_in_every_layer_need_no_code_where_the_config_can_say_it(tmp_path: Path) -> None:
    pruned = {0: [0, 1], 1: [2, 5], 2: [3, 4]}
    model, batch = vit(), image_batch()
    folder = save_pruned(model, tmp_path / "old", pruned)
    loaded = hies_export.load(folder)
    assert type(loaded) is type(model)
    assert hies_export.load(folder, dtype=torch.float16).dtype == torch.float16
    torch.testing.assert_close(first_output(loaded, batch), masked(model, batch, pruned), atol=1e-5, rtol=1e-5)


def test_fused_projections_too(tmp_path: Path) -> None:
    """GPT-2 has one layer for queries, keys and values, its weight transposed; `prune_units` cuts it for the test."""
    model = gpt2()
    batch = {"input_ids": torch.randint(3, 100, (2, 9))}
    modules = find_attention(model, batch)
    slim = prune_units(model, plan_by_hand(modules, PRUNED), modules)
    model.save_pretrained(tmp_path)
    save_file(
        {k: v.contiguous() for k, v in slim.state_dict().items() if k != "lm_head.weight"},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_config(tmp_path, {"0": [1, 4], "2": [0, 2, 3, 5]})
    torch.testing.assert_close(first_output(hies_export.load(tmp_path), batch), first_output(slim, batch))


@pytest.mark.parametrize(
    ("pruned", "match"),
    [
        ({}, r"must have pruned_heads in its config, but .* has none; load it as is"),
        ({"0": [1]}, "must have the shapes that the config describes"),
        ({"0": [0, 1, 2, 3, 4, 5]}, "kept heads must be at least one of 6, got none"),
    ],
)
def test_bad_pruned_heads_are_refused(pruned: dict[str, list[int]], match: str, tmp_path: Path) -> None:
    folder = save_pruned(bert(), tmp_path / "old")
    write_config(folder, pruned)
    with pytest.raises(RequestError, match=match):
        load_version4(folder)
    assert main(["upgrade", str(folder), "-o", str(tmp_path / "slim")]) == 2
    assert not (tmp_path / "slim").exists()


def test_a_model_that_lost_no_heads_loads_as_it_is(tmp_path: Path) -> None:
    model, batch = bert(), text_batch(labels=False)
    model.save_pretrained(tmp_path)
    write_config(tmp_path, {"0": []})
    assert torch.equal(first_output(hies_export.load(tmp_path), batch), first_output(model, batch))


def test_a_tensor_that_is_missing_is_refused(tmp_path: Path) -> None:
    folder = save_pruned(vit(), tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["vit.encoder.layer.1.attention.attention.key.bias"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RequestError, match=r"every parameter must be in the files, but .* has no vit.layers.1.att"):
        hies_export.load(folder)
