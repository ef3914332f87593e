"""An answer to a question: a part of a text."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import DataError, quoted
from ..late import PreTrainedModel, Tensor, datasets, np, torch
from .late import Batch, data
from .registry import register_task
from .task import Predictions, Task, Use, batched, random_projection

# The most tokens of an answer. Models were trained on answers of a few words.
LONGEST = 30
# Tokens of a window, and how many of them two windows of one text share, as in transformers' question answering.
WINDOW, STRIDE = 384, 128
# The fields of SQuAD's answers, and the arguments of models for the first and the last token of an answer.
_ANSWER = ("text", "answer_start")
_POSITIONS = ("start_positions", "end_positions")
# Questions that are tokenised at once: the places of their tokens are Python lists.
_AT_ONCE = 100
# What a batch has of a window: by its keys, a number for each token.
_Window = dict[str, list[int]]

# Finds an answer as `QuestionAnswering.keep` does.
_USAGE = f"""
import torch

question, text = "Who asks?", "A reader asks."
inputs = tokenizer(question, text, return_tensors="pt")
with torch.no_grad():
    output = model(**inputs)
in_text = torch.tensor([part == 1 for part in inputs.sequence_ids()])
scores = output.start_logits[0, :, None] + output.end_logits[0]  # of each first and last token
allowed = (in_text[:, None] & in_text).triu().tril({LONGEST - 1})
first, last = divmod(int(scores.where(allowed, -torch.inf).argmax()), len(in_text))
answer = text[inputs.token_to_chars(first).start : inputs.token_to_chars(last).end]
"""


@register_task
class QuestionAnswering(Task):
    """Models that find the answer to a question in a text.

    The likeliest first and last token of an answer are read from two rows of logits, (batch, 2, tokens). A context that
    is read in several windows has the answer whose logits have the largest sum.

    Answers are dicts of the lists `text` and `answer_start`, the character where it begins in the context, in the form
    of SQuAD. A context that is too long is read in windows that overlap by a third, at most 128 tokens; each window is
    a row of a batch, and a question may have rows in two batches. Windows have `max_length` tokens, by default 384 or
    as many as the model takes. As in transformers' question answering, the context comes before the question if the
    tokenizer pads on the left.

    Batches have, beside the inputs,

    - `question` (batch,) int64: the number of the question that a window belongs to;
    - `begins` and `ends` (batch, tokens) int64: the characters of the context where a token begins and ends; -1 at
      tokens of the question and others that cannot be an answer;
    - `context` (batch, characters) int32: the context, as code points, -1 fills;
    - with answers, `labels` (batch, 2) int64, the first and the last token of the first answer or, if it is not whole
      in the window, twice the token that stands for no answer; and `answers` (batch, answers, 2) int64, the characters
      where each answer begins and ends, without the blanks around it, -1 fills.
    """

    name = "question-answering"
    auto_class = "AutoModelForQuestionAnswering"
    ort_class = "ORTModelForQuestionAnswering"
    usage = _USAGE
    reads = ("text", "text label")
    needs = "data.text (the columns of the question and of the context)"
    text_columns = 2
    columns_by_type = False
    rows_together = True

    predicts = "spans"
    metrics = ("answer_f1", "answer_exact")
    word = "answer"
    output_names = ("start_logits", "end_logits")

    @classmethod
    def usual_columns(cls, features: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the columns of SQuAD, if a data set has them."""
        if not features.keys() >= {"question", "context"}:
            return None
        return {"text": ("question", "context"), "label": "answers" if "answers" in features else None}

    @classmethod
    def refusal(cls, columns: Any) -> str | None:
        """Return why the columns named by the fields of a recipe's `data` cannot be read; None if they can."""
        refusal = super().refusal(columns)
        return refusal if refusal or len(columns.text) == 2 else f"{cls.name} needs {cls.needs}, got one"

    def check_targets(self, rows: datasets.Dataset) -> None:
        """Refuse answers that do not stand in their context."""
        if self.columns.label is not None:
            self._answers(rows)

    def _answers(self, rows: datasets.Dataset) -> list[list[tuple[int, int]]]:
        """Return for each question where its answers begin and end in the context, in characters without blanks."""
        column = str(self.columns.label)
        pairs = zip(rows[self.columns.text[1]][:], rows[column][:], strict=True)
        return [
            self._spans(context, answers, data.row_name(rows, row), column)
            for row, (context, answers) in enumerate(pairs)
        ]

    def _spans(self, context: str, answers: Any, row: str, column: str) -> list[tuple[int, int]]:
        """Return what `_answers` does for a question; messages name its `row`, and the `column` of answers."""
        texts, starts = [answers.get(field) for field in _ANSWER] if isinstance(answers, Mapping) else (None, None)
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts) or not texts:
            raise DataError(
                f"answers must be dicts of the lists text and answer_start, of equal length and not empty, but {row} "
                f"has {quoted(answers)} in {column!r}; leave questions without an answer out"
            )
        spans = []
        for text, start in zip(texts, starts, strict=True):
            given = context[start : start + len(text)] if text and isinstance(start, int) and start >= 0 else ""
            if not text or given != text:
                raise DataError(
                    f"an answer must stand in its context at answer_start, but {row} has {quoted(given)} at {start}, "
                    f"not {quoted(text)}; name the question before the context in data.text"
                )
            # Blanks and invisible characters belong to no token.
            visible = [place for place, letter in enumerate(text) if letter.isprintable() and not letter.isspace()]
            if not visible:
                raise DataError(f"an answer must have a word, but {row} has {quoted(text)} in {column!r}; leave it out")
            spans.append((start + visible[0], start + visible[-1] + 1))
        return spans

    def batches(self, samples: datasets.Dataset, size: int, use: Use) -> Iterator[Batch]:
        """Yield batches of windows, with all that the class describes."""
        contexts = [torch.tensor(list(map(ord, text)), dtype=torch.int32) for text in samples[self.columns.text[1]][:]]
        answers = None if self.columns.label is None else list(map(torch.tensor, self._answers(samples)))
        for windows in batched(self._windows(samples), size):
            questions = [question for question, _ in windows]
            by_token = {key: [window[key] for _, window in windows] for key in windows[0][1]}
            batch = data.as_batch(by_token, self.processor, self.config)
            batch["question"] = torch.tensor(questions)
            batch["context"] = data.padded([contexts[question] for question in questions], -1, left=False)
            if answers is not None:
                labels = [self._label(window, *answers[question][0].tolist()) for question, window in windows]
                batch["labels"] = torch.tensor(labels)
                batch["answers"] = data.padded([answers[question] for question in questions], -1, left=False)
            yield batch

    def _windows(self, samples: datasets.Dataset) -> Iterator[tuple[int, _Window]]:
        """Yield all windows in order, each after the number of its question."""
        limit = data.token_limit(self.processor, self.config, self.columns.max_length) or WINDOW
        length = min(WINDOW, limit) if self.columns.max_length is None else limit
        context_first = self.processor.padding_side == "left"
        for first in range(0, len(samples), _AT_ONCE):
            some = samples[first : first + _AT_ONCE]
            questions, contexts = (some[name] for name in self.columns.text)
            encoded = data.tokenize(
                self.processor,
                self.config,
                *((contexts, questions) if context_first else (questions, contexts)),
                max_length=length,
                truncation="only_first" if context_first else "only_second",
                stride=min(STRIDE, length // 3),
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
            question_of, offsets = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
            for row, question in enumerate(question_of):
                in_context = [sequence == (0 if context_first else 1) for sequence in encoded.sequence_ids(row)]
                if not any(in_context):
                    raise DataError(
                        f"every context must have words, but {data.row_name(samples, first + question)} has "
                        f"{quoted(contexts[question])} in {self.columns.text[1]!r}; leave it out"
                    )
                window = {key: rows[row] for key, rows in encoded.items()}
                tokens = list(zip(offsets[row], in_context, strict=True))
                window["begins"] = [begin if inside else -1 for (begin, _), inside in tokens]
                window["ends"] = [end if inside else -1 for (_, end), inside in tokens]
                yield first + question, window

    def _label(self, window: _Window, start: int, end: int) -> tuple[int, int]:
        """Return the first and the last token of an answer, given as the characters from `start` to `end`."""
        begins, ends = window["begins"], window["ends"]
        tokens = [token for token in range(len(ends)) if begins[token] < end and ends[token] > start]
        if tokens and begins[tokens[0]] <= start and end <= ends[tokens[-1]]:
            return tokens[0], tokens[-1]
        # The answer is not whole in the window: twice the token that stands for no answer.
        ids = window["input_ids"]
        special = (self.processor.cls_token_id, self.processor.bos_token_id)
        no_answer = next((ids.index(token) for token in special if token in ids), 0)
        return no_answer, no_answer

    def canonical(self, model: PreTrainedModel, batch: Batch) -> Batch:
        """Return a batch with `labels`, (batch, 2), in place of `start_positions` and `end_positions`, (batch,)."""
        given = [batch[name] for name in _POSITIONS if name in batch]
        rest = {key: value for key, value in batch.items() if key not in _POSITIONS}
        if not given:
            return rest
        first, last = given[0], given[-1]
        tokens = next(value.shape[1] for value in rest.values() if value.dim() > 1)
        fit = len(given) == 2 and first.dim() == last.dim() == 1 and first.dtype == last.dtype == torch.int64
        if not fit or not ((first >= 0) & (first <= last) & (last < tokens)).all():
            raise DataError(
                f"{' and '.join(_POSITIONS)} must be the int64 numbers of the first and the last of the {tokens} "
                f"tokens of an answer for every row, got {quoted([positions.tolist() for positions in given])}"
            )
        return {**rest, "labels": torch.stack(given, 1)}

    def loss_inputs(self, labels: Tensor) -> Batch:
        """Return the first and the last tokens by the names that models give them."""
        return dict(zip(_POSITIONS, labels.unbind(1), strict=True))

    def own_labels(self, model: PreTrainedModel, batch: Batch, output: Tensor) -> Tensor:
        """Return the likeliest first and last token of each window, (batch, 2)."""
        return _without_padding(output, batch).argmax(-1)

    def effect(self, model: PreTrainedModel, batch: Batch, output: Tensor, number: int) -> Tensor:
        """Return the margins of both ends over the runner-up, summed with random signs, (batch,)."""
        margins = super().effect(model, batch, _without_padding(output.float(), batch), number)  # (batch, 2)
        return random_projection(margins, number)

    def keep(self, output: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """Return where the best answer in each window begins and ends, (windows, 2), and its sum, (windows,).

        Of all answers of at most `LONGEST` tokens, the best has the largest sum of the logits of its first and its last
        token. Where it begins and ends is counted in characters of the context or, if the batch has none, in tokens.
        The sum is NaN for a window with any logit that is not finite.
        """
        begins, ends = _token_edges(output, batch)
        logits = output.float().cpu().masked_fill(begins[:, None] < 0, -torch.inf)
        first_logits, last_logits = logits.unbind(1)  # (windows, tokens) each
        tokens = first_logits.shape[1]
        # The sums for answers that end 0, 1, ... tokens after their first one, (windows, distances, tokens).
        sums = torch.full((len(logits), min(LONGEST, tokens), tokens), -torch.inf)
        for distance in range(sums.shape[1]):
            sums[:, distance, : tokens - distance] = first_logits[:, : tokens - distance] + last_logits[:, distance:]
        largest, index = sums.flatten(1).max(-1)
        first = index % tokens
        last = first + index // tokens
        windows = torch.arange(len(index))
        spans = torch.stack([begins[windows, first], ends[windows, last]], 1)
        return spans, largest.where(output.isfinite().flatten(1).all(-1).cpu(), torch.nan)

    def join(self, kept: Sequence[tuple[Tensor, ...]], batches: Sequence[Batch]) -> Predictions:
        """Return one answer to each question, in the order of the questions' numbers, and the contexts.

        It is that of the window with the largest sum. Without questions, every row has an answer, and no context.
        """
        spans = torch.cat([spans for spans, _ in kept])
        if "question" not in batches[0]:
            return Predictions(self.predicts, spans)
        sums = torch.cat([sums for _, sums in kept]).tolist()
        rows = [max(windows, key=lambda window: sums[window]) for windows in _windows_of_questions(batches)]
        # A context is the code points of a text, padded with -1.
        contexts = [context for batch in batches for context in batch["context"].cpu()]
        texts = ["".join(map(chr, contexts[row][contexts[row] >= 0].tolist())) for row in rows]
        return Predictions(self.predicts, spans[rows], contexts=texts)

    def references(self, batches: Sequence[Batch]) -> Tensor:
        """Return where the right answers to each question begin and end, (questions, answers, 2), padded with -1."""
        if "question" not in batches[0]:  # in tokens rather than characters; the end is excluded
            labels = torch.cat([batch["labels"] for batch in batches]).cpu()
            return torch.stack([labels[:, 0], labels[:, 1] + 1], 1)[:, None]
        rows = [answers for batch in batches for answers in batch["answers"].cpu()]
        return data.padded([rows[windows[0]] for windows in _windows_of_questions(batches)], -1, left=False)

    def decide(self, predictions: Predictions) -> Tensor:
        """Return the answers in the form of `references`: one to each question, (questions, 1, 2)."""
        return predictions.values[:, None]

    def table(self, predictions: Predictions, references: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return how well each answer agrees with the best of the right ones: `exact`, 0 or 1, and `f1`; and ones."""
        rows = np.zeros(len(predictions), dtype=[("exact", np.float64), ("f1", np.float64)])
        for row, (span, right) in enumerate(zip(predictions.values.tolist(), references.tolist(), strict=True)):
            text = None if predictions.contexts is None else predictions.contexts[row]
            given = _words(text, *span)
            accepted = [_words(text, start, end) for start, end in right if start >= 0]
            rows[row] = max(given == words for words in accepted), max(_f1(given, words) for words in accepted)
        return rows, np.ones(len(predictions))


def _words(text: str | None, start: int, end: int) -> list[Any]:
    """Return the words from `start` to `end` of a text; without a text, the numbers of the tokens between them."""
    return list(range(start, end)) if text is None else words_of(text[start:end])


def words_of(text: str) -> list[str]:
    """Return the words of an answer in lower case, without punctuation and articles, as SQuAD compares them.

    Source: Rajpurkar et al. (2016), https://arxiv.org/abs/1606.05250, section 6.
    """
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _f1(given: Sequence[Any], right: Sequence[Any]) -> float:
    """Return the F1 score of the words of an answer, as SQuAD counts it."""
    if not given or not right:
        return float(given == right)
    return 2 * (Counter(given) & Counter(right)).total() / (len(given) + len(right))


def _token_mask(output: Tensor, batch: Batch) -> Tensor:
    """Return which tokens are no padding, (windows, tokens) bool, on the device of `output`, (windows, 2, tokens)."""
    mask = batch.get("attention_mask")
    return torch.ones_like(output[:, 0], dtype=torch.bool) if mask is None else mask.to(output.device) != 0


def _without_padding(output: Tensor, batch: Batch) -> Tensor:
    """Return the logits with the least number of their dtype at padding, where no answer begins or ends."""
    return output.masked_fill(~_token_mask(output, batch)[:, None], torch.finfo(output.dtype).min)


def _token_edges(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return where tokens begin and end, (windows, tokens) each, -1 at those that cannot be an answer; on the CPU."""
    if "begins" in batch:  # in characters of the context, else in tokens
        return batch["begins"].cpu(), batch["ends"].cpu()
    real = _token_mask(output, batch).cpu()
    number = torch.arange(real.shape[1]).expand_as(real)
    return number.where(real, -1), (number + 1).where(real, -1)


def _windows_of_questions(batches: Sequence[Batch]) -> list[list[int]]:
    """Return the rows of each question among those of all batches, in the order of the questions' numbers."""
    rows_of: dict[int, list[int]] = {}
    for row, question in enumerate(torch.cat([batch["question"] for batch in batches]).tolist()):
        rows_of.setdefault(question, []).append(row)
    return [rows_of[question] for question in sorted(rows_of)]
