"""Make prompts and answers out of rows: fill the template, find the answer's tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import DataError, quoted
from ..late import Tensor, datasets, torch
from .late import data

# A doubled brace, a column's name between braces (group 1), or a brace that stands alone.
_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
# What no space is put beside: white space, and scripts that part no words: Thai to Myanmar, Khmer, Chinese, Japanese.
_UNSPACED = re.compile(
    r"[\s\u0e00-\u109f\u1780-\u17ff\u3000-\u312f\u3190-\u9fff\uf900-\ufaff\uff00-\uff9f\U00020000-\U0003ffff]"
)


def template_fields(template: str) -> tuple[str, ...]:
    """Return the columns that a prompt template such as "Question: {question}\\nAnswer:" names between braces."""
    matches = list(_BRACES.finditer(template))
    if any(match[0] in ("{", "}") for match in matches):
        raise DataError(
            f"data.prompt must be a template such as 'Question: {{question}}', but {quoted(template)} has a brace "
            "alone; write {{ and }} for braces that are text"
        )
    return tuple(dict.fromkeys(match[1] for match in matches if match[1] is not None))


def check_prompt(rows: datasets.Dataset, *, prompt: str, answer: str) -> None:
    """Refuse, by a DataError, rows without what the template and the answer need: a text, or a list of answers."""
    fields = [(column, "a field of data.prompt") for column in template_fields(prompt)]
    for column, role in [*fields, (answer, "data.answer")]:
        feature = rows.features[column]
        if data.is_list(feature) and role != "data.answer":
            raise DataError(
                f"a prompt must have one question in a row, but {column!r} holds lists; write a row for each question"
            )
        dtype = str(getattr(data.item_feature(feature), "dtype", ""))
        if dtype not in data.STRINGS and not dtype.startswith(("int", "uint", "float", "bool")):
            raise DataError(f"{role} must hold text or lists of text, but {column!r} holds {data.kind_of(feature)}")
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
            # A name such as "B", or a number that counts from 1; hidden labels are -1 or None.
            is_given = number is not None and str(number).strip().isalnum()
            remedy = "write 0 for the first choice, and so on" if is_given else "use a split with labels"
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

    def describe(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return the values of `CHOICE_KEYS` for a batch of these rows, (batch,) each."""
        return dict(zip(data.CHOICE_KEYS, self.numbers[list(rows)].unbind(1), strict=True))


def one_row_per_choice(rows: datasets.Dataset, *, answer: str, label: str) -> tuple[datasets.Dataset, Choices]:
    """Return the row of each question once for each choice in its answer column, in order, and these choices."""
    right_choice(rows, answer=answer, label=label)  # refuses wrong labels
    texts, right = rows[answer][:], rows[label][:]
    choices = [(row, number, str(text)) for row, of_row in enumerate(texts) for number, text in enumerate(of_row)]
    # In the order of `CHOICE_KEYS`.
    numbers = torch.tensor([(row, number, int(right[row]), len(text)) for row, number, text in choices])
    return rows.select([row for row, _, _ in choices]), Choices([text for _, _, text in choices], numbers)


def filled(row: Mapping[str, Any], *, prompt: str, answer: str) -> tuple[str, str]:
    """Return the prompt, a template filled with a row, and the answer; of a list, the first of the most frequent."""
    given = row[answer]
    if isinstance(given, list):
        given = Counter(given).most_common(1)[0][0]
    # A doubled brace, which names no column, stands for a single one.
    text = _BRACES.sub(lambda match: match[0][0] if match[1] is None else str(row[match[1]]), prompt)
    return text, str(given)


def end_of_text(tokenizer: Any) -> str:
    """Return what to end an answer with: the end-of-text token, or "" if there is none or the tokenizer adds it."""
    end: str = tokenizer.eos_token or ""
    is_added = bool(end) and tokenizer("a", verbose=False)["input_ids"][-1:] == [tokenizer.eos_token_id]
    return "" if is_added else end


def answer_text(prompt: str, answer: str, end: str) -> str:
    """Return what follows a prompt: a space, unless it is beside nothing or `_UNSPACED`, the answer, and one `end`."""
    last, first = prompt[-1:], answer[:1]
    needs_space = last and first and not _UNSPACED.match(last) and not _UNSPACED.match(first)
    return (" " if needs_space else "") + answer.removesuffix(end) + end


class Tokens(NamedTuple):
    """The token ids of a sample, and a mask of those that are labels, whose prediction is judged."""

    ids: list[int]
    judged: list[bool]


def tokenize_spans(
    text: str, spans: Iterable[tuple[int, int]], tokenizer: Any, *, special: bool | None = None
) -> Tokens:
    """Return the tokens of a text, of which those in `spans` are labels; a span is its first character and its end.

    A tokenizer may merge characters across the edge of a span. So a token counts as before an edge only if the text up
    to that edge, tokenised alone, has the same tokens up to it. `special` says whether the tokenizer adds its special
    tokens, by default unless the text begins with the begin-of-text token.
    """
    if special is None:
        special = not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))
    options: dict[str, Any] = {"add_special_tokens": special, "return_attention_mask": False, "verbose": False}
    ids = list(tokenizer(text, **options)["input_ids"])

    def tokens_before(edge: int) -> int:
        if edge == len(text):
            return len(ids)
        prefix = tokenizer(text[:edge], **options)["input_ids"]
        for position, (alone, in_whole) in enumerate(zip(prefix, ids, strict=False)):
            if alone != in_whole:
                return position
        return min(len(prefix), len(ids))

    judged = [False] * len(ids)
    for start, end in spans:
        first, after_last = tokens_before(start), tokens_before(end)
        judged[first:after_last] = [True] * (after_last - first)
    return Tokens(ids, judged)
