"""Trace a decoder to one graph for prompts, chunks and single tokens, with its cache as inputs and outputs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ...errors import ExportError, UnsupportedModelError, refusing
from ...model.internals import cache_name, keeps_recurrent_state
from ...model.tokens import positions_of
from ..runtimes.base import Provider
from .trace import BATCH, SEQUENCE, TOKEN_AXES, export_program, fixed_size, name_axes

PAST = "past_sequence_length"
TOTAL = f"{PAST} + {SEQUENCE}"
FRONT = 3  # positions that `left_padded` adds in front of a prompt
_CACHE_TENSOR = re.compile(r"(?:(?:in|out)put\.)?(?:cache|past_key_values)\.layers\.(\d+)\.(key|value)s")


def check_decoder(model: PreTrainedModel) -> None:
    """Refuse, by an UnsupportedModelError, a generating model that is no decoder with a key/value cache."""
    name = type(model).__name__
    if cache_name(model) is None:
        raise UnsupportedModelError(f"ONNX export needs a decoder with a key/value cache, and {name} takes no cache")
    if keeps_recurrent_state(model.config):
        raise UnsupportedModelError(
            f"ONNX export needs a decoder whose cache is keys and values, and {name} keeps a recurrent state"
        )


def text_tokens(input_ids: Tensor, count: int, *, image_token_id: int | None = None) -> Tensor:
    """Return `count` text tokens of the first prompt, repeated if it is shorter, for every row: (batch, count)."""
    text = input_ids[0] if image_token_id is None else input_ids[0][input_ids[0] != image_token_id]
    return text[torch.arange(count) % len(text)].repeat(len(input_ids), 1)


def left_padded(batch: Mapping[str, Tensor], *, image_token_id: int | None = None) -> dict[str, Tensor]:
    """Return two rows of a batch with `FRONT` more positions on the left: text in the first row, padding in the second.

    So a trace and a comparison see both. The added text has no image tokens. The batch's own padding is read as text.
    """
    rows = {name: torch.cat([tensor, tensor])[:2] for name, tensor in batch.items()}
    front = text_tokens(rows["input_ids"], FRONT, image_token_id=image_token_id)
    rows["input_ids"] = torch.cat([front, rows["input_ids"]], dim=1)
    rows["attention_mask"] = torch.ones_like(rows["input_ids"])
    rows["attention_mask"][1, :FRONT] = 0
    return rows


def decoder_sample(model: PreTrainedModel, prompt: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the inputs to trace: two tokens after a padded prompt that is already in the cache.

    With a single token, the tracer would fix the sequence axis; with a single row, the batch axis; and it would drop a
    mask of ones. The prompt is `input_ids` (2, length) or `inputs_embeds` (2, length, hidden) with an `attention_mask`,
    padded on the left; length is at least 4. Raises ExportError if the model does not run with a `DynamicCache`.
    """
    name = "inputs_embeds" if "inputs_embeds" in prompt else "input_ids"
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    tokens, mask = prompt[name].to(model.device), prompt["attention_mask"].to(model.device)

    def inputs_between(start: int, stop: int) -> dict[str, Any]:
        positions = {"position_ids": positions_of(mask)[:, start:stop]} if takes_positions else {}
        return {name: tokens[:, start:stop], "attention_mask": mask[:, :stop], **positions}

    # The model's own cache may drop tokens outside a sliding window. A DynamicCache keeps them all, and the attention
    # mask applies the window.
    past, length = DynamicCache(), tokens.shape[1]
    cache = {str(cache_name(model)): past}
    must = f"a decoder must run with a cache of keys and values, and {type(model).__name__} refused"
    with refusing(must, kind=ExportError), torch.no_grad():
        model(**inputs_between(0, length - 2), **cache)
    if not past.get_seq_length():
        raise ExportError(f"a decoder must fill its cache, and {type(model).__name__} left it empty")
    return {**inputs_between(length - 2, length), **cache}


def trace_decoder(model: PreTrainedModel, prompt: Mapping[str, Tensor], fusions: Provider) -> Any:
    """Trace a decoder to an `onnx_ir.Model` under Optimum's names, fused for a provider; see `decoder_sample`."""
    sample = decoder_sample(model, prompt)
    program = export_program(model, sample, fusions)
    tokens = [name for name, value in sample.items() if isinstance(value, Tensor) and name != "attention_mask"]
    cache = {name: {0: BATCH, 2: PAST} for name in _name_cache(program, type(model).__name__)}
    name_axes(program, {**dict.fromkeys(tokens, TOKEN_AXES), "attention_mask": {0: BATCH, 1: TOTAL}, **cache})
    return program


def _name_cache(program: Any, model: str) -> list[str]:
    """Give the cache tensors of a graph Optimum's names, in place, and return the names of those among the inputs.

    Raises ExportError, which names the model, if one is not returned, or has no fixed number of heads or width, by
    which transformers.js makes the empty cache of a prompt.
    """
    for values, prefix in ((program.graph.inputs, "past_key_values"), (program.graph.outputs, "present")):
        for value in values:
            if match := _CACHE_TENSOR.fullmatch(value.name):
                value.name = f"{prefix}.{match[1]}.{match[2]}"
    others = {"input_ids", "inputs_embeds", "attention_mask", "position_ids"}
    cache = [value for value in program.graph.inputs if value.name not in others]
    for value in cache:
        is_known = re.fullmatch(r"past_key_values\.\d+\.(key|value)", value.name) and len(value.shape) == 4
        if not is_known or any(fixed_size(value.shape[axis]) is None for axis in (1, 3)):
            raise ExportError(
                f"a cache must be keys and values of shape (batch, heads, sequence, width), and {model} has "
                f"{value.name} ({', '.join(str(dim) for dim in value.shape)})"
            )
    names = [value.name for value in cache]
    wanted = {name.replace("past_key_values", "present") for name in names} | {"logits"}
    got = {value.name for value in program.graph.outputs}
    if not names or got != wanted:
        raise ExportError(
            f"the graph must return logits and the cache it takes, and that of {model} returns {', '.join(sorted(got))}"
        )
    return names
