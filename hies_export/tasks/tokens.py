"""How language models behave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from ..errors import DataError
from .behaviour import Behaviour

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from .predictions import ChoicePredictions, TokenPredictions


class Tokens(Behaviour):
    """A prediction of every next token, from logits, (batch, tokens, vocabulary).

    Predictions are `TokenPredictions`, or `ChoicePredictions` where every row is a choice (`CHOICE_KEYS`).
    """

    predicts = "tokens"
    word = "next token"
    metrics: ClassVar[tuple[str, ...]] = ("perplexity",)

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

    def check(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Refuse samples without a label token."""
        from ..data.targets import check_label_tokens

        check_label_tokens(batches)

    def kept(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the likeliest tokens and the label tokens' negative log-likelihoods, (label tokens,) each."""
        from ..data.targets import predicted_positions
        from .predictions import likeliest

        if "labels" not in batch:
            raise DataError(f"a language model is judged at its label tokens, but a batch has only {', '.join(batch)}")
        where = predicted_positions(batch["labels"]).nonzero().unbind(-1)
        return likeliest(output, where, batch["labels"][:, 1:][where])

    def joined(
        self, kept: Sequence[tuple[Tensor, ...]], batches: Sequence[Mapping[str, Tensor]]
    ) -> TokenPredictions | ChoicePredictions:
        """Return the predictions of all batches, in their order."""
        import torch

        from .predictions import ChoicePredictions, TokenPredictions

        tokens, nll = (torch.cat(values) for values in zip(*kept, strict=True))
        counts = torch.cat([self.losses(batch["labels"]) for batch in batches]).cpu()
        sample = torch.arange(len(counts)).repeat_interleave(counts)
        found = TokenPredictions(tokens, nll, sample, samples=len(counts), answers=_are_answers(batches))
        return ChoicePredictions.of(found, batches) if "choice" in batches[0] else found

    def references(self, batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the label tokens, (label tokens,) int64, or the right choices, (questions,) int64."""
        import torch

        from ..data.targets import predicted_positions

        if "choice" in batches[0]:
            question, right = (torch.cat([batch[key] for batch in batches]).cpu() for key in ("question", "right"))
            questions, place = question.unique(return_inverse=True)
            return torch.zeros(len(questions), dtype=torch.int64).scatter(0, place, right)
        labels = [batch["labels"].cpu() for batch in batches]
        return torch.cat([part[:, 1:][predicted_positions(part)] for part in labels])

    def usual_metrics(
        self, *, rows: str | None = None, answers: bool = False, choices: bool = False
    ) -> tuple[str, ...]:
        """Return perplexity; of answers also how many are exact; of choices how many are right."""
        if choices:
            return ("choice_accuracy", "choice_accuracy_norm")
        return ("exact_match", "perplexity") if answers else self.metrics


def _are_answers(batches: Sequence[Mapping[str, Tensor]]) -> bool:
    import torch

    from ..data.targets import IGNORED

    # In plain text every token but the first is a label; a prompt, of two tokens or more, has none.
    for batch in batches:
        labels = batch["labels"]
        mask = batch.get("attention_mask", torch.ones_like(labels))
        if bool(((mask != 0) & (mask.cumsum(-1) > 1) & (labels == IGNORED)).any()):
            return True
    return False
