"""An embedding for a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import DataError
from .behaviour import Behaviour
from .task import Task, column_sets

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ..data.reader import Reader
    from ..model.sentence import Similarity


@dataclass(frozen=True)
class Embeddings(Behaviour):
    """Embeddings, (batch, dimension), which are judged by what they rank. They need no labels."""

    similarity: Similarity = "cosine"

    predicts = "embeddings"
    of_rows: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "queries": ("ndcg@10", "recall@10", "mrr@10"),
        "pairs": ("spearman", "pearson"),
        "texts": ("own_ndcg@10",),
    }
    metrics = of_rows["texts"]
    output_names = ("sentence_embedding",)
    # Every time by another projection.
    repeats = 4

    def replaces_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> bool:
        """Return False: an embedding is no label."""
        return False

    def own_labels(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor) -> Tensor:
        """Refuse: see `replaces_labels`."""
        raise NotImplementedError

    def unlabelled_loss(self, output: Tensor, index: int) -> Tensor:
        """Return the embeddings, each `projected` by its own signs, (batch,) float32."""
        return projected(output, index)

    def effect(self, model: PreTrainedModel, batch: Mapping[str, Tensor], output: Tensor, index: int) -> Tensor:
        """Return the embeddings, each `projected` by its own signs, (batch,) float32."""
        return projected(output, index)

    def decided(self, predictions: Tensor) -> Tensor:
        """Return the embeddings."""
        return predictions

    def same(self, dense: Tensor, other: Tensor) -> Tensor:
        """Refuse: embeddings are compared by what they rank."""
        raise DataError("embeddings are compared by what they rank; judge them with rows that can be ranked")

    def table(self, predictions: Tensor, references: Tensor) -> Any:
        """Refuse: see `same`."""
        raise NotImplementedError


class FeatureExtraction(Task):
    """Encoders of texts: a `TextEncoder` gives an embedding for each."""

    name = "feature-extraction"
    auto_class = "AutoModel"
    columns = column_sets("text", "text label", "query document", "query document label")
    needs = "data.text (one column, or two and the label of their similarity), or data.query and data.document"
    text_columns = 2
    embeds = True
    rows_together = True
    of_item = 1

    def behaviour(self, config: Any) -> Embeddings:
        """Return that of embeddings."""
        return Embeddings()

    @property
    def reader_class(self) -> type[Reader]:
        """The reader of texts, pairs of texts, and queries with documents."""
        from ..data.embedding import EmbeddingReader

        return EmbeddingReader


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
