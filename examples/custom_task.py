"""Register a task of your own, and prune a model of it: are the halves of a text in order, and how likely is that?

    python examples/custom_task.py

A program that imports this module can name it in a recipe: `PruningRecipe(task="sentence-order", ...)`.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import tiny
import torch
from torch import Tensor
from transformers import AutoModelForNextSentencePrediction, AutoTokenizer

from hies_export import DataError, prune, register_task
from hies_export.data import encoded
from hies_export.evaluate.metrics import register_metric
from hies_export.tasks import Predictions, Task, Use, batched


@register_task
class SentenceOrder(Task):
    """Models that tell how likely two texts are in order; the second of two logits is for those that are not."""

    name, auto_class, on_hub = "sentence-order", "AutoModelForNextSentencePrediction", False
    reads, needs = ("text",), "data.text (one column)"
    predicts, metrics, word = "probabilities", ("brier",), "probability"

    def check_targets(self, rows: datasets.Dataset) -> None:
        """Refuse texts that have no halves."""
        for row, text in enumerate(rows[self.columns.text[0]]):
            if len(text.split()) < 2:
                raise DataError(f"every text must have two words to have halves, but row {row} (from 0) has fewer")

    def batches(self, samples: datasets.Dataset, size: int, use: Use) -> Iterator[dict[str, Tensor]]:
        """Yield pairs of the halves of texts, of which some are swapped; that is the label."""
        for texts in batched(samples[self.columns.text[0]], size):
            swapped = [zlib.crc32(text.encode()) % 2 for text in texts]
            words = [text.split() for text in texts]
            halves = [[" ".join(of[: len(of) // 2]), " ".join(of[len(of) // 2 :])] for of in words]
            first = [pair[swap] for pair, swap in zip(halves, swapped, strict=True)]
            second = [pair[1 - swap] for pair, swap in zip(halves, swapped, strict=True)]
            inputs = encoded(self.processor, self.config, first, second, max_length=self.columns.max_length)
            yield {**inputs, "labels": torch.tensor(swapped)}

    def effect(self, model: Any, batch: Any, output: Tensor, number: int) -> Tensor:
        """Return the number of each sample that removals should change least."""
        return output[:, 1] - output[:, 0]

    def keep(self, output: Tensor, batch: Any) -> tuple[Tensor, ...]:
        """Return how likely the halves are swapped."""
        return (output.softmax(-1)[:, 1],)

    def decide(self, predictions: Predictions) -> Tensor:
        """Return what stands in for labels where there are none."""
        return (predictions.values > 0.5).long()

    def same(self, dense: Predictions, other: Predictions) -> Tensor:
        """Return which probabilities are the same but for 0.05."""
        return (dense.values - other.values).abs() <= 0.05

    def table(self, predictions: Predictions, references: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return what `brier` takes."""
        return predictions.values.double().numpy(), references.numpy()


@register_metric("brier", of="probabilities", higher_is_better=False)
def brier(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the mean squared error of the probabilities."""
    return float(((predictions - references) ** 2).mean())


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
