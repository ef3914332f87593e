"""sentence-transformers itself, where it is installed: it loads our folders, and gives our embeddings."""

import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from support.cuts import random_neurons
from support.models import WORDS as GOOD
from support.models import save_text_model
from support.runs import hies
from support.sentences import MEAN, WIDTH, WORDS, dense, sentence_folder, t5_encoder
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hies_export import (
    PruningRecipe,
    ReloadMismatchError,
    RequestError,
    find_modules,
    prune,
    prune_units,
    save_slim,
)
from hies_export.checkpoint import sentence
from hies_export.checkpoint.beside import write_json
from hies_export.checkpoint.sentence import load_sentence, write_text_settings
from hies_export.data.batches import inputs_of
from hies_export.model.text_encoder import TextEncoder
from hies_export.pipeline.load_job import load_job
from hies_export.recipe.sections import Columns
from hies_export.select.plan import PruningPlan
from hies_export.tasks import task_of

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


ASKED = {
    "query_length": {"query_length": 6},
    "document_length": {"document_length": 6},
    "call": {"processing_kwargs": {"common": {"max_length": 7}, "text": {"add_special_tokens": False}}},
    "tokenizer": {"tokenizer_args": {"model_max_length": 8, "truncation_side": "left"}, "do_lower_case": True},
}


@pytest.mark.parametrize("name", ASKED)
def test_what_a_folder_asks_for_is_told_kept_and_served(name: str, tmp_path: Path) -> None:
    options = {"prompts": {"query": "w1 w2 ", "passage": "w3 "}, "similarity_fn_name": "euclidean", "truncate_dim": 7}
    text = {"max_seq_length": 16} | ASKED[name]
    source = sentence_folder(tmp_path / "dense", text=text, options=options)
    slim, tokenizer = slim_folder(source, tmp_path / "slim")
    assert hies("export", tmp_path / "slim", "-o", tmp_path / "served") == 0
    rows = Dataset.from_dict({"query": TEXTS, "document": TEXTS, "text": TEXTS})
    kinds = (Columns(query="query", document="document"), Columns(text=("text",)))
    tasks = [task_of(slim).to_read(columns, tokenizer) for columns in kinds]
    batches = [batch for task in tasks for batch in task.read(rows, size=9, use="time")]
    with torch.no_grad():
        expected = [slim(**inputs_of(batch)).sentence_embedding for batch in batches]
    for folder in ("slim", "served"):
        theirs = st.SentenceTransformer(str(tmp_path / folder), device="cpu", trust_remote_code=True)
        assert theirs.similarity_fn_name == slim.settings.similarity == "euclidean"
        for encode_by, ours in zip((theirs.encode_query, theirs.encode_document, theirs.encode), expected, strict=True):
            torch.testing.assert_close(torch.tensor(encode_by(TEXTS)), ours, atol=1e-4, rtol=0)


def test_a_folder_that_gives_other_numbers_there_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sentence_folder(tmp_path / "dense", text={"query_length": 6})
    written = write_text_settings
    monkeypatch.setattr(
        sentence, "write_text_settings", lambda m, f: written(m, f) or write_json(f / "sentence_bert_config.json", {})
    )
    with pytest.raises(ReloadMismatchError, match="must give in sentence-transformers what it gives here, but it diff"):
        slim_folder(source, tmp_path / "slim")
    assert not (tmp_path / "slim").exists()


def test_a_given_folder_that_gives_other_numbers_there_is_refused_before_the_work(tmp_path: Path) -> None:
    source = sentence_folder(tmp_path / "dense", options={"requirements": {"transformers": ">=99"}})
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    recipe = PruningRecipe(
        model=str(source),
        task="feature-extraction",
        data={"text": ["text"], "files": {"train": str(rows)}},
        calibration={"split": "train", "samples": 4},
        evaluation={"split": "train"},
        prune={"budget": {"heads": 0.5}},
        output=str(tmp_path / "out"),
    )
    with pytest.raises(
        RequestError, match=r"fails with: .*requires.*transformers>=99.*correct the settings in its files"
    ):
        load_job(recipe)


def test_the_encoder_of_a_t5_loads_by_a_class_of_its_own(tmp_path: Path) -> None:
    source = sentence_folder(tmp_path / "dense", encoder=t5_encoder("T5"))
    slim, tokenizer = slim_folder(source, tmp_path / "slim")
    theirs = st.SentenceTransformer(str(tmp_path / "slim"), device="cpu", trust_remote_code=True)
    expected = encode(slim, tokenizer, TEXTS)
    torch.testing.assert_close(torch.tensor(theirs.encode(TEXTS)), expected, atol=1e-5, rtol=0)
    theirs.save_pretrained(str(tmp_path / "again"))
    again = st.SentenceTransformer(str(tmp_path / "again"), device="cpu", trust_remote_code=True)
    torch.testing.assert_close(torch.tensor(again.encode(TEXTS)), expected, atol=1e-5, rtol=0)


def test_a_layer_that_no_file_describes_is_refused(tmp_path: Path) -> None:
    given = st.SentenceTransformer(str(sentence_folder(tmp_path / "dense", [dense(WIDTH, 12)])), device="cpu")
    given[2].activation_function = torch.nn.LeakyReLU(0.5)
    with pytest.raises(RequestError, match="it differs by .*; save it, load it again, and prune that"):
        prune(given, TEXTS * 4, budget={"heads": 0.5})


def test_prune_gives_back_a_sentence_transformer(tmp_path: Path) -> None:
    options = {"prompts": {"query": "w1 w2 ", "other": "w3 "}, "default_prompt_name": "other"}
    source = sentence_folder(tmp_path / "dense", [dense(WIDTH, 12), ("Normalize", {}, {})], options=options)
    given = st.SentenceTransformer(str(source), device="cpu")
    before, config = given.encode(TEXTS), given[0].model.config.to_dict()
    texts = [" ".join(random.choices(WORDS, k=6)) for _ in range(40)]
    result = prune(given, texts, budget={"heads": 0.5}, criterion="his", compensation={"method": "least_squares"})
    slim = result.model
    assert type(slim) is st.SentenceTransformer
    assert slim is not given
    # It is the slim model that answers, with the default prompt, and the given one is what it was.
    assert sum(p.numel() for p in slim.parameters()) < sum(p.numel() for p in given.parameters())
    prompted = ["w3 " + text for text in TEXTS]
    torch.testing.assert_close(torch.tensor(slim.encode(TEXTS)), encode(result.slim.model, given.tokenizer, prompted))
    assert abs(slim.encode(TEXTS) - before).max() > 1e-3
    np.testing.assert_array_equal(given.encode(TEXTS), before)
    assert given[0].model.config.to_dict() == config
    # Pruning read the texts with the prompt.
    expected = given.tokenizer("w3 " + texts[0])["input_ids"]
    assert any(row.tolist()[: len(expected)] == expected for row in result.job.rows.score[0]["input_ids"])
    result.save_pretrained(tmp_path / "slim")
    again = st.SentenceTransformer(str(tmp_path / "slim"), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(again.encode(TEXTS), slim.encode(TEXTS), atol=1e-6)
    assert (again.prompts, again.default_prompt_name) == (slim.prompts, slim.default_prompt_name)


def test_prune_gives_back_a_cross_encoder(tmp_path: Path) -> None:
    save_text_model(tmp_path / "dense", num_labels=1)
    given = st.CrossEncoder(str(tmp_path / "dense"), device="cpu", activation_fn=torch.nn.Identity())
    pairs = [(f"w{query}", " ".join(random.choices(GOOD, k=4))) for query in range(8) for _ in range(6)]
    before = given.predict(pairs)
    result = prune(given, pairs, budget={"heads": 0.5}, criterion="his")
    slim = result.model
    assert type(slim) is st.CrossEncoder
    assert slim.model is result.slim.model
    assert abs(slim.predict(pairs) - before).max() > 1e-3
    np.testing.assert_array_equal(given.predict(pairs), before)
    result.save_pretrained(tmp_path / "slim")
    again = st.CrossEncoder(str(tmp_path / "slim"), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(again.predict(pairs), slim.predict(pairs), atol=1e-6)
    assert type(again.activation_fn) is torch.nn.Identity


def test_what_sentence_transformers_has_besides_is_refused(tmp_path: Path) -> None:
    source = str(sentence_folder(tmp_path / "dense"))
    sparse = st.SparseEncoder(modules=[st.SentenceTransformer(source, device="cpu")[0]], device="cpu")
    with pytest.raises(RequestError, match="a SparseEncoder gives others; give a SentenceTransformer or a CrossEnc"):
        prune(sparse, TEXTS, budget={"heads": 0.5})
    with pytest.raises(RequestError, match="embedding= is for an encoder of transformers that has no pooling yet"):
        prune(st.SentenceTransformer(source), TEXTS, budget={"heads": 0.5}, embedding={"pooling": "mean"})


def test_an_export_runs_and_embeds_as_torch(tmp_path: Path) -> None:
    options = {"prompts": {"query": "w1 w2 "}, "default_prompt_name": None}
    text = {"max_seq_length": 16, "do_lower_case": True}
    layers = [dense(WIDTH, 12), ("Normalize", {}, {})]
    slim_folder(sentence_folder(tmp_path / "dense", layers, options=options, text=text), tmp_path / "slim")
    for name in ("dense", "slim"):
        assert hies("export", tmp_path / name, "-o", tmp_path / f"served-{name}") == 0
        torch_model = st.SentenceTransformer(str(tmp_path / name), device="cpu", trust_remote_code=True)
        served = st.SentenceTransformer(str(tmp_path / f"served-{name}"), device="cpu", trust_remote_code=True)
        mixed = [text.upper() if number % 2 else text for number, text in enumerate(TEXTS)]
        for encode_by in ("encode", "encode_query"):
            found, expected = (getattr(model, encode_by)(mixed) for model in (served, torch_model))
            np.testing.assert_allclose(found, expected, atol=1e-4)
        tokens = zip(*(m.encode(TEXTS, output_value="token_embeddings") for m in (served, torch_model)), strict=True)
        assert all(torch.allclose(one, other, atol=1e-4) for one, other in tokens)
        assert (served.max_seq_length, served.get_embedding_dimension()) == (16, 12)
    served.max_seq_length = torch_model.max_seq_length = 5
    np.testing.assert_allclose(served.encode(TEXTS), torch_model.encode(TEXTS), atol=1e-4)
    served.save_pretrained(str(tmp_path / "again"))
    again = st.SentenceTransformer(str(tmp_path / "again"), device="cpu", trust_remote_code=True)
    for copied in (again, pickle.loads(pickle.dumps(served))):
        np.testing.assert_array_equal(copied.encode(TEXTS), served.encode(TEXTS))
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        st.SentenceTransformer(str(tmp_path / "again"))
