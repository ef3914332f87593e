"""Describe a tokenizer to llama.cpp: tokens, merges, pre-tokenizer, special tokens, chat template.

llama.cpp has its own tokenizer for each kind. Decoders use two kinds: `llama` is SentencePiece, which joins the
neighbours with the highest score, and `gpt2` is byte-level BPE, which splits a text by a regular expression that
llama.cpp knows by name.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import RequestError
from ...vocabulary.kept import pair_of

# Parts of the regular expressions in `_SPLITS`.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")


def _words(digits: str) -> str:
    """Return the regular expression that splits a text into words, with one for its digits."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


# llama.cpp's name of a pre-tokenizer -> the regular expression, as tokenizer.json has it, and whether a word that is
# itself a token is taken whole (`ignore_merges`).
# Source: https://github.com/ggml-org/llama.cpp, src/llama-vocab.cpp, which quotes these expressions
_SPLITS = {
    "llama-bpe": (_words(r"\p{N}{1,3}"), True),
    "smaug-bpe": (_words(r"\p{N}{1,3}"), False),
    "qwen2": (_words(r"\p{N}"), False),
    "tekken": (rf"{'|'.join(_CASED)}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}", True),
}
_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}
# Types of tokens in a GGUF file.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def find_vocabulary(tokenizer: Any, *, size: int) -> dict[str, Any]:
    """Describe a fast tokenizer for an embedding of `size` rows, by the names of the GGUF writer's `add_` methods.

    Raises RequestError, which says what llama.cpp does not know.
    """
    content = _read_json(tokenizer)
    model = content["model"]
    numbers = {**model["vocab"], **{token["content"]: token["id"] for token in content["added_tokens"]}}
    if max(numbers.values()) >= size:
        raise _refused(f"it has token {max(numbers.values())}, but the model's embedding has {size} rows")
    by_number = {number: token for token, number in numbers.items()}
    tokens = [by_number.get(number, f"[unused{number}]") for number in range(size)]
    sentence_piece = model.get("byte_fallback", False)
    special = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "unk", "pad")}
    fields: dict[str, Any] = {
        "tokenizer_model": "llama" if sentence_piece else "gpt2",
        "tokenizer_pre": "default" if sentence_piece else _pre_tokenizer(content),
        "token_list": tokens,
        "token_types": _types(content, by_number, size, unknown=special["unk"] if sentence_piece else None),
    }
    if sentence_piece:
        fields |= {"token_scores": list(_scores(model, tokens)), "add_space_prefix": _space_prefix(content)}
    else:
        for step in _steps(content["normalizer"]):
            if step["type"] != "NFC":  # which leaves composed text as it is
                raise _refused(f"it changes texts by {step['type']} before it splits them")
        fields["token_merges"] = [" ".join(pair_of(merge)) for merge in model["merges"]]
    fields |= {f"{name}_token_id": number for name, number in special.items() if number is not None}
    example = tokenizer("a", add_special_tokens=True)["input_ids"]
    fields |= {"add_bos_token": example[:1] == [special["bos"]], "add_eos_token": example[-1:] == [special["eos"]]}
    if template := tokenizer.chat_template:
        templates = {"default": template} if isinstance(template, str) else template
        fields["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return fields


def _refused(problem: str) -> RequestError:
    """Return the error that says why llama.cpp does not know a tokenizer, and what to do."""
    return RequestError(
        f"a GGUF file needs a tokenizer that llama.cpp knows, byte-level BPE or SentencePiece's BPE, but {problem}; "
        "export the model to ONNX, which takes the tokenizer as it is"
    )


def _read_json(tokenizer: Any) -> dict[str, Any]:
    """Return the content of tokenizer.json; raises RequestError if there is none, or its model is not BPE."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refused(f"this is a {type(tokenizer).__name__} without a tokenizer.json")
    content: dict[str, Any] = json.loads(backend.to_str())
    kind = content["model"].get("type", "BPE")
    if kind != "BPE":
        raise _refused(f"its model is of type {kind}")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if content["model"].get(name):
            raise _refused(f"its tokens have a {name.replace('_', ' ')} ({content['model'][name]!r})")
    return content


def _types(content: Mapping[str, Any], by_number: Mapping[int, str], size: int, *, unknown: int | None) -> list[int]:
    """Return the type in a GGUF file of each of `size` tokens; `unknown` is SentencePiece's unknown token."""
    types = [NORMAL if number in by_number else UNUSED for number in range(size)]
    if content["model"].get("byte_fallback"):
        for number, token in by_number.items():
            types[number] = BYTE if token in _BYTE_TOKENS else NORMAL
    for token in content["added_tokens"]:
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    if unknown is not None:
        types[unknown] = UNKNOWN
    return types


def _scores(model: Mapping[str, Any], tokens: Sequence[str]) -> Iterator[float]:
    """Yield the score of every token, which orders the joins as the ranks of the merges do.

    SentencePiece joins neighbours whose text is a token, the one with the highest score first. BPE joins pairs that are
    merges, the first one first. Both are the same if all pairs whose text is a token are merges, and the merges of one
    token are consecutive; else RequestError is raised.
    """
    if missing := sorted(_BYTE_TOKENS - set(tokens)):
        raise _refused(f"it has no token for the byte {missing[0]}, which llama.cpp falls back to")
    merges = [pair_of(merge) for merge in model["merges"]]
    ranks: dict[str, int] = {}
    # Each group has consecutive merges that make the same token; the first one ranks it.
    for token, group in itertools.groupby(enumerate(merges), key=lambda ranked: "".join(ranked[1])):
        if token in ranks:
            raise _refused(f"merges of the token {token!r} stand apart, and SentencePiece has one score for a token")
        ranks[token], _ = next(group)
    joinable, pairs = set(model["vocab"]) - _BYTE_TOKENS, set(merges)
    for token in ranks:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if (left, right) not in pairs and left in joinable and right in joinable:
                raise _refused(f"{left!r} and {right!r} are no merge, and SentencePiece would join them")
    yield from (-float(ranks.get(token, len(merges) + 1)) for token in tokens)


def _space_prefix(content: Mapping[str, Any]) -> bool:
    """Return whether SentencePiece puts a space in front of a text."""
    prefix = False
    for step in _steps(content["normalizer"]):
        if step["type"] == "Prepend" and step["prepend"] == "▁":
            prefix = True
        elif not (step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == "▁"):
            raise _refused(f"it changes texts by {step['type']} before it splits them")
    for step in _steps(content["pre_tokenizer"]):
        if step["type"] != "Metaspace" or step["replacement"] != "▁":
            raise _refused(f"it splits texts by {step['type']}")
        prefix = prefix or step.get("prepend_scheme") in ("always", "first")
    return prefix


def _pre_tokenizer(content: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for how byte-level BPE splits a text; raise RequestError if it has none."""
    steps = _steps(content["pre_tokenizer"])
    ignore_merges = bool(content["model"].get("ignore_merges"))
    kinds = [step["type"] for step in steps]
    if not kinds or kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        raise _refused(f"it splits texts by {' and '.join(kinds) or 'nothing'}, not as byte-level BPE")
    if steps[-1].get("use_regex", True) and not ignore_merges:
        if kinds == ["ByteLevel"]:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
            return "smollm"
    elif kinds == ["Split", "ByteLevel"] and steps[0]["behavior"] == "Isolated" and not steps[0]["invert"]:
        pattern = steps[0]["pattern"].get("Regex")
        for name, split in _SPLITS.items():
            if split == (pattern, ignore_merges):
                return name
        raise _refused(f"it splits texts by {pattern!r}, which is none of {', '.join((*_SPLITS, 'gpt-2', 'smollm'))}")
    raise _refused(f"it splits texts by {' and '.join(kinds)} in a way that is none of llama.cpp's")


def _steps(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or a pre-tokenizer: none, itself, or those of a Sequence, also nested."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    members = part["normalizers"] if "normalizers" in part else part["pretokenizers"]
    return [step for member in members for step in _steps(member)]
