"""What is kept of the predictions for some batches where it is more, or less, than a row of logits for each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..data.batches import CHOICE_KEYS
from ..errors import DataError
from .behaviour import Predicted

# How many rows of logits are held in float32 at once: 64 MB for a vocabulary of 32,000.
_ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class TokenPredictions(Predicted):
    """What a language model predicts at the label tokens of all samples, in order, teacher-forced; on the CPU.

    The logits, (samples, tokens, vocabulary), are not kept.
    """

    kind = "tokens"

    tokens: Tensor  # (label tokens,) int64, the likeliest token at each
    nll: Tensor  # (label tokens,) float32, the negative log-likelihood of each, in nats
    sample: Tensor  # (label tokens,) int64, the index of the sample that each belongs to
    samples: int  # how many samples there are
    answers: bool  # whether the label tokens are answers to prompts, rather than all of a text

    def __len__(self) -> int:
        return self.samples

    def per_sample(self, values: Tensor) -> Tensor:
        """Return the sum over each sample of values of (label tokens,), (samples,) float64."""
        return torch.zeros(self.samples, dtype=torch.float64).index_add(0, self.sample, values.double())

    @property
    def decided(self) -> Tensor:
        """The likeliest tokens, (label tokens,)."""
        return self.tokens

    @property
    def sample_of(self) -> Tensor | None:
        """The sample of every token of plain text, (label tokens,); an answer is one prediction."""
        return None if self.answers else self.sample

    def same(self, other: TokenPredictions) -> Tensor:
        """Return where the likeliest token is the same, (label tokens,), or all tokens of an answer, (samples,)."""
        if not torch.equal(self.sample, other.sample) or len(self) == 0:
            raise DataError(
                f"stability compares predictions of the same samples, got {len(self.tokens)} and "
                f"{len(other.tokens)} tokens of {len(self)} and {len(other)}"
            )
        differ = self.tokens != other.tokens
        return self.per_sample(differ) == 0 if self.answers else ~differ

    def table(self, references: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return the sums over each sample of `nll` and of `right` tokens, and how many label tokens it has."""
        if len(self.tokens) != len(references):
            raise DataError(
                f"every label token needs a reference, got {len(self.tokens)} predictions and "
                f"{len(references)} references"
            )
        rows = np.empty(len(self), dtype=[("nll", np.float64), ("right", np.int64)])
        rows["nll"] = self.per_sample(self.nll)
        rows["right"] = self.per_sample(self.tokens == references)
        return rows, self.per_sample(torch.ones_like(self.nll)).long().numpy()


@dataclass(frozen=True)
class ChoicePredictions(Predicted):
    """How likely a language model takes the choices of questions to be, after their prompts; on the CPU."""

    kind = "choices"

    # (questions, choices) float64, the sum over the choice's tokens, in nats; -inf where a question has fewer choices.
    log_likelihoods: Tensor
    characters: Tensor  # (questions, choices) float64, length of each choice

    def __len__(self) -> int:
        return len(self.log_likelihoods)

    @property
    def decided(self) -> Tensor:
        """The likeliest choice of each question, (questions,) int64; of equals the first."""
        return _first_largest(self.log_likelihoods)

    @property
    def chosen_per_character(self) -> Tensor:
        """The same by log-likelihood per character, which does not favour short choices."""
        return _first_largest(self.log_likelihoods / self.characters)

    def same(self, other: ChoicePredictions) -> Tensor:
        """Return of which questions the likeliest choice is the same, (questions,)."""
        shapes = [tuple(of.log_likelihoods.shape) for of in (self, other)]
        if shapes[0] != shapes[1] or len(self) == 0:
            raise DataError(f"stability compares choices of the same questions, got shapes {shapes[0]} and {shapes[1]}")
        return self.decided == other.decided

    def table(self, references: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return the choice that is `likeliest` and the one that is so `per_character`, and the right one."""
        rows = np.empty(len(self), dtype=[("likeliest", np.int64), ("per_character", np.int64)])
        rows["likeliest"], rows["per_character"] = self.decided, self.chosen_per_character
        return rows, references.numpy()

    @classmethod
    def of(cls, tokens: TokenPredictions, batches: Sequence[Mapping[str, Tensor]]) -> ChoicePredictions:
        """Return the predictions of batches whose rows are choices, from those of their tokens."""
        columns = {key: torch.cat([batch[key] for batch in batches]).cpu() for key in CHOICE_KEYS}
        questions, place = columns["question"].unique(return_inverse=True)
        shape = len(questions), int(columns["choice"].max()) + 1
        found = torch.full(shape, -torch.inf, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
        for table, values in zip(found, (-tokens.per_sample(tokens.nll), columns["characters"].double()), strict=True):
            table[place, columns["choice"]] = values
        return cls(*found)


def _first_largest(values: Tensor) -> Tensor:
    # torch does not say which of equals it returns.
    return torch.from_numpy(np.argmax(values.numpy(), axis=-1))


# A row of logits or an embedding for each sample, (samples, labels) float32, or what a task makes of its outputs.
Predictions = Tensor | Predicted


def likeliest(logits: Tensor, where: Sequence[Tensor], wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens at some positions, and the negative log-likelihoods of those wanted, on the CPU.

    Args:
        logits: (batch, tokens, vocabulary).
        where: Sample and position, (predictions,) int64 each.
        wanted: (predictions,) int64.
    """
    tokens, nll = [], []
    for row, position, label in zip(*(part.split(_ROWS_AT_ONCE) for part in (*where, wanted)), strict=True):
        part = logits[row.to(logits.device), position.to(logits.device)].float()  # (rows, vocabulary)
        tokens.append(part.argmax(-1).cpu())
        nll.append(torch.nn.functional.cross_entropy(part, label.to(part.device), reduction="none").cpu())
    return torch.cat(tokens), torch.cat(nll)
