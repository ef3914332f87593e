"""Time the slim models of a sweep against the dense one. Models with equal unit counts everywhere are timed once."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hies_export.data.batches import Batch, image_shape
from hies_export.forms.form import Forms
from hies_export.forms.formats import Exporter, require_exporters
from hies_export.forms.runtimes.base import RUNTIMES, check_one_graph, check_runtime
from hies_export.forms.time import time
from hies_export.model.tokens import longest_sequence, synthetic_batch
from hies_export.pipeline.pruning import Pruning
from hies_export.progress import Progress
from hies_export.slim.bundles import cut_bundles
from hies_export.tasks import Task
from hies_export.units.counts import Shape
from hies_export.units.shapes import model_shapes

from .journal import Journal

_FIELDS = ("latency_ratio", "latency_low", "latency_high", "latency_noisy")


@dataclass(frozen=True)
class LatencyRequest:
    """How to time slim models: on which runtime, at which (batch, sequence), and how often.

    The sequence is at most the model's longest; images have none. The models are ranked by quality as well, so a few
    repeats are enough.
    """

    runtime: str = "onnxruntime-cpu"
    shape: tuple[int, int] = (8, 128)
    repeats: int = 12

    def check(self, task: type[Task]) -> None:
        """Refuse a runtime that is unknown, not installed, or cannot run the models of a task."""
        check_runtime(self.runtime, task=task)
        if not RUNTIMES[self.runtime].reads_models:
            require_exporters({RUNTIMES[self.runtime].format})
        check_one_graph([self.runtime], task)

    def batch(self, pruning: Pruning) -> tuple[Shape, Batch]:
        """Return what to time on, and its shape; of images with prompts, what FLOPs are counted on."""
        if pruning.task.in_parts:
            return next(iter(pruning.shapes.items()))
        size, sequence = self.shape
        image = image_shape(pruning.rows.score[0])
        sequence = min(sequence, longest_sequence(pruning.model.config) or sequence)
        (shape,) = model_shapes(pruning.model, [(size, sequence)], image=image)
        return shape, synthetic_batch(pruning.model, batch=shape[0], sequence=shape[1], image=image)


def time_cuts(
    pruning: Pruning,
    exporter: Exporter,
    cuts: Sequence[Mapping[str, int] | None],
    request: LatencyRequest,
    journal: Journal,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Return the fields of a row for each cut: the ratio slim / dense with its 95 % interval, and whether it is noisy.

    A cut is how many bundles each module loses; the fields of None are None. What the journal has is not timed again.
    """
    (shape, batch), export = request.batch(pruning), exporter.options
    how = [request.runtime, shape, request.repeats, export.format, export.dtype, export.provider]
    keys = [json.dumps([*how, cut]) for cut in cuts]
    known = journal.latency
    waiting = {key: cut for key, cut in zip(keys, cuts, strict=True) if cut is not None and key not in known}
    if waiting:
        name = f"time {len(waiting)} models on {request.runtime}"
        progress.stage(name)
        with tempfile.TemporaryDirectory(prefix="hies-sweep-") as temporary:
            forms = Forms({"dense": pruning.model}, exporter, Path(temporary))
            for number, (key, cut) in enumerate(progress.track(list(waiting.items()), name)):
                forms.add(str(number), cut_bundles(pruning.model, pruning.modules, cut, unit=pruning.options.unit))
                both = [forms.form(name, request.runtime) for name in ("dense", str(number))]
                _, (slim,) = time(both, {shape: [batch]}, repeats=request.repeats)
                values = slim.ratio, slim.ratio_low, slim.ratio_high, slim.noisy
                journal.add(key, dict(zip(_FIELDS, values, strict=True)), kind="latency")
    return [known.get(key, dict.fromkeys(_FIELDS)) for key in keys]
