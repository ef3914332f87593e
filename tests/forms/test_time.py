"""The one clock: its loop and bootstrap, on times that are known."""

import gc
import itertools
import weakref
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from hies_export.errors import RecipeError
from hies_export.forms.form import Form
from hies_export.forms.measured import latency_rows
from hies_export.forms.runtimes import base as runtime
from hies_export.forms.runtimes.base import RUNTIMES, Runtime
from hies_export.forms.time import (
    LEAST_BATCHES,
    WARMUP,
    TimedRow,
    balanced_order,
    fastest,
    in_mixed_order,
    is_noisy,
    ratio_with_interval,
    ratios,
    rows_by_shape,
    time,
)
from hies_export.units.counts import FlopCount

BATCH = {"input_ids": np.zeros((4, 128))}


class Clock:
    """Time that passes only when a fake runtime runs, plus a drift that grows with every run."""

    def __init__(self, drift_ms=0.0):
        self.now_ns, self.drift_ms, self.order = 0, drift_ms, []

    def __call__(self):
        return self.now_ns


class Fake(Runtime):
    provider, dtype, decodes = "fake", "float32", False

    def __init__(self, clock, name, times_ms, threads=2):
        self.clock, self.label, self.times_ms, self.threads, self.runs = clock, name, times_ms, threads, 0
        self.held = [0, 0]  # feeds, and runs whose outputs were not dropped

    def prepare(self, batch):
        self.held[0] += 1
        return batch

    def prepare_step(self, batch):
        return {"step of": batch}

    def run(self, feed):
        self.feed = feed
        took_ms = self.times_ms[self.runs % len(self.times_ms)] + self.clock.drift_ms * len(self.clock.order)
        self.runs += 1
        self.held[1] += 1
        self.clock.order.append(self.label)
        self.clock.now_ns += round(took_ms * 1e6)

    def drop_outputs(self, feed):
        self.held[1] -= 1

    def fetch(self, result):
        return {}


@pytest.fixture
def clock(monkeypatch):
    ticking = Clock()
    monkeypatch.setattr(runtime, "perf_counter_ns", ticking)
    return ticking


def trio(clock, dense_ms, slim_ms, control_ms):
    return [Fake(clock, n, t) for n, t in (("D", dense_ms), ("S", slim_ms), ("C", control_ms))]


class Ready(Form):
    """A form of models that are loaded already: its source has one for each time that it is loaded."""

    def load(self):
        return next(self.source)


def time_trio(dense, slim, control, *, repeats=6, decode=False):
    """Time two models, and a second copy of the first as control, with five runs of each before."""
    forms = [Ready("dense", "torch", iter([dense, control])), Ready("slim", "torch", iter([slim]))]
    return time(forms, {(4, 128): [BATCH]}, repeats=repeats, decode=decode)


def time_once(*trio, repeats=6):
    """Return the times of both models at the only step."""
    return [times for (times,) in time_trio(*trio, repeats=repeats)]


def test_latency_equals_numpy_on_scripted_times(clock):
    rng = np.random.default_rng(3)
    dense_ms, slim_ms, control_ms = rng.uniform(8, 12, 30), rng.uniform(6, 10, 30), rng.uniform(8, 12, 30)
    first, second = time_once(*trio(clock, dense_ms, slim_ms, control_ms), repeats=30)
    assert (first.dense_ms, first.dense_p90_ms, first.dense_p99_ms) == pytest.approx(
        tuple(np.percentile(dense_ms, (50, 90, 99))), abs=1e-5
    )
    assert second.slim_p90_ms == pytest.approx(np.percentile(slim_ms, 90), abs=1e-5)
    # Slim against the mean of the two copies of the dense model.
    assert second.ratio == pytest.approx(np.median(slim_ms / ((dense_ms + control_ms) / 2)), abs=1e-5)
    assert first.ratio == pytest.approx(np.median(control_ms / dense_ms), abs=1e-5)
    assert second.ratio_low < second.ratio < second.ratio_high
    assert (first.batch, first.sequence, first.repeats, first.threads, first.provider) == (4, 128, 30, 2, "fake")


def test_runs_are_interleaved_back_and_forth_and_warm_up_is_not_timed(clock):
    first, second = time_once(*trio(clock, [999.0] * 5 + [10.0] * 6, [999.0] * 5 + [5.0] * 6, [10.0]))
    rounds = ["".join(clock.order[i : i + 3]) for i in range(0, 33, 3)]
    assert rounds == ["DSC"] * 5 + ["".join("DSC"[i] for i in balanced_order(3, number)) for number in range(6)]
    assert first.slim_p99_ms == second.dense_p99_ms == 10.0
    assert second.ratio == second.ratio_low == second.ratio_high == 0.5


def test_slow_drift_cancels(clock):
    clock.drift_ms = 0.02
    first, second = time_once(*trio(clock, [10.0], [10.0], [10.0]), repeats=60)
    assert second.ratio == pytest.approx(1.0, abs=2e-3)
    assert first.ratio == pytest.approx(1.0, abs=2e-3)
    assert first.dense_ms > 11.0


def test_a_large_model_runs_against_itself(clock):
    dense, slim, _ = trio(clock, [4.0], [2.0], [1.0])
    forms = [Ready("dense", "torch", iter([dense]), bytes=2 << 30), Ready("slim", "torch", iter([slim]))]
    (first,), _ = time(forms, {(4, 128): [BATCH]}, repeats=5)
    assert (dense.runs, slim.runs) == (20, 10)
    assert first.ratio == 1.0
    assert dense.held == slim.held == [1, 0]  # one feed each, and no outputs


def test_garbage_collection_is_off_while_timing_and_back_on_after_a_failure(clock):
    seen = []

    def fail(feed):
        seen.append(gc.isenabled())
        raise KeyboardInterrupt("in between")

    dense, slim, control = trio(clock, [1.0], [1.0], [1.0])
    slim.time_ns = fail
    with pytest.raises(KeyboardInterrupt, match="in between"):
        time_trio(dense, slim, control)
    assert seen == [False]
    assert gc.isenabled()


def test_models_that_run_unlike_each_other_are_not_timed(clock):
    dense, _, control = trio(clock, [1.0], [1.0], [1.0])
    with pytest.raises(RecipeError, match="run alike, got fake with 2 threads and fake with 4 threads"):
        time_trio(dense, Fake(clock, "S", [1.0], threads=4), control)


def test_a_cuda_graph_that_is_given_up_in_the_first_run_is_not_compared_with_one(clock):
    dense, slim, control = trio(clock, [1.0], [1.0], [1.0])
    dense.cuda_graph = slim.cuda_graph = control.cuda_graph = True
    run = slim.run

    def give_up(feed):
        slim.cuda_graph = False
        return run(feed)

    slim.run = give_up
    with pytest.raises(RecipeError, match="run alike, got fake with 2 threads and fake with 2 threads, as a CUDA gra"):
        time_trio(dense, slim, control)


def naive_intervals(base_ms, other_ms, draws, seed):
    """Of the median ratio and of that of totals: loads, drawn one at a time, in each the base's copies and rounds."""
    random, found = np.random.default_rng(seed), []
    for _ in range(draws):
        slim, dense = [], []
        for load in random.integers(len(other_ms), size=len(other_ms)):
            base, other = base_ms[load], other_ms[load]
            copies = random.integers(base.shape[1], size=base.shape[1])
            rounds = random.integers(len(other), size=len(other))
            slim.append(other[rounds])
            dense.append(base[rounds][:, copies].mean(axis=1))
        found.append((np.median(np.divide(slim, dense)), np.sum(slim) / np.sum(dense)))
    return np.percentile(found, (2.5, 97.5), axis=0).T.tolist()


@pytest.mark.parametrize("loads", [1, 4])
def test_the_interval_equals_a_naive_bootstrap_over_loads_copies_and_rounds(loads):
    random = np.random.default_rng(5)
    # Copies that differ steadily: by 3 % from load to load, and by 3 % within one.
    base = [10 * (1 + 0.03 * random.standard_normal((1, 2))) + 0.2 * random.standard_normal((12, 2))] * loads
    base = [times * (1 + 0.03 * random.standard_normal()) for times in base]
    other = [8 * (1 + 0.03 * random.standard_normal()) + 0.2 * random.standard_normal(12) for _ in range(loads)]
    of_median, of_totals = naive_intervals(base, other, 3000, 1)
    ratio, *ends = ratio_with_interval(base, other)
    assert ends == pytest.approx(of_median, rel=4e-3)
    assert ratio == np.median(np.concatenate([o / b.mean(axis=1) for o, b in zip(other, base, strict=True)]))
    ratio, *ends = ratio_with_interval(base, other, total=True)
    assert ends == pytest.approx(of_totals, rel=4e-3)
    assert ratio == pytest.approx(np.sum(other) / np.mean(base, axis=-1).sum())


def test_loads_of_unequal_length_count_alike():
    found = ratio_with_interval([np.full((3, 1), 10.0), np.full((9, 1), 10.0)], [np.full(3, 5.0), np.full(9, 6.0)])
    assert found == (0.6, 0.5, 0.6)


def test_models_are_loaded_anew_and_each_is_the_first_in_turn(clock, monkeypatch):
    loaded, alive = [], []

    class Loaded(Fake):
        loads = 4

        def __init__(self, source, *, threads):
            loaded.append(source)
            alive.append(weakref.ref(self))
            # The first of three to be loaded runs at half the time of the others.
            took = {"dense": 10.0, "slim": 8.0}[source] / (1 + (len(loaded) % 3 == 1))
            super().__init__(clock, source, [took])
            assert sum(one() is not None for one in alive) <= 3, "the last load's models are still in memory"

    monkeypatch.setitem(RUNTIMES, "loaded", Loaded)
    both = [Form("dense", "loaded", "dense"), Form("slim", "loaded", "slim")]
    dense, slim = time(both, {(1, 8): [{}], (2, 8): [{}]}, repeats=30)
    assert loaded == ["dense", "slim", "dense", "slim", "dense", "dense", "dense", "dense", "slim", *loaded[:3]]
    for times in (dense, slim):
        assert [(one.batch, one.sequence, one.loads, one.repeats) for one in times] == [(1, 8, 4, 32), (2, 8, 4, 32)]
    # Against the mean of the copies: first dense, then slim, then control, then dense again are the fast ones.
    assert slim[0].ratio == pytest.approx(np.median([8 / 7.5, 4 / 10, 8 / 7.5, 8 / 7.5]))
    assert (slim[0].ratio_low, dense[0].ratio) == (pytest.approx(0.4), pytest.approx(1.5))
    (first,), _ = time(both, {(1, 8): [{}]}, repeats=2)
    assert (first.loads, first.repeats) == (2, 2)
    loaded.clear()
    time([replace(both[0], bytes=2 << 30), both[1]], {(1, 8): [{}]}, repeats=2)
    assert loaded == ["dense", "slim", "slim", "dense"]


def test_a_row_has_the_keys_of_report_json_in_their_order(clock):
    dense, slim, control = trio(clock, [10.0], [5.0], [10.0])
    slim.dtype = "float16"
    for runner in (dense, slim, control):
        runner.decodes = True
    timed = time_trio(dense, slim, control, decode=True)
    assert [[one.phase for one in times] for times in timed] == [["prefill", "decode"]] * 2
    assert dense.feed == slim.feed == control.feed == {"step of": BATCH}
    flops = {(4, 128): FlopCount(10, 8, (4, 128))}
    _, row = map(asdict, latency_rows(timed, flops))
    assert " ".join(row) == (
        "runtime provider dtype phase batch sequence dense_ms slim_ms ratio ratio_low ratio_high realised flops_ratio "
        "tokens_per_second dense_p90_ms dense_p99_ms slim_p90_ms slim_p99_ms control_ratio control_low control_high "
        "noisy repeats loads threads cuda_graph"
    )
    assert (row["provider"], row["dtype"], row["phase"]) == ("fake", "float32 / float16", "decode")
    assert (row["batch"], row["sequence"], row["dense_ms"], row["slim_ms"], row["ratio"]) == (4, 128, 10.0, 5.0, 0.5)
    assert row["tokens_per_second"] == {"dense": 400.0, "slim": 800.0}
    assert (row["realised"], row["flops_ratio"]) == (None, None)
    (forward,) = latency_rows([[replace(decode, phase="forward")] for _, decode in timed], flops)
    assert (forward.flops_ratio, forward.realised) == (0.8, pytest.approx(0.5 / 0.2))
    assert (forward.runtime, forward.phase) == ("torch", "forward")
    slower = replace(forward, ratio=1.1, ratio_high=1.2)
    assert latency_rows([[slower], [slower]], flops)[0].realised == pytest.approx(-0.5)
    unsaved = {shape: replace(count, slim=count.dense) for shape, count in flops.items()}
    assert latency_rows([[slower], [slower]], unsaved)[0].realised is None


def test_the_interval_depends_on_the_seed_only():
    base, other = np.random.default_rng(0).uniform(1, 2, (2, 30))
    # A bootstrapped median only takes values of the sample, so that two seeds may well agree.
    intervals = {ratio_with_interval([base[:, None]], [other], seed=seed) for seed in (*range(10), *range(10))}
    assert 1 < len(intervals) <= 10


def test_a_control_that_misses_one_makes_the_comparison_noisy(clock):
    alike = time_once(*trio(clock, [10.0], [8.0], [10.1]))
    assert [one.noisy for one in alike] == [False, False]
    found = time_once(*trio(clock, [10.0], [8.0], [10.3]))
    assert [one.noisy for one in found] == [True, True]
    assert found[0].ratio == pytest.approx(1.03)
    beside = ((0.97, 1.0), (0.9, 0.97), (1.02, 1.1), (1.021, 1.1))
    assert [is_noisy(*ends) for ends in beside] == [False, True, False, True]
    # An interval may hold 1 and still be too wide to say anything.
    assert [is_noisy(*ends) for ends in ((0.95, 1.049), (0.9, 1.1), (0.99, 1.1))] == [False, True, True]


@pytest.mark.parametrize("count", range(1, 9))
def test_every_model_runs_equally_often_after_each_other(count: int) -> None:
    rounds = [balanced_order(count, number) for number in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in rounds)
    assert all(odd == even[::-1] for even, odd in zip(rounds[::2], rounds[1::2], strict=True))
    places = Counter((index, place) for order in rounds for place, index in enumerate(order))
    assert places == dict.fromkeys(itertools.product(range(count), repeat=2), 2)
    neighbours = Counter(pair for order in rounds for pair in itertools.pairwise(order))
    assert neighbours == dict.fromkeys(itertools.permutations(range(count), 2), 2)
    runs = [index for order in rounds for index in order]
    again = Counter(one for one, other in itertools.pairwise([*runs, runs[0]]) if one == other)
    assert again == dict.fromkeys(range(count), 1 if count > 1 else 2)


class Told(Runtime):
    """A model that computes nothing, and took as many milliseconds as its source says."""

    provider, dtype = "told", "float32"

    def __init__(self, source: Any, *, threads: int):
        self.source, self.threads = source, threads

    def prepare(self, batch: Any) -> Any:
        return batch

    def run(self, feed: Any) -> Any:
        return feed

    def time_ns(self, feed: Any) -> int:
        return int(self.source * 1e6)

    def fetch(self, result: Any) -> dict[str, np.ndarray]:
        return {}


class Compiling(Told):
    """Take a while for every new shape, as a runtime does that compiles kernels for it, and the same time after."""

    def __init__(self, source: tuple[float, float], *, threads: int):
        super().__init__(source, threads=threads)
        self.shapes: set[tuple[int, ...]] = set()

    def run(self, feed: Any) -> Any:
        self.shapes.add(tuple(feed["input_ids"].shape))

    def time_ns(self, feed: Any) -> int:
        shape, (per_token, first) = tuple(feed["input_ids"].shape), self.source
        new = shape not in self.shapes
        self.run(feed)
        return round(1e6 * (per_token * shape[1] + (first if new else 0)))


@pytest.mark.parametrize("count", [1, 7, 100])
def test_rows_are_run_through_and_the_first_run_of_a_shape_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setitem(RUNTIMES, "compiling", Compiling)
    lengths = torch.randint(5, 60, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = {size: [{"input_ids": torch.zeros(size, length)} for length in lengths] for size in (1, 8)}
    forms: list[Any] = [Form("", "compiling", source) for source in ((2.0, 0.0), (1.0, 500.0))]  # type: ignore[arg-type]
    timed = time(forms, rows_by_shape(rows))
    mean = round(np.mean(lengths))
    assert [(one.batch, one.sequence) for one in timed[0]] == [(1, mean), (8, mean)]
    for plain, compiling in zip(*timed, strict=True):
        assert (plain.phase, plain.ratio, plain.slim_p90_ms) == ("rows", 1, None)
        assert compiling.ratio == pytest.approx(0.5)
        assert compiling.slim_ms == pytest.approx(plain.slim_ms / 2)
        assert compiling.repeats == max(count, LEAST_BATCHES)
    (row, _) = latency_rows(timed, {})
    assert (row.phase, row.batch, row.sequence, row.dense_ms) == ("rows", 1, mean, timed[0][0].slim_ms)
    assert (row.flops_ratio, row.realised, row.dense_p90_ms, row.tokens_per_second) == (None, None, None, None)


def test_a_runtime_that_compiles_no_shapes_is_not_warmed_up_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ready(Told):
        compiles_shapes = False

        def run(self, feed: Any) -> Any:
            runs.append(feed)

    runs: list[Any] = []
    monkeypatch.setitem(RUNTIMES, "ready", Ready)
    rows = [{"input_ids": torch.zeros(1, length)} for length in range(1, 30)]
    time([Form("", "ready", 1.0)], rows_by_shape({1: rows}))  # type: ignore[arg-type]
    assert len(runs) == 2 * WARMUP  # of the form and its control


def test_forms_on_several_runtimes_are_compared_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Told):
        provider = "another clock"
        loads = 3

    for name, of in (("one", Told), ("two", Other)):
        monkeypatch.setitem(RUNTIMES, name, of)
    forms = [Form("", name, source) for name, source in (("one", 8.0), ("one", 4.0), ("two", 2.0), ("two", 1.0))]
    timed = [times for (times,) in time(forms, {(1, 8): [{}]}, repeats=8)]
    assert [(one.batch, one.sequence, one.phase) for one in timed] == [(1, 8, "forward")] * 4
    assert [one.ratio for one in timed] == [1.0, 0.5, 0.25, 0.125]
    assert [one.slim_ms for one in timed] == [8.0, 4.0, 2.0, 1.0]
    assert {(one.loads, one.repeats) for one in timed} == {(3, 9)}
    # A form alone is timed beside its copy.
    ((alone,),) = time(forms[:1], {(1, 8): [{}]})
    assert (alone.slim_ms, alone.ratio, alone.repeats) == (8.0, 1.0, 10)


class Recorded(Told):
    """Times of a list that the number of the copy decides, in ms for 40 tokens; copies differ by 1.6 %."""

    loads = 5
    number: Any

    def __init__(self, source: Any, *, threads: int):
        super().__init__(source, threads=threads)
        self.random = np.random.default_rng(next(type(self).number))
        self.speed = source * (1 + 0.016 * self.random.standard_normal())

    def time_ns(self, feed: Any) -> int:
        tokens = feed["input_ids"].shape[1]
        return round(1e6 * self.speed * tokens / 40 * (1 + 0.01 * self.random.standard_normal()))


@pytest.mark.parametrize("what", ["one", "rows"])
def test_intervals_hold_the_truth_and_a_model_against_itself_stays_within_its_control(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setitem(RUNTIMES, "recorded", Recorded)
    lengths = np.random.default_rng(7).integers(5, 60, 48) if what == "rows" else [40]
    batches = [{"input_ids": torch.zeros(8, int(length), dtype=torch.int64)} for length in lengths]
    forms: list[Any] = [Form("", "recorded", speed) for speed in (10.0, 8.0, 10.0)]  # type: ignore[arg-type]
    found = []
    for draw in range(20):
        monkeypatch.setattr(Recorded, "number", itertools.count(100 * draw), raising=False)
        shapes = rows_by_shape({8: batches}) if what == "rows" else {(8, 40): batches}
        found.append([times for (times,) in time(forms, shapes, repeats=30)])
    # By chance, 95 % intervals of five loads miss a truth now and then.
    for index, truth in enumerate((1.0, 0.8, 1.0)):
        assert sum(one[index].ratio_low <= truth <= one[index].ratio_high for one in found) >= 15
    assert (
        sum(max(one.ratio_low, again.ratio_low) <= min(one.ratio_high, again.ratio_high) for one, _, again in found)
        >= 17
    )


def times(
    *rows: list[tuple[float, float, float]], noisy: tuple[bool, ...] = (False, False)
) -> list[tuple[TimedRow, ...]]:
    """Return the times of forms, given as (ratio, low, high), at each of some shapes."""
    steps = [
        [
            TimedRow(
                runtime="torch",
                batch=1,
                sequence=8 * step,
                dense_ms=1.0,
                slim_ms=ratio,
                noisy=is_noise,
                ratio=ratio,
                ratio_low=low,
                ratio_high=high,
                control_ratio=row[0][0],
                control_low=row[0][1],
                control_high=row[0][2],
            )
            for ratio, low, high in row
        ]
        for step, (row, is_noise) in enumerate(zip(rows, noisy, strict=True), start=1)
    ]
    return [*zip(*steps, strict=True)]


def test_the_first_quiet_shape_decides_or_one_at_which_the_fastest_is_clear() -> None:
    control = (0.9, 0.8, 1.2)
    apart = [control, (0.6, 0.5, 0.7), (0.4, 0.3, 0.45)]
    other = [control, (0.3, 0.25, 0.35), (0.5, 0.45, 0.55)]
    assert fastest(times(apart, other), (0, 1, 2)) == (2, 0)
    assert fastest(times(apart, other, noisy=(True, False)), (0, 1, 2)) == (2, 0)
    near = [*apart[:2], (0.4, 0.3, 0.5)]
    assert fastest(times(near, other, noisy=(True, False)), (0, 1, 2)) == (1, 1)
    assert fastest(times(near, near, noisy=(True, True)), (0, 1, 2)) == (2, 0)
    # The first form's own ratio is its control's.
    assert fastest(times([(0.1, 0.1, 0.1), *apart[1:]], noisy=(False,)), (0, 1)) == (1, 0)
    assert fastest(times(apart, other, noisy=(True, False)), ()) == (None, 1)
    assert ratios(times(apart, other, noisy=(True, False))) == [1.0, 0.3, 0.5]
    assert ratios(times(apart, other, noisy=(True, True))) == [1.0, 0.6, 0.4]


def test_rows_in_mixed_order_are_cut_into_batches_and_have_the_size_of_those_that_they_fill() -> None:
    batches = [{"input_ids": torch.arange(start, start + 6).view(6, 1)} for start in (0, 6, 12)]
    found = in_mixed_order(batches, 3)
    assert [len(batch["input_ids"]) for batch in found] == [3] * 6
    rows = torch.cat([batch["input_ids"] for batch in found]).flatten().tolist()
    assert sorted(rows) == list(range(18)) != rows
    assert [len(batch["input_ids"]) for batch in in_mixed_order(batches, 1000)] == [6]
    uneven = [{"input_ids": torch.zeros(rows, 5)} for rows in (8, 8, 2)]
    assert [*rows_by_shape({8: uneven, 32: uneven, 4: uneven})] == [(8, 5), (4, 5)]
