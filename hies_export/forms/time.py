"""Time forms (models on runtimes) beside each other: one loop, one bootstrap, one record.

Models run in turns, the first one twice. Its second copy is the control, whose ratio to the first is noise. A ratio is
uncertain because times vary between rounds, and because they vary between loaded copies of a model. Copies of one ONNX
graph, loaded in one process, took 1.00 to 1.05 times as long as the first, consistently over all rounds (dev/LOG.md).
So models are loaded several times, and the bootstrap resamples loads and copies as well as rounds.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import ConfigDict

from ..data.batches import Batch, in_rows, size_of
from ..errors import RecipeError
from ..model.memory import LARGE_BYTES
from ..progress import SILENT, Progress
from ..units.counts import Both, Ratio, Record, Shape
from .form import Form
from .runtimes.base import RUNTIMES, Runtime

# What is timed: a forward pass (for models that generate: a prompt or one token), or a data set's rows in batches.
Phase = Literal["forward", "prefill", "decode", "rows"]

BOOTSTRAP_SAMPLES = 2000
# Times are noisy if the interval of their control misses 1 by more than NOISE_LIMIT, or is wider than WIDEST_CONTROL:
# an interval such as [0.9, 1.1] contains 1, but also savings and losses of a tenth.
NOISE_LIMIT = 0.02
WIDEST_CONTROL = 0.1
ROWS = 512  # how many rows are timed in each size of batch
LEAST_BATCHES = 48  # least number of timed batches of rows; where there are fewer, all are run again
# Batches of rows that a model runs after it was loaded, before it is timed; see also `Runtime.compiles_shapes`.
WARMUP = 3


@dataclass(frozen=True, eq=False, kw_only=True)
class TimedRow(Record):
    """The time of a form at a shape, beside that of the first form; fields are the keys of report.json, in its order.

    "dense" is the first form and "slim" this one, as in most comparisons. The row of the first form has the ratio of
    its control.

    Attributes:
        runtime: The runtime of this form.
        provider: Device or execution provider.
        dtype: Dtype that the models computed in; both, joined by " / ", if they differ.
        batch: Rows.
        sequence: Tokens per row, as the attention sees them; on rows of a data set, their mean number.
        dense_ms, slim_ms: Median times of a run; on rows, the mean of a batch.
        ratio: Median of the paired ratios to the mean of the first form's copies; on rows, ratio of total times.
        ratio_low, ratio_high: 95 % interval of the ratio, over loads, copies and rounds.
        realised: Share of time saved / share of FLOPs saved; None without `flops_ratio`, or if no FLOPs were saved.
        flops_ratio: FLOPs slim / dense; None where they were not counted, and for a decode step.
        tokens_per_second: Over all rows: new tokens in a decode step, tokens read in a prefill; else None.
        dense_p90_ms, dense_p99_ms, slim_p90_ms, slim_p99_ms: Percentiles; None on rows, which differ in length.
        control_ratio, control_low, control_high: The ratio of a second copy of the first form to the first one (A/A),
            whose distance from 1 is noise.
        noisy: Whether the control shows too much noise for a ratio at this shape to be trusted.
        repeats, loads: Number of timed runs, and of times the model was loaded.
        threads: CPU threads within an operator.
        cuda_graph: Whether replays of a CUDA graph were timed.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(allow_inf_nan=False)

    runtime: str
    provider: str = ""
    dtype: str = "float32"
    phase: Phase = "forward"
    batch: int
    sequence: int
    dense_ms: float
    slim_ms: float
    ratio: Ratio
    ratio_low: Ratio
    ratio_high: Ratio
    realised: float | None = None
    flops_ratio: float | None = None
    tokens_per_second: Both[float] | None = None
    dense_p90_ms: float | None = None
    dense_p99_ms: float | None = None
    slim_p90_ms: float | None = None
    slim_p99_ms: float | None = None
    control_ratio: Ratio
    control_low: Ratio
    control_high: Ratio
    noisy: bool = False
    repeats: int | None = None
    loads: int = 1
    threads: int | None = None
    cuda_graph: bool = False


class _Load(NamedTuple):
    """The times of all models, then of the control, in ms, (rounds, models + 1), and fields of `TimedRow` by model."""

    times_ms: np.ndarray
    facts: list[dict[str, Any]]


def time(
    forms: Sequence[Form],
    batches: Mapping[Shape, Sequence[Batch]],
    *,
    repeats: int = 10,
    loads: int = 100,
    decode: bool = False,
    progress: Progress = SILENT,
) -> list[list[TimedRow]]:
    """Time forms beside each other, interleaved over several loads.

    All are loaded as often as the most demanding runtime needs, and the first one twice, as control; a file of more
    than 1 GiB is its own control, for the sake of memory, and tells nothing of how copies differ. A shape with one
    batch repeats it, and its ratio is the median of the paired ratios. A shape with several batches runs through them,
    and its ratio is that of total times, so that rare expensive rows count as often as they occur. Each load runs a
    part of them, after a run of every new shape if a runtime, such as OpenVINO, compiles kernels for it.

    Args:
        forms: Models on any runtimes; ratios are to the first.
        batches: Batches by (batch, sequence); see `rows_by_shape` for a data set's rows.
        repeats: Least number of runs of a batch by each form, divided among the loads.
        loads: How often to load each, at most; fewer loads tell less of how copies of a model differ.
        decode: Whether to time a decode step too, if all forms decode from a cache.
        progress: Shows the loop over loads and shapes.

    Returns:
        The times of each form, shape by shape, and in it phase by phase ("prefill" and "decode" if models generate).

    Raises:
        RecipeError: The forms run on different devices, threads or kinds of graph, or, on several runtimes, threads.
    """
    runtimes = dict.fromkeys(form.runtime for form in forms)
    loads = min(loads, repeats, max(RUNTIMES[name].loads for name in runtimes))
    is_own_control = (forms[0].bytes or 0) > LARGE_BYTES
    to_load = [*forms] if is_own_control else [*forms, forms[0]]
    turns = [*range(len(forms)), 0 if is_own_control else len(forms)]  # indices in `to_load`, the control's last
    runners: dict[int, Runtime] = {}  # by index in `to_load`
    measured: dict[tuple[Shape, Phase], list[_Load]] = {}
    steps = [(load, shape) for load in range(loads) for shape in batches]
    for load, shape in progress.track(steps, f"measure {', '.join(runtimes)}"):
        if shape == next(iter(batches)):  # the first one of a load
            runners.clear()
            # The model that is loaded first tends to run fastest, so the order rotates.
            runners.update({index: to_load[index].load() for index in balanced_order(len(to_load), 2 * load)})
        of_shape = batches[shape]
        phases: list[Phase] = ["forward"]
        if len(of_shape) > 1:
            phases = ["rows"]
            count = max(LEAST_BATCHES, len(of_shape))
            of_shape = [of_shape[number % len(of_shape)] for number in range(load, count, loads)]
        elif all(runner.decodes for runner in runners.values()):
            phases = ["prefill", "decode"] if decode and shape[1] > 1 else ["prefill"]
        for phase in phases:
            times = _run_in_turns(
                [runners[index] for index in turns],
                of_shape,
                phase,
                repeats=math.ceil(repeats / loads),
                warmup=2 if load else 5,  # the machine is warm by the second load
                across=len(runtimes) > 1,
            )
            measured.setdefault((shape, phase), []).append(times)
    by_step = [_compare(forms, shape, phase, of_step) for (shape, phase), of_step in measured.items()]
    return [list(times) for times in zip(*by_step, strict=True)]


def shape_of(batch: Mapping[str, Any]) -> Shape:
    """Return the number of rows of a batch, and of tokens of a row, padding included; 1 token without `input_ids`."""
    return size_of(batch), batch["input_ids"].shape[1] if "input_ids" in batch else 1


def rows_by_shape(rows: Mapping[int, Sequence[Batch]]) -> dict[Shape, Sequence[Batch]]:
    """Return a data set's batches, given by size, by (size, mean number of tokens) for `time`.

    Where there are fewer rows than a size, the size is that of the largest batch. A lone batch is given twice, because
    `time` would repeat it as the batch of a fixed shape.
    """
    by_shape = {}
    for size, batches in rows.items():
        sizes, tokens = zip(*map(shape_of, batches), strict=True)
        shape = min(size, max(sizes)), round(np.mean(tokens))
        by_shape[shape] = batches if len(batches) > 1 else [*batches, *batches]
    return by_shape


def in_mixed_order(batches: Sequence[Batch], size: int) -> list[Batch]:
    """Cut batches to at most `size` rows, and return some with `ROWS` rows at most, in a fixed random order."""
    smaller = [part for batch in batches for part in in_rows(batch, size)]
    order = torch.randperm(len(smaller), generator=torch.Generator().manual_seed(0))
    # A single one may have more.
    return [smaller[index] for index in order[: max(1, ROWS // size)].tolist()]


def deciding_step(times: Sequence[TimedRow]) -> int | None:
    """Return the index of the first time of a form that is not noisy; None if all are, or there are none."""
    return next((step for step, time in enumerate(times) if not time.noisy), None)


def relative_times(timed: Sequence[Sequence[TimedRow]], step: int) -> list[float]:
    """Return the times of forms at a step relative to the first form's; that of the first is its control's, so it is 1.

    A step is a shape and phase, and `timed` has the times of each form at all steps.
    """
    return [1.0, *(times[step].ratio for times in timed[1:])]


def ratios(timed: Sequence[Sequence[TimedRow]]) -> list[float]:
    """Return the times of all forms, relative to the first form's, at the first step that is not noisy, if any is."""
    return relative_times(timed, deciding_step(timed[0]) or 0)


def fastest(timed: Sequence[Sequence[TimedRow]], among: Sequence[int]) -> tuple[int | None, int]:
    """Return the index of the fastest form among some, None without any, and the index of the step that decides.

    Different forms may be fastest at different steps, so one step decides: the first whose control is not noisy, or at
    which the interval of the fastest form is below those of all others. If there is no such step, the first decides.
    """
    if not among:
        return None, deciding_step(timed[0]) or 0
    for step, control in enumerate(timed[0]):
        first, *others = sorted(among, key=relative_times(timed, step).__getitem__)
        if not control.noisy or all(timed[first][step].ratio_high < timed[other][step].ratio_low for other in others):
            return first, step
    return min(among, key=relative_times(timed, 0).__getitem__), 0


def _run_in_turns(
    runners: Sequence[Runtime], batches: Sequence[Batch], phase: Phase, *, repeats: int, warmup: int, across: bool
) -> _Load:
    """Time one load of models in turns; the last runner is the control, which may be the first one itself.

    Each round runs all in another `balanced_order`. In the phase "rows", every batch is run once; in others, the only
    one is repeated, by `repeats` and `warmup`. `across` says that they are on different runtimes.
    """

    def prepare(batch: Batch) -> list[Any]:
        """Return the feed of each runner; a control that is the first runner itself shares its feed."""
        prepared = {
            runner: runner.prepare_step(batch) if phase == "decode" else runner.prepare(batch)
            for runner in dict.fromkeys(runners)
        }
        return [prepared[runner] for runner in runners]

    feeds = prepare(batches[0])
    if phase == "rows":
        repeats = len(batches)
        one_per_shape: dict[Any, Batch] = {}
        if any(runner.compiles_shapes for runner in runners):
            one_per_shape = {tuple(value.shape for value in batch.values()): batch for batch in batches[WARMUP:]}
        _warm_up(runners, map(prepare, (*batches[:WARMUP], *one_per_shape.values())))
    else:
        _warm_up(runners, [feeds] * warmup)
    # After the warm-up, because `prepare` or the first runs capture a CUDA graph, or give it up.
    _check_alike(runners, across=across)
    times_ns = np.zeros((repeats, len(runners)))
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # collecting garbage in the middle of a run would count as its time
    try:
        for number in range(repeats):
            if phase == "rows":
                feeds = prepare(batches[number])
            for index in balanced_order(len(runners), number):
                times_ns[number, index] = runners[index].time_ns(feeds[index])
                runners[index].drop_outputs(feeds[index])
    finally:
        if collecting:
            gc.enable()
    names = ("threads", "provider", "dtype", "cuda_graph")
    facts = [{name: getattr(runner, name) for name in names} for runner in runners[:-1]]
    return _Load(times_ns / 1e6, facts)


def _check_alike(runners: Sequence[Runtime], *, across: bool) -> None:
    """Refuse, by a RecipeError, runners that differ in threads or, on one runtime, in device or use of CUDA graphs."""
    modes = {(runner.provider, runner.threads, runner.cuda_graph) for runner in runners}
    must_agree: set[Any] = {threads for _, threads, _ in modes} if across else modes
    if len(must_agree) > 1:
        shown = " and ".join(
            f"{provider} with {threads} threads{', as a CUDA graph' if graph else ''}"
            for provider, threads, graph in sorted(modes)
        )
        raise RecipeError([f"dense, slim and control must run alike, got {shown}: load them with the same runtime"])


def _warm_up(runners: Sequence[Runtime], rounds: Iterable[Sequence[Any]]) -> None:
    """Run rounds of feeds, one for each runner."""
    for feeds in rounds:
        for runner, feed in zip(runners, feeds, strict=True):
            runner.run(feed)
            runner.drop_outputs(feed)


def balanced_order(count: int, number: int) -> list[int]:
    """Return the indices below `count` in the order of round `number`; an odd round reverses the one before (ABBA).

    So a linear drift cancels. Over 2 * count rounds, each index comes equally often at each place, equally often after
    itself, and equally often after each other one. What one model leaves behind, such as a full cache or threads that
    still spin, then costs all others alike. Source: Williams (1949), https://doi.org/10.1071/CH9490149.
    """
    # 0, 1, -1, 2, -2, ..., modulo count: all differences of neighbours differ.
    first = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    order = [(index + number // 2) % count for index in first]
    return order[::-1] if number % 2 else order


def _compare(forms: Sequence[Form], shape: Shape, phase: Phase, loads: Sequence[_Load]) -> list[TimedRow]:
    """Return the times of forms at a shape and phase, from all loads."""
    times_ms, facts, total = [load.times_ms for load in loads], loads[0].facts, phase == "rows"
    by_form = [[ms[:, index] for ms in times_ms] for index in range(len(forms))]
    copies_ms = [ms[:, [0, -1]] for ms in times_ms]  # of the first form
    control = ratio_with_interval([ms[:, :1] for ms in times_ms], [ms[:, -1] for ms in times_ms], total=total)
    tokens = {"decode": shape[0], "prefill": shape[0] * shape[1]}.get(phase)
    of_all: dict[str, Any] = {
        "phase": phase,
        "batch": shape[0],
        "sequence": shape[1],
        **_percentiles("dense", by_form[0], total),
        "control_ratio": control[0],
        "control_low": control[1],
        "control_high": control[2],
        "noisy": is_noisy(*control[1:]),
        "repeats": sum(map(len, times_ms)),
        "loads": len(loads),
    }
    rows = []
    for index, form in enumerate(forms):
        ratio, low, high = ratio_with_interval(copies_ms, by_form[index], total=total) if index else control
        times: dict[str, Any] = {**of_all, **facts[index], **_percentiles("slim", by_form[index], total)}
        times["dtype"] = " / ".join(dict.fromkeys((facts[0]["dtype"], facts[index]["dtype"])))
        if tokens is not None:
            times["tokens_per_second"] = Both(1000 * tokens / times["dense_ms"], 1000 * tokens / times["slim_ms"])
        rows.append(TimedRow(runtime=form.runtime, ratio=ratio, ratio_low=low, ratio_high=high, **times))
    return rows


def _percentiles(name: str, times_ms: Sequence[np.ndarray], total: bool) -> dict[str, float]:
    """Return the median and other percentiles of a form's times by field of `TimedRow`; if `total`, only the mean."""
    runs = np.concatenate(times_ms)
    if total:
        return {f"{name}_ms": float(runs.mean())}
    fields = (f"{name}_ms", f"{name}_p90_ms", f"{name}_p99_ms")
    return dict(zip(fields, np.percentile(runs, (50, 90, 99)).tolist(), strict=True))


def ratio_with_interval(
    base_ms: Sequence[np.ndarray], other_ms: Sequence[np.ndarray], *, total: bool = False, seed: int = 0
) -> tuple[float, float, float]:
    """Return the ratio of times to the mean of the base's copies, and the ends of its 95 % bootstrap interval.

    The ratio is the median over rounds of other / base or, if `total`, sum / sum. The bootstrap resamples everything
    that varies between measurements: loads, copies within a load, and rounds (Davison and Hinkley 1997, Bootstrap
    Methods and their Application, section 3.8: hierarchical data). Both lists have one array per load, from the same
    rounds: times of the base, (rounds, copies), and of the other, (rounds,).
    """

    def ratio(other: np.ndarray, base: np.ndarray) -> np.ndarray:
        """Return the ratio of each sample, (samples,), from times (samples, rounds)."""
        return other.sum(axis=1) / base.sum(axis=1) if total else np.median(other / base, axis=1)

    rounds = np.array([len(times) for times in other_ms])  # of each load
    first = rounds.cumsum() - rounds  # index of each load's first round among the rounds of all loads
    base, other = np.concatenate(base_ms), np.concatenate(other_ms)
    loads, longest, copies = len(rounds), rounds.max(), base.shape[1]
    random, samples = np.random.default_rng(seed), BOOTSTRAP_SAMPLES
    drawn_load = random.integers(loads, size=(samples, loads, 1))
    drawn_round = first[drawn_load] + (random.random((samples, loads, longest)) * rounds[drawn_load]).astype(int)
    drawn_copy = random.integers(copies, size=(samples, loads, 1, copies))
    means = base[drawn_round[..., None], drawn_copy].mean(axis=-1)
    sampled = ratio(other[drawn_round].reshape(samples, -1), means.reshape(samples, -1))
    low, high = np.percentile(sampled, (2.5, 97.5))
    (measured,) = ratio(other[None], base.mean(axis=1)[None])
    return float(measured), float(low), float(high)


def is_noisy(control_low: float, control_high: float) -> bool:
    """Return whether the interval of a control's ratio misses 1 by `NOISE_LIMIT`, or is wider than `WIDEST_CONTROL`."""
    misses = control_low > 1 + NOISE_LIMIT or control_high < 1 - NOISE_LIMIT
    return misses or control_high - control_low > WIDEST_CONTROL
