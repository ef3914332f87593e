"""Statistics of heads and neurons against eager attention and masks, one unpadded sample at a time."""

import math
from collections.abc import Callable

import pytest
import torch
from support.architectures import tiny
from support.contract import labelled
from support.generative import padded, with_images
from support.models import bert, causal_lm, image_batch, llama, llava, opt, text_batch, vit, zero_padding
from support.neurons import neurons, one_by_one
from support.references import naive_statistics
from torch import Tensor
from transformers import PreTrainedModel

from hies_export import DataError, NonFiniteError, collect_statistics, find_attention, find_modules

Batches = list[dict[str, Tensor]]


def assert_equal_scores(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-4, atol=1e-6)


LABEL_SETS = {"problem_type": "multi_label_classification"}


def regression_batches() -> Batches:
    return [batch | {"labels": torch.randn(len(batch["labels"]))} for batch in (text_batch(4, 10), text_batch(3, 7))]


def of_label_sets(batches: Batches, labels: int = 3) -> Batches:
    return [batch | {"labels": torch.randint(0, 2, (len(batch["labels"]), labels)).float()} for batch in batches]


def with_answers(side: str) -> Batches:
    return [padded([9, 6, 5], side, answers=[2, 5, 1])]


def decoder() -> PreTrainedModel:
    return causal_lm(intermediate_size=48)


CASES: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[], Batches]]] = {
    "classes": (bert, lambda: [text_batch(4, 10), text_batch(3, 7), text_batch(2, 9, padding=False)]),
    "regression": (lambda: bert(num_labels=1), regression_batches),
    "label sets": (lambda: bert(**LABEL_SETS), lambda: of_label_sets([text_batch(4, 10), text_batch(3, 7)])),
    "yes or no": (lambda: bert(**LABEL_SETS, num_labels=1), lambda: of_label_sets([text_batch(4, 10)], 1)),
    "vit": (vit, lambda: [image_batch(4), image_batch(2)]),
    "gated, grouped": (lambda: llama(intermediate_size=48), lambda: [zero_padding(text_batch(4, 12))]),
    "flattened tokens": (opt, lambda: [zero_padding(text_batch(4, 12)), zero_padding(text_batch(3, 9))]),
    "blocks": (decoder, lambda: [padded([8, 8, 8], "right"), padded([8], "right")]),
    "answers right": (decoder, lambda: with_answers("right")),
    "answers left": (decoder, lambda: with_answers("left")),
    "llava": (llava, lambda: [with_images(batch) for side in ("left", "right") for batch in with_answers(side)]),
}


@pytest.mark.parametrize("case", CASES)
def test_statistics_equal_the_naive_reference(case: str) -> None:
    make, make_batches = CASES[case]
    model, batches = make(), make_batches()
    heads, blocks = find_attention(model, batches[0]), neurons(model)
    found = collect_statistics(model, batches, [*heads, *blocks], needs=["activation_l2"])
    sizes = [len(batch["labels"]) for batch in batches]
    assert (found.calibration.labels, found.calibration.samples) == ("data", sum(sizes))
    expected = naive_statistics(model, [*one_by_one(batches)], [*heads, *blocks])
    for what, of_modules in expected.items():
        assert set(found[what]) == set(of_modules)
        for name, values in of_modules.items():
            torch.testing.assert_close(found[what][name], values, rtol=1e-3, atol=1e-4 * values.abs().max().item())
    for what in ("his", "entropy"):
        assert_equal_scores(found[what], {module.name: expected[what][module.name] for module in heads})
    # Units that are all alike would hide a permutation; LLaVA takes the last but one layer of its image tower.
    alike = [name for name, values in expected["his"].items() if not values.std() > 0]
    assert ["vision" in name for name in alike] == [True] * (2 if make is llava else 0)
    for kind in (heads, blocks):  # each alone is what it is beside the other
        alone = collect_statistics(model, batches, kind)
        assert_equal_scores(alone["fisher"], {module.name: found["fisher"][module.name] for module in kind})


@pytest.mark.parametrize("model_type", ["deberta-v2", "gpt_neo"])
def test_neurons_alone_are_scored_whatever_the_attention(model_type: str) -> None:
    model, batch = tiny(model_type)
    blocks, batches = find_modules(model, batch, kinds=("mlp",)), [labelled(model, batch)]
    found = collect_statistics(model, batches, blocks)
    assert_equal_scores(found["his"], naive_statistics(model, batches, blocks)["his"])
    assert not found["entropy"]


# Options of a model, and which labels its own logits stand for. For a number t, the gradient of (y - t)^2 is that of y
# where y - t is a half.
STAND_INS: dict[str, tuple[dict[str, object], torch.dtype, Callable[[Tensor], Tensor]]] = {
    "classes": ({}, torch.float32, lambda logits: logits.argmax(-1)),
    "label sets": (LABEL_SETS, torch.bfloat16, lambda logits: (logits.sigmoid() > 0.5).float()),
    "yes or no": (LABEL_SETS | {"num_labels": 1}, torch.float32, lambda logits: (logits.sigmoid() > 0.5).float()),
    "a number": ({"num_labels": 1}, torch.float32, lambda logits: logits[:, 0] - 0.5),
}


@pytest.mark.parametrize("name", STAND_INS)
def test_the_models_own_predictions_stand_in_for_labels(name: str) -> None:
    options, dtype, label = STAND_INS[name]
    model, batch = bert(**options).to(dtype), text_batch(labels=False)
    sites = find_attention(model, batch)
    found = collect_statistics(model, [batch], sites)
    assert found.calibration.labels == "predictions"
    with torch.no_grad():
        labels = label(model(**batch).logits)
    expected = collect_statistics(model, [batch | {"labels": labels}], sites)
    for what in ("his", "fisher", "entropy"):
        assert_equal_scores(found[what], expected[what])


def test_weight_norm_by_hand() -> None:
    model = vit()
    batch = image_batch()
    sites = find_attention(model, batch)
    found = collect_statistics(model, [batch], sites)["weight_l2"]
    layer = model.vit.layers[1].attention
    rows = slice(8 * 2, 8 * 3)
    parts = [p.weight[rows] for p in (layer.q_proj, layer.k_proj, layer.v_proj)] + [layer.o_proj.weight[:, rows]]
    expected = math.sqrt(sum(p.detach().double().pow(2).sum().item() for p in parts))
    assert found["vit.layers.1.attention"][2].item() == pytest.approx(expected)


def test_no_samples_and_a_loss_of_nan_are_refused() -> None:
    model = bert(num_labels=1)
    good, bad = (text_batch() | {"labels": torch.randn(4)} for _ in range(2))
    bad["labels"][2] = math.nan
    sites = find_attention(model, good)
    with pytest.raises(DataError, match="at least one sample, got none"):
        collect_statistics(model, [], sites)
    with pytest.raises(NonFiniteError, match="batch 1 gave nan"):
        collect_statistics(model, [good, bad], sites)


def test_nan_in_a_gradient_names_the_batch() -> None:
    model = bert()
    batch = text_batch()
    sites = find_attention(model, batch)
    # A loss that stays finite while its gradient does not: sqrt at zero.
    model.classifier.register_forward_hook(lambda m, x, y: y + (y - y.detach()).sqrt())
    with pytest.raises(NonFiniteError, match="gradients of batch 0 in bert.encoder.layer.2 have NaN or infinity"):
        collect_statistics(model, [batch], sites)


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
