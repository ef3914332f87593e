"""What find_mlp says of known layouts, that its cuts equal the masked model, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from support.cuts import random_neurons
from support.families import architecture, decoder, gpt2
from support.models import bert, image_batch, llava, text_batch, vit
from torch import Tensor
from transformers import PreTrainedModel

from hies_export.checkpoint.save import save_slim
from hies_export.kinds import KINDS, MLP
from hies_export.prunable.find import find_modules
from hies_export.prunable.mlp import find_mlp
from hies_export.slim.check import compare_cut, first_output, max_abs
from hies_export.slim.config import is_slim
from hies_export.slim.cut import prune_units
from hies_export.slim.mask import masked_units
from hies_export.values import PruningPlan

Batch = dict[str, Tensor]


def llava_batch() -> Batch:
    ids = torch.cat([torch.full((2, 16), 4), torch.randint(5, 32, (2, 6))], dim=1)  # 4 is the token of a patch
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 16, 16)}


def text() -> Batch:
    return text_batch(labels=False)


def images() -> Batch:
    return image_batch(labels=False)


def side_by_side(neuron: int) -> set[int]:
    return {neuron, 64 + neuron}


def one_to_one(neuron: int) -> set[int]:
    return {neuron}


class Layout:
    """A model with what its modelling code says of its first block, written down by hand."""

    def __init__(
        self,
        make: Callable[[], PreTrainedModel],
        batch: Callable[[], Batch],
        blocks: int,
        name: str,
        consumer: str,
        producers: tuple[str, ...],
        rows: Callable[[int], set[int]] = one_to_one,
    ):
        self.make, self.batch, self.blocks, self.rows = make, batch, blocks, rows
        self.name, self.consumer, self.producers = name, consumer, producers


LAYOUTS = {
    "bert": Layout(bert, text, 3, "bert.encoder.layer.0", ".output.dense", (".intermediate.dense",)),
    "vit": Layout(vit, images, 3, "vit.layers.0.mlp", ".fc2", (".fc1",)),
    "llama, gated": Layout(decoder("Llama"), text, 3, "model.layers.0.mlp", ".down_proj", (".gate_proj", ".up_proj")),
    "phi3, gate and up fused": Layout(
        decoder("Phi3"), text, 3, "model.layers.0.mlp", ".down_proj", (".gate_up_proj",), side_by_side
    ),
    "gpt2, transposed": Layout(gpt2, text, 3, "transformer.h.0.mlp", ".c_proj", (".c_fc",)),
    "opt, relu": Layout(
        architecture("OPT", "ForCausalLM", ffn_dim=64, word_embed_proj_dim=48),
        text,
        3,
        "model.decoder.layers.0",
        ".fc2",
        (".fc1",),
    ),
    "distilbert": Layout(
        architecture("DistilBert", dim=48, n_heads=6, n_layers=3, hidden_dim=64),
        text,
        3,
        "distilbert.transformer.layer.0.ffn",
        ".lin2",
        (".lin1",),
    ),
    "albert, one layer called three times": Layout(
        architecture("Albert", embedding_size=16),
        text,
        1,
        "albert.encoder.albert_layer_groups.0.albert_layers.0",
        ".ffn_output",
        (".ffn",),
    ),
    "nemotron, squared relu": Layout(
        decoder("Nemotron", head_dim=8, hidden_act="relu2"), text, 3, "model.layers.0.mlp", ".down_proj", (".up_proj",)
    ),
    "llava, both towers": Layout(llava, llava_batch, 5, "model.vision_tower.encoder.layers.0.mlp", ".fc2", (".fc1",)),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


def test_features_of_neurons(layout: Layout) -> None:
    found = find_mlp(layout.make(), layout.batch())
    assert len(found) == layout.blocks
    first = found[0]
    assert (first.name, first.kind, first.unit_width, first.groups) == (layout.name, MLP, 1, first.units)
    assert first.key_width is None
    assert first.consumer == layout.name + layout.consumer
    assert first.producers == tuple(layout.name + producer for producer in layout.producers)
    for part in first.slices:
        assert all(set(part.indices([neuron]).tolist()) == layout.rows(neuron) for neuron in range(first.units))


@pytest.mark.parametrize("kinds", [(MLP,), KINDS], ids=["neurons", "both"])
@pytest.mark.parametrize("uniform", [False, True], ids=["uneven", "uniform"])
def test_cut_equals_masked_and_comes_back(layout: Layout, kinds: Iterable[str], uniform: bool, tmp_path: Path) -> None:
    model, batch = layout.make(), layout.batch()
    modules = find_modules(model, batch, kinds=tuple(kinds))
    assert len({module.name for module in modules}) == len(modules)
    plan = PruningPlan(kept=random_neurons(modules, uniform=uniform), criterion="random")
    slim = prune_units(model, plan, modules)
    assert compare_cut(model, slim, plan, modules, batch) < 1e-5
    with masked_units(model, plan, modules):
        assert max_abs(first_output(model, batch), first_output(slim, batch)) < 1e-5
    assert max_abs(first_output(model, batch), first_output(slim, batch)) > 1e-4
    again = find_modules(slim, batch, kinds=tuple(kinds))
    assert [m.units for m in again] == [len(plan.kept[m.name].units) for m in modules]
    if kinds == (MLP,):
        assert is_slim(slim) == (not uniform and len(modules) > 1)
    assert save_slim(slim, tmp_path / "slim", plan=plan, batch=batch) < 1e-5
