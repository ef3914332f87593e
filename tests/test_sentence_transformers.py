"""sentence-transformers itself, where it is installed: it loads our folders, and gives our embeddings."""

from pathlib import Path

import pytest
import torch
from support.cuts import random_neurons
from support.sentences import MEAN, WIDTH, WORDS, dense, sentence_folder
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hies_export import find_modules, prune_units, save_slim
from hies_export.checkpoint.sentence import load_sentence
from hies_export.model.sentence import TextEncoder
from hies_export.values import PruningPlan

st = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
# It warns of its own older names, and of what it does not find on the Hub.
pytestmark = pytest.mark.filterwarnings("default")

TEXTS = [" ".join(WORDS[start : start + count]) for start, count in ((0, 3), (10, 7), (20, 1), (5, 30), (40, 11))]
FOLDERS = {
    "mean": ({}, [("Normalize", {}, {})]),
    "cls": ({"embedding_dimension": WIDTH, "pooling_mode": "cls"}, []),
    "last": ({"word_embedding_dimension": WIDTH, "pooling_mode_lasttoken": True}, [dense(WIDTH, 12)]),
    "two": (MEAN | {"pooling_mode_max_tokens": True}, [dense(2 * WIDTH, 12), ("Normalize", {}, {})]),
    "weighted": ({"word_embedding_dimension": WIDTH, "pooling_mode_weightedmean_tokens": True}, []),
}


def encode(model: TextEncoder, tokenizer: PreTrainedTokenizerBase, texts: list[str], length: int = 16) -> Tensor:
    batch = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
    with torch.no_grad():
        found = model(**batch).sentence_embedding
    assert found is not None
    return found


def slim_folder(source: Path, folder: Path) -> tuple[TextEncoder, PreTrainedTokenizerBase]:
    """Cut a SentenceTransformer at random, and save it."""
    model, tokenizer = load_sentence(source), AutoTokenizer.from_pretrained(source)
    batch = dict(tokenizer(TEXTS, padding=True, truncation=True, max_length=16, return_tensors="pt"))
    modules = find_modules(model, batch, kinds=("attention", "mlp"))
    kept = random_neurons(modules, uniform=False)
    slim = prune_units(model, kept, modules)
    save_slim(slim, folder, plan=PruningPlan(kept=kept, criterion="random"), batch=batch, processor=tokenizer)
    assert isinstance(slim, TextEncoder)
    return slim, tokenizer


@pytest.mark.parametrize("name", FOLDERS)
def test_dense_and_slim_folders_embed_as_ours(name: str, tmp_path: Path) -> None:
    pooling, layers = FOLDERS[name]
    source = sentence_folder(tmp_path / "dense", layers, pooling=pooling or None)
    slim, tokenizer = slim_folder(source, tmp_path / "slim")
    for model, folder in ((load_sentence(source), source), (slim, tmp_path / "slim")):
        theirs = st.SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
        found = torch.tensor(theirs.encode(TEXTS))
        torch.testing.assert_close(found, encode(model, tokenizer, TEXTS), atol=1e-5, rtol=0)
        assert theirs.max_seq_length == 16


def test_lowercase_and_prompts(tmp_path: Path) -> None:
    options = {"prompts": {"query": "w1 w2 "}, "default_prompt_name": None}
    text = {"max_seq_length": 16, "do_lower_case": True}
    source = sentence_folder(tmp_path / "dense", options=options, text=text)
    slim, tokenizer = slim_folder(source, tmp_path / "slim")
    theirs = st.SentenceTransformer(str(tmp_path / "slim"), device="cpu", trust_remote_code=True)
    assert slim.settings.prompts == {"query": "w1 w2 "}
    expected = encode(slim, tokenizer, [slim.settings.prompts["query"] + text for text in TEXTS])
    found = torch.tensor(theirs.encode_query([text.upper() for text in TEXTS]))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
