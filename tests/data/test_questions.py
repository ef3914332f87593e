"""Questions about texts: windows, and the places of their tokens and answers, against plain loops."""

import re
from typing import Any

import pytest
import torch
from datasets import Dataset
from support.answers import LETTERS, letter_tokenizer, questions, reading_model
from support.reading import reading
from tokenizers.normalizers import BertNormalizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import BertConfig

from hies_export.data.batches import by_length, samples_of
from hies_export.errors import DataError, RequestError
from hies_export.evaluate.predict import predict
from hies_export.recipe.sections import Columns
from hies_export.tasks import TASKS, Task, task_of
from hies_export.tasks.given import batches_of

TASK = TASKS["question-answering"]


def reader(**fields: Any) -> Task:
    given = {
        "columns": Columns(text=("question", "context"), label="answers"),
        "config": BertConfig(vocab_size=40, max_position_embeddings=512),
        "processor": letter_tokenizer(model_max_length=512),
    }
    return reading(TASK.name, **(given | fields))


def number(word: str) -> int:
    return 4 + LETTERS.index(word)


def naive_windows(rows: Dataset, window: int, stride: int, *, context_first: bool = False) -> list[dict[str, Any]]:
    """Return the windows of all questions, word by word; [PAD], [CLS] and [SEP] are 0, 2 and 3."""
    found = []
    for question, row in enumerate(rows):
        asked = [number(word) for word in row["question"].split()]
        words = [(match.group(), *match.span()) for match in re.finditer(r"\S+", row["context"])]
        room, start = window - 3 - len(asked), 0
        while True:
            part = words[start : start + room]
            ids, places = [number(word) for word, _, _ in part], [(begin, end) for _, begin, end in part]
            nowhere = (-1, -1)
            nowhere_else = [nowhere] * (len(asked) + 2)
            if context_first:
                ids, places = [2, *ids, 3, *asked, 3], [nowhere, *places, *nowhere_else]
            else:
                ids, places = [2, *asked, 3, *ids, 3], [*nowhere_else, *places, nowhere]
            begin = row["answers"]["answer_start"][0]
            end = begin + len(row["answers"]["text"][0])
            first = next((i for i, place in enumerate(places) if place[0] == begin), None)
            last = next((i for i, place in enumerate(places) if place[1] == end), None)
            label = [0, 0] if first is None or last is None else [first, last]
            found.append({"question": question, "input_ids": ids, "places": places, "labels": label, "row": row})
            if start + room >= len(words):
                break
            start += room - stride
    return found


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("max_length", "window", "stride"), [(None, 384, 128), (21, 21, 7), (400, 400, 128)])
def test_windows_are_those_of_a_plain_loop(side: str, max_length: int | None, window: int, stride: int) -> None:
    rows = questions(7, words=(5, 900 if window > 100 else 60))
    made = reader(max_length=max_length, processor=letter_tokenizer(model_max_length=512, padding_side=side))
    batches = made.read(rows, size=4)
    expected = naive_windows(rows, window, stride, context_first=side == "left")
    assert len(expected) > len(rows) == samples_of(batches)
    assert [len(batch["input_ids"]) for batch in batches[:-1]] == [4] * (len(batches) - 1)
    found = ({key: value[row] for key, value in of.items()} for of in batches for row in range(len(of["ends"])))
    for one, other in zip(found, expected, strict=True):
        real = int(one["attention_mask"].sum())
        assert one["input_ids"].tolist() == other["input_ids"] + [0] * (len(one["input_ids"]) - real)
        places = torch.stack([one["begins"], one["ends"]], 1).tolist()
        assert [*map(tuple, places)] == other["places"] + [(-1, -1)] * (len(places) - real)
        assert (int(one["question"]), one["labels"].tolist()) == (other["question"], other["labels"])
        context = one["context"][one["context"] >= 0]
        assert "".join(map(chr, context.tolist())) == other["row"]["context"]
        answers = other["row"]["answers"]
        given = zip(answers["text"], answers["answer_start"], strict=True)
        spans = [[start, start + len(text)] for text, start in given]
        assert one["answers"][: len(spans)].tolist() == spans
        assert (one["answers"][len(spans) :] == -1).all()


def test_a_window_without_the_answer_is_labelled_with_the_token_of_no_answer() -> None:
    """[CLS] is not the first token of every tokenizer: here it is the last one of a text."""
    tokenizer = letter_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A [CLS]", pair="$A [SEP] $B:1 [CLS]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    answers = {"text": ["c"], "answer_start": [0]}
    rows = Dataset.from_list([{"question": "b", "context": "c d " * 9, "answers": answers}])
    (batch,) = reader(processor=tokenizer, max_length=12).read(rows, size=8)
    assert batch["labels"][0].tolist() == [2, 2]
    for ids, label in zip(batch["input_ids"][1:], batch["labels"][1:], strict=True):
        assert label.tolist() == [ids.tolist().index(2)] * 2


def test_an_answer_that_a_window_cuts_off_is_not_in_it() -> None:
    context = "c d e f g h i j k l m n o p"
    answers = {"text": ["j k l"], "answer_start": [context.index("j")]}
    rows = Dataset.from_list([{"question": "b", "context": context, "answers": answers}])
    (batch,) = reader(max_length=13).read(rows, size=8)
    assert [ids[3:12].tolist() for ids in batch["input_ids"]] == [[*range(5, 14)], [*range(10, 19)]]
    assert batch["labels"].tolist() == [[0, 0], [5, 7]]


@pytest.mark.parametrize(
    ("before", "after"),
    [("", ""), (" ", "  "), ("\n\n ", "\r\n"), ("\u200b", "\u00a0"), ("\ufeff\t", "\xad"), ("", "\xad")],
)
def test_blanks_around_an_answer_belong_to_no_token(before: str, after: str) -> None:
    answers = {"text": [f"{before}d e{after}"], "answer_start": [2]}
    rows = [{"question": "b", "context": f"c {before}d e{after} f", "answers": answers}]
    tokenizer = letter_tokenizer()
    tokenizer.backend_tokenizer.normalizer = BertNormalizer(lowercase=False)
    (batch,) = reader(processor=tokenizer).read(Dataset.from_list(rows), size=8)
    assert batch["labels"].tolist() == [[4, 5]]
    assert batch["input_ids"][0, 4:6].tolist() == [number("d"), number("e")]
    assert batch["answers"][0].tolist() == [[2 + len(before), 5 + len(before)]]


def test_characters_are_code_points_of_any_plane() -> None:
    context = "b \U0001f600\0 c 中d"
    rows = Dataset.from_list([{"question": "b", "context": context, "answers": {"text": ["c"], "answer_start": [5]}}])
    (batch,) = reader().read(rows, size=1)
    token = int(batch["labels"][0, 0])
    assert batch["input_ids"][0, token] == number("c")
    task, logits = TASK(None), torch.zeros(1, 2, batch["input_ids"].shape[1])
    logits[:, :, token] = 1
    found = task.join([task.keep(logits, batch)], [batch])
    assert found.contexts == [context]
    assert task.table(found, task.references([batch]))[0].tolist() == [(1, 1)]


def test_the_context_is_the_second_segment() -> None:
    (batch,) = reader().read(questions(2), size=2)
    assert torch.equal(batch["token_type_ids"] * batch["attention_mask"], batch["token_type_ids"])
    assert batch["token_type_ids"][batch["begins"] >= 0].all()
    assert not batch["token_type_ids"][:, 0].any()


def test_batches_sorted_by_length_have_the_same_answers() -> None:
    model, rows = reading_model(), questions(12, words=(3, 90))
    batches = reader(config=model.config, max_length=32).read(rows, size=5)
    ordered = by_length(batches, config=model.config)
    lengths = [int(length) for batch in ordered for length in batch["attention_mask"].sum(-1)]
    assert lengths == sorted(lengths) != [int(n) for batch in batches for n in batch["attention_mask"].sum(-1)]
    one, other = predict(model, batches), predict(model, ordered)
    assert TASK(None).same(one, other).all()
    assert one.contexts == other.contexts == rows["context"][:]
    task = TASK(model.config)
    assert torch.equal(task.references(batches), task.references(ordered))

    def labelled(of: list[dict[str, Tensor]]) -> list[list[int]]:
        """Return the question of each window, and the characters of its label."""
        found = []
        for batch in of:
            ends = [batch[key].gather(1, batch["labels"])[:, end] for end, key in enumerate(("begins", "ends"))]
            found += torch.stack([batch["question"], *ends], 1).tolist()
        return sorted(found)

    assert labelled(batches) == labelled(ordered)


def given(rows: Dataset, **options: Any) -> list[dict[str, Tensor]]:
    model = reading_model()
    usual = {"what": "batches", "task": task_of(model), "processor": letter_tokenizer(), "columns": None}
    return batches_of(model, rows, **(usual | options))


GOOD = {"question": "b c", "context": "d e f", "answers": {"text": ["e"], "answer_start": [2]}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": {"text": [], "answer_start": []}}, "and not empty, but row 1 "),
        ({"answers": {"text": ["e"], "answer_start": [3]}}, "in its context at answer_start, .* has ' ' at 3, not 'e'"),
        ({"answers": {"text": [" "], "answer_start": [3]}}, "an answer must have a word, but row 1 .* in 'answers'"),
        ({"answers": {"text": ["e", "f"], "answer_start": [2]}}, "of equal length .* row 1 .* has {.*} in 'answers'"),
        ({"context": " "}, r"every context must have words, but row 1 \(from 0\) has ' ' in 'context'; leave it out"),
        ({"context": None}, r"every row must have a 'context', but row 1 \(from 0\) has none"),
    ],
)
def test_rows_that_cannot_be_read_are_refused(change: dict[str, Any], message: str) -> None:
    columns = {"text": ("question", "context"), "label": None if "context" in change else "answers"}
    with pytest.raises(DataError, match=message):
        given(Dataset.from_list([GOOD, GOOD | change]), columns=columns)


def test_which_columns_are_read_is_not_guessed() -> None:
    with pytest.raises(DataError, match="needs data.text .the columns of the question and of the context.*, got one"):
        given(Dataset.from_list([GOOD]), columns={"text": "question"})
    with pytest.raises(DataError, match="question-answering needs columns= that name what to read"):
        given(Dataset.from_list([{"passage": "d e f", "query": "b"}]))
    with pytest.raises(RequestError, match="needs processor="):
        given(questions(1), processor=None)
