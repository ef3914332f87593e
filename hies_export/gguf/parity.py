"""Compare a GGUF file in llama.cpp with the torch model that it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import ParityError
from ..model.copies import convert
from ..model.tokens import longest_sequence, synthetic_batch
from ..runtimes.llamacpp import LlamaCppRuntime

# Largest difference of a next-token probability. llama.cpp multiplies float16, bfloat16 and q8_0 matrices by
# activations rounded to the same type.
TOLERANCES = {"float32": 2e-3, "float16": 1e-2, "bfloat16": 5e-2, "q8_0": 5e-2}
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 12, 64
# Spaces, contractions, digits, line breaks, letters with marks and beyond the basic plane, code: what tokenizers differ in.
TEXTS = (
    "Once upon a time, there was a little girl.",
    "I'm sure they'LL say it's 3 o'clock;  we've waited 12345 days!",
    "a\n\n b\t c   d \r\n",
    "café naïve Ünïcödé — “quotes” … 日本語 🙂 кот",
    "def f(x):\n    return x**2 + 0.5e-3  # ok",
)


@dataclass(frozen=True)
class Parity:
    """How a GGUF file in llama.cpp compares with torch.

    Attributes:
        max_abs: Largest difference of a next-token probability, over all prompts.
        tolerance: The largest difference allowed.
        tokens: Greedy tokens of each prompt that were compared.
        equal: How many of them, over all prompts, came before the first difference.
        texts: Number of texts whose tokens were compared; 0 without a tokenizer.
        release: llama.cpp's repository and release.
    """

    max_abs: float
    tolerance: float
    tokens: int
    equal: int
    texts: int
    release: str


def check_parity(
    file: Path, model: PreTrainedModel, *, dtype: str, tokenizer: Any = None, texts: Sequence[str] = ()
) -> Parity:
    """Compare next-token probabilities, greedy tokens and a tokenizer's tokens with torch's.

    Greedy tokens must be equal in float32, up to a step where torch's two likeliest tokens are closer than the
    tolerance. In other dtypes they are only counted, for the weights are others.

    Args:
        file: The GGUF file.
        model: The model it was made from.
        dtype: What its matrices are stored in.
        tokenizer: The tokenizer in it.
        texts: Texts to compare the tokens of, besides `TEXTS`.

    Raises:
        ParityError: They differ.
    """
    reference = convert(model, dtype=torch.float32, device="cpu").eval()
    positions = longest_sequence(model.config) or PROMPT_TOKENS + NEW_TOKENS
    length = min(PROMPT_TOKENS, max(1, positions // 2))
    new = min(NEW_TOKENS, positions - length)
    prompts = synthetic_batch(model, batch=PROMPTS, sequence=length)["input_ids"].cpu()
    tolerance, largest, equal = TOLERANCES[dtype], 0.0, 0
    with LlamaCppRuntime(file, threads=torch.get_num_threads(), exact=True) as runtime:
        found = runtime.fetch(runtime.run(runtime.prepare({"input_ids": prompts})))["probabilities"]
        with torch.no_grad():
            wanted = reference(input_ids=prompts).logits[:, -1].softmax(-1).numpy()
        largest = float(np.abs(found - wanted).max())
        if not largest <= tolerance:
            raise ParityError(
                f"next-token probabilities in llama.cpp must be torch's within {tolerance:g}, but differ by "
                f"{largest:.2g}; report the model"
            )
        for prompt in prompts:
            tokens = runtime.generate(prompt.tolist(), new)
            same = _same_tokens(reference, prompt, tokens, tolerance if dtype == "float32" else None)
            equal += same
        compared = _check_tokens(runtime, tokenizer, (*TEXTS, *texts)) if tokenizer is not None else 0
        release = runtime.release
    return Parity(largest, tolerance, new, equal, compared, release)


def _same_tokens(reference: PreTrainedModel, prompt: Tensor, tokens: list[int], tolerance: float | None) -> int:
    """Return how many of the tokens that llama.cpp chose torch chooses too, before the first other one.

    Args:
        reference: The model.
        prompt: (sequence,).
        tokens: What llama.cpp continued it with.
        tolerance: How far the probabilities of two tokens must be apart for the choice to count; None if no choice
            does.

    Raises:
        ParityError: A choice that counts differs.
    """
    whole = torch.cat([prompt, torch.tensor(tokens)])
    with torch.no_grad():
        # One pass over what llama.cpp wrote gives torch's choice at each of its steps.
        steps = reference(input_ids=whole[None]).logits[0, len(prompt) - 1 : -1].softmax(-1)
    for number, (token, probabilities) in enumerate(zip(tokens, steps, strict=True)):
        chosen = int(probabilities.argmax())
        if chosen == token:
            continue
        gap = float(probabilities[chosen] - probabilities[token])
        if tolerance is not None and gap > 2 * tolerance:
            raise ParityError(
                f"greedy tokens in llama.cpp must be torch's, but token {number + 1} is {token} and not {chosen}, which "
                f"is likelier by {gap:.2g}; report the model"
            )
        return number
    return len(tokens)


def _check_tokens(runtime: LlamaCppRuntime, tokenizer: Any, texts: Sequence[str]) -> int:
    """Compare the tokens of texts, and return how many texts these are.

    Raises:
        ParityError: llama.cpp splits one of them otherwise.
    """
    for text, found in zip(texts, runtime.tokenize(texts), strict=True):
        wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
        if found != wanted:
            raise ParityError(
                f"llama.cpp's tokenizer must split texts as the model's does, but of {text!r} it makes {found[:20]} and "
                f"not {wanted[:20]}; report the tokenizer"
            )
    return len(texts)
