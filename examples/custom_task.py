"""Register a task of your own, and prune a model of it: are the halves of a text in order, and how likely is that?

    python examples/custom_task.py

A program that imports this module can name it in a recipe: `PruningRecipe(task="sentence-order", ...)`.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import tiny
import torch
from torch import Tensor
from transformers import AutoModelForNextSentencePrediction, AutoTokenizer

from hies_export import DataError, prune, register_task
from hies_export.data.processors import encoded
from hies_export.data.reader import Reader, batched
from hies_export.evaluate.metrics import register_metric
from hies_export.tasks import Behaviour, Predicted, Task, column_sets


class HalvesReader(Reader):
    """Reads a column of texts as pairs of their halves, of which some are swapped; that is the label."""

    def _check_targets(self, rows: datasets.Dataset) -> None:
        for row, text in enumerate(rows[self.columns.text[0]]):
            if len(text.split()) < 2:
                raise DataError(f"every text must have two words to have halves, but row {row} (from 0) has fewer")

    def _batches(self, samples: datasets.Dataset, batch_size: int) -> Iterator[dict[str, Tensor]]:
        for texts in batched(samples[self.columns.text[0]], batch_size):
            swapped = [zlib.crc32(text.encode()) % 2 for text in texts]
            words = [text.split() for text in texts]
            halves = [[" ".join(of[: len(of) // 2]), " ".join(of[len(of) // 2 :])] for of in words]
            first = [pair[swap] for pair, swap in zip(halves, swapped, strict=True)]
            second = [pair[1 - swap] for pair, swap in zip(halves, swapped, strict=True)]
            inputs = encoded(self.processor, self.config, first, second, max_length=self.max_length)
            yield {**inputs, "labels": torch.tensor(swapped)}


@dataclass(frozen=True)
class Probabilities(Predicted):
    """How likely the halves are swapped."""

    kind = "probabilities"
    values: Tensor  # (samples,) float32

    def __len__(self) -> int:
        return len(self.values)

    @property
    def decided(self) -> Tensor:
        """What stands in for labels where there are none."""
        return (self.values > 0.5).long()

    def same(self, other: Probabilities) -> Tensor:
        """Return which probabilities are the same but for 0.05."""
        return (self.values - other.values).abs() <= 0.05

    def table(self, references: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return what `brier` takes."""
        return self.values.double().numpy(), references.numpy()


@register_metric("brier", of="probabilities", higher_is_better=False)
def brier(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the mean squared error of the probabilities."""
    return float(((predictions - references) ** 2).mean())


class Order(Behaviour):
    """The probability of the second of two logits, which are the model's output."""

    predicts, metrics, word = "probabilities", ("brier",), "probability"

    def own_labels(self, model: Any, batch: Any, output: Tensor) -> Tensor:
        """Return what stands in for labels in the loss that scores units."""
        return output.argmax(-1)

    def effect(self, model: Any, batch: Any, output: Tensor, index: int) -> Tensor:
        """Return the number of each sample that removals should change least."""
        return output[:, 1] - output[:, 0]

    def joined(self, kept: Sequence[tuple[Tensor, ...]], batches: Any) -> Probabilities:
        """Return what is kept of the logits of all batches."""
        return Probabilities(torch.cat([logits for (logits,) in kept]).softmax(-1)[:, 1])


class SentenceOrder(Task):
    """Models that tell whether two texts are in order."""

    name, auto_class, on_hub = "sentence-order", "AutoModelForNextSentencePrediction", False
    columns, needs = column_sets("text"), "data.text (one column)"
    reader_class = HalvesReader

    def behaviour(self, config: Any) -> Order:
        """Return that of a probability."""
        return Order()


register_task(SentenceOrder())


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        path = tiny.counting(Path(temporary))
        model, tokenizer = AutoModelForNextSentencePrediction.from_pretrained(path), AutoTokenizer.from_pretrained(path)
        rows = datasets.load_dataset("text", data_files=str(path.parent / "text.txt"), split="train")
        result = prune(
            model,
            rows,
            processor=tokenizer,
            modules=["attention", "mlp"],
            criterion="compensated",
            budget={"flops": 0.7},
            compensation={"method": "least_squares"},
        )
        print(result)
        print("export:", *result.export_onnx(path.parent / "onnx").outputs)


if __name__ == "__main__":
    main()
