"""Cut the rows of the tokens that go out of a model: embeddings, heads, their biases, and numbers of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.processors import encoded
from ..equal import SAME_CODE, Difference
from ..errors import CutMismatchError, UnsupportedModelError
from ..model.copies import share_weights
from ..model.internals import configs_of, empty_model
from ..model.linear import set_by_name
from ..model.text_encoder import TextEncoder
from ..model.tokens import numbers_by_padding
from ..slim.check import first_output
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
    sizes = {size for config in configs_of(model) for size in _counts(config).values()}
    if len(sizes) != 1:
        has = "none" if not sizes else f"several, of {' and '.join(f'{size:,}' for size in sorted(sizes))} rows"
        raise UnsupportedModelError(
            f"a model must have one vocabulary to cut, but this {type(model).__name__} has {has}; keep the whole "
            "vocabulary"
        )
    return sizes.pop()


def _counts(config: Any) -> dict[str, int]:
    """Return the fields of a config, not of its sub-configs, that count the rows of a vocabulary."""
    own = {name: value for name, value in vars(config).items() if _COUNTS.search(name) and isinstance(value, int)}
    mapped = config.attribute_map.get("vocab_size")
    return own if mapped is None else {**own, mapped: getattr(config, mapped)}


def named_tokens(model: PreTrainedModel, total: int) -> set[int]:
    """Return the tokens below `total` that the configurations of a model name, such as its padding token.

    A model that numbers positions from the padding token on needs all tokens before it too.
    """
    found = {token for owner in _owners(model) for value in _fields(owner).values() for token in _flat(value)}
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    if numbers_by_padding(model.config) and pad is not None:
        found |= {*range(pad + 1)}
    return {token for token in found if 0 <= token < total}


def _owners(model: PreTrainedModel) -> list[Any]:
    """Return the configurations of a model, that of generation included."""
    return [*configs_of(model), *filter(None, [getattr(model, "generation_config", None)])]


def _fields(owner: Any) -> dict[str, Any]:
    """Return the fields of a configuration that hold token ids, by name."""
    return {name: value for name, value in vars(owner).items() if _TOKENS.search(name) and value is not None}


def _flat(value: Any) -> Iterator[int]:
    """Yield the tokens in a field: one, lists of them, or sequences of them as keys."""
    if isinstance(value, (list, tuple, dict)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def renumber(owner: Any, numbers: Mapping[int, int]) -> None:
    """Give the tokens in the fields of a configuration or processor their new numbers, in place."""

    def new(value: Any) -> Any:
        if isinstance(value, dict):  # sequences of tokens -> their bias
            return {tuple(new(tokens)): bias for tokens, bias in value.items()}
        if isinstance(value, (list, tuple)):
            return [new(item) for item in value]
        return value if isinstance(value, float) else numbers.get(value, value)  # 2.0 is a bias, and equals 2

    for name, value in _fields(owner).items():
        setattr(owner, name, new(value))


def cut_rows(model: PreTrainedModel, kept: KeptTokens) -> PreTrainedModel:
    """Return a copy of a model without the rows of the tokens that go; it shares all other weights.

    What has a row for every token is found by building the model's class on the meta device with all tokens and with
    fewer: tensors whose shapes differ are cut, and attributes that differ are set. Raises UnsupportedModelError if more
    than rows differs.
    """
    slim = share_weights(model)
    inner = slim.auto_model if isinstance(slim, TextEncoder) else slim
    before = empty_model(type(inner), inner.config)
    for owner in _owners(slim):
        renumber(owner, kept.numbers)
    for config in configs_of(slim):
        for name, size in _counts(config).items():
            if size == kept.total:
                setattr(config, name, len(kept.rows))
    after = empty_model(type(inner), inner.config)
    _cut_tensors(inner, before, after, kept)
    for name, module in before.named_modules():
        there = vars(after.get_submodule(name))
        for key, value in vars(module).items():
            if type(value) is int and there[key] != value:
                setattr(inner.get_submodule(name), key, there[key])
    embedding: Any = inner.get_input_embeddings()
    if len(embedding.weight) != len(kept.rows):
        raise UnsupportedModelError(
            f"the embedding of a {type(inner).__name__} must follow its config's vocab_size, but does not; keep the "
            "whole vocabulary"
        )
    return slim


def _cut_tensors(model: nn.Module, before: nn.Module, after: nn.Module, kept: KeptTokens) -> None:
    """Cut the tensors of a model, in place, whose shapes differ from `before` to `after`; shared ones stay shared."""
    tensors, shapes = dict(_tensors(model)), {name: tensor.shape for name, tensor in _tensors(after)}
    rows, done = torch.tensor(kept.rows), dict[int, Tensor]()
    for name, old in _tensors(before):
        tensor, new = tensors[name], shapes[name]
        if new == old.shape:
            continue
        axes = [axis for axis, (one, other) in enumerate(zip(old.shape, new, strict=True)) if one != other]
        if [(old.shape[axis], new[axis]) for axis in axes] != [(kept.total, len(kept.rows))]:
            raise UnsupportedModelError(
                f"fewer tokens must take rows and nothing else, but {name} of a {type(model).__name__} changes from "
                f"{list(old.shape)} to {list(new)}; keep the whole vocabulary"
            )
        if id(tensor) not in done:
            part = tensor.detach().index_select(axes[0], rows.to(tensor.device))
            is_parameter = isinstance(tensor, nn.Parameter)
            done[id(tensor)] = nn.Parameter(part, requires_grad=tensor.requires_grad) if is_parameter else part
        set_by_name(model, name, done[id(tensor)])


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers, shared ones by each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def compare_rows(
    dense: PreTrainedModel, slim: PreTrainedModel, kept: KeptTokens, tokenizer: Any, texts: Sequence[str]
) -> float:
    """Return the largest absolute difference of the first outputs of both models on some of the texts.

    Tokens of the texts that go are replaced by one that stays. Of logits over the vocabulary, those of the tokens that
    stay are compared. Raises CutMismatchError for more than 1e-4 of the largest output, or of 1 if that is more.
    """
    rows, numbers = torch.tensor(kept.rows), kept.new_numbers(gone=0)
    worst = 0.0
    for text in texts[:: max(1, len(texts) // TEXTS)][:TEXTS]:
        # One at a time, because not every model has a padding token.
        batch = encoded(tokenizer, dense.config, [text], max_length=None)
        batch = {name: tensor[:, :TOKENS] for name, tensor in batch.items()}
        if not batch["input_ids"].numel():
            continue
        new = numbers[batch["input_ids"]]
        expected = first_output(dense, {**batch, "input_ids": rows[new]})
        found = first_output(slim, {**batch, "input_ids": new})
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
