"""Models that no checkpoint has: what is refused, what is found all the same, and that finding changes nothing."""

from collections.abc import Callable

import pytest
import torch
import transformers
from support.architectures import tiny
from support.cuts import random_neurons
from support.families import SMALL, architecture, decoder
from support.models import bert, image_batch, shake, text_batch, vit
from torch import Tensor, nn
from transformers import PreTrainedModel

from hies_export import RequestError, UnsupportedModelError, compare_cut, find_modules, prune_units
from hies_export.kinds import ATTENTION, BOTH, MLP
from hies_export.units.neurons import find_mlp
from hies_export.units.probe import Probe
from hies_export.units.reads import signature
from hies_export.units.units import AttributeCount


def text() -> dict[str, Tensor]:
    return text_batch(labels=False)


def test_no_weight_is_read_and_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    reseeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", reseeded.append)  # which torch.manual_seed calls
    for make, batch in ((bert, text_batch()), (vit, image_batch())):
        model = make().train()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        expected = find_modules(model, batch, kinds=BOTH)
        assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
        assert model.training
        assert all(p.requires_grad and p.grad is None for p in model.parameters())
        assert not any("forward" in vars(module) for module in model.modules())
        assert find_modules(model.to("meta"), batch, kinds=BOTH) == expected
        assert model.device.type == "meta"
    large = {"hidden_size": 8192, "num_attention_heads": 64, "vocab_size": 10**5, "intermediate_size": 28672}
    with torch.device("meta"):
        huge = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SMALL | large)))
    found = find_modules(huge, text(), kinds=BOTH)
    assert [module.units for module in found] == [64] * 3 + [28672] * 3
    assert not reseeded
    assert all(torch.equal(part.owner, torch.arange(28672)) for module in found[3:] for part in module.slices)


class Around(nn.Module):
    """A layer with something in front of it."""

    def __init__(self, before: Callable[[Tensor], Tensor], layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer = before, layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.before(x))


class Scale(nn.Module):
    """A factor for each neuron."""

    def __init__(self, size: tuple[int, ...]) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Shuffled(nn.Linear):
    """Not the layer it looks like."""


class Mlp(nn.Module):
    """A feed-forward block in ways that no model of transformers has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.neurons = kind, 64
        self.up, self.down = nn.Linear(48, 128 if kind == "interleaved" else 64), nn.Linear(64, 48)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.kind == "interleaved":
            up = up[..., ::2].sigmoid() * up[..., 1::2]
        if self.kind == "counted":
            up = up.reshape(-1, self.neurons).tanh().view(up.shape)
        if self.kind == "reversed":
            up = up.flip(-1).tanh()
        if self.kind == "leaky":
            return self.down(up.tanh()) + up[..., :48]
        return self.down(up)


class Twice(nn.Module):
    """Two layers that read the same."""

    def __init__(self, one: nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x)


def shuffled(layer: nn.Module) -> nn.Module:
    layer.__class__ = Shuffled
    return layer


def in_parts(parts: int, layer: nn.Module) -> nn.Module:
    """Return a layer in front of which the code says of how many parts of eight features its inputs are."""
    return Around(lambda x: x.reshape(*x.shape[:-1], parts, 8).flatten(-2), layer)


# What is changed in a layer of a LLaMA, and what takes its place.
CHANGES: dict[str, tuple[str, Callable[[nn.Module], nn.Module]]] = {
    "norm over neurons": ("mlp.down_proj", lambda down: nn.Sequential(nn.LayerNorm(64), down)),
    "softmax": ("mlp.act_fn", lambda _: nn.Softmax(-1)),
    "adapted layer": ("mlp.gate_proj", shuffled),
    "fixed number of neurons": ("mlp.down_proj", lambda down: in_parts(8, down)),
    "no block": ("mlp", lambda _: nn.Linear(48, 48)),
    "scaled": ("mlp.down_proj", lambda down: Around(Scale((64,)), down)),
    "scaled in columns": ("mlp.down_proj", lambda down: Around(Scale((1, 64)), down)),
    "adapted queries": ("self_attn.q_proj", shuffled),
    "norm across heads": ("self_attn.o_proj", lambda output: nn.Sequential(nn.LayerNorm(48), output)),
    "two readers": ("self_attn.o_proj", Twice),
    "fixed number of heads": ("self_attn.o_proj", lambda output: in_parts(6, output)),
}


def changed(change: str) -> PreTrainedModel:
    """Return a LLaMA whose second layer is changed; one without a block has none in any layer."""
    torch.manual_seed(0)
    model = architecture("Llama", "ForCausalLM")()
    path, make = CHANGES.get(change, ("mlp", lambda _: Mlp(change)))
    owner, _, name = path.rpartition(".")
    for layer in model.model.layers if change == "no block" else model.model.layers[1:2]:
        parent = layer.get_submodule(owner)
        setattr(parent, name, make(getattr(parent, name)))
    return shake(model)


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        (MLP, "norm over neurons", r"mixed \(by a norm.*in front of model.layers.1.mlp.down_proj.1"),
        (MLP, "softmax", r"gate_proj and model.layers.1.mlp.up_proj are mixed .* model.layers.1.mlp.down_proj"),
        (MLP, "adapted layer", "up_proj makes also depend on features .* front of model.layers.1.mlp.down"),
        (MLP, "fixed number of neurons", r"with fewer neurons the code of LlamaMLP \(model.layers.1.mlp\) does not do"),
        (MLP, "leaky", "features of model.layers.1.mlp.up do more than make neurons in front of model.layers.1.mlp.d"),
        (MLP, "no block", r"LlamaForCausalLM \(llama\) has no feed-forward block in its layers whose neurons"),
        (MLP, "scaled in columns", "factor has values for every neuron, but not in rows, .*down_proj.layer"),
        (ATTENTION, "adapted queries", "query heads do not have features of their own in model.layers.0.mlp"),
        (ATTENTION, "norm across heads", "the heads do not reach model.layers.1.self_attn.o_proj.1 side by side"),
        (ATTENTION, "two readers", "o_proj.one and model.layers.1.self_attn.o_proj.other all read the att"),
        (ATTENTION, "fixed number of heads", "with fewer heads the code of LlamaAttention .* does not do"),
    ],
)
def test_what_would_be_cut_wrongly_is_refused(kind: str, change: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        find_modules(changed(change), text(), kinds=(kind,))


@pytest.mark.parametrize("change", ["scaled", "interleaved", "counted", "reversed"])
def test_other_ways_to_compute_a_block(change: str) -> None:
    model, batch = changed(change), text()
    modules = find_mlp(model, batch)
    block = modules[1]
    assert block.parameters == (("model.layers.1.mlp.down_proj.before.factor",) if change == "scaled" else ())
    counting = {"scaled": "intermediate_size", "counted": "neurons"}.get(change)
    assert dict(block.attributes) == ({counting: AttributeCount("units")} if counting else {})
    rows = {neuron: set(block.slices[0].indices([neuron]).tolist()) for neuron in range(64)}
    expected = {"interleaved": lambda n: {2 * n, 2 * n + 1}, "reversed": lambda n: {63 - n}}.get(change, lambda n: {n})
    assert rows == {neuron: expected(neuron) for neuron in range(64)}
    selection = random_neurons(modules, uniform=False)
    slim = prune_units(model, selection, modules)
    assert compare_cut(model, slim, selection, modules, batch) < 1e-5
    assert [m.units for m in find_mlp(slim, batch)] == [len(kept.units) for kept in selection.values()]


def test_what_is_no_block_stays_alone() -> None:
    model = changed("linear")  # with no activation, the two layers are one of low rank
    assert [module.name for module in find_mlp(model, text())] == ["model.layers.0.mlp", "model.layers.2.mlp"]
    swin, pixels = tiny("swinv2")
    consumers = [module.consumer for module in find_mlp(swin, pixels)]
    assert all(name.endswith("output.dense") for name in consumers)  # and no network of position biases


def test_experts_and_an_unknown_kind_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"a mixture of experts.* model.layers.0.mlp.experts \(Mixtral"):
        find_mlp(decoder("Mixtral", num_local_experts=3)(), text())
    with pytest.raises(RequestError, match="kinds must be among attention, mlp, got 'heads'"):
        find_modules(bert(), text(), kinds=("attention", "heads"))


def test_masked_and_huge_numbers_do_not_hide_a_change() -> None:
    logits = torch.tensor([1.0, -torch.inf, 3e38, 2e38])
    same, other = signature(logits), signature(logits + torch.tensor([0.0, 0.0, -1e38, 0.0]))
    assert same == signature(logits)
    assert all(abs(number) < float("inf") for number in same + other)
    assert same != other


def test_a_module_may_call_a_number_its_config() -> None:
    model = bert()
    model.bert.encoder.layer[0].config = 0.5  # as the cross-attention of IDEFICS does with its dropout
    assert Probe(model).model.bert.encoder.layer[0].config == 0.5
