"""ONNX Runtime on a GPU, where there is none: its code on the CPU's provider, and its refusals."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support.models import bert, causal_lm, text_batch

from hies_export import MissingRuntimeError, export_onnx, load_runtime
from hies_export.forms.runtimes import ort_gpu as gpu_runtimes
from hies_export.forms.runtimes.ort import OnnxRuntime
from hies_export.forms.runtimes.ort_gpu import CudaOnnxRuntime, TensorRtOnnxRuntime


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
        found[name] = (export_onnx(model, folder, batch=sample, provider="tensorrt").folder, sample)
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
    if name == "llama":
        step, want = (r.fetch(r.run(r.prepare_step(batch))) for r in (runtime, plain))
        np.testing.assert_allclose(step["logits"], want["logits"], atol=1e-5)


def test_what_the_session_is_asked_for(folders, sessions, tmp_path, monkeypatch):
    opened, _ = sessions
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    OnTheCpu(folders["bert"][0], threads=1)

    class TensorRt(TensorRtOnnxRuntime):
        requested, device = "CPUExecutionProvider", "cpu"

    TensorRt(folders["bert"][0], threads=1)
    assert opened[0] == (
        [
            ("CUDAExecutionProvider", {"arena_extend_strategy": "kSameAsRequested", "enable_cuda_graph": "1"}),
            "CPUExecutionProvider",
        ],
        {"record_ep_graph_assignment_info": "1"},
    )
    (name, options), (cuda, cuda_options), last = opened[1][0]
    assert (name, cuda, last) == ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")
    assert (options["trt_cuda_graph_enable"], cuda_options["enable_cuda_graph"]) == ("1", "0")
    assert options["trt_fp16_enable"] == "0"
    assert Path(options["trt_engine_cache_path"]).parent == tmp_path / "hies_export" / "tensorrt"
    # Other weights in the same graph are another engine.
    other = tmp_path / "model.onnx"
    other.write_bytes((folders["bert"][0] / "model.onnx").read_bytes() + b"\0")
    assert gpu_runtimes._digest(other) != Path(options["trt_engine_cache_path"]).name


def test_a_graph_that_cannot_be_captured_is_timed_without(folders, sessions, caplog):
    opened, refused = sessions
    refused.append("'enable_cuda_graph': '1'")
    runtime = OnTheCpu(folders["bert"][0], threads=1)
    assert not runtime.cuda_graph
    assert len(opened) == 2
    assert "times model.onnx without a CUDA graph: This session cannot use the graph capture feature" in caplog.text
    feed = runtime.prepare(folders["bert"][1])
    assert np.isfinite(runtime.fetch(runtime.run(feed))["logits"]).all()


def test_a_capture_that_fails_is_given_up(folders, sessions, monkeypatch, caplog):
    runtime, original = OnTheCpu(folders["bert"][0], threads=1), onnxruntime.InferenceSession.run_with_iobinding

    def fail(self, binding, options=None):
        if runtime.cuda_graph and options.get_run_config_entry("gpu_graph_id") != "-1":
            raise RuntimeError("operation not permitted when stream is capturing")
        return original(self, binding, options)

    monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", fail)
    feed = runtime.prepare(folders["bert"][1])
    assert not runtime.cuda_graph
    assert "without a CUDA graph" in caplog.text
    assert np.isfinite(runtime.fetch(runtime.run(feed))["logits"]).all()


@pytest.mark.parametrize("name", ["onnxruntime-cuda", "onnxruntime-tensorrt"])
def test_a_machine_without_the_provider_is_told_what_to_install(folders, name):
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this machine has it")
    with pytest.raises(MissingRuntimeError, match=r'offers .*CPU.*pip install "hies-export\[gpu\]"'):
        load_runtime(name, folders["bert"][0])


def test_a_provider_that_falls_back_silently_is_an_error(folders, monkeypatch):
    """As where CUDA's libraries do not load: the package knows the provider, the session runs elsewhere."""
    everything = [*onnxruntime.get_available_providers(), "CUDAExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: everything)
    original = OnnxRuntime._session_on
    monkeypatch.setattr(
        OnnxRuntime, "_session_on", lambda self, file, _, **c: original(self, file, everything[1:2], **c)
    )
    with pytest.raises(
        MissingRuntimeError, match="must run on CUDAExecutionProvider, and its session fell back to CPU"
    ):
        load_runtime("onnxruntime-cuda", folders["bert"][0])


def test_operators_that_all_fall_back_are_an_error(folders, sessions, monkeypatch):
    class Elsewhere(OnTheCpu):
        requested = "CUDAExecutionProvider"
        provider = "CUDAExecutionProvider"

    everything = [*onnxruntime.get_available_providers(), "CUDAExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: everything)
    with pytest.raises(MissingRuntimeError, match="every operator fell back to CPUExecutionProvider"):
        Elsewhere(folders["bert"][0], threads=1)


def test_a_graph_for_tensorrt_has_standard_operators_only(folders):
    for folder, _ in folders.values():
        graph = onnx.load(folder / "model.onnx").graph
        assert {node.domain for node in graph.node} <= {"", "ai.onnx"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
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
        peak = runtime.peak_memory_bytes(feed)
        assert peak is not None
        assert peak > 0
