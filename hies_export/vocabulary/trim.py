"""Trim a vocabulary: find the tokens that stay, make the smaller tokenizer and model, and check both."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..data.processors import tokenizer_of
from ..model.text_encoder import TextEncoder
from ..model.tokens import refuse_encoder_decoder
from .chat import chat_texts, wrapped_as_in_chat
from .embeddings import compare_rows, cut_rows, named_tokens, renumber, row_count
from .kept import KeptTokens, check_request, find_kept, used_tokens
from .tokenizer import CutBeside, check_cuts, shrink_tokenizer


@dataclass(frozen=True)
class Trimmed:
    """A model and its tokenizer, or processor, without the tokens that went."""

    model: PreTrainedModel  # shares all weights but the cut ones with the dense model
    processor: Any  # its tokenizer or processor
    kept: KeptTokens  # the tokens that stay
    max_abs: float  # largest difference of any output between both models


@dataclass(frozen=True, kw_only=True)
class VocabularyFacts:
    """What a report says of a trimmed vocabulary."""

    total: int  # rows of the embedding before
    kept: int  # and after
    source: str  # where the texts whose tokens stay are from
    texts: int  # how many texts these are
    judged: CutBeside  # how the texts that are evaluated are tokenized with and without the tokens that went
    max_abs: float  # largest difference of any output between both models, on texts whose tokens stay

    @property
    def removed(self) -> int:
        """How many rows went."""
        return self.total - self.kept


def trim_vocabulary(
    model: PreTrainedModel, processor: Any, texts: Sequence[str], *, read: Collection[int] = ()
) -> Trimmed:
    """Return copies of a model and its tokenizer without the tokens that texts do not use; the originals stay.

    The texts are tokenized as before, and the model's outputs on them are the same, because each token has its own row
    of the embedding and of the head. Other texts are read too, in more tokens where theirs are gone.

    Special and other added tokens stay, and what any text needs: all bytes if the tokenizer falls back to them, else
    all single characters. So do the tokens of what is read around texts: a chat template, with every role and the use
    of a tool, and the prompts of a SentenceTransformer. Tokens are those of the bare texts and of the texts with that
    around them. Rows beyond the tokenizer's tokens go.

    Args:
        model: A model of transformers that reads texts.
        processor: Its tokenizer, of `tokenizers` and of the kind WordPiece, WordLevel, BPE or Unigram; or a processor
            that has one.
        texts: Texts like those that will be read, in all languages, and with what precedes them, such as a question's
            prompt, as a token may begin with a space or a line's end. Blank ones are left out.
        read: Further tokens that stay, of what is read beside the texts.

    Returns:
        The smaller model and tokenizer, and the tokens that stay.

    Raises:
        RequestError: The tokenizer is of another kind or another model's, or nothing goes.
        DataError: There are no texts, or they use no token.
        UnsupportedModelError: The model is an encoder-decoder, or has no vocabulary, or several.
        CutMismatchError: A text whose tokens stay is tokenized otherwise, or outputs differ by more than 1e-4 of the
            largest.

    Source: Ushio et al. 2023, https://arxiv.org/abs/2305.15020

    Examples:
        >>> trimmed = trim_vocabulary(model, tokenizer, ["a b", "b c"])
        >>> trimmed.model.config.vocab_size == len(trimmed.kept.rows) < model.config.vocab_size
        True
    """
    refuse_encoder_decoder(model.config, type(model).__name__)
    total, tokenizer = row_count(model), tokenizer_of(processor)
    texts = texts if isinstance(texts, str) else list(texts)
    backend = check_request(tokenizer, texts)
    texts = [text for text in texts if text.strip()]
    prompts = model.reader.prompts if isinstance(model, TextEncoder) else []
    with_prompts = [[prompt + text for text in texts] for prompt in prompts]
    variants = [texts, *with_prompts, *wrapped_as_in_chat(processor, texts)]
    used = set(read).union(*(used_tokens(backend, variant) for variant in variants))
    always = used_tokens(backend, [*prompts, *chat_texts(processor)]) | named_tokens(model, total)
    kept = find_kept(backend, used, always, total=total)
    slim, slim_processor = apply_kept(model, processor, kept)
    for variant in variants:
        check_cuts(tokenizer, tokenizer_of(slim_processor), variant, kept)
    return Trimmed(slim, slim_processor, kept, compare_rows(model, slim, kept, tokenizer, texts))


def apply_kept(model: PreTrainedModel, processor: Any, kept: KeptTokens) -> tuple[PreTrainedModel, Any]:
    """Return copies of a model and its tokenizer or processor with the tokens that stay; outputs are not compared."""
    tokenizer = slim_processor = shrink_tokenizer(tokenizer_of(processor), kept)
    if hasattr(processor, "tokenizer"):
        slim_processor = copy.copy(processor)
        renumber(slim_processor, kept.numbers)
        slim_processor.tokenizer = tokenizer
    slim = cut_rows(model, kept)
    if isinstance(slim, TextEncoder):
        slim.read_by(slim_processor)
    return slim, slim_processor
