"""How language models behave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from ..errors import DataError, listed
from .behaviour import Behaviour

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from .predictions import ChoicePredictions, TokenPredictions


class Tokens(Behaviour):
    """A prediction of every next token, from logits, (batch, tokens, vocabulary).

    Predictions are `TokenPredictions`, or `ChoicePredictions` where every row is a choice (`CHOICE_KEYS`).

    Attributes:
        shift: How many tokens before a label its prediction stands.
    """

    shift: ClassVar[int] = 1

    predicts = "tokens"
    word = "next token"
    metrics: ClassVar[tuple[str, ...]] = ("perplexity",)

    def canonical(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch of which text without labels is its own label, as in training on plain text."""
        from ..data.batches import text_labels

        labels = text_labels(model, batch)
        check_token_labels(model, labels)
        return {**batch, "labels": labels}

    def own_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor) -> Tensor:
        """Return the likeliest token at each of the `judged_tokens`, (batch, tokens)."""
        from ..data.batches import IGNORED
        from ..model.tokens import judged_tokens

        predicted = output.argmax(-1)
        labels = predicted.roll(self.shift, -1)
        labels[:, : self.shift] = IGNORED
        return labels.where(judged_tokens(model, batch, labels), IGNORED)

    def losses(self, labels: Tensor) -> Tensor:
        """Return the number of label tokens of each sample, (batch,)."""
        return self.predicting(labels).sum(-1)

    def predicting(self, labels: Tensor) -> Tensor:
        """Return which outputs predict a label, (batch, tokens - shift) bool.

        `labels` are (batch, tokens), not shifted, as models take them; -100 means no loss.
        """
        from ..data.batches import IGNORED

        return labels[:, self.shift :] != IGNORED

    def effect(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor, index: int) -> Tensor:
        """Return the log-probability of the labels, summed over their positions, (batch,).

        Without labels it is that of the text itself. (That of the model's own choice is less useful: the model is
        nearly certain of it, so its gradient is small. Perplexity was 12.2 instead of 9.4 in dev/LOG.md.)
        """
        labels = self._labels(model, batch, output).to(output.device)
        judged = self.predicting(labels)
        wanted = labels[:, self.shift :][judged][:, None]
        found = (
            output[:, : judged.shape[1]][judged].float().log_softmax(-1).gather(-1, wanted)[:, 0]
        )  # (judged tokens,)
        sample = judged.nonzero()[:, 0]
        return found.new_zeros(len(output)).index_add(0, sample, found)

    def _labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor) -> Tensor:
        from ..data.batches import text_labels

        return text_labels(model, batch)

    def check(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Refuse samples without a label token to compute a loss from."""
        for index, labels in enumerate(batch["labels"] for batch in batches if "labels" in batch):
            empty = (~self.predicting(labels).any(-1)).nonzero().flatten().tolist()
            if empty:
                after, samples = " after its first token" * self.shift, "sample" if len(empty) == 1 else "samples"
                raise DataError(
                    f"every sample must have a label token{after}, but of batch {index} (from 0) {samples} "
                    f"{listed(empty)} (from 0) of {len(labels)} {'has' if len(empty) == 1 else 'have'} none; leave "
                    "such samples out or raise max_length"
                )

    def kept(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the likeliest tokens and the label tokens' negative log-likelihoods, (label tokens,) each."""
        from .predictions import likeliest

        if "labels" not in batch:
            raise DataError(f"a language model is judged at its label tokens, but a batch has only {', '.join(batch)}")
        where = self.predicting(batch["labels"]).nonzero().unbind(-1)
        return likeliest(output, where, batch["labels"][:, self.shift :][where])

    def joined(
        self, kept: Sequence[tuple[Tensor, ...]], batches: Sequence[Mapping[str, Tensor]]
    ) -> TokenPredictions | ChoicePredictions:
        """Return the predictions of all batches, in their order."""
        import torch

        from .predictions import ChoicePredictions, TokenPredictions

        tokens, nll = (torch.cat(values) for values in zip(*kept, strict=True))
        counts = torch.cat([self.losses(batch["labels"]) for batch in batches]).cpu()
        sample = torch.arange(len(counts)).repeat_interleave(counts)
        found = TokenPredictions(tokens, nll, sample, samples=len(counts), answers=self._are_answers(batches))
        return ChoicePredictions.of(found, batches) if "choice" in batches[0] else found

    def references(self, batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the label tokens, (label tokens,) int64, or the right choices, (questions,) int64."""
        import torch

        if "choice" in batches[0]:
            question, right = (torch.cat([batch[key] for batch in batches]).cpu() for key in ("question", "right"))
            questions, place = question.unique(return_inverse=True)
            return torch.zeros(len(questions), dtype=torch.int64).scatter(0, place, right)
        labels = [batch["labels"].cpu() for batch in batches]
        return torch.cat([part[:, self.shift :][self.predicting(part)] for part in labels])

    def usual_metrics(
        self, *, rows: str | None = None, answers: bool = False, choices: bool = False
    ) -> tuple[str, ...]:
        """Return perplexity; of answers also how many are exact; of choices how many are right."""
        if choices:
            return ("choice_accuracy", "choice_accuracy_norm")
        return ("exact_match", "perplexity") if answers else self.metrics

    def _are_answers(self, batches: Sequence[Mapping[str, Tensor]]) -> bool:
        import torch

        from ..data.batches import IGNORED

        # In plain text every token but the first is a label; a prompt, of two tokens or more, has none.
        for batch in batches:
            labels = batch["labels"]
            mask = batch.get("attention_mask", torch.ones_like(labels))
            if bool(((mask != 0) & (mask.cumsum(-1) > 1) & (labels == IGNORED)).any()):
                return True
        return False


def check_token_labels(model: PreTrainedModel, labels: Tensor) -> None:
    """Refuse, by a DataError, labels that are not tokens of a model, (batch, tokens) int64, or -100."""
    import torch

    from ..data.batches import IGNORED

    known = model.config.get_text_config().vocab_size
    wrong = labels[((labels < 0) | (labels >= known)) & (labels != IGNORED)]
    if labels.dim() != 2 or labels.dtype != torch.int64 or len(wrong):
        given = f"{labels.dtype} of shape {tuple(labels.shape)}" + (f" with {wrong[0].item()}" if len(wrong) else "")
        raise DataError(
            f"the labels of a language model must be int64 tokens in [0, {known}), (batch, tokens), and {IGNORED} "
            f"where nothing is predicted, but a batch has {given}"
        )
