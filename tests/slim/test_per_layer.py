"""What the config of an uneven cut says of its layers, in the schema of transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuts import random_cut, random_neurons
from support.families import decoder
from support.models import bert, causal_lm, text_batch
from transformers import AutoConfig, BertForSequenceClassification, LlamaForCausalLM, PreTrainedModel

from hies_export import find_modules, load, prune_units
from hies_export.kinds import ATTENTION, KINDS, MLP

BATCH = {"input_ids": torch.arange(5, 27).view(2, 11)}


def cut(model: PreTrainedModel, *kinds: str, seed: int) -> PreTrainedModel:
    """Cut the model unevenly at random."""
    modules = find_modules(model, BATCH, kinds=kinds)
    return prune_units(model, random_neurons(modules, uniform=False, seed=seed), modules)


def layers_of(model: Any) -> list[tuple[int, int, int]]:
    """Count heads, key/value heads and neurons of every layer by the shapes of its weights."""
    width = model.config.head_dim
    return [
        (
            layer.self_attn.q_proj.out_features // width,
            layer.self_attn.k_proj.out_features // width,
            layer.mlp.up_proj.out_features,
        )
        for layer in model.model.layers
    ]


def test_a_config_that_is_given_it_says_what_every_layer_has(tmp_path: Path) -> None:
    dense = causal_lm(hidden_size=64, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=4)
    once = cut(dense, *KINDS, seed=2)
    neurons_again = cut(once, MLP, seed=3)
    heads_again = cut(neurons_again, ATTENTION, seed=4)
    for number, slim in enumerate((once, neurons_again, heads_again)):
        slim.save_pretrained(tmp_path / str(number))
        config = AutoConfig.from_pretrained(tmp_path / str(number))
        config.per_layer_config = config.hies_export["per_layer_config"]
        said = [(c.num_attention_heads, c.num_key_value_heads, c.intermediate_size) for c in config.per_layer_config]
        assert said == layers_of(slim) == layers_of(load(tmp_path / str(number)))
    assert len(set(layers_of(heads_again))) > 1
    assert layers_of(heads_again) != layers_of(once)


def test_only_what_differs_is_said() -> None:
    dense = causal_lm(num_hidden_layers=3)
    modules = find_modules(dense, BATCH, kinds=(MLP,))
    kept = {module.name: module.kept(range(module.units)) for module in modules}
    kept[modules[1].name] = modules[1].kept(range(5))
    slim = prune_units(dense, kept, modules)
    assert slim.config.hies_export["per_layer_config"] == {"1": {"intermediate_size": 5}}


@pytest.mark.parametrize("make", [bert, decoder("Qwen2")], ids=["bert", "qwen2"])
def test_a_config_without_a_width_of_heads_says_nothing(make: Callable[[], PreTrainedModel]) -> None:
    """By default it is hidden size / heads, so that fewer heads would be wider ones."""
    slim, _, _ = random_cut(make(), text_batch(labels=False))
    assert "per_layer_config" not in slim.config.hies_export
    # Nor after a cut that could be said, because the first one was not.
    modules = find_modules(slim, text_batch(labels=False), kinds=(MLP,))
    again = prune_units(slim, random_neurons(modules, uniform=False), modules)
    assert "per_layer_config" not in again.config.hies_export


@pytest.mark.parametrize(("make", "stock"), [(causal_lm, LlamaForCausalLM), (bert, BertForSequenceClassification)])
def test_why_it_does_not_stand_in_the_config_itself(make: Any, stock: Any, tmp_path: Path) -> None:
    """Where this fails, transformers has learnt to build such a model: then the stock class should be used."""
    make(num_hidden_layers=2).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["per_layer_config"] = {"1": {"num_attention_heads": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="'num_attention_heads' is a per-layer attribute"):
        stock.from_pretrained(tmp_path)
