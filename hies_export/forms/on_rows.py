"""Time models on the rows of a data set as they come: if the time depends on the rows, random ones are misleading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..data.batches import Batch
from ..progress import SILENT, Progress
from .form import Form
from .measure.ratios import BOOTSTRAP_SAMPLES, Ratio, RowsTime
from .measure.timing import balanced_order, collecting_paused
from .runtimes.base import RUNTIMES, Runtime

# How many rows are timed in each size of batch.
ROWS = 512
# Least number of batches that are timed; fewer are run again.
LEAST = 48
# Batches that a model runs after it was loaded, before it is timed; and one of each further shape.
WARMUP = 3


def time_on_rows(
    forms: Sequence[Form], batches: Mapping[int, Sequence[Mapping[str, Any]]], *, progress: Progress = SILENT
) -> dict[int, list[RowsTime]]:
    """Time models on the same batches, interleaved; return the times of each model by the size of the batches.

    A ratio is that of total times, so that rare expensive rows count as often as they occur. Its interval is a
    bootstrap over batches. All models are loaded as often as the most demanding runtime needs, the first one twice (the
    control), and each load runs a part of the batches. Shapes are warm, as in a server that has run for a while:
    OpenVINO compiles kernels for every new shape.
    """
    loads = max(RUNTIMES[form.runtime].loads for form in forms)
    loaded = [*forms, forms[0]]
    count = len(loaded)
    # By size of batch: a row of times in ns for each batch, of all models and the control.
    found: dict[int, list[list[int]]] = {size: [] for size in batches}
    steps = [(load, size) for load in range(loads) for size in batches]
    runners: dict[int, Runtime] = {}
    for load, size in progress.track(steps, "time on the rows"):
        if size == next(iter(batches)):
            runners.clear()
            runners.update({index: loaded[index].load() for index in balanced_order(count, 2 * load)})
        given = batches[size]
        own = [given[place % len(given)] for place in range(load, max(LEAST, len(given)), loads)]
        of_each_shape = {tuple(tensor.shape for tensor in batch.values()): batch for batch in own[WARMUP:]}
        for batch in (*own[:WARMUP], *of_each_shape.values()):
            for runner in runners.values():
                runner.run(runner.prepare(batch))
        with collecting_paused():
            for number, batch in enumerate(own):
                times = [0] * count
                for index in balanced_order(count, number):
                    times[index] = runners[index].time_ns(runners[index].prepare(batch))
                found[size].append(times)
    return {size: _compared(np.array(found[size]) / 1e6, batches[size], runners, loads) for size in batches}


def mixed(batches: Sequence[Batch], size: int) -> list[Batch]:
    """Return `ROWS` rows at most in batches of a size, cut out of larger ones, in an order that is not by length."""
    parts = [
        {name: value[start : start + size] for name, value in batch.items()}
        for batch in batches
        for start in range(0, len(next(iter(batch.values()))), size)
    ]
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(0))
    return [parts[place] for place in order.tolist()][: ROWS // size]


def _compared(
    times: np.ndarray, batches: Sequence[Mapping[str, Any]], runners: Mapping[int, Runtime], loads: int
) -> list[RowsTime]:
    """Compare the times of all models and the control, (batches, models + 1), in ms."""
    random = np.random.default_rng(0)
    drawn = times[random.integers(len(times), size=(BOOTSTRAP_SAMPLES, len(times)))].sum(axis=1)
    sums = np.concatenate([times.sum(axis=0, keepdims=True), drawn])  # (1 + bootstrap samples, models + 1)
    base = (sums[:, 0] + sums[:, -1]) / 2
    control = _ratio(sums[:, -1] / sums[:, 0])
    tokens = round(np.mean([batch["input_ids"].shape[1] if "input_ids" in batch else 1 for batch in batches]))
    return [
        RowsTime(
            ms=float(times[:, index].mean()),
            ratio=_ratio(sums[:, index] / base) if index else control,
            control=control,
            tokens=tokens,
            batches=len(times),
            loads=loads,
            threads=runners[index].threads,
            provider=runners[index].provider,
            dtype=runners[index].dtype,
        )
        for index in range(times.shape[1] - 1)
    ]


def _ratio(values: np.ndarray) -> Ratio:
    """Return the first value, with the interval of the others."""
    low, high = np.percentile(values[1:], (2.5, 97.5))
    return Ratio(float(values[0]), float(low), float(high))
