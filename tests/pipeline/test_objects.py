"""Encoders of transformers pruned as embedding models, in memory; objects of sentence-transformers have their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import text_batch, word_tokenizer
from support.sentences import WORDS, bert_encoder
from transformers import BertModel

from hies_export import RequestError, prune
from hies_export.checkpoint.sentence import load_sentence
from hies_export.checkpoint.served_settings import read_served


def test_an_encoder_comes_back_as_an_encoder(tmp_path: Path) -> None:
    encoder = bert_encoder()
    batches = [text_batch(labels=False) for _ in range(8)]
    how = {"pooling": "mean", "normalize": True}
    result = prune(encoder, batches, budget={"heads": 0.5}, criterion="his", embedding=how)
    assert isinstance(result.model, BertModel)
    assert result.model is not encoder
    assert result.plan.removed == 9
    with torch.no_grad():
        hidden = result.model(**batches[0]).last_hidden_state
        mask = batches[0]["attention_mask"][..., None]
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        expected = pooled / pooled.norm(dim=1, keepdim=True)
        result.save_pretrained(tmp_path / "slim", processor=word_tokenizer(WORDS))
        saved = load_sentence(tmp_path / "slim")(**batches[0]).sentence_embedding
    torch.testing.assert_close(saved, expected, atol=1e-6, rtol=1e-5)


def test_texts_are_read_by_the_tokenizer(tmp_path: Path) -> None:
    texts = [" ".join(WORDS[start : start + 5]) for start in range(40)]
    result = prune(
        bert_encoder(num_hidden_layers=1),
        texts,
        processor=word_tokenizer(WORDS),
        budget={"heads": 0.5},
        criterion="his",
        embedding={"pooling": "cls"},
    )
    assert result.held_out is not None
    assert result.plan.removed == 3
    exported = result.export_onnx(tmp_path / "onnx")
    assert exported.outputs == ("last_hidden_state", "sentence_embedding")
    assert read_served(tmp_path / "onnx").max_seq_length == 64


def test_a_promise_needs_so_many_queries() -> None:
    texts = [" ".join(WORDS[start : start + 5]) for start in range(40)]
    how: dict[str, Any] = {"processor": word_tokenizer(WORDS), "embedding": {"pooling": "cls"}, "criterion": "his"}
    with pytest.raises(RequestError, match="from 340 held-out queries or more, and there are 16"):
        prune(bert_encoder(), texts, budget={"keep": 0.99}, **how)


@pytest.mark.parametrize(
    ("embedding", "message"),
    [
        ({}, "embedding must have pooling .*, got neither"),
        ({"pooling": "mean", "norm": True}, "may have normalize .*, got norm, pooling"),
        ({"pooling": "sum"}, "pooling must be one of mean, cls, last, max, got 'sum'"),
    ],
)
def test_an_embedding_that_is_not_known(embedding: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        prune(bert_encoder(), [text_batch(labels=False)], budget={"heads": 0.5}, embedding=embedding)
