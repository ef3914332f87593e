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
from ..model.text_encoder import TextEncoder
from ..model.tokens import synthetic_batch
from ..recipe.sections import ExportSection
from .exports import Exporter
from .onnx.export import OnnxExport
from .openvino.export import OpenVinoExport


def export_served(
    model: TextEncoder,
    folder: str | Path,
    options: ExportSection,
    *,
    processor: Any = None,
    rows: Sequence[Mapping[str, Tensor]] = (),
    overwrite: bool = False,
) -> OnnxExport | OpenVinoExport:
    """Export an embedding model as `Exporter` does, for `SentenceTransformer(folder, trust_remote_code=True)`.

    The graph gives `sentence_embedding`, (texts, dimension), and `last_hidden_state`, (texts, tokens, width). `rows`
    are those of `Exporter`.
    """
    longest = model.settings.max_length
    sample = synthetic_batch(model, batch=2, sequence=16 if longest is None else min(16, longest))
    with new_folder(folder, overwrite=overwrite) as written:
        exported = Exporter(options, sample, processor, rows).export(model, written / "graph")
        assert isinstance(exported, OnnxExport | OpenVinoExport)
        for file in exported.folder.iterdir():
            file.rename(written / file.name)
        exported.folder.rmdir()
        write_served(written, model, file=exported.file.name, runtime=exported.runtime)
        if (options.provider, options.dtype, options.quantize) == ("cpu", "float32", None):
            check_in_sentence_transformers(model, written, processor, limit=OTHER_PROGRAM["float32"])
    folder = Path(folder)
    return replace(exported, folder=folder, file=folder / exported.file.name)
