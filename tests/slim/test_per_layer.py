"""What the config of an uneven cut says of its layers, in the schema of transformers."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuts import random_neurons
from support.families import architecture, decoder, gpt2
from support.models import bert, causal_lm, text_batch
from support.tolerance import assert_near
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.utils import logging as of_transformers

from hies_export import PruningPlan, find_modules, load, prune_units, save_slim
from hies_export.data.batches import first_output
from hies_export.kinds import ATTENTION, BOTH, MLP

TOP = ("per_layer_config", "allow_global_per_layer_attribute_access")
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


def test_only_what_differs_is_said() -> None:
    dense = causal_lm(num_hidden_layers=3)
    modules = find_modules(dense, BATCH, kinds=(MLP,))
    kept = {module.name: module.kept(range(module.units)) for module in modules}
    kept[modules[1].name] = modules[1].kept(range(5))
    slim = prune_units(dense, kept, modules)
    assert slim.config.hies_export["per_layer_config"] == {"1": {"intermediate_size": 5}}


def said(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """Save a model, and return its config as the file has it."""
    model.save_pretrained(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def wide(**options: object) -> PreTrainedModel:
    return causal_lm(hidden_size=64, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=4, **options)


def test_every_save_says_it_where_servers_read_it(tmp_path: Path) -> None:
    slim = cut(wide(), *BOTH, seed=2)
    once = said(slim, tmp_path / "once")
    assert [once[key] for key in TOP] == [once["hies_export"]["per_layer_config"], True]
    assert {key for fields in once["per_layer_config"].values() for key in fields} == {
        *("num_attention_heads", "num_key_value_heads", "intermediate_size")
    }
    trusted = AutoModelForCausalLM.from_pretrained(tmp_path / "once", trust_remote_code=True)
    for number, loaded in enumerate((load(tmp_path / "once"), trusted)):
        assert_near(first_output(loaded, BATCH), first_output(slim, BATCH))
        assert said(loaded, tmp_path / str(number)) == once
        loaded.config.save_pretrained(tmp_path / "config")
        assert json.loads((tmp_path / "config" / "config.json").read_text())["per_layer_config"] == once[TOP[0]]
    neurons_again = cut(load(tmp_path / "once"), MLP, seed=3)
    heads_again = cut(neurons_again, ATTENTION, seed=4)
    for number, model in enumerate((slim, neurons_again, heads_again)):
        model.save_pretrained(tmp_path / str(number))
        layers = AutoConfig.from_pretrained(tmp_path / str(number)).per_layer_config
        read = [(c.num_attention_heads, c.num_key_value_heads, c.intermediate_size) for c in layers]
        assert read == layers_of(model) == layers_of(load(tmp_path / str(number)))
    assert len({*layers_of(heads_again)}) > 1
    assert layers_of(heads_again) != layers_of(slim)


@pytest.fixture
def warnings_of_reads() -> Iterator[list[str]]:
    """What transformers warns of while fields are read; it warns of each once in a process."""
    logger = logging.getLogger("transformers.integrations.heterogeneity.configuration_utils")
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    of_transformers.warning_once.cache_clear()
    yield found
    logger.removeHandler(handler)
    logger.setLevel(before)
    of_transformers.warning_once.cache_clear()


def test_nothing_warns_of_what_is_read_of_a_config(warnings_of_reads: list[str], tmp_path: Path) -> None:
    slim = cut(wide(), *BOTH, seed=2)
    kept = {module.name: module.kept(range(module.units)) for module in find_modules(slim, BATCH, kinds=BOTH)}
    save_slim(slim, tmp_path / "slim", plan=PruningPlan(kept=kept, criterion="random"), batch=BATCH)
    loaded = load(tmp_path / "slim")
    loaded.generate(BATCH["input_ids"], max_new_tokens=4, do_sample=False)
    cut(loaded, *BOTH, seed=3).save_pretrained(tmp_path / "again")
    assert not loaded.config.is_heterogeneous
    assert loaded.config.num_attention_heads == 8
    assert warnings_of_reads == []


def test_layers_that_differed_before_are_left_as_they_are(tmp_path: Path) -> None:
    own = {"1": {"attention_dropout": 0.1}}
    dense = wide(per_layer_config=own, allow_global_per_layer_attribute_access=True)
    slim = cut(dense, *BOTH, seed=2)
    assert "per_layer_config" not in slim.config.hies_export
    assert said(slim, tmp_path / "once")["per_layer_config"] == own
    assert said(load(tmp_path / "once"), tmp_path / "twice")["per_layer_config"] == own


def test_a_config_that_refuses_it_does_not_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(cls: type, fields: dict[str, Any], **options: Any) -> None:
        raise ValueError("heads must be alike" if "per_layer_config" in fields else "unexpected")

    monkeypatch.setattr(LlamaConfig, "from_dict", classmethod(refuse))
    config = said(cut(wide(), *BOTH, seed=2), tmp_path)
    assert not {*TOP} & config.keys()
    assert config["hies_export"]["per_layer_config"]


def test_neurons_have_the_name_that_the_config_gives_them() -> None:
    dense = architecture("DistilBert", hidden_dim=64)()
    modules = find_modules(dense, text_batch(labels=False), kinds=(MLP,))
    slim = prune_units(dense, random_neurons(modules, uniform=False), modules)
    assert {name for fields in slim.config.to_dict()["per_layer_config"].values() for name in fields} == {"hidden_dim"}


@pytest.mark.parametrize("make", [bert, decoder("Qwen2")], ids=["bert", "qwen2"])
def test_a_config_without_a_width_of_heads_gets_the_dense_one(
    make: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    """Without one, readers divide the width of the model by the number of heads: fewer heads would be wider."""
    dense = make()
    width = dense.config.hidden_size // dense.config.num_attention_heads
    slim = cut(dense, *BOTH, seed=0)
    assert getattr(dense.config, "head_dim", None) is None
    assert said(slim, tmp_path)["head_dim"] == width
    layers = AutoConfig.from_pretrained(tmp_path).per_layer_config
    heads = [module.units for module in find_modules(slim, BATCH, kinds=(ATTENTION,))]
    assert [layer.num_attention_heads for layer in layers] == heads
    assert min(heads) < max(heads) == dense.config.num_attention_heads  # so a layer loses neurons alone


def test_a_config_whose_fields_say_less_says_nothing() -> None:
    """A GPT-2 has four neurons for each feature of its width, unless its config says otherwise."""
    dense, batch = gpt2(), text_batch(labels=False)
    modules = find_modules(dense, batch, kinds=BOTH)
    slim = prune_units(dense, random_neurons(modules, uniform=False), modules)
    assert "per_layer_config" not in slim.config.hies_export
    # Nor after a cut that could be said, because the first one was not.
    modules = find_modules(slim, batch, kinds=(ATTENTION,))
    again = prune_units(slim, random_neurons(modules, uniform=False), modules)
    assert not {*TOP} & {*again.config.to_dict(), *again.config.hies_export}


def test_a_field_that_means_something_else_is_not_named() -> None:
    """In a mixture of experts, `intermediate_size` may be that of an expert while another block was cut."""
    dense = wide()
    dense.config.intermediate_size += 1
    assert "per_layer_config" not in cut(dense, MLP, seed=2).config.hies_export
