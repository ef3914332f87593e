"""ONNX Runtime on a GPU, where there is none: its code on the CPU's provider, and its refusals."""

import re
from types import SimpleNamespace
from unittest import mock

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support.models import bert, causal_lm, text_batch

from hies_export import MissingRuntimeError, export_onnx, load_runtime
from hies_export.forms.onnx import parity
from hies_export.forms.runtimes import ort_gpu as gpu_runtimes
from hies_export.forms.runtimes.base import check_runtime
from hies_export.forms.runtimes.ort import OnnxRuntime
from hies_export.forms.runtimes.ort_gpu import CudaOnnxRuntime


class OnTheCpu(CudaOnnxRuntime):
    """Everything of the CUDA runtime but the device."""

    name, requested, device = "onnxruntime-cuda", "CPUExecutionProvider", "cpu"


@pytest.fixture
def sessions(monkeypatch):
    """Providers and configuration of every session that is opened; those in `refused` raise."""
    opened, refused, original = [], [], OnnxRuntime._session_on

    def recorded(self, file, providers, **config):
        opened.append((providers, config))
        if any(name in str(providers) for name in refused):
            raise RuntimeError("This session cannot use the graph capture feature\nas requested")
        return original(self, file, ["CPUExecutionProvider"], **config)

    monkeypatch.setattr(OnnxRuntime, "_session_on", recorded)
    return opened, refused


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for name, model, batch in (
        ("bert", bert(num_hidden_layers=1), text_batch(labels=False)),
        ("llama", causal_lm(num_hidden_layers=1), None),
    ):
        ids = torch.randint(5, 30, (2, 9))
        sample = batch or {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        folder = tmp_path_factory.mktemp(name) / "onnx"
        found[name] = (export_onnx(model, folder, batch=sample, provider="cuda").folder, sample)
    return found


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_feed_keeps_its_memory_and_computes_what_the_cpu_does(folders, sessions, name):
    folder, batch = folders[name]
    runtime, plain = OnTheCpu(folder, threads=1), load_runtime("onnxruntime-cpu", folder)
    other = {key: value[:1, :5] for key, value in batch.items()}
    feeds = [runtime.prepare(batch), runtime.prepare(other)]
    for given, feed in zip((batch, other), feeds, strict=True):
        want = plain.fetch(plain.run(plain.prepare(given)))
        addresses = []
        for _ in range(2):
            assert runtime.time_ns(feed) > 0
            result = runtime.run(feed)
            addresses.append([value.data_ptr() for value in result.get_outputs()])
            for key, array in runtime.fetch(result).items():
                np.testing.assert_allclose(array, want[key], atol=1e-5)
        # A captured graph writes where it wrote when it was captured.
        assert addresses[0] == addresses[1]
    # A graph for every feed: a session captures each of them under a number of its own.
    assert [feed.options.get_run_config_entry("gpu_graph_id") for feed in feeds] == ["1", "2"]
    assert runtime.cuda_graph


@pytest.mark.parametrize(("precision", "tf32"), [("ieee", "0"), ("tf32", "1")])
def test_what_the_session_is_asked_for(folders, sessions, precision, tf32):
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        OnTheCpu(folders["bert"][0], threads=1)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    options = {"arena_extend_strategy": "kSameAsRequested", "enable_cuda_graph": "1", "use_tf32": tf32}
    providers = [("CUDAExecutionProvider", options), "CPUExecutionProvider"]
    assert sessions[0] == [(providers, {"record_ep_graph_assignment_info": "1"})]


def test_only_prepared_batches_are_captured(folders, sessions, monkeypatch):
    """Otherwise a graph of the first prompt would be replayed for the second, and evaluation would keep one a batch."""
    numbers, original = [], onnxruntime.InferenceSession.run_with_iobinding

    def recorded(self, binding, options=None):
        if options is not None:  # the CPU's has none
            numbers.append(options.get_run_config_entry("gpu_graph_id"))
        return original(self, binding, options)

    monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", recorded)
    folder, batch = folders["llama"]
    runtime, plain = OnTheCpu(folder, threads=1), load_runtime("onnxruntime-cpu", folder)
    for length in (9, 5):  # two shapes, each computed without a graph
        part = {key: value[:, :length] for key, value in batch.items()}
        np.testing.assert_allclose(runtime.compute(part)["logits"], plain.compute(part)["logits"], atol=1e-5)
    assert numbers == ["-1", "-1"]
    numbers.clear()
    steps = [runtime.prepare_step({key: value[:, :length] for key, value in batch.items()}) for length in (9, 5)]
    # Of each step: the prompt, the run that fixes addresses, and the run that captures.
    assert numbers == ["-1", "-1", "1", "-1", "-1", "2"]
    for step, length in zip(steps, (9, 5), strict=True):
        want = plain.run(plain.prepare_step({key: value[:, :length] for key, value in batch.items()}))
        logits = runtime.fetch(runtime.run(step))["logits"]
        np.testing.assert_allclose(logits, plain.fetch(want)["logits"], atol=1e-5)


def test_a_cache_is_not_in_memory_that_replays_overwrite(folders, sessions, monkeypatch):
    """A session reuses the memory of outputs; a captured graph keeps writing to memory that is free again."""
    written, original = set(), OnTheCpu.run

    def recorded(self, feed):
        result = original(self, feed)
        written.update(value.data_ptr() for value in result.get_outputs())
        return result

    monkeypatch.setattr(OnTheCpu, "run", recorded)
    folder, batch = folders["llama"]
    runtime = OnTheCpu(folder, threads=1)
    feed = runtime.prepare_step(batch)
    assert len(written) > len(runtime.outputs)
    assert not written & {value.data_ptr() for value in feed.values}


def test_a_part_that_falls_back_is_named(folders, sessions, caplog):
    class Both(OnTheCpu):
        """A session whose operators are on two providers."""

        def _open(self, file):
            session = super()._open(file)
            self.cuda_graph = False
            placed = [part("CPUExecutionProvider", "Add"), part("Other", "GatherND", "Cast", "Cast")]
            kept = ("get_providers", "get_inputs", "get_outputs", "get_modelmeta")
            told = {name: getattr(session, name) for name in kept}
            return SimpleNamespace(**told, get_provider_graph_assignment_info=lambda: placed)

    def part(provider, *operators):
        return SimpleNamespace(ep_name=provider, get_nodes=lambda: [SimpleNamespace(op_type=op) for op in operators])

    Both(folders["bert"][0], threads=1)
    assert "onnxruntime-cuda runs a part of model.onnx on Other: 2 Cast, 1 GatherND" in caplog.text


def test_an_export_is_compared_on_its_own_provider(folders, sessions, tmp_path, monkeypatch):
    seen = []

    class Watched(OnTheCpu):
        def run_once(self, batch):
            seen.append(type(batch))
            return super().run_once(batch)

    monkeypatch.setitem(parity.RUNTIMES, "cuda", Watched)
    export_onnx(bert(num_hidden_layers=1), tmp_path / "onnx", batch=text_batch(labels=False), provider="cuda")
    assert len(seen) == 3


@pytest.mark.parametrize("fails", ["to open", "to capture"])
def test_a_graph_that_cannot_be_captured_is_timed_without(folders, sessions, monkeypatch, caplog, fails):
    opened, refused = sessions
    original = onnxruntime.InferenceSession.run_with_iobinding

    def capture(self, binding, options=None):
        if runtime.cuda_graph and options.get_run_config_entry("gpu_graph_id") != "-1":
            raise RuntimeError("operation not permitted when stream is capturing")
        return original(self, binding, options)

    if fails == "to open":
        refused.append("'enable_cuda_graph': '1'")
    else:
        monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", capture)
    runtime = OnTheCpu(folders["bert"][0], threads=1)
    feed = runtime.prepare(folders["bert"][1])
    assert (runtime.cuda_graph, len(opened)) == (False, 2)
    said = {"to open": "This session cannot use the graph capture feature", "to capture": ".*stream is capturing"}
    assert re.search(f"times model.onnx without a CUDA graph: {said[fails]}", caplog.text)
    assert np.isfinite(runtime.fetch(runtime.run(feed))["logits"]).all()


def test_libraries_that_are_missing_are_named_before_anything_is_run(monkeypatch):
    """As where onnxruntime-gpu is installed, and CUDA's libraries are not: the session falls back without an error."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(gpu_runtimes, "_refusal", gpu_runtimes._refusal.__wrapped__)
    fallen = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_, **__: fallen)
    own = "its session fell back to CPUExecutionProvider; install the libraries of the CUDA"
    with pytest.raises(MissingRuntimeError, match=own):
        check_runtime("onnxruntime-cuda")
    loader = "libcublasLt.so.13: cannot open shared object file: No such file or directory"
    monkeypatch.setattr(gpu_runtimes, "_missing_library", lambda provider: loader)
    with pytest.raises(MissingRuntimeError, match=f"knows, but cannot start: {loader}; install the libraries"):
        check_runtime("onnxruntime-cuda")


def test_the_loader_says_which_library_is_missing(tmp_path, monkeypatch):
    package = tmp_path / "capi"
    package.mkdir()
    (package / "libonnxruntime_providers_cuda.so").write_bytes(b"")
    monkeypatch.setattr(onnxruntime, "__file__", str(tmp_path / "__init__.py"))
    for message, found in {
        "libcublasLt.so.13: cannot open shared object file: No such file or directory": True,
        "undefined symbol: Provider_GetHost": False,
    }.items():
        with mock.patch.object(gpu_runtimes.ctypes, "CDLL", side_effect=OSError(message)):
            assert gpu_runtimes._missing_library("CUDAExecutionProvider") == (message if found else None)


def test_a_machine_without_the_provider_is_told_what_to_install(folders):
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this machine has it")
    with pytest.raises(MissingRuntimeError, match=r'offers .*CPU.*pip install "hies-export\[gpu\]"'):
        load_runtime("onnxruntime-cuda", folders["bert"][0])


@pytest.fixture
def promised(monkeypatch):
    """As where CUDA's libraries do not load: the package knows the provider, and what it runs is elsewhere."""
    everything = [*onnxruntime.get_available_providers(), "CUDAExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: everything)
    monkeypatch.setattr(gpu_runtimes, "_refusal", lambda provider: None)


def test_a_provider_that_falls_back_silently_is_an_error(folders, sessions, promised):
    with pytest.raises(MissingRuntimeError, match="run on CUDAExecutionProvider, and its session fell back to CPU"):
        load_runtime("onnxruntime-cuda", folders["bert"][0])


def test_operators_that_all_fall_back_are_an_error(folders, sessions, promised):
    class Elsewhere(OnTheCpu):
        requested = provider = "CUDAExecutionProvider"

    with pytest.raises(MissingRuntimeError, match="every operator fell back to CPUExecutionProvider"):
        Elsewhere(folders["bert"][0], threads=1)


def test_a_graph_for_a_gpu_gathers_no_booleans(folders):
    """ONNX Runtime has no kernel for that on a GPU, and runs graphs that fall back in part without a CUDA graph."""
    for folder, _ in folders.values():
        operators = {node.op_type for node in onnx.load(folder / "model.onnx").graph.node}
        assert "GatherND" not in operators
        assert "Unsqueeze" in operators


def test_a_graph_for_a_gpu_copies_no_numbers_to_it(folders):
    """ONNX Runtime computes shapes on the CPU, and captures no session that copies them to the GPU."""
    read_on_the_cpu = {"Reshape": {1}, "Expand": {1}, "Slice": {1, 2, 3, 4}, "Unsqueeze": {1}, "Squeeze": {1}}
    copied = []
    for folder, _ in folders.values():
        graph = onnx.load(folder / "model.onnx").graph
        constants, of_shapes = {tensor.name for tensor in graph.initializer}, set()
        # A table that is cut to a length stays on the GPU.
        scalars = {tensor.name for tensor in graph.initializer if len(tensor.dims) < 2 and sum(tensor.dims) < 8}
        for node in graph.node:
            computed = [name for name in node.input if name and name not in constants]
            if node.op_type == "Range":  # from numbers on the CPU to numbers on the GPU
                assert of_shapes >= set(computed)
            elif node.op_type == "Shape" or (node.input[0] in {*of_shapes, *scalars} and of_shapes >= set(computed)):
                of_shapes.update(node.output)
            else:
                slots = read_on_the_cpu.get(node.op_type, set())
                copied += [name for i, name in enumerate(node.input) if name in of_shapes and i not in slots]
        assert of_shapes
    assert copied == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.skipif(
    "CUDAExecutionProvider" not in onnxruntime.get_available_providers(), reason="onnxruntime-cuda: not installed"
)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_on_a_gpu_it_computes_what_the_cpu_does(folders, name):
    folder, batch = folders[name]
    runtime, plain = load_runtime("onnxruntime-cuda", folder), load_runtime("onnxruntime-cpu", folder)
    for prepare in ("prepare", "prepare_step") if name == "llama" else ("prepare",):
        feed = getattr(runtime, prepare)(batch)
        runtime.run(feed)
        got, want = (r.fetch(r.run(f)) for r, f in ((runtime, feed), (plain, getattr(plain, prepare)(batch))))
        for key, array in got.items():
            np.testing.assert_allclose(array, want[key], atol=5e-3)
