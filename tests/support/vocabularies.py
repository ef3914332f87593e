"""Train tiny tokenizers of every kind on the project's own pages, and make models that read with them."""

import copy
import json
import re
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.gguf import LLAMA_SPLIT, byte_level_tokenizer, sentence_piece_tokenizer
from support.models import shake

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 32


@cache
def pages() -> tuple[str, ...]:
    """The sentences of README and guides, of which some have characters that others lack."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    lines = [line for file in files for line in re.split(r"(?<=[.:])\s", file.read_text(encoding="utf-8"))]
    return tuple(" ".join(line.split()) for line in lines if len(line.split()) > 3)


def trained_once(train: Callable[..., PreTrainedTokenizerFast]) -> Callable[..., PreTrainedTokenizerFast]:
    """Train once a process, and give every test a copy."""
    trained = cache(train)
    return wraps(train)(lambda **options: copy.deepcopy(trained(**options)))


@trained_once
def wordpiece() -> PreTrainedTokenizerFast:
    """As BERT's, but special tokens have the last numbers: lower case, [CLS] and [SEP] around a text."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(pages(), trainers.WordPieceTrainer(vocab_size=900, special_tokens=["[UNK]"]))
    backend.add_special_tokens(["[CLS]", "[SEP]", "[PAD]"])
    ends = [(token, backend.token_to_id(token)) for token in ("[SEP]", "[CLS]")]
    backend.post_processor = processors.BertProcessing(*ends)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]", **names)


@trained_once
def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's, with special tokens that lie before the bytes."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        pages(), trainers.BpeTrainer(vocab_size=900, special_tokens=["<|end|>", "<|pad|>"], initial_alphabet=alphabet)
    )
    found = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>")
    found.add_tokens(["<|tool|>"])
    return found


@trained_once
def unigram(*, byte_fallback: bool = False) -> PreTrainedTokenizerFast:
    """As XLM-R's, whose mask lies behind all other tokens; with bytes, as Gemma's."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.ByteFallback(), decoders.Fuse()] if byte_fallback else []
    backend.decoder = decoders.Sequence([*steps, decoders.Metaspace()])
    special = ["<s>", "<pad>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256 * byte_fallback))]
    trainer = trainers.UnigramTrainer(vocab_size=900 + 256 * byte_fallback, special_tokens=special, unk_token="<unk>")
    backend.train_from_iterator(pages(), trainer)
    if byte_fallback:
        # The trainer knows no bytes: they are pieces as others, which no text is likely to be cut into.
        described = json.loads(backend.to_str())
        described["model"]["byte_fallback"] = True
        described["added_tokens"] = described["added_tokens"][:4]
        backend = tokenizers.Tokenizer.from_str(json.dumps(described))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="<mask>", **names)


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "WordPiece": wordpiece,
    "BPE of bytes": byte_level,
    "BPE of bytes, words whole": lambda: byte_level_tokenizer(LLAMA_SPLIT, ignore_merges=True),
    "BPE with bytes for the unknown": sentence_piece_tokenizer,
    "Unigram": unigram,
    "Unigram with bytes for the unknown": lambda: unigram(byte_fallback=True),
}


def reader(name: str, tokenizer: PreTrainedTokenizerFast, *, spare: int = 7, **options: Any) -> PreTrainedModel:
    """Return a tiny model of a class of transformers that reads with a tokenizer; it has some rows to spare."""
    config_class = getattr(transformers, name).config_class
    size = {
        **{"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
        **{"num_key_value_heads": 4},
    }
    special = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    config = config_class(vocab_size=len(tokenizer) + spare, **(size | special | options))
    return shake(getattr(transformers, name)(config))
