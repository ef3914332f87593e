"""Make tiny decoders with trained tokenizers of the two kinds that llama.cpp knows, and cut them unevenly."""

import json
from collections.abc import Callable
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hies_export import find_modules, prune_units
from hies_export.forms.gguf.parity import TEXTS
from support.cuts import random_neurons
from support.models import shake

VOCABULARY = 512
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256, "bos_token_id": 1},
    **{"eos_token_id": 2},
}
CORPUS = [
    *TEXTS,
    "It's 2024, isn't it? Été où çà.",
    "for i in range(100):\n\tprint(i, i**2)\n",
    "The cat sat on the mat.",
] * 4
LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = LLAMA_SPLIT.replace("{1,3}", "")


def of_family(name: str, **defaults: Any) -> Callable[..., PreTrainedModel]:
    """Return a function that makes a decoder of a family; its options replace the defaults and `SIZES`."""

    def make(**options: Any) -> PreTrainedModel:
        config = getattr(transformers, f"{name}Config")(**(SIZES | defaults | options))
        return shake(getattr(transformers, f"{name}ForCausalLM")(config))

    return make


llama = of_family("Llama")
mistral = of_family("Mistral", sliding_window=None)
qwen2 = of_family("Qwen2", tie_word_embeddings=True)
qwen3 = of_family("Qwen3", head_dim=8)


def cut(model: PreTrainedModel, *, uniform: bool = False, seed: int = 0) -> PreTrainedModel:
    """Return a model without about a third of its key/value groups and neurons."""
    batch = {"input_ids": torch.randint(3, 100, (2, 9))}
    modules = find_modules(model, batch, kinds=("attention", "mlp"))
    return prune_units(model, random_neurons(modules, uniform=uniform, seed=seed), modules)


def byte_level_tokenizer(
    split: str | None = QWEN_SPLIT, *, digits: bool = False, ignore_merges: bool = False
) -> PreTrainedTokenizerFast:
    """Return byte-level BPE trained on `CORPUS`, as Qwen's and LLaMA 3's tokenizers are.

    Texts are split by `split` (None: as ByteLevel itself does), with `digits` into single digits before that. With
    `ignore_merges` a word that is a token is taken whole.
    """
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps += [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level]) if steps else byte_level
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 8,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )


def sentence_piece_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer as LLaMA 2's: BPE of characters with a token for every byte, beginning a text with <s>.

    Of every token all pairs that make it are merges, as in a tokenizer converted from SentencePiece.
    """
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    learnt = json.loads(trained.to_str())["model"]
    joined = list(dict.fromkeys(left + right for left, right in learnt["merges"]))
    characters = sorted({character for token in learnt["vocab"] for character in token if len(token) == 1})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *joined, *characters]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [
        (token[:place], token[place:])
        for token in joined
        for place in range(1, len(token))
        if token[:place] in vocabulary and token[place:] in vocabulary
    ]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = trained.normalizer
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


# Models, and the architecture of llama.cpp that carries them.
CASES: dict[str, Any] = {
    "llama": (llama, "llama"),
    "llama, uneven": (lambda: cut(llama()), "deci"),
    "llama, uniform": (lambda: cut(llama(), uniform=True), "llama"),
    "llama, all biases, uneven": (lambda: cut(llama(attention_bias=True, mlp_bias=True)), "deci"),
    "mistral, uneven": (lambda: cut(mistral()), "deci"),
    "mistral, heads wider than the model": (lambda: mistral(head_dim=24), "llama"),
    "qwen2": (qwen2, "qwen2"),
    "qwen2, uneven": (lambda: cut(qwen2()), "deci"),
    "qwen2, uniform": (lambda: cut(qwen2(), uniform=True), "llama"),
    "qwen3, uniform": (lambda: cut(qwen3(), uniform=True), "qwen3"),
}
