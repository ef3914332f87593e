"""A first run that needs no network: train a small ViT on scikit-learn's bundled digits, to be pruned by a recipe."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import datasets
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from ..progress import SILENT, Progress

# In the package, so that an installed one has it; recipes/ links to it.
RECIPE = Path(__file__).with_name("quickstart-vit-digits.yaml")


def prepare_quickstart(folder: Path, *, epochs: int = 40, seed: int = 0, progress: Progress = SILENT) -> Path:
    """Write digits/, model/ and recipe.yaml into a folder: everything the recipe needs.

    Args:
        folder: An existing, empty folder.
        epochs: Passes over the 1437 training images; 40 take about half a minute.
        seed: Seed of initialisation and shuffling; the same seed trains the same weights on any number of cores.
        progress: Shows stages and loops.

    Returns:
        Path of the recipe.
    """
    progress.stage("train")
    rows = _digits()
    (folder / "digits").mkdir()
    for split, part in rows.items():
        part.to_parquet(folder / "digits" / f"{split}.parquet")
    # 8 x 8 pixels are kept as they are; [0, 255] becomes [-1, 1].
    processor = ViTImageProcessorPil(
        do_resize=False, size={"height": 8, "width": 8}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    with _one_thread():
        model = _train(rows["train"], processor, epochs=epochs, seed=seed, progress=progress)
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    shutil.copyfile(RECIPE, folder / "recipe.yaml")
    return folder / "recipe.yaml"


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread inside the block.

    Threads that share tensors this small spend their time waiting for each other, above all beside other processes;
    and floats no longer depend on how many there are.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _digits() -> dict[str, datasets.Dataset]:
    bunch = load_digits()
    images = [Image.fromarray(i) for i in (bunch.images * (255 / 16)).round().astype(np.uint8)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=[str(d) for d in range(10)])}
    )
    order = np.random.default_rng(0).permutation(len(images))
    return {
        split: datasets.Dataset.from_dict(
            {"image": [images[i] for i in part], "label": [int(bunch.target[i]) for i in part]},
            features=features,
        )
        for split, part in (("train", order[360:]), ("validation", order[:360]))
    }


def _train(
    rows: datasets.Dataset,
    processor: ViTImageProcessorPil,
    *,
    epochs: int,
    seed: int,
    progress: Progress,
) -> ViTForImageClassification:
    torch.manual_seed(seed)
    names = rows.features["label"].names
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=128,
        id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)},
    )
    model = ViTForImageClassification(config).train()
    pixels = processor([i.convert("RGB") for i in rows["image"]], return_tensors="pt")["pixel_values"]
    labels = torch.tensor(rows["label"][:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    passes: Sequence[int] = range(epochs)
    tracked = progress.track(passes, "train")
    for _ in tracked:
        for batch in torch.randperm(len(labels)).split(64):
            loss = model(pixel_values=pixels[batch], labels=labels[batch]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return model.eval()
