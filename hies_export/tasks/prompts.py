"""Make prompts and answers out of rows: fill the template, find the answer's tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import DataError, quoted
from ..late import Tensor, datasets, torch
from .late import data

# A doubled brace, a column's name between braces, or a brace that stands alone.
_PARTS = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
# What no space is put beside: white space, and scripts that part no words: Thai to Myanmar, Khmer, Chinese, Japanese.
_UNSPACED = re.compile(
    r"[\s\u0e00-\u109f\u1780-\u17ff\u3000-\u312f\u3190-\u9fff\uf900-\ufaff\uff00-\uff9f\U00020000-\U0003ffff]"
)


def template_fields(template: str) -> tuple[str, ...]:
    """Return the columns that a prompt template such as "Question: {question}\\nAnswer:" names between braces."""
    parts = list(_PARTS.finditer(template))
    if any(part[0] in ("{", "}") for part in parts):
        raise DataError(
            f"data.prompt must be a template such as 'Question: {{question}}', but {quoted(template)} has a brace "
            "alone; write {{ and }} for braces that are text"
        )
    return tuple(dict.fromkeys(part[1] for part in parts if part[1] is not None))


def check_prompt(rows: datasets.Dataset, *, prompt: str, answer: str) -> None:
    """Refuse, by a DataError, rows without what the template and the answer need: a text, or a list of answers."""
    for what, column in [*(("a field of data.prompt", f) for f in template_fields(prompt)), ("data.answer", answer)]:
        feature = rows.features[column]
        if data.is_list(feature) and what != "data.answer":
            raise DataError(
                f"a prompt must have one question in a row, but {column!r} holds lists; write a row for each question"
            )
        dtype = str(getattr(data.item_feature(feature), "dtype", ""))
        if dtype not in data.STRINGS and not dtype.startswith(("int", "uint", "float", "bool")):
            raise DataError(f"{what} must hold text or lists of text, but {column!r} holds {data.kind_of(feature)}")
        must = f"every row must have a {column!r}"
        data.check_each(rows, column, lambda value: value is not None and value != [], must, "leave it out")


def right_choice(rows: datasets.Dataset, *, answer: str, label: str) -> datasets.Dataset:
    """Return the rows with one text in the answer column: the choice whose number, from 0, is in the label column."""
    if not data.is_list(rows.features[answer]):
        raise DataError(
            f"data.label is the number of the right choice, so data.answer must hold lists of choices, but {answer!r} "
            f"holds {data.kind_of(rows.features[answer])}; leave data.label out if there is one answer"
        )
    chosen = []
    for row, (choices, number) in enumerate(zip(rows[answer][:], rows[label][:], strict=True)):
        if not str(number).isdecimal() or int(number) >= len(choices):
            named = str(number).strip().isalnum() and number is not None
            remedy = "write 0 for the first choice, and so on" if named else "use a split with labels"
            raise DataError(
                f"every {label!r} must be the number of one of the {len(choices)} choices, from 0, but "
                f"{data.row_name(rows, row)} has {quoted(number)}; {remedy}"
            )
        chosen.append(choices[int(number)])
    return rows.remove_columns(answer).add_column(answer, chosen, feature=rows.features[answer].feature)


class Choices(NamedTuple):
    """The text of the choice in each row of `one_row_per_choice`, and the values of `CHOICE_KEYS`, (rows, 4) int64."""

    text: list[str]
    numbers: Tensor

    def of(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return the values of `CHOICE_KEYS` for a batch of these rows."""
        return dict(zip(data.CHOICE_KEYS, self.numbers[list(rows)].unbind(1), strict=True))


def one_row_per_choice(rows: datasets.Dataset, *, answer: str, label: str) -> tuple[datasets.Dataset, Choices]:
    """Return the row of each question once for each choice in its answer column, in order, and these choices."""
    right_choice(rows, answer=answer, label=label)
    choices, labels = rows[answer][:], rows[label][:]
    found = [(row, number, str(text)) for row, of_row in enumerate(choices) for number, text in enumerate(of_row)]
    numbers = torch.tensor([(row, number, int(labels[row]), len(text)) for row, number, text in found])
    return rows.select([row for row, _, _ in found]), Choices([text for _, _, text in found], numbers)


def filled(row: Mapping[str, Any], *, prompt: str, answer: str) -> tuple[str, str]:
    """Return prompt and answer of a row; from a list of answers the most frequent one, the first among equals."""
    given = row[answer]
    if isinstance(given, list):
        given = Counter(given).most_common(1)[0][0]
    return _PARTS.sub(lambda part: part[0][0] if part[1] is None else str(row[part[1]]), prompt), str(given)


def end_of_text(tokenizer: Any) -> str:
    """Return what to end an answer with: the end-of-text token, or "" if there is none or the tokenizer adds it."""
    last: str = tokenizer.eos_token or ""
    added = last and tokenizer("a", verbose=False)["input_ids"][-1:] == [tokenizer.eos_token_id]
    return "" if added else last


def answer_text(prompt: str, answer: str, end: str) -> str:
    """Return what follows the prompt: the answer, which ends in `end` once, after a space.

    There is no space if either side brings one, or its script has none.
    """
    border = (prompt[-1:], answer[:1])
    spaced = all(border) and not any(map(_UNSPACED.match, border))
    return " " * spaced + answer.removesuffix(end) + end


def tokenize_spans(
    text: str, spans: Iterable[tuple[int, int]], tokenizer: Any, *, special: bool | None = None
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a text, and a mask of those that lie in `spans`, from a first character to an end.

    A tokenizer may merge characters across the edge of a span. So a token counts as before an edge only if the text up
    to that edge, tokenised alone, has the same tokens up to it. By default (`special` None) the tokenizer adds its
    special tokens, unless the text begins with the begin-of-text token.
    """
    if special is None:
        special = not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))
    options: dict[str, Any] = {"add_special_tokens": special, "return_attention_mask": False, "verbose": False}
    ids = list(tokenizer(text, **options)["input_ids"])

    def tokens_before(edge: int) -> int:
        if edge == len(text):
            return len(ids)
        prefix = tokenizer(text[:edge], **options)["input_ids"]
        differ = (place for place, (one, other) in enumerate(zip(prefix, ids, strict=False)) if one != other)
        return next(differ, min(len(prefix), len(ids)))

    in_spans = [False] * len(ids)
    for start, end in spans:
        first, last = tokens_before(start), tokens_before(end)
        in_spans[first:last] = [True] * (last - first)
    return ids, in_spans
