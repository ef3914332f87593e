"""Graphs of cut models that are made from those of other cuts: node by node those of a new trace, or not kept."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import pytest
import torch
from support.models import bert, causal_lm, shake, text_batch, vit
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from hies_export import export_onnx, find_modules, prune_units
from hies_export.forms.form import predictor
from hies_export.forms.formats import Exporter, Given
from hies_export.forms.onnx import export as export_module
from hies_export.forms.traces import Traces
from hies_export.recipe.sections import ExportSection

Batch = dict[str, Tensor]
Learned = tuple[PreTrainedModel, Batch, Traces]
TRACERS = {name: getattr(export_module, name) for name in ("trace_encoder", "trace_decoder")}


def gpt2() -> PreTrainedModel:
    """Return a decoder whose query, key and value are one matrix."""
    tokens = {"vocab_size": 32, "bos_token_id": 2, "eos_token_id": 3}
    return shake(GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=1, n_head=6, n_positions=64, **tokens)))


def llama() -> PreTrainedModel:
    """Return a decoder of four key/value heads, each with two query heads."""
    return causal_lm(num_attention_heads=8, num_key_value_heads=4)


def texts() -> Batch:
    return text_batch(2, 9, labels=False)


def images() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


def prompts() -> Batch:
    return {"input_ids": torch.randint(5, 32, (2, 9))}


def cuts(model: PreTrainedModel, batch: Batch, count: int) -> list[PreTrainedModel]:
    """Return cuts of all modules to different numbers of heads and neurons, with weights that a refit might give."""
    modules = find_modules(model, batch, kinds=("attention", "mlp"))
    generator, made = torch.Generator().manual_seed(0), []
    for _ in range(count):
        kept = {}
        for module in modules:
            groups = torch.randperm(module.groups, generator=generator)
            stay = groups[: int(torch.randint(1, module.groups, (1,), generator=generator))].tolist()
            kept[module.name] = module.kept(u for u in range(module.units) if u // module.group_size in stay)
        slim = prune_units(model, kept, modules)
        with torch.no_grad():
            for name, parameter in slim.named_parameters():
                if any(name.startswith(module.name) for module in modules) and "norm" not in name.lower():
                    parameter.mul_(1 + torch.rand((), generator=generator) / 100)
        made.append(slim)
    return made


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Remember which models are traced, by their classes."""
    seen: list[str] = []

    def remembering(trace: Callable[..., Any]) -> Callable[..., Any]:
        return lambda model, *args: (seen.append(type(model).__name__), trace(model, *args))[1]

    for name, trace in TRACERS.items():
        monkeypatch.setattr(export_module, name, remembering(trace))
    return seen


def described(file: Path) -> tuple[list[Any], list[str]]:
    """Return the nodes of a graph, each with attributes, constants and shapes, and its inputs and outputs."""
    graph = onnx.load(file).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    shapes = {value.name: str(value.type) for value in graph.value_info}
    nodes = [
        (
            *(node.domain, node.op_type, sorted(str(attribute) for attribute in node.attribute)),
            [(constants[name].shape, constants[name].tobytes()) for name in node.input if name in constants],
            [shapes.get(name) for name in node.output],
        )
        for node in graph.node
    ]
    return nodes, [str(value) for value in (*graph.input, *graph.output)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "sample"),
    [
        pytest.param(partial(vit, num_hidden_layers=1), images, marks=pytest.mark.exports),
        pytest.param(llama, prompts, marks=pytest.mark.exports),
        (gpt2, prompts),
    ],
    ids=["vit", "llama", "gpt2"],
)
def test_the_graph_is_that_of_a_new_trace(
    make: Callable[[], PreTrainedModel], sample: Callable[[], Batch], tmp_path: Path, traced: list[str]
) -> None:
    torch.manual_seed(0)
    model, batch, traces = make(), sample(), Traces()
    first, second = cuts(model, batch, 2)
    for name, slim in {"dense": model, "first": first, "second": second}.items():
        resized = export_onnx(slim, tmp_path / name, batch=batch, traces=traces)
    assert len(traced) == 2
    fresh = export_onnx(second, tmp_path / "fresh", batch=batch)
    assert len(traced) == 3
    assert described(resized.file) == described(fresh.file)
    assert (resized.facts["fused"], resized.outputs, resized.max_abs) == (
        fresh.facts["fused"],
        fresh.outputs,
        fresh.max_abs,
    )


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """A model, a batch, and what the graphs of the model and of one cut of it say."""
    torch.manual_seed(0)
    # Wide enough for layers in 8 bits.
    model, batch, traces = bert(num_hidden_layers=1, hidden_size=192, intermediate_size=192), texts(), Traces()
    with torch.no_grad():  # the graph has a constant zero, which is not of the only bias with a zero
        for name, parameter in model.named_parameters():
            parameter += 0.1 * name.endswith("bias")
        model.bert.encoder.layer[0].attention.self.key.bias[5] = 0
    for number, slim in enumerate([model, *cuts(model, batch, 1)]):
        export_onnx(slim, tmp_path_factory.mktemp("learned") / f"{number}", batch=batch, traces=traces)
    return model, batch, traces


@pytest.mark.parametrize(("runtime", "bits"), [("onnxruntime-cpu", "float32"), ("onnxruntime-cpu-int8", None)])
def test_a_search_does_not_trace_its_further_cuts(
    learned: Learned, runtime: str, bits: str | None, traced: list[str]
) -> None:
    model, batch, traces = learned
    predict = predictor(Exporter(ExportSection(), Given(batch, traces=traces)), runtime, bits)
    for slim in (model, cuts(model, batch, 2)[1]):
        with torch.no_grad():
            want = slim(**batch).logits
        torch.testing.assert_close(
            predict(slim, [batch]).values.float(), want, atol=0.2 if bits is None else 1e-5, rtol=0
        )
    assert traced == []


def test_a_wrong_graph_is_not_kept(
    learned: Learned, tmp_path: Path, traced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, traces = learned
    slim, right = cuts(model, batch, 2)[1], Traces.resized
    resized = export_onnx(slim, tmp_path / "resized", batch=batch, traces=traces)
    assert traced == []

    def wrong(self: Traces, key: Any, model: PreTrainedModel) -> Any:
        program = right(self, key, model)
        attention = next(node for node in program.graph if node.op_type == "MultiHeadAttention")
        attention.inputs[0].producer().inputs[1].const_value = broken(attention.inputs[0].producer().inputs[1])
        return program

    def broken(weight: Any) -> Any:
        return onnx_ir.tensor(weight.const_value.numpy()[::-1].copy())

    monkeypatch.setattr(Traces, "resized", wrong)
    exported = export_onnx(slim, tmp_path / "onnx", batch=batch, traces=traces)
    assert traced == ["BertForSequenceClassification"]
    assert exported.max_abs < 1e-5
    # The right one is that of the trace.
    assert described(resized.file) == described(exported.file)
    assert (resized.facts["fused"], resized.outputs) == (exported.facts["fused"], exported.outputs)


def test_a_graph_of_the_same_operators_with_other_inputs_is_none_to_learn_from() -> None:
    layer, traces = torch.nn.Linear(3, 2), Traces()
    layer.load_state_dict({"weight": torch.arange(6.0).view(2, 3), "bias": torch.tensor([7.0, 8.0])})
    for inputs in ("x, weight, bias", "x, weight"):
        text = f"""<ir_version: 10, opset_import: ["" : 20]> g (float[1, 3] x) => (float[1, 2] y)
        <float[2, 3] weight = {{0, 1, 2, 3, 4, 5}}, float[2] bias = {{7, 8}}> {{ y = Gemm<transB = 1>({inputs}) }}"""
        traces.add("key", layer, onnx_ir.from_proto(onnx.parser.parse_model(text)))
    assert [len(node.inputs) for node in traces.resized("key", layer).graph] == [3]
