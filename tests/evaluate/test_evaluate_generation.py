"""Predictions and metrics of generated text against the whole logits, torch's loss and greedy decoding."""

import itertools
import math
from typing import Any

import pytest
import torch
from support.generative import padded, with_images
from support.models import causal_lm, llava
from support.reading import share_same
from torch import Tensor

from hies_export.errors import DataError
from hies_export.evaluate.judge import Judge
from hies_export.evaluate.predict import predict
from hies_export.tasks import TASKS, Predictions, TextGeneration, text_generation

TASK = TextGeneration(None)


def flat(lists: Any) -> list[Any]:
    return list(itertools.chain(*lists))


def naive(model: Any, batches: list[dict[str, Tensor]]) -> tuple[list[list[float]], list[list[int]], list[list[int]]]:
    """Per sample the likelihoods, likeliest tokens and labels, from all logits, token by token."""
    nlls, tokens, labels = [], [], []
    for batch in batches:
        logits = model(**batch).logits
        for row, wanted in zip(logits, batch["labels"], strict=True):
            at = [t for t in range(1, len(wanted)) if wanted[t] != -100]
            nlls.append([-row[t - 1].log_softmax(-1)[wanted[t]].item() for t in at])
            tokens.append([row[t - 1].argmax().item() for t in at])
            labels.append([wanted[t].item() for t in at])
    return nlls, tokens, labels


@pytest.mark.parametrize(("side", "tokens_at_once"), [("right", 512), ("left", 3)])
def test_predictions_equal_those_of_all_logits(side: str, tokens_at_once: int, monkeypatch: Any) -> None:
    model = causal_lm()
    monkeypatch.setattr(text_generation, "COPIED_BYTES", tokens_at_once * 4 * model.config.vocab_size)
    batches = [padded([9, 4, 6], side, answers=[2, 3, 1]), padded([3, 7], side, answers=[1, 1])]
    nlls, tokens, labels = naive(model, batches)
    found = predict(model, batches)
    assert (found.kind, len(found), found.joint) == ("tokens", 5, True)
    assert found.values.tolist() == flat(tokens)
    assert found.sample.tolist() == [0, 0, 1, 1, 1, 2, 3, 4]
    torch.testing.assert_close(found.nll, torch.tensor(flat(nlls)), rtol=1e-5, atol=1e-5)
    assert TASK.references(batches).tolist() == flat(labels)


@pytest.mark.parametrize(("rows", "passes"), [(0.5, [1, 1, 1]), (2, [2, 1]), (3, [3])])
def test_logits_are_computed_for_as_many_samples_as_the_limit_holds(
    rows: float, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = causal_lm(), padded([9, 4, 6], "left", answers=[2, 3, 1])
    whole, seen = predict(model, [batch]), []
    monkeypatch.setattr(text_generation, "LOGITS_BYTES", int(rows * 9 * 4 * model.config.vocab_size))
    model.lm_head.register_forward_hook(lambda layer, args, output: seen.append(len(output)))
    found = predict(model, [batch])
    assert seen == passes
    assert torch.equal(found.values, whole.values)
    torch.testing.assert_close(found.nll, whole.nll)


def test_perplexity_of_blocks_is_the_exponential_of_the_models_own_loss() -> None:
    model, batch = causal_lm(), padded([8, 8, 8], "right")
    found = predict(model, [batch])
    assert (found.kind, found.joint) == ("tokens", False)
    values = Judge([batch], found, ("perplexity",), TASK).of(found).metrics
    assert values["perplexity"] == pytest.approx(math.exp(model(**batch).loss.item()), rel=1e-5)


@pytest.mark.parametrize("ends", [3, [3, 5]])
def test_text_without_the_labels_of_its_ends_is_no_answer(ends: int | list[int]) -> None:
    """As a collator leaves it that pads blocks with the end of text, without a mask."""
    model = causal_lm()
    model.config.eos_token_id, model.config.pad_token_id = ends, None
    ids = torch.tensor([[6, 7, 3, 8, 9, 7], [8, 6, 7, 3, 3, 3]])
    text = {"input_ids": ids, "labels": ids.where(ids != 3, -100)}
    assert not predict(model, [text]).joint
    answer = {"input_ids": ids, "labels": ids.where(torch.arange(6) > 1, -100)}
    assert predict(model, [answer]).joint


def test_predictions_about_images_equal_those_of_all_logits() -> None:
    model = llava()
    batch = with_images(padded([9, 6, 5], "right", answers=[2, 4, 1]))
    nlls, tokens, _ = naive(model, [batch])
    found = predict(model, [batch])
    assert (found.kind, found.joint, found.values.tolist()) == ("tokens", True, flat(tokens))
    torch.testing.assert_close(found.nll, torch.tensor(flat(nlls)), rtol=1e-5, atol=1e-5)
    assert model.config.text_config.use_cache


def tokens_of(*samples: list[int], answers: bool) -> Predictions:
    tokens = torch.tensor(flat(samples))
    sample = torch.tensor([i for i, part in enumerate(samples) for _ in part])
    return Predictions("tokens", tokens, sample, joint=answers, nll=torch.zeros(len(tokens)))


@pytest.mark.parametrize(("answers", "share"), [(False, 4 / 6), (True, 1 / 3)])
def test_stability_counts_tokens_of_a_text_and_whole_answers(answers: bool, share: float) -> None:
    dense = tokens_of([1, 2, 3], [4, 5], [6], answers=answers)
    other = tokens_of([1, 9, 3], [9, 5], [6], answers=answers)
    assert share_same(dense, other) == pytest.approx(share)
    assert share_same(dense, dense) == 1.0


def test_a_sample_without_labels_is_refused_with_its_batch() -> None:
    model, good = causal_lm(), padded([5, 4], "right")
    bad = padded([5, 4], "right", answers=[2, 1])
    bad["labels"][1] = -100
    with pytest.raises(DataError, match=r"one of batch 1 \(from 0\) has none"):
        predict(model, [good, bad])


def test_generating_is_judged_by_perplexity_and_answering_by_exact_matches() -> None:
    generating, answering = (TASKS[name](None) for name in ("text-generation", "image-text-to-text"))
    assert generating.usual_metrics() == ("perplexity",)
    assert generating.usual_metrics(answers=True) == answering.usual_metrics() == ("exact_match", "perplexity")
