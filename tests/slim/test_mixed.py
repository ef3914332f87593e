"""Heads that every layer keeps as many of, beside neurons that layers keep different numbers of."""

import json
from pathlib import Path

import pytest
import torch
from support.cuts import random_cut, random_neurons
from support.families import decoder
from support.models import bert, causal_lm, text_batch
from support.tolerance import assert_near
from transformers import AutoModelForCausalLM, PreTrainedModel

import hies_export
from hies_export import PruningPlan, Selection, apply_plan, find_modules, load, prune, prune_units, save_slim
from hies_export.data.batches import first_output
from hies_export.kinds import ATTENTION, BOTH
from hies_export.slim.check import compare_cut

BATCH = {"input_ids": torch.arange(5, 27).view(2, 11)}
SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3}


def uneven_neurons(
    model: PreTrainedModel, groups: int
) -> tuple[Selection, tuple[hies_export.units.units.PrunableModule, ...]]:
    """Keep as many groups of heads in every layer, and a number of neurons that differs."""
    modules = find_modules(model, BATCH, kinds=BOTH)
    kept = random_neurons(modules, uniform=False)
    for number, module in enumerate(m for m in modules if m.kind == ATTENTION):
        stay = {(number + i) % module.groups for i in range(groups)}
        kept[module.name] = module.kept(u for u in range(module.units) if u // module.group_size in stay)
    return kept, modules


@pytest.mark.parametrize(("groups", "family"), [(2, "llama"), (3, "mistral")])
def test_plain_fields_say_the_heads_and_the_block_the_neurons(groups: int, family: str, tmp_path: Path) -> None:
    dense = causal_lm(**SIZES)
    dense.save_pretrained(tmp_path / "dense")
    kept, modules = uneven_neurons(dense, groups)
    slim = prune_units(dense, kept, modules)
    assert compare_cut(dense, slim, kept, modules, BATCH) < 1e-5
    plan = PruningPlan(kept=kept, criterion="random")
    save_slim(slim, tmp_path / "slim", plan=plan, batch=BATCH)
    apply_plan(plan, tmp_path / "dense", tmp_path / "applied")
    for name in ("slim", "applied"):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["model_type"] == family
        assert [config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")] == [
            2 * groups,
            groups,
            8,
        ]
        block = config["hies_export"]
        assert {key.rpartition(".")[0].rpartition(".")[2] for key in block["linear"]} == {"mlp"}
        assert {key.rpartition(".")[2] for key in block["attributes"]} <= {"mlp"}
        assert {key for fields in block["per_layer_config"].values() for key in fields} == {"intermediate_size"}
        for loaded in (
            load(tmp_path / name),
            AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=True),
        ):
            assert_near(first_output(loaded, BATCH), first_output(slim, BATCH))
            assert {m.config.num_attention_heads for m in loaded.modules() if hasattr(m, "q_proj")} == {2 * groups}


def test_it_can_be_cut_again_unevenly(tmp_path: Path) -> None:
    dense = causal_lm(**SIZES)
    once = prune_units(dense, *uneven_neurons(dense, 3))
    modules = find_modules(once, BATCH, kinds=BOTH)
    kept = random_neurons(modules, uniform=False, seed=1)
    twice = prune_units(once, kept, modules)
    assert len({len(kept[m.name].units) for m in modules if m.kind == ATTENTION}) > 1
    assert compare_cut(once, twice, kept, modules, BATCH) < 1e-5
    save_slim(twice, tmp_path / "slim", plan=PruningPlan(kept=kept, criterion="random"), batch=BATCH)
    # Groups go, then a head of each that is left: what the block says of the groups stays.
    once, _, _ = random_cut(decoder("Phi3")(), BATCH)
    modules = find_modules(once, BATCH, kinds=(ATTENTION,))
    kept = {module.name: module.kept(range(0, module.units, 2)) for module in modules}
    plan = PruningPlan(kept=kept, criterion="random")
    save_slim(prune_units(once, plan, modules), tmp_path / "heads", plan=plan, batch=BATCH)


def test_a_config_that_cannot_say_the_heads_leaves_them_in_the_block() -> None:
    """The width of a BERT's head is that of the model by the number of heads."""
    dense, batch = bert(), text_batch(labels=False)
    modules = find_modules(dense, batch, kinds=BOTH)
    kept = {m.name: m.kept(range(1 if m.kind == ATTENTION else 5 + i)) for i, m in enumerate(modules)}
    slim = prune_units(dense, kept, modules)
    assert compare_cut(dense, slim, kept, modules, batch) < 1e-5
    assert slim.config.num_attention_heads == dense.config.num_attention_heads
    assert {".attention." in key for key in slim.config.hies_export["linear"]} == {True, False}


def test_prune_takes_an_allocation_for_each_kind() -> None:
    batches = [{"input_ids": torch.randint(5, 32, (4, 16))} for _ in range(4)]
    allocation = {"attention": "uniform", "mlp": "global"}
    options = {"modules": BOTH, "criterion": "fisher", "budget": {"flops": 0.6}, "held_out": []}
    result = prune(causal_lm(**SIZES), batches, allocation=allocation, **options)
    heads, neurons = ({len(k.units) for k in result.plan.kept.values() if k.kind == kind} for kind in BOTH)
    assert heads == {result.model.config.num_attention_heads} != {8}
    assert len(neurons) > 1
