"""Words and texts with spans, against a loop that cuts every word into pieces by hand; what is refused."""

from typing import Any

import datasets
import pytest
import tokenizers
import torch
from support.reading import reading
from support.tags import TAGS, pieces_of, sentences, tag_tokenizer, tagger, words_of
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, PreTrainedTokenizerFast

from hies_export.data.rows import number_rows
from hies_export.errors import DataError
from hies_export.recipe.sections import Columns
from hies_export.tasks import TASKS, Task
from hies_export.tasks.given import unlabelled

TASK = TASKS["token-classification"]


def named(*names: str) -> dict[str, Any]:
    """Return the fields of a config whose classes have these names."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


def rows_of(rows: list[dict[str, Any]], feature: Any = None) -> datasets.Dataset:
    found = datasets.Dataset.from_list(rows)
    if not any(row.get("tokens", True) for row in rows):
        found = found.cast_column("tokens", datasets.List(datasets.Value("string")))
    if feature is not None:
        found = found.cast_column("ner_tags", feature)
    return number_rows(found, source="train.jsonl")


def reader(label: str | None = "ner_tags", text: str = "tokens", **fields: Any) -> Task:
    usual = {"config": tagger().config, "processor": tag_tokenizer()}
    return reading(TASK.name, columns=Columns(text=(text,), label=label), **(usual | fields))


def first_batch(rows: datasets.Dataset, **fields: Any) -> dict[str, torch.Tensor]:
    read = reader(**fields)
    read.check_rows(rows)
    return next(iter(read.read(rows, size=8)))


def by_hand(words: list[list[str]], tags: list[list[str]], *, limit: int = 64) -> dict[str, Any]:
    """Return the batch of these words, without a tokenizer."""
    lines = []
    for of_row, tags_of_row in zip(words, tags, strict=True):
        tokens = [(piece, TAGS.index(tag) if first else -100)
                  for word, tag in zip(of_row, tags_of_row, strict=True)
                  for piece, first in zip(pieces_of(word), [True] + [False] * 9, strict=False)]  # fmt: skip
        lines.append([(2, -100), *tokens[: limit - 2], (3, -100)])
    longest = max(map(len, lines))
    mask = [[1] * len(line) for line in lines]
    for line, of_line in zip(lines, mask, strict=True):
        while len(line) < longest:
            line.append((0, -100))
            of_line.append(0)
    labels = torch.tensor([[label for _, label in line] for line in lines])
    ids = torch.tensor([[piece for piece, _ in line] for line in lines])
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.tensor(mask), "judged": labels != -100}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("limit", [None, 7])
def test_the_first_token_of_a_word_has_its_class(side: str, limit: int | None) -> None:
    rows, given = sentences(11), rows_of(sentences(11))
    decoder = LlamaConfig(**named(*TAGS), pad_token_id=0, max_position_embeddings=64)
    config = decoder if side == "left" else tagger().config
    read = reader(config=config, processor=tag_tokenizer(padding_side=side), max_length=limit)
    read.check_rows(given)
    batches = read.read(given, size=4)
    assert len(batches) == 3
    for start, batch in zip((0, 4, 8), batches, strict=True):
        part = rows[start : start + 4]
        words, tags = ([row[name] for row in part] for name in ("tokens", "ner_tags"))
        assert_same(batch, by_hand(words, tags, limit=limit or 64))
    for with_labels, without in zip(batches, unlabelled(batches, read), strict=True):
        assert with_labels.keys() - without.keys() == {"labels"}
        assert_same(without, {"judged": with_labels["judged"]})


@pytest.mark.parametrize(
    ("write", "feature"),
    [
        (TAGS.index, None),
        (str.upper, None),
        (TAGS[::-1].index, datasets.List(datasets.ClassLabel(names=TAGS[::-1]))),
    ],
    ids=["numbers", "names in capitals", "numbers of names"],
)
def test_classes_are_numbers_or_names(write: Any, feature: Any) -> None:
    rows = sentences(5)
    given = rows_of([row | {"ner_tags": [*map(write, row["ner_tags"])]} for row in rows], feature)
    assert_same(first_batch(given), by_hand([row["tokens"] for row in rows], [row["ner_tags"] for row in rows]))


TEXT = "ab. cd efg h ab cd."


@pytest.mark.parametrize(
    "spans",
    [
        [("place", 4, 10)],
        [("name", 13, 15), ("place", 0, 2)],
        [("place", 0, 3), ("place", 4, 6)],
        [("name", 5, 8)],  # in the middle of words
        [("B-name", 7, 10)],
        [],
        None,
    ],
)
@pytest.mark.parametrize("numbered", [False, True])
def test_the_words_of_a_span_have_its_class(spans: list[tuple[str, int, int]] | None, numbered: bool) -> None:
    tags, words = [], words_of(TEXT)
    for start, end in words:
        inside = [span for span in spans or () if span[1] < end and start < span[2]]
        if not inside:
            tags.append("O")
            continue
        kind, begin, _ = inside[0]
        first = next(place for place in words if begin < place[1])
        tags.append(f"{'B' if (start, end) == first else 'I'}-{kind.removeprefix('B-')}")
    names = ["place", "name", "B-name"]
    label = datasets.ClassLabel(names=names) if numbered else datasets.Value("string")
    of_span = {"start": datasets.Value("int64"), "end": datasets.Value("int64"), "label": label}
    given = None if spans is None else [dict(zip(("label", "start", "end"), span, strict=True)) for span in spans]
    features = datasets.Features(text=datasets.Value("string"), ner_tags=datasets.List(of_span))
    rows = number_rows(datasets.Dataset.from_dict({"text": [TEXT], "ner_tags": [given]}, features), source="t.jsonl")
    assert_same(first_batch(rows, text="text"), by_hand([[TEXT[slice(*place)] for place in words]], [tags]))


@pytest.mark.parametrize(
    ("spans", "wanted"),
    [
        ([(0, 2, "name"), (3, 6, "place")], ["B-name", "I-name", "O", "B-place", "I-place", "I-place", "O"]),
        ([(0, 6, "name")], ["B-name", "O"]),
        ([(0, 2, "name")], ["B-name", "O"]),
        ([], ["O", "O"]),
    ],
)
def test_of_a_word_with_several_spans_every_token_is_read(spans: list[tuple[int, int, str]], wanted: list[str]) -> None:
    """As of "EU-Kommission", where the tokenizer cuts texts at spaces alone."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"EUKom-", *(f"##{letter}" for letter in "EUKom-")]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(numbers, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    given = [dict(zip(("start", "end", "label"), span, strict=True)) for span in spans]
    other = {"text": "E", "ner_tags": [{"start": 0, "end": 1, "label": "name"}]}  # so that an empty list has a type
    rows = rows_of([{"text": "EU-Kom mo", "ner_tags": given}, other])
    batch = first_batch(rows, text="text", processor=tokenizer)
    assert [TAGS[number] for number in batch["labels"][0][batch["judged"][0]]] == wanted


@pytest.mark.parametrize(
    ("letters", "wanted"),
    [
        ("", ["x", "x", "x", "x", "O"]),
        ("BI", ["B-x", "I-x", "I-x", "B-x", "O"]),
        ("I", ["I-x", "I-x", "I-x", "I-x", "O"]),
        ("BIES", ["B-x", "I-x", "E-x", "S-x", "O"]),
        ("BILU", ["B-x", "I-x", "L-x", "U-x", "O"]),
        ("BMEW", ["B-x", "M-x", "E-x", "W-x", "O"]),
    ],
)
def test_the_words_of_a_span_have_the_class_of_their_place(letters: str, wanted: list[str]) -> None:
    names = ["O", *(f"{letter}-{kind}" for kind in "yx" for letter in letters or "_")]
    names = [name.removeprefix("_-") for name in names]
    spans = [{"start": 0, "end": 5, "label": "x"}, {"start": 6, "end": 7, "label": "X"}]
    rows = rows_of([{"text": "a b c d e", "ner_tags": spans}])
    batch = first_batch(rows, text="text", config=tagger(**named(*names)).config)
    assert [names[number] for number in batch["labels"][batch["judged"]]] == wanted


@pytest.mark.parametrize("prefix", [False, True])
def test_a_tokenizer_of_bytes_reads_words_as_in_a_text(prefix: bool) -> None:
    backend = ByteLevelBPETokenizer(add_prefix_space=prefix)
    backend.train_from_iterator(["abc abc de de"] * 9, vocab_size=300, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer, pad_token="!", model_max_length=64)
    rows = rows_of([{"tokens": ["abc", "abc", "de"]}])
    batch = first_batch(rows, label=None, processor=tokenizer, config=tagger(vocab_size=400).config)
    assert batch["input_ids"].tolist() == [tokenizer("abc abc de")["input_ids"]]
    assert batch["judged"].sum() == 3


def spans(*given: tuple[int, int, str]) -> dict[str, Any]:
    return {"text": "ab cd", "ner_tags": [dict(zip(("start", "end", "label"), span, strict=True)) for span in given]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": [], "ner_tags": ["O"]}, r"must have words, .* but row 0 of train\.jsonl \(from 0\) has \[\]"),
        ({"tokens": ["a", " "], "ner_tags": ["O", "O"]}, r"row 0 of .* has \['a', ' '\] in 'tokens'"),
        ({"tokens": ["a", "b"], "ner_tags": ["O"]}, r"row 0 of .* has 2 words and 1 labels in 'ner_tags'; give each"),
        ({"tokens": ["a"], "ner_tags": "O"}, "must be a list for each row, but 'ner_tags' holds string; make a list"),
        ({"tokens": ["a"], "ner_tags": [5]}, r"must be in \[0, 5\), .* but row 0 of train\.jsonl \(from 0\) has 5"),
        (spans((3, 5, "name"), (0, 4, "name")), "must not overlap, .* row 0 of"),
        (spans((3, 6, "name")), r"must be in its text of 5 characters, .* row 0 of .* has 3 to 6 in 'ner_tags'"),
        (spans((0, 2, "river")), r"must be a class of the model .*, but row 0 of .* has 'river' in 'ner_tags'"),
        ({"text": "ab cd", "ner_tags": ["O", "O"]}, r"must be spans, .* but row 0 of .* has 'O' in 'ner_tags'"),
    ],
)
def test_rows_without_a_class_for_every_word_are_refused(row: dict[str, Any], message: str) -> None:
    text = "text" if "text" in row else "tokens"
    with pytest.raises(DataError, match=message):
        reader(text=text).check_rows(rows_of([row]))


def test_spans_need_a_class_for_the_other_words() -> None:
    config = tagger(**named("place", "name")).config
    with pytest.raises(DataError, match="need a class O, but the model has place, name"):
        reader(text="text", config=config).check_rows(rows_of([spans((0, 2, "name"))]))
