"""What a cut keeps and refuses; that it holds for every architecture is in test_architectures.py."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from support.cuts import random_cut, random_neurons
from support.families import decoder
from support.models import bert, text_batch
from support.tolerance import assert_near
from transformers import PreTrainedModel

from hies_export import find_modules, prune_units
from hies_export.slim.check import compare_cut, first_output

gpt_oss = decoder("GptOss", head_dim=8, num_local_experts=2, num_experts_per_tok=1)


def test_slim_models_can_be_copied_and_pickled() -> None:
    dense, batch = bert(), text_batch()
    slim, _, _ = random_cut(dense, batch)
    for other in (copy.deepcopy(slim), pickle.loads(pickle.dumps(slim))):
        assert type(other) is type(slim)
        assert_near(first_output(other, batch), first_output(slim, batch))


@pytest.mark.parametrize("make", [bert, gpt_oss], ids=["bert", "gpt_oss"])
def test_a_slim_config_says_what_its_modules_have(make: Callable[[], PreTrainedModel]) -> None:
    dense, batch = make(), text_batch(labels=False)
    slim, plan, sites = random_cut(dense, batch)
    said = slim.config.hies_export
    changed = 0
    for site in sites:
        old, new = (model.get_submodule(site.name) for model in (dense, slim))
        name, kept = site.name.removeprefix(f"{dense.base_model_prefix}."), list(plan.kept[site.name].units)
        numbers = {key: number for key, number in vars(new).items() if isinstance(number, int)}
        numbers = {key: number for key, number in numbers.items() if number != vars(old)[key]}
        assert said["attributes"].get(name, {}) == numbers
        changed += len(numbers)
        if make is gpt_oss:  # a number per head, outside of all layers
            assert torch.equal(new.sinks, old.sinks[kept])
            assert new.sinks.requires_grad
            assert said.get("parameters", {}).get(f"{name}.sinks", [site.units]) == [len(kept)]
    assert changed > 0 or make is gpt_oss
    assert compare_cut(dense, slim, plan, sites, batch) < 1e-4


def test_layers_with_the_weight_of_a_cut_one_are_cut_too() -> None:
    model, batch = bert(), text_batch(labels=False)
    made = model.bert.encoder.layer[0].intermediate.dense
    model.other = torch.nn.Linear(made.in_features, made.out_features)
    model.other.weight, model.other.bias = made.weight, made.bias
    modules = find_modules(model, batch, kinds=("mlp",))
    slim = prune_units(model, random_neurons(modules, uniform=False), modules)
    cut = slim.bert.encoder.layer[0].intermediate.dense
    assert slim.other.weight is cut.weight
    assert len(cut.weight) < len(made.weight) == len(model.other.weight)
