"""Rehearse a cut on a weightless copy of the model, to find the attributes that must change with the number of units.

The model's own code is the judge. With fewer features everywhere, it must compute exactly what the units that stay
computed before. What that means for a kind of unit says `rehearsed_attention` here, and `prunable.mlp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from ..kinds import UNIT_NAMES
from ..model.attention import AttentionCall, use_attention
from ..model.kernels import VisibleKeys, attend
from ..units import Count, Kept, PrunableModule
from .follow import set_attributes
from .observe import SUPPORTED, FoundAttention
from .probe import Probe

# Attributes whose name says what they count. Others are changed only if a rehearsal fails without it.
_NAMES = {
    "units": ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_head", "nhead", "heads"),
    "groups": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "group_size": ("num_key_value_groups", "n_rep"),
}
_QUERY_WIDTH_NAMES = ("all_head_size",)


class Found(Protocol):
    """What a finder observed of a module: its dotted name, and the module of the probe's model."""

    name: str
    module: nn.Module


F = TypeVar("F", bound=Found)
Keep = Callable[[PrunableModule], Kept]


@dataclass(frozen=True)
class Meanings:
    """What attributes of a module may count.

    Attributes:
        by_name: Name of an attribute -> what it counts if it has a fitting value.
        by_value: What any attribute with a fitting value counts, in a class that fails a rehearsal otherwise.
    """

    by_name: Mapping[str, Count]
    by_value: Sequence[Count]


def rehearsed(
    probe: Probe,
    pairs: Sequence[tuple[F, PrunableModule]],
    meanings: Callable[[PrunableModule], Meanings],
    rehearse: Callable[[Sequence[PrunableModule]], tuple[F | None, str]],
    *,
    label: str,
    supported: str,
) -> tuple[PrunableModule, ...]:
    """Return modules, each with the attributes that a cut must change.

    Attributes known by name come first. Those that only have a fitting value are added for the classes of modules that
    fail a rehearsal without them.

    Args:
        probe: The weightless model, after the dense run.
        pairs: What was observed of each module in the dense run, and its description.
        meanings: Returns what the attributes of a module may count.
        rehearse: Takes the descriptions with attributes, and returns the first module for which runs with fewer units
            differ from the dense run, and how; (None, "") if they agree.
        label: Name of the model in messages.
        supported: What is supported, in messages.

    Raises:
        UnsupportedModelError: With fewer units, the model's code computes something else.
    """
    reads = {f.name: set(probe.config_reads.get(f.module, ())) for f, _ in pairs}
    widths: set[type] = set()  # classes whose attributes are also matched by value
    while True:
        described = []
        for f, module in pairs:
            wide, known = type(f.module) in widths, meanings(module)
            own = _attributes(module, vars(f.module), vars(f.module), known, widths=wide)
            config = {name: getattr(f.module.config, name, None) for name in reads[f.name]}
            own |= {f"config.{n}": k for n, k in _attributes(module, config, config, known, widths=wide).items()}
            described.append(replace(module, attributes=own))
        wrong, reason = rehearse(described)
        if wrong is None:
            return tuple(described)
        if type(wrong.module) in widths:
            units = UNIT_NAMES[pairs[0][1].kind] + "s"
            raise UnsupportedModelError(
                f"{label} cannot be cut: with fewer {units} the code of {type(wrong.module).__name__} ({wrong.name}) "
                f"does not do what it did ({reason}); supported are {supported}"
            )
        widths.add(type(wrong.module))


def _attributes(
    module: PrunableModule, owner: Mapping[str, Any], names: Iterable[str], known: Meanings, *, widths: bool
) -> dict[str, Count]:
    """Return an owner's attributes that count units, matched by name and value; with `widths` also by value alone."""
    found = {}
    for name in names:
        value = owner.get(name)
        if type(value) is not int:
            continue
        by_name = [known.by_name[name]] if name in known.by_name else []
        for count in (*by_name, *(known.by_value if widths else ())):
            if value == count.value(units=module.units, groups=module.groups):
                found[name] = count
                break
    return found


@contextmanager
def fewer(probe: Probe, pairs: Sequence[tuple[F, PrunableModule]], kept: Mapping[nn.Module, Kept]) -> Iterator[None]:
    """Leave out the features, rows and attributes of the units that are not kept, inside the block."""
    try:
        for f, module in pairs:
            stay = kept[f.module]
            set_attributes(f.module, module, stay)
            for name in module.producers:
                probe.kept[name] = module.staying(name, stay, probe.features(name))
            for name in module.parameters:
                probe.kept_rows[name] = module.staying(name, stay, len(probe.model.get_parameter(name)))
        yield
    finally:
        probe.kept, probe.kept_rows = {}, {}
        for f, module in pairs:
            set_attributes(f.module, module, module.kept(range(module.units)))


def rehearsed_attention(
    probe: Probe,
    batch: Mapping[str, Tensor],
    found: Sequence[FoundAttention],
    modules: Sequence[PrunableModule],
    label: str,
) -> tuple[PrunableModule, ...]:
    """Return attention modules with the attributes that a cut must change; see `rehearsed`.

    With fewer heads, the model must hand the attention function exactly the heads that stay, and join their outputs as
    before.

    Args:
        probe: The weightless model.
        batch: Its inputs.
        found: The attention modules, as observed in the dense run.
        modules: The descriptions of the same modules, in the same order.
        label: Name of the model in messages.

    Raises:
        UnsupportedModelError: With fewer heads, the model's code computes something else.
    """

    def rehearse(described: Sequence[PrunableModule]) -> tuple[FoundAttention | None, str]:
        wrong, reason = None, ""
        for keep in (_without_first_group, _without_first_query):
            if wrong is None:
                wrong, reason = _Rehearsal(probe, found, described, keep).run(batch)
        return wrong, reason

    pairs = list(zip(found, modules, strict=True))
    return rehearsed(probe, pairs, _head_counts, rehearse, label=label, supported=SUPPORTED)


def _head_counts(module: PrunableModule) -> Meanings:
    """Return what the attributes of an attention module may count."""
    assert module.key_width is not None
    query_width, output_width = Count("units", module.key_width), Count("units", module.unit_width)
    return Meanings(
        by_name={name: Count(of) for of, known in _NAMES.items() for name in known}
        | dict.fromkeys(_QUERY_WIDTH_NAMES, query_width),
        by_value=(query_width, Count("groups", module.key_width), Count("groups", module.unit_width), output_width),
    )


def _without_first_group(module: PrunableModule) -> Kept:
    """Return all groups but the first, or `_without_first_query` of a module with one group."""
    if module.groups == 1:
        return _without_first_query(module)
    return module.kept(range(module.group_size, module.units))


def _without_first_query(module: PrunableModule) -> Kept:
    """Return all units but the first of every group; all units where a group has only one."""
    first = module.group_size > 1
    return module.kept(u for u in range(module.units) if not first or u % module.group_size)


class _Rehearsal:
    """A run of the probe with fewer features, compared with the dense run."""

    def __init__(
        self,
        probe: Probe,
        found: Sequence[FoundAttention],
        modules: Sequence[PrunableModule],
        keep: Keep,
    ):
        self._probe, self._found, self._modules = probe, found, modules
        self._kept = {f.module: keep(module) for f, module in zip(found, modules, strict=True)}
        self._pending = {f.module: f for f in found}
        self._wrong: list[tuple[FoundAttention, str]] = []
        self._visible = VisibleKeys()
        self._readers: dict[str, list[FoundAttention]] = {}

    def run(self, batch: Mapping[str, Tensor]) -> tuple[FoundAttention | None, str]:
        """Return the first module for which the two runs differ, and how; (None, "") if they agree."""
        probe, pairs = self._probe, list(zip(self._found, self._modules, strict=True))
        try:
            with fewer(probe, pairs, self._kept), use_attention(probe.model, self._attention):
                probe.run(batch, before=self._before)
        except Exception as error:  # whatever the model's own code raises on shapes it does not expect
            if not self._wrong:
                reason = " ".join(str(error).split())[:200]
                self._wrong.append((next(iter(self._pending.values())), reason))
        return self._wrong[0] if self._wrong else (None, "")

    def _attention(self, call: AttentionCall) -> Tensor:
        output = attend(call, self._visible)
        found = self._pending.get(call.module)
        if found is None:
            return output
        kept = self._kept[call.module]
        for role, tensor, dense, index in (
            ("query", call.query, found.query, kept.units),
            ("key", call.key, found.key, kept.kept_groups),
            ("value", call.value, found.value, kept.kept_groups),
        ):
            if not same(tensor, dense[:, list(index)]):
                self._wrong.append((found, f"it makes another {role} of its features"))
        if found.sinks is not None and not (call.sinks is not None and same(call.sinks, found.sinks[list(kept.units)])):
            self._wrong.append((found, "its sinks are not those of its heads"))
        self._readers.setdefault(found.readers[0], []).append(found)
        return output

    def _before(self, name: str, x: Tensor) -> None:
        for found in self._readers.pop(name, []):
            module = next(m for f, m in zip(self._found, self._modules, strict=True) if f is found)
            columns = module.columns(self._kept[found.module].units)
            if found.read is None or not same(x, found.read[..., columns]):
                self._wrong.append((found, "it joins the heads in another way"))
            self._pending.pop(found.module, None)


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal but for rounding."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5)
