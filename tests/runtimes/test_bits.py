"""Graphs in 8 and 4 bits: equal to loops over tokens, channels and blocks by hand; attention by a faster operator."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from hies_export.errors import ExportError
from hies_export.forms.runtimes.base import load_runtime
from hies_export.forms.runtimes.bits import quantize_columns, quantize_graph

WIDTH, HIDDEN, VOCABULARY = 128, 160, 200
SHAPES = {
    **{"table": (VOCABULARY, WIDTH), "up": (WIDTH, HIDDEN), "down": (WIDTH, HIDDEN)},
    **{"bias": (WIDTH,), "head": (WIDTH, 3)},
}
WEIGHTS = {
    name: np.random.default_rng(number).normal(size=shape) for number, (name, shape) in enumerate(SHAPES.items())
}
# The layer in the middle is a Gemm of rows, as exporters write it: transposed, and with a bias.
NODES = [
    helper.make_node("Gather", ["table", "input_ids"], ["embedded"], name="embed"),
    helper.make_node("MatMul", ["embedded", "up"], ["wide"], name="up"),
    helper.make_node("Reshape", ["wide", "rows"], ["wide_rows"], name="flatten"),
    helper.make_node("Gemm", ["wide_rows", "down", "bias"], ["narrow"], name="down", transB=1),
    helper.make_node("MatMul", ["narrow", "head"], ["logits"], name="head"),
]


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(9)


def graph() -> onnx.ModelProto:
    constants = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in WEIGHTS.items()]
    constants.append(numpy_helper.from_array(np.array([-1, HIDDEN]), "rows"))
    made = helper.make_graph(
        NODES,
        "g",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", 3])],
        constants,
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def quantised() -> tuple[onnx.ModelProto, dict[str, int]]:
    program = onnx_ir.from_proto(graph())
    layers = quantize_graph(program.graph)
    return onnx_ir.to_proto(program), layers


def run(model: onnx.ModelProto, ids: np.ndarray) -> np.ndarray:
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"input_ids": ids})[0]


def rounded(vectors: np.ndarray) -> np.ndarray:
    """Return vectors, each as whole multiples of a 127th of its largest element."""
    out = np.empty_like(vectors)
    for i, vector in enumerate(vectors):
        step = np.float32(max(abs(vector)) / 127)
        out[i] = np.rint(vector / step) * step
    return out


def rounded_weights(matrix: np.ndarray) -> np.ndarray:
    """Return a matrix (inputs, outputs), each column as multiples of a 127th of its largest element or sum of two.

    The sums are of the inputs 0 and 1, 2 and 3, and so on.
    """
    out = np.empty_like(matrix)
    for j, column in enumerate(matrix.T):
        sums = [abs(column[i : i + 2].sum()) for i in range(0, len(column), 2)]
        step = np.float32(max(*sums, *abs(column)) / 127)
        out[:, j] = np.rint(column / step) * step
    return out


def by_hand(ids: np.ndarray) -> np.ndarray:
    weights = {name: value.astype(np.float32) for name, value in WEIGHTS.items()}
    tokens = rounded(weights["table"])[ids.flatten()]
    wide = rounded(tokens) @ rounded_weights(weights["up"])
    narrow = rounded(wide) @ rounded_weights(weights["down"].T) + weights["bias"]
    return narrow @ weights["head"]


@pytest.mark.parametrize("factor", ["alpha", "beta"])
def test_a_layer_that_scales_its_product_or_its_bias_stays(random: np.random.Generator, factor: str) -> None:
    given = graph()
    next(node for node in given.graph.node if node.op_type == "Gemm").attribute.append(
        helper.make_attribute(factor, 0.5)
    )
    program = onnx_ir.from_proto(given)
    assert quantize_graph(program.graph) == {"int8": 1, "float32": 1}
    ids = random.integers(0, VOCABULARY, (2, 5))
    one, two = run(given, ids), run(onnx_ir.to_proto(program), ids)
    assert np.abs(one - two).max() < 0.05 * np.abs(one).max()


def test_a_graph_computes_what_rounding_by_hand_gives_and_keeps_no_large_weight_in_float(
    random: np.random.Generator,
) -> None:
    ids = random.integers(0, VOCABULARY, (4, 6))
    model, layers = quantised()
    assert layers == {"int8": 2, "float32": 1}
    expected = by_hand(ids)
    # A tie between two integers may fall to the other side: a 127th of a token's largest element.
    np.testing.assert_allclose(run(model, ids), expected, rtol=0, atol=2e-3 * np.abs(expected).max())
    exact = run(graph(), ids)
    error = np.sqrt(np.mean((expected - exact) ** 2) / np.mean(exact**2))
    assert 0.001 < error < 0.02
    kinds = Counter(node.op_type for node in model.graph.node)
    assert (kinds["MatMulIntegerToFloat"], kinds["Gemm"], kinds["MatMul"]) == (2, 0, 1)
    floats = [value.name for value in model.graph.initializer if value.data_type == 1 and np.prod(value.dims) > 1000]
    assert floats == []
    assert len(model.SerializeToString()) < 0.32 * len(graph().SerializeToString())
    onnx.checker.check_model(model)


@pytest.mark.parametrize("inputs", [64, 65])
def test_no_sum_of_products_is_cut_off_on_any_processor(random: np.random.Generator, inputs: int) -> None:
    """Without VNNI, x86 adds the products of two neighbouring inputs in 16 bits."""
    weights, _ = quantize_columns(random.normal(size=(inputs, 50)).astype(np.float32), paired=True)
    weights = weights.astype(np.int64)
    assert np.abs(weights).max(axis=0).mean() > 90
    for i in range(0, inputs - 1, 2):
        assert (255 * np.abs(weights[i] + weights[i + 1])).max() <= 2**15 - 1
    made = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w", "zero"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, ["rows", inputs])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, ["rows", 50])],
        [numpy_helper.from_array(weights.astype(np.int8), "w"), numpy_helper.from_array(np.uint8(128), "zero")],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for rows in (1, 9):
        read = random.choice([0, 1, 255], (rows, inputs)).astype(np.uint8)
        np.testing.assert_array_equal(session.run(None, {"x": read})[0], (read.astype(np.int64) - 128) @ weights)


def test_layers_that_read_as_many_tokens_share_their_zero_points(random: np.random.Generator) -> None:
    weights = [random.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(3)]
    nodes = [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"], name=f"l{i}") for i in range(2)]
    # The rows of the last layer are others.
    nodes.append(helper.make_node("ReduceMean", ["x2", "axis"], ["mean"], name="mean", keepdims=0))
    nodes.append(helper.make_node("MatMul", ["mean", "w2"], ["y"], name="l2"))
    given = helper.make_tensor_value_info("x0", TensorProto.FLOAT, ["batch", "sequence", WIDTH])
    found = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTH])
    constants = [numpy_helper.from_array(weight, f"w{i}") for i, weight in enumerate(weights)]
    constants.append(numpy_helper.from_array(np.array([1]), "axis"))
    model = helper.make_model(
        helper.make_graph(nodes, "g", [given], [found], constants),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    program = onnx_ir.from_proto(onnx.shape_inference.infer_shapes(model))
    quantize_graph(program.graph)
    quantised = onnx_ir.to_proto(program)
    kinds = Counter(node.op_type for node in quantised.graph.node)
    assert (kinds["MatMulIntegerToFloat"], kinds["Expand"]) == (3, 2)
    session = onnxruntime.InferenceSession(quantised.SerializeToString())
    for shape in ((1, 3, WIDTH), (4, 2, WIDTH)):
        states = random.normal(size=shape).astype(np.float32)
        expected = states.reshape(-1, WIDTH)
        for weight in weights[:2]:
            expected = rounded(expected) @ rounded_weights(weight)
        expected = rounded(expected.reshape(shape).mean(axis=1)) @ rounded_weights(weights[2])
        np.testing.assert_allclose(
            session.run(None, {"x0": states})[0], expected, rtol=0, atol=5e-3 * np.abs(expected).max()
        )


def test_zeros_stay_zeros() -> None:
    program = onnx_ir.from_proto(graph())
    for name in ("table", "bias"):
        program.graph.initializers[name].const_value = onnx_ir.tensor(np.zeros_like(WEIGHTS[name], dtype=np.float32))
    quantize_graph(program.graph)
    np.testing.assert_array_equal(run(onnx_ir.to_proto(program), np.zeros((1, 2), np.int64)), np.zeros((2, 3)))


@pytest.mark.parametrize("make", [graph, lambda: quantised()[0]], ids=["float32", "int8"])
def test_the_runtime_takes_both_and_computes_in_8_bits(random: np.random.Generator, make, tmp_path: Path) -> None:
    onnx.save(make(), tmp_path / "model.onnx")
    ids = random.integers(0, VOCABULARY, (2, 3))
    runtime = load_runtime("onnxruntime-cpu-int8", tmp_path)
    found = runtime.fetch(runtime.run(runtime.prepare({"input_ids": ids})))["logits"]
    expected = run(quantised()[0], ids)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("make", [lambda weights: weights.astype(np.float16), lambda weights: weights[:, :100]])
def test_the_runtime_refuses_a_graph_without_layers_to_quantise(make, tmp_path: Path) -> None:
    given = graph()
    for tensor in given.graph.initializer:
        if tensor.name in ("up", "down"):
            tensor.CopyFrom(numpy_helper.from_array(make(numpy_helper.to_array(tensor)), tensor.name))
    onnx.save(given, tmp_path / "model.onnx")
    with pytest.raises(ExportError, match=r"16,384 weights or more in float32, and model.onnx has none.* use onnxru"):
        load_runtime("onnxruntime-cpu-int8", tmp_path)


def in_blocks(matrix: np.ndarray) -> np.ndarray:
    """Return a matrix (inputs, outputs), each 32 inputs of an output as one of 16 numbers evenly spread over them."""
    out = matrix.astype(np.float32)
    for column in range(matrix.shape[1]):
        for start in range(0, matrix.shape[0], 32):
            block = out[start : start + 32, column]
            low, high = min(0, block.min()), max(0, block.max())
            step = np.float32((high - low) / 15)
            zero = np.rint(-low / step)
            out[start : start + 32, column] = (np.clip(np.rint(block / step) + zero, 0, 15) - zero) * step
    return out


def test_four_bits_are_what_rounding_blocks_by_hand_gives(random: np.random.Generator) -> None:
    ids, program = random.integers(0, VOCABULARY, (4, 6)), onnx_ir.from_proto(graph())
    assert quantize_graph(program.graph, bits=4) == {"int4": 2, "int8": 0, "float32": 1}
    model = onnx_ir.to_proto(program)
    assert Counter(node.op_type for node in model.graph.node)["MatMulNBits"] == 2
    weights = {name: value.astype(np.float32) for name, value in WEIGHTS.items()}
    wide = rounded(weights["table"])[ids.flatten()] @ in_blocks(weights["up"])
    expected = (wide @ in_blocks(weights["down"].T) + weights["bias"]) @ weights["head"]
    # The kernel also rounds what it reads, to 8 bits.
    error = np.sqrt(np.mean((run(model, ids) - expected) ** 2) / np.mean(expected**2))
    assert error < 0.015
    assert np.sqrt(np.mean((run(graph(), ids) - expected) ** 2) / np.mean(expected**2)) > 4 * error
    assert len(model.SerializeToString()) < 0.25 * len(graph().SerializeToString())


def attention(scale: float | None, masked: bool) -> onnx.ModelProto:
    """Four heads of 32 on products of the input with constants, as exports have them, with a bias and a mask."""
    random = np.random.default_rng(8)
    constants = {name: random.normal(size=(WIDTH, WIDTH)) / 8 for name in ("q", "k", "v")} | {
        "b": random.normal(size=3 * WIDTH)
    }
    nodes = [helper.make_node("MatMul", ["x", name], [f"x{name}"], name=name) for name in ("q", "k", "v")]
    inputs = ["xq", "xk", "xv", "b", *(["", "mask"] if masked else [])]
    options = {"num_heads": 4} | ({"scale": scale} if scale else {})
    nodes.append(helper.make_node("MultiHeadAttention", inputs, ["y"], name="a", domain="com.microsoft", **options))
    nodes.append(helper.make_node("Gelu", ["y"], ["g"], name="g"))
    nodes.append(helper.make_node("MatMul", ["g", "q"], ["z"], name="o"))
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", "s", WIDTH])]
    given += [helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["b", 1, "s", "s"])] if masked else []
    found = [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["b", "s", WIDTH])]
    initial = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()]
    made = helper.make_graph(nodes, "g", given, found, initial)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize(("scale", "masked"), [(None, False), (0.1, True)])
def test_attention_is_the_same_by_the_faster_operator(
    random: np.random.Generator, scale: float | None, masked: bool
) -> None:
    model = attention(scale, masked)
    feed = {"x": random.normal(size=(2, 5, WIDTH)).astype(np.float32)}
    if masked:
        feed["mask"] = (
            np.where(np.arange(5) < np.array([5, 3])[:, None], 0, -1e9).astype(np.float32)[:, None, None].repeat(5, 2)
        )
    outputs = {}
    for name, smallest in (("float32", None), ("attention alone", 10**9), ("int8", 1)):
        program = onnx_ir.from_proto(model)
        if smallest:
            quantize_graph(program.graph, smallest=smallest)
            assert {"Attention"} <= {node.op_type for node in program.graph}
        outputs[name] = onnxruntime.InferenceSession(onnx_ir.to_proto(program).SerializeToString()).run(None, feed)[0]
    scale_of = np.abs(outputs["float32"]).max()
    np.testing.assert_allclose(outputs["attention alone"], outputs["float32"], rtol=0, atol=1e-5 * scale_of)
    error = np.sqrt(np.mean((outputs["int8"] - outputs["float32"]) ** 2) / np.mean(outputs["float32"] ** 2))
    assert 0 < error < 0.03
