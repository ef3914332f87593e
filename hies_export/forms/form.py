"""Define a form, which is a model on a runtime in some bits, and export every model of a run once."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from .. import processes
from ..data.batches import Batch
from ..entry_points import COMPOUNDS as KNOWN
from ..entry_points import Registry
from ..errors import HiesError
from ..evaluate.interval import CONFIDENCE
from ..evaluate.predict import Predictor, predict_by
from ..model.copies import convert
from ..model.memory import let_go, map_weights
from ..progress import SILENT, Progress
from ..recipe.sections import ExportSection
from ..tasks import Predictions, Task, task_of
from ..units.counts import Both
from .formats import Export, Exporter, read_by
from .runtimes.base import RUNTIMES, Runtime, load_runtime


@dataclass(frozen=True)
class Form:
    """A model as a runtime runs it.

    Attributes:
        model: Name of the model: in a run "dense", "slim" or that of a compound.
        runtime: Name of the runtime.
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
        """Load the model into the runtime."""
        return load_runtime(self.runtime, self.source, dtype=self.bits)

    def predict(self, batches: Sequence[Batch], task: Task, progress: Progress = SILENT) -> Predictions:
        """Predict batches on the runtime, in this process alone."""
        runtime, name = self.load(), f"predict on {self.runtime}"
        forward = partial(runtime.prediction, names=task.output_names)
        return predict_by(forward, batches, task, name=name, progress=progress)


@dataclass(frozen=True, kw_only=True)
class Compound(ABC):
    """A form of the slim and the dense model in one file, as a run asks for it; it keeps a promise by itself.

    Attributes:
        name: Its name in `COMPOUNDS`.
        folder: Where a run keeps it.
        runtimes: The runtimes that run it.
        disagreement: Largest share of answers that may differ from the dense model's, in (0, 1).
        confidence: The probability that the promise holds, in (0, 1).
        shares: Shares of the dense model's FLOPs to choose the slim one's size among; empty if the budget says it.
        runtime: The runtime that serves the file, as in `load_runtime`.
        bits: What the linear layers of the slim part are computed in.
    """

    name: ClassVar[str]
    folder: ClassVar[str]
    runtimes: ClassVar[tuple[str, ...]]
    disagreement: float
    confidence: float = CONFIDENCE
    shares: tuple[float, ...] = ()
    runtime: str = "onnxruntime-cpu"
    bits: str = "float32"

    @abstractmethod
    def check(self, model: PreTrainedModel, rows: Sequence[Batch]) -> None:
        """Refuse, by a RequestError, a dense model or held-out rows that do not allow the promise."""

    @abstractmethod
    def join(
        self, slim: Export, dense: Export, folder: Path, *, batches: Sequence[Batch], answers: torch.Tensor
    ) -> Export:
        """Write both models into a folder, after checking the promise on held-out batches.

        `answers` are the dense model's logits on them. The fact `promise` of the result has `passed_on` and `differ` as
        in `SizeTried`. Raises a HiesError where the promise cannot be kept.
        """

    @abstractmethod
    def facts(
        self, exported: Export, batches: Sequence[Batch], *, parts: Both[int], stability: float, tried: Sequence[Any]
    ) -> tuple[Any, Any]:
        """Return what a report's summary and its details say of an export.

        It keeps the share `stability` of the answers on the evaluation batches; `parts` are the sizes of the files of
        both models alone.
        """

    def form(self, exported: Export) -> Form:
        """Return an export of it on its runtime."""
        return Form(self.name, self.runtime, exported.folder, self.bits, exported.bytes)


COMPOUNDS: Registry[type[Compound]] = KNOWN
"""Name -> form of both models."""


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
        """Add a model, with the exports that there are of it already."""
        self._models[name] = model
        self._exports.update({(name, options): exported for options, exported in (exports or {}).items()})

    def model(self, name: str) -> PreTrainedModel:
        """Return a model by its name."""
        return self._models[name]

    def map(self, name: str) -> None:
        """Map the weights of a large model from a file, so that exports and runtimes have their memory."""
        map_weights(self._models[name], self.folder / f"{Path(name).name}.safetensors")

    def exports_of(self, name: str) -> dict[ExportSection, Export]:
        """Return the exports that were made of a model, by their options."""
        return {
            options: exported
            for (made, options), exported in self._exports.items()
            if made == name and not isinstance(exported, HiesError)
        }

    def read_by(self, runtime: str, bits: str | None = None) -> ExportSection:
        """Return the options of the export that a runtime reads to compute in some bits, by default the export's own.

        The bits of the run's own quantised export are served by that export.
        """
        options, known = self.exporter.options, RUNTIMES[runtime]
        own = bits is not None and bits == options.quantize and bits not in known.calibrated
        return options if own and options.format == known.format else read_by(options.unquantized, runtime, bits)

    def export(self, name: str, options: ExportSection) -> Export:
        """Return the export of a model; a quantised one is made from the plain one, if there is one."""
        key = name, options
        if key not in self._exports:
            self.progress.stage(f"export the {name} model")
            try:
                place = self.folder / f"{Path(name).name}-{sum(made == name for made, _ in self._exports)}"
                plain = self._exports.get((name, options.unquantized))
                if options.quantize and isinstance(plain, Export):
                    self._exports[key] = self.exporter.quantize(plain, place, options)
                else:
                    self._exports[key] = self.exporter.export(self._models[name], place, options)
                    let_go(self._models[name])
            except HiesError as error:
                self._exports[key] = error
        found = self._exports[key]
        if isinstance(found, HiesError):
            raise found
        return found

    def plain(self, name: str) -> Export:
        """Return the export of a model by the options of the exporter, but not quantised."""
        return self.export(name, self.exporter.options.unquantized)

    def export_for(self, names: Sequence[str], ways: Iterable[tuple[str, str | None]]) -> None:
        """Export models for all runtimes that read exports, each with bits, before anything else: one may fail."""
        for runtime, bits in ways:
            for name in () if RUNTIMES[runtime].reads_models else names:
                self.export(name, self.read_by(runtime, bits))

    def form(self, name: str, runtime: str, bits: str | None = None, options: ExportSection | None = None) -> Form:
        """Return a model on a runtime: a copy in these bits if the runtime reads models, else an export of it.

        `options` are those of the export, by default those of `read_by`.
        """
        if RUNTIMES[runtime].reads_models:
            dtype = None if bits is None else getattr(torch, bits)
            return Form(name, runtime, convert(self._models[name], dtype=dtype), bits)
        exported = self.export(name, options or self.read_by(runtime, bits))
        return Form(name, runtime, exported.folder, bits, exported.bytes)


def predictor(exporter: Exporter, runtime: str, bits: str | None) -> Predictor:
    """Return a function that exports a model for a runtime, and predicts batches there as the export will be served."""

    def served(model: PreTrainedModel, batches: Sequence[Batch]) -> Predictions:
        with tempfile.TemporaryDirectory(prefix="hies-served-") as folder:
            form = Forms({"model": model}, exporter, Path(folder)).form("model", runtime, bits)
            return form.predict(batches, task_of(model, batches[0]))

    return lambda model, batches: processes.on_main(lambda: served(model, batches))
