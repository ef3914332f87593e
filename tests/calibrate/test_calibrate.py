"""Statistics against eager attention, one unpadded sample at a time."""

import math
from collections.abc import Callable

import pytest
import torch
from support.generative import padded, with_images
from support.models import bert, causal_lm, image_batch, llava, text_batch, vit
from support.neurons import one_by_one
from support.references import naive_statistics
from torch import Tensor
from transformers import PreTrainedModel

from hies_export.calibrate.collect import collect_statistics
from hies_export.errors import DataError, NonFiniteError
from hies_export.prunable.attention import find_attention


def assert_equal_scores(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-4, atol=1e-6)


def regression_batches() -> list[dict[str, Tensor]]:
    return [batch | {"labels": torch.randn(len(batch["labels"]))} for batch in (text_batch(4, 10), text_batch(3, 7))]


def with_answers(side: str) -> list[dict[str, Tensor]]:
    return [padded([9, 6, 5], side, answers=[2, 5, 1])]


CASES: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[], list[dict[str, Tensor]]]]] = {
    "classes": (bert, lambda: [text_batch(4, 10), text_batch(3, 7), text_batch(2, 9, padding=False)]),
    "regression": (lambda: bert(num_labels=1), regression_batches),
    "vit": (vit, lambda: [image_batch(4), image_batch(2)]),
    "decoder right": (causal_lm, lambda: [padded([9, 4, 6], "right"), padded([3, 7], "right")]),
    "decoder left": (causal_lm, lambda: [padded([9, 4, 6], "left"), padded([3, 7], "left")]),
    "blocks": (causal_lm, lambda: [padded([8, 8, 8], "right"), padded([8], "right")]),
    "answers right": (causal_lm, lambda: with_answers("right")),
    "answers left": (causal_lm, lambda: with_answers("left")),
    "llava right": (llava, lambda: [with_images(batch) for batch in with_answers("right")]),
    "llava left": (llava, lambda: [with_images(batch) for batch in (*with_answers("left"), *with_answers("left"))]),
}


@pytest.mark.parametrize("case", CASES)
def test_statistics_equal_the_naive_reference(case: str) -> None:
    make, make_batches = CASES[case]
    model, batches = make(), make_batches()
    sites = find_attention(model, batches[0])
    his, entropy = naive_statistics(model, [*one_by_one(batches)], sites)
    found = collect_statistics(model, batches, sites)
    sizes = [len(batch["labels"]) for batch in batches]
    assert (found.calibration.labels, found.calibration.samples) == ("data", sum(sizes))
    assert found.calibration.batch_size == max(sizes)
    assert_equal_scores(found["his"], his)
    assert_equal_scores(found["entropy"], entropy)
    assert torch.cat(list(his.values())).std() > 0  # heads that are all alike would hide a permutation
    if make is causal_lm:
        assert [(s.units, s.groups) for s in sites] == [(4, 2)] * 2  # scored per query head
    if make is llava:  # which takes the last but one layer of its image tower
        assert [bool(v.any()) for n, v in found["his"].items() if "vision" in n] == [True, True, False]
        assert len(sites) == 5


def test_the_models_own_predictions_stand_in_for_labels() -> None:
    model = bert()
    batch = text_batch(labels=False)
    sites = find_attention(model, batch)
    found = collect_statistics(model, [batch], sites)
    predicted = model(**batch).logits.argmax(-1)
    expected = collect_statistics(model, [batch | {"labels": predicted}], sites)
    assert found.calibration.labels == "predictions"
    assert_equal_scores(found["his"], expected["his"])
    assert_equal_scores(found["entropy"], expected["entropy"])


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


def test_the_model_is_left_as_it_was() -> None:
    model = bert().train()
    model.classifier.bias.requires_grad_(False)
    batch = text_batch()
    sites = find_attention(model, batch)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    collect_statistics(model, [batch], sites)
    assert model.training
    assert model.config.problem_type is None
    assert all(p.grad is None for p in model.parameters())
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["classifier.bias"]
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_nan_in_the_loss_names_the_batch() -> None:
    model = bert(num_labels=1)
    good, bad = (text_batch() | {"labels": torch.randn(4)} for _ in range(2))
    bad["labels"][2] = math.nan
    sites = find_attention(model, good)
    with pytest.raises(NonFiniteError, match="batch 1 gave nan"):
        collect_statistics(model, [good, bad], sites)


def test_nan_in_a_gradient_names_the_batch() -> None:
    model = bert()
    batch = text_batch()
    sites = find_attention(model, batch)
    # A loss that stays finite while its gradient does not: sqrt at zero.
    model.classifier.register_forward_hook(lambda m, x, y: y + (y - y.detach()).sqrt())
    with pytest.raises(NonFiniteError, match="batch 0 gave NaN or infinity at the heads of bert.encoder.layer.0"):
        collect_statistics(model, [batch], sites)


def test_regression_needs_labels_and_calibration_needs_samples() -> None:
    model = bert(num_labels=1)
    batch = text_batch(labels=False)
    sites = find_attention(model, batch)
    with pytest.raises(DataError, match=r"regression model needs labels.*set data\.label"):
        collect_statistics(model, [batch], sites)
    with pytest.raises(DataError, match="at least one sample, got none"):
        collect_statistics(model, [], sites)
