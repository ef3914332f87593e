"""Register a criterion of your own, and compare it with HIES by masking heads before anything is cut.

    python examples/custom_criterion.py

A program that imports this module can name it in a recipe: `PruningRecipe(prune={"criterion": "his-per-weight", ...})`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import tiny
import torch
from torch import Tensor
from transformers import AutoTokenizer

from hies_export import (
    Statistics,
    collect_statistics,
    criterion,
    find_attention,
    load,
    masked_units,
    score_units,
    select_units,
)


@criterion(needs=("his", "weight_l2"))
def his_per_weight(statistics: Statistics) -> Mapping[str, Tensor]:
    """Divide HIS by the norm of the head's weights; higher means keep."""
    return {name: his / statistics["weight_l2"][name] for name, his in statistics["his"].items()}


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        path = tiny.sentiment(Path(temporary))
        model, tokenizer = load(path), AutoTokenizer.from_pretrained(path)

        def batch(split: str) -> dict[str, Tensor]:
            rows = [json.loads(line) for line in (path.parent / f"{split}.jsonl").read_text().splitlines()]
            inputs = tokenizer([row["sentence"] for row in rows], padding=True, return_tensors="pt")
            return {**inputs, "labels": torch.tensor([row["label"] for row in rows])}

        calibration, validation = batch("train"), batch("validation")
        modules = find_attention(model, calibration)
        statistics = collect_statistics(model, [calibration], modules)
        for name in ("hies", "his-per-weight", "random"):
            scores = score_units(statistics, criterion=name, alpha=0.5)
            for share in (0.3, 0.5, 0.7):
                selection = select_units(scores, modules, heads=share)
                with torch.inference_mode(), masked_units(model, selection, modules):
                    right = model(**validation).logits.argmax(-1) == validation["labels"]
                print(f"{name:15} {share:.0%} of the heads removed: accuracy {right.double().mean():.3f}")


if __name__ == "__main__":
    main()
