"""Define the small frozen values that flow from one stage to the next.

PrunableModule   where units (attention heads) are in a model              prunable -> all
Statistics       what calibration says of every unit                       calibrate -> score
Scores           one number per unit, higher = keep                        score -> select
Selection        the units that stay, by module                            select -> slim
PruningPlan      a selection and where it comes from, as JSON              select -> slim, report, stream
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
    """Indices that consecutive units own: unit `first + i` has `width` of them from `start + i * step` on.

    Attributes:
        first: The first unit.
        units: Number of units.
        start: First index of the first unit.
        step: From a unit's first index to that of the next unit; the width where units lie side by side.
        width: Indices of one unit.
    """

    first: int
    units: int
    start: int
    step: int
    width: int


@dataclass(frozen=True)
class Slice:
    """The rows of one tensor that belong to the units, or the groups, of a module.

    Rows that all units share belong to none, and stay whatever is cut. A fused layer has one slice for its query rows
    and one for its key and value rows.

    Attributes:
        tensor: Dotted name of a linear layer, or of a parameter outside of linear layers.
        axis: Axis of (out_features, in_features), or of the parameter, that is indexed.
        spans: Which indices belong to which unit.
        per_group: Whether a group owns the indices (a key/value head), or a unit (a query head).
        parameter: Whether `tensor` is a parameter outside of linear layers, such as an attention sink.
    """

    tensor: str
    axis: int
    spans: tuple[Span, ...]
    per_group: bool = False
    parameter: bool = False

    def indices(self, owners: Iterable[int]) -> Tensor:
        """Return the indices, unordered int64, that some units (or groups, where `per_group`) own."""
        wanted = torch.tensor(sorted(owners), dtype=torch.int64)
        found = [torch.empty(0, dtype=torch.int64)]
        for span in self.spans:
            here = wanted[(wanted >= span.first) & (wanted < span.first + span.units)] - span.first
            found.append((span.start + here[:, None] * span.step + torch.arange(span.width)).flatten())
        return torch.cat(found)


def spans_of(owned: Sequence[Iterable[int]]) -> tuple[Span, ...]:
    """Describe what every unit owns in as few spans as a pass over the units finds.

    Args:
        owned: Of every unit the indices it owns, in any order.
    """
    found: list[Span] = []
    open_spans: list[Span] = []  # the previous unit's, which this unit may continue
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
    """What an integer attribute of a module counts.

    Attributes:
        of: "units", "groups" or "group_size" (units per group).
        times: What the count is multiplied by, such as the width of a head.
    """

    of: str
    times: int = 1

    def value(self, *, units: int, groups: int) -> int:
        """Return the attribute's value for so many units in so many groups."""
        return self.times * {"units": units, "groups": groups, "group_size": units // groups}[self.of]


@dataclass(frozen=True, kw_only=True)
class Units:
    """The units of a module: all that choosing among them needs to know.

    In attention a unit is a query head, and a group is a key/value head with its query heads.

    Attributes:
        name: Dotted name of the module.
        units: Number of units.
        groups: Number of groups of consecutive units; as many as units where every unit is its own.
    """

    name: str
    units: int
    groups: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", self.groups or self.units)

    @property
    def group_size(self) -> int:
        """Units per group."""
        return self.units // self.groups

    def kept(self, units: Iterable[int]) -> Kept:
        """Return a choice of units of this module."""
        return Kept(tuple(sorted(units)), self.units, self.groups)


@dataclass(frozen=True, kw_only=True)
class PrunableModule(Units):
    """A part of a model made of units that can go: blocks of input columns of one consumer linear layer.

    Unit u is the columns [u * unit_width, (u + 1) * unit_width) of the consumer, and the rows of the producers that
    are coupled to them.

    Attributes:
        name, units, groups: See `Units`.
        kind: "attention".
        unit_width: Input columns of the consumer that belong to one unit.
        consumer: Dotted name of the linear layer that reads the units in order, such as `o_proj`.
        slices: What the units own of the layers and parameters in front of the consumer.
        attributes: Attributes of the module that follow its units ("config.NAME" for one that the module reads from its
            config), and what each of them counts.
        key_width: Width of a query or key vector of one unit; None for a kind without them.
    """

    kind: str
    unit_width: int
    consumer: str
    slices: tuple[Slice, ...] = ()
    attributes: Mapping[str, Count] = field(default_factory=dict)
    key_width: int | None = None

    @property
    def producers(self) -> tuple[str, ...]:
        """Dotted names of the linear layers in front of the consumer."""
        return tuple(dict.fromkeys(s.tensor for s in self.slices if not s.parameter))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Dotted names of the parameters outside of linear layers that have rows of units."""
        return tuple(dict.fromkeys(s.tensor for s in self.slices if s.parameter))

    def columns(self, units: Iterable[int]) -> Tensor:
        """Return the consumer's input columns, int64, that some units own, in the order given."""
        owners = torch.tensor(list(units), dtype=torch.int64)
        return (owners[:, None] * self.unit_width + torch.arange(self.unit_width)).flatten()

    def staying(self, tensor: str, kept: Kept, size: int) -> Tensor:
        """Return which of the `size` indices of a producer or parameter stay, int64, ascending."""
        stay = torch.ones(size, dtype=torch.bool)
        for part in self.slices:
            if part.tensor == tensor:
                stay[part.indices(kept.removed_groups if part.per_group else kept.removed)] = False
        return stay.nonzero().flatten()

    # The names of the first design, when heads were all there was.
    heads = property(lambda self: self.units, doc="`units`.")
    key_value_heads = property(lambda self: self.groups, doc="`groups`.")
    query_dim = property(lambda self: self.key_width, doc="`key_width`.")
    value_dim = property(lambda self: self.unit_width, doc="`unit_width`.")
    output = property(lambda self: self.consumer, doc="`consumer`.")


@dataclass(frozen=True)
class Kept:
    """The units of one module that stay.

    Attributes:
        units: Their original indices, ascending.
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
        """Original indices of the units that go, ascending."""
        return tuple(sorted(set(range(self.total)) - set(self.units)))

    @cached_property
    def removed_groups(self) -> tuple[int, ...]:
        """Original indices of the groups that go, ascending."""
        return tuple(sorted(set(range(self.groups)) - set(self.kept_groups)))

    # The names of the first design.
    query = property(lambda self: self.units, doc="`units`.")
    key_value = property(lambda self: self.kept_groups, doc="`kept_groups`.")
    heads = property(lambda self: self.total, doc="`total`.")
    key_value_heads = property(lambda self: self.groups, doc="`groups`.")


Selection = Mapping[str, Kept]
"""The units that stay, by the dotted name of their module, in the model's order."""


@dataclass(frozen=True)
class Calibration:
    """The calibration that statistics come from.

    Attributes:
        samples: How many samples were averaged.
        labels: "data", or "predictions" when the model's own predictions stood in for labels.
        fingerprint: SHA-256 of the batches.
        batch_size: Most samples that went through the model at once; fewer than the batches hold where these did not
            fit into memory.
    """

    samples: int
    labels: str
    fingerprint: str
    batch_size: int = 1


@dataclass(frozen=True)
class Statistics:
    """What the calibration data says of every unit.

    Attributes:
        values: Statistic -> module -> (units,) float64 on CPU. "his" is the mean absolute gradient of each sample's
            loss to a mask of one on the unit's output, "entropy" the mean length-normalised entropy of the head's
            attention rows in [0, 1], "weight_l2" the norm of the unit's weights; `calibrate` lists the others.
        calibration: Where they come from.
    """

    values: Mapping[str, Mapping[str, Tensor]]
    calibration: Calibration

    def __getitem__(self, statistic: str) -> Mapping[str, Tensor]:
        return self.values[statistic]

    # The names of the first design.
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
        parameters: What the criterion was computed with, e.g. alpha.
        scores: Per module, float64 tensor of shape (units,).
    """

    criterion: str
    parameters: Mapping[str, Any]
    scores: Mapping[str, Tensor]


@dataclass(frozen=True)
class Provenance:
    """Where a selection comes from.

    Attributes:
        criterion: Criterion of the scores.
        alpha: Weight of HIS in the criterion, None where the criterion has none.
        seed: Seed of the calibration sample (and of `random`).
        calibration: `samples`, `labels` ("data" or "predictions") and `fingerprint` (SHA-256) of the batches.
        versions: Library versions.
        model: L2 norms of some consumers, by name, that tell the model from others; empty where that is not known.
            Norms are the same, to 1e-4, in every dtype.
    """

    criterion: str
    alpha: float | None = None
    seed: int = 0
    calibration: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PruningPlan:
    """A selection with its provenance. The same plan applied to the same model gives the same bytes.

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
        """Return a selection with its provenance."""
        return cls(kept, **{part.name: getattr(provenance, part.name) for part in fields(Provenance)})

    @property
    def heads(self) -> int:
        """Query heads before the cut."""
        return sum(kept.total for kept in self.kept.values())

    @property
    def removed(self) -> int:
        """Query heads that go."""
        return sum(kept.total - len(kept.units) for kept in self.kept.values())

    def to_json(self) -> str:
        """Return the plan as JSON text, always the same bytes for the same plan."""
        return dump_json({"format": PLAN_FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> PruningPlan:
        """Read a plan of format 2, or of format 1, which knew attention heads only.

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
        """Read a plan from a file.

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
    """Return JSON text, indented, with tensors as lists and paths as strings."""

    def encode(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item.tolist()
        if isinstance(item, Path):
            return str(item)
        raise TypeError(f"cannot write {type(item).__name__} as JSON")

    return json.dumps(value, indent=1, default=encode, ensure_ascii=False) + "\n"


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that decide what a plan or a measurement means."""
    # The package itself may be run from a checkout.
    return {"hies-export": __version__, **{name: version(name) for name in ("torch", "transformers")}}
