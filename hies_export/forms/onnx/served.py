"""Export an embedding model to a folder that sentence-transformers runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ...checkpoint.folders import new_folder
from ...checkpoint.served import write_served
from ...model.sentence import TextEncoder
from ...model.tokens import synthetic_batch
from ..runtimes.base import Provider
from .export import OnnxExport
from .quantize import Quantize, export_in_bits


def export_served(
    model: TextEncoder,
    folder: str | Path,
    *,
    processor: Any = None,
    provider: Provider = "cpu",
    dtype: str = "float32",
    quantize: Quantize | None = None,
    overwrite: bool = False,
) -> OnnxExport:
    """Export an embedding model as `export_in_bits` does, for `SentenceTransformer(folder, trust_remote_code=True)`.

    The graph gives `sentence_embedding`, (texts, dimension), and `last_hidden_state`, (texts, tokens, width).
    """
    longest = model.settings.max_length
    sequence = 16 if longest is None else min(16, longest)
    with new_folder(folder, overwrite=overwrite) as written:
        exported = export_in_bits(
            model,
            written / "graph",
            batch=synthetic_batch(model, batch=2, sequence=sequence),
            processor=processor,
            provider=provider,
            dtype=dtype,
            quantize=quantize,
        )
        for file in exported.folder.iterdir():
            file.rename(written / file.name)
        exported.folder.rmdir()
        write_served(written, model, file=exported.file.name, runtime=exported.runtime)
    folder = Path(folder)
    return replace(exported, folder=folder, file=folder / exported.file.name)
