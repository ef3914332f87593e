"""Define a plan: a selection of units with its provenance, saved as JSON, and what else writes JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from pydantic import AllowInfNan, ConfigDict, Field, Strict, StrictFloat, StrictInt
from torch import Tensor

from ..errors import PlanError
from ..files import Rule, check, parse_json, read_json
from ..kinds import ATTENTION, MLP
from ..units.units import Indices, Kept, Selection, check_indices
from ..version import __version__

PLAN_FORMAT = 2

# Messages name modules, and cards say how a model was compensated.
_Name = Annotated[str, Field(max_length=500)]
_Fingerprint = Annotated[tuple[Annotated[float, Strict(), AllowInfNan(False)], ...], Field(min_length=3, max_length=3)]
_Field = Annotated[str, Field(pattern="^(method|refit)$")]
_Word = Annotated[str, Field(pattern="^[a-z0-9_]{1,64}$")]


@dataclass(frozen=True)
class PruningPlan:
    """A selection with its provenance.

    Applying the same plan to the same model always writes the same bytes.

    Attributes:
        kept: The units that stay, by module.
        criterion: Criterion of the scores.
        alpha: Weight of HIS in the criterion; None if the criterion has no such weight.
        seed: Seed of the calibration samples, and of the criterion `random`.
        calibration: `samples`, `labels` ("data" or "predictions") and `fingerprint` (SHA-256) of the batches.
        versions: Library -> version.
        model: Linear layer -> fingerprint of its weight, for the few layers by which a plan recognises its model; empty
            if unknown. See `hies_export.slim.check`.
        compensation: How the model of the selection is compensated, if at all: `method`, as in recipes, and `refit`,
            the SHA-256 of its refitted layers, once they exist. See `hies_export.checkpoint.save`.
        vocabulary: Tokens that stay, by their original numbers, ascending; empty if all do.

    Examples:
        >>> PruningPlan.from_json(plan.to_json()) == plan
        True
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    criterion: str
    alpha: StrictInt | StrictFloat | None = None
    seed: StrictInt = 0
    calibration: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[_Name, _Fingerprint] = field(default_factory=dict)
    compensation: Mapping[_Field, _Word] = field(default_factory=dict)
    vocabulary: Indices = ()
    kept: Mapping[_Name, Kept] = field(kw_only=True)

    def of_kind(self, kind: str) -> Selection:
        """Return the part of the selection that is of one kind of units, "attention" or "mlp"."""
        return {name: kept for name, kept in self.kept.items() if kept.kind == kind}

    @property
    def refit(self) -> str | None:
        """SHA-256 of the refitted layers of the model that was saved with this plan; None if it has none."""
        return self.compensation.get("refit")

    @property
    def removes(self) -> bool:
        """Whether any unit goes."""
        return any(kept.removed for kept in self.kept.values())

    @property
    def removed(self) -> int:
        """Number of query heads that the plan removes."""
        return sum(len(kept.removed) for kept in self.of_kind(ATTENTION).values())

    @property
    def removed_neurons(self) -> int:
        """Number of feed-forward neurons that the plan removes."""
        return sum(len(kept.removed) for kept in self.of_kind(MLP).values())

    def to_json(self) -> str:
        """Return the plan as JSON text, always the same bytes for the same plan.

        The `kind` of modules with heads, and an empty `compensation` or `vocabulary`, are left out.
        """
        fields = asdict(self)
        written = {"format": PLAN_FORMAT, "kept": fields.pop("kept"), **fields}
        for name in ("compensation", "vocabulary"):
            if not written[name]:
                del written[name]
        for kept in written["kept"].values():
            if kept["kind"] == ATTENTION:
                del kept["kind"]
        return dump_json(written)

    @classmethod
    def from_json(cls, text: str) -> PruningPlan:
        """Read a plan from JSON; a text that is no plan is a `PlanError`."""
        return _checked(parse_json(text, dict[str, Any], _PLAN_RULE, where="it"), "it")

    @classmethod
    def from_file(cls, path: str | Path) -> PruningPlan:
        """Read a plan from a JSON file; a missing or invalid file is a `PlanError`."""
        return _checked(read_json(path, dict[str, Any], _PLAN_RULE), str(path))


def selection_of(plan: PruningPlan | Selection) -> Selection:
    """Return the selection of a plan, or the selection itself."""
    return plan.kept if isinstance(plan, PruningPlan) else plan


_PLAN_RULE = Rule(
    f"a plan must be JSON written by hies_export (format {PLAN_FORMAT})",
    "make one by scoring, or by a run",
    PlanError,
    shown=True,
)


def _checked(values: dict[str, Any], where: str) -> PruningPlan:
    """Return the plan of a file's values; a `PlanError` says what is wrong with them, and `where`."""
    if values.pop("format", None) != PLAN_FORMAT:
        raise _PLAN_RULE.refused(f"in {where} format is not {PLAN_FORMAT}")
    plan: PruningPlan = check(values, PruningPlan, _PLAN_RULE, where=where)
    try:
        for kept in plan.kept.values():
            check_indices(kept.units, kept.total)
            if kept.total % kept.groups:
                raise ValueError(f"total must be a multiple of groups, got {kept.total} and {kept.groups}")
        if plan.vocabulary:
            check_indices(plan.vocabulary, 2**31, what="tokens of the vocabulary")
    except ValueError as error:
        raise _PLAN_RULE.refused(f"in {where} {error}") from error
    return plan


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
