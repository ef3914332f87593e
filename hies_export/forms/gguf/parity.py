"""Compare a GGUF file in llama.cpp with the torch model that it was made from."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...equal import OTHER_PROGRAM
from ...errors import ParityError
from ...model.copies import copy_with
from ...model.internals import ask_for_output_alone, configs_of, forget_placement
from ...model.tokens import longest_sequence, synthetic_batch
from ..runtimes.llamacpp import LlamaCppRuntime
from .tensors import OUTER, stored_bytes, stored_type

# Two tokens whose probabilities differ by less than this share may swap places in greedy decoding.
NEAR_TIE = 1e-2
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 12, 64
# Where tokenizers differ: spaces, contractions, digits, line breaks, letters with marks or of other scripts, code.
TEXTS = (
    "Once upon a time, there was a little girl.",
    "I'm sure they'LL say it's 3 o'clock;  we've waited 12345 days!",
    "a\n\n b\t c   d \r\n",
    "café naïve Ünïcödé — “quotes” … 日本語 🙂 кот",
    "def f(x):\n    return x**2 + 0.5e-3  # ok",
)


@dataclass(frozen=True)
class Parity:
    """How a GGUF file in llama.cpp compares with torch."""

    max_abs: float  # largest difference of a next-token probability, over all prompts
    max_share: float  # largest difference as a share of the probability of the likeliest token
    tokens: int  # greedy tokens of each prompt that were compared
    equal: int  # how many of them, over all prompts, came before the first difference
    texts: int  # number of texts whose tokens were compared
    release: str  # llama.cpp's repository and release


def check_parity(file: Path, model: PreTrainedModel, tokenizer: Any, *, dtype: str) -> Parity:
    """Compare next-token probabilities, greedy tokens and a tokenizer's tokens with torch on the weights as stored.

    Greedy tokens must be equal in float32, up to a step where torch finds both tokens about as likely. In other dtypes
    they are only counted, because activations are rounded too. Raises ParityError if they differ.
    """
    reference = as_stored(model, dtype)
    positions = longest_sequence(model.config) or PROMPT_TOKENS + NEW_TOKENS
    length = min(PROMPT_TOKENS, max(1, positions // 2))
    new = min(NEW_TOKENS, positions - length)
    prompts = synthetic_batch(model, batch=PROMPTS, sequence=length)["input_ids"].cpu()
    tolerance, equal = OTHER_PROGRAM[dtype], 0
    with closing(LlamaCppRuntime(file, threads=torch.get_num_threads(), exact=True)) as runtime:
        found = runtime.compute({"input_ids": prompts})["probabilities"]
        with torch.no_grad():
            wanted = reference(input_ids=prompts).logits[:, -1].softmax(-1).numpy()
        differences = np.abs(found - wanted).max(-1)
        share = float((differences / wanted.max(-1)).max())
        if not share <= tolerance:
            raise ParityError(
                f"next-token probabilities in llama.cpp must be torch's within {tolerance:g} of the likeliest token's, "
                f"but differ by {share:.2g} of it; report the model"
            )
        for prompt in prompts:
            tokens = runtime.generate(prompt.tolist(), new)
            equal += _same_tokens(reference, prompt, tokens, strict=dtype == "float32")
        _check_tokens(runtime, tokenizer)
        release = runtime.release
    return Parity(float(differences.max()), share, new, equal, len(TEXTS), release)


def as_stored(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    """Return a copy of a model in float32 with every matrix rounded as a file of `dtype` stores it."""
    import gguf

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    outer = (model.get_input_embeddings(), model.get_output_embeddings())
    names |= {id(module.weight): OUTER[0] for module in outer if isinstance(module, torch.nn.Module)}

    def stand_in(tensor: Tensor) -> Tensor:
        plain = tensor.detach().to("cpu", torch.float32) if tensor.is_floating_point() else tensor.cpu()
        name = names.get(id(tensor))
        if name is None:  # a buffer
            return plain
        # The order of rows, which the file changes, does not matter: blocks lie within a row.
        kind = stored_type(name, plain, dtype)
        stored = stored_bytes(plain, kind, name)
        back = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind]).astype(np.float32)
        return torch.nn.Parameter(torch.from_numpy(back.reshape(plain.shape)), requires_grad=False)

    copied = copy_with(model, stand_in).eval()
    forget_placement(copied)
    ask_for_output_alone(configs_of(copied))
    return copied


def _same_tokens(reference: PreTrainedModel, prompt: Tensor, tokens: list[int], *, strict: bool) -> int:
    """Return how many of llama.cpp's tokens torch chooses too, before the first difference.

    With `strict`, another choice is a ParityError, unless torch finds both tokens about as likely.
    """
    whole = torch.cat([prompt, torch.tensor(tokens)])
    with torch.no_grad():
        # One pass over what llama.cpp wrote gives torch's choice at each of its steps.
        steps = reference(input_ids=whole[None]).logits[0, len(prompt) - 1 : -1].softmax(-1)
    for number, (token, probabilities) in enumerate(zip(tokens, steps, strict=True)):
        chosen = int(probabilities.argmax())
        if chosen == token:
            continue
        gap = 1 - float(probabilities[token] / probabilities[chosen])
        if strict and gap > NEAR_TIE:
            raise ParityError(
                f"greedy tokens in llama.cpp must be torch's, but token {number + 1} is {token}, which torch finds "
                f"less likely than {chosen} by {gap:.0%}; report the model"
            )
        return number
    return len(tokens)


def _check_tokens(runtime: LlamaCppRuntime, tokenizer: Any) -> None:
    for text, found in zip(TEXTS, runtime.tokenize(TEXTS), strict=True):
        wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
        if found != wanted:
            raise ParityError(
                f"llama.cpp's tokenizer must split texts as the model's does, but splits {text!r} into {found[:20]} "
                f"and not {wanted[:20]}; report the tokenizer"
            )
