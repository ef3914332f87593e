"""What find_mlp says of known layouts, and which plain configs say their cuts."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checkpoints import llava_batch
from support.families import architecture, decoder, gpt2
from support.models import bert, llava, text_batch
from torch import Tensor
from transformers import PreTrainedModel

from hies_export import Kept, PrunableModule, UnsupportedModelError, find_modules, prune_units
from hies_export.kinds import ATTENTION, BOTH, MLP
from hies_export.slim.config import is_slim
from hies_export.units import neurons as mlp
from hies_export.units.heads import tower_of
from hies_export.units.neurons import find_mlp
from hies_export.units.probe import Probe
from hies_export.units.rehearse import ConsumerRehearsal

Batch = dict[str, Tensor]


def text() -> Batch:
    return text_batch(labels=False)


OPT = architecture("OPT", "ForCausalLM", ffn_dim=64, word_embed_proj_dim=48)
DISTILBERT = architecture("DistilBert", dim=48, n_heads=6, n_layers=3, hidden_dim=64)
ALBERT = architecture("Albert", embedding_size=16)
ALBERT_LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.0"
NEMOTRON = decoder("Nemotron", head_dim=8, hidden_act="relu2")
# What the modelling code says, written down by hand: how many blocks, and of the first its name, consumer and producer.
LAYOUTS: dict[str, tuple[Callable[[], PreTrainedModel], int, str, str, str]] = {
    "phi3, gate and up fused": (decoder("Phi3"), 3, "model.layers.0.mlp", "down_proj", "gate_up_proj"),
    "gpt2, transposed": (gpt2, 3, "transformer.h.0.mlp", "c_proj", "c_fc"),
    "opt, relu": (OPT, 3, "model.decoder.layers.0", "fc2", "fc1"),
    "distilbert": (DISTILBERT, 3, "distilbert.transformer.layer.0.ffn", "lin2", "lin1"),
    "albert, one layer called three times": (ALBERT, 1, ALBERT_LAYER, "ffn_output", "ffn"),
    "nemotron, squared relu": (NEMOTRON, 3, "model.layers.0.mlp", "down_proj", "up_proj"),
    "llava, both towers": (llava, 5, "model.vision_tower.encoder.layers.0.mlp", "fc2", "fc1"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_features_of_neurons(layout: str) -> None:
    make, blocks, name, consumer, producer = LAYOUTS[layout]
    found = find_mlp(make(), llava_batch() if make is llava else text())
    assert len(found) == blocks
    first = found[0]
    assert (first.name, first.kind, first.unit_width, first.groups) == (name, MLP, 1, first.units)
    assert first.key_width is None
    assert (first.consumer, first.producers) == (f"{name}.{consumer}", (f"{name}.{producer}",))
    fused = {"phi3, gate and up fused": (0, 64)}.get(layout, (0,))
    for part in first.slices:
        assert all(part.indices([n]).tolist() == [n + start for start in fused] for n in range(first.units))


def test_a_relu_that_is_off_is_seen_through(monkeypatch: pytest.MonkeyPatch) -> None:
    model = architecture("OPT", "ForCausalLM", ffn_dim=512, word_embed_proj_dim=48)()
    batch = {"input_ids": torch.tensor([[5, 6]])}
    assert [module.units for module in find_mlp(model, batch)] == [512] * 3
    # With normal features, a quarter of the neurons are off at both tokens.
    monkeypatch.setattr(mlp, "Probe", lambda model, positive: Probe(model))
    with pytest.raises(UnsupportedModelError, match="fc1 do not make one neuron each"):
        find_mlp(model, batch)


def kept(modules: Iterable[PrunableModule], numbers: Callable[[PrunableModule], int]) -> dict[str, Kept]:
    """Keep the first units of each module, as many as `numbers` says."""
    return {module.name: module.kept(range(numbers(module))) for module in modules}


def test_plain_configs_say_uniform_cuts() -> None:
    def cut(model: PreTrainedModel, batch: Batch, numbers: Callable[[PrunableModule], int], *kinds: str) -> Any:
        modules = find_modules(model, batch, kinds=kinds or (MLP,))
        slim = prune_units(model, kept(modules, numbers), modules)
        return None if is_slim(slim) else slim.config

    assert cut(gpt2(), text(), lambda m: 100).n_inner == 100
    assert cut(decoder("Llama")(), text(), lambda m: 64) is not None
    # A width that happens to be the number of neurons stays.
    config = cut(decoder("Llama", intermediate_size=48)(), text(), lambda m: 20)
    assert (config.intermediate_size, config.hidden_size) == (20, 48)

    config = cut(decoder("Llama")(), text(), lambda m: 40 if m.kind == MLP else 4, *BOTH)
    assert (config.model_type, config.intermediate_size) == ("llama", 40)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    uneven = iter(range(1, 99))
    assert cut(decoder("Llama")(), text(), lambda m: 40 if m.kind == ATTENTION else next(uneven), MLP) is None
    heads = iter((2, 4, 6))
    assert cut(decoder("Llama")(), text(), lambda m: 40 if m.kind == MLP else next(heads), *BOTH) is None
    config = cut(llava(), llava_batch(), lambda m: 20 if "vision" in m.name else 12)
    assert (config.vision_config.intermediate_size, config.text_config.intermediate_size) == (20, 12)


def test_blocks_belong_to_towers() -> None:
    model = llava()
    towers = [tower_of(model, module) for module in find_mlp(model, llava_batch())]
    assert towers == ["vision"] * 3 + ["language"] * 2
    assert {tower_of(bert(), module) for module in find_mlp(bert(), text())} == {"language"}


def test_a_second_call_of_a_consumer_blames_its_own_module() -> None:
    modules = [PrunableModule(name=name, units=2, unit_width=1, consumer=name) for name in "ab"]
    probe: Any = SimpleNamespace(run=lambda batch, before: [before((name, 0), torch.zeros(1, 1)) for name in "aba"])
    dense: Any = SimpleNamespace(reads={}, outputs=(0.0, 0.0))
    rehearsal = ConsumerRehearsal(dense, probe, lambda module: module.kept([0]), modules)
    rehearsal.compare({})
    assert [module.name for module, _ in rehearsal.mismatches] == ["a", "b", "a"]
