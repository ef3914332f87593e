"""Take objects of sentence-transformers as models of transformers, and give back objects of the same class.

sentence-transformers is not imported: the objects are known by the names of their classes.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoint.save import compare_in_sentence_transformers
from ..checkpoint.sentence import (
    check_cross_encoder_modules,
    check_modules,
    check_prompts,
    cross_encoder_files,
    cross_encoder_settings,
    encoder_with,
    make_readout,
    of_options,
    readout_module,
    shortest_limit,
    text_settings,
)
from ..errors import RequestError, listed
from ..model.modes import evaluating
from ..model.text_encoder import SentenceSettings, TextEncoder
from ..model.tokens import longest_sequence

# Classes whose objects have other outputs than one embedding for a text, or one score for a pair.
_OTHERS = ("SparseEncoder", "MultiVectorEncoder")


@dataclass(frozen=True)
class Unwrapped:
    """A model of transformers, and how to put a slim one in place of it.

    Attributes:
        model: The model to prune, which shares its weights with what was given.
        processor: The tokenizer of what was given; None for a plain model.
        wrap: Turns a slim model into a new object of the class that was given.
        max_length: Longest pair of texts in tokens that a CrossEncoder reads; None for no limit.
        files: JSON files to save beside the slim model, by name.
    """

    model: Any
    processor: Any = None
    wrap: Callable[[PreTrainedModel], Any] = lambda slim: slim
    max_length: int | None = None
    files: Mapping[str, Any] = field(default_factory=dict)


def unwrap(model: Any, embedding: Mapping[str, Any] | None = None) -> Unwrapped:
    """Return the model of transformers in a SentenceTransformer, a CrossEncoder, or a model that is one itself.

    Args:
        model: The object; it is not changed.
        embedding: For a bare encoder of transformers, `pooling` and `normalize`, as in `make_readout`.
    """
    kind = _kind_of(model)
    if embedding is not None:
        if kind is not None or not isinstance(model, PreTrainedModel) or isinstance(model, TextEncoder):
            raise RequestError(
                f"embedding= is for an encoder of transformers that has no pooling yet, but a {type(model).__name__} "
                "came with it; leave it out"
            )
        return _of_encoder(model, embedding)
    if kind == "SentenceTransformer":
        return _of_sentence_transformer(model)
    if kind == "CrossEncoder":
        return _of_cross_encoder(model)
    if kind is not None:
        raise RequestError(
            f"the model must give one embedding for a text or one score for a pair, but a {kind} gives others; give a "
            "SentenceTransformer or a CrossEncoder"
        )
    return Unwrapped(model)


def _kind_of(model: Any) -> str | None:
    """Return which class of sentence-transformers an object is of; None if of none."""
    known = ("SentenceTransformer", "CrossEncoder", *_OTHERS)
    found = (c.__name__ for c in type(model).__mro__ if c.__module__.split(".")[0] == "sentence_transformers")
    return next((name for name in found if name in known), None)


def _of_encoder(encoder: PreTrainedModel, embedding: Mapping[str, Any]) -> Unwrapped:
    if "pooling" not in embedding or set(embedding) - {"pooling", "normalize"}:
        raise RequestError(
            "embedding must have pooling (mean, cls, last or max), may have normalize (True or False), and nothing "
            f"else, got {listed(sorted(embedding)) or 'neither'}"
        )
    readout = make_readout(embedding["pooling"], normalize=bool(embedding.get("normalize")))
    settings = SentenceSettings(tuple(readout), max_length=longest_sequence(encoder.config))
    return Unwrapped(encoder_with(encoder, settings), wrap=_encoder)


def _encoder(slim: PreTrainedModel) -> PreTrainedModel:
    assert isinstance(slim, TextEncoder)
    return slim.auto_model


def _of_sentence_transformer(given: Any) -> Unwrapped:
    modules = list(given)
    where = f"this {type(given).__name__}"
    names = check_modules([_full_name(module) for module in modules], where=where)
    first = _inner(modules[0], where)
    readout = []
    for name, module in zip(names[1:], modules[1:], strict=True):
        config = {key: list(v) if isinstance(v, tuple) else v for key, v in module.get_config_dict().items()}
        readout.append(readout_module(name, config, module.state_dict, where=f"the {name} of {where}"))
    options = {
        "model_type": "SentenceTransformer",
        "prompts": dict(given.prompts),
        "default_prompt_name": given.default_prompt_name,
        "similarity_fn_name": given.similarity_fn_name,
        **({} if given.truncate_dim is None else {"truncate_dim": given.truncate_dim}),
    }
    check_prompts(readout[0], options["prompts"], where=where)
    text = text_settings(_fields(modules[0]), first.config, where=where)
    settings = SentenceSettings(tuple(readout), **text, **of_options(options, where))
    settings = replace(settings, max_length=_longest(given, first))

    def wrap(slim: PreTrainedModel) -> Any:
        return _with_another(given, first, _encoder(slim))

    model = encoder_with(first, settings)
    return Unwrapped(model, _checked(given, model), wrap)


def _of_cross_encoder(given: Any) -> Unwrapped:
    where = f"this {type(given).__name__}"
    inner = _inner(given, where)
    modules = [*given] if isinstance(given, nn.Sequential) else []
    if modules:  # version 5 has none
        check_cross_encoder_modules([type(module).__name__ for module in modules], where=where)
    options = {
        "activation_fn": _full_name(given.activation_fn),
        "prompts": dict(getattr(given, "prompts", None) or {}),
        "default_prompt_name": getattr(given, "default_prompt_name", None),
    }
    if in_float32 := getattr(given, "keep_in_fp32_modules", None):
        options["keep_in_fp32_modules"] = list(in_float32)
    settings = cross_encoder_settings(options, _fields(modules[0]) if modules else {}, inner.config, where)
    length = _longest(given, inner)
    return Unwrapped(
        inner,
        _checked(given, inner) if modules else given.tokenizer,
        lambda slim: _with_another(given, inner, slim),
        settings.lengths.get("text", length),
        cross_encoder_files(options, length, settings),
    )


def _checked(given: Any, model: PreTrainedModel) -> Any:
    """Return the tokenizer of an object, after refusing one that gives other numbers than what was read of it."""
    # A copy, as a tokenizer keeps how it was last called, and saves that.
    tokenizer, kinds = copy.deepcopy(given.tokenizer), sys.modules["sentence_transformers"]
    if model.dtype == torch.float32 and isinstance(given, (kinds.SentenceTransformer, kinds.CrossEncoder)):
        remedy = "save it, load it again, and prune that"
        with evaluating(given):
            compare_in_sentence_transformers(model, given, tokenizer, RequestError, remedy)
    return tokenizer


def _fields(transformer: Any) -> dict[str, Any]:
    """Return the settings of a module Transformer; its tokenizer has what it was made with."""
    return {**transformer.get_config_dict(), "do_lower_case": bool(getattr(transformer, "do_lower_case", False))}


def _longest(given: Any, inner: PreTrainedModel) -> int | None:
    """Return the longest text in tokens that an object of sentence-transformers reads; None for no limit."""
    length = getattr(given, "max_seq_length", None) or getattr(given.tokenizer, "model_max_length", None)
    return shortest_limit(length, longest_sequence(inner.config))


def _full_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__name__}"


def _inner(module: nn.Module, where: str) -> PreTrainedModel:
    """Return the model of transformers in a module, which sentence-transformers 5 and 6 call by different names."""
    found = next((m for m in module.modules() if isinstance(m, PreTrainedModel)), None)
    if found is None:
        raise RequestError(
            f"the encoder must be a model of transformers in torch, but {where} has none; load it with backend='torch'"
        )
    return found


def _with_another(given: Any, inner: PreTrainedModel, slim: PreTrainedModel) -> Any:
    """Return a copy of an object that has another model in place of its own, which is not copied."""
    # deepcopy takes what its memo already holds for the finished copy.
    return copy.deepcopy(given, {id(inner): slim})
