"""Batches of texts to embed and of candidates to order, against descriptions made by naive loops."""

import random
from collections import defaultdict
from typing import Any

import datasets
import pytest
import torch
from support.models import bert, word_tokenizer
from support.reading import reading
from support.sentences import embedder
from transformers import BertConfig, BertModel

from hies_export.data.batches import ROW_KEYS, batches_fingerprint, by_length, is_of_documents
from hies_export.data.rows import take
from hies_export.errors import DataError, RequestError
from hies_export.model.text_encoder import TextEncoder
from hies_export.recipe.sections import Columns
from hies_export.tasks import TASKS, Task, Use, task_of
from hies_export.tasks.given import batches_of

WORDS = [*"abcdefghijklmnop", "query", "passage", "B"]
EMBEDS = TASKS["feature-extraction"]
ASKED = {"query": "query", "document": "document"}


def tokenizer() -> Any:
    return word_tokenizer(WORDS, model_input_names=["input_ids", "token_type_ids", "attention_mask"])


def reader(**options: Any) -> Task:
    columns = Columns(**{key: options.pop(key) for key in list(options) if key in Columns.model_fields})
    return task_of(encoder(**options)).to_read(columns, tokenizer())


def rows_of(**columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns)


def read(of: Task, rows: datasets.Dataset, size: int = 4, use: Use = "score") -> list[Any]:
    of.check_rows(rows)
    return of.read(rows, size=size, use=use)


def texts_of(batches: list[Any]) -> list[str]:
    tokens = tokenizer()
    return [text for batch in batches for text in tokens.batch_decode(batch["input_ids"], skip_special_tokens=True)]


def some_words(chance: random.Random, most: int = 9) -> str:
    return " ".join(chance.choices("abcdefghijklmnop", k=chance.randint(1, most)))


def encoder(**options: Any) -> TextEncoder:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return embedder(BertModel(BertConfig(vocab_size=40, **sizes)), tokenizer(), **options)


@pytest.mark.parametrize("use", ["score", "judge", "time"])
def test_texts_alone_are_read_once_and_need_no_description(use: Use, caplog: pytest.LogCaptureFixture) -> None:
    rows = rows_of(text=["a b c", "d", "a b c", "e f", "d", "g h i j", "", " \n"])
    found = read(reader(text=("text",)), rows, size=2, use=use)
    distinct = ["a b c", "d", "e f", "g h i j"]
    assert texts_of(found) == (distinct if use == "time" else sorted(distinct, key=len))
    assert all(set(batch) == {"input_ids", "attention_mask", "token_type_ids"} for batch in found)
    assert [len(batch["input_ids"]) for batch in found] == [2, 2]
    assert "2 of 8 rows are blank in 'text' and left out" in caplog.text
    # Of two columns without a known similarity, both are texts.
    rows = rows_of(one=["a b", "c"], two=["c", "d"])
    assert sorted(texts_of(read(reader(text=("one", "two")), rows, use=use))) == ["a b", "c", "d"]


def test_each_kind_of_text_has_its_prompt_and_its_length() -> None:
    prompts = {"query": "query ", "passage": "passage ", "other": "B "}
    asked = rows_of(query=["a"], document=["a b"])
    of = reader(**ASKED, prompts=prompts)
    assert texts_of(read(of, asked)) == texts_of(read(of, asked, use="judge")) == ["query a", "passage a b"]
    of = reader(text=("text",), prompts=prompts, default_prompt_name="other")
    assert texts_of(read(of, rows_of(text=["a"]))) == ["B a"]
    asked = rows_of(query=["a b c d e f"], document=["g h i j k"])
    for limit, cut in ((5, ["a b", "g h i"]), (3, ["a", "g"])):  # beside two special tokens
        assert texts_of(read(reader(**ASKED, max_length=limit, query_length=4), asked)) == cut


def test_texts_of_pairs_are_found_again_by_number_and_side() -> None:
    chance = random.Random(0)
    pairs = [(some_words(chance), some_words(chance)) for _ in range(9)]
    scores = [chance.random() for _ in pairs]
    rows = rows_of(one=[a for a, _ in pairs], two=[b for _, b in pairs], score=scores)
    of = reader(text=("one", "two"), label="score")
    assert not set(ROW_KEYS) & {key for batch in read(of, rows) for key in batch}
    found = read(of, rows, use="judge")
    described = {key: torch.cat([batch[key] for batch in found]).tolist() for key in ("pair", "side", "score")}
    for text, pair, side, score in zip(texts_of(found), *described.values(), strict=True):
        assert text == pairs[pair][side]
        assert score == pytest.approx(scores[pair])
    assert sorted(zip(described["pair"], described["side"], strict=True)) == [(p, s) for p in range(9) for s in (0, 1)]
    assert found[0]["score"].dtype == torch.float32
    lengths = [int(row.sum()) for batch in found for row in batch["attention_mask"]]
    assert lengths == sorted(lengths)


def random_rows(chance: random.Random, *, labels: bool, lists: bool) -> datasets.Dataset:
    queries, documents, grades = [], [], []
    known = list(dict.fromkeys(some_words(chance) for _ in range(25)))
    for number in range(30):
        texts = chance.sample(known, chance.randint(1, 4)) if lists else [chance.choice(known)]
        queries.append(None if number % 7 == 3 else chance.choice(["a a", "b b b", "c", "d d d d", "e e"]))
        documents.append(texts if lists else texts[0])
        # A query has a relevant document at least.
        values = [float(chance.randint(0, 3)) for _ in texts[1:]] + [2.0]
        grades.append(values if lists else values[-1])
    return rows_of(query=queries, document=documents, **({"label": grades} if labels else {}))


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("lists", [False, True])
def test_queries_name_their_documents_in_batches_of_their_own_with_little_padding(labels: bool, lists: bool) -> None:
    rows = random_rows(random.Random(0), labels=labels, lists=lists)
    wanted: dict[str, dict[str, float]] = defaultdict(dict)
    corpus = set()
    for row in rows:
        texts = row["document"] if lists else [row["document"]]
        grades = [1.0] * len(texts) if not labels else row["label"] if lists else [row["label"]]
        corpus.update(texts)
        if row["query"]:
            for text, grade in zip(texts, grades, strict=True):
                wanted[row["query"]][text] = max(grade, wanted[row["query"]].get(text, 0))
    of = reader(**ASKED, label="label" if labels else None)
    plain = read(of, rows)
    assert sorted(texts_of(plain)) == sorted([*wanted, *corpus])
    assert not set(ROW_KEYS) & {key for batch in plain for key in batch}
    found = read(of, rows, use="judge")
    numbers = {key: torch.cat([batch[key] for batch in found]).tolist() for key in ("query", "document")}
    texts = texts_of(found)
    assert all(len({of >= 0 for of in batch["query"].tolist()}) == 1 for batch in found)
    assert (torch.tensor(numbers["query"]) >= 0).ne(torch.tensor(numbers["document"]) >= 0).all()
    documents = {number: text for number, text in zip(numbers["document"], texts, strict=True) if number >= 0}
    assert set(documents.values()) == corpus
    assert sorted(documents) == list(range(len(corpus)))
    assert sorted(number for number in numbers["query"] if number >= 0) == list(range(len(wanted)))
    relevant = torch.cat([batch["relevant"] for batch in found]).tolist()
    grades = torch.cat([batch["grades"] for batch in found])
    assert grades.dtype == torch.float32
    for text, query, of_row, graded in zip(texts, numbers["query"], relevant, grades.tolist(), strict=True):
        described = {documents[number]: grade for number, grade in zip(of_row, graded, strict=True) if number >= 0}
        assert described == ({t: g for t, g in wanted[text].items() if g > 0} if query >= 0 else {})
        assert all(grade == 0 for number, grade in zip(of_row, graded, strict=True) if number < 0)
    order = [(is_of_documents(batch), int(row.sum())) for batch in found for row in batch["attention_mask"]]
    assert order == sorted(order)
    assert batches_fingerprint(by_length(found, config=BertConfig())) == batches_fingerprint(found)


PAIR = {"text": ("a", "b")}


@pytest.mark.parametrize(
    ("columns", "read_by", "match"),
    [
        ({"text": ["", " "]}, {"text": ("text",)}, "at least one row must have text, but all of text are blank"),
        ({"a": ["x", "y"], "b": ["x", ""]}, PAIR, r"one of row 1 \(from 0\) is blank; remove such rows"),
        ({"a": ["x"], "b": ["y"], "s": ["no"]}, PAIR | {"label": "s"}, "similarity .* must be a number, .*'no'"),
        ({"a": ["x"], "b": ["y"], "s": [None]}, PAIR | {"label": "s"}, "similarity .* must be a number, .*None"),
        ({"a": ["x"], "s": [1.0]}, {"text": ("a",), "label": "s"}, "the similarity of two, but data.text names one"),
        ({"query": [None, ""], "document": ["a", "b"]}, ASKED, "must have a query, but all of 'query' are blank"),
        ({"query": ["a", "b"], "document": ["a", " "]}, ASKED, r"a document .* row 1 \(from 0\) has ' ' in"),
        ({"query": ["a", "b"], "document": [["a"], []]}, ASKED, r"row 1 \(from 0\) has \[\] in 'document'; remove"),
        ({"query": ["a"], "document": [1]}, ASKED, "must hold a text or a list of texts, but it holds int64"),
        ({"query": [1], "document": ["a"]}, ASKED, "'query' must hold text, but it holds int64"),
        ({"query": ["a"]}, ASKED, "the data must have the column 'document', but it has query"),
        (
            {"query": ["a"], "document": [["a", "b"]], "label": [[1]]},
            ASKED | {"label": "label"},
            r"a number in 'label' for each .* row 0 \(from 0\) has \[1\] for 2",
        ),
        ({"query": ["a"], "document": ["a"], "text": ["a"]}, ASKED | {"text": ("text",)}, "feature-extraction needs"),
    ],
)
def test_what_cannot_be_read_is_refused_before_any_work(columns: Any, read_by: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        reader(**read_by).check_rows(rows_of(**columns))


def test_rows_without_a_query_or_a_relevant_document() -> None:
    rows = rows_of(query=["a", "b"], document=["c", "d"], label=[1, 0])
    of = reader(**ASKED, label="label")
    assert len(texts_of(read(of, rows))) == 4
    with pytest.raises(DataError, match="every query must have a relevant document .* 'b' has none; remove its rows"):
        read(of, rows, use="judge")
    # The first rows of a file are timed.
    rows = rows_of(query=[None, None, "c"], document=["a", "b", "d"])
    batches = reader(**ASKED).read(rows.select(range(2)), size=4, use="judge")
    assert texts_of(batches) == ["a", "b"]
    assert batches[0]["relevant"].tolist() == [[-1], [-1]]


def reranker(labels: int = 1, **options: Any) -> Any:
    config, tokens = BertConfig(num_labels=labels), tokenizer()
    columns = Columns(text=("query", "document"), **({"group": "id"} | options))
    return reading("text-classification", columns=columns, config=config, processor=tokens)


CANDIDATES = {
    "query": ["a", "b", "a", "c", "b"],
    "document": ["d", "e f", "g", "h", "i"],
    "id": ["x", "y", "x", "z", "y"],
    "label": [1, 0, 2, 1, 3],
}


def test_candidates_are_numbered_by_their_query_and_have_grades_when_judged() -> None:
    rows = rows_of(**CANDIDATES)
    of = reranker(label="label")
    found = read(of, rows, size=3)
    assert torch.cat([batch["group"] for batch in found]).tolist() == [0, 1, 0, 2, 1]
    assert all(set(batch) == {"input_ids", "attention_mask", "token_type_ids", "group"} for batch in found)
    found = read(of, rows, size=3, use="judge")
    assert torch.cat([batch["grades"] for batch in found]).tolist() == [1, 0, 2, 1, 3]
    assert found[0]["grades"].dtype == torch.float32
    assert found[0]["group"].dtype == torch.int64
    assert "labels" not in found[0]
    assert "grades" not in read(reranker(), rows, use="judge")[0]
    sorted_ = by_length(found, config=BertConfig())
    assert torch.cat([batch["group"] for batch in sorted_]).tolist() == [0, 0, 2, 1, 1]
    assert torch.cat([batch["grades"] for batch in sorted_]).tolist() == [1, 2, 1, 3, 0]


@pytest.mark.parametrize(
    ("change", "options", "match"),
    [
        ({}, {"labels": 3}, "for rerankers, whose model has one label, but this one has 3; leave data.group"),
        ({"id": ["x", None, "x", "z", "y"]}, {}, r"every row must have a 'id', but row 1 \(from 0\) has "),
        ({"id": [" ", *"xyzx"]}, {}, r"every row must have a 'id', but row 0 \(from 0\) has "),
        ({"id": [[1]] * 5}, {}, "'id' must hold a text or a number per row, got List"),
        ({"label": list("abcde")}, {"label": "label"}, "how much a candidate is wanted must be a number, but row 0"),
    ],
)
def test_what_is_no_reranker_is_refused(change: Any, options: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        reranker(**options).check_rows(rows_of(**(CANDIDATES | change)))


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("in_order", [False, True])
def test_rows_of_a_query_are_drawn_together(seed: int | None, in_order: bool) -> None:
    chance = random.Random(5)
    values = [chance.choice(["", None, *"abcdefgh"]) for _ in range(60)]
    rows = rows_of(query=values, number=range(60))
    by_query = defaultdict(set)
    for number, value in enumerate(values):
        by_query[value or None].add(number)
    blank = by_query.pop(None)
    for samples in (1, 7, 20, 40, 55, 60, None):
        drawn = take(rows, samples=samples, shuffle_seed=seed, in_order=in_order, together="query")["number"][:]
        assert len(drawn) == len(set(drawn))
        if in_order:
            assert drawn == sorted(drawn)
        whole = [query for query, members in by_query.items() if members <= set(drawn)]
        assert sum(len(by_query[query]) for query in whole) == len(set(drawn) - blank)
        # No more than it takes to reach the number, and what has no query only afterwards.
        assert samples is None or samples <= len(drawn) < samples + max(map(len, by_query.values()))
        assert not set(drawn) & blank or len(whole) == len(by_query)
    orders = {tuple(take(rows, samples=None, shuffle_seed=s, together="query")["number"][:]) for s in range(3)}
    assert len(orders) == 3


def given(model: Any, texts: Any, task: Task | None = None, **options: Any) -> list[Any]:
    options = {"processor": tokenizer(), "columns": None} | options
    return batches_of(model, texts, what="batches", task=task or task_of(model), **options)


def test_a_list_of_texts_is_read_as_the_rows_of_a_data_set() -> None:
    texts = ["a b", "c", "a b", "d e f"]
    model = encoder(max_seq_length=5, prompts={"x": "passage "}, default_prompt_name="x")
    for rows in (texts, rows_of(text=texts)):
        assert texts_of(given(model, rows)) == ["passage c", "passage a b", "passage d e"]
    # Pairs are grouped by their queries where there is one label.
    pairs = [("a", "b"), ("c", "d"), ["a", "e"]]
    (found,) = given(bert(num_labels=1), pairs)
    assert texts_of([found]) == ["a b", "c d", "a e"]
    assert found["group"].tolist() == [0, 1, 0]
    (found,) = given(bert(num_labels=3), pairs)
    assert "group" not in found


@pytest.mark.parametrize(
    ("texts", "task", "options", "error", "match"),
    [
        ("a", "feature-extraction", {}, DataError, "must be a list or a DataLoader of batches, got a str"),
        (["a", " "], "feature-extraction", {}, DataError, r"none of them blank, .* item 1 \(from 0\) is ' '"),
        (["a", 5], "feature-extraction", {}, DataError, r"texts only, .* item 1 \(from 0\) is 5"),
        (["a"], "feature-extraction", {"processor": None}, RequestError, "needs processor=, the model's tokenizer"),
        ([("a", "b"), "c"], "text-classification", {}, DataError, r"pairs of texts only, .* item 1 \(from 0\) is 'c'"),
        ([("a", "")], "text-classification", {}, DataError, r"pairs of texts only, none of them blank, .* item 0"),
        (["a"], "text-generation", {}, DataError, "must be batches or a data set, got a list of texts"),
    ],
)
def test_bad_lists_of_texts(texts: Any, task: str, options: Any, error: type[Exception], match: str) -> None:
    model = encoder() if task == "feature-extraction" else bert(num_labels=1)
    with pytest.raises(error, match=match):
        given(model, texts, TASKS[task](model.config) if task == "text-generation" else None, **options)


def test_a_data_set_of_queries_describes_its_rows_when_judged() -> None:
    rows = rows_of(query=["a", "b"], document=["c", "d"])
    assert not set(ROW_KEYS) & set(given(encoder(), rows)[0])
    found = given(encoder(), rows, use="judge")
    assert [set(batch) >= {"query", "document", "relevant", "grades"} for batch in found] == [True, True]
