import json
import logging
import sys
import warnings

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from support.exported import run_onnx
from support.models import bert, cut_bert, text_batch, vit
from transformers import MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

from hies_export import export_onnx, load_runtime
from hies_export.checkpoint.folders import new_folder
from hies_export.errors import (
    DataError,
    ExportError,
    MissingRuntimeError,
    OutputExistsError,
    ParityError,
    RequestError,
    UnsupportedModelError,
)
from hies_export.forms.onnx import export as export_module
from hies_export.forms.onnx.parity import compare_outputs
from hies_export.forms.onnx.trace import name_axes
from hies_export.progress import quiet

TEXT = ("input_ids", "attention_mask", "token_type_ids")
BATCH = text_batch(2, 9, padding=False, labels=False)


class Processor:
    def save_pretrained(self, folder):
        settings = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<a>"]}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def uneven_export(tmp_path_factory):
    torch.manual_seed(0)
    model = cut_bert(bert(num_hidden_layers=2), (3, 1))
    folder = tmp_path_factory.mktemp("uneven") / "onnx"
    # An unpadded batch of one, without token types: the graph must have three inputs and open axes.
    return model, export_onnx(model, folder, batch=text_batch(1, 9), processor=Processor())


@pytest.mark.parametrize(("shape", "padded"), [((1, 2), False), ((3, 17), True), ((9, 32), True)])
def test_uneven_bert_equals_torch_with_mask_and_token_types_at_every_shape(uneven_export, shape, padded):
    model, exported = uneven_export
    batch = text_batch(*shape, padding=padded, labels=False)
    batch["token_type_ids"] = (batch["input_ids"] % 2).contiguous()
    with torch.no_grad():
        want = model(**batch).logits.numpy()
    np.testing.assert_allclose(run_onnx(exported.file, batch)["logits"], want, atol=1e-5)


def test_names_axes_fusions_and_files_are_optimums(uneven_export):
    model, exported = uneven_export
    graph = onnx.load(exported.file).graph
    axes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.input}
    assert axes == {name: ["batch_size", "sequence_length"] for name in TEXT}
    logits = graph.output[0]
    assert [d.dim_param or d.dim_value for d in logits.type.tensor_type.shape.dim] == ["batch_size", 3]
    assert (exported.inputs, exported.outputs) == (TEXT, ("logits",))
    attention = [n for n in graph.node if n.op_type == "MultiHeadAttention"]
    assert [a.i for n in attention for a in n.attribute if a.name == "num_heads"] == [3, 1]
    assert exported.facts["fused"] == {"MultiHeadAttention": 2, "BiasGelu": 2}
    # Weights are constants of their own, which quantisers find: for query, key, value, output and two layers each.
    constants = {value.name for value in graph.initializer}
    assert sum(n.op_type == "MatMul" and n.input[1] in constants for n in graph.node) == 6 * 2
    assert exported.bytes == exported.file.stat().st_size
    weight_bytes = sum(p.numel() * 4 for p in model.parameters())
    assert weight_bytes < exported.bytes < 1.5 * weight_bytes + 50_000
    assert sorted(path.name for path in exported.folder.iterdir()) == [
        "config.json",
        "model.onnx",
        "tokenizer_config.json",
    ]
    settings = json.loads((exported.folder / "tokenizer_config.json").read_text())
    assert settings == {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<a>"]}
    config = json.loads((exported.folder / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert config["dtype"] == "float32"
    assert b"site-packages" not in exported.file.read_bytes()
    assert exported.checked_on == "onnxruntime-cpu"
    assert exported.max_abs < 1e-5


def test_vit_has_an_open_batch_and_fuses_without_a_sound_and_with_its_weights_beside(tmp_path, monkeypatch, capfd):
    def talk(*args, original=export_module.trace_encoder):
        print("noise")
        warnings.warn("noise", stacklevel=1)
        return original(*args)

    monkeypatch.setattr(export_module, "trace_encoder", talk)
    monkeypatch.setattr(export_module, "INSIDE_BYTES", 1000)
    model = vit(num_hidden_layers=1)
    exported = export_onnx(model, tmp_path / "onnx", batch={"pixel_values": torch.randn(1, 3, 16, 16)})
    assert capfd.readouterr() == ("", "")
    assert (exported.inputs, exported.outputs) == (("pixel_values",), ("logits",))
    assert exported.facts["fused"]["MultiHeadAttention"] == 1
    weights = exported.folder / "model.onnx_data"
    assert weights.stat().st_size > sum(p.numel() * 4 for p in model.parameters()) * 0.8
    assert exported.bytes == weights.stat().st_size + exported.file.stat().st_size
    batch = {"pixel_values": torch.randn(16, 3, 16, 16)}
    with torch.no_grad():
        want = model(**batch).logits.numpy()
    np.testing.assert_allclose(run_onnx(exported.file, batch)["logits"], want, atol=1e-5)


def fake_trace(model, sample, provider):
    """A graph that returns one label too many, with none of the cost of tracing."""
    graph = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]>
        g (int64[batch, sequence] input_ids) => (float[batch, sequence] logits)
        { logits = Cast<to=1>(input_ids) }"""
    )
    return onnx_ir.from_proto(graph)


def test_a_graph_that_differs_is_a_parity_error_and_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "trace_encoder", fake_trace)
    with pytest.raises(ParityError, match=r"torch has logits \(2, 3\), it has logits \(2, 9\)"):
        export_onnx(bert(num_hidden_layers=1), tmp_path / "onnx", batch=BATCH)
    assert list(tmp_path.iterdir()) == []


def test_exporter_failure_gives_its_reason_in_one_line(tmp_path, monkeypatch):
    from transformers.exporters import OnnxExporter

    def refuse(*args, **kwargs):
        raise RuntimeError("wrapped") from ValueError("\nunsupported operator\nlong trace")

    monkeypatch.setattr(OnnxExporter, "export", refuse)
    with pytest.raises(ExportError, match=r"Bert.*ValueError: unsupported operator long trace$") as caught:
        export_onnx(bert(num_hidden_layers=1), tmp_path / "onnx", batch=BATCH)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x", "axis batch_size of 'x' must be dynamic, and the trace fixed it at 2"),
        ("mask", "must have the input 'mask', and the exporter dropped it"),
    ],
)
def test_a_fixed_axis_and_a_dropped_input_are_export_errors(name, said):
    graph = """<ir_version: 10, opset_import: ["" : 20]> g (float[2, s] x) => (float[2, s] y) { y = Identity(x) }"""
    with pytest.raises(ExportError, match=said):
        name_axes(onnx_ir.from_proto(onnx.parser.parse_model(graph)), {name: {0: "batch_size"}})


def test_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "trace_encoder", None)
    model, batch = bert(num_hidden_layers=1), BATCH
    with pytest.raises(OutputExistsError, match="must not exist"):
        export_onnx(model, tmp_path, batch=batch)
    with pytest.raises(RequestError, match=r"in export provider: .*got 'tpu' .and 1 more."):
        export_onnx(model, tmp_path / "onnx", batch=batch, provider="tpu", dtype="int4")
    with pytest.raises(DataError, match="must have 'input_ids', got text"):
        export_onnx(model, tmp_path / "onnx", batch={"text": "a"})
    t5 = T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=10))
    with pytest.raises(UnsupportedModelError, match="encoder-decoders cannot be pruned, got a T5ForCond"):
        export_onnx(t5, tmp_path / "onnx", batch=batch)
    mamba = MambaForCausalLM(MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=10))
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM keeps a recurrent state"):
        export_onnx(mamba, tmp_path / "onnx", batch=batch)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for use in (
        lambda: export_onnx(model, tmp_path / "onnx", batch=batch),
        lambda: load_runtime("onnxruntime-cpu", "m"),
    ):
        with pytest.raises(MissingRuntimeError, match=r'pip install "hies-export\[cpu\]"'):
            use()
    assert list(tmp_path.iterdir()) == []


def test_compare_outputs():
    want = {"logits": np.array([[1.0, -30.0]], dtype=np.float32), "present": np.array([0.5], dtype=np.float32)}
    near, far = ({**want, "logits": want["logits"] + apart} for apart in (0.02, 0.05))
    lost = {**want, "logits": np.full((1, 2), np.nan, dtype=np.float32)}
    # Of every output by itself: what is little beside the logits may be much in the cache.
    cache = {**want, "present": want["present"] + 0.02}
    assert compare_outputs(want, near, label="x", dtype="float32") == pytest.approx(0.02, rel=1e-2)
    with pytest.raises(ParityError, match=r"logits .* within 0\.001 .* on x differ by 0\.05, where .* is 30; nothing"):
        compare_outputs(want, far, label="x", dtype="float32")
    with pytest.raises(ParityError, match=r"logits .* within 0\.02 .* differ by inf"):
        compare_outputs(want, lost, label="x", dtype="float16")
    assert compare_outputs(want, far, label="x", dtype="float16") == pytest.approx(0.05, rel=1e-2)
    with pytest.raises(ParityError, match=r"present .* differ by 0\.02, where the largest number is 0\.5"):
        compare_outputs(want, cache, label="x", dtype="float32")


def test_new_folder_does_not_overwrite_one_made_meanwhile(tmp_path):
    target = tmp_path / "a" / "b"

    def race():
        with new_folder(target):
            target.mkdir()

    with pytest.raises(OutputExistsError, match="must not exist, but"):
        race()
    assert [path.name for path in target.parent.iterdir()] == ["b"]


def test_quiet_swallows_everything_and_puts_it_back(capfd, caplog):
    level = logging.root.manager.disable
    with quiet():
        print("a")
        print("b", file=sys.stderr)
        logging.getLogger("noise").error("c")
        warnings.warn("d", stacklevel=1)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert logging.root.manager.disable == level
    with quiet(verbose=True):
        print("e")
    logging.getLogger("noise").error("f")
    assert capfd.readouterr().out == "e\n"
    assert [record.message for record in caplog.records] == ["f"]
    with pytest.raises(UserWarning, match="g"):
        warnings.warn("g", stacklevel=1)
