"""Export an embedding model to a folder that sentence-transformers runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint.folders import new_folder
from ..checkpoint.save import check_in_sentence_transformers
from ..checkpoint.served_settings import write_served
from ..equal import OTHER_PROGRAM
from ..errors import RequestError
from ..model.text_encoder import TextEncoder
from ..model.tokens import synthetic_batch
from ..recipe.sections import ExportSection
from .formats import FORMATS, Export, Given, runtime_of


def export_served(
    model: TextEncoder,
    folder: str | Path,
    how: ExportSection,
    *,
    processor: Any = None,
    rows: Sequence[Mapping[str, Tensor]] = (),
    overwrite: bool = False,
) -> Export:
    """Export an embedding model, for `SentenceTransformer(folder, trust_remote_code=True)`.

    The graph gives `sentence_embedding`, (texts, dimension), and `last_hidden_state`, (texts, tokens, width). `rows`
    are those of `Given`. Raises RequestError for a format that no runtime reads.
    """
    if (runtime := runtime_of(how)) is None:
        raise RequestError(f"an embedding model needs a format that a runtime reads, got {how.format}; give another")
    longest = model.settings.max_length
    sample = synthetic_batch(model, batch=2, sequence=16 if longest is None else min(16, longest))
    with new_folder(folder, overwrite=overwrite) as written:
        exported = FORMATS[how.format].write(model, written / "graph", how, Given(sample, processor, rows))
        for file in exported.folder.iterdir():
            file.rename(written / file.name)
        exported.folder.rmdir()
        write_served(written, model, file=exported.file.name, runtime=runtime)
        if (how.provider, how.dtype, how.quantize) == ("cpu", "float32", None):
            check_in_sentence_transformers(model, written, processor, limit=OTHER_PROGRAM["float32"])
    folder = Path(folder)
    return replace(exported, folder=folder, file=folder / exported.file.name)
