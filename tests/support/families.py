"""Tiny models of any family of transformers, all of one size."""

from collections.abc import Callable

import transformers
from transformers import PreTrainedModel

from support.models import SIX_HEADS, shake

SMALL = SIX_HEADS | {"vocab_size": 100, "max_position_embeddings": 64, "pad_token_id": 0}


def architecture(
    name: str, task: str = "ForSequenceClassification", **options: object
) -> Callable[[], PreTrainedModel]:
    """Return a function that makes a random model of a family: six heads of width 8 in each of three layers."""

    def make() -> PreTrainedModel:
        config = getattr(transformers, f"{name}Config")(**(SMALL | options))
        return shake(getattr(transformers, f"{name}{task}")(config))

    return make


def decoder(name: str, **options: object) -> Callable[[], PreTrainedModel]:
    """Return a function that makes a language model whose query heads share key/value heads in pairs."""
    return architecture(name, "ForCausalLM", **({"num_key_value_heads": 3} | options))


gpt2 = architecture("GPT2", "LMHeadModel")
