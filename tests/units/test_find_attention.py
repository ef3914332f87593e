"""What find_attention says of known layouts, and that cuts of them equal the masked model."""

import pytest
import torch
from support.cuts import plan_of
from support.families import architecture
from support.models import text_batch

from hies_export import PrunableModule, Scores, compare_cut, find_attention, prune_units
from hies_export.units.units import Slice


def block(start: int, width: int, count: int, stride: int | None = None) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(range(start + h * (stride or width), start + h * (stride or width) + width)) for h in range(count)
    )


def owned(part: Slice, module: PrunableModule) -> tuple[tuple[int, ...], ...]:
    """Of every head the rows it owns, ascending."""
    owners = module.groups if part.per_group else module.units
    return tuple(tuple(sorted(part.indices([owner]).tolist())) for owner in range(owners))


# What the modelling code of each says, written down by hand: heads of width 8, six of them, three key/value heads.
LAYOUTS = {
    "separate": (
        architecture("Llama", "ForCausalLM", num_key_value_heads=3),
        [("q_proj", block(0, 8, 6), ()), ("k_proj", (), block(0, 8, 3)), ("v_proj", (), block(0, 8, 3))],
    ),
    "fused side by side": (
        architecture("Phi3", "ForCausalLM", num_key_value_heads=3),
        [("qkv_proj", block(0, 8, 6), tuple(k + v for k, v in zip(block(48, 8, 3), block(72, 8, 3), strict=True)))],
    ),
    "fused head by head": (
        architecture("GPTNeoX", "ForCausalLM"),
        [("query_key_value", block(0, 8, 6, 24), block(8, 16, 6, 24))],
    ),
    "fused, transposed": (
        architecture("GPT2", "LMHeadModel"),
        [("c_attn", block(0, 8, 6), tuple(k + v for k, v in zip(block(48, 8, 6), block(96, 8, 6), strict=True)))],
    ),
    "latent, with keys shared by the heads": (
        architecture(
            "DeepseekV3",
            "ForCausalLM",
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=4,
            qk_nope_head_dim=8,
            v_head_dim=10,
            num_key_value_heads=6,
            first_k_dense_replace=3,
        ),
        [("q_b_proj", block(0, 12, 6), ()), ("kv_b_proj", (), block(0, 18, 6))],
    ),
    "gated": (
        architecture(
            "Qwen3Next",
            "ForCausalLM",
            head_dim=8,
            num_key_value_heads=3,
            layer_types=["full_attention"] * 3,
            mlp_only_layers=[0, 1, 2],
        ),
        [("q_proj", block(0, 16, 6), ()), ("k_proj", (), block(0, 8, 3)), ("v_proj", (), block(0, 8, 3))],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_features_of_heads_are_found_and_their_cut_equals_the_masked_model(name: str) -> None:
    make_model, expected = LAYOUTS[name]
    model, batch = make_model(), text_batch(labels=False)
    modules = find_attention(model, batch)
    assert len(modules) == 3
    for module in modules:
        found = {
            (part.tensor.removeprefix(module.name + "."), part.per_group): owned(part, module) for part in module.slices
        }
        wanted = {
            (n, per_group): rows
            for n, query, shared in expected
            for per_group, rows in ((False, query), (True, shared))
        }
        assert found == {key: rows for key, rows in wanted.items() if rows}
        assert module.consumer.startswith(module.name)
    scores = Scores("random", {}, {module.name: torch.rand(module.units) for module in modules})
    for unit in ("group", "query") if modules[0].group_size > 1 else ("query",):
        plan = plan_of(scores, modules, heads=0.34, unit=unit)
        slim = prune_units(model, plan, modules)
        assert compare_cut(model, slim, plan, modules, batch) < 1e-5
        counts = [(len(k.units), len(k.kept_groups)) for k in plan.kept.values()]
        assert [(s.units, s.groups) for s in find_attention(slim, batch)] == counts
        if unit == "query" and modules[0].group_size > 1:
            assert [groups for _, groups in counts] == [module.groups for module in modules]
