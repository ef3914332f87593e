"""Hold models as runtimes serve them: what each runtime loads of a model is exported once, and then predicts.

`compare.compare_forms` and `on_rows.time_on_rows` time what `Forms.served` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..model.copies import convert
from ..onnx.export import OnnxExport
from ..progress import SILENT, Progress
from ..runtimes.base import RUNTIMES
from ..runtimes.registry import Served
from .exports import Exported, Exporter, ExportOptions


class Forms:
    """Models by name, and their exports: every model is exported once for each format, dtype and number of bits.

    Attributes:
        exporter: Makes the exports; its options are those of a run.
        folder: Where exports are written; the caller deletes it.
    """

    def __init__(
        self, models: Mapping[str, PreTrainedModel], exporter: Exporter, folder: Path, progress: Progress = SILENT
    ):
        self.exporter, self.folder, self.progress = exporter, folder, progress
        self._models = dict(models)
        self._exports: dict[tuple[str, ExportOptions], Exported] = {}

    def add(self, name: str, model: PreTrainedModel, exports: Mapping[ExportOptions, Exported] | None = None) -> None:
        """Add a model, with the exports that there are of it already."""
        self._models[name] = model
        self._exports.update({(name, options): exported for options, exported in (exports or {}).items()})

    def model(self, name: str) -> PreTrainedModel:
        """Return a model by its name."""
        return self._models[name]

    def exports_of(self, name: str) -> dict[ExportOptions, Exported]:
        """Return the exports that were made of a model, by their options."""
        return {options: exported for (made, options), exported in self._exports.items() if made == name}

    def read_by(self, runtime: str, bits: str | None = None) -> ExportOptions:
        """Return the options of the export that a runtime reads to compute in some bits, by default the export's own.

        The bits of the run's own quantised export are served by that export.
        """
        options = self.exporter.options
        return options if bits is not None and bits == options.quantize else options.unquantized.read_by(runtime, bits)

    def export(self, name: str, options: ExportOptions) -> Exported:
        """Return the export of a model, which is made once; a quantised one is made from the plain one if there is."""
        if (name, options) not in self._exports:
            place = self.folder / f"{name}-{sum(made == name for made, _ in self._exports)}"
            plain = self._exports.get((name, options.unquantized))
            self.progress.stage(f"export the {name} model")
            if options.quantize and isinstance(plain, OnnxExport):
                self._exports[name, options] = self.exporter.quantize(plain, place)
            else:
                self._exports[name, options] = self.exporter.export(self._models[name], place, options)
        return self._exports[name, options]

    def served(self, name: str, runtime: str, bits: str | None = None) -> Served:
        """Return a model as a runtime loads it: itself in these bits, or the folder of its export."""
        if RUNTIMES[runtime].reads_models:
            dtype = None if bits is None else getattr(torch, bits)
            return Served(runtime, convert(self._models[name], dtype=dtype), bits)
        return Served(runtime, self.export(name, self.read_by(runtime, bits)).folder, bits)

    def bytes_of(self, name: str, runtime: str, bits: str | None = None) -> int | None:
        """Return the size of the file that a runtime loads; None if it loads the model itself."""
        return None if RUNTIMES[runtime].reads_models else self.export(name, self.read_by(runtime, bits)).bytes
