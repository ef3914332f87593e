"""Provide what each runtime loads of the dense and the slim model, and export each form of them once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..measure.exports import Exported, Exporter, ExportOptions
from ..model.copies import convert
from ..onnx.export import OnnxExport
from ..progress import Progress
from ..runtimes.base import RUNTIMES

Pair = tuple[PreTrainedModel, PreTrainedModel] | tuple[Path, Path]


@dataclass
class Sources:
    """What runtimes load of both models: the models, or their exports.

    Attributes:
        exported, dense_exports: Existing exports of the slim and the dense model, by their options; they are reused.
        exporter: Makes the others.
        folder: Where the others are written; the caller deletes it.
    """

    dense: PreTrainedModel
    slim: PreTrainedModel
    exported: dict[ExportOptions, Exported]
    exporter: Exporter
    folder: Path
    progress: Progress
    dense_exports: dict[ExportOptions, Exported] = field(default_factory=dict)

    def prepare(self, runtime: str, dtype: str | None = None) -> None:
        """Export the models for a runtime that loads exports."""
        if not RUNTIMES[runtime].reads_models:
            self.exports(self.exporter.options.unquantized.read_by(runtime, dtype))

    def of(self, runtime: str, dtype: str | None = None) -> Pair:
        """Return what a runtime loads to compute in a dtype, by default in that of the model or of the export."""
        if RUNTIMES[runtime].reads_models:
            own = None if dtype is None else getattr(torch, dtype)
            return convert(self.dense, dtype=own), convert(self.slim, dtype=own)
        dense, slim = self.exports(self.exporter.options.unquantized.read_by(runtime, dtype))
        return dense.folder, slim.folder

    def exports(self, options: ExportOptions) -> tuple[Exported, Exported]:
        """Return the exports of both models."""
        if options not in self.dense_exports:
            self.progress.stage("export the dense model, to compare with")
            self.dense_exports[options] = self._export(self.dense, "dense", options, self.dense_exports)
        if options not in self.exported:
            self.exported[options] = self._export(self.slim, "slim", options, self.exported)
        return self.dense_exports[options], self.exported[options]

    def _export(
        self, model: PreTrainedModel, name: str, options: ExportOptions, made: dict[ExportOptions, Exported]
    ) -> Exported:
        place = self.folder / f"{name}-{len(made)}"
        plain = made.get(options.unquantized)
        if options.quantize and isinstance(plain, OnnxExport):
            return self.exporter.quantize(plain, place)
        return self.exporter.export(model, place, options)
