"""Batches that did not come from our readers: lists, loaders and encodings of a caller."""

import itertools
from typing import Any

import datasets
import pytest
import torch
import transformers
from support.models import SIX_HEADS, bert, causal_lm, llava, shake, text_batch, vit, word_tokenizer
from torch.utils.data import DataLoader
from transformers import (
    BatchEncoding,
    BatchFeature,
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    PreTrainedModel,
)

from hies_export import DataError
from hies_export.data.batches import Batch, by_length, in_rows, of_similar_length, samples_of, size_of
from hies_export.evaluate.judge import Judge
from hies_export.evaluate.predict import predict
from hies_export.model.tokens import count_tokens
from hies_export.tasks import TASKS, task_of
from hies_export.tasks.given import batches_of, check_batches

MODELS = {
    "bert": bert,
    "regression": lambda: bert(num_labels=1),
    "label sets": lambda: bert(problem_type="multi_label_classification"),
    **{"vit": vit, "lm": causal_lm, "llava": llava},
}
IDS = torch.arange(12).view(3, 4) + 5
PIXELS = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])


def check(model: PreTrainedModel, batches: Any) -> list[Batch]:
    return check_batches(model, batches)


def read(model: PreTrainedModel, batches: Any) -> list[Batch]:
    return batches_of(model, batches, what="held_out", task=task_of(model), processor=None, columns=None)


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {name: make() for name, make in MODELS.items()}


@pytest.mark.parametrize(
    ("name", "batch", "tokens"),
    [
        ("bert", {"input_ids": IDS * MASK, "attention_mask": MASK, "token_type_ids": IDS % 2}, 7),
        ("bert", {"labels": torch.tensor([2, 0, 1]), "input_ids": IDS.int(), "position_ids": IDS % 4}, 12),
        ("regression", {"input_ids": IDS, "labels": torch.tensor([0.5, -1.0, 3.0])}, 12),
        ("vit", {"pixel_values": PIXELS, "labels": torch.tensor([2, 0, 1])}, 3 * 17),
        ("lm", {"input_ids": IDS * MASK, "labels": IDS, "attention_mask": MASK.bool()}, 7),
        ("llava", {"input_ids": torch.cat([torch.full((3, 16), 4), IDS], dim=1), "pixel_values": PIXELS}, 60),
    ],
)
def test_any_mapping_of_tensors_is_read(
    models: dict[str, PreTrainedModel], name: str, batch: dict[str, torch.Tensor], tokens: int
) -> None:
    model = models[name]
    for kind in (dict, BatchEncoding, BatchFeature):
        (checked,) = check(model, [kind(batch)])
        assert type(checked) is dict
        assert checked.keys() == batch.keys()
        assert all(torch.equal(checked[key], batch[key]) for key in batch)
    assert (size_of(checked), samples_of([checked, checked]), count_tokens(model, checked)) == (3, 6, tokens)


def test_a_loader_is_read_once_with_its_last_smaller_batch(models: dict[str, PreTrainedModel]) -> None:
    samples = [{"input_ids": row, "labels": row[0] % 3} for row in IDS]
    checked = check(models["bert"], DataLoader(samples, batch_size=2))
    assert torch.equal(torch.cat([batch["input_ids"] for batch in checked]), IDS)
    assert [size_of(batch) for batch in checked] == [2, 1]
    assert len(check(models["bert"], iter([{"input_ids": IDS}]))) == 1


GOOD = {"input_ids": IDS}


@pytest.mark.parametrize(
    ("name", "batches", "refusal"),
    [
        ("bert", GOOD, "held_out must be a list or a DataLoader of batches, got a dict"),
        ("bert", IDS, "got a Tensor"),
        ("bert", [], "held_out must have at least one batch, got none; an iterator"),
        ("bert", [GOOD, (IDS, MASK)], r"must map names of arguments to .* batch 1 \(from 0\) of held_out is a tuple"),
        ("bert", [{}], "must map names of arguments to tensors, but .* is a dict"),
        ("bert", [GOOD | {"idx": torch.arange(3)}], "argument of BertForSequenceClassification.forward, .* 'idx'"),
        ("bert", [GOOD | {"group": torch.arange(3)}], "has 'group'; leave it out"),
        ("bert", [GOOD | {"label": torch.tensor([0, 1, 2])}], "has 'label'; leave it out; did you mean 'labels'?"),
        ("bert", [{"input_ids": IDS.tolist()}], "tensors only, but 'input_ids' of batch 0 .* list; .*return_tensors"),
        ("bert", [GOOD | {"labels": torch.tensor([0])}], r"the samples, .* has input_ids \(3, 4\), labels \(1,\)"),
        ("bert", [{"input_ids": IDS[:0]}], r"the samples, one or more, but .* has input_ids \(0, 4\)"),
        ("bert", [GOOD, GOOD | {"attention_mask": MASK}], r"the first one \(input_ids\), but batch 1 .* has .*, att"),
        ("bert", [{"input_ids": IDS + 90}], r"input_ids must be torch.int64 in \[0, 100\), which .* knows, .* has 100"),
        ("bert", [GOOD | {"labels": torch.tensor([0, 1, 3])}], r"labels must be torch.int64 in \[0, 3\), .* has 3"),
        ("bert", [GOOD | {"labels": torch.tensor([0, 1, 2]).int()}], "labels must be torch.int64 .* has torch.int32"),
        ("regression", [GOOD | {"labels": torch.rand(3, 1)}], r"one number for each sample, .* of shape \(3, 1\)"),
        ("label sets", [GOOD | {"labels": torch.ones(3, 4)}], "0 or 1 for each of 3 labels"),
        ("label sets", [GOOD | {"labels": torch.full((3, 3), 0.5)}], "0 or 1 for each of 3 labels"),
    ],
)
def test_what_the_model_does_not_take_is_refused_in_one_sentence(
    models: dict[str, PreTrainedModel], name: str, batches: Any, refusal: str
) -> None:
    with pytest.raises(DataError, match=refusal) as error:
        read(models[name], batches)
    assert "\n" not in str(error.value)


def padded_rows(pad: int, side: str) -> dict[str, torch.Tensor]:
    mask = MASK if side == "right" else MASK.flip(-1)
    return {"input_ids": IDS.where(mask.bool(), pad), "attention_mask": mask}


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "RobertaForTokenClassification"])
def test_padding_is_of_the_token_that_a_model_takes_for_padding(name: str) -> None:
    """A decoder reads the last token that is not its padding token; RoBERTa counts positions by such tokens."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{name.partition('For')[0]}Config")(vocab_size=32, pad_token_id=1, **sizes)
    model = getattr(transformers, name)(config).eval()
    for pad, side in itertools.product((0, 1), ("left", "right")):
        ids, masks = (batch := padded_rows(pad, side)).values()
        alone = [model(input_ids=row[mask.bool()][None]).logits for row, mask in zip(ids, masks, strict=True)]
        found = model(**check(model, [batch])[0]).logits
        of_tokens = found.dim() == 3
        wanted = torch.cat([logits[0] if of_tokens else logits for logits in alone])
        torch.testing.assert_close(found[masks.bool()] if of_tokens else found, wanted)


def test_tokenised_rows_are_padded_with_the_models_token(models: dict[str, PreTrainedModel]) -> None:
    rows, tokenizer = datasets.Dataset.from_dict({"input_ids": [[5, 6], [7]]}), word_tokenizer("ab")
    assert (tokenizer.pad_token_id, models["bert"].config.pad_token_id) == (0, 0)
    other = bert(pad_token_id=9)
    for model, pad in ((models["bert"], 0), (other, 9)):
        asked = {"what": "batches", "task": task_of(model), "processor": tokenizer, "columns": None}
        (batch,) = batches_of(model, rows, **asked)
        assert batch["input_ids"].tolist() == [[5, 6], [7, pad]]
        assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize("name", ["text-generation", "token-classification", "fill-mask"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_labels_at_padding_are_those_of_no_token(name: str, side: str) -> None:
    config = BertConfig(**(SIX_HEADS | {"vocab_size": 100, "num_labels": 17}))
    make = {"token-classification": BertForTokenClassification, "fill-mask": BertForMaskedLM}
    model = shake(make[name](config)) if name in make else causal_lm()
    task, mask = task_of(model), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]])
    mask = mask if side == "right" else mask.flip(-1)
    padded = {"input_ids": IDS * mask, "attention_mask": mask, "labels": IDS % 17 * mask}
    padded["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    alone = [{key: value[row : row + 1, mask[row] != 0] for key, value in padded.items()} for row in range(3)]
    found = []
    for given in ([padded], alone):
        options = {"task": TASKS[name](model.config), "processor": None, "columns": None}
        batches = batches_of(model, given, what="batches", **options)
        predictions = predict(model, batches)
        found.append(Judge(batches, predictions, task.metrics[:2], task).of(predictions).metrics)
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_what_is_of_whole_samples_stays_with_them_where_these_are_ordered_by_length() -> None:
    """Also where a sample has as many values as tokens."""
    flags = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    whole = {"labels": flags, "relevant": torch.arange(12).view(3, 4), "grades": flags + 1}
    (found,) = by_length([{"input_ids": IDS, "attention_mask": MASK, **whole}], config=bert().config)
    assert all(torch.equal(found[key], value.flip(0)) for key, value in whole.items())
    assert found["attention_mask"].sum(-1).tolist() == [1, 2, 4]


def test_batches_like_others_keep_the_order_of_their_samples() -> None:
    """The same texts in other tokens: the second is the longest in one vocabulary, and the shortest in the other."""

    def texts(*lengths: int) -> list[Batch]:
        ones = [torch.ones(1, length, dtype=torch.int64) for length in lengths]
        return [{"input_ids": one, "attention_mask": one, "labels": torch.tensor([n])} for n, one in enumerate(ones)]

    batches, like = texts(3, 5, 4), texts(4, 2, 6)
    found = by_length(batches, config=bert().config, like=like)
    assert [batch["labels"].item() for batch in found] == [1, 0, 2]
    assert [batch["attention_mask"].sum().item() for batch in found] == [5, 3, 4]


def test_a_batch_is_split_by_rows_unless_a_tensor_has_others() -> None:
    batch = {"input_ids": torch.arange(10).view(5, 2), "labels": torch.arange(5)}
    parts = in_rows(batch, 2)
    assert [size_of(part) for part in parts] == [2, 2, 1]
    assert all(torch.equal(torch.cat([part[key] for part in parts]), batch[key]) for key in batch)
    for whole in (batch, batch | {"pixel_values": torch.zeros(7, 3)}, batch | {"scale": torch.tensor(1.0)}):
        assert in_rows(whole, 5 if whole is batch else 2) == [whole]


def test_batches_by_length_predict_the_same() -> None:
    model, batches = bert(), [text_batch(size, length) for size, length in ((4, 24), (3, 10), (4, 17))]
    ordered = by_length(batches, config=model.config)
    assert sum(b["input_ids"].numel() for b in ordered) < sum(b["input_ids"].numel() for b in batches)
    assert [len(b["input_ids"]) for b in ordered] == [4, 4, 3]
    lengths = torch.cat([b["attention_mask"].sum(-1) for b in batches])
    order = lengths.argsort(stable=True)
    assert torch.equal(torch.cat([b["attention_mask"].sum(-1) for b in ordered]), lengths[order])
    assert torch.equal(torch.cat([b["labels"] for b in ordered]), torch.cat([b["labels"] for b in batches])[order])
    found, expected = predict(model, ordered).values, predict(model, batches).values[order]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_samples_of_similar_length_share_a_batch_and_batches_come_in_a_random_order() -> None:
    ones = torch.ones(40, 40, dtype=torch.int64).tril()[torch.randperm(40)]  # 1 to 40 tokens
    batches = [{"input_ids": part, "attention_mask": part} for part in ones.split(4)]
    found = of_similar_length(batches, config=bert().config)
    tops = [batch["input_ids"].shape[1] for batch in found]
    assert [batch["attention_mask"].sum(-1).tolist() for batch in found] == [[*range(top - 3, top + 1)] for top in tops]
    assert sorted(tops) == [*range(4, 41, 4)] != tops
    full = [{"input_ids": one[:5], "attention_mask": torch.ones_like(one[:5])} for one in ones.split(10)]
    assert of_similar_length(full, config=bert().config) == full
