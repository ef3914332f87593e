"""Predict batches with a model: logits, the likeliest tokens and their likelihoods, or the likeliest choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from .. import processes
from ..data.batches import Batch
from ..data.targets import CHOICE_KEYS, IGNORED, check_label_tokens, inputs_of, predicted_positions
from ..errors import DataError, NonFiniteError
from ..model.modes import evaluating, output_alone
from ..model.threads import threads_for
from ..progress import SILENT, Progress
from ..tasks.models import behaviour_of

# How many rows of logits are held in float32 at once: 64 MB for a vocabulary of 32,000.
_ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class TokenPredictions:
    """What a language model predicts at the label tokens of all samples, in order, teacher-forced; on the CPU.

    The logits, (samples, tokens, vocabulary), are not kept.
    """

    tokens: torch.Tensor  # (label tokens,) int64, the likeliest token at each
    nll: torch.Tensor  # (label tokens,) float32, the negative log-likelihood of each, in nats
    sample: torch.Tensor  # (label tokens,) int64, the index of the sample that each belongs to
    samples: int  # how many samples there are
    answers: bool  # whether the label tokens are answers to prompts, rather than all of a text

    def __len__(self) -> int:
        return self.samples

    def per_sample(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over each sample of values of (label tokens,), (samples,) float64."""
        return torch.zeros(self.samples, dtype=torch.float64).index_add(0, self.sample, values.double())


@dataclass(frozen=True)
class ChoicePredictions:
    """How likely a language model takes the choices of questions to be, after their prompts; on the CPU."""

    # (questions, choices) float64, the sum over the choice's tokens, in nats; -inf where a question has fewer choices.
    log_likelihoods: torch.Tensor
    characters: torch.Tensor  # (questions, choices) float64, length of each choice

    def __len__(self) -> int:
        return len(self.log_likelihoods)

    @property
    def chosen(self) -> torch.Tensor:
        """The likeliest choice of each question, (questions,) int64; of equals the first."""
        return _first_largest(self.log_likelihoods)

    @property
    def chosen_per_character(self) -> torch.Tensor:
        """The same by log-likelihood per character, which does not favour short choices."""
        return _first_largest(self.log_likelihoods / self.characters)

    @classmethod
    def of(cls, tokens: TokenPredictions, batches: Sequence[Batch]) -> ChoicePredictions:
        """Return the predictions of batches whose rows are choices, from those of their tokens."""
        columns = {key: torch.cat([batch[key] for batch in batches]).cpu() for key in CHOICE_KEYS}
        questions, place = columns["question"].unique(return_inverse=True)
        shape = len(questions), int(columns["choice"].max()) + 1
        found = torch.full(shape, -torch.inf, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
        for table, values in zip(found, (-tokens.per_sample(tokens.nll), columns["characters"].double()), strict=True):
            table[place, columns["choice"]] = values
        return cls(*found)


def _first_largest(values: torch.Tensor) -> torch.Tensor:
    # torch does not say which of equals it returns.
    return torch.from_numpy(np.argmax(values.numpy(), axis=-1))


# A classifier's or regressor's logits, (samples, labels), float32, or what a language model predicts.
Predictions = torch.Tensor | TokenPredictions | ChoicePredictions
# Predicts batches with a model.
Predictor = Callable[[PreTrainedModel, Sequence[Batch]], Predictions]


def predict(model: Any, batches: Sequence[Batch], *, progress: Progress = SILENT) -> Predictions:
    """Run a model over batches, in evaluation mode and without gradients.

    The labels are left out, so the model computes no loss; token labels say which predictions count. Every module's
    training flag is put back afterwards. Several processes share the batches, and all have all predictions.

    Returns the logits, (samples, labels), float32, on the CPU; where labels are tokens, `TokenPredictions`; where every
    row is a choice (`CHOICE_KEYS`), `ChoicePredictions`.
    """
    _checked(batches)
    device, behaviour = next(model.parameters()).device, behaviour_of(model)

    def forward(batch: Batch) -> torch.Tensor:
        return behaviour.output(model(**{key: value.to(device) for key, value in inputs_of(batch).items()}))

    with evaluating(model), output_alone(model), torch.inference_mode(), threads_for(model, batches):
        outputs = _outputs(forward, progress.track(processes.share(batches), "predict"), len(batches))
    return _joined(_in_order(outputs, len(batches)), batches)


def predict_by(forward: Callable[[Batch], torch.Tensor], batches: Sequence[Batch]) -> Predictions:
    """Predict batches as `predict` does, in this process alone, by a function from a batch to its logits."""
    _checked(batches)
    return _joined(_outputs(forward, enumerate(batches), len(batches)), batches)


def _checked(batches: Sequence[Batch]) -> None:
    if not batches:
        raise DataError("predict needs at least one batch, got none")
    check_label_tokens(batches)


def _outputs(
    forward: Callable[[Batch], torch.Tensor], numbered: Iterable[tuple[int, Batch]], count: int
) -> list[tuple[torch.Tensor, ...]]:
    """Return what is kept of each batch: its logits, or the likeliest tokens and the label tokens' likelihoods."""
    outputs: list[tuple[torch.Tensor, ...]] = []
    for index, batch in numbered:
        logits = forward(batch)  # (batch, labels) or (batch, tokens, vocabulary)
        labels = batch.get("labels")
        of_tokens = labels is not None and labels.dim() == 2
        output = _judge_tokens(logits, labels) if of_tokens else (logits,)
        # A language model's NaN reaches its likelihoods.
        if not torch.isfinite(output[-1]).all():
            raise NonFiniteError(
                f"logits must be finite, but batch {index} (from 0) of {count} has NaN or infinity; try dtype float32"
            )
        outputs.append(tuple(values.float().cpu() if values.is_floating_point() else values for values in output))
        del logits, output
    return outputs


def _joined(outputs: Sequence[tuple[torch.Tensor, ...]], batches: Sequence[Batch]) -> Predictions:
    """Return the predictions of all batches, in their order."""
    if len(outputs[0]) == 1:
        # Outside inference mode, so that the result may take part in a backward pass.
        return torch.cat([logits for (logits,) in outputs])
    tokens, nll = (torch.cat(values) for values in zip(*outputs, strict=True))
    counts = torch.cat([predicted_positions(batch["labels"]).sum(-1) for batch in batches]).cpu()
    sample = torch.arange(len(counts)).repeat_interleave(counts)
    found = TokenPredictions(tokens, nll, sample, samples=len(counts), answers=_are_answers(batches))
    return ChoicePredictions.of(found, batches) if "choice" in batches[0] else found


def _in_order(own: list[Any], count: int) -> list[Any]:
    """Return what all processes found for their batches, in the order of the batches."""
    found = processes.gather(own)
    return [found[index % len(found)][index // len(found)] for index in range(count)]


def _judge_tokens(logits: torch.Tensor, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest tokens and the label tokens' negative log-likelihoods, (label tokens,) each, on the CPU."""
    where = predicted_positions(labels).nonzero().unbind(-1)
    wanted = labels[:, 1:][where]
    tokens, nll = [], []
    for row, position, label in zip(*(part.split(_ROWS_AT_ONCE) for part in (*where, wanted)), strict=True):
        part = logits[row.to(logits.device), position.to(logits.device)].float()  # (rows, vocabulary)
        tokens.append(part.argmax(-1).cpu())
        nll.append(torch.nn.functional.cross_entropy(part, label.to(part.device), reduction="none").cpu())
    return torch.cat(tokens), torch.cat(nll)


def _are_answers(batches: Sequence[Batch]) -> bool:
    # In plain text every token but the first is a label; a prompt, of two tokens or more, has none.
    for batch in batches:
        labels = batch["labels"]
        mask = batch.get("attention_mask", torch.ones_like(labels))
        if bool(((mask != 0) & (mask.cumsum(-1) > 1) & (labels == IGNORED)).any()):
            return True
    return False


def references(batches: Sequence[Batch]) -> torch.Tensor:
    """Return the labels of batches in one tensor.

    They are classes, (samples,) int64; numbers, (samples,) float32; label tokens, (label tokens,) int64; or the right
    choices, (questions,) int64.
    """
    if not batches or any("labels" not in batch for batch in batches):
        raise DataError("metrics need labels, but the batches have none; name the column in data.label")
    if "choice" in batches[0]:
        question, right = (torch.cat([batch[key] for batch in batches]).cpu() for key in ("question", "right"))
        questions, place = question.unique(return_inverse=True)
        return torch.zeros(len(questions), dtype=torch.int64).scatter(0, place, right)
    labels = [batch["labels"].cpu() for batch in batches]
    if labels[0].dim() == 2:
        labels = [part[:, 1:][predicted_positions(part)] for part in labels]
    return torch.cat(labels)


def predicted(predictions: Predictions, *, regression: bool = False) -> torch.Tensor:
    """Return the classes, choices or numbers that are predicted, (samples,), or the tokens, (label tokens,)."""
    if isinstance(predictions, TokenPredictions):
        return predictions.tokens
    if isinstance(predictions, ChoicePredictions):
        return predictions.chosen
    return predictions.flatten() if regression else predictions.argmax(dim=-1)
