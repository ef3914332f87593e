import getpass
import itertools
import platform
import weakref
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
import torch
from support.models import cut_bert
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForTokenClassification,
    ViTConfig,
    ViTForImageClassification,
)

from hies_export.errors import NonFiniteError, RecipeError
from hies_export.forms.compare import time_on
from hies_export.forms.form import Form
from hies_export.forms.measure import counts, machine, timing
from hies_export.forms.measure.counts import FlopCount, count_flops, count_parameters
from hies_export.forms.measure.latency_rows import LatencyRow
from hies_export.forms.measure.machine import gpu_facts, machine_facts
from hies_export.forms.measure.ratios import compare_latency, is_noisy, paired_ratio, realised_share
from hies_export.forms.measure.timing import Timing, balanced_order
from hies_export.forms.runtimes import base as runtime
from hies_export.forms.runtimes.base import RUNTIMES, Runtime
from hies_export.model.copies import parameter_bytes
from hies_export.model.tokens import sequence_length, synthetic_batch


def tiny_bert(cls=BertForSequenceClassification):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 3}
    return cls(BertConfig(**shape, vocab_size=50, max_position_embeddings=32, num_labels=3))


def tiny_vit(**options):
    shape = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2}
    return ViTForImageClassification(ViTConfig(**shape, **options))


def bert_flops(heads, *, rows, tokens, hidden=32, head_dim=8, inner=48, labels=3):
    """Multiply-adds twice: q, k, v and o; scores and context; both MLP halves; pooler and classifier."""
    total = 0
    for count in heads:
        width = count * head_dim
        total += 2 * rows * tokens * 4 * hidden * width
        total += 2 * rows * 2 * tokens * tokens * width
        total += 2 * rows * tokens * 2 * hidden * inner
    return total + 2 * rows * hidden * hidden + 2 * rows * hidden * labels


@pytest.fixture
def copies(monkeypatch):
    """The devices that copies of the model were made for."""
    devices, original = [], counts.share_weights

    def recorded(model, *, device=None):
        devices.append(device)
        return original(model, device=device)

    monkeypatch.setattr(counts, "share_weights", recorded)
    return devices


@pytest.mark.parametrize(("rows", "tokens"), [(1, 7), (3, 32)])
def test_flops_of_dense_and_uneven_bert_equal_the_formula(rows, tokens, copies):
    model = tiny_bert().train()
    batch = {
        **synthetic_batch(model, batch=rows, sequence=tokens),
        "labels": torch.zeros(rows, dtype=torch.long),
    }
    assert count_flops(model, batch) == bert_flops((4, 4, 4), rows=rows, tokens=tokens)
    assert count_flops(cut_bert(model, (3, 1, 4)), batch) == bert_flops((3, 1, 4), rows=rows, tokens=tokens)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert copies == ["meta", "meta"]


def test_flops_of_vit_equal_the_formula(copies):
    model = tiny_vit(image_size=16, patch_size=4, num_labels=3)
    batch = synthetic_batch(model, batch=2)
    layers = bert_flops((4, 4), rows=2, tokens=17) - 2 * 2 * 32 * (32 + 3)
    patches = 2 * 2 * 16 * (3 * 4 * 4) * 32
    assert count_flops(model, batch) == layers + patches + 2 * 2 * 32 * 3
    assert copies == ["meta"]


def test_flops_of_a_forward_that_reads_values_are_counted_for_real(copies):
    class Picky(BertForSequenceClassification):
        def forward(self, input_ids, **options):
            assert int(input_ids.max()) >= 0
            return super().forward(input_ids, **options)

    model = tiny_bert(Picky)
    batch = {"input_ids": torch.ones(2, 5, dtype=torch.long)}
    assert count_flops(model, batch) == bert_flops((4, 4, 4), rows=2, tokens=5)
    assert copies == ["meta", None]


def test_flops_of_a_model_to_train_whose_code_takes_views_of_parameters() -> None:
    """The counter follows gradients, and a view of a trainable parameter asks for one even under `no_grad`."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    relative = {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "norm_rel_ebd": "none",
    }
    model = DebertaV2ForTokenClassification(DebertaV2Config(vocab_size=60, **sizes, **relative))
    batch = {"input_ids": torch.randint(5, 60, (2, 12))}
    trainable = count_flops(model, batch)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert trainable == count_flops(model.requires_grad_(False), batch) > 0


def test_parameters_count_tied_weights_once():
    model = tiny_bert(BertForMaskedLM)
    unique = {tensor.data_ptr(): tensor for tensor in model.state_dict().values() if tensor.is_floating_point()}
    assert count_parameters(model) == sum(tensor.numel() for tensor in unique.values())
    assert count_parameters(model) < sum(t.numel() for t in model.state_dict().values() if t.is_floating_point())
    assert parameter_bytes(model) == 4 * count_parameters(model)
    assert parameter_bytes(model.half()) == 2 * count_parameters(model)


def test_synthetic_batches_and_what_the_attention_sees():
    model = tiny_bert()
    batch = synthetic_batch(model, batch=40, sequence=16)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (40, 16)
    assert sorted(set(batch["input_ids"].flatten().tolist())) == list(range(50))
    assert batch["attention_mask"].min() == 1
    assert sequence_length(model, batch) == 16
    again, other = (synthetic_batch(model, batch=40, sequence=16, seed=seed) for seed in (0, 1))
    assert torch.equal(again["input_ids"], batch["input_ids"])
    assert not torch.equal(other["input_ids"], batch["input_ids"])
    for size, patch, tokens in ((16, 4, 17), ((16, 32), 8, 9)):
        vit = tiny_vit(image_size=size, patch_size=patch, num_channels=1)
        images = synthetic_batch(vit, batch=2, sequence=99)
        height, width = size if isinstance(size, tuple) else (size, size)
        assert images["pixel_values"].shape == (2, 1, height, width)
        assert sequence_length(vit, images) == tokens


@pytest.mark.parametrize(("sequence", "shown"), [(None, "None"), (0, "0"), (33, "33")])
def test_impossible_shapes(sequence, shown):
    with pytest.raises(RecipeError, match=rf"sequence must be in 1\.\.32 for Bert\w+, got {shown}"):
        synthetic_batch(tiny_bert(), batch=1, sequence=sequence)
    with pytest.raises(RecipeError, match="batch must be at least 1, got 0"):
        synthetic_batch(tiny_bert(), batch=0, sequence=4)


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

    def prepare(self, batch):
        return batch

    def prepare_step(self, batch):
        return {"step of": batch}

    def run(self, feed):
        self.feed = feed
        took_ms = self.times_ms[self.runs % len(self.times_ms)] + self.clock.drift_ms * len(self.clock.order)
        self.runs += 1
        self.clock.order.append(self.label)
        self.clock.now_ns += round(took_ms * 1e6)

    def fetch(self, result):
        return {}


@pytest.fixture
def clock(monkeypatch):
    ticking = Clock()
    monkeypatch.setattr(runtime, "perf_counter_ns", ticking)
    return ticking


def trio(clock, dense_ms, slim_ms, control_ms):
    return [Fake(clock, n, t) for n, t in (("D", dense_ms), ("S", slim_ms), ("C", control_ms))]


def test_latency_equals_numpy_on_scripted_times(clock):
    rng = np.random.default_rng(3)
    dense_ms, slim_ms, control_ms = rng.uniform(8, 12, 30), rng.uniform(6, 10, 30), rng.uniform(8, 12, 30)
    dense, slim, control = trio(clock, dense_ms, slim_ms, control_ms)
    result = compare_latency(dense, slim, control=control, batch={}, warmup=0, seed=7)
    assert (result.dense.p50_ms, result.dense.p90_ms, result.dense.p99_ms) == pytest.approx(
        tuple(np.percentile(dense_ms, (50, 90, 99))), abs=1e-5
    )
    assert result.slim.p90_ms == pytest.approx(np.percentile(slim_ms, 90), abs=1e-5)
    # Slim against the mean of the two copies of the dense model.
    assert result.ratio.median == pytest.approx(np.median(slim_ms / ((dense_ms + control_ms) / 2)), abs=1e-5)
    assert result.control.median == pytest.approx(np.median(control_ms / dense_ms), abs=1e-5)
    assert result.ratio.low < result.ratio.median < result.ratio.high
    assert (result.repeats, result.threads, result.provider) == (30, 2, "fake")


def test_runs_are_interleaved_back_and_forth_and_warm_up_is_not_timed(clock):
    dense, slim, control = trio(clock, [999.0] * 2 + [10.0] * 6, [999.0] * 2 + [5.0] * 6, [10.0])
    result = compare_latency(dense, slim, control=control, batch={}, repeats=6, warmup=2)
    order = "".join(clock.order)
    assert order[:6] == "DSCDSC"
    rounds = [order[6 + i : 9 + i] for i in range(0, 18, 3)]
    assert sorted(rounds) == ["CDS", "CSD", "DCS", "DSC", "SCD", "SDC"]
    assert all(rounds[i] == rounds[i + 1][::-1] for i in (0, 2, 4))
    assert result.dense.p99_ms == 10.0
    assert result.ratio.median == result.ratio.low == result.ratio.high == 0.5


def test_slow_drift_cancels(clock):
    clock.drift_ms = 0.02
    runners = trio(clock, [10.0], [10.0], [10.0])
    result = compare_latency(runners[0], runners[1], control=runners[2], batch={}, repeats=60, warmup=0)
    assert result.ratio.median == pytest.approx(1.0, abs=2e-3)
    assert result.control.median == pytest.approx(1.0, abs=2e-3)
    assert result.dense.p50_ms > 11.0


def test_without_a_control_dense_runs_against_itself(clock):
    dense, slim, _ = trio(clock, [4.0], [2.0], [1.0])
    result = compare_latency(dense, slim, batch={}, repeats=5, warmup=0)
    assert (dense.runs, slim.runs) == (10, 5)
    assert result.control.median == 1.0


def test_min_seconds_goes_on_beyond_the_repeats(clock):
    runners = trio(clock, [100.0], [100.0], [100.0])
    result = compare_latency(runners[0], runners[1], control=runners[2], batch={}, repeats=2, min_seconds=2.0)
    assert result.repeats == 7


def test_garbage_collection_is_off_while_timing_and_back_on_after_a_failure(clock):
    import gc

    seen = []

    def fail(feed):
        seen.append(gc.isenabled())
        raise KeyboardInterrupt("in between")

    dense, slim, _ = trio(clock, [1.0], [1.0], [1.0])
    slim.run = fail
    with pytest.raises(KeyboardInterrupt, match="in between"):
        compare_latency(dense, slim, batch={}, warmup=0)
    assert seen == [False]
    assert gc.isenabled()


def test_impossible_timings(clock):
    dense, slim, _ = trio(clock, [1.0], [1.0], [1.0])
    with pytest.raises(RecipeError, match=r"3 problems(.|\n)*got 0(.|\n)*got -1(.|\n)*got -2"):
        compare_latency(dense, slim, batch={}, repeats=0, warmup=-1, min_seconds=-2)
    with pytest.raises(RecipeError, match="run alike, got fake with 2 threads and fake with 4 threads"):
        compare_latency(dense, Fake(clock, "S", [1.0], threads=4), batch={})
    slim.cuda_graph = True
    with pytest.raises(RecipeError, match="run alike, got fake with 2 threads and fake with 2 threads, as a CUDA gra"):
        compare_latency(dense, slim, batch={})


def naive_interval(base_ms, other_ms, draws, seed):
    """Loads, in each the copies of the base, and their rounds, drawn one at a time."""
    random, medians = np.random.default_rng(seed), []
    for _ in range(draws):
        ratios = []
        for load in random.integers(len(other_ms), size=len(other_ms)):
            base, other = base_ms[load], other_ms[load]
            copies = random.integers(base.shape[1], size=base.shape[1])
            for row in random.integers(len(other), size=len(other)):
                ratios.append(other[row] / np.mean([base[row, copy] for copy in copies]))
        medians.append(np.median(ratios))
    return np.percentile(medians, (2.5, 97.5))


@pytest.mark.parametrize("loads", [1, 4])
def test_the_interval_equals_a_naive_bootstrap_over_loads_copies_and_rounds(loads):
    random = np.random.default_rng(5)
    # Copies that differ steadily: by 3 % from load to load, and by 3 % within one.
    base = [10 * (1 + 0.03 * random.standard_normal((1, 2))) + 0.2 * random.standard_normal((12, 2))] * loads
    base = [times * (1 + 0.03 * random.standard_normal()) for times in base]
    other = [8 * (1 + 0.03 * random.standard_normal()) + 0.2 * random.standard_normal(12) for _ in range(loads)]
    found = paired_ratio(base, other)
    assert (found.low, found.high) == pytest.approx(naive_interval(base, other, 3000, 1), rel=4e-3)
    assert found.median == np.median(np.concatenate([o / b.mean(axis=1) for o, b in zip(other, base, strict=True)]))


def test_one_copy_loaded_once_has_the_bootstrap_of_scipy():
    from scipy.stats import bootstrap

    base, other = np.random.default_rng(0).uniform(1, 2, (2, 30))
    options = {"method": "percentile", "n_resamples": 20_000, "rng": np.random.default_rng(1)}
    independent = bootstrap((other / base,), np.median, **options).confidence_interval
    found = paired_ratio([base[:, None]], [other])
    assert (found.low, found.high) == pytest.approx((independent.low, independent.high), abs=0.03)


@pytest.mark.parametrize(("loads", "at_least", "at_most"), [(1, 0.0, 0.7), (5, 0.9, 1.0)])
def test_only_with_several_loads_intervals_hold_what_the_next_load_gives(loads, at_least, at_most):
    """Copies that differ by 1.6 % and rounds by 1 %, as measured of ONNX Runtime on the CPU; 30 rounds in all."""
    random = np.random.default_rng(11)

    def holds():
        times = []
        for _ in range(loads):
            copies = np.array([10, 8, 10]) * (1 + 0.016 * random.standard_normal(3))
            times.append(copies * (1 + 0.01 * random.standard_normal((30 // loads, 3))))
        found = paired_ratio([t[:, [0, 2]] for t in times], [t[:, 1] for t in times])
        return found.low <= 0.8 <= found.high

    assert at_least <= np.mean([holds() for _ in range(200)]) <= at_most


def test_loads_of_unequal_length_count_alike():
    found = paired_ratio([np.full((3, 1), 10.0), np.full((9, 1), 10.0)], [np.full(3, 5.0), np.full(9, 6.0)])
    assert (found.median, found.low, found.high) == (0.6, 0.5, 0.6)


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
    shapes = {(1, 8): {}, (2, 8): {}}
    flops = {shape: FlopCount(10, 8, shape) for shape in shapes}
    both = Form("dense", "loaded", "dense"), Form("slim", "loaded", "slim")
    rows = time_on(*both, batches=shapes, flops=flops, timing=Timing(repeats=30))
    assert loaded == ["dense", "slim", "dense", "slim", "dense", "dense", "dense", "dense", "slim", *loaded[:3]]
    assert [(row.batch, row.loads, row.repeats) for row in rows] == [(1, 4, 32), (2, 4, 32)]
    # Against the mean of the copies: first dense, then slim, then control, then dense again are the fast ones.
    assert rows[0].ratio == pytest.approx(np.median([8 / 7.5, 4 / 10, 8 / 7.5, 8 / 7.5]))
    assert (rows[0].ratio_low, rows[0].control_ratio) == (pytest.approx(0.4), pytest.approx(1.5))
    (row,) = time_on(*both, batches={(1, 8): {}}, flops=flops, timing=Timing(repeats=2))
    assert (row.loads, row.repeats) == (2, 2)
    with pytest.raises(RecipeError, match="repeats must be at least 1, got 0"):
        time_on(*both, batches={(1, 8): {}}, flops=flops, timing=Timing(repeats=0))


def test_a_row_has_the_keys_of_report_json_in_their_order(clock):
    dense, slim, control = trio(clock, [10.0], [5.0], [10.0])
    slim.dtype = "float16"
    for runner, size in ((dense, 900), (slim, 600), (control, 800)):
        runner.peak_memory_bytes, runner.decodes = lambda feed, size=size: size, True
    found = compare_latency(dense, slim, control=control, batch={}, phase="decode", repeats=6)
    row = asdict(LatencyRow.of(found, runtime="torch", shape=(4, 128), phase="decode"))
    assert " ".join(row) == (
        "runtime provider dtype phase batch sequence dense_ms slim_ms ratio ratio_low ratio_high realised flops_ratio "
        "tokens_per_second dense_p90_ms dense_p99_ms slim_p90_ms slim_p99_ms control_ratio control_low control_high "
        "noisy repeats loads threads cuda_graph peak_bytes gpu_clock_mhz"
    )
    assert (row["provider"], row["dtype"], row["phase"]) == ("fake", "float32 / float16", "decode")
    assert (row["batch"], row["sequence"], row["dense_ms"], row["slim_ms"], row["ratio"]) == (4, 128, 10.0, 5.0, 0.5)
    assert row["tokens_per_second"] == {"dense": 400.0, "slim": 800.0}
    assert row["peak_bytes"] == {"dense": 800, "slim": 600}
    assert (row["realised"], row["flops_ratio"]) == (None, None)
    forward = LatencyRow.of(found, runtime="torch", shape=(4, 128), flops=FlopCount(10, 8, (4, 128)))
    assert (forward.flops_ratio, forward.realised) == (0.8, pytest.approx(0.5 / 0.2))
    assert (forward.phase, forward.tokens_per_second) == ("forward", None)


def test_the_interval_depends_on_the_seed_only():
    base, other = np.random.default_rng(0).uniform(1, 2, (2, 30))
    # A bootstrapped median only takes values of the sample, so that two seeds may well agree.
    intervals = {paired_ratio([base[:, None]], [other], seed=seed) for seed in (*range(10), *range(10))}
    assert 1 < len(intervals) <= 10


def test_the_step_of_a_decoder_is_timed_by_the_same_loop(clock):
    dense, slim, control = trio(clock, [10.0], [5.0], [10.0])
    with pytest.raises(RecipeError, match="decode step needs models that generate from a cache, and these do not"):
        compare_latency(dense, slim, control=control, batch={}, phase="decode")
    for runner in (dense, slim, control):
        runner.decodes = True
    assert compare_latency(dense, slim, control=control, batch={"a": 1}, phase="decode", repeats=6).ratio.median == 0.5
    assert dense.feed == slim.feed == control.feed == {"step of": {"a": 1}}


def test_memory_and_clock_are_those_of_a_gpu(clock, monkeypatch):
    monkeypatch.setattr(timing, "gpu_facts", lambda: {"clocks.sm": "1410"})
    dense, slim, control = trio(clock, [10.0], [5.0], [10.0])
    assert compare_latency(dense, slim, control=control, batch={}, repeats=6).peak_bytes is None
    for runner, size in ((dense, 900), (slim, 600), (control, 800)):
        runner.peak_memory_bytes = lambda feed, size=size: size
    found = compare_latency(dense, slim, control=control, batch={}, repeats=6)
    # Dense is the second copy: the first one loaded also paid for the kernels.
    assert (found.peak_bytes, found.clock_mhz) == ((800, 600), 1410.0)


def test_what_nvidia_smi_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_facts() == {}
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA A100, 550.54, 1095, 1410, [N/A], 400.00'\n")
    program.chmod(0o755)
    found = gpu_facts()
    assert found == {
        "name": "NVIDIA A100",
        "driver_version": "550.54",
        "clocks.sm": "1095",
        "clocks.max.sm": "1410",
    } | {"power.limit": "400.00"}
    facts = machine_facts()
    assert (facts["gpu_driver"], facts["gpu_max_sm_mhz"], facts["gpu_max_memory_mhz"]) == ("550.54", "1410", None)
    program.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_facts() == {}


def test_realised_share():
    assert realised_share(0.85, 0.8) == pytest.approx(0.75)
    assert realised_share(1.1, 0.8) == pytest.approx(-0.5)
    assert realised_share(0.9, 1.0) is None


def test_environment_tells_versions_and_nobodys_name():
    facts = machine_facts()
    assert torch.__version__.startswith(facts["torch"])
    assert facts["python"] == platform.python_version()
    assert facts["cores"] >= 1
    assert facts["threads"] == torch.get_num_threads()
    assert set(facts) >= {"transformers", "onnxruntime", "optimum", "cpu", "gpu", "os"}
    shown = " ".join(str(value) for value in facts.values())
    assert platform.node() not in shown
    assert "/" not in shown
    assert getpass.getuser() not in shown.split()
    assert machine._version("no-such-package-at-all") is None


def test_a_control_that_misses_one_makes_the_comparison_noisy(clock):
    alike = compare_latency(*trio(clock, [10.0], [8.0], [10.1])[:2], batch={}, repeats=6)
    assert not alike.noisy
    dense, slim, control = trio(clock, [10.0], [8.0], [10.3])
    found = compare_latency(dense, slim, control=control, batch={}, repeats=6)
    assert found.noisy
    assert found.control.median == pytest.approx(1.03)
    beside = ((0.97, 1.0), (0.9, 0.97), (1.02, 1.1), (1.021, 1.1))
    assert [is_noisy(*ends) for ends in beside] == [False, True, False, True]
    # An interval may hold 1 and still be too wide to say anything.
    assert [is_noisy(*ends) for ends in ((0.95, 1.049), (0.9, 1.1), (0.99, 1.1))] == [False, True, True]


def test_outputs_that_are_no_numbers_are_not_timed(clock):
    dense, slim, control = trio(clock, [10.0], [8.0], [10.0])
    slim.fetch = lambda result: {"logits": np.array([1.0, np.nan])}
    with pytest.raises(NonFiniteError, match="logits of the slim model has NaN or infinity on fake; try dtype float32"):
        compare_latency(dense, slim, control=control, batch={}, repeats=6)


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
