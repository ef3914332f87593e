"""What is in a GGUF file: every tensor, read back with the gguf package, against torch's; sizes, types, tokenizer.

The folder is not called gguf: `tests` is on the path, where it would stand for the package that is not installed.
"""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gguf import CASES, VOCABULARY, byte_level_tokenizer, cut, llama, qwen2, sentence_piece_tokenizer
from transformers import PreTrainedModel

from hies_export import NonFiniteError, export_gguf
from hies_export.forms.gguf import export
from hies_export.forms.gguf.tensors import round_rows

gguf = pytest.importorskip("gguf", reason='no gguf: pip install "hies-export[gguf]"')

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@pytest.fixture(autouse=True)
def _without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is here holds without llama.cpp, and takes less time."""
    monkeypatch.setattr(export, "is_installed", lambda: False)


def written(model: PreTrainedModel, folder: Path, tokenizer: Any = None, **options: Any) -> Any:
    exported = export_gguf(model, folder, tokenizer=tokenizer or sentence_piece_tokenizer(), **options)
    return gguf.GGUFReader(exported.file)


def field(reader: Any, name: str) -> Any:
    value = reader.get_field(name)
    return None if value is None else value.contents()


def rows_of_torch(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of a head's rows one by one: its row 2i is torch's i, its 2i + 1 torch's i + half."""
    half = len(rows) // heads // 2
    back = np.empty_like(rows)
    for head in range(heads):
        for i in range(half):
            for part in range(2):
                back[2 * half * head + half * part + i] = rows[2 * half * head + 2 * i + part]
    return back


@pytest.mark.parametrize("case", CASES)
def test_the_file_has_every_tensor_of_the_model_and_its_sizes(case: str, tmp_path: Path) -> None:
    make, architecture = CASES[case]
    model = make()
    reader = written(model, tmp_path / "out")
    assert field(reader, "general.architecture") == architecture
    wanted = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    layers = model.model.layers
    heads = [layer.self_attn.q_proj.out_features // layer.self_attn.head_dim for layer in layers]
    groups = [layer.self_attn.k_proj.out_features // layer.self_attn.head_dim for layer in layers]
    for tensor in reader.tensors:
        first, *middle, last = tensor.name.split(".")
        if first == "blk":
            number, part = int(middle[0]), middle[1]
            name, counts = f"model.layers.{number}.{NAMES[part]}.{last}", {"attn_q": heads, "attn_k": groups}
            data = np.array(tensor.data)
            if part in counts and architecture in ("llama", "deci"):
                data = rows_of_torch(data, counts[part][number])
        else:
            name, data = f"{OUTER[first]}.{last}", tensor.data
        np.testing.assert_array_equal(data, wanted.pop(name), err_msg=tensor.name)
    assert wanted == {}
    neurons = [layer.mlp.gate_proj.out_features for layer in layers]
    names = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    sizes = [heads, groups, neurons]
    uneven = any(len(set(of)) > 1 for of in sizes)
    assert uneven == (architecture == "deci")
    assert [field(reader, f"{architecture}.{name}") for name in names] == (sizes if uneven else [of[0] for of in sizes])
    widths = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    assert {field(reader, f"{architecture}.{name}") for name in widths} == {layers[0].self_attn.head_dim}
    assert field(reader, f"{architecture}.block_count") == len(layers)
    assert field(reader, f"{architecture}.embedding_length") == 64


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float16", "F16"), ("bfloat16", "BF16"), ("q8_0", "Q8_0"), ("q4_0", "Q4_0")]
)
def test_matrices_are_stored_in_the_dtype_and_norms_in_float32(dtype: str, kind: str, tmp_path: Path) -> None:
    model = cut(llama())
    exported = export_gguf(model, tmp_path / "out", tokenizer=sentence_piece_tokenizer(), dtype=dtype)
    reader = gguf.GGUFReader(exported.file)
    down = {f"blk.{i}.ffn_down.weight": layer.mlp.down_proj.weight for i, layer in enumerate(model.model.layers)}
    for tensor in reader.tensors:
        stored = gguf.GGMLQuantizationType(tensor.tensor_type).name
        divisible = tensor.shape[0] % 32 == 0
        outer = kind == "Q4_0" and tensor.name in ("token_embd.weight", "output.weight")
        wanted = "F32" if len(tensor.shape) == 1 else "Q8_0" if outer else kind
        assert stored == (wanted if divisible or wanted[0] != "Q" else "F16")
        if tensor.name in down:
            back = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
            weight = down[tensor.name].detach()
            # A rounding of 11, 8 or 7 bits, of the number itself or of the largest of its block.
            bits = {"F16": 11, "BF16": 8, "Q8_0": 7, "Q4_0": 3}[stored]
            assert float((back - weight).abs().max()) <= float(weight.abs().max()) * 2.0**-bits
    assert field(reader, "general.file_type") == {"float16": 1, "bfloat16": 32, "q8_0": 7, "q4_0": 2}[dtype]
    if kind[0] == "Q":
        assert exported.facts["types"]["F16"]


def test_rows_round_4_bits_so_that_layers_change_less(tmp_path: Path) -> None:
    model = llama()
    generator = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(3, 30, (4, 16), generator=generator)} for _ in range(4)]
    nearest, found = (
        {tensor.name: tensor for tensor in written(model, tmp_path / name, dtype="q4_0", rows=rows).tensors}
        for name, rows in (("a", ()), ("b", batches))
    )
    assert [tensor.tensor_type for tensor in nearest.values()] == [tensor.tensor_type for tensor in found.values()]
    inputs: list[torch.Tensor] = []
    hook = model.model.layers[1].mlp.gate_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    hook.remove()
    x, weight = torch.cat(inputs).flatten(0, 1), model.model.layers[1].mlp.gate_proj.weight.detach()
    changes = []
    for tensors in (nearest, found):
        tensor = tensors["blk.1.ffn_gate.weight"]
        back = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        changes.append(float((x @ (back - weight).T).square().mean()))
    assert changes[1] < 0.8 * changes[0]


def test_rounded_rows_are_what_rounding_them_again_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((6, 64), (300, 64)))
    weight[2, :32] = 0
    mixed = x @ torch.randn(64, 64, generator=generator, dtype=torch.float64)
    found = round_rows(weight, mixed.T @ mixed).float().numpy()
    q4_0 = gguf.GGMLQuantizationType.Q4_0
    again = gguf.quants.dequantize(gguf.quants.quantize(found, q4_0), q4_0)
    np.testing.assert_array_equal(again, found)
    assert not found[2, :32].any()


def test_a_weight_beyond_float16_leaves_no_file(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 1e5
    with pytest.raises(NonFiniteError, match=r"weights must fit into float16, but blk.1.ffn_up.weight has 100000"):
        written(model, tmp_path / "out", dtype="float16")
    assert list(tmp_path.iterdir()) == []


def test_scaled_rotary_frequencies_are_factors_of_the_plain_ones(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = llama(rope_parameters={**rope, "original_max_position_embeddings": 64})
    reader = written(model, tmp_path / "out")
    (factors,) = (tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
    # The definition of LLaMA 3.1: long wavelengths are stretched by 8, short ones not, and a blend in between.
    for i, factor in enumerate(factors):
        wavelength = 2 * np.pi * 5e5 ** (2 * i / 8)
        blend = np.clip((64 / wavelength - 1) / (4 - 1), 0, 1)
        assert factor == pytest.approx(1 / ((1 - blend) / 8 + blend), rel=1e-5)
    assert field(reader, "llama.rope.freq_base") == 5e5


def test_yarn_also_scales_what_is_rotated(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    reader = written(llama(rope_parameters=rope), tmp_path / "out")
    assert field(reader, "llama.rope.scaling.attn_factor") == pytest.approx(0.1 * np.log(4) + 1)


def test_a_tokenizer_of_bytes_is_written_with_its_merges(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    reader = written(qwen2(), tmp_path / "out", tokenizer)
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    assert field(reader, "tokenizer.ggml.merges") == [" ".join(merge) for merge in described["model"]["merges"]]
    tokens, types = field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.token_type")
    assert len(tokens) == len(types) == VOCABULARY > len(tokenizer)
    assert all(tokens[number] == token for token, number in tokenizer.get_vocab().items())
    # Three control tokens, normal ones, and unused ones up to the embedding's rows.
    count = len(tokenizer)
    assert types == [3] * 3 + [1] * (count - 3) + [5] * (VOCABULARY - count)
    names = ("model", "pre", "eos_token_id", "padding_token_id", "bos_token_id", "add_bos_token")
    special = [tokenizer.eos_token_id, tokenizer.pad_token_id, None, False]
    assert [field(reader, f"tokenizer.ggml.{name}") for name in names] == ["gpt2", "qwen2", *special]


def test_chat_templates_are_written_by_their_names(tmp_path: Path) -> None:
    tokenizer, chat = byte_level_tokenizer(), "{{ messages }}"
    for number, (template, wanted) in enumerate(
        (
            (None, (None, None, None)),
            (chat, (chat, None, None)),
            ({"default": chat, "tool_use": "{{ tools }}"}, (chat, "{{ tools }}", ["tool_use"])),
        )
    ):
        tokenizer.chat_template = template
        reader = written(qwen2(), tmp_path / str(number), tokenizer)
        names = ("chat_template", "chat_template.tool_use", "chat_templates")
        assert tuple(field(reader, f"tokenizer.{name}") for name in names) == wanted


def test_a_tokenizer_like_sentence_pieces_is_written_with_scores(tmp_path: Path) -> None:
    tokenizer = sentence_piece_tokenizer()
    reader = written(llama(), tmp_path / "out", tokenizer)
    assert field(reader, "tokenizer.ggml.model") == "llama"
    tokens, types = field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.token_type")
    assert [types[tokens.index(token)] for token in ("<unk>", "<s>", "</s>", "<0x41>", "▁")] == [2, 3, 3, 6, 1]
    scores = dict(zip(tokens, field(reader, "tokenizer.ggml.scores"), strict=True))
    assert field(reader, "tokenizer.ggml.add_bos_token") is True
    assert field(reader, "tokenizer.ggml.add_space_prefix") is True
    # Letters at random, which can be joined in several orders.
    chance = random.Random(0)
    letters = ["".join(chance.choices("aeoinrst hwd", k=30)) for _ in range(50)]
    for text in ("Once upon a time", "I'm 12345 days;  old\n", "日本 café", *letters):
        wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert joined_by_score("▁" + text.replace(" ", "▁"), tokens, scores) == wanted


def joined_by_score(text: str, tokens: list[str], scores: dict[str, float]) -> list[int]:
    """Do what SentencePiece does: join the neighbours with the highest score until none are a token."""
    parts = list(text)
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not pairs:
            break
        place = -max(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    pieces = [[part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [tokens.index(piece) for inner in pieces for piece in inner]


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    model, tokenizer = cut(llama()), sentence_piece_tokenizer()
    files = [export_gguf(model, tmp_path / name, tokenizer=tokenizer).file.read_bytes() for name in "ab"]
    assert files[0] == files[1]
