import math

import pytest
import torch
from support.models import bert, image_batch, llama, text_batch, vit
from support.references import naive_statistics
from torch import Tensor

from hies_export.calibrate.collect import collect_statistics
from hies_export.errors import DataError, NonFiniteError
from hies_export.prunable.attention import find_attention


def assert_equal_scores(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("labels", [3, 1], ids=["classes", "regression"])
def test_bert_with_padding_equals_the_naive_reference(labels: int) -> None:
    model = bert(num_labels=labels)
    batches = [text_batch(4, 10), text_batch(3, 7), text_batch(2, 9, padding=False)]
    if labels == 1:
        for batch in batches:
            batch["labels"] = torch.randn(len(batch["labels"]))
    sites = find_attention(model, batches[0])
    his, entropy = naive_statistics(model, batches, sites)
    found = collect_statistics(model, batches, sites)
    assert found.calibration.samples == 9
    assert found.calibration.labels == "data"
    assert_equal_scores(found["his"], his)
    assert_equal_scores(found["entropy"], entropy)
    assert torch.cat(list(his.values())).std() > 0  # heads that are all alike would hide a permutation


def test_vit_equals_the_naive_reference() -> None:
    model = vit()
    batches = [image_batch(4), image_batch(2)]
    sites = find_attention(model, batches[0])
    his, entropy = naive_statistics(model, batches, sites)
    found = collect_statistics(model, batches, sites)
    assert_equal_scores(found["his"], his)
    assert_equal_scores(found["entropy"], entropy)


def test_batching_does_not_matter() -> None:
    model = bert()
    batch = text_batch(6, 12)
    sites = find_attention(model, batch)
    together = collect_statistics(model, [batch], sites)
    apart = collect_statistics(model, [{k: v[i : i + 2] for k, v in batch.items()} for i in (0, 2, 4)], sites)
    assert_equal_scores(apart["his"], together["his"])
    assert_equal_scores(apart["entropy"], together["entropy"])


def test_grouped_queries_are_scored_per_query_head() -> None:
    model = llama()
    batch = text_batch(3, 6, padding=False)
    sites = find_attention(model, batch)
    assert [(s.units, s.groups) for s in sites] == [(4, 2)] * 2
    found = collect_statistics(model, [batch], sites)
    assert all(v.shape == (4,) and v.gt(0).all() for v in found["his"].values())


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
