"""Prepare a first run without network: train a small ViT on the digits that scikit-learn bundles."""

from __future__ import annotations

import shutil
from pathlib import Path

import datasets
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from ..model.modes import torch_threads
from ..progress import SILENT, Progress

# Inside the package, so that it is installed too; recipes/ links to it.
RECIPE = Path(__file__).with_name("quickstart-vit-digits.yaml")
# The model's folder; the recipe and the report use this name.
MODEL = "vit-digits"


def prepare_quickstart(folder: Path, *, epochs: int = 40, progress: Progress = SILENT) -> Path:
    """Write a dataset (digits/), a model trained on it (vit-digits/) and their recipe; return the recipe's path."""
    progress.stage("train a small ViT on handwritten digits")
    splits = _digits()
    (folder / "digits").mkdir()
    for split, rows in splits.items():
        rows.to_parquet(folder / "digits" / f"{split}.parquet")
    # Images stay at 8 x 8 pixels; values in [0, 255] are scaled to [-1, 1].
    processor = ViTImageProcessorPil(
        do_resize=False, size={"height": 8, "width": 8}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    # Sums over one thread do not depend on the number of cores, nor do the weights then. 40 epochs take half a minute.
    with torch_threads(1):
        model = _train(splits["train"], processor, epochs=epochs, progress=progress)
    model.save_pretrained(folder / MODEL)
    processor.save_pretrained(folder / MODEL)
    return Path(shutil.copyfile(RECIPE, folder / "recipe.yaml"))


def _digits() -> dict[str, datasets.Dataset]:
    """Return the 1797 digits as columns `image` and `label`: 1437 under "train", 360 under "validation"."""
    bunch = load_digits()
    images = [Image.fromarray(pixels) for pixels in (bunch.images * (255 / 16)).round().astype(np.uint8)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
    rows = datasets.Dataset.from_dict({"image": images, "label": bunch.target.tolist()}, features=features)
    order = np.random.default_rng(0).permutation(len(rows))
    return {"train": rows.select(order[360:]), "validation": rows.select(order[:360])}


def _train(
    rows: datasets.Dataset, processor: ViTImageProcessorPil, *, epochs: int, progress: Progress
) -> ViTForImageClassification:
    """Train a ViT of 4 layers with 8 heads each on the rows, and return it in evaluation mode."""
    torch.manual_seed(0)
    names = rows.features["label"].names
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=128,
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
    )
    model = ViTForImageClassification(config).train()
    pixels = processor([image.convert("RGB") for image in rows["image"]], return_tensors="pt")["pixel_values"]
    labels = torch.tensor(rows["label"][:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    for _ in progress.track(range(epochs), "train"):
        for batch in torch.randperm(len(labels)).split(64):
            loss = model(pixel_values=pixels[batch], labels=labels[batch]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return model.eval()
