"""Encoders in 8 bits for OpenVINO: near the float32 graph, calibrated on rows without padding, refused where unfit."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir
import pytest
import torch
from support.exported import wide_bert
from support.models import cut_bert
from support.models import vit as tiny_vit
from transformers import BertForSequenceClassification

from hies_export import MissingRuntimeError, OutputExistsError, RequestError, quantize_openvino
from hies_export.forms.formats import Export, Exporter, Given, export_options, options_for_runtime
from hies_export.forms.onnx.export import export_onnx
from hies_export.forms.openvino import export as export_module
from hies_export.forms.openvino.export import export_openvino, readers, set_apart, single_rows
from hies_export.forms.runtimes.base import load_runtime
from hies_export.forms.runtimes.ort import OnnxRuntime
from hies_export.recipe.sections import ExportSection

Batch = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def openvino():
    pytest.importorskip("nncf", reason="the extra openvino is not installed")
    return pytest.importorskip("openvino", reason="the extra openvino is not installed")


@pytest.fixture(scope="module")
def rows() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)

    def batch() -> Batch:
        mask = torch.ones(4, 12, dtype=torch.int64)
        mask[1, 7:] = 0
        return {"input_ids": torch.randint(0, 200, (4, 12), generator=generator), "attention_mask": mask}

    return [batch() for _ in range(6)]


def encoder() -> BertForSequenceClassification:
    return wide_bert(num_hidden_layers=2)


def loud_encoder() -> BertForSequenceClassification:
    """One neuron of each layer reaches some thirty times what the others reach, always."""
    model = encoder()
    for layer in model.bert.encoder.layer:
        with torch.no_grad():
            layer.intermediate.dense.bias[5] = 150.0
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, rows: list[Batch]) -> Export:
    return export_onnx(cut_bert(encoder(), (8, 5)), tmp_path_factory.mktemp("float") / "onnx", batch=rows[0])


def relative_error(wanted: np.ndarray, found: np.ndarray) -> float:
    return float(np.sqrt(np.mean((wanted - found) ** 2) / np.mean(wanted**2)))


def test_an_uneven_model_is_near_its_float32_graph_in_8_bits(
    openvino, exported: Export, rows: list[Batch], tmp_path: Path
) -> None:
    before = exported.file.read_bytes()
    found = quantize_openvino(exported, tmp_path / "int8", rows=rows)
    assert exported.file.read_bytes() == before
    assert {path.name for path in found.folder.iterdir()} >= {"openvino_model.xml", "openvino_model.bin", "config.json"}
    assert not list(found.folder.glob("*.onnx"))
    files = [path for path in found.folder.iterdir() if path.stem == "openvino_model"]
    assert found.bytes == sum(path.stat().st_size for path in files) < 0.65 * exported.bytes
    # Six layers in each of two blocks, pooler and classifier.
    assert found.facts["layers"] == {"int8": 14}
    settings = json.loads((found.folder / "openvino_config.json").read_text())
    assert (settings["quantization"]["rows"], settings["layers"]) == (24, {"int8": 14})
    assert found.facts["float_neurons"] == settings["quantization"]["float_neurons"]
    # OpenVINO by itself, as its own users run it.
    graph = openvino.Core().read_model(str(found.file))
    kinds = Counter(node.get_type_name() for node in graph.get_ops())
    stored = [node for node in graph.get_ops() if node.get_type_name() == "Constant"]
    # Six in each block of attention and neurons, less what queries, keys and values share; pooler and classifier.
    assert kinds["FakeQuantize"] == 10
    # And the three tables of embeddings.
    assert sum(node.get_element_type() == openvino.Type.i8 and len(node.shape) == 2 for node in stored) == 14 + 3
    given = {**rows[1], "token_type_ids": torch.zeros_like(rows[1]["input_ids"])}
    compiled = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    own = compiled({name: value.numpy() for name, value in given.items()})["logits"]
    wanted = OnnxRuntime(exported.file, threads=1).compute(rows[1])["logits"]
    assert 0 < relative_error(wanted, own) < 0.1
    assert found.max_abs > 0
    # Loaded again, twice, on the runtime of the package.
    loaded = [load_runtime("openvino", source, threads=1) for source in (found.folder, found.file)]
    assert [runtime.dtype for runtime in loaded] == ["int8", "int8"]
    one, two = (runtime.compute(rows[1])["logits"] for runtime in loaded)
    assert relative_error(one, two) < 1e-3
    has_bfloat16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    beside = loaded[0]._model.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    assert beside == ("bf16" if has_bfloat16 else "f32")
    assert relative_error(wanted, one) < 0.1


def test_calibration_reads_every_row_without_its_padding(rows: list[Batch]) -> None:
    names = ("input_ids", "attention_mask", "token_type_ids")
    found = list(single_rows(names, rows[:2]))
    assert [feed["input_ids"].shape for feed in found] == [(1, 12), (1, 7), (1, 12), (1, 12)] * 2
    np.testing.assert_array_equal(found[5]["input_ids"][0], rows[1]["input_ids"][1, :7].numpy())
    assert all(feed["attention_mask"].all() and not feed["token_type_ids"].any() for feed in found)
    assert all(set(feed) == set(names) for feed in found)
    # Padded on the left, and images, which have none.
    left = {name: value.flip(1) for name, value in rows[0].items()}
    np.testing.assert_array_equal(
        [*single_rows(names[:2], [left])][1]["input_ids"][0], left["input_ids"][1, 5:].numpy()
    )
    (one, two) = single_rows(("pixel_values",), [{"pixel_values": torch.arange(2.0).view(2, 1, 1, 1)}])
    assert (one["pixel_values"].item(), two["pixel_values"].item()) == (0, 1)


def test_loud_neurons_are_computed_apart_and_cost_the_others_no_levels(
    rows: list[Batch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = export_onnx(loud_encoder(), tmp_path / "onnx", batch=rows[0])
    program = onnx_ir.load(exported.file)
    names = list(readers(program.graph))
    # The second layers of both blocks; the classifier reads the pooler's tanh.
    assert len(names) == 3
    largest = {name: np.ones(192 if number < 2 else 128) for number, name in enumerate(names)}
    for name in names[:2]:
        largest[name][[5, 60]] = 40, 2
    assert len(set_apart(program, largest)) == 2
    onnx_ir.save(program, tmp_path / "apart.onnx")
    shapes = Counter(
        tuple(value.const_value.shape) for value in program.graph.initializers.values() if value.const_value is not None
    )
    assert (shapes[128, 176], shapes[176, 128], shapes[128, 16], shapes[16, 128], shapes[128, 192]) == (2, 2, 2, 2, 0)
    wanted = OnnxRuntime(exported.file, threads=1).compute(rows[1])["logits"]
    found = OnnxRuntime(tmp_path / "apart.onnx", threads=1).compute(rows[1])["logits"]
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    errors, layers = {}, {}
    for what in ("apart", "together"):
        if what == "together":
            monkeypatch.setattr(export_module, "set_apart", lambda program, largest: set())
        made = quantize_openvino(exported, tmp_path / what, rows=rows)
        layers[what] = made.facts["layers"]
        errors[what] = relative_error(
            wanted, load_runtime("openvino", made.folder, threads=1).compute(rows[1])["logits"]
        )
    assert (layers["apart"], layers["together"]) == ({"int8": 16, "float32": 2}, {"int8": 14})
    assert errors["apart"] < errors["together"]


def test_an_exporter_makes_it_from_a_model_as_from_its_onnx_export(rows: list[Batch], tmp_path: Path) -> None:
    options = options_for_runtime(ExportSection(), "openvino", "int8")
    assert options == ExportSection(format="openvino", quantize="int8")
    assert options.unquantized == ExportSection()
    exporter = Exporter(ExportSection(), Given(rows[0], rows=rows))
    one = exporter.export(encoder(), tmp_path / "one", options)
    two = exporter.quantize(exporter.export(encoder(), tmp_path / "onnx", exporter.options), tmp_path / "two", options)
    results = [load_runtime("openvino", made.folder, threads=1).compute(rows[0])["logits"] for made in (one, two)]
    assert relative_error(*results) < 1e-3


def test_images(tmp_path: Path) -> None:
    model = tiny_vit()
    pixels = torch.randn(4, 3, *[model.config.image_size] * 2)
    batch = {"pixel_values": pixels}
    made = export_openvino(model, tmp_path / "int8", ExportSection(), Given(batch, rows=[batch]))
    with torch.no_grad():
        wanted = model(pixel_values=pixels).logits.numpy()
    found = load_runtime("openvino", made.folder, threads=1).compute({"pixel_values": pixels})["logits"]
    assert relative_error(wanted, found) < 0.1


def test_what_it_refuses(exported: Export, rows: list[Batch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="int8 on OpenVINO needs rows to calibrate on, got none; give some 300"):
        quantize_openvino(exported, tmp_path / "int8", rows=[])
    decoder = replace(exported, inputs=("input_ids", "past_key_values.0.key"))
    with pytest.raises(RequestError, match="int8 on OpenVINO is for encoders, got a model that generates"):
        quantize_openvino(decoder, tmp_path / "int8", rows=rows)
    half = replace(exported, how=export_options(dtype="float16"))
    with pytest.raises(RequestError, match="provider: cpu and dtype: float32, got cpu and float16"):
        quantize_openvino(half, tmp_path / "int8", rows=rows)
    copied = shutil.copytree(exported.folder, tmp_path / "onnx")
    with pytest.raises(OutputExistsError, match="the output folder must not exist"):
        quantize_openvino(exported, copied, rows=rows)
    monkeypatch.setattr("hies_export.errors.find_spec", lambda name: None if name == "nncf" else object())
    with pytest.raises(
        MissingRuntimeError, match=r'int8 on OpenVINO needs NNCF, .* pip install "hies-export\[openvino\]"'
    ):
        quantize_openvino(exported, tmp_path / "int8", rows=rows)
    assert not (tmp_path / "int8").exists()
