"""Statistics of neurons beside heads against loops over samples, with masks that autograd differentiates."""

from collections.abc import Callable

import pytest
import torch
from support.generative import padded
from support.models import bert, causal_lm, image_batch, llama, opt, text_batch, vit
from support.neurons import neurons, one_by_one
from torch import Tensor
from transformers import PreTrainedModel

from hies_export.calibrate.collect import collect_statistics
from hies_export.prunable.attention import find_attention
from hies_export.prunable.find import find_modules
from hies_export.units import PrunableModule

Batches = list[dict[str, Tensor]]


def text_batches() -> Batches:
    batches = [text_batch(4, 12), text_batch(3, 9)]
    # Decoders find the last token by the padding's number.
    return [batch | {"input_ids": batch["input_ids"] * batch["attention_mask"]} for batch in batches]


CASES: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[], Batches]]] = {
    "bert with padding": (bert, text_batches),
    "vit": (vit, lambda: [image_batch(4), image_batch(3)]),
    "gated, grouped": (lambda: llama(intermediate_size=48), text_batches),
    "language model": (lambda: causal_lm(intermediate_size=48), lambda: [padded([9, 4, 6, 8], "right")]),
    "flattened tokens": (opt, text_batches),
}


def naive(
    model: PreTrainedModel, modules: list[PrunableModule], batches: Batches
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return HIS, Fisher information and mean |x_u| per unit: one sample at a time, without padding."""
    masks = {m.name: torch.ones(m.units, requires_grad=True) for m in modules}
    read: dict[str, list[Tensor]] = {m.name: [] for m in modules}
    handles = []
    for module in modules:

        def gate(layer: torch.nn.Module, x: tuple[Tensor, ...], module: PrunableModule = module) -> tuple[Tensor]:
            units = x[0].unflatten(-1, (module.units, module.unit_width))
            read[module.name].append(units.detach().flatten(0, -3).double())
            return ((units * masks[module.name][:, None]).flatten(-2),)

        handles.append(model.get_submodule(module.consumer).register_forward_pre_hook(gate))
    his = {m.name: torch.zeros(m.units, dtype=torch.float64) for m in modules}
    fisher = {name: torch.zeros_like(total) for name, total in his.items()}
    samples = 0
    for one in one_by_one(batches):
        gradients = torch.autograd.grad(model(**one).loss, list(masks.values()))
        for name, gradient in zip(masks, gradients, strict=True):
            his[name] += gradient.double().abs()
            fisher[name] += gradient.double() ** 2
        samples += 1
    for handle in handles:
        handle.remove()
    size = {name: torch.cat(tokens).norm(dim=-1).mean(0) for name, tokens in read.items()}
    return *({name: total / samples for name, total in values.items()} for values in (his, fisher)), size  # type: ignore[return-value]


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-3, atol=1e-4 * values.abs().max().item())


@pytest.mark.parametrize("case", CASES)
def test_his_and_fisher_are_those_of_a_loop_over_samples(case: str) -> None:
    make, make_batches = CASES[case]
    model, batches = make(), make_batches()
    modules = [*find_attention(model, batches[0]), *neurons(model)]
    found = collect_statistics(model, batches, modules, needs=["activation_l2"])
    his, fisher, size = naive(model, modules, batches)
    assert_close(found["his"], his)
    assert_close(found["fisher"], fisher)
    assert_close(found["activation_l2"], size)
    assert set(found["entropy"]) == {m.name for m in modules if m.kind == "attention"}
    # Neurons that are all alike would hide a permutation.
    assert all(values.std() > 0 for values in his.values())
    # Each kind alone is what it is beside the other.
    for kind in ("attention", "mlp"):
        alone = collect_statistics(model, batches, [m for m in modules if m.kind == kind])
        assert_close(alone["fisher"], {m.name: fisher[m.name] for m in modules if m.kind == kind})


def test_weight_norms_of_neurons_are_sums_over_rows_and_columns() -> None:
    for model, batch, producers, consumer in (
        (bert(), text_batch(), ["intermediate.dense"], "output.dense"),
        (llama(), text_batch(padding=False), ["mlp.gate_proj", "mlp.up_proj"], "mlp.down_proj"),
    ):
        modules = find_modules(model, batch, kinds=("mlp",))
        found = collect_statistics(model, [batch], modules)["weight_l2"]
        for number, module in enumerate(modules):
            layer = model.get_submodule(module.consumer.removesuffix(f".{consumer}"))
            assert str(number) in module.consumer
            for neuron in (0, 5, module.units - 1):
                total = (layer.get_submodule(consumer).weight[:, neuron].double() ** 2).sum()
                for producer in producers:
                    total = total + (layer.get_submodule(producer).weight[neuron].double() ** 2).sum()
                assert found[module.name][neuron].item() == pytest.approx(total.sqrt().item(), rel=1e-6)
