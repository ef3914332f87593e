"""Hold what benchmarks of many files of one model share: runtimes of files as they come, sizes, and cells of tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hies_export.data.batches import Batch
from hies_export.forms.form import Form
from hies_export.forms.runtimes.base import register_runtime
from hies_export.forms.runtimes.openvino import OpenVinoRuntime
from hies_export.forms.runtimes.ort import onnx_file
from hies_export.forms.time import TimedRow, time
from hies_export.units.counts import Shape

SHAPES = ((1, 128), (8, 128))


@register_runtime("openvino-default")
class OpenVinoDefault(OpenVinoRuntime):
    """An ONNX file, or one of OpenVINO's own, in OpenVINO, in the precision that it chooses by itself."""

    hints = ()

    def __init__(self, source: str | Path, *, threads: int):
        import openvino

        own = Path(source) / "model.xml"
        file = own if own.is_file() else onnx_file(source, self.name)
        # Alone on the threads that every other runtime gets; OpenVINO would take all cores.
        options = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
        self._model = openvino.Core().compile_model(str(file), "CPU", options)
        self.threads = int(self._model.get_property("INFERENCE_NUM_THREADS"))
        self.inputs = tuple(value.any_name for value in self._model.inputs)
        self.outputs, self._cache_sizes = ("logits",), {}

    def fetch(self, result: Any) -> dict[str, np.ndarray]:
        """Return the first output, which a converted model may call anything, as float32 logits."""
        return {"logits": np.array(result.get_output_tensor(0).data, dtype=np.float32)}


def time_beside(forms: Sequence[Form], batches: Mapping[Shape, Batch], *, repeats: int = 30) -> list[list[TimedRow]]:
    """Time forms beside each other on one batch a shape, and also a step of models that generate."""
    return time(forms, {shape: [batch] for shape, batch in batches.items()}, repeats=repeats, decode=True)


def time_cells(timed: Sequence[Sequence[TimedRow]]) -> list[list[str]]:
    """Return the times of every form by shape as cells of a table."""
    return [[time_cell(time) for time in times] for times in times_of(timed)]


def time_cell(time: Mapping[str, Any]) -> str:
    """Return a ratio with its interval, starred where it is noisy."""
    return f"{time['ratio']:.3f} [{time['low']:.3f}, {time['high']:.3f}]{'*' * time['noisy']}"


def times_of(timed: Sequence[Sequence[TimedRow]]) -> list[list[dict[str, Any]]]:
    """Return the times of every form by shape: ratios to the first form, with 95 % intervals; of that the control's."""
    return [
        [
            {"batch": one.batch, "sequence": one.sequence}
            | {"ratio": one.ratio, "low": one.ratio_low, "high": one.ratio_high, "noisy": one.noisy}
            for one in times
        ]
        for times in timed
    ]


def step_names(timed: Sequence[TimedRow]) -> list[str]:
    """Return what was timed of a form, such as "forward 8 x 128"."""
    return [f"{one.phase} {one.batch} x {one.sequence}" for one in timed]


def print_times(name: str, names: Iterable[str], timed: Sequence[Sequence[TimedRow]]) -> None:
    """Print the times of all forms, by their names, in a table that begins with a `name`, and that of the first."""
    steps = step_names(timed[0])
    print(f"| {name} | {' | '.join(steps)} |\n| --- |" + " --- |" * len(steps))
    for one, times in zip(names, time_cells(timed), strict=True):
        print(f"| {' | '.join([one, *times])} |")
    print_base(timed[0])


def print_base(times: Sequence[TimedRow]) -> None:
    """Print the times of the first form, the dense float32 one."""
    for name, first in zip(step_names(times), times, strict=True):
        print(f"dense float32, {name}: {first.dense_ms:.2f} ms, {first.threads} threads")
    print("The first row's times are those of a second copy, the control; * is a noisy one.")


def bytes_of(form: Form) -> int:
    """Return the size of the largest file that is loaded; in 8 bits that of the written form beside it."""
    folder = Path(str(form.source))
    if form.runtime.endswith("int8") and not folder.name.endswith("int8"):
        folder = folder.with_name(f"{folder.name}-int8")
    return max(file.stat().st_size for file in folder.iterdir() if file.is_file())
