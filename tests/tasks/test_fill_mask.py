"""Masked language models: what is read, predicted and scored is beside loops over single texts; a run, and refusals."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from support.models import SIX_HEADS, shake, word_tokenizer
from support.neurons import one_by_one
from support.reading import reading
from support.references import naive_statistics
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hies_export import DataError, collect_statistics, find_attention, prune, score_compensated
from hies_export.evaluate.judge import Judge
from hies_export.evaluate.predict import predict
from hies_export.recipe.sections import Columns
from hies_export.tasks import TASKS, task_of

WORDS = [f"w{number}" for number in range(40)]
TEXTS = [" ".join(WORDS[(start * 7 + 3 * place) % 40] for place in range(3 + start % 11)) for start in range(440)]
TASK = TASKS["fill-mask"]


def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer(["[MASK]", *WORDS], mask_token="[MASK]")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = SIX_HEADS | {"num_hidden_layers": 2, "max_position_embeddings": 64}
    return shake(BertForMaskedLM(BertConfig(vocab_size=len(tokenizer()), **sizes)))


def read(
    model: PreTrainedModel, texts: list[str], batch_size: int = 8, **options: Any
) -> list[dict[str, torch.Tensor]]:
    reader = reading(TASK.name, columns=Columns(text=("text",)), config=model.config, processor=tokenizer(), **options)
    rows = datasets.Dataset.from_dict({"text": texts})
    reader.check_rows(rows)
    return reader.read(rows, size=batch_size)


@pytest.fixture(scope="module")
def batches(model: PreTrainedModel) -> list[dict[str, torch.Tensor]]:
    return read(model, TEXTS[:24])


def test_the_reader_masks_as_a_loop_does(model: PreTrainedModel) -> None:
    tokens, found = tokenizer(), [*one_by_one(read(model, TEXTS[:24]))]
    for text, row in zip(TEXTS, found, strict=False):
        ids = tokens(text).input_ids
        labels = row["labels"][0].tolist()
        masked = [place for place, label in enumerate(labels) if label != -100]
        words = [place for place, token in enumerate(ids) if token not in tokens.all_special_ids]
        assert len(masked) == max(1, round(0.15 * len(words)))
        assert set(masked) <= set(words)
        assert [ids[place] for place in masked] == [labels[place] for place in masked]
        expected = [tokens.mask_token_id if place in masked else token for place, token in enumerate(ids)]
        assert row["input_ids"][0].tolist() == expected
    # Not always the same place.
    assert len({int(row["labels"][0].ne(-100).nonzero()[0]) for row in found}) > 3


def test_masks_depend_on_the_text_alone(model: PreTrainedModel) -> None:
    one, two = (one_by_one(read(model, texts, size)) for texts, size in ((TEXTS[:24], 8), (TEXTS[23::-1], 5)))
    for first, second in zip(one, [*two][::-1], strict=True):
        assert all(torch.equal(first[key], second[key]) for key in ("input_ids", "labels"))


def test_a_mask_in_the_text_itself_is_no_label(model: PreTrainedModel) -> None:
    (batch,) = read(model, [f"{TEXTS[0]} [MASK] [MASK] [MASK] [MASK] [MASK] [MASK]"])
    assert batch["labels"].ne(tokenizer().mask_token_id).all()


def test_predictions_and_perplexity_are_those_of_all_logits(
    model: PreTrainedModel, batches: list[dict[str, torch.Tensor]]
) -> None:
    tokens, nll = [], []
    for row in one_by_one(batches):
        labels = row.pop("labels")[0]
        with torch.inference_mode():
            log_probabilities = model(**row).logits[0].log_softmax(-1)
        for place in labels.ne(-100).nonzero().flatten().tolist():
            tokens.append(int(log_probabilities[place].argmax()))
            nll.append(-log_probabilities[place, labels[place]].item())
    found, task = predict(model, batches), task_of(model)
    assert found.values.tolist() == tokens
    wanted = task.references(batches)
    metrics = Judge(batches, found, ("perplexity", "token_accuracy"), task).of(found).metrics
    assert metrics["perplexity"] == pytest.approx(np.exp(np.mean(nll)), rel=1e-5)
    assert metrics["token_accuracy"] == np.mean([one == two for one, two in zip(tokens, wanted.tolist(), strict=True)])


@pytest.mark.parametrize("labelled", [True, False])
def test_importance_is_that_of_each_text_by_itself(
    labelled: bool, model: PreTrainedModel, batches: list[dict[str, torch.Tensor]]
) -> None:
    modules = find_attention(model, batches[0])
    plain = [{key: value for key, value in batch.items() if key != "labels"} for batch in batches]
    found = collect_statistics(model, batches if labelled else plain, modules)["his"]
    rows = [*one_by_one(batches)]
    if not labelled:
        with torch.no_grad():
            rows = [row | {"labels": model(**row).logits.argmax(-1)} for row in rows]
    for name, values in naive_statistics(model, rows, modules)["his"].items():
        assert found[name] == pytest.approx(values, rel=1e-3, abs=1e-7)


def test_squared_gradients_of_the_effect_are_on_average_the_curvature_of_the_divergence(
    model: PreTrainedModel, batches: list[dict[str, torch.Tensor]]
) -> None:
    for batch in batches:
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.detach()
        output.requires_grad_()
        effects = (task_of(model).effect(model, batch, output, number).sum() for number in range(400))
        found = torch.stack([torch.autograd.grad(effect, output)[0].square() for effect in effects]).mean(0)
        # The second derivative of the divergence from a distribution p, by its own logits, is diag(p) - p p^T.
        p = output.softmax(-1).detach()
        masked = batch["labels"] != -100
        torch.testing.assert_close(found, p * (1 - p) * masked[..., None], rtol=0, atol=0.12)
    modules = find_attention(model, batches[0])
    assert score_compensated(model, batches, modules).criterion == "compensated"


def test_batches_of_the_collator_lose_the_rows_without_a_mask(model: PreTrainedModel) -> None:
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.15, seed=0)
    given = [collate([tokenizer()(text) for text in TEXTS[start : start + 16]]) for start in range(0, 160, 16)]
    rows = sum(int(batch["labels"].ne(-100).any(-1).sum()) for batch in given)
    assert 100 < rows < 160
    compensation = {"method": "least_squares"}
    result = prune(model, given, criterion="his", budget={"heads": 0.4}, compensation=compensation)
    kept = [*result.pruning.rows.score, *result.pruning.rows.held_out]
    assert sum(len(batch["labels"]) for batch in kept) == rows
    assert result.held_out is not None
    assert result.held_out.metrics.keys() == {"perplexity", "token_accuracy"}


def test_the_slim_encoder_loads_with_another_head(
    model: PreTrainedModel, batches: list[dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """What the guide fine-tunes, and the head of every other Auto class."""
    result = prune(model, batches, budget={"flops": 0.6}, criterion="fisher", compensation=None)
    result.save_pretrained(tmp_path / "slim")
    config = json.loads((tmp_path / "slim" / "config.json").read_text())
    assert {task.auto_class for task in TASKS.values() if task.text and not task.images} <= config["auto_map"].keys()
    options: Any = {"num_labels": 2, "trust_remote_code": True}
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "slim", **options)
    encoder = dict(result.model.base_model.named_parameters())
    before = {name: value.clone() for name, value in classifier.base_model.named_parameters() if name in encoder}
    assert before.keys() == encoder.keys()
    assert all(torch.equal(value, encoder[name]) for name, value in before.items())


@pytest.mark.parametrize(
    ("labels", "match"),
    [
        ({}, "judged at its masks, so every batch must have labels: .* DataCollatorForLanguageModeling"),
        ({"labels": torch.full((2, 4), -100)}, "every batch must have a label, the token behind a mask"),
    ],
)
def test_labels_that_name_no_masked_token_are_refused(
    labels: dict[str, torch.Tensor], match: str, model: PreTrainedModel
) -> None:
    with pytest.raises(DataError, match=match):
        prune(model, [{"input_ids": torch.ones(2, 4, dtype=torch.int64), **labels}], budget={"heads": 0.4})


def test_texts_without_a_token_to_mask_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(DataError, match=r"a token to mask, but '\[MASK\]' has none within .*; leave it out"):
        read(model, ["[MASK]"])
    tokens = tokenizer()
    tokens.mask_token = None
    reader = reading(TASK.name, columns=Columns(text=("text",)), config=model.config, processor=tokens)
    with pytest.raises(DataError, match="a tokenizer that fills masks must have a mask token"):
        reader.check_rows(datasets.Dataset.from_dict({"text": TEXTS}))
