"""Find the tokens that stay: those that texts use, and those without which the texts would be split differently.

A smaller tokenizer splits a text into the same tokens if all tokens of the text stay. What else must stay depends on
the kind of tokenizer:

- WordPiece needs nothing else. It takes the longest token that fits, and removing tokens adds no longer one.
- BPE needs the tokens that its merges build the others from. A token is built inside a text as it is by itself, because
  no merge crosses its borders.
- Unigram needs the least likely token of all. It takes the likeliest tokens, and scores an unknown character by that
  token's score minus a constant.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tokenizers

from ..errors import DataError, RequestError, listed, quoted

# Texts that are cut at once.
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


def backend_of(tokenizer: Any) -> tokenizers.Tokenizer:
    """Return a copy of what a tokenizer of transformers computes with, which neither truncates nor pads.

    Raises:
        RequestError: It computes in Python, or in a way of which it is not known what the cut of a text depends on.
    """
    own = getattr(tokenizer, "backend_tokenizer", None)
    if own is None:
        raise RequestError(
            f"a vocabulary is cut in a tokenizer.json, but a {type(tokenizer).__name__} has none; load the model's "
            "tokenizer with AutoTokenizer, which converts those that it can"
        )
    described = json.loads(own.to_str())["model"]
    kind = described["type"]
    if kind not in _KNOWN:
        raise RequestError(f"the tokenizer must be one of {', '.join(_KNOWN)}, got {kind}; keep the whole vocabulary")
    for name in ("dropout", "continuing_subword_prefix"):
        if kind == "BPE" and described.get(name):
            raise RequestError(
                f"the merges of a tokenizer must be the same for every text and every place, but this one has "
                f"{name}: {described[name]!r}; keep the whole vocabulary"
            )
    copied = tokenizers.Tokenizer.from_str(own.to_str())
    copied.no_truncation()
    copied.no_padding()
    return copied


def cut_texts(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> Iterator[list[int]]:
    """Yield the tokens of every text, special tokens included."""
    remaining = iter(texts)
    while part := list(itertools.islice(remaining, AT_ONCE)):
        yield from (encoding.ids for encoding in backend.encode_batch_fast(part))


def count_tokens(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> Counter[int]:
    """Return how often each token occurs in texts, special tokens included."""
    return Counter(itertools.chain.from_iterable(cut_texts(backend, texts)))


def find_kept(
    tokenizer: Any,
    texts: Sequence[str],
    *,
    total: int,
    named: Iterable[int] = (),
    read: Mapping[int, int] | None = None,
    around: Sequence[str] = (),
    min_count: int = 1,
    keep: Sequence[str] = (),
    multiple_of: int = 1,
) -> KeptTokens:
    """Return the tokens that stay: those of the texts, and those that any text needs.

    Any text needs special and other added tokens, and either all bytes, if the tokenizer cuts what it does not know
    into bytes, or all single characters that it has. Tokens of the texts that occur less often may go, and take with
    them the texts that have them. To reach a multiple, further tokens stay, of the lowest numbers first: tokenizers
    that are trained give these to frequent tokens.

    Args:
        tokenizer: A tokenizer of transformers that computes with `tokenizers`.
        texts: Texts like those that will be read.
        total: Rows of the model's embedding.
        named: Rows that the model's configuration names.
        read: How often a token occurs where the texts are read inside of something else.
        around: What is read around texts, all of whose tokens stay.
        min_count: How often a token must occur to stay.
        keep: Tokens that stay in any case, as the vocabulary spells them.
        multiple_of: Divisor of the number of rows that stay.

    Raises:
        RequestError: The tokenizer is of another kind or another model's, an option is out of range, or nothing goes.
        DataError: There are no texts, or they use no token often enough.
    """
    backend = check_request(tokenizer, texts, min_count=min_count, keep=keep, multiple_of=multiple_of)
    described, known = json.loads(backend.to_str()), backend.get_vocab(with_added_tokens=True)
    if max(known.values()) >= total:
        raise RequestError(
            f"the tokenizer must be the model's own, but it has token {max(known.values())}, and the model has {total} "
            "rows; give the tokenizer that the model was trained with"
        )
    counts = count_tokens(backend, texts) | Counter(read or {})
    used = {token for token, count in counts.items() if count >= min_count}
    closing = {*backend.encode("", "").ids, *(added["id"] for added in described["added_tokens"])}
    closing |= {*itertools.chain(*cut_texts(backend, around))}
    if not used - closing:
        raise DataError(
            f"the texts must use tokens at least min_count: {min_count} times, but none but special ones occurs as "
            "often; give more texts, or lower it"
        )
    parts = _parts_of(described["model"])
    kept = closure(used | closing | {*named} | {known[token] for token in keep} | needed(described["model"]), parts)
    wanted = -len(kept) % multiple_of + len(kept)
    for number in sorted(known.values()):
        more = closure({number}, parts) - kept if len(kept) < wanted else set()
        if len(kept) + len(more) <= wanted:
            kept |= more
    if len(kept) % multiple_of or len(kept) >= total:
        rounded = "" if multiple_of == 1 else f", as a multiple of {multiple_of}"
        raise RequestError(
            f"some tokens must go, but the texts need {wanted:,} of {total:,} rows{rounded}; keep the whole "
            "vocabulary, or raise min_count"
        )
    return KeptTokens(tuple(sorted(kept)), total)


def check_request(
    tokenizer: Any, texts: Sequence[str], *, min_count: int = 1, keep: Sequence[str] = (), multiple_of: int = 1
) -> tokenizers.Tokenizer:
    """Return what the tokenizer computes with, as `backend_of`, after every check of `find_kept` that needs no model.

    Raises:
        RequestError: The tokenizer is of another kind, or an option is out of range.
        DataError: There are no texts.
    """
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        wrong = texts if isinstance(texts, str) else next(text for text in texts if not isinstance(text, str))
        raise DataError(f"texts must be a list of texts, got {quoted(wrong)}; give every text as a string in a list")
    if not texts:
        raise DataError("there must be texts to see which tokens they use, got none; give texts like those to be read")
    for name, value in (("min_count", min_count), ("multiple_of", multiple_of)):
        if not isinstance(value, int) or value < 1:
            raise RequestError(f"{name} must be a whole number of at least 1, got {quoted(value)}")
    if isinstance(keep, str):
        raise RequestError(f"keep must be a list of tokens, got the text {quoted(keep)}; put it in a list")
    backend = backend_of(tokenizer)
    known = backend.get_vocab(with_added_tokens=True)
    for token in keep:
        if token not in known:
            cut = backend.encode(token, add_special_tokens=False).tokens
            raise RequestError(
                f"keep must name tokens of the vocabulary, but {quoted(token)} is none, and is cut into "
                f"{listed(map(quoted, cut))}; name these, or add a text that has the word"
            )
    return backend


def needed(model: Mapping[str, Any]) -> set[int]:
    """Return the tokens that a model of `tokenizers`, as its JSON describes it, needs for texts that nobody has seen.

    These are all bytes or all single characters, and of Unigram also the least likely token.
    """
    unigram, vocabulary = model["type"] == "Unigram", model["vocab"]
    entries = [(entry[0], number) for number, entry in enumerate(vocabulary)] if unigram else vocabulary.items()
    prefix = model.get("continuing_subword_prefix") or ""
    suffix = model.get("end_of_word_suffix") or ""
    found = {number for token, number in entries if len(token.removeprefix(prefix).removesuffix(suffix)) == 1}
    if model.get("byte_fallback"):
        found = {number for token, number in entries if len(token) == 6 and token.startswith("<0x")}
    if unigram:
        scores = [score for _, score in vocabulary]
        found |= {scores.index(min(scores)), *([] if model["unk_id"] is None else [model["unk_id"]])}
    elif model.get("unk_token") in vocabulary:
        found.add(vocabulary[model["unk_token"]])
    return found


def closure(tokens: Iterable[int], parts: Callable[[int], set[int]]) -> set[int]:
    """Return tokens with all tokens that they are built from."""
    found = set(tokens)
    for token in [*found]:
        found |= parts(token)
    return found


def _parts_of(model: Mapping[str, Any]) -> Callable[[int], set[int]]:
    """Return a function that gives the tokens that merges build a token from; without merges, none."""
    if model["type"] != "BPE":
        return lambda token: set()
    vocabulary, suffix = model["vocab"], model.get("end_of_word_suffix") or ""
    by_number = {number: token for token, number in vocabulary.items()}
    ranks = {pair_of(merge): rank for rank, merge in enumerate(model["merges"])}

    def parts(token: int) -> set[int]:
        return {vocabulary[part] for part in derivation(by_number.get(token, ""), ranks, suffix)}

    return parts


def pair_of(merge: str | Sequence[str]) -> tuple[str, str]:
    """Return both sides of a merge, which a tokenizer.json has as a text or as a pair."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def derivation(token: str, ranks: Mapping[tuple[str, str], int], suffix: str = "") -> set[str]:
    """Return the tokens that byte-pair merges make on the way to a token, the first merges first; none if they do not.

    Of a token that is taken whole, as a word in a vocabulary with `ignore_merges`, no other is needed.

    Args:
        token: As the vocabulary spells it.
        ranks: (left, right) -> the place of this merge.
        suffix: What the last character of a word ends in.

    Examples:
        >>> sorted(derivation("low", {("l", "o"): 0, ("lo", "w"): 1}))
        ['l', 'lo', 'o', 'w']
    """
    symbols = [*token.removesuffix(suffix)]
    if suffix and symbols and token.endswith(suffix):
        symbols[-1] += suffix
    found = {*symbols}
    while len(symbols) > 1:
        ranked = [(ranks[pair], place) for place, pair in enumerate(itertools.pairwise(symbols)) if pair in ranks]
        if not ranked:
            return set()
        _, place = min(ranked)
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
        found.add(symbols[place])
    return found - {token}
