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
_ANSWER = ("text", "answer_start")
_POSITIONS = ("start_positions", "end_positions")
# Questions that are tokenised at once: the places of their tokens are Python lists.
_AT_ONCE = 100

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

    Predictions are where the answer to each question begins and ends, (questions, 2): characters, or tokens without a
    context.
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
        """Return the columns of SQuAD."""
        if not features.keys() >= {"question", "context"}:
            return None
        return {"text": ("question", "context"), "label": "answers" if "answers" in features else None}

    @classmethod
    def refusal(cls, columns: Any) -> str | None:
        """Return why the columns named by the fields of a recipe's `data` cannot be read; None if they can."""
        one = None if len(columns.text) == 2 else f"{cls.name} needs {cls.needs}, got one"
        return super().refusal(columns) or one

    def check_targets(self, rows: datasets.Dataset) -> None:
        """Refuse answers that do not stand in their context."""
        if self.columns.label is not None:
            self._answers(rows)

    def _answers(self, rows: datasets.Dataset) -> list[list[tuple[int, int]]]:
        """Return for each question the (start, end) of its answers in the context, in characters without blanks."""
        column = str(self.columns.label)
        pairs = zip(rows[self.columns.text[1]][:], rows[column][:], strict=True)
        return [
            self._spans(context, answers, f"{data.row_name(rows, row)} has", column)
            for row, (context, answers) in enumerate(pairs)
        ]

    def _spans(self, context: str, answers: Any, has: str, column: str) -> list[tuple[int, int]]:
        """Return what `_answers` does for a question; messages name its row by `has`, and the `column` of answers."""
        parts: list[Any] = [answers.get(name) for name in _ANSWER] if isinstance(answers, Mapping) else []
        whole = parts and all(isinstance(part, list) for part in parts) and len(parts[0]) == len(parts[1])
        if not whole or not parts[0]:
            raise DataError(
                f"answers must be dicts of the lists text and answer_start, of equal length and not empty, but {has} "
                f"{quoted(answers)} in {column!r}; leave questions without an answer out"
            )
        spans = []
        for text, start in zip(*parts, strict=True):
            given = context[start : start + len(text)] if text and isinstance(start, int) and start >= 0 else ""
            if not text or given != text:
                raise DataError(
                    f"an answer must stand in its context at answer_start, but {has} {quoted(given)} at {start}, not "
                    f"{quoted(text)}; name the question before the context in data.text"
                )
            # Blanks and invisible characters belong to no token.
            visible = [place for place, letter in enumerate(text) if letter.isprintable() and not letter.isspace()]
            if not visible:
                raise DataError(f"an answer must have a word, but {has} {quoted(text)} in {column!r}; leave it out")
            spans.append((start + visible[0], start + visible[-1] + 1))
        return spans

    def batches(self, samples: datasets.Dataset, size: int, use: Use) -> Iterator[Batch]:
        """Yield batches of windows."""
        contexts = [torch.tensor([*map(ord, text)], dtype=torch.int32) for text in samples[self.columns.text[1]][:]]
        answers = None if self.columns.label is None else [*map(torch.tensor, self._answers(samples))]
        for part in batched(self._in_windows(samples), size):
            questions = [question for question, _ in part]
            found = {key: [window[key] for _, window in part] for key in part[0][1]}
            batch = data.as_batch(found, self.processor, self.config)
            batch["question"] = torch.tensor(questions)
            batch["context"] = data.padded([contexts[question] for question in questions], -1, left=False)
            if answers is not None:
                batch["labels"] = torch.tensor([self._label(window, answers[question][0]) for question, window in part])
                batch["answers"] = data.padded([answers[question] for question in questions], -1, left=False)
            yield batch

    def _in_windows(self, samples: datasets.Dataset) -> Iterator[tuple[int, dict[str, list[int]]]]:
        """Yield all windows in order: the number of their question, and by keys of a batch one number per token."""
        limit = data.token_limit(self.processor, self.config, self.columns.max_length) or WINDOW
        length = min(WINDOW, limit) if self.columns.max_length is None else limit
        context_first = self.processor.padding_side == "left"
        for first in range(0, len(samples), _AT_ONCE):
            part = samples[first : first + _AT_ONCE]
            texts = [part[name] for name in self.columns.text]
            found = data.tokenize(
                self.processor,
                self.config,
                *(reversed(texts) if context_first else texts),
                max_length=length,
                truncation="only_first" if context_first else "only_second",
                stride=min(STRIDE, length // 3),
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
            questions, offsets = found.pop("overflow_to_sample_mapping"), found.pop("offset_mapping")
            for row, question in enumerate(questions):
                of_context = [number == (0 if context_first else 1) for number in found.sequence_ids(row)]
                if not any(of_context):
                    raise DataError(
                        f"every context must have words, but {data.row_name(samples, first + question)} has "
                        f"{quoted(texts[1][question])} in {self.columns.text[1]!r}; leave it out"
                    )
                places = [place if inside else (-1, -1) for place, inside in zip(offsets[row], of_context, strict=True)]
                window = {key: rows[row] for key, rows in found.items()}
                window |= dict(zip(data.TOKEN_PLACES, map(list, zip(*places, strict=True)), strict=True))
                yield first + question, window

    def _label(self, window: Mapping[str, list[int]], answer: Tensor) -> tuple[int, int]:
        """Return the first and the last token of an answer that is whole in a window, else twice that of no answer.

        `answer` is the characters where it begins and ends, (2,).
        """
        begins, ends = (window[name] for name in data.TOKEN_PLACES)
        start, stop = answer.tolist()
        inside = [token for token, end in enumerate(ends) if begins[token] < stop and end > start]
        if inside and begins[inside[0]] <= start and stop <= ends[inside[-1]]:
            return inside[0], inside[-1]
        ids = window["input_ids"]
        special = (self.processor.cls_token_id, self.processor.bos_token_id)
        nowhere = next((ids.index(token) for token in special if token in ids), 0)
        return nowhere, nowhere

    def canonical(self, model: PreTrainedModel, batch: Batch) -> Batch:
        """Return a batch with `labels`, (batch, 2), in place of `start_positions` and `end_positions`, (batch,) each.

        A DataError says that only one of both is given, or that they are no tokens of their rows, in order.
        """
        ends = [batch[name] for name in _POSITIONS if name in batch]
        rest = {key: value for key, value in batch.items() if key not in _POSITIONS}
        if not ends:
            return rest
        first, last = ends[0], ends[-1]
        tokens = next(value.shape[1] for value in rest.values() if value.dim() > 1)
        whole = len(ends) == 2 and first.dim() == last.dim() == 1 and first.dtype == last.dtype == torch.int64
        if not whole or not ((first >= 0) & (first <= last) & (last < tokens)).all():
            raise DataError(
                f"{' and '.join(_POSITIONS)} must be the int64 numbers of the first and the last of the {tokens} "
                f"tokens of an answer for every row, got {quoted([of.tolist() for of in ends])}"
            )
        return {**rest, "labels": torch.stack(ends, 1)}

    def loss_inputs(self, labels: Tensor) -> Batch:
        """Return the first and the last tokens by the names that models give them."""
        return dict(zip(_POSITIONS, labels.unbind(1), strict=True))

    def own_labels(self, model: PreTrainedModel, batch: Batch, output: Tensor) -> Tensor:
        """Return the likeliest first and last token of each window, (batch, 2)."""
        return _of_text(output, batch).argmax(-1)

    def effect(self, model: PreTrainedModel, batch: Batch, output: Tensor, number: int) -> Tensor:
        """Return the margins of both ends over the runner-up, summed with random signs, (batch,)."""
        return random_projection(super().effect(model, batch, _of_text(output.float(), batch), number), number)

    def keep(self, output: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """Return where the best answer in each window begins and ends, (windows, 2), and the sum of its logits.

        The best has the largest sum of the logits of its first and its last token, of which it has at most `LONGEST`.
        The sum is NaN for a window with any logit that is not finite.
        """
        begins, ends = _places(output, batch)
        logits = output.float().cpu().masked_fill(begins[:, None] < 0, -torch.inf)
        first, last = logits.unbind(1)  # (windows, tokens) each
        tokens = first.shape[1]
        # The sums for answers of 1, 2, ... tokens by their first one, (windows, lengths, tokens).
        sums = torch.full((len(first), min(LONGEST, tokens), tokens), -torch.inf)
        for more in range(sums.shape[1]):
            sums[:, more, : tokens - more] = first[:, : tokens - more] + last[:, more:]
        best, at = sums.flatten(1).max(-1)
        more_tokens, start = at // tokens, at % tokens
        rows = torch.arange(len(at))
        span = torch.stack([begins[rows, start], ends[rows, start + more_tokens]], 1)
        return span, best.where(output.isfinite().flatten(1).all(-1).cpu(), torch.nan)

    def join(self, kept: Sequence[tuple[Tensor, ...]], batches: Sequence[Batch]) -> Predictions:
        """Return one answer to each question, in the order of the questions' numbers, and the texts they are parts of.

        It is that of the window for which `keep` found the largest sum. Batches without questions have an answer to
        every row instead, and no texts.
        """
        spans, scores = (torch.cat(values) for values in zip(*kept, strict=True))
        if "question" not in batches[0]:
            return Predictions(self.predicts, spans)
        sums = scores.tolist()
        rows = [max(windows, key=sums.__getitem__) for windows in _windows(batches)]
        # A context is the code points of a text, padded with -1.
        contexts = [context for batch in batches for context in batch["context"].cpu()]
        texts = ["".join(map(chr, contexts[row][contexts[row] >= 0].tolist())) for row in rows]
        return Predictions(self.predicts, spans[rows], contexts=texts)

    def references(self, batches: Sequence[Batch]) -> Tensor:
        """Return the right answers to each question, (questions, answers, 2), padded with -1.

        An answer is where it begins and ends, the end excluded: in characters of the context, or in tokens without one.
        """
        if "question" not in batches[0]:
            labels = torch.cat([batch["labels"] for batch in batches]).cpu()
            return torch.stack([labels[:, 0], labels[:, 1] + 1], 1)[:, None]
        rows = [answers for batch in batches for answers in batch["answers"].cpu()]
        return data.padded([rows[windows[0]] for windows in _windows(batches)], -1, left=False)

    def decide(self, predictions: Predictions) -> Tensor:
        """Return the answers as references: one to each question, (questions, 1, 2)."""
        return predictions.values[:, None]

    def table(self, predictions: Predictions, references: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return how well each answer agrees with the best of the right ones: `exact`, 0 or 1, and `f1`."""
        rows = np.zeros(len(predictions), dtype=[("exact", np.float64), ("f1", np.float64)])
        for row, (span, right) in enumerate(zip(predictions.values.tolist(), references.tolist(), strict=True)):
            text = None if predictions.contexts is None else predictions.contexts[row]
            given = _words(text, *span)
            wanted = [_words(text, *of) for of in right if of[0] >= 0]
            rows[row] = max(given == words for words in wanted), max(_f1(given, words) for words in wanted)
        return rows, np.ones(len(predictions))


def _words(text: str | None, start: int, end: int) -> list[Any]:
    """Return the words of a part of a text; without the text, the numbers of its tokens."""
    return [*range(start, end)] if text is None else words_of(text[start:end])


def words_of(text: str) -> list[str]:
    """Return the words of an answer in lower case, without punctuation and articles, as SQuAD compares them.

    Source: Rajpurkar et al. (2016), https://arxiv.org/abs/1606.05250, section 6.
    """
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _f1(given: Sequence[Any], wanted: Sequence[Any]) -> float:
    if not given or not wanted:
        return float(given == wanted)
    return 2 * (Counter(given) & Counter(wanted)).total() / (len(given) + len(wanted))


def _token_mask(output: Tensor, batch: Batch) -> Tensor:
    """Return a mask of the tokens that are not padding, (windows, tokens) bool; of all tokens without a mask.

    `output` is (windows, 2, tokens), on whose device the mask is.
    """
    mask = batch.get("attention_mask")
    return torch.ones_like(output[:, 0], dtype=torch.bool) if mask is None else mask.to(output.device) != 0


def _of_text(output: Tensor, batch: Batch) -> Tensor:
    """Return the logits with the least number of their dtype at padding."""
    return output.masked_fill(~_token_mask(output, batch)[:, None], torch.finfo(output.dtype).min)


def _places(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return where tokens begin and end, (windows, tokens) each, -1 at those that cannot be an answer; on the CPU.

    These are characters of the context; in batches without one, numbers of tokens.
    """
    if "begins" in batch:
        return batch["begins"].cpu(), batch["ends"].cpu()
    real = _token_mask(output, batch).cpu()
    place = torch.arange(real.shape[1]).expand_as(real)
    return place.where(real, -1), (place + 1).where(real, -1)


def _windows(batches: Sequence[Batch]) -> list[list[int]]:
    """Return the numbers of the windows of each question among those of all batches, in the order of the questions."""
    rows: dict[int, list[int]] = {}
    for row, question in enumerate(torch.cat([batch["question"] for batch in batches]).tolist()):
        rows.setdefault(question, []).append(row)
    return [rows[question] for question in sorted(rows)]
