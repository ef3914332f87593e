"""Time the slim models of a sweep against the dense one. Models with equal unit counts everywhere are timed once."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.batches import image_shape
from ...errors import RequestError
from ...forms.cost.bundles import cut_bundles
from ...forms.form import Forms
from ...forms.formats import require_exporters
from ...forms.measure.shapes import model_shapes
from ...forms.runtimes.base import RUNTIMES, check_one_graph, check_runtime, check_task
from ...forms.time import time
from ...model.tokens import longest_sequence, synthetic_batch
from ...progress import Progress
from ...tasks import Task
from .journal import Journal
from .shared import Shared

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
        if self.runtime not in RUNTIMES:
            raise RequestError(f"a runtime must be one of {', '.join(RUNTIMES)}, got {self.runtime!r}")
        check_runtime(self.runtime)
        if not RUNTIMES[self.runtime].reads_models:
            require_exporters({RUNTIMES[self.runtime].format})
        check_one_graph([self.runtime], task)
        check_task(self.runtime, task)


class Stopwatch:
    """Timings of slim models, kept in the journal."""

    def __init__(self, shared: Shared, journal: Journal, request: LatencyRequest, progress: Progress):
        self._shared, self._journal, self._request, self._progress = shared, journal, request, progress
        model = shared.base.model
        if shared.base.task.in_parts:
            self._shape, self._batch = next(iter(shared.base.shapes.items()))
        else:
            longest = longest_sequence(model.config) or request.shape[1]
            image = image_shape(shared.base.rows.score[0])
            (self._shape,) = model_shapes(model, [(request.shape[0], min(request.shape[1], longest))], image=image)
            self._batch = synthetic_batch(model, batch=self._shape[0], sequence=self._shape[1], image=image)

    def key(self, lost: Mapping[str, int]) -> str:
        """Return the name of a timing in the journal."""
        export = self._shared.base.exporter.options
        # Keys for the default export have no such part, as in journals of earlier versions.
        other = [] if export == type(export)() else [[export.format, export.dtype, export.provider]]
        return json.dumps([self._request.runtime, self._shape, self._request.repeats, sorted(lost.items()), *other])

    def time(self, lost: Sequence[Mapping[str, int] | None]) -> None:
        """Time the models that lose these numbers of bundles, unless the journal has them."""
        wanted = {self.key(one): one for one in lost if one is not None}
        waiting = {key: one for key, one in wanted.items() if key not in self._journal.latency}
        if not waiting:
            return
        base, unit = self._shared.base, self._shared.options.constraints.unit
        name = f"time {len(waiting)} models on {self._request.runtime}"
        self._progress.stage(name)
        with tempfile.TemporaryDirectory(prefix="hies-sweep-") as temporary:
            forms = Forms({"dense": base.model}, base.exporter, Path(temporary))
            for number, (key, one) in enumerate(self._progress.track(list(waiting.items()), name)):
                forms.add(str(number), cut_bundles(base.model, base.modules, one, unit=unit))
                both = [forms.form(name, self._request.runtime) for name in ("dense", str(number))]
                _, slim = time(both, {self._shape: [self._batch]}, repeats=self._request.repeats)
                values = slim.ratio, slim.low, slim.high, slim.noisy
                self._journal.add(key, dict(zip(_FIELDS, values, strict=True)), kind="latency")

    def fields(self, lost: Mapping[str, int] | None) -> dict[str, Any]:
        """Return the fields of a row: the ratio slim / dense with its 95 % interval, and whether it is noisy."""
        empty = dict.fromkeys(_FIELDS)
        return empty if lost is None else self._journal.latency.get(self.key(lost), empty)
