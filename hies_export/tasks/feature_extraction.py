"""An embedding for a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from .task import Prediction, Task, column_sets

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ..data.reader import Reader


class FeatureExtraction(Task):
    """Encoders of texts: a `TextEncoder` gives embeddings, (batch, dimension). They need no labels."""

    name = "feature-extraction"
    auto_class = "AutoModel"
    columns = column_sets("text", "text label", "query document", "query document label")
    needs = "data.text (one column, or two and the label of their similarity), or data.query and data.document"
    text_columns = 2
    embeds = True
    output_name = "sentence_embedding"
    # Every time by another projection.
    repeats = 4
    of_rows: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "queries": ("ndcg@10", "recall@10", "mrr@10"),
        "pairs": ("spearman", "pearson"),
        "texts": ("own_ndcg@10",),
    }

    @property
    def reader_class(self) -> type[Reader]:
        """The reader of texts, pairs of texts, and queries with documents."""
        from ..data.embedding import EmbeddingReader

        return EmbeddingReader

    def replaces_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> bool:
        """Return False: an embedding is no label."""
        return False

    def own_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor) -> Tensor:
        """Refuse: see `replaces_labels`."""
        raise NotImplementedError

    def losses(self, labels: Tensor) -> Tensor:
        """Refuse: see `replaces_labels`."""
        raise NotImplementedError

    def unlabelled_loss(self, output: Tensor, index: int) -> Tensor:
        """Return the embeddings, each `projected` by its own signs, (batch,) float32."""
        return projected(output, index)

    def effect(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor, index: int) -> Tensor:
        """Return the embeddings, each `projected` by its own signs, (batch,) float32."""
        return projected(output, index)

    def prediction(self, config: Any) -> Prediction:
        """Return "embeddings"."""
        return "embeddings"

    def usual_metrics(
        self, *, predicts: Prediction = "classes", answers: bool = False, choices: bool = False
    ) -> tuple[str, ...]:
        """Return the metrics of texts alone."""
        return self.of_rows["texts"]


def projected(outputs: Tensor, seed: int) -> Tensor:
    """Return outputs, (samples, dimension), each projected onto random signs of its own, (samples,) float32.

    Over such signs v, the mean of (v . d)^2 is |d|^2, the squared length of a change d of the output. So the gradient
    of one number measures the effect on a whole embedding. With a single dimension, the output itself is returned.

    Source: Hutchinson, Communications in Statistics 18 (1989), for the signs.
    """
    import torch

    if outputs.shape[-1] == 1:
        return outputs.float()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, outputs.shape, generator=generator) * 2 - 1
    return (outputs.float() * signs.to(outputs.device)).sum(-1)
