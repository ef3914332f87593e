"""What language models have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from .task import Behaviour, Prediction

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class Tokens(Behaviour):
    """A prediction of every next token, from logits, (batch, tokens, vocabulary)."""

    generative: ClassVar[bool] = True

    def own_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor) -> Tensor:
        """Return the likeliest token at each of the `judged_tokens`, (batch, tokens)."""
        from ..data.targets import IGNORED
        from ..model.tokens import judged_tokens

        predicted = output.argmax(-1)
        labels = predicted.new_full(predicted.shape, IGNORED)
        labels[:, 1:] = predicted[:, :-1]
        return labels.where(judged_tokens(model, batch, labels), IGNORED)

    def losses(self, labels: Tensor) -> Tensor:
        """Return the number of label tokens of each sample, (batch,)."""
        from ..data.targets import predicted_positions

        return predicted_positions(labels).sum(-1)

    def effect(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor, index: int) -> Tensor:
        """Return the log-probability of the labels, summed over their positions, (batch,).

        Without labels it is that of the text itself. (That of the model's own choice is less useful: the model is
        nearly certain of it, so its gradient is small. Perplexity was 12.2 instead of 9.4 in dev/LOG.md.)
        """
        from ..data.targets import predicted_positions, text_labels

        labels = text_labels(model, batch).to(output.device)
        judged = predicted_positions(labels)
        wanted = labels[:, 1:][judged][:, None]
        found = output[:, :-1][judged].float().log_softmax(-1).gather(-1, wanted)[:, 0]  # (judged tokens,)
        sample = judged.nonzero()[:, 0]
        return found.new_zeros(len(output)).index_add(0, sample, found)

    def prediction(self, config: Any) -> Prediction:
        """Return "tokens"."""
        return "tokens"

    def usual_metrics(
        self, *, predicts: Prediction = "classes", answers: bool = False, choices: bool = False
    ) -> tuple[str, ...]:
        """Return perplexity; of answers also how many are exact; of choices how many are right."""
        if choices:
            return ("choice_accuracy", "choice_accuracy_norm")
        return ("exact_match", "perplexity") if answers else ("perplexity",)
