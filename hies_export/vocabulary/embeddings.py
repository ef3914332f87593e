"""Cut the rows of the tokens that go out of a model: embeddings, heads, their biases, and numbers of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.batches import first_output
from ..data.processors import encoded
from ..equal import SAME_CODE, Difference
from ..errors import CutMismatchError, UnsupportedModelError
from ..model.copies import share_weights
from ..model.internals import configs_of, empty_model
from ..model.linear import set_by_name
from ..model.text_encoder import TextEncoder
from ..model.tokens import numbers_by_padding
from .kept import KeptTokens

# Fields of configurations that hold tokens, and fields that count the rows of a vocabulary.
_TOKENS = re.compile(
    r"_token_(id|ids|index)$|(^|_)(start|end|newline|patch)_id$|^(begin_)?suppress_tokens$|^(bad|force)_words_ids$"
    "|^sequence_bias$"
)
_COUNTS = re.compile(r"^(?!type_).*vocab_size")
# Texts, and tokens of each, on which both models are compared.
TEXTS, TOKENS = 16, 64


def row_count(model: PreTrainedModel) -> int:
    """Return the number of rows of a model's embedding; an UnsupportedModelError if it has none, or several sizes."""
    sizes = {size for config in configs_of(model) for size in _row_fields(config).values()}
    if len(sizes) != 1:
        has = "none" if not sizes else f"several, of {' and '.join(f'{size:,}' for size in sorted(sizes))} rows"
        raise UnsupportedModelError(
            f"a model must have one vocabulary to cut, but this {type(model).__name__} has {has}; keep the whole "
            "vocabulary"
        )
    return sizes.pop()


def _row_fields(config: Any) -> dict[str, int]:
    """Return the fields of a config, not of its sub-configs, that count the rows of a vocabulary."""
    fields = {name: value for name, value in vars(config).items() if _COUNTS.search(name) and isinstance(value, int)}
    renamed = config.attribute_map.get("vocab_size")  # how this type of config calls that field
    return fields if renamed is None else {**fields, renamed: getattr(config, renamed)}


def named_tokens(model: PreTrainedModel, total: int) -> set[int]:
    """Return the tokens below `total` that the configurations of a model name, such as its padding token."""
    fields = [value for config in _configs(model) for value in _token_fields(config).values()]
    found = {token for value in fields for token in _tokens(value)}
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    if numbers_by_padding(model.config) and pad is not None:
        found |= {*range(pad + 1)}  # positions begin behind its number, so it must not change
    return {token for token in found if 0 <= token < total}


def _configs(model: PreTrainedModel) -> list[Any]:
    """Return the configurations of a model, and that of its generation if it has one."""
    return [*configs_of(model), *filter(None, [getattr(model, "generation_config", None)])]


def _token_fields(owner: Any) -> dict[str, Any]:
    """Return the fields of a configuration or processor that hold tokens, by name."""
    return {name: value for name, value in vars(owner).items() if _TOKENS.search(name) and value is not None}


def _tokens(value: Any) -> Iterator[int]:
    """Yield the tokens in the value of a field: one, lists of them, or sequences of them as keys."""
    if isinstance(value, (list, tuple, dict)):
        for item in value:
            yield from _tokens(item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def renumber(owner: Any, numbers: Mapping[int, int]) -> None:
    """Give the tokens in the fields of a configuration or processor their new numbers, in place."""

    def renumbered(value: Any) -> Any:
        if isinstance(value, dict):  # sequences of tokens -> their bias
            return {tuple(renumbered(tokens)): bias for tokens, bias in value.items()}
        if isinstance(value, (list, tuple)):
            return [renumbered(item) for item in value]
        return value if isinstance(value, float) else numbers.get(value, value)  # 2.0 is a bias, and equals 2

    for name, value in _token_fields(owner).items():
        setattr(owner, name, renumbered(value))


def cut_rows(model: PreTrainedModel, kept: KeptTokens) -> PreTrainedModel:
    """Return a copy of a model without the rows of the tokens that go; it shares all other weights.

    What has a row for every token is found by building the model's class on the meta device with all tokens and with
    fewer: tensors whose shapes differ are cut, and attributes that differ are set. Raises UnsupportedModelError if more
    than rows differs.
    """
    slim = share_weights(model)
    inner = slim.auto_model if isinstance(slim, TextEncoder) else slim
    before = empty_model(type(inner), inner.config)
    for config in _configs(slim):
        renumber(config, kept.numbers)
    for config in configs_of(slim):
        for name, size in _row_fields(config).items():
            if size == kept.total:
                setattr(config, name, len(kept.rows))
    after = empty_model(type(inner), inner.config)
    _cut_tensors(inner, before, after, kept)
    for name, module in before.named_modules():
        attributes_after = vars(after.get_submodule(name))
        for key, value in vars(module).items():
            if type(value) is int and attributes_after[key] != value:
                setattr(inner.get_submodule(name), key, attributes_after[key])
    embedding: Any = inner.get_input_embeddings()
    if len(embedding.weight) != len(kept.rows):
        raise UnsupportedModelError(
            f"the embedding of a {type(inner).__name__} must follow its config's vocab_size, but does not; keep the "
            "whole vocabulary"
        )
    return slim


def _cut_tensors(model: nn.Module, before: nn.Module, after: nn.Module, kept: KeptTokens) -> None:
    """Cut the tensors of a model, in place, whose shapes differ from `before` to `after`; shared ones stay shared."""
    tensors, shapes = dict(_named_tensors(model)), {name: tensor.shape for name, tensor in _named_tensors(after)}
    rows = torch.tensor(kept.rows)
    cut: dict[int, Tensor] = {}  # by the id of the tensor
    for name, old in _named_tensors(before):
        tensor, new = tensors[name], shapes[name]
        if new == old.shape:
            continue
        axes = [axis for axis, (was, now) in enumerate(zip(old.shape, new, strict=True)) if was != now]
        if [(old.shape[axis], new[axis]) for axis in axes] != [(kept.total, len(kept.rows))]:
            raise UnsupportedModelError(
                f"fewer tokens must take rows and nothing else, but {name} of a {type(model).__name__} changes from "
                f"{list(old.shape)} to {list(new)}; keep the whole vocabulary"
            )
        if id(tensor) not in cut:
            cut[id(tensor)] = tensor.detach().index_select(axes[0], rows.to(tensor.device))
            if isinstance(tensor, nn.Parameter):
                cut[id(tensor)] = nn.Parameter(cut[id(tensor)], requires_grad=tensor.requires_grad)
        set_by_name(model, name, cut[id(tensor)])


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers, shared ones by each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def compare_rows(
    dense: PreTrainedModel, slim: PreTrainedModel, kept: KeptTokens, tokenizer: Any, texts: Sequence[str]
) -> float:
    """Return the largest absolute difference of both models' first outputs, on the beginnings of some texts.

    In the texts, a token that stays stands for all that go, and the logits of those that go are not compared. Raises
    CutMismatchError for a difference above 1e-4 of the largest output, or above 1e-4 if no output is larger than 1.
    """
    rows, new_numbers = torch.tensor(kept.rows), kept.new_numbers(gone=0)
    worst = 0.0
    for text in texts[:: max(1, len(texts) // TEXTS)][:TEXTS]:
        # One at a time, because not every model has a padding token.
        batch = encoded(tokenizer, dense.config, [text], max_length=None)
        batch = {name: tensor[:, :TOKENS] for name, tensor in batch.items()}
        if not batch["input_ids"].numel():
            continue
        ids = new_numbers[batch["input_ids"]]  # as the slim model numbers them
        expected = first_output(dense, {**batch, "input_ids": rows[ids]})
        found = first_output(slim, {**batch, "input_ids": ids})
        if expected.shape[-1] == kept.total and found.shape[-1] == len(rows):
            expected = expected[..., rows]
        difference = Difference.of(found, expected)
        if not difference.within(SAME_CODE):
            raise CutMismatchError(
                f"the model with fewer tokens must give the outputs of the dense one to {SAME_CODE:g} of the largest, "
                f"but differs by {difference}; nothing was kept. Please report this architecture "
                f"({dense.config.model_type})"
            )
        worst = max(worst, difference.max_abs)
    return worst
