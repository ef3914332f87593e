"""What no GGUF file can hold is refused in a sentence, with exit code 2, before anything is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from support.families import gpt2
from support.gguf import byte_level_tokenizer, cut, llama, mistral, qwen2, qwen3, sentence_piece_tokenizer
from support.models import bert, generative_tokenizer
from support.runs import hies
from tokenizers import models, normalizers, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hies_export import RecipeError, RequestError, UnsupportedModelError, export_gguf
from hies_export.forms.gguf.architecture import find_layout
from hies_export.forms.gguf.export import check_exportable
from hies_export.forms.gguf.vocabulary import find_vocabulary
from hies_export.forms.runtimes.base import RUNTIMES, check_runtime
from hies_export.tasks import TASKS

pytest.importorskip("gguf", reason='no gguf: pip install "hies-export[gguf]"')


def louder() -> PreTrainedModel:
    model = llama()
    model.lm_head.register_forward_hook(lambda _, inputs, output: 1.5 * output)
    return model


SOME_LAYERS = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}
REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "no decoder": (bert, "but BertForSequenceClassification is not one: it is no decoder"),
    "a type that was not compared": (gpt2, "but GPT2LMHeadModel is not one: the type 'gpt2' was not compared"),
    "sliding window": (lambda: mistral(sliding_window=128), "layer 0 attends within a sliding window of 128 tokens"),
    "sliding window in some layers": (lambda: qwen2(**SOME_LAYERS), "layer 2 attends within a sliding window of 32"),
    "query and key norms": (
        lambda: cut(qwen3()),
        r"queries and keys \(self_attn.q_norm\), .* no such norm; cut it uniformly",
    ),
    "biases beside them": (lambda: qwen3(attention_bias=True), "k_proj.bias, but llama.cpp's qwen3 reads no biases"),
    "activation": (lambda: llama(hidden_act="gelu"), r"logits differ by \S+ from what llama.cpp's llama computes"),
    "frequencies that depend on the length": (
        lambda: llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
        "rotary frequencies are of type 'dynamic'",
    ),
    "the same modules": (louder, r"logits differ by \S+ from what llama.cpp's llama computes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_llama_cpp_does_not_compute_is_refused_by_name(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=message) as refusal:
        export_gguf(make(), tmp_path / "out", tokenizer=sentence_piece_tokenizer())
    assert refusal.value.exit_code == 2
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_will_be_cut_unevenly_is_refused_before_the_cut() -> None:
    model, tokenizer = qwen3(), byte_level_tokenizer()
    check_exportable(model, tokenizer, uneven=False)
    with pytest.raises(UnsupportedModelError, match="reads no such norm"):
        check_exportable(model, tokenizer, uneven=True)
    assert find_layout(qwen2(), uneven=True).architecture == "deci"


def changed(make: Callable[[], PreTrainedTokenizerFast], **parts: Any) -> PreTrainedTokenizerFast:
    tokenizer = make()
    for name, value in parts.items():
        setattr(tokenizer.backend_tokenizer, name, value)
    return tokenizer


def sentence_piece(*, merges: list[tuple[str, str]], tokens: str = "abc") -> PreTrainedTokenizerFast:
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *tokens]
    vocabulary = {word: number for number, word in enumerate([*words, *dict.fromkeys(a + b for a, b in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


DIGITS = pre_tokenizers.Digits()
BROKEN = [("a", "b"), ("b", "c"), ("a", "bc")]
APART = [("a", "b"), ("b", "c"), ("ab", "c"), ("c", "a"), ("a", "bc")]
UNKNOWN: dict[str, tuple[Callable[[], Any], str]] = {
    "words": (generative_tokenizer, "its model is of type WordLevel"),
    "split": (lambda: byte_level_tokenizer(r"\w+|\W+"), "it splits texts by .*, which is none of llama-bpe"),
    "merges that are ignored": (lambda: byte_level_tokenizer(ignore_merges=True), "which is none of llama-bpe"),
    "no bytes": (lambda: changed(byte_level_tokenizer, pre_tokenizer=pre_tokenizers.Whitespace()), "by Whitespace, "),
    "lower case": (lambda: changed(byte_level_tokenizer, normalizer=normalizers.Lowercase()), "texts by Lowercase"),
    "lower case of pieces": (lambda: changed(sentence_piece_tokenizer, normalizer=normalizers.NFKC()), "texts by NFKC"),
    "pieces that are split": (
        lambda: changed(sentence_piece_tokenizer, pre_tokenizer=DIGITS),
        "splits texts by Digits",
    ),
    "a pair that is no merge": (lambda: sentence_piece(merges=BROKEN), "'ab' and 'c' are no merge, and SentencePiece"),
    "merges apart": (lambda: sentence_piece(merges=APART), "merges of the token 'abc' stand apart"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_tokenizer_that_llama_cpp_does_not_know_is_refused(case: str, tmp_path: Path) -> None:
    make, message = UNKNOWN[case]
    with pytest.raises(RequestError, match=f"a GGUF file needs a tokenizer that llama.cpp knows.*{message}"):
        export_gguf(llama(), tmp_path / "out", tokenizer=make())
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused() -> None:
    with pytest.raises(RequestError, match=r"it has token \d+, but the model's embedding has 300 rows"):
        find_vocabulary(byte_level_tokenizer(), size=300)


def test_the_command_refuses_in_a_line_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, window = tmp_path / "good", tmp_path / "window"
    for folder, model in ((good, llama()), (window, mistral(sliding_window=64))):
        model.save_pretrained(folder)
        sentence_piece_tokenizer().save_pretrained(folder)
    cases = {
        (window,): "sliding window of 64 tokens",
        (good, "--dtype", "q4_k"): "dtype must be 'float32', 'float16', 'bfloat16', 'q8_0' or 'q4_0', got 'q4_k'",
        (good, "--provider", "cuda"): "provider belongs to format: onnx, got cuda for format: gguf; leave it out",
    }
    for arguments, message in cases.items():
        assert hies("export", *arguments, "--format", "gguf", "-o", tmp_path / "out") == 2
        assert message in capsys.readouterr().err
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (good / name).unlink()
    assert hies("export", good, "--format", "gguf", "-o", tmp_path / "out") == 2
    assert not (tmp_path / "out").exists()


def test_a_runtime_of_decoders_is_refused_for_other_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUNTIMES["llamacpp"], "require", lambda: None)
    check_runtime("llamacpp", task=TASKS["text-generation"])
    check_runtime("torch", task=TASKS["text-classification"])
    with pytest.raises(RecipeError, match=r"runtime llamacpp runs decoders \(text-generation\), got task: image-class"):
        check_runtime("llamacpp", task=TASKS["image-classification"])


def test_the_check_keeps_the_model_as_it_is(tmp_path: Path) -> None:
    model = llama().to(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_exportable(model, sentence_piece_tokenizer(), uneven=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
