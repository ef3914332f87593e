"""Uniform cuts that a LLaMA's own config refuses, written as a Mistral, which computes the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.architectures import tiny
from support.cuts import random_neurons
from support.models import causal_lm, shake
from support.tolerance import assert_near
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from hies_export import PruningPlan, apply_plan, compare_cut, find_modules, load, prune_units, save_slim
from hies_export.data.batches import first_output
from hies_export.kinds import BOTH
from hies_export.model.copies import convert
from hies_export.slim.config import as_mistral, is_slim

TASKS = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "Model")


ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything else": {
        **{"tie_word_embeddings": True, "head_dim": 16, "rms_norm_eps": 1e-3, "hidden_act": "gelu"},
        "rope_parameters": {**ROPE, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
}
# Ten heads in five groups at width 80: six heads, which are left of them, do not divide it.
ODD = {"hidden_size": 80, "num_attention_heads": 10, "num_key_value_heads": 5}
BATCH = {"input_ids": torch.arange(5, 27).view(2, 11), "attention_mask": torch.tensor([[1] * 11, [0] * 3 + [1] * 8])}


def uniform_cut(dense: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[PreTrainedModel, PruningPlan]:
    """Remove a third of the groups and of the neurons of every layer."""
    modules = find_modules(dense, batch, kinds=BOTH)
    plan = PruningPlan(kept=random_neurons(modules, uniform=True), criterion="random")
    slim = prune_units(dense, plan, modules)
    assert compare_cut(dense, slim, plan, modules, batch) < 1e-4
    return slim, plan


@pytest.mark.parametrize(
    ("task", "variant"), [("ForCausalLM", "everything else"), *((task, "plain") for task in TASKS)]
)
def test_both_families_compute_the_same(task: str, variant: str) -> None:
    stock, dimensions = getattr(transformers, f"Llama{task}"), tiny("llama")[0].config.to_dict()
    torch.manual_seed(0)
    model = shake(stock(stock.config_class.from_dict({**dimensions, **VARIANTS[variant]})))
    twin = as_mistral(model, {0: {}})
    assert type(twin) is getattr(transformers, f"Mistral{task}")
    # Not visible in short texts: a window of 4,096 tokens is Mistral's default.
    assert twin.config.sliding_window is None
    assert_near(first_output(twin, BATCH), first_output(model, BATCH))
    assert [id(p) for p in twin.parameters()] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize(
    ("task", "fields"),
    [
        ("ForCausalLM", {"attention_bias": True}),
        ("ForQuestionAnswering", {}),  # its base model has another name in LLaMA than in Mistral
    ],
)
def test_what_mistral_does_not_compute_keeps_its_family_and_its_code(task: str, fields: dict[str, Any]) -> None:
    config = LlamaConfig(**ODD, vocab_size=32, num_hidden_layers=1, intermediate_size=32, **fields)
    slim, _ = uniform_cut(shake(getattr(transformers, f"Llama{task}")(config)), BATCH)
    assert (is_slim(slim), slim.config.model_type) == (True, "llama")


def test_the_folder_is_plain_by_every_way_and_goes_on(tmp_path: Path) -> None:
    causal_lm(**ODD, head_dim=8, tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    dense = load(tmp_path / "dense")
    dense.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    slim, plan = uniform_cut(dense, BATCH)
    assert [n for n, p in slim.named_parameters() if not p.requires_grad] == ["model.layers.0.mlp.up_proj.weight"]
    assert (slim.dtype, slim.training, slim.lm_head.weight is slim.model.embed_tokens.weight) == (
        *(torch.bfloat16, False, True),
    )
    save_slim(slim, tmp_path / "slim", plan=plan, batch=BATCH)
    said = json.loads((tmp_path / "slim" / "config.json").read_text())
    assert (said["model_type"], said["architectures"], said["sliding_window"], said["head_dim"]) == (
        *("mistral", ["MistralForCausalLM"], None, 8),
    )
    assert (said["num_attention_heads"], said["num_key_value_heads"], said["intermediate_size"]) == (6, 3, 21)
    assert not {"hies_export", "auto_map", "mlp_bias", "pretraining_tp", "per_layer_config"} & said.keys()
    assert not (tmp_path / "slim" / "modeling_hies.py").exists()
    want = first_output(convert(slim, dtype=torch.float32), BATCH)
    for loaded in (load(tmp_path / "slim"), AutoModelForCausalLM.from_pretrained(tmp_path / "slim")):
        assert type(loaded) is transformers.MistralForCausalLM
        assert_near(first_output(loaded.float(), BATCH), want)

    # From disk to disk, the same bytes.
    apply_plan(plan, tmp_path / "dense", tmp_path / "applied")
    files = {file.name for file in (tmp_path / "slim").iterdir()}
    assert files == {file.name for file in (tmp_path / "applied").iterdir()}
    for name in files:
        assert (tmp_path / "slim" / name).read_bytes() == (tmp_path / "applied" / name).read_bytes(), name

    # Pruned again, unevenly and uniformly.
    again = load(tmp_path / "applied", dtype=torch.float32)
    modules = find_modules(again, BATCH, kinds=BOTH)
    for uniform, family, code in ((True, "mistral", False), (False, "mistral", True)):
        twice = PruningPlan(kept=random_neurons(modules, uniform=uniform, seed=1), criterion="random")
        slimmer = prune_units(again, twice, modules)
        assert compare_cut(again, slimmer, twice, modules, BATCH) < 1e-4
        assert (slimmer.config.model_type, is_slim(slimmer)) == (family, code)
        save_slim(slimmer, tmp_path / f"twice-{uniform}", plan=twice, batch=BATCH)
    ids = again.generate(**BATCH, max_new_tokens=4, do_sample=False)
    assert torch.equal(ids, slim.float().generate(**BATCH, max_new_tokens=4, do_sample=False))
