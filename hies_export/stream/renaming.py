"""How transformers turns the tensors of a checkpoint into the parameters of a model, and back on saving.

Many models are saved under older key names, and some tensors are merged or split on the way (experts). The rules are
transformers' own, read from the same tables that `from_pretrained` and `save_pretrained` use; here they only say which
tensors come from which, so that a file can be rewritten without the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)


@dataclass(frozen=True)
class Step:
    """Some tensors become others.

    Attributes:
        sources: Names of the tensors before.
        targets: Names of the tensors after.
        convert: Makes the one of the other; None where one tensor only gets another name.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None


def loading_steps(model: PreTrainedModel, stored: Mapping[str, Tensor]) -> dict[str, Step]:
    """Where every parameter comes from.

    Args:
        model: Loaded from `stored` by transformers, so that it knows the rules that were used.
        stored: The checkpoint's tensors, on the meta device.

    Returns:
        Name of the parameter or buffer -> the step it comes from.
    """
    transforms = getattr(model, "_weight_conversions", None) or []
    renamings, converters = _split(transforms)
    expected = model.state_dict()

    def rename(key: str) -> tuple[str, str | None]:
        prefix = model.base_model_prefix
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            return rename_source_key(key, [], [], prefix, expected)
        return name, pattern

    steps = _steps(model, stored, rename, converters, lambda name: name)
    return {target: step for step in steps for target in step.targets if target in expected}


def saving_steps(model: PreTrainedModel, parameters: Mapping[str, Tensor]) -> list[Step]:
    """What `save_pretrained` makes of the parameters, for a class of transformers that was loaded by it.

    Args:
        model: The model.
        parameters: Its parameters and buffers, on the meta device.
    """
    transforms = [t.reverse_transform() for t in (getattr(model, "_weight_conversions", None) or [])[::-1]]
    renamings, converters = _split(transforms)

    def rename(key: str) -> tuple[str, str | None]:
        name, pattern = apply_converters(key, converters)
        return (name, pattern) if pattern is not None else (apply_renamings(key, renamings), None)

    return _steps(model, parameters, rename, converters, lambda name: apply_renamings(name, renamings))


def _split(transforms: Iterable[Any]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    transforms = list(transforms)
    return (
        [t for t in transforms if isinstance(t, WeightRenaming)],
        [t for t in transforms if isinstance(t, WeightConverter)],
    )


def _steps(
    model: PreTrainedModel,
    tensors: Mapping[str, Tensor],
    rename: Callable[[str], tuple[str, str | None]],
    converters: list[WeightConverter],
    finish: Callable[[str], str],
) -> list[Step]:
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    members: dict[str, list[tuple[str, str]]] = {}
    steps: dict[str, Step] = {}
    for key in sorted(tensors, key=dot_natural_key):
        name, pattern = rename(key)
        if pattern is None:
            steps.setdefault(name, Step((key,), (name,)))  # as in transformers, the first of several wins
        elif name not in steps:
            members.setdefault(name, []).append((pattern, key))
    for name, pairs in members.items():
        convert = _conversion(model, name, pairs, by_pattern[pairs[0][0]], finish)
        sources = tuple(key for _, key in pairs)
        targets = tuple(convert({key: tensors[key] for key in sources}))
        steps[name] = Step(sources, targets, convert)
    return list(steps.values())


def _conversion(
    model: PreTrainedModel,
    name: str,
    pairs: list[tuple[str, str]],
    converter: WeightConverter,
    finish: Callable[[str], str],
) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Transformers' own conversion of the tensors of `pairs` (pattern, key), to be run on any tensors of these keys."""

    def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        fresh = copy.deepcopy(converter)
        for pattern, key in pairs:
            fresh.add_tensor(name, key, pattern, tensors[key])  # type: ignore[arg-type]
        values = fresh.convert(name, model=model, config=model.config)
        return {finish(n): v[0] if isinstance(v, list) else v for n, v in values.items()}

    return convert
