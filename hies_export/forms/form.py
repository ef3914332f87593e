"""Define a form, which is a model on a runtime in some bits (a dtype), and export every model of a run once."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from .. import processes
from ..data.batches import Batch
from ..errors import HiesError
from ..evaluate.predict import Predictor, predict_by
from ..model.copies import convert
from ..model.memory import let_go, map_weights
from ..progress import SILENT, Progress
from ..recipe.sections import ExportSection
from ..tasks import Predictions, Task, task_of
from .formats import Export, Exporter, options_for_runtime
from .runtimes.base import RUNTIMES, Runtime, load_runtime


@dataclass(frozen=True)
class Form:
    """A model as a runtime runs it.

    Attributes:
        model: Name of the model: in a run "dense", "slim" or "cascade".
        source: What the runtime loads: a model in memory, or the file or folder of its export.
        bits: What its linear layers are computed in, such as "float32" or "int8"; None leaves that to the source.
        bytes: Size of the exported file; None for a model in memory.
    """

    model: str
    runtime: str
    source: PreTrainedModel | Path
    bits: str | None = None
    bytes: int | None = None

    def load(self) -> Runtime:
        """Return the model, loaded into the runtime."""
        return load_runtime(self.runtime, self.source, dtype=self.bits)

    def predict(self, batches: Sequence[Batch], task: Task, progress: Progress = SILENT) -> Predictions:
        """Return predictions for batches, made on the runtime; batches are not shared out among processes."""
        forward = partial(self.load().prediction, names=task.output_names)
        return predict_by(forward, batches, task, name=f"predict on {self.runtime}", progress=progress)


class Forms:
    """Models by name, and their exports: every model is exported once for each format, dtype and number of bits.

    Attributes:
        exporter: Makes the exports; its options are those of a run.
        folder: Where exports are written, each in a folder of its own; the caller deletes it.
    """

    def __init__(
        self, models: Mapping[str, PreTrainedModel], exporter: Exporter, folder: Path, progress: Progress = SILENT
    ):
        self.exporter, self.folder, self.progress = exporter, folder, progress
        self._models = dict(models)
        # An export that failed is not tried again: what it raised is raised again.
        self._exports: dict[tuple[str, ExportSection], Export | HiesError] = {}

    def add(self, name: str, model: PreTrainedModel, exports: Mapping[ExportSection, Export] | None = None) -> None:
        """Add a model, with exports of it that were made elsewhere, by their options."""
        self._models[name] = model
        self._exports.update({(name, options): exported for options, exported in (exports or {}).items()})

    def model(self, name: str) -> PreTrainedModel:
        """Return a model by its name."""
        return self._models[name]

    def map_weights(self, name: str) -> None:
        """Map the weights of a large model from a file, in place, to leave its memory to exports and runtimes."""
        map_weights(self._models[name], self.folder / f"{Path(name).name}.safetensors")

    def has_plain(self, name: str) -> bool:
        """Return whether the export that `plain` returns was made already."""
        return isinstance(self._exports.get((name, self.exporter.options.unquantized)), Export)

    def options_for(self, runtime: str, bits: str | None = None) -> ExportSection:
        """Return the options of the export that a runtime reads to compute in `bits`; None: the export's own dtype.

        They are the run's own options if these ask for the bits, in the runtime's format.
        """
        options, cls = self.exporter.options, RUNTIMES[runtime]
        quantised = bits is not None and bits == options.quantize and bits not in cls.calibrated
        if quantised and options.format == cls.format:
            return options
        return options_for_runtime(options.unquantized, runtime, bits)

    def export(self, name: str, options: ExportSection) -> Export:
        """Return the export of a model, which the first call makes; later calls raise the HiesError of the first."""
        key = name, options
        if key not in self._exports:
            self.progress.stage(f"export the {name} model")
            earlier = [exported for exported, _ in self._exports if exported == name]
            folder = self.folder / f"{Path(name).name}-{len(earlier)}"  # a model's name may be a path
            plain = self._exports.get((name, options.unquantized))
            try:
                if options.quantize and isinstance(plain, Export):
                    self._exports[key] = self.exporter.quantize(plain, folder, options)
                else:
                    self._exports[key] = self.exporter.export(self._models[name], folder, options)
                    let_go(self._models[name])
            except HiesError as error:
                self._exports[key] = error
        export_or_error = self._exports[key]
        if isinstance(export_or_error, HiesError):
            raise export_or_error
        return export_or_error

    def plain(self, name: str) -> Export:
        """Return the export of a model by the options of the exporter, but not quantised."""
        return self.export(name, self.exporter.options.unquantized)

    def form(self, name: str, runtime: str, bits: str | None = None, options: ExportSection | None = None) -> Form:
        """Return a model on a runtime: a copy in `bits` if the runtime reads models, else an export of it.

        `options` are those of the export, by default `options_for(runtime, bits)`.
        """
        if RUNTIMES[runtime].reads_models:
            dtype = None if bits is None else getattr(torch, bits)
            return Form(name, runtime, convert(self._models[name], dtype=dtype), bits)
        exported = self.export(name, options or self.options_for(runtime, bits))
        return Form(name, runtime, exported.folder, bits, exported.bytes)


def predictor(exporter: Exporter, runtime: str, bits: str | None) -> Predictor:
    """Return a function by which the first process exports a model and predicts on a runtime, for all processes."""

    def predict(model: PreTrainedModel, batches: Sequence[Batch]) -> Predictions:
        with tempfile.TemporaryDirectory(prefix="hies-served-") as folder:
            form = Forms({"model": model}, exporter, Path(folder)).form("model", runtime, bits)
            return form.predict(batches, task_of(model))

    return lambda model, batches: processes.on_main(lambda: predict(model, batches))
