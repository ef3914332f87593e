"""OpenVINO on graphs of `export_onnx`: its outputs, what it computes in, its cache, and its refusals."""

import numpy as np
import onnx
import pytest
import torch
from support.cuts import random_cut
from support.models import bert, causal_lm, text_batch

from hies_export import DataError, ExportError, RecipeError, RequestError, export_onnx
from hies_export.forms.runtimes.base import check_dtypes, load_runtime
from hies_export.model.tokens import positions_of


@pytest.fixture
def openvino():
    return pytest.importorskip("openvino", reason="the extra openvino is not installed")


@pytest.fixture
def folder(tmp_path):
    return export_onnx(bert(num_hidden_layers=1), tmp_path / "bert", batch=text_batch(labels=False)).folder


def outputs(runtime, feed):
    return runtime.fetch(runtime.run(feed))


def test_a_slim_decoder_with_its_own_heads_per_layer(openvino, tmp_path):
    ids = torch.randint(5, 30, (3, 9))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    slim, _, _ = random_cut(causal_lm(num_hidden_layers=3, num_key_value_heads=4), batch)
    runtime = load_runtime("openvino", export_onnx(slim, tmp_path / "onnx", batch=batch).folder, threads=1)
    with torch.no_grad():
        want = slim(**batch, position_ids=positions_of(mask)).logits.numpy()
    real = mask.bool().numpy()
    # Other shapes than the traced one, the first again after the second, and a file for a folder.
    small = {name: value[:1, :5] for name, value in batch.items()}
    feeds = [runtime.prepare(batch), runtime.prepare(small)]
    for feed, expected, rows in (
        (feeds[0], want, real),
        (feeds[1], want[:1, :5], real[:1, :5]),
        (feeds[0], want, real),
    ):
        np.testing.assert_allclose(outputs(runtime, feed)["logits"][rows], expected[rows], atol=1e-4)
    step = outputs(runtime, runtime.prepare_step(batch))
    np.testing.assert_allclose(step["logits"][:, -1], want[:, -1], atol=1e-4)
    heads = [layer.self_attn.k_proj.out_features // layer.self_attn.head_dim for layer in slim.model.layers]
    assert [step[f"present.{i}.key"].shape[1:3] for i in range(3)] == [(count, 9) for count in heads]


def test_it_computes_in_what_it_says(openvino, folder):
    batch = text_batch(labels=False)
    plain, half = (load_runtime("openvino", folder, threads=1, dtype=dtype) for dtype in ("float32", "bfloat16"))
    reference = load_runtime("onnxruntime-cpu", folder)
    want, one, two = (outputs(r, r.prepare(batch))["logits"] for r in (reference, plain, half))
    assert (plain.dtype, half.dtype, plain.provider) == ("float32", "bfloat16", "CPU")
    # Eight significant bits: not the same, and near.
    np.testing.assert_allclose(one, want, atol=1e-5)
    assert 1e-4 < np.abs(two - want).max() < 0.05 * np.abs(want).max()


def test_float32_and_threads_are_asked_for_on_every_processor(openvino, folder, monkeypatch):
    """Where the processor has bfloat16, that is the default."""
    seen, original = [], openvino.Core.compile_model

    def recorded(self, model, device, options):
        seen.append((device, options))
        return original(self, model, device, options)

    monkeypatch.setattr(openvino.Core, "compile_model", recorded)
    assert load_runtime("openvino", folder / "model.onnx", threads=1).threads == 1
    ((device, options),) = seen
    assert device == "CPU"
    assert (options["INFERENCE_PRECISION_HINT"], options["INFERENCE_NUM_THREADS"]) == ("f32", 1)


def test_what_it_refuses(openvino, folder, tmp_path):
    text = """<ir_version: 10, opset_import: ["" : 20, "nobody.ops" : 1]>
    g (float[b, s] x) => (float[b, s] logits) { logits = nobody.ops.Nothing(x) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    with pytest.raises(ExportError, match="OpenVINO must load model.onnx, and refused: .*nobody.ops.Nothing$"):
        load_runtime("openvino", tmp_path)
    with pytest.raises(DataError, match="input 'input_ids' must be in the batch, which has pixel_values"):
        load_runtime("openvino", folder).prepare({"pixel_values": torch.ones(1, 3, 4, 4)})
    (folder / "decoder_model_merged.onnx").touch()
    with pytest.raises(RecipeError, match="must be a single graph, and .* has the parts of a vision-language model"):
        load_runtime("openvino", folder)
    with pytest.raises(RequestError, match="a dtype must be one of float32, bfloat16, int8 on openvino, got 'float16'"):
        check_dtypes(["float16"], ["openvino"])
