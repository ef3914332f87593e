"""sentence-transformers itself: what is cut, saved and served of its models gives its own numbers."""

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers as st
import torch
from sentence_transformers.sentence_transformer.modules import Normalize
from support.cuts import random_neurons
from support.models import WORDS as GOOD
from support.models import save_text_model, text_batch, word_tokenizer
from support.runs import hies
from support.sentences import (
    MEAN,
    WIDTH,
    WORDS,
    bert_encoder,
    dense,
    in_memory,
    load_embedder,
    sentence_folder,
    t5_encoder,
)
from torch import Tensor

from hies_export import ReloadMismatchError, RequestError, find_modules, prune, prune_units, save_slim
from hies_export.model.text_encoder import TextEncoder
from hies_export.select.plan import PruningPlan

# It warns of its own older names, and of what it does not find on the Hub.
pytestmark = pytest.mark.filterwarnings("default")

TEXTS = [" ".join(WORDS[start : start + count]) for start, count in ((0, 3), (10, 7), (20, 1), (5, 30), (40, 11))]
MANY = [*TEXTS, *(" ".join(WORDS[start : start + 5]) for start in range(40))]
NORM = {"norm.weight": torch.linspace(0.5, 1.5, 20), "norm.bias": torch.linspace(-1, 1, 20)}
FLAG = "pooling_mode_{}_tokens"
# How texts are embedded, and how they are read, in the words of older and newer releases.
FOLDERS: dict[str, dict[str, Any]] = {
    "last": {"pooling": {"word_embedding_dimension": WIDTH, "pooling_mode_lasttoken": True}},
    "two": {"pooling": MEAN | {FLAG.format("max"): True}, "layers": [dense(2 * WIDTH, 12), ("Normalize", {}, {})]},
    "weighted": {"pooling": {"embedding_dimension": WIDTH, "pooling_mode": "weightedmean"}},
    "layers": {
        "layers": [("Dropout", {"dropout": 0.5}, {}), dense(WIDTH, 20), ("LayerNorm", {"dimension": 20}, NORM)],
        "options": {"similarity_fn_name": "dot", "truncate_dim": 7},
    },
    "prompts": {
        "options": {"prompts": {"query": "w1 w2 ", "passage": "w3 ", "x": "w5 "}, "default_prompt_name": "x"},
        "text": {"max_seq_length": 16, "do_lower_case": True, "query_length": 6},
    },
    "call": {
        "text": {
            "processing_kwargs": {"common": {"max_length": 7}, "text": {"add_special_tokens": False}},
            "tokenizer_args": {"model_max_length": 8, "truncation_side": "left"},
        },
        "options": {"similarity_fn_name": "euclidean"},
    },
    "T5": {"encoder": "T5"},
    "UMT5": {"encoder": "UMT5"},
}
SERVED = ("last", "layers", "call", "T5")  # a trace takes seconds; the exporter compares every graph with torch itself


def folder_of(name: str, folder: Path) -> Path:
    given = FOLDERS[name]
    encoder = t5_encoder(given["encoder"]) if "encoder" in given else bert_encoder(num_hidden_layers=1)
    return sentence_folder(folder, **given | {"encoder": encoder})


def ours(model: TextEncoder) -> Tensor:
    """Return the embeddings of queries, documents and other texts, as they are read and computed here."""
    found = []
    for kind in ("query", "document", "text"):
        with torch.no_grad():
            found.append(model(**model.reader.read(kind, TEXTS)).sentence_embedding)
    return torch.cat(found)


def theirs(folder: Path) -> Tensor:
    """Return the same by sentence-transformers."""
    model = st.SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    ways = (model.encode_query, model.encode_document, model.encode)
    return torch.cat([torch.tensor(encode(TEXTS)) for encode in ways])


@pytest.mark.parametrize("name", FOLDERS)
def test_dense_slim_and_served_folders_give_one_set_of_numbers(name: str, tmp_path: Path) -> None:
    source = folder_of(name, tmp_path / "dense")
    model = load_embedder(source)
    torch.testing.assert_close(ours(model), theirs(source), atol=1e-5, rtol=0)
    batch = model.reader.read("text", TEXTS)
    modules = find_modules(model, batch, kinds=("attention", "mlp"))
    plan = PruningPlan(kept=random_neurons(modules, uniform=False), criterion="random")
    slim: Any = prune_units(model, plan, modules)
    save_slim(slim, tmp_path / "slim", plan=plan, batch=batch)
    torch.testing.assert_close(ours(slim), theirs(tmp_path / "slim"), atol=1e-5, rtol=0)
    torch.testing.assert_close(ours(load_embedder(tmp_path / "slim")), ours(slim))
    there = st.SentenceTransformer(str(tmp_path / "slim"), device="cpu", trust_remote_code=True)
    assert there.similarity_fn_name == FOLDERS[name].get("options", {}).get("similarity_fn_name", "cosine")
    there.save_pretrained(str(tmp_path / "again"))
    torch.testing.assert_close(ours(slim), theirs(tmp_path / "again"), atol=1e-5, rtol=0)
    if name in SERVED:
        assert hies("export", tmp_path / "slim", "-o", tmp_path / "served") == 0
        torch.testing.assert_close(ours(slim), theirs(tmp_path / "served"), atol=1e-4, rtol=0)


def test_what_is_served_is_sent_to_other_processes_and_saved(tmp_path: Path) -> None:
    source = folder_of("prompts", tmp_path / "dense")
    assert hies("export", source, "-o", tmp_path / "served") == 0
    model = st.SentenceTransformer(str(tmp_path / "served"), trust_remote_code=True)
    expected = model.encode(TEXTS)
    torch.testing.assert_close(theirs(tmp_path / "served"), theirs(source), atol=1e-4, rtol=0)
    np.testing.assert_allclose(pickle.loads(pickle.dumps(model)).encode(TEXTS), expected, atol=1e-6)
    model.max_seq_length = 4
    model.save_pretrained(str(tmp_path / "again"))
    again = st.SentenceTransformer(str(tmp_path / "again"), trust_remote_code=True)
    assert again.max_seq_length == 4
    assert again.get_embedding_dimension() == WIDTH
    np.testing.assert_allclose(again.encode(TEXTS[:1]), model.encode(TEXTS[:1]), atol=1e-6)


def test_what_is_not_saved_there_is_not_kept(tmp_path: Path) -> None:
    given = st.SentenceTransformer(str(sentence_folder(tmp_path / "dense", [dense(WIDTH, 12)])), device="cpu")
    given[2].activation_function = torch.nn.LeakyReLU(0.5)
    result = prune(given, MANY, budget={"heads": 0.5})
    with pytest.raises(ReloadMismatchError, match="but in sentence-transformers it differs by .*; nothing was kept"):
        result.save_pretrained(tmp_path / "slim")
    assert not (tmp_path / "slim").exists()


def test_prune_gives_back_a_sentence_transformer(tmp_path: Path) -> None:
    options = {"prompts": {"query": "w1 w2 ", "other": "w3 "}, "default_prompt_name": "other"}
    source = sentence_folder(tmp_path / "dense", [dense(WIDTH, 12), ("Normalize", {}, {})], options=options)
    given = st.SentenceTransformer(str(source), device="cpu")
    before, config = given.encode(TEXTS), given[0].model.config.to_dict()
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=6)) for _ in range(40)]
    result = prune(given, texts, budget={"heads": 0.5}, criterion="his", compensation={"method": "least_squares"})
    slim = result.model
    assert type(slim) is st.SentenceTransformer
    assert slim is not given
    assert sum(p.numel() for p in slim.parameters()) < sum(p.numel() for p in given.parameters())
    torch.testing.assert_close(torch.tensor(slim.encode(TEXTS)), ours(result.slim.model)[-len(TEXTS) :])
    assert abs(slim.encode(TEXTS) - before).max() > 1e-3
    np.testing.assert_allclose(given.encode(TEXTS), before, atol=1e-6)
    assert given[0].model.config.to_dict() == config
    # Pruning read the texts with the prompt.
    expected = given.tokenizer("w3 " + texts[0])["input_ids"]
    assert any(row.tolist()[: len(expected)] == expected for row in result.pruning.rows.score[0]["input_ids"])
    result.save_pretrained(tmp_path / "slim")
    again = st.SentenceTransformer(str(tmp_path / "slim"), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(again.encode(TEXTS), slim.encode(TEXTS), atol=1e-6)
    assert (again.prompts, again.default_prompt_name) == (slim.prompts, slim.default_prompt_name)


def test_prune_gives_back_a_cross_encoder(tmp_path: Path) -> None:
    save_text_model(tmp_path / "dense", num_labels=1)
    given = st.CrossEncoder(str(tmp_path / "dense"), device="cpu", activation_fn=torch.nn.Identity())
    chance = random.Random(0)
    pairs = [(f"w{query}", " ".join(chance.choices(GOOD, k=4))) for query in range(8) for _ in range(6)]
    before = given.predict(pairs)
    result = prune(given, pairs, budget={"heads": 0.5}, criterion="his")
    slim = result.model
    assert type(slim) is st.CrossEncoder
    assert slim.model is result.slim.model
    assert abs(slim.predict(pairs) - before).max() > 1e-3
    np.testing.assert_allclose(given.predict(pairs), before, atol=1e-6)
    result.save_pretrained(tmp_path / "slim")
    again = st.CrossEncoder(str(tmp_path / "slim"), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(again.predict(pairs), slim.predict(pairs), atol=1e-6)
    assert type(again.activation_fn) is torch.nn.Identity


def test_one_that_was_made_in_memory_is_pruned(tmp_path: Path) -> None:
    given = in_memory(bert_encoder(), word_tokenizer(WORDS), Normalize())
    batches = [text_batch(labels=False) for _ in range(8)]
    how: dict[str, Any] = {"budget": {"heads": 0.5}, "criterion": "his"}
    result = prune(given, batches, **how)
    assert result.plan.removed == 9
    assert type(result.model) is st.SentenceTransformer
    with torch.no_grad():
        hidden = result.model[0].model(**batches[0]).last_hidden_state
        mask = batches[0]["attention_mask"][..., None]
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        result.save_pretrained(tmp_path / "slim")
        saved = load_embedder(tmp_path / "slim")(**batches[0]).sentence_embedding
    torch.testing.assert_close(saved, pooled / pooled.norm(dim=1, keepdim=True), atol=1e-6, rtol=1e-5)
    with pytest.raises(RequestError, match="from 340 held-out queries or more, and there are"):
        prune(given, MANY, **how | {"budget": {"keep": 0.99}})


def test_what_sentence_transformers_has_besides_is_refused(tmp_path: Path) -> None:
    source = str(sentence_folder(tmp_path / "dense"))
    sparse = st.SparseEncoder(modules=[st.SentenceTransformer(source, device="cpu")[0]], device="cpu")
    with pytest.raises(RequestError, match="is a SparseEncoder, which gives others; give a SentenceTransfo"):
        prune(sparse, TEXTS, budget={"heads": 0.5})
