"""Make a tokenizer and a model's configuration agree on padding, length, vocabulary and positions."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import DataError
from ..model.internals import model_class_of
from ..model.tokens import longest_sequence, positions_of

logger = logging.getLogger(__name__)


def settle_padding(tokenizer: Any, config: Any) -> None:
    """Give a tokenizer without padding token the config's or its end-of-text token, and the config the tokenizer's."""
    pad_token_id = getattr(config, "pad_token_id", None)
    if tokenizer.pad_token_id is None:
        own = tokenizer.convert_ids_to_tokens(pad_token_id) if pad_token_id is not None else None
        tokenizer.pad_token = own or tokenizer.eos_token
        if tokenizer.pad_token_id is None:
            raise DataError(
                "texts of different length need a padding token, but the tokenizer has neither a padding nor "
                "an end-of-text token; set tokenizer.pad_token and save it with the model"
            )
        logger.warning("the tokenizer has no padding token: texts are padded with %r", tokenizer.pad_token)
    if pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
        logger.warning("the model's config has no pad_token_id: it is set to %d", tokenizer.pad_token_id)


def token_limit(tokenizer: Any, config: Any, max_length: int | None) -> int | None:
    """Return how many tokens a sample may have: `max_length`, else what tokenizer and model take; None for no limit."""
    longest = longest_sequence(config)
    if max_length is not None:
        if max_length < 1 or (longest is not None and longest < max_length):
            allowed = "at least 1" if longest is None else f"in [1, {longest}], what the model takes"
            raise DataError(f"max_length must be {allowed}, got {max_length}")
        return max_length
    # transformers writes 1e30 if it knows no limit.
    limits = [limit for limit in (tokenizer.model_max_length, longest) if limit and 0 < limit < 1_000_000]
    return min(limits) if limits else None


def encoded(tokenizer: Any, config: Any, *texts: Sequence[str], max_length: int | None) -> dict[str, torch.Tensor]:
    """Return a batch of texts, or of pairs of texts in two sequences, cut to the limit and padded to the longest."""
    settle_padding(tokenizer, config)
    limit = token_limit(tokenizer, config, max_length)
    found = tokenizer(
        *map(list, texts),
        padding=True,
        truncation=limit is not None,
        max_length=limit,
        return_attention_mask=True,
        # A model of fewer than two segments has no use for segment ids, or no embedding for the second.
        return_token_type_ids=None if getattr(config, "type_vocab_size", 0) >= 2 else False,
        return_tensors="pt",
    )
    check_vocabulary(found["input_ids"], config)
    return dict(found)


def check_vocabulary(input_ids: torch.Tensor, config: Any) -> None:
    """Check that every token of a batch is one the model knows."""
    known = config.get_text_config().vocab_size
    if input_ids.max() >= known:
        raise DataError(
            f"the tokenizer must be the model's own, but it gives the token {input_ids.max()} "
            f"and the model knows {known} tokens"
        )


def position_ids(attention_mask: torch.Tensor, config: Any) -> torch.Tensor | None:
    """Return positions counted from each sample's first real token, (batch, tokens); None if none are needed.

    By default models count positions from the left edge of the batch, which with left padding is not where a text
    begins. Models whose positions have several axes (mrope) derive them from the mask themselves.
    """
    if bool(attention_mask[:, 0].all()):
        return None
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    model_class = model_class_of(config, "AutoModelForCausalLM", "AutoModelForImageTextToText")
    if model_class is None or "mrope_section" in rope:
        return None
    takes_positions = "position_ids" in inspect.signature(model_class.forward).parameters
    return positions_of(attention_mask) if takes_positions else None
