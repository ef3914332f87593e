"""Decoders in ONNX: run by hand and compared with one forward pass in torch; their generator and the command."""

import copy
import gc
import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from support.cuts import random_cut
from support.exported import TEXT, endless_llama, padded_prompts, prompt_tokenizer
from support.families import architecture, decoder
from support.models import bert, causal_lm
from support.runs import hies
from transformers import CLIPConfig, CLIPModel, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hies_export.data.processors import load_processor
from hies_export.errors import DataError, ParityError, RecipeError, RequestError
from hies_export.forms.formats import Export
from hies_export.forms.onnx import export as export_module
from hies_export.forms.onnx import parity
from hies_export.forms.onnx.export import check_traceable, export_onnx
from hies_export.forms.onnx.generator import OnnxGenerator, _continue, encode_prompts, generate_text
from hies_export.forms.onnx.parity import _logits_and_cache, check_parity, compare_outputs, without_padding
from hies_export.forms.onnx.rewrites import share_tied_weights
from hies_export.tasks import TASKS


def positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


Uneven = tuple[PreTrainedModel, Export]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Uneven:
    """A LLaMA with other numbers of heads in every layer, and its export beside its checkpoint, `model`."""
    torch.manual_seed(0)
    slim, _, _ = random_cut(endless_llama(eos_token_id=2), {"input_ids": torch.randint(3, 99, (2, 8))})
    folder, tokenizer = tmp_path_factory.mktemp("uneven"), prompt_tokenizer()
    slim.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    # An unpadded prompt of one row: the graph must read the mask and have open axes all the same.
    batch = {"input_ids": torch.randint(3, 99, (1, 7))}
    return slim, export_onnx(slim, folder / "onnx", batch=batch, processor=tokenizer)


def cache_heads(model: PreTrainedModel) -> list[int]:
    return [layer.self_attn.k_proj.out_features // 8 for layer in model.model.layers]


@pytest.mark.parametrize(("rows", "pieces"), [(1, (12,)), (4, (5, 4, 1, 2)), (2, (1,) * 12)], ids=str)
def test_an_uneven_decoder_equals_torch_in_any_pieces(uneven: Uneven, rows: int, pieces: tuple[int, ...]) -> None:
    model, exported = uneven
    batch = padded_prompts(rows, 12)
    mask, where = batch["attention_mask"], positions(batch["attention_mask"])
    with torch.no_grad():
        want = model(**batch, position_ids=where, use_cache=True)
    session = onnxruntime.InferenceSession(str(exported.file), providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_outputs()]
    cache = {
        f"past_key_values.{layer}.{kind}": np.zeros((rows, heads, 0, 8), dtype=np.float32)
        for layer, heads in enumerate(cache_heads(model))
        for kind in ("key", "value")
    }
    done, logits = 0, []
    for length in pieces:
        columns = slice(done, done + length)
        feed = {"input_ids": batch["input_ids"][:, columns].numpy(), "position_ids": where[:, columns].numpy()}
        done += length
        outputs = dict(
            zip(names, session.run(None, feed | {"attention_mask": mask[:, :done].numpy()} | cache), strict=True)
        )
        logits.append(outputs.pop("logits"))
        cache = {name.replace("present", "past_key_values"): array for name, array in outputs.items()}
    real = mask.bool().numpy()
    np.testing.assert_allclose(np.concatenate(logits, 1)[real], want.logits.numpy()[real], atol=1e-4)
    for layer, kept in enumerate(want.cache.layers):
        for kind, tensor in (("key", kept.keys), ("value", kept.values)):
            got = cache[f"past_key_values.{layer}.{kind}"]
            assert got.shape == tensor.shape
            np.testing.assert_allclose(
                got.transpose(0, 2, 1, 3)[real], tensor.numpy().transpose(0, 2, 1, 3)[real], atol=1e-4
            )


def test_names_axes_sizes_and_files_are_optimums(uneven: Uneven) -> None:
    model, exported = uneven
    heads = cache_heads(model)
    assert len(set(heads)) > 1  # or the test would prove nothing
    proto = onnx.load(exported.file)
    axes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*proto.graph.input, *proto.graph.output)
    }
    batch, length, past = "batch_size", "sequence_length", "past_sequence_length"
    wanted: dict[str, list[object]] = {name: [batch, length] for name in ("input_ids", "position_ids")}
    wanted |= {"attention_mask": [batch, f"{past} + {length}"], "logits": [batch, length, 100]}
    for layer in range(2):
        for kind in ("key", "value"):
            wanted[f"past_key_values.{layer}.{kind}"] = [batch, heads[layer], past, 8]
            wanted[f"present.{layer}.{kind}"] = [batch, heads[layer], f"{past} + {length}", 8]
    assert axes == wanted
    assert set(exported.inputs + exported.outputs) == set(wanted)
    assert exported.facts["fused"] == {"RotaryEmbedding": 4, "SkipSimplifiedLayerNormalization": 4}
    assert exported.files == ("model.onnx",)
    files = sorted(path.name for path in exported.folder.iterdir())
    settings = ["config.json", "generation_config.json"]
    assert files == [*settings, "model.onnx", "tokenizer.json", "tokenizer_config.json"]
    weight_bytes = sum(p.numel() * 4 for p in model.parameters())
    assert weight_bytes < exported.bytes < weight_bytes + 40_000  # every weight once
    assert b"site-packages" not in exported.file.read_bytes()
    assert exported.max_abs < 1e-4


SINGLE = TEXT | {"num_hidden_layers": 1}
ALONE = {"num_hidden_layers": 1, "eos_token_id": None}  # every head has keys of its own
DECODERS = {
    "biases, norms and width of heads of their own": decoder("Qwen3", **SINGLE, head_dim=16, attention_bias=True),
    "soft cap and window": decoder("Gemma2", **SINGLE, head_dim=8, sliding_window=4, attn_logit_softcapping=0.5),
    "fused projections": decoder("Phi3", **SINGLE),
    "Conv1D, tied embeddings, few positions": architecture("GPT2", "LMHeadModel", **ALONE, max_position_embeddings=30),
    "learned positions with an offset": architecture("OPT", "ForCausalLM", **ALONE, word_embed_proj_dim=48, ffn_dim=32),
}
# What cuts masks, and what has other weights and positions; `-m exports` takes all.
DEFAULT = {"soft cap and window", "Conv1D, tied embeddings, few positions"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.exports) for name in DECODERS]
)
def test_decoders_generate_as_in_torch(name: str, tmp_path: Path) -> None:
    model = DECODERS[name]()
    # As long as GPT-2's positions allow: what the check appends must still fit.
    exported = export_onnx(model, tmp_path / "onnx", batch={"input_ids": torch.randint(3, 99, (2, 30))})
    assert exported.max_abs < 1e-4
    weight_bytes = sum(p.numel() * 4 for p in model.parameters())
    assert exported.bytes < weight_bytes + 40_000  # tied weights once, too
    batch = padded_prompts()
    want = model.generate(**batch, max_new_tokens=8, do_sample=False)
    got = OnnxGenerator.from_folder(tmp_path / "onnx").generate(**batch, max_new_tokens=8)
    assert got.tolist() == want.tolist()


def test_in_half_precision_for_cuda_of_a_training_model_left_as_found(tmp_path: Path) -> None:
    model = endless_llama(num_hidden_layers=1, tie_word_embeddings=True).train()
    model.config.auto_map = {"AutoModelForCausalLM": "modeling_hies.LlamaForCausalLM"}
    before, config, attributes = copy.deepcopy(model.state_dict()), model.config.to_dict(), set(vars(model))
    exported = export_onnx(model, tmp_path / "onnx", batch=padded_prompts(), provider="cuda", dtype="float16")
    assert (model.training, model.config.to_dict(), set(vars(model))) == (True, config, attributes)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert exported.facts["fused"]["MultiHeadAttention"] == 1
    assert exported.checked_on == "onnxruntime-cpu"
    assert 1e-5 < exported.max_abs < 5e-2
    assert exported.bytes < sum(p.numel() * 2 for p in model.parameters()) + 40_000  # tied weights once
    types = {value.name: value.type.tensor_type.elem_type for value in onnx.load(exported.file).graph.input}
    assert types["past_key_values.0.key"] == onnx.TensorProto.FLOAT16
    written = json.loads((exported.folder / "config.json").read_text())
    assert (written["dtype"], "auto_map" in written) == ("float16", False)


def test_a_decoder_that_differs_is_a_parity_error_and_nothing_is_kept(
    uneven: Uneven, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, exported = uneven
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.mul_(1.1)
    monkeypatch.setattr(export_module, "trace_decoder", lambda *_: onnx_ir.load(exported.file))
    with pytest.raises(ParityError, match="on the given batch differ by .*; nothing was kept"):
        export_onnx(other, tmp_path / "onnx", batch=padded_prompts())
    assert list(tmp_path.iterdir()) == []


def test_every_row_is_compared_and_of_a_long_text_the_beginning(uneven: Uneven) -> None:
    model, exported = uneven
    batch = {"input_ids": torch.randint(3, 50, (5, 8)), "attention_mask": torch.ones(5, 8, dtype=torch.int64)}
    batch["input_ids"][4, 2] = 77
    assert check_parity(exported.folder, lambda: model, {"x": batch}, "float32", generates=True) < 1e-4
    other = copy.deepcopy(model)
    other.model.embed_tokens = copy.deepcopy(model.model.embed_tokens)  # no longer that of the head
    other.model.embed_tokens.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    with torch.no_grad():
        other.model.embed_tokens.weight[77] += 1
    with pytest.raises(ParityError, match="on x"):
        check_parity(exported.folder, lambda: other, {"x": batch}, "float32", generates=True)
    for made, positions in ((causal_lm(max_position_embeddings=64), 57), (causal_lm(max_position_embeddings=999), 128)):
        kind, _, batches = export_module._samples(made, {"input_ids": torch.ones(3, 500, dtype=torch.int64)})
        assert (kind, batches["the given batch"]["input_ids"].shape) == ("decoder", (2, positions + 4))
    text = {"input_ids": torch.ones(3, 500, dtype=torch.int64), "pixel_values": torch.ones(3, 3, 500, 500)}
    with torch.device("meta"):
        clip = CLIPModel(CLIPConfig())
    _, _, batches = export_module._samples(clip, text)
    assert [tensor.shape for tensor in batches["the given batch"].values()] == [(3, 128), (3, 3, 500, 500)]


def test_no_copy_of_the_weights_is_in_memory_beside_the_graph(
    uneven: Uneven, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of a model in half precision is traced from one copy in float32, and compared with another."""
    copies, held, load = [], [], OnnxGenerator.from_folder

    def copied(model: PreTrainedModel) -> PreTrainedModel:
        found = float32_copy(model)
        copies.append(weakref.ref(found))
        return found

    def from_folder(*args: Any, **options: Any) -> OnnxGenerator:
        gc.collect()
        alive = [found for copy in copies if (found := copy()) is not None]
        held.append(sum(parameter.numel() for found in alive for parameter in found.parameters()))
        return load(*args, **options)

    float32_copy = export_module._float32_copy
    monkeypatch.setattr(export_module, "_float32_copy", copied)
    monkeypatch.setattr(export_module, "_traceable_copy", lambda reference, *_: reference)
    monkeypatch.setattr(export_module, "trace_decoder", lambda *_: onnx_ir.load(uneven[1].file))
    monkeypatch.setattr(parity, "compare_outputs", lambda *_, **__: 0.0)
    monkeypatch.setattr(OnnxGenerator, "from_folder", from_folder)
    export_onnx(copy.deepcopy(uneven[0]).bfloat16(), tmp_path / "onnx", batch=padded_prompts())
    assert (len(copies), held) == (2, [0])


def test_padding_is_not_compared_and_of_a_window_the_end() -> None:
    batch = {"attention_mask": torch.tensor([[0, 1, 0], [1, 1, 1]])}
    want = {"logits": np.zeros((2, 3, 4), np.float32), "present.0.key": np.ones((2, 1, 2, 4), np.float32)}
    got = {"logits": want["logits"].copy(), "present.0.key": np.ones((2, 1, 3, 4), np.float32)}
    got["logits"][0, 0] = np.nan
    got["present.0.key"][:, :, 0] = got["present.0.key"][0, :, 2] = 7

    def compare(got: dict[str, np.ndarray]) -> float:
        both = (without_padding(outputs, batch) for outputs in _logits_and_cache(want, got))
        return compare_outputs(*both, label="x", dtype="float32")

    assert compare(got) == 0
    got["logits"][1, 0] = 1
    with pytest.raises(ParityError, match="differ by 1"):
        compare(got)
    short = {"logits": want["logits"], "present.0.key": got["present.0.key"][:, :, :1]}
    with pytest.raises(ParityError, match=r"torch has .*\(2, 1, 2, 4\).* it has .*\(2, 1, 1, 4\)"):
        compare(short)


def test_an_output_layer_tied_to_the_embeddings_reads_them() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
    g (int64[b, s] ids, float[7, 4] table, float[4, 7] head, float[4, 7] head_again, float[4, 7] other)
      => (float[b, s, 7] logits) {
      states = Gather(table, ids)
      tied = MatMul(states, head)
      scaled = com.microsoft.FusedMatMul<alpha = 0.5>(states, head_again)
      untied = MatMul(states, other)
      both = Add(tied, scaled)
      logits = Add(both, untied)
    }"""
    random = np.random.default_rng(0)
    table, other = (random.normal(size=shape).astype(np.float32) for shape in ((7, 4), (4, 7)))
    weights = {"table": table, "head": table.T.copy(), "head_again": table.T.copy(), "other": other}
    program = onnx_ir.from_proto(onnx.parser.parse_model(text))
    for name, array in weights.items():
        value = next(v for node in program.graph for v in node.inputs if v is not None and v.name == name)
        program.graph.inputs.remove(value)
        value.const_value = onnx_ir.tensor(array)
        program.graph.register_initializer(value)
    share_tied_weights(program)
    assert [node.op_type for node in program.graph] == ["Gather", "FusedMatMul", "FusedMatMul", "MatMul", "Add", "Add"]
    assert set(program.graph.initializers) == {"table", "other"}
    ids = np.array([[1, 6], [0, 3]])
    session = onnxruntime.InferenceSession(onnx_ir.to_proto(program).SerializeToString())
    np.testing.assert_allclose(session.run(None, {"ids": ids})[0], table[ids] @ (1.5 * table.T + other), atol=1e-5)


def tokenizer_in(folder: Path) -> PreTrainedTokenizerBase:
    return load_processor(folder, task=TASKS["text-generation"], for_prompts=True)


def test_a_row_that_ends_goes_on_with_padding(uneven: Uneven, tmp_path: Path) -> None:
    model, exported = uneven
    batch = padded_prompts()
    free = model.generate(**batch, max_new_tokens=10, do_sample=False, eos_token_id=[98])
    # What one row says third ends it; the others say it at another time, or never.
    ends = [int(free[0, batch["input_ids"].shape[1] + 2])]
    want = model.generate(**batch, max_new_tokens=10, do_sample=False, eos_token_id=ends)
    assert (want[0, -3:] == 0).all()
    generator = OnnxGenerator.from_folder(exported.folder)
    assert generator.eos_token_ids == (2,)
    generator = replace(generator, eos_token_ids=tuple(ends))
    assert generator.generate(**batch, max_new_tokens=10).tolist() == want.tolist()
    # Without a token for padding, what ends a text pads it.
    checkpoint = shutil.copytree(exported.folder.parent / "model", tmp_path / "model")
    GenerationConfig(eos_token_id=ends).save_pretrained(checkpoint)
    new = slice(batch["input_ids"].shape[1], None)
    want[:, new] = want[:, new].where(want[:, new] != 0, ends[0])
    assert _continue(checkpoint, batch, 10).tolist() == want.tolist()
    one = {name: tensor[:1] for name, tensor in batch.items()}
    stopped = generator.generate(**one, max_new_tokens=10)
    new = free[0, batch["input_ids"].shape[1] :].tolist()
    assert stopped[0, batch["input_ids"].shape[1] :].tolist() == new[: new.index(ends[0]) + 1]


def test_wrong_prompts(uneven: Uneven) -> None:
    folder = uneven[1].folder
    with pytest.raises(DataError, match=r"64 positions, got \d and 64"):
        generate_text(folder, ["good"], max_new_tokens=64)
    with pytest.raises(RecipeError, match="max_new_tokens must be at least 1, got 0"):
        generate_text(folder, ["good"], max_new_tokens=0)


def test_an_encoder_does_not_generate(tmp_path: Path) -> None:
    encoder = tmp_path / "encoder"
    bert().config.save_pretrained(encoder)
    graph = """<ir_version: 10, opset_import: ["" : 20]>
    g (int64[b, s] input_ids, int64[b, s] attention_mask) => (float[b, s] logits) { logits = Cast<to=1>(input_ids) }"""
    onnx.save(onnx.parser.parse_model(graph), encoder / "model.onnx")
    with pytest.raises(RequestError, match="takes input_ids, .*: an encoder does not generate"):
        OnnxGenerator.from_folder(encoder)


def test_the_command_continues_prompts_as_the_checkpoint_does(
    uneven: Uneven, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = uneven[1].folder
    options = ["--prompt", "good bad fine", "--prompt", "great", "--max-new-tokens", "6", "--json"]
    texts = []
    for source in (folder.parent / "model", folder):
        assert hies("generate", source, *options) == 0
        results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
        assert [row["prompt"] for row in results] == ["good bad fine", "great"]
        texts.append([row["text"] for row in results])
    assert texts[0] == texts[1]
    # Alone and unpadded, a prompt goes on as it does in a batch.
    assert generate_text(folder, ["great"], max_new_tokens=6) == texts[1][1:]


def test_prompts_that_cannot_be_read(uneven: Uneven, tmp_path: Path) -> None:
    tokenizer = tokenizer_in(uneven[1].folder.parent / "model")
    with pytest.raises(DataError, match="at least one prompt is needed"):
        encode_prompts(tokenizer, [])
    with pytest.raises(DataError, match="at least one token, got ''"):
        encode_prompts(tokenizer, ["good", ""])
    with pytest.raises(DataError, match="one for all prompts or one for each of 3, got 2"):
        encode_prompts(tokenizer, ["good"] * 3, [tmp_path, tmp_path])
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"must be a file that Pillow decodes, and .*broken\.png is not"):
        encode_prompts(tokenizer, ["good"], [tmp_path / "broken.png"])
    with pytest.raises(DataError, match="prompts need a tokenizer, but none could be loaded"):
        tokenizer_in(tmp_path)
    bert(num_hidden_layers=1).save_pretrained(tmp_path / "encoder")
    prompt_tokenizer().save_pretrained(tmp_path / "encoder")
    with pytest.raises(RequestError, match="must generate text to be prompted, and BertForSequenceClassification"):
        generate_text(tmp_path / "encoder", ["good"])


def test_a_tokenizer_without_a_pad_token_pads_with_its_end(tmp_path: Path) -> None:
    prompt_tokenizer(pad_token=None).save_pretrained(tmp_path)
    batch = encode_prompts(tokenizer_in(tmp_path), ["good bad fine", "great"])
    assert batch["input_ids"].tolist() == [[4, 5, 6], [2, 2, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


PROMPTS = {"input_ids": torch.arange(3, 19).view(2, 8)}


def test_a_model_without_an_onnx_form_is_refused_by_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = causal_lm(rope_parameters=rope)
    with pytest.raises(RequestError, match="prune it by the command prune, which needs no export: .*GuardOnData"):
        check_traceable(model, PROMPTS)
    # A type that is known to pass is not traced.
    monkeypatch.setattr(export_module, "_trace", None)
    check_traceable(causal_lm(), PROMPTS)
