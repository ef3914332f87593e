"""Define how a pruned model is exported, timed, saved and reported, as a `Delivery`, and save it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import PreTrainedModel

from .. import processes
from ..checkpoint.folders import new_folder
from ..checkpoint.load import Source
from ..checkpoint.save import write_slim
from ..checkpoint.weights import weight_bytes
from ..data.batches import Batch
from ..evaluate.predict import Predictor
from ..forms.cascade.export import CascadeForm
from ..forms.form import predictor
from ..forms.formats import Exporter, Given
from ..forms.latency import TimedOn, latency_table
from ..forms.measured import MeasureOptions
from ..forms.onnx.quantize import check_quantizable
from ..forms.runtimes.base import RUNTIMES
from ..model.text_encoder import Unwrapped
from ..model.tokens import first_samples
from ..recipe.budget import TimedSection
from ..recipe.sections import DeploySection, ExportSection
from ..report.words import vocabulary_words
from ..select.cost import CostTable
from .draw import Splits
from .pruning import Pruning, Rows
from .stages import Slim
from .trimming import Reading

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """How a pruned model is exported, timed, joined, saved and reported; one in memory needs the first two fields."""

    exporter: Exporter  # for runtimes that read files, by the options of the recipe
    given: Unwrapped  # what the model was taken from, such as a SentenceTransformer; it also wraps slim models
    measure: MeasureOptions = field(default_factory=lambda: MeasureOptions(()))
    cascade: CascadeForm | None = None  # how to join both models
    deploy: DeploySection | None = None  # what to search for in place of a budget
    source: Source | None = None  # how the dense model is stored
    dense: str = ""  # folder or Hub id of the dense model
    reading: Reading | None = None  # how rows are read
    splits: Splits | None = None  # that rows were read from
    in_order: Callable[[int], list[Batch]] | None = None  # by batch size: evaluated rows as they come, to time on
    evaluation_of: int = 0  # how many samples the evaluated split has
    began: float = 0.0  # when the recipe began to be read, by `time.monotonic`

    def serve(self, served: TimedSection) -> Predictor:
        """Return a function that exports a model and predicts batches with the export, on the runtime of `served`."""
        return predictor(self.exporter, served.runtime, served.dtype)

    def timed_on(self, pruning: Pruning) -> TimedOn:
        """Return the runtime, batch and dtype on which the budget of a pruning, one of time, is measured."""
        timed = pruning.budget.timed
        assert timed is not None
        return TimedOn(
            runtime=timed.runtime,
            batch=pruning.shapes[pruning.shape_of(timed)],
            exporter=self.exporter,
            dtype=timed.dtype,
            repeats=self.measure.repeats,
        )

    def time_cuts(self, pruning: Pruning) -> CostTable:
        """Time cuts where the budget says, in the first process, and return the time that bundles of units save."""
        timed_on, unit = self.timed_on(pruning), pruning.options.unit
        return processes.on_main(
            lambda: latency_table(pruning.model, pruning.scored, timed_on, unit=unit, progress=pruning.progress)
        )


def exporter_of(options: ExportSection, rows: Rows, processor: Any) -> Exporter:
    """Return the exporter of models that read such rows; some formats are calibrated on them."""
    return Exporter(options, Given(first_samples(rows.score[0]), processor, rows.refit or rows.score))


def check_bits(model: PreTrainedModel, runtimes: Iterable[str]) -> None:
    """Refuse a model that cannot be quantised to 8 bits, if one of the runtimes computes in nothing else."""
    if any(RUNTIMES[name].bits == ("int8",) for name in runtimes):
        check_quantizable(model, "int8")


def timed_on_rows(pruning: Pruning) -> bool:
    """Return whether a deployment is timed on rows: no shapes were given, and a row takes one forward pass."""
    return pruning.length is not None and not pruning.task.generative  # a length stands for shapes not given


@dataclass(frozen=True)
class Saved:
    """A slim checkpoint: the size of its weights in bytes, and the largest difference after loading it again."""

    bytes: int
    reload_max_abs: float


def save(
    pruning: Pruning,
    delivery: Delivery,
    slim: Slim,
    folder: str | Path,
    *,
    processor: Any = None,
    refit_file: Path | None = None,
    overwrite: bool = False,
) -> Saved:
    """Save a slim model into a folder, load it again and compare, in the first of several processes.

    The licence of the dense model's folder is copied. The refitted layers of a compensated model are written to
    `refit_file`, by default into `folder`. `processor` is saved beside the model, by default that of the pruning.
    """
    pruning.progress.stage("save, load again and compare")
    source = delivery.source
    if pruning.trimming is not None:
        logger.warning("%s", vocabulary_words(pruning.trimming.facts))

    def write() -> Saved:
        if slim.refitted is not None and refit_file is not None:
            save_file(slim.refitted, refit_file)
        with new_folder(folder, overwrite=overwrite) as written:
            max_abs = write_slim(
                slim.model,
                written,
                plan=slim.plan,
                batch=pruning.sample,
                given=replace(delivery.given, folder=None if source is None else source.folder),
                processor=processor or pruning.processor,
                dtype=pruning.dtype,
                refitted=slim.refitted if refit_file is None else None,
            )
        return Saved(weight_bytes(folder), max_abs)

    return processes.on_main(write)
