"""An answer to a question: a part of a text."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import DataError, listed, quoted
from .behaviour import Behaviour, Predicted
from .task import Task, column_sets

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedModel

    from ..data.reader import Reader

# The most tokens of an answer. Models were trained on answers of a few words.
LONGEST = 30


@dataclass(frozen=True)
class SpanPredictions(Predicted):
    """The answer to every question; on the CPU."""

    kind = "spans"

    spans: Tensor  # (questions, 2) int64, where the answer begins and ends: characters, or tokens without a context
    contexts: Sequence[str] | None  # the text that each question is about

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def decided(self) -> Tensor:
        """The answers as references: one to each question, (questions, 1, 2)."""
        return self.spans[:, None]

    def same(self, other: SpanPredictions) -> Tensor:
        """Return of which questions the answer is the same part of the text, (questions,) bool."""
        self.check_samples([1] * len(self), [1] * len(other))
        return (self.spans == other.spans).all(-1)

    def table(self, references: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return how well each answer agrees with the best of the right ones: `exact`, 0 or 1, and `f1`."""
        import numpy as np

        rows = np.zeros(len(self), dtype=[("exact", np.float64), ("f1", np.float64)])
        for row, (span, right) in enumerate(zip(self.spans.tolist(), references.tolist(), strict=True)):
            given = self._words(row, *span)
            wanted = [self._words(row, *of) for of in right if of[0] >= 0]
            rows[row] = max(given == words for words in wanted), max(_f1(given, words) for words in wanted)
        return rows, np.ones(len(self))

    def _words(self, row: int, start: int, end: int) -> list[Any]:
        return [*range(start, end)] if self.contexts is None else words_of(self.contexts[row][start:end])


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


class Spans(Behaviour):
    """The likeliest first and last token of an answer, from two rows of logits, (batch, 2, tokens).

    A text that is read in several windows has the answer of the surest one.
    """

    predicts = "spans"
    metrics: ClassVar[tuple[str, ...]] = ("answer_f1", "answer_exact")
    word = "answer"
    output_names = ("start_logits", "end_logits")

    def canonical(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch whose `start_positions` and `end_positions`, (batch,) each, are `labels`, (batch, 2).

        Raises:
            DataError: Only one of both is given, or they are no tokens of their rows, in order.
        """
        import torch

        ends = [batch[name] for name in _POSITIONS if name in batch]
        rest = {key: value for key, value in batch.items() if key not in _POSITIONS}
        if not ends:
            return rest
        first, last = ends[0], ends[-1]
        tokens = next(value.shape[1] for value in rest.values() if value.dim() > 1)
        whole = len(ends) == 2 and first.dim() == last.dim() == 1 and first.dtype == last.dtype == torch.int64
        if not whole or not ((first >= 0) & (first <= last) & (last < tokens)).all():
            given = listed(
                f"{name} {quoted(batch[name].tolist())}, {batch[name].dtype} {tuple(batch[name].shape)}"
                for name in _POSITIONS
                if name in batch
            )
            raise DataError(
                f"{' and '.join(_POSITIONS)} must be given together, as the int64 numbers of the first and the last of "
                f"the {tokens} tokens, one of each for every row, got {given}; where a row was cut before its answer, "
                "give both the number of the token that stands for no answer, such as 0"
            )
        return {**rest, "labels": torch.stack(ends, 1)}

    def loss_inputs(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the first and the last tokens by the names that models give them."""
        return dict(zip(_POSITIONS, labels.unbind(1), strict=True))

    def own_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor) -> Tensor:
        """Return the likeliest first and last token of each window, (batch, 2)."""
        return _of_text(output, batch).argmax(-1)

    def effect(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor, index: int) -> Tensor:
        """Return the margins of both ends over the runner-up, summed with random signs, (batch,); see `projected`."""
        from .feature_extraction import projected

        best, second = _of_text(output.float(), batch).topk(2, dim=-1).values.unbind(-1)
        return projected(best - second, index)

    def kept(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return where the answer of each window begins and ends, (windows, 2), and the sum of both logits.

        An answer has at most `LONGEST` tokens.
        """
        import torch
        from torch.nn.functional import pad

        begins, ends = _places(output, batch)
        logits = output.float().cpu().masked_fill(begins[:, None] < 0, -torch.inf)
        first, last = logits.unbind(1)  # (windows, tokens) each
        tokens = first.shape[1]
        # The scores of answers of 1, 2, ... tokens by their first one, (windows, lengths, tokens).
        scores = torch.stack(
            [
                pad(first[:, : tokens - more] + last[:, more:], (0, more), value=-torch.inf)
                for more in range(min(LONGEST, tokens))
            ],
            dim=1,
        )
        best, at = scores.flatten(1).max(-1)
        more, start = at // tokens, at % tokens
        span = torch.stack([begins.gather(1, start[:, None]), ends.gather(1, (start + more)[:, None])], 1)[..., 0]
        # NaN is no maximum, so it is looked for.
        return span, best.where(output.isfinite().flatten(1).all(-1).cpu(), torch.nan)

    def joined(self, kept: Sequence[tuple[Tensor, ...]], batches: Sequence[Mapping[str, Tensor]]) -> SpanPredictions:
        """Return the answer of the surest window of each question, in the order of their numbers."""
        import torch

        spans, scores = (torch.cat(values) for values in zip(*kept, strict=True))
        if "question" not in batches[0]:
            return SpanPredictions(spans, None)
        sure = scores.tolist()
        rows = [max(windows, key=sure.__getitem__) for windows in _windows(batches)]
        contexts = [context for batch in batches for context in batch["context"].cpu()]
        return SpanPredictions(spans[rows], [_text(contexts[row]) for row in rows])

    def references(self, batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return where the right answers to each question begin and end, (questions, answers, 2), -1 fills."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        if "question" not in batches[0]:
            labels = torch.cat([batch["labels"] for batch in batches]).cpu()
            return torch.stack([labels[:, 0], labels[:, 1] + 1], 1)[:, None]
        rows = [answers for batch in batches for answers in batch["answers"].cpu()]
        return pad_sequence([rows[windows[0]] for windows in _windows(batches)], batch_first=True, padding_value=-1)


_POSITIONS = ("start_positions", "end_positions")


def _real(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return which tokens are no padding, (windows, tokens) bool on the device of the output."""
    import torch

    mask = batch.get("attention_mask")
    return torch.ones_like(output[:, 0], dtype=torch.bool) if mask is None else mask.to(output.device) != 0


def _of_text(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the logits, the lowest possible ones at padding."""
    import torch

    return output.masked_fill(~_real(output, batch)[:, None], torch.finfo(output.dtype).min)


def _places(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return where tokens begin and end, (windows, tokens) each, -1 at those that cannot be an answer; on the CPU.

    Of batches without a context, these are the numbers of the tokens.
    """
    import torch

    if "begins" in batch:
        return batch["begins"].cpu(), batch["ends"].cpu()
    real = _real(output, batch).cpu()
    place = torch.arange(real.shape[1]).expand_as(real)
    return place.where(real, -1), (place + 1).where(real, -1)


def _text(code_points: Tensor) -> str:
    return "".join(map(chr, code_points[code_points >= 0].tolist()))


def _windows(batches: Sequence[Mapping[str, Tensor]]) -> list[list[int]]:
    """Return the rows of each question, in the order of their numbers."""
    import torch

    rows: dict[int, list[int]] = {}
    for row, question in enumerate(torch.cat([batch["question"] for batch in batches]).tolist()):
        rows.setdefault(question, []).append(row)
    return [rows[question] for question in sorted(rows)]


# Finds an answer as `Spans.kept` does.
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


class QuestionAnswering(Task):
    """Models that find the answer to a question in a text."""

    name = "question-answering"
    auto_class = "AutoModelForQuestionAnswering"
    ort_class = "ORTModelForQuestionAnswering"
    usage = _USAGE
    columns = column_sets("text", "text label")
    needs = "data.text (the columns of the question and of the context)"
    text_columns = 2
    columns_by_type = False
    rows_together = True

    def behaviour(self, config: Any) -> Spans:
        """Return that of answers that are parts of a text."""
        return Spans()

    def usual_columns(self, features: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the columns of SQuAD."""
        if not features.keys() >= {"question", "context"}:
            return None
        return {"text": ("question", "context"), "label": "answers" if "answers" in features else None}

    def refusal(self, data: Any) -> str | None:
        """Return why the columns named by the fields of `data` cannot be read; None if they can."""
        return super().refusal(data) or (None if len(data.text) == 2 else f"{self.name} needs {self.needs}, got one")

    @property
    def reader_class(self) -> type[Reader]:
        """The reader of questions and contexts."""
        from ..data.questions import QuestionsReader

        return QuestionsReader
