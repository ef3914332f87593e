"""Graphs in the folder of a checkpoint, under the names of the Hub's tools."""

from pathlib import Path

from hies_export.forms.formats import Export, add_graphs, export_options


def test_weights_beside_a_graph_keep_their_name_and_leave_the_graph_alone(tmp_path: Path) -> None:
    source, checkpoint = tmp_path / "onnx-int8", tmp_path / "slim"
    source.mkdir()
    checkpoint.mkdir()
    (source / "model_quantized.onnx").write_text("graph")
    (source / "model_quantized.onnx_data").write_text("weights")
    file = source / "model_quantized.onnx"
    export = Export("onnx", source, file, (file.name,), 5, export_options(quantize="int8"))
    add_graphs([export], checkpoint)
    assert {file.name: file.read_text() for file in (checkpoint / "onnx").iterdir()} == {
        "model_quantized.onnx": "graph",
        "model_qint8_avx512_vnni.onnx": "graph",
        "model_quantized.onnx_data": "weights",
    }
    assert (source / "model_quantized.onnx").read_text() == "graph"
