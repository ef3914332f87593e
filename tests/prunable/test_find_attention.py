"""What find_attention says of known layouts, and that it reads no weight."""

from __future__ import annotations

import pytest
import torch
import transformers
from support.cuts import plan_of
from support.families import SMALL, architecture
from support.models import bert, image_batch, shake, text_batch, vit
from torch import nn
from transformers import PreTrainedModel

from hies_export.errors import PlanError, UnsupportedModelError
from hies_export.prunable.attention import find_attention
from hies_export.slim.check import check_selection, compare_cut
from hies_export.slim.cut import prune_units
from hies_export.slim.fingerprint import fingerprint
from hies_export.units import Kept, PrunableModule, Slice
from hies_export.values import Scores


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
def test_features_of_heads(name: str) -> None:
    make_model, expected = LAYOUTS[name]
    model = make_model()
    sites = find_attention(model, text_batch(labels=False))
    assert len(sites) == 3
    for site in sites:
        found = {(part.tensor.removeprefix(site.name + "."), part.per_group): owned(part, site) for part in site.slices}
        wanted = {
            (n, per_group): rows
            for n, query, shared in expected
            for per_group, rows in ((False, query), (True, shared))
        }
        assert found == {key: rows for key, rows in wanted.items() if rows}
        assert site.consumer.startswith(site.name)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("unit", ["group", "query"])
def test_cut_equals_masked(name: str, unit: str) -> None:
    model, batch = LAYOUTS[name][0](), text_batch()
    sites = find_attention(model, batch)
    scores = Scores("random", {}, {s.name: torch.rand(s.units) for s in sites})
    plan = plan_of(scores, sites, heads=0.34, unit=unit)
    slim = prune_units(model, plan, sites)
    assert compare_cut(model, slim, plan, sites, batch) < 1e-5
    counts = [(len(k.units), len(k.kept_groups)) for k in plan.kept.values()]
    assert [(s.units, s.groups) for s in find_attention(slim, batch)] == counts
    if unit == "query":
        assert all(kv == site.groups for (_, kv), site in zip(counts, sites, strict=True) if site.group_size > 1)


def test_no_weight_is_read() -> None:
    for make, batch in ((bert, text_batch()), (vit, image_batch())):
        model = make()
        expected = find_attention(model, batch)
        assert find_attention(model.to("meta"), batch) == expected
        assert model.device.type == "meta"
    with torch.device("meta"):
        config = transformers.LlamaConfig(
            **(SMALL | {"hidden_size": 8192, "num_attention_heads": 64, "vocab_size": 10**5})
        )
        huge = transformers.LlamaForCausalLM(config)
    assert [site.units for site in find_attention(huge, text_batch())] == [64] * 3


def test_the_model_is_left_alone() -> None:
    model, batch = bert().train(), text_batch()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    find_attention(model, batch)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())


class _Shuffled(nn.Linear):
    """Not the layer it looks like."""


def broken(change: str) -> PreTrainedModel:
    model = architecture("Llama", "ForCausalLM")()
    attention = model.model.layers[1].self_attn
    if change == "adapted layer":
        attention.q_proj.__class__ = _Shuffled
    elif change == "norm across heads":
        attention.o_proj = nn.Sequential(nn.LayerNorm(48), attention.o_proj)
    elif change == "two readers":

        class Twice(nn.Module):
            def __init__(self, one: nn.Module) -> None:
                super().__init__()
                self.one, self.other = one, nn.Linear(48, 48)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.one(x) + self.other(x)

        attention.o_proj = Twice(attention.o_proj)
    elif change == "fixed number of heads":

        class Fixed(nn.Module):
            def __init__(self, one: nn.Module) -> None:
                super().__init__()
                self.one = one

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.one(x.reshape(*x.shape[:-1], 6, 8).flatten(-2))

        attention.o_proj = Fixed(attention.o_proj)
    return shake(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("adapted layer", "query heads do not have features of their own in model.layers.0.mlp"),
        ("norm across heads", "the heads do not reach model.layers.1.self_attn.o_proj.1 side by side"),
        ("two readers", "o_proj.one and model.layers.1.self_attn.o_proj.other all read the attention output"),
        (
            "fixed number of heads",
            r"with fewer heads the code of LlamaAttention \(model.layers.1.self_attn\) does not do",
        ),
    ],
)
def test_what_would_be_cut_wrongly_is_refused(change: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        find_attention(broken(change), text_batch(labels=False))


def test_plans_that_break_groups_are_refused() -> None:
    model = LAYOUTS["separate"][0]()
    sites = find_attention(model, text_batch(labels=False))
    whole = Kept(tuple(range(6)), 6, 3)

    def selection(*units: int) -> dict[str, Kept]:
        return {s.name: whole for s in sites} | {sites[0].name: Kept(units, 6, 3)}

    check_selection(selection(0, 2, 5), sites)
    with pytest.raises(PlanError, match=r"as many query heads as the others.*\[2, 1, 2\] per key/value head"):
        check_selection(selection(0, 1, 2, 4, 5), sites)


def test_a_plan_for_other_weights_is_refused() -> None:
    model, other = LAYOUTS["separate"][0](), LAYOUTS["separate"][0]()
    sites = find_attention(model, text_batch(labels=False))
    scores = Scores("random", {}, {s.name: torch.rand(s.units) for s in sites})
    plan = plan_of(scores, sites, heads=0.34, model=fingerprint(model, sites))
    prune_units(model.to(torch.bfloat16), plan, sites)
    torch.manual_seed(1)
    with pytest.raises(PlanError, match=r"those of .*self_attn.* differ .* make a plan"):
        prune_units(shake(other), plan, sites)
