"""Make the tokenizer of the tokens that stay, and compare the tokens that two tokenizers make of texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from ..errors import CutMismatchError, quoted
from ..model.internals import with_backend
from .kept import KeptTokens, backend_of, pair_of, tokens_of


def shrink_tokenizer(tokenizer: Any, kept: KeptTokens) -> Any:
    """Return a copy of a tokenizer with the tokens that stay, renumbered; raise CutMismatchError if that fails."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    _shrink(content, kept.numbers)
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    wanted = {token: kept.numbers[old] for token, old in tokenizer.get_vocab().items() if old in kept.numbers}
    found = backend.get_vocab(with_added_tokens=True)
    if found != wanted:
        token = min(token for token in {*found, *wanted} if found.get(token) != wanted.get(token))
        raise CutMismatchError(
            f"every token that stays must have its number in the smaller vocabulary, but {quoted(token)} has "
            f"{found.get(token)} instead of {wanted.get(token)}; keep the whole vocabulary, and report this tokenizer"
        )
    return with_backend(tokenizer, backend)


def _shrink(content: dict[str, Any], numbers: Mapping[int, int]) -> None:
    """Leave only the tokens of `numbers`, old number -> new, in the content of a tokenizer.json, in place."""
    model = content["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [entry for number, entry in enumerate(model["vocab"]) if number in numbers]
        model["unk_id"] = numbers.get(model["unk_id"])
    else:
        model["vocab"] = {token: numbers[old] for token, old in model["vocab"].items() if old in numbers}
    if model["type"] == "BPE":
        kept = model["vocab"].keys()
        # A merge stays if both of its sides and what it makes of them stay.
        model["merges"] = [merge for merge in model["merges"] if kept >= {*pair_of(merge), "".join(pair_of(merge))}]
    for added in content["added_tokens"]:
        added["id"] = numbers[added["id"]]
    if content["padding"] is not None:
        content["padding"]["pad_id"] = numbers[content["padding"]["pad_id"]]
    if content["post_processor"] is not None:
        _renumber(content["post_processor"], numbers)


def _renumber(step: dict[str, Any], numbers: Mapping[int, int]) -> None:
    """Give the tokens that a post-processor adds to texts their new numbers, in place."""
    for inner in step.get("processors", ()):
        _renumber(inner, numbers)
    for name in ("sep", "cls"):  # of BertProcessing and RobertaProcessing: a token and its number
        if name in step:
            step[name][1] = numbers[step[name][1]]
    for special in step.get("special_tokens", {}).values():
        special["ids"] = [numbers[number] for number in special["ids"]]


@dataclass(frozen=True)
class CutBeside:
    """How many of some texts a smaller vocabulary cuts otherwise, and how many tokens each vocabulary makes of all."""

    texts: int
    otherwise: int
    dense_tokens: int
    slim_tokens: int

    @property
    def share_otherwise(self) -> float:
        """The share of the texts that are cut otherwise."""
        return self.otherwise / max(1, self.texts)

    @property
    def tokens_ratio(self) -> float:
        """How many tokens the smaller vocabulary makes of the texts, as a multiple of the dense one's."""
        return self.slim_tokens / max(1, self.dense_tokens)


def check_cuts(dense: Any, slim: Any, texts: Sequence[str], kept: KeptTokens) -> None:
    """Raise CutMismatchError, which quotes it, if two tokenizers cut a text differently whose tokens all stay."""
    tokens_before, tokens_after = tokens_of(backend_of(dense), texts), tokens_of(backend_of(slim), texts)
    for text, before, after in zip(texts, tokens_before, tokens_after, strict=True):
        if [kept.rows[token] for token in after] != before and kept.numbers.keys() >= {*before}:
            raise CutMismatchError(
                "a text must be cut as before where all its tokens stay, but "
                f"{quoted(text)} is cut otherwise; keep the whole vocabulary, and report this tokenizer"
            )
