"""Exports in 8 bits: files by Optimum's names, near the float32 graph, refused where there is no such form."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from support.exported import run_onnx, wide_bert
from support.models import bert as tiny_bert
from support.models import cut_bert, llava
from support.runs import hies
from transformers import LlamaConfig, LlamaForCausalLM

from hies_export import OutputExistsError, ParityError, RequestError, load, prune
from hies_export.calibrate.moments import Spread
from hies_export.forms.formats import Export, Given, add_graphs, export_options
from hies_export.forms.onnx import export as export_module
from hies_export.forms.onnx import quantize as quantize_module
from hies_export.forms.onnx.export import export_onnx
from hies_export.forms.onnx.generator import OnnxGenerator
from hies_export.forms.onnx.quantize import (
    Quantize,
    check_quantizable,
    export_in_bits,
    largest_difference,
    quantize_onnx,
)
from hies_export.forms.runtimes.bits import quantize_blocks
from hies_export.forms.runtimes.ort import OnnxRuntime
from hies_export.model.tokens import synthetic_batch

Batch = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(4, 12, dtype=torch.int64)
    mask[1, 7:] = 0
    return {"input_ids": torch.randint(0, 200, (4, 12), generator=generator), "attention_mask": mask}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier whose logits of two rows of noise are 0, as those of a good one nearly are."""
    folder, model = tmp_path_factory.mktemp("dense") / "model", wide_bert()
    with torch.no_grad():
        one, other = model.bert(**synthetic_batch(model, batch=2, sequence=16)).pooler_output
        weight, apart = model.classifier.weight, torch.nn.functional.normalize(one - other, dim=0)
        weight -= weight @ apart[:, None] * apart
        model.classifier.bias.copy_(-weight @ one)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, batch: Batch) -> Export:
    """The layers of its attention, cut to 5 of 8 heads, are too small for 8 bits: 128 x 80."""
    return export_onnx(cut_bert(wide_bert(), [5]), tmp_path_factory.mktemp("float") / "onnx", batch=batch)


def test_a_folder_has_optimums_names_and_gives_nearly_the_same(exported: Export, batch: Batch, tmp_path: Path) -> None:
    before = exported.file.read_bytes()
    found = quantize_onnx(exported, tmp_path / "onnx-int8", batch=batch)
    assert exported.file.read_bytes() == before
    assert {path.name for path in found.folder.iterdir()} == {"model_quantized.onnx", "ort_config.json", "config.json"}
    assert found.bytes == found.file.stat().st_size < 0.65 * exported.bytes
    settings = json.loads((found.folder / "ort_config.json").read_text())["quantization"]
    assert (settings["per_channel"], settings["weights_dtype"], settings["is_static"]) == (True, "QInt8", False)
    # Both layers of the block and the pooler are in 8 bits, the classifier is not.
    assert (found.how.quantize, found.facts["layers"]) == ("int8", {"int8": 3, "float32": 5})
    kinds = Counter(node.op_type for node in onnx.load(found.file).graph.node)
    assert (kinds["MatMulIntegerToFloat"], kinds["MatMul"] + kinds["Gemm"]) == (3, 5)
    one, two = run_onnx(exported.file, batch)["logits"], run_onnx(found.file, batch)["logits"]
    assert found.max_abs == pytest.approx(np.abs(one - two).max(), rel=1e-3)
    assert 0 < np.sqrt(np.mean((one - two) ** 2)) < 0.1 * np.sqrt(np.mean(one**2))


def test_the_command_and_the_result_of_prune_write_the_same_folder(
    checkpoint: Path, batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hies("export", checkpoint, "--quantize", "int8", "-o", tmp_path / "one", "--json") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["layers"] == {"int8": 7, "float32": 1}
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "one" / "model_quantized.onnx").graph.node)
    assert kinds["MatMulIntegerToFloat"] == 7
    assert hies("bench", tmp_path / "one", tmp_path / "one", "--shape", "1x8", "--repeats", "2") == 0
    result = prune(load(checkpoint), [batch] * 4, budget={"heads": 0.25}, min_heads=4, criterion="l2")
    assert result.export_onnx(tmp_path / "two", quantize="int8").how.quantize == "int8"
    assert {path.name for path in (tmp_path / "one").iterdir()} == {path.name for path in (tmp_path / "two").iterdir()}


def test_what_the_command_refuses(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gptq = shutil.copytree(checkpoint, tmp_path / "gptq")
    config = json.loads((checkpoint / "config.json").read_text())
    fields = config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (gptq / "config.json").write_text(json.dumps(fields))
    for source, options, said in (
        (checkpoint, ["--provider", "cuda"], "quantize: int8 needs provider: cpu and dtype: float32"),
        (
            checkpoint,
            ["--format", "gguf"],
            "quantize belongs to format: onnx, got int8 for gguf; set dtype: q8_0",
        ),
        (checkpoint, ["--text", "sentence"], "--text names columns of --data, which is missing"),
        (gptq, [], "gptq is quantised; give the checkpoint that it was made from"),
    ):
        assert hies("export", source, "--quantize", "int8", *options, "-o", tmp_path / "out") == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_weights_beside_the_float32_graph_come_along(
    exported: Export, batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float32 graph of more than 2 GB has them there, and one in 8 bits may have them or not."""
    folder = shutil.copytree(exported.folder, tmp_path / "onnx")
    monkeypatch.setattr(export_module, "INSIDE_BYTES", 1000)
    export_module.save_program(onnx_ir.load(exported.file), folder / "model.onnx")
    assert (folder / "model.onnx_data").is_file()
    beside = replace(exported, folder=folder, file=folder / "model.onnx")
    found = []
    for limit in (1000, 2**31):
        monkeypatch.setattr(export_module, "INSIDE_BYTES", limit)
        found.append(quantize_onnx(beside, tmp_path / f"int8-{limit}", batch=batch))
    shutil.rmtree(folder)
    for one, count in zip(found, (2, 1), strict=True):
        assert np.isfinite(run_onnx(one.file, batch)["logits"]).all()
        files = [path for path in one.folder.iterdir() if path.name.startswith("model")]
        assert len(files) == count
        assert one.bytes == sum(path.stat().st_size for path in files)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Export:
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=1, vocab_size=32, initializer_range=0.05)).eval()
    return export_onnx(
        model, tmp_path_factory.mktemp("decoder") / "onnx", batch={"input_ids": torch.randint(5, 30, (2, 9))}
    )


@pytest.mark.parametrize(
    ("bits", "operator", "apart"), [("int8", "MatMulIntegerToFloat", 0.05), ("int4", "MatMulNBits", 0.25)]
)
def test_a_decoder_generates_in_few_bits(
    bits: Quantize, operator: str, apart: float, decoder: Export, tmp_path: Path
) -> None:
    prompt = {"input_ids": torch.arange(18).reshape(2, 9) % 25 + 5, "attention_mask": torch.ones(2, 9).long()}
    found = quantize_onnx(decoder, tmp_path / bits, batch=prompt, quantize=bits)
    kinds = Counter(node.op_type for node in onnx.load(found.file).graph.node)
    # Of the layer: query, key and value in one, output, gate with up, and down. The head of 32 tokens is small.
    assert found.facts["layers"] == {"int8": 0, bits: 4, "float32": 1}
    assert kinds[operator] == 4
    assert found.bytes < 0.5 * decoder.bytes
    one, two = (OnnxRuntime(export.folder, threads=1).compute(prompt)["logits"] for export in (decoder, found))
    assert np.square(two - one).mean() < apart**2 * np.square(one).mean()
    assert OnnxGenerator.from_folder(found.folder).generate(**prompt, max_new_tokens=4).shape == (2, 13)


def stored(node: onnx.NodeProto, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrix (inputs, outputs) and the bias that a MatMulNBits stands for, weight by weight."""
    sizes = {attribute.name: attribute.i for attribute in node.attribute}
    packed, scales, zeros = (arrays[name] for name in node.input[1:4])
    matrix = np.zeros((sizes["K"], sizes["N"]), dtype=np.float32)
    for output in range(sizes["N"]):
        for row in range(sizes["K"]):
            block, place = divmod(row, 32)
            level = packed[output, block, place // 2] >> 4 * (place % 2) & 15
            zero = zeros[output, block // 2] >> 4 * (block % 2) & 15
            matrix[row, output] = (int(level) - int(zero)) * scales[output, block]
    return matrix, arrays[node.input[5]]


def test_rows_round_4_bits_so_that_outputs_change_less(decoder: Export, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(5, 30, (4, 16), generator=generator)} for _ in range(8)]
    mask = torch.ones(4, 16, dtype=torch.int64)
    mask[0, :5] = 0
    rows[0]["attention_mask"] = mask
    prompt = {"input_ids": torch.randint(5, 30, (4, 16), generator=generator)}
    nearest = quantize_onnx(decoder, tmp_path / "nearest", batch=prompt, quantize="int4")
    found = quantize_onnx(decoder, tmp_path / "found", batch=prompt, quantize="int4", rows=rows)
    assert (found.facts["layers"], nearest.facts["layers"]) == ({"int8": 0, "int4": 4, "float32": 1},) * 2
    assert nearest.bytes < found.bytes < 1.1 * nearest.bytes
    one, two, three = (
        OnnxRuntime(export.folder, threads=1).compute(prompt)["logits"] for export in (decoder, nearest, found)
    )
    assert np.square(three - one).mean() < 0.7 * np.square(two - one).mean()


def test_a_bias_keeps_the_mean_output_of_a_layer() -> None:
    matrix = np.random.default_rng(0).normal(size=(48, 6)).astype(np.float32)
    x = np.random.default_rng(1).normal(loc=1, size=(500, 48))
    *arrays, bias = quantize_blocks(matrix, Spread.of(torch.from_numpy(x), centred=True))
    sizes = [onnx.helper.make_attribute(name, size) for name, size in (("K", 48), ("N", 6))]
    node = onnx.NodeProto(input=["x", "w", "s", "z", "", "b"], attribute=sizes)
    rounded, _ = stored(node, dict(zip("wszb", (*arrays, bias), strict=True)))
    np.testing.assert_allclose((x @ rounded + bias).mean(0), (x @ matrix).mean(0), rtol=1e-5, atol=1e-5)
    assert np.abs((x @ rounded - x @ matrix).mean(0)).max() > 1e-3


def test_what_has_no_form_in_fewer_bits_is_refused(exported: Export, batch: Batch, tmp_path: Path) -> None:
    too_small = "needs a linear layer of 16,384 weights or more, but all are smaller"
    for model, bits, said in (
        (tiny_bert(), "int8", too_small),
        (wide_bert(), "int4", "int4 is for models that generate.* got an encoder; use int8"),
        (llava(), "int8", "needs a single graph, got a vision-language model; leave it out"),
    ):
        with pytest.raises(RequestError, match=said):
            export_in_bits(model, tmp_path / "out", export_options(quantize=bits), Given(batch))
    with pytest.raises(RequestError, match=too_small):
        check_quantizable(tiny_bert(vocab_size=2**14), "int8")
    for provider, dtype in (("cuda", "float32"), ("cpu", "float16")):
        elsewhere = replace(exported, how=export_options(provider=provider, dtype=dtype))
        with pytest.raises(RequestError, match=f"provider: cpu and dtype: float32, got {provider} and {dtype}"):
            quantize_onnx(elsewhere, tmp_path / "out", batch=batch)
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_the_export_itself_and_a_graph_too_far_away_are_refused(
    exported: Export, batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = replace(exported, folder=shutil.copytree(exported.folder, tmp_path / "onnx"))
    with pytest.raises(OutputExistsError, match="onnx"):
        quantize_onnx(exported, copied.folder, batch=batch)
    with pytest.raises(
        OutputExistsError, match="must not delete what is read, but the output folder .* inside the export"
    ):
        quantize_onnx(copied, copied.folder, batch=batch, overwrite=True)
    monkeypatch.setattr(quantize_module, "FEWER_BITS", 1e-4)
    with pytest.raises(ParityError, match="logits are .* away from .* nothing was kept"):
        quantize_onnx(exported, tmp_path / "out", batch=batch)
    assert not (tmp_path / "out").exists()


def test_graphs_are_compared_at_real_tokens() -> None:
    batch = {"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
    dense, other = ({"start_logits": np.ones((2, 3), np.float32)} for _ in range(2))
    other["start_logits"][0, 2] = 9.0
    assert largest_difference(dense, other, batch) == 0
    for wrong in (9.0, np.nan):
        other["start_logits"][1] = wrong
        with pytest.raises(ParityError, match="its start_logits are"):
            largest_difference(dense, other, batch)


def test_beside_a_checkpoint_weights_keep_their_name_and_the_graph_has_those_of_the_hub(tmp_path: Path) -> None:
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
