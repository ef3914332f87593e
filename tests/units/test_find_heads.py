"""Heads of models whose attention is code of their own, against layouts written down by hand."""

import pytest
import torch
from support.architectures import tiny
from support.cuts import random_plan
from support.models import SIX_HEADS, shake, text_batch
from transformers import (
    BigBirdConfig,
    BigBirdModel,
    DebertaV2Config,
    DebertaV2Model,
    MPNetConfig,
    MPNetModel,
)

from hies_export import RecipeError, collect_statistics, find_attention, prune_units, score_units
from hies_export.errors import UnsupportedModelError
from hies_export.slim.check import compare_cut
from hies_export.units.units import PrunableModule

SMALL = SIX_HEADS | {"vocab_size": 100, "max_position_embeddings": 64}
RELATIVE = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}


def rows_of(module: PrunableModule, layer: str, head: int) -> list[int]:
    """Return the rows of a layer that a head owns, by the last part of the layer's name."""
    parts = [part for part in module.slices if part.tensor.endswith(f".{layer}")]
    return sorted(int(i) for part in parts for i in part.indices([head]))


@pytest.mark.parametrize(
    ("options", "producers"),
    [
        (RELATIVE | {"share_att_key": True}, {"query_proj", "key_proj", "value_proj"}),
        (RELATIVE, {"query_proj", "key_proj", "value_proj", "pos_key_proj", "pos_query_proj"}),
        (RELATIVE | {"pos_att_type": ["c2p"]}, {"query_proj", "key_proj", "value_proj", "pos_key_proj"}),
    ],
)
def test_positions_of_a_deberta_belong_to_its_heads(options: dict[str, object], producers: set[str]) -> None:
    model = shake(DebertaV2Model(DebertaV2Config(**(SMALL | options)))).eval()
    batch = text_batch(3, 10)
    del batch["labels"]
    modules = find_attention(model, batch)
    for module in modules:
        assert (module.units, module.unit_width, module.consumer[-12:]) == (6, 8, "output.dense")
        assert {name.rpartition(".")[2] for name in module.producers} == producers
        assert all(rows_of(module, layer, 2) == list(range(16, 24)) for layer in producers)
    plan = random_plan(modules, uniform=False)
    assert compare_cut(model, prune_units(model, plan, modules), plan, modules, batch) < 1e-5


def test_layers_take_their_heads_of_a_bias_that_they_share() -> None:
    model = shake(MPNetModel(MPNetConfig(**SMALL))).eval()
    batch = {name: tensor for name, tensor in text_batch(3, 10).items() if name in ("input_ids", "attention_mask")}
    modules = find_attention(model, batch)
    assert [module.narrowed for module in modules] == [{"position_bias": (1, 6)}] * 3
    kept = {
        module.name: module.kept(units) for module, units in zip(modules, [(0, 2, 5), (1, 3, 4, 5), (2,)], strict=True)
    }
    once = prune_units(model, kept, modules)
    compare_cut(model, once, kept, modules, batch)
    assert once.encoder.relative_attention_bias.weight.shape[1] == 6
    # The heads of a slim model are numbered anew, and its layers take what is left of the bias.
    again = find_attention(once, batch)
    assert [module.units for module in again] == [3, 4, 1]
    fewer = {module.name: module.kept(units) for module, units in zip(again, [(1, 2), (0, 3), (0,)], strict=True)}
    twice = prune_units(once, fewer, again)
    both = {module.name: module.kept(units) for module, units in zip(modules, [(2, 5), (1, 5), (2,)], strict=True)}
    assert twice.config.hies_export["narrowed"]["encoder.layer.1.attention.attn"] == {"position_bias": [1, 6, [1, 5]]}
    compare_cut(model, twice, both, modules, batch)


def test_a_layer_whose_bias_others_take_keeps_its_heads() -> None:
    names = [module.name for module in find_attention(*tiny("t5"))]
    assert names == [
        "encoder.block.1.layer.0.SelfAttention",
        "decoder.block.1.layer.0.SelfAttention",
        "decoder.block.1.layer.1.EncDecAttention",
    ]


def test_criteria_that_need_maps_are_refused_for_a_model_that_returns_none() -> None:
    model, batch = tiny("yoso")
    modules = find_attention(model, batch)
    statistics = collect_statistics(model, [batch], modules)
    assert score_units(statistics, criterion="his").scores.keys() == {module.name for module in modules}
    with pytest.raises(RecipeError, match="hies needs the entropy of attention maps, which this model does not return"):
        score_units(statistics, criterion="hies")


def test_a_model_that_replaces_its_modules_while_it_runs_is_refused() -> None:
    # BigBird takes another attention for short texts, from then on.
    model = BigBirdModel(BigBirdConfig(**SMALL)).eval()
    with pytest.raises(UnsupportedModelError, match="replaces modules of its own while it runs"):
        find_attention(model, {"input_ids": torch.randint(3, 90, (2, 12))})
