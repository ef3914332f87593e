"""Find the tokens that stay: those that texts use, and those without which the texts would be split differently.

A smaller tokenizer splits a text into the same tokens if all tokens of the text stay, and what these need:

- WordPiece needs nothing else. It takes the longest token that fits, and removing tokens adds no longer one.
- BPE needs the tokens that its merges build the others from. A token is built inside a text as it is by itself, because
  no merge crosses its borders.
- Unigram needs the least likely token of all. It takes the likeliest tokens, and scores an unknown character by that
  token's score minus a constant.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tokenizers
import torch

from ..errors import DataError, RequestError, quoted

# Texts that are tokenized at once.
AT_ONCE = 1000
_KNOWN = ("WordPiece", "WordLevel", "BPE", "Unigram")


@dataclass(frozen=True)
class KeptTokens:
    """The rows of an embedding that stay, ascending, and how many there were."""

    rows: tuple[int, ...]
    total: int

    @cached_property
    def numbers(self) -> dict[int, int]:
        """The new number of every token that stays, by its old one."""
        return {old: new for new, old in enumerate(self.rows)}

    def new_numbers(self, *, gone: int) -> torch.Tensor:
        """Return the new number of every token by its old one, (total,) int64, and `gone` for those that go."""
        numbers = torch.full((self.total,), gone)
        numbers[list(self.rows)] = torch.arange(len(self.rows))
        return numbers


def backend_of(tokenizer: Any) -> tokenizers.Tokenizer:
    """Return a copy of the `tokenizers.Tokenizer` in a tokenizer of transformers, without truncation and padding.

    Raises a RequestError if there is no such tokenizer, if its kind is not in `_KNOWN`, or if it is a BPE whose merges
    depend on chance or on the place in a word.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestError(
            f"a vocabulary is cut in a tokenizer.json, but a {type(tokenizer).__name__} has none; load the model's "
            "tokenizer with AutoTokenizer, which converts those that it can"
        )
    model = json.loads(backend.to_str())["model"]
    kind = model["type"]
    if kind not in _KNOWN:
        raise RequestError(f"the tokenizer must be one of {', '.join(_KNOWN)}, got {kind}; keep the whole vocabulary")
    if kind == "BPE":
        for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(name):
                raise RequestError(
                    f"the merges of a tokenizer must be the same for every text and every place, but this one has "
                    f"{name}: {model[name]!r}; keep the whole vocabulary"
                )
    copied = tokenizers.Tokenizer.from_str(backend.to_str())
    copied.no_truncation()
    copied.no_padding()
    return copied


def tokens_of(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> Iterator[list[int]]:
    """Yield the tokens of every text, special tokens included."""
    remaining = iter(texts)
    while chunk := list(itertools.islice(remaining, AT_ONCE)):
        yield from (encoding.ids for encoding in backend.encode_batch_fast(chunk))


def used_tokens(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> set[int]:
    """Return the tokens that occur in texts, special tokens included."""
    return set(itertools.chain.from_iterable(tokens_of(backend, texts)))


def find_kept(backend: tokenizers.Tokenizer, used: set[int], always: set[int], *, total: int) -> KeptTokens:
    """Return which of `total` tokens stay: the used ones, those to keep always, and what these and any text need.

    Raises the RequestErrors and DataErrors of `trim_vocabulary`.
    """
    content, numbers = json.loads(backend.to_str()), backend.get_vocab(with_added_tokens=True).values()
    if max(numbers) >= total:
        raise RequestError(
            f"the tokenizer must be the model's own, but it has token {max(numbers)}, and the model has {total} "
            "rows; give the tokenizer that the model was trained with"
        )
    # Special tokens are what the tokenizer puts around two empty texts.
    always = always | {*backend.encode("", "").ids, *(added["id"] for added in content["added_tokens"])}
    if not used - always:
        raise DataError(
            "the texts must use some tokens, but none but special ones occurs in them; give texts like those to be read"
        )
    whole = used | always | needed_by_any_text(content["model"])
    kept = whole.union(*map(_parts_of(content["model"]), whole))
    if len(kept) >= total:
        raise RequestError(f"some tokens must go, but the texts need all {total:,} rows; keep the whole vocabulary")
    return KeptTokens(tuple(sorted(kept)), total)


def check_request(tokenizer: Any, texts: Sequence[str]) -> tokenizers.Tokenizer:
    """Return the tokenizer's `backend_of`; raises DataError if there are no texts, or something else among them."""
    wrong = [texts] if isinstance(texts, str) else [text for text in texts if not isinstance(text, str)]
    if wrong:
        raise DataError(f"texts must be a list of texts, got {quoted(wrong[0])}; give every text as a string in a list")
    if not texts:
        raise DataError("there must be texts to see which tokens they use, got none; give texts like those to be read")
    return backend_of(tokenizer)


def needed_by_any_text(model: Mapping[str, Any]) -> set[int]:
    """Return the tokens that a model of `tokenizers`, as its JSON describes it, needs for any text.

    These are all bytes if it falls back to them, else all single characters that it has; the unknown token; and of
    Unigram also the least likely token.
    """
    is_unigram, vocabulary = model["type"] == "Unigram", model["vocab"]
    # Unigram lists (token, score), and the others map a token to its number.
    entries = [(entry[0], number) for number, entry in enumerate(vocabulary)] if is_unigram else vocabulary.items()
    if model.get("byte_fallback"):
        needed = {number for token, number in entries if len(token) == 6 and token.startswith("<0x")}  # as <0x0A>
    else:
        prefix = model.get("continuing_subword_prefix") or ""
        needed = {number for token, number in entries if len(token.removeprefix(prefix)) == 1}
    if is_unigram:
        scores = [score for _, score in vocabulary]
        needed.add(scores.index(min(scores)))
        unknown = model["unk_id"]
    else:
        unknown = vocabulary.get(model.get("unk_token"))
    return needed if unknown is None else needed | {unknown}


def _parts_of(model: Mapping[str, Any]) -> Callable[[int], set[int]]:
    """Return a function from a token to all tokens that merges build it from: none if the model has no merges."""
    if model["type"] != "BPE":
        return lambda token: set()
    vocabulary = model["vocab"]
    by_number = {number: token for token, number in vocabulary.items()}
    ranks = {pair_of(merge): rank for rank, merge in enumerate(model["merges"])}

    def parts_of(token: int) -> set[int]:
        return {vocabulary[part] for part in derivation(by_number.get(token, ""), ranks)}

    return parts_of


def pair_of(merge: str | Sequence[str]) -> tuple[str, str]:
    """Return both sides of a merge, which a tokenizer.json has as a text ("left right") or as a pair."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def derivation(token: str, ranks: Mapping[tuple[str, str], int]) -> set[str]:
    """Return the tokens that byte-pair merges make on the way to a token, characters included.

    Empty if merges do not make it: with `ignore_merges`, words are taken whole. `ranks` orders the merges, by pair.

    Examples:
        >>> sorted(derivation("low", {("l", "o"): 0, ("lo", "w"): 1}))
        ['l', 'lo', 'o', 'w']
    """
    symbols = [*token]
    found = {*symbols}
    while len(symbols) > 1:
        ranked = [(ranks[pair], place) for place, pair in enumerate(itertools.pairwise(symbols)) if pair in ranks]
        if not ranked:
            return set()
        _, place = min(ranked)
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
        found.add(symbols[place])
    return found - {token}
