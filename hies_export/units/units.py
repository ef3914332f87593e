"""Describe what can be pruned: modules, their units, and which units a selection keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated

import torch
from pydantic import FailFast, Field, StrictInt
from torch import Tensor

from ..errors import quoted
from ..kinds import ATTENTION, KINDS

# In files of plans, whose values are checked by these types.
Indices = Annotated[tuple[StrictInt, ...], FailFast()]
Size = Annotated[StrictInt, Field(ge=1, le=2**20)]


@dataclass(frozen=True, eq=False)
class Slice:
    """The indices along one axis of a tensor that belong to the units, or to the groups, of a module.

    Indices that all units share have no owner, so no cut removes them. A fused attention layer has one slice for its
    query rows and one for its key and value rows.
    """

    tensor: str
    axis: int  # of a weight (out_features, in_features), or of the parameter
    owner: Tensor  # (size of the axis,) int64 on the CPU: the unit (or group) that owns each index, -1 for none
    per_group: bool = False  # whether the owners are groups (key/value heads) rather than units (query heads)
    parameter: bool = False  # whether `tensor` is a parameter outside of linear layers, such as an attention sink

    def indices(self, owners: Sequence[int]) -> Tensor:
        """Return the indices that the given units (or groups, if `per_group`) own: (indices,) int64, ascending."""
        return torch.isin(self.owner, torch.tensor(owners, dtype=torch.int64)).nonzero().flatten()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Slice):
            return NotImplemented
        ours, theirs = ((s.tensor, s.axis, s.per_group, s.parameter) for s in (self, other))
        return ours == theirs and torch.equal(self.owner, other.owner)


@dataclass(frozen=True)
class AttributeCount:
    """The meaning of an integer attribute of a module: a number of units or groups, times a factor."""

    of: str  # "units", "groups" or "group_size" (units per group)
    times: int = 1  # such as the width of a head

    def value(self, *, units: int, groups: int) -> int:
        """Return the attribute's value for the given numbers of units and groups."""
        return self.times * {"units": units, "groups": groups, "group_size": units // max(1, groups)}[self.of]


@dataclass(frozen=True, kw_only=True)
class Units:
    """The number of units and groups in a module: all that a selection needs to know of it.

    In attention a unit is a query head, and a group is a key/value head with its query heads. In a feed-forward block a
    unit is a neuron, and every neuron is a group of its own.

    Attributes:
        name: Dotted name of the module.
        units: Number of units.
        groups: Number of equal groups of consecutive units; by default every unit is a group of its own.
        kind: Kind of the units, a name in `KINDS`; heads by default.
    """

    name: str
    units: int
    groups: int = 0
    kind: str = ATTENTION

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", self.groups or self.units)

    @property
    def group_size(self) -> int:
        """Number of units per group."""
        return self.units // self.groups

    def kept(self, units: Iterable[int]) -> Kept:
        """Return the selection that keeps the given units of this module."""
        return Kept(tuple(sorted(units)), self.units, self.groups, self.kind)


@dataclass(frozen=True, kw_only=True)
class PrunableModule(Units):
    """A module whose units can be removed, such as an attention module and its heads.

    Unit u owns the input columns [u * unit_width, (u + 1) * unit_width) of one linear layer, the consumer. It also owns
    rows of the producers, the linear layers that compute these inputs.

    Attributes:
        name, units, groups, kind: See `Units`.
        unit_width: Number of the consumer's input columns that one unit owns.
        consumer: Dotted name of the linear layer that reads the units in order, such as `o_proj`.
        slices: The parts of producers, and of parameters outside of linear layers, that the units and groups own.
        attributes: Attribute of the module that depends on its number of units -> its meaning. An attribute that the
            module reads from its config is called "config.NAME".
        key_width: Width of a unit's query and key vectors; None for units that have none.
        narrowed: Argument of the module's forward that has values for every unit, such as a position bias that layers
            share -> the axis with the units, and their number; it may be a multiple, with the units running fastest.
    """

    unit_width: int
    consumer: str
    slices: tuple[Slice, ...] = ()
    attributes: Mapping[str, AttributeCount] = field(default_factory=dict)
    key_width: int | None = None
    narrowed: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def producers(self) -> tuple[str, ...]:
        """Dotted names of the linear layers in front of the consumer in which units own rows."""
        return tuple(dict.fromkeys(s.tensor for s in self.slices if not s.parameter))

    @property
    def layers(self) -> tuple[str, ...]:
        """Dotted names of the producers, and of the consumer."""
        return (*self.producers, self.consumer)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Dotted names of the parameters outside of linear layers in which units own indices."""
        return tuple(dict.fromkeys(s.tensor for s in self.slices if s.parameter))

    def below(self, prefix: str) -> PrunableModule:
        """Return this module with names relative to the submodel `prefix`, as "layer.0" for "encoder.layer.0"."""
        return self._renamed(lambda name: name.removeprefix(f"{prefix}."))

    def inside(self, prefix: str) -> PrunableModule:
        """Return this module of the submodel `prefix` with names relative to the whole model; undoes `below`."""
        return self._renamed(lambda name: f"{prefix}.{name}")

    def _renamed(self, new_name: Callable[[str], str]) -> PrunableModule:
        slices = tuple(replace(piece, tensor=new_name(piece.tensor)) for piece in self.slices)
        return replace(self, name=new_name(self.name), consumer=new_name(self.consumer), slices=slices)

    def columns(self, units: Iterable[int]) -> Tensor:
        """Return the consumer's input columns that the given units own: (columns,) int64, in the order of the units."""
        owners = torch.tensor(list(units), dtype=torch.int64)
        return (owners[:, None] * self.unit_width + torch.arange(self.unit_width)).flatten()

    def staying(self, tensor: str, kept: Kept) -> Tensor:
        """Return which output features of a producer, or indices of a parameter, stay: (indices,) int64, ascending."""
        slices = [piece for piece in self.slices if piece.tensor == tensor]
        stays = torch.ones(len(slices[0].owner), dtype=torch.bool)
        for piece in slices:
            stays[piece.indices(kept.removed_groups if piece.per_group else kept.removed)] = False
        return stays.nonzero().flatten()


@dataclass(frozen=True)
class Kept:
    """The units of one module that stay.

    Attributes:
        units: Original indices of the units that stay, ascending.
        total: Number of units before the cut.
        groups: Number of groups before the cut; a group stays as long as one of its units does.
        kind: Kind of the units, as in `Units`.
    """

    units: Indices
    total: Size
    groups: Size = 0
    kind: Annotated[str, Field(pattern=f"^({'|'.join(KINDS)})$")] = ATTENTION

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", self.groups or self.total)

    @cached_property
    def kept_groups(self) -> tuple[int, ...]:
        """Original indices of the groups that keep a unit, ascending."""
        return tuple(sorted({unit // max(1, self.total // self.groups) for unit in self.units}))

    @cached_property
    def removed(self) -> tuple[int, ...]:
        """Original indices of the removed units, ascending."""
        return tuple(sorted(set(range(self.total)) - set(self.units)))

    @cached_property
    def removed_groups(self) -> tuple[int, ...]:
        """Original indices of the removed groups, ascending."""
        return tuple(sorted(set(range(self.groups)) - set(self.kept_groups)))


def owner_of_rows(owner: Tensor) -> Tensor | None:
    """Return the owner of each row of a tensor, (rows,), from that of each element; None if a row has several."""
    by_row = owner.reshape(len(owner), -1)
    return by_row[:, 0] if bool((by_row == by_row[:, :1]).all()) else None


def check_indices(units: Sequence[int], total: int, *, what: str = "units") -> None:
    """Refuse, by a ValueError, kept units that are none, or no ascending indices below `total`."""
    is_ascending = all(unit < following for unit, following in pairwise(units))
    if not units:
        raise ValueError(f"{what} must be at least one of {total}, got none")
    if not (is_ascending and 0 <= units[0] <= units[-1] < total):
        raise ValueError(f"{what} must be ascending indices in [0, {total}), got {quoted(list(units))}")


Selection = Mapping[str, Kept]
"""Dotted name of a module -> its units that stay; modules in the model's order."""
