"""Statistics of heads and neurons, and labels of a model's own, against one unpadded sample at a time."""

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.architectures import tiny
from support.contract import labelled
from support.generative import padded, with_images
from support.models import bert, causal_lm, image_batch, llama, llava, opt, text_batch, vit, zero_padding
from support.neurons import neurons, one_by_one
from support.references import naive_statistics
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hies_export import DataError, NonFiniteError, collect_statistics, find_attention, find_modules
from hies_export.tasks import TextGeneration, task_of
from hies_export.tasks.text_generation import text_labels

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


class Fixed:
    """A model that predicts the tokens 3, 1, 2 and 0 whatever it reads."""

    def __init__(self, **options: Any):
        self.logits = torch.eye(4)[torch.tensor([[3, 1, 2, 0]])]
        self.config = SimpleNamespace(num_labels=2, get_text_config=SimpleNamespace, **options)

    def __call__(self, **batch: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits)

    def parameters(self) -> Iterator[Tensor]:
        return iter([self.logits])


@pytest.mark.parametrize(("make", "side"), [(causal_lm, "right"), (causal_lm, "left"), (llava, "left")])
def test_own_labels_are_those_of_each_text_by_itself(make: Callable[[], PreTrainedModel], side: str) -> None:
    """Nothing real predicts a text's first token, and no label is an image's part, whatever is padded."""
    model, batch = make(), padded([9, 4, 6], side)
    batch = with_images(batch) if make is llava else batch
    del batch["labels"]
    expected = torch.full_like(batch["input_ids"], -100)
    for row, mask in enumerate(batch["attention_mask"]):
        places = [place for place, real in enumerate(mask.tolist()) if real]
        alone = {"input_ids": batch["input_ids"][row, places][None]}
        alone |= {"pixel_values": batch["pixel_values"][row : row + 1]} if make is llava else {}
        likeliest = model(**alone).logits[0].argmax(-1)
        for before, place in enumerate(places[1:]):
            if batch["input_ids"][row, place] != 4 or make is causal_lm:
                expected[row, place] = likeliest[before]
    found = task_of(model).with_labels(model, batch)["labels"]
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["image_token_id", "image_token_index", "video_token_id", "audio_token_id"])
def test_no_label_is_a_placeholder_of_any_kind(name: str) -> None:
    model: Any = Fixed(**{name: 7})
    batch = {"input_ids": torch.tensor([[5, 7, 6, 7]])}
    assert TextGeneration(model.config).with_labels(model, batch)["labels"].tolist() == [[-100, -100, 1, -100]]
    assert text_labels(model, batch).tolist() == [[5, -100, 6, -100]]


def test_the_text_that_an_encoder_reads_hides_no_label_of_the_decoder() -> None:
    model: Any = Fixed()
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    batch["decoder_input_ids"] = torch.tensor([[1, 2, 3, 1]])
    assert TextGeneration(model.config).with_labels(model, batch)["labels"].tolist() == [[-100, 3, 1, 2]]


def test_weight_norm_by_hand() -> None:
    model = vit()
    batch = image_batch()
    found = collect_statistics(model, [batch], find_attention(model, batch))["weight_l2"]
    layer = model.vit.layers[1].attention
    rows = slice(8 * 2, 8 * 3)
    parts = [p.weight[rows] for p in (layer.q_proj, layer.k_proj, layer.v_proj)] + [layer.o_proj.weight[:, rows]]
    expected = math.sqrt(sum(p.detach().double().pow(2).sum().item() for p in parts))
    assert found["vit.layers.1.attention"][2].item() == pytest.approx(expected)


def test_no_samples_a_loss_of_nan_and_nothing_to_predict_are_refused() -> None:
    model = bert(num_labels=1)
    good, bad = (text_batch() | {"labels": torch.randn(4)} for _ in range(2))
    bad["labels"][2] = math.nan
    sites = find_attention(model, good)
    with pytest.raises(DataError, match="at least one sample, got none"):
        collect_statistics(model, [], sites)
    with pytest.raises(NonFiniteError, match="batch 1 gave nan"):
        collect_statistics(model, [good, bad], sites)
    model, good, bad = causal_lm(), padded([5, 4, 6], "right"), padded([5, 4, 6], "right")
    bad["labels"][2, 1:] = -100  # the first token is never predicted
    with pytest.raises(DataError, match=r"one of batch 1 \(from 0\) has none"):
        collect_statistics(model, [good, bad], find_attention(model, good))


def test_nan_in_a_gradient_names_the_batch() -> None:
    model = bert()
    batch = text_batch()
    sites = find_attention(model, batch)
    # A loss that stays finite while its gradient does not: sqrt at zero.
    model.classifier.register_forward_hook(lambda m, x, y: y + (y - y.detach()).sqrt())
    with pytest.raises(NonFiniteError, match="gradients of batch 0 in bert.encoder.layer.2 have NaN or infinity"):
        collect_statistics(model, [batch], sites)


def test_weight_norms_of_neurons_are_sums_over_rows_and_columns() -> None:
    model, batch = llama(), text_batch(padding=False)
    found = collect_statistics(model, [batch], find_modules(model, batch, kinds=("mlp",)))["weight_l2"]
    layer = model.model.layers[1].mlp
    parts = [layer.gate_proj.weight, layer.up_proj.weight, layer.down_proj.weight.T]
    expected = torch.stack([part.detach().double().square().sum(1) for part in parts]).sum(0).sqrt()
    assert found["model.layers.1.mlp"].tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_gradient_checkpointing_changes_nothing_and_stays() -> None:
    model, batches = causal_lm(attention_dropout=0.5), [padded([9, 4, 6], "right")]
    sites = find_attention(model, batches[0])
    expected = collect_statistics(model, batches, sites)
    model.activation_checkpointing_enable()
    functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
    found = collect_statistics(model, batches, sites)
    for what in ("his", "entropy"):
        assert_equal_scores(found[what], expected[what])
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == functions
    assert model.config.use_cache


class Largest(TorchDispatchMode):
    """Remember how many elements the largest tensor has that any operation of the block writes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return result


def test_no_tensor_of_a_long_sample_has_an_element_per_pair_of_tokens() -> None:
    model = causal_lm(max_position_embeddings=1024)

    def largest(length: int) -> int:
        ids = torch.randint(4, 32, (1, length))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        modules = find_modules(model, {k: v[:, :8] for k, v in batch.items()}, kinds=("attention", "mlp"))
        with Largest() as seen:
            collect_statistics(model, [batch], modules)
        return seen.elements

    short, long = largest(256), largest(1024)
    assert short > 256 * 8
    assert long <= 4 * short
    assert long < 1024 * 1024
