"""Define the small frozen values that flow from one stage to the next.

PrunableModule   where the units (attention heads) of a module are         prunable -> all
Statistics       averages per unit over the calibration samples            calibrate -> score
Scores           one number per unit; higher means keep                    score -> select
Selection        the units that stay, by module                            select -> slim
PruningPlan      a selection with its provenance, saved as JSON            select -> slim, report, stream
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import __version__
from .errors import PlanError

PLAN_FORMAT = 2


@dataclass(frozen=True)
class Span:
    """Evenly spaced blocks of indices, one for each of several consecutive units.

    Unit `first + i` owns the `width` indices that begin at `start + i * step`.

    Attributes:
        first: Number of the first unit.
        units: Number of units.
        start: First index of the first unit.
        step: Distance between the first indices of neighbouring units; the width where units lie side by side.
        width: Number of indices per unit.
    """

    first: int
    units: int
    start: int
    step: int
    width: int


@dataclass(frozen=True)
class Slice:
    """The indices along one axis of a tensor that belong to the units, or to the groups, of a module.

    Indices that all units share are in no slice, so no cut removes them. A fused attention layer has one slice for its
    query rows and one for its key and value rows.

    Attributes:
        tensor: Dotted name of a linear layer, or of a parameter outside of linear layers.
        axis: The indexed axis, of a weight (out_features, in_features) or of the parameter.
        spans: The indices of every unit or group.
        per_group: Whether the owners are groups (key/value heads) rather than units (query heads).
        parameter: Whether `tensor` is a parameter outside of linear layers, such as an attention sink.
    """

    tensor: str
    axis: int
    spans: tuple[Span, ...]
    per_group: bool = False
    parameter: bool = False

    def indices(self, owners: Iterable[int]) -> Tensor:
        """Return the indices that the given units (or groups, where `per_group`) own: (indices,) int64, unordered."""
        wanted = torch.tensor(sorted(owners), dtype=torch.int64)
        found = [torch.empty(0, dtype=torch.int64)]
        for span in self.spans:
            here = wanted[(wanted >= span.first) & (wanted < span.first + span.units)] - span.first
            found.append((span.start + here[:, None] * span.step + torch.arange(span.width)).flatten())
        return torch.cat(found)


def spans_of(owned: Sequence[Iterable[int]]) -> tuple[Span, ...]:
    """Return spans that hold exactly the indices of every unit.

    Consecutive units whose indices are evenly spaced share a span.

    Args:
        owned: For every unit, the indices it owns, in any order.
    """
    found: list[Span] = []
    open_spans: list[Span] = []  # spans of the previous unit, which this unit may extend
    for unit, indices in enumerate(owned):
        continued = []
        for place, (start, width) in enumerate(_runs(sorted(indices))):
            span = open_spans[place] if place < len(open_spans) else None
            if span is not None and span.width == width and span.units == 1:
                span = Span(span.first, 2, span.start, start - span.start, width)
            elif span is not None and span.width == width and start == span.start + span.units * span.step:
                span = Span(span.first, span.units + 1, span.start, span.step, width)
            else:
                span = None
            continued.append(span or Span(unit, 1, start, width, width))
        ended = [s for s in open_spans if not any((s.first, s.start) == (c.first, c.start) for c in continued)]
        found += ended
        open_spans = continued
    return tuple(sorted(found + open_spans, key=lambda span: (span.first, span.start)))


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, width) of every run of consecutive numbers, ascending."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and index == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs


@dataclass(frozen=True)
class Count:
    """The meaning of an integer attribute of a module: a number of units or groups, times a factor.

    Attributes:
        of: "units", "groups" or "group_size" (units per group).
        times: The factor, such as the width of a head.
    """

    of: str
    times: int = 1

    def value(self, *, units: int, groups: int) -> int:
        """Return the attribute's value for the given numbers of units and groups."""
        return self.times * {"units": units, "groups": groups, "group_size": units // groups}[self.of]


@dataclass(frozen=True, kw_only=True)
class Units:
    """The number of units and groups in a module: all that a selection needs to know of it.

    In attention a unit is a query head, and a group is a key/value head with its query heads.

    Attributes:
        name: Dotted name of the module.
        units: Number of units.
        groups: Number of equal groups of consecutive units; by default every unit is a group of its own.
    """

    name: str
    units: int
    groups: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", self.groups or self.units)

    @property
    def group_size(self) -> int:
        """Number of units per group."""
        return self.units // self.groups

    def kept(self, units: Iterable[int]) -> Kept:
        """Return the selection that keeps the given units of this module."""
        return Kept(tuple(sorted(units)), self.units, self.groups)


@dataclass(frozen=True, kw_only=True)
class PrunableModule(Units):
    """A module whose units can be removed, such as an attention module and its heads.

    Unit u owns the input columns [u * unit_width, (u + 1) * unit_width) of one linear layer, the consumer. It also owns
    rows of the producers, the linear layers that compute these inputs.

    Attributes:
        name, units, groups: See `Units`.
        kind: Kind of the units: "attention" for attention heads.
        unit_width: Number of the consumer's input columns that one unit owns.
        consumer: Dotted name of the linear layer that reads the units in order, such as `o_proj`.
        slices: What the units and groups own of the producers, and of parameters outside of linear layers.
        attributes: Attribute of the module that depends on its number of units -> what it counts. An attribute that
            the module reads from its config is called "config.NAME".
        key_width: Width of a unit's query and key vectors; None for units that have none.
    """

    kind: str
    unit_width: int
    consumer: str
    slices: tuple[Slice, ...] = ()
    attributes: Mapping[str, Count] = field(default_factory=dict)
    key_width: int | None = None

    @property
    def producers(self) -> tuple[str, ...]:
        """Dotted names of the linear layers in front of the consumer in which units own rows."""
        return tuple(dict.fromkeys(s.tensor for s in self.slices if not s.parameter))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Dotted names of the parameters outside of linear layers in which units own rows."""
        return tuple(dict.fromkeys(s.tensor for s in self.slices if s.parameter))

    def columns(self, units: Iterable[int]) -> Tensor:
        """Return the consumer's input columns that the given units own: (columns,) int64, in the order of the units."""
        owners = torch.tensor(list(units), dtype=torch.int64)
        return (owners[:, None] * self.unit_width + torch.arange(self.unit_width)).flatten()

    def staying(self, tensor: str, kept: Kept, size: int) -> Tensor:
        """Return which of the `size` rows of a producer or parameter stay: (rows,) int64, ascending."""
        stay = torch.ones(size, dtype=torch.bool)
        for part in self.slices:
            if part.tensor == tensor:
                stay[part.indices(kept.removed_groups if part.per_group else kept.removed)] = False
        return stay.nonzero().flatten()

    # Names from the first design, which knew attention heads only.
    heads = property(lambda self: self.units, doc="`units`.")
    key_value_heads = property(lambda self: self.groups, doc="`groups`.")
    query_dim = property(lambda self: self.key_width, doc="`key_width`.")
    value_dim = property(lambda self: self.unit_width, doc="`unit_width`.")
    output = property(lambda self: self.consumer, doc="`consumer`.")


@dataclass(frozen=True)
class Kept:
    """The units of one module that stay.

    Attributes:
        units: Original indices of the units that stay, ascending.
        total: Number of units before the cut.
        groups: Number of groups before the cut; a group stays as long as one of its units does.
    """

    units: tuple[int, ...]
    total: int
    groups: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", self.groups or self.total)

    @cached_property
    def kept_groups(self) -> tuple[int, ...]:
        """Original indices of the groups that keep a unit, ascending."""
        size = max(1, self.total // self.groups)
        return tuple(sorted({unit // size for unit in self.units}))

    @cached_property
    def removed(self) -> tuple[int, ...]:
        """Original indices of the removed units, ascending."""
        return tuple(sorted(set(range(self.total)) - set(self.units)))

    @cached_property
    def removed_groups(self) -> tuple[int, ...]:
        """Original indices of the removed groups, ascending."""
        return tuple(sorted(set(range(self.groups)) - set(self.kept_groups)))

    # Names from the first design.
    query = property(lambda self: self.units, doc="`units`.")
    key_value = property(lambda self: self.kept_groups, doc="`kept_groups`.")
    heads = property(lambda self: self.total, doc="`total`.")
    key_value_heads = property(lambda self: self.groups, doc="`groups`.")


Selection = Mapping[str, Kept]
"""Dotted name of a module -> its units that stay; modules in the model's order."""


@dataclass(frozen=True)
class Calibration:
    """The calibration run that produced the statistics.

    Attributes:
        samples: Number of samples averaged over.
        labels: "data", or "predictions" if the model's own predictions replaced missing labels.
        fingerprint: SHA-256 of the batches.
        batch_size: Largest number of samples in one forward pass. It is below the size of the batches if these did not
            fit into memory.
    """

    samples: int
    labels: str
    fingerprint: str
    batch_size: int = 1


@dataclass(frozen=True)
class Statistics:
    """Statistics of every unit over the calibration samples.

    Attributes:
        values: Statistic -> module -> (units,) float64 on CPU. "his" is the mean over samples of the absolute gradient
            of the loss with respect to a mask of one on the unit's output. "entropy" (attention only) is the mean
            entropy of the head's attention rows, normalised by their length to [0, 1]. "weight_l2" is the L2 norm of
            the unit's weights. The docstring of `hies_export.calibrate` lists the others.
        calibration: The run that produced them.
    """

    values: Mapping[str, Mapping[str, Tensor]]
    calibration: Calibration

    def __getitem__(self, statistic: str) -> Mapping[str, Tensor]:
        return self.values[statistic]

    # Names from the first design.
    his = property(lambda self: self.values["his"], doc="`values['his']`.")
    entropy = property(lambda self: self.values["entropy"], doc="`values['entropy']`.")
    weight_l2 = property(lambda self: self.values["weight_l2"], doc="`values['weight_l2']`.")
    samples = property(lambda self: self.calibration.samples, doc="`calibration.samples`.")
    labels = property(lambda self: self.calibration.labels, doc="`calibration.labels`.")
    fingerprint = property(lambda self: self.calibration.fingerprint, doc="`calibration.fingerprint`.")
    batch_size = property(lambda self: self.calibration.batch_size, doc="`calibration.batch_size`.")


@dataclass(frozen=True)
class Scores:
    """One score per unit; higher means keep.

    Attributes:
        criterion: Name in `hies_export.score.CRITERIA`, or "hies-compensated".
        parameters: Options of the criterion, such as alpha.
        scores: Module -> (units,) float64.
    """

    criterion: str
    parameters: Mapping[str, Any]
    scores: Mapping[str, Tensor]


@dataclass(frozen=True)
class Provenance:
    """The origin of a selection.

    Attributes:
        criterion: Criterion of the scores.
        alpha: Weight of HIS in the criterion; None if the criterion has no such weight.
        seed: Seed of the calibration samples, and of the criterion `random`.
        calibration: `samples`, `labels` ("data" or "predictions") and `fingerprint` (SHA-256) of the batches.
        versions: Library -> version.
        model: Consumer -> L2 norm of its weight, for the few consumers by which a plan recognises its model; empty if
            unknown. Changing the dtype changes a norm by less than 1e-4.
    """

    criterion: str
    alpha: float | None = None
    seed: int = 0
    calibration: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PruningPlan:
    """A selection with its provenance.

    Applying the same plan to the same model always writes the same bytes.

    Attributes:
        kept: The units that stay, by module.
        criterion, alpha, seed, calibration, versions, model: See `Provenance`.

    Examples:
        >>> PruningPlan.from_json(plan.to_json()) == plan
        True
    """

    kept: Selection
    criterion: str
    alpha: float | None = None
    seed: int = 0
    calibration: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, kept: Selection, provenance: Provenance) -> PruningPlan:
        """Return the plan of a selection and its provenance."""
        return cls(kept, **{part.name: getattr(provenance, part.name) for part in fields(Provenance)})

    @property
    def heads(self) -> int:
        """Number of units (query heads) before the cut."""
        return sum(kept.total for kept in self.kept.values())

    @property
    def removed(self) -> int:
        """Number of units (query heads) that the plan removes."""
        return sum(kept.total - len(kept.units) for kept in self.kept.values())

    def to_json(self) -> str:
        """Return the plan as JSON text, always the same bytes for the same plan."""
        return dump_json({"format": PLAN_FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> PruningPlan:
        """Read a plan from JSON of format 2, or of format 1, which knew attention heads only.

        Raises:
            PlanError: The text is not a plan.
        """
        try:
            plan = json.loads(text)
            read = {1: _kept_of_format_1, PLAN_FORMAT: _kept_of_format_2}[plan.pop("format")]
            plan["kept"] = {name: read(name, kept) for name, kept in plan["kept"].items()}
            return cls(**plan)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"a plan must be JSON written by hies_export (format 1 or {PLAN_FORMAT}), got something else "
                f"({error!r}); make one with 'hies-export score' or 'hies-export run'"
            ) from error

    @classmethod
    def from_file(cls, path: str | Path) -> PruningPlan:
        """Read a plan from a JSON file.

        Raises:
            PlanError: There is no such file, or it is not a plan.
        """
        path = Path(path)
        if not path.is_file():
            raise PlanError(f"a plan must be a JSON file, but there is no file {path}; give the path of a plan.json")
        return cls.from_json(path.read_text(encoding="utf-8"))


def selection_of(plan: PruningPlan | Selection) -> Selection:
    """Return the selection of a plan, or the selection itself."""
    return plan.kept if isinstance(plan, PruningPlan) else plan


def _kept_of_format_2(name: str, kept: Mapping[str, Any]) -> Kept:
    return Kept(tuple(kept["units"]), kept["total"], kept["groups"])


def _kept_of_format_1(name: str, kept: Mapping[str, Any]) -> Kept:
    found = Kept(tuple(kept["query"]), kept["heads"], kept["key_value_heads"])
    if found.kept_groups != tuple(kept["key_value"]):
        raise PlanError(
            f"a key/value head goes when, and only when, its query heads go, but in {name} the plan keeps query heads "
            f"{list(kept['query'])} with key/value heads {list(kept['key_value'])}"
        )
    return found


def dump_json(value: Any) -> str:
    """Return a value as indented JSON text, with tensors as lists and paths as strings."""

    def encode(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item.tolist()
        if isinstance(item, Path):
            return str(item)
        raise TypeError(f"cannot write {type(item).__name__} as JSON")

    return json.dumps(value, indent=1, default=encode, ensure_ascii=False) + "\n"


def library_versions() -> dict[str, str]:
    """Return library -> version for the libraries that a plan or a measurement depends on."""
    # A package run from a checkout has no installed metadata, so its own version is a constant.
    return {"hies-export": __version__, **{name: version(name) for name in ("torch", "transformers")}}
