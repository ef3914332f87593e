"""Find out which tensors of a checkpoint become which parameters on loading, and which tensors on saving.

Many models are saved under older names, and some tensors are merged or split on the way, such as those of experts. The
rules are transformers' own (`model.internals`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from transformers import PreTrainedModel

from ..model import internals
from ..model.internals import Conversions


@dataclass(frozen=True)
class Step:
    """A renaming or conversion on loading or saving: the tensors that it reads, and those that it makes.

    `convert` takes tensors and returns tensors, by name; None if one tensor only gets another name.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None


def loading_steps(model: PreTrainedModel, stored: Mapping[str, Tensor]) -> dict[str, Step]:
    """Return the step that every parameter and buffer comes from, by name.

    `model` was loaded from `stored`, the checkpoint's tensors on the meta device, so that it knows its rules.
    """
    expected = set(model.state_dict())
    steps = _steps(internals.loading_conversions(model), stored)
    return {target: step for step in steps for target in step.targets if target in expected}


def saving_steps(model: PreTrainedModel, parameters: Mapping[str, Tensor]) -> list[Step]:
    """Return the steps by which `save_pretrained` makes tensors out of parameters and buffers, on the meta device."""
    return _steps(internals.saving_conversions(model), parameters)


def _steps(conversions: Conversions, tensors: Mapping[str, Tensor]) -> list[Step]:
    patterns: dict[str, dict[str, str]] = {}  # new name -> old name -> pattern
    steps: dict[str, Step] = {}
    for key in internals.in_loading_order(tensors):
        name, pattern = conversions.rename(key)
        if pattern is None:
            steps.setdefault(name, Step((key,), (name,)))  # as in transformers, the first of several wins
        elif name not in steps:
            patterns.setdefault(name, {})[key] = pattern
    for name, parts in patterns.items():
        convert = partial(conversions.convert, name, parts)
        targets = convert({key: tensors[key] for key in parts})
        steps[name] = Step(tuple(parts), tuple(targets), convert)
    return list(steps.values())
