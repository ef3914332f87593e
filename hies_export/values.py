"""The small frozen values that flow from one stage to the next."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from . import __version__
from .errors import PlanError

PLAN_FORMAT = 1


@dataclass(frozen=True)
class Projection:
    """A linear layer in front of the attention, with the output features that belong to one head each.

    A fused layer has features of query and of key/value heads; features that all heads share belong to none. Also a
    parameter outside of linear layers, with the rows that belong to one head each.

    Attributes:
        name: Dotted name of the layer, or of the parameter.
        query: Per query head, its output features; empty where the layer has none.
        key_value: Per key/value head, its output features; empty where the layer has none.
    """

    name: str
    query: tuple[tuple[int, ...], ...] = ()
    key_value: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class AttentionSite:
    """One attention module of a model, as its attention function saw it.

    Attributes:
        name: Dotted name of the module.
        heads: Number of query heads.
        key_value_heads: Number of key/value heads; smaller than `heads` under grouped-query attention.
        query_dim: Width of one query (and key) head.
        value_dim: Width of one value head.
        projections: The layers in front of the attention that have features of single heads.
        output: Dotted name of the output projection, whose inputs are the heads' outputs in order.
        attributes: Attributes of the module that follow the number of heads ("config.NAME" for one that the module
            reads from its config), and what each of them counts; see `head_count`.
        parameters: Parameters outside of linear layers whose rows (axis 0) belong to one head each, such as sinks.
    """

    name: str
    heads: int
    key_value_heads: int
    query_dim: int
    value_dim: int
    projections: tuple[Projection, ...]
    output: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    parameters: tuple[Projection, ...] = ()

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.key_value_heads

    def head_count(self, what: str, *, heads: int, key_value_heads: int) -> int:
        """The value of an attribute of this module with so many heads.

        Args:
            what: "heads", "key_value_heads", "group_size", "query_width", "key_width", "value_width" or "output_width".
            heads: Number of query heads.
            key_value_heads: Number of key/value heads.
        """
        return {
            "heads": heads,
            "key_value_heads": key_value_heads,
            "group_size": heads // key_value_heads,
            "query_width": heads * self.query_dim,
            "key_width": key_value_heads * self.query_dim,
            "value_width": key_value_heads * self.value_dim,
            "output_width": heads * self.value_dim,
        }[what]


@dataclass(frozen=True)
class HeadStatistics:
    """What the calibration data says of every head, averaged over samples; float64 tensors of shape (heads,) on CPU.

    Attributes:
        his: Mean absolute gradient of each sample's loss to a mask of one on the head's output.
        entropy: Mean length-normalised entropy of the head's attention rows, in [0, 1].
        weight_l2: L2 norm of the head's q/k/v rows and o columns.
        samples: How many samples were averaged.
        labels: "data", or "predictions" when the model's own predictions stood in for labels.
        fingerprint: SHA-256 of the calibration batches.
        batch_size: Most samples that went through the model at once; fewer than the batches hold where these did not
            fit into memory.
        signals: What some baselines need beyond that, from `collect_signals`; empty unless one asks for it.
    """

    his: Mapping[str, Tensor]
    entropy: Mapping[str, Tensor]
    weight_l2: Mapping[str, Tensor]
    samples: int
    labels: str
    fingerprint: str
    batch_size: int = 1
    signals: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadScores:
    """One score per head; higher means keep.

    Attributes:
        criterion: Name in `hies_export.score.CRITERIA`, or "hies-compensated".
        parameters: What the criterion was computed with, e.g. alpha.
        scores: Per attention module, float64 tensor of shape (heads,).
    """

    criterion: str
    parameters: Mapping[str, Any]
    scores: Mapping[str, Tensor]


@dataclass(frozen=True)
class KeptHeads:
    """The original indices of the heads that stay in one attention module, ascending.

    Attributes:
        query: Query heads that stay.
        key_value: Key/value heads that stay.
        heads: Number of query heads before the cut.
        key_value_heads: Number of key/value heads before the cut.
    """

    query: tuple[int, ...]
    key_value: tuple[int, ...]
    heads: int
    key_value_heads: int


@dataclass(frozen=True)
class PruningPlan:
    """Which heads stay, and where the decision came from.

    The same plan applied to the same model gives the same bytes.

    Attributes:
        kept: Per attention module, by its dotted name, the heads that stay.
        criterion: Criterion the plan was made with.
        alpha: Weight of HIS in the criterion, None where the criterion has none.
        seed: Seed of the calibration sample (and of `random`).
        calibration: `samples`, `labels` ("data" or "predictions") and `fingerprint` (SHA-256) of the batches.
        versions: Library versions the plan was made with.
        model: What tells the model the plan was made for from others: the L2 norms of some output projections, by name;
            empty where that is not known. Norms are the same, to 1e-4, in every dtype.

    Examples:
        >>> PruningPlan.from_json(plan.to_json()) == plan
        True
    """

    kept: Mapping[str, KeptHeads]
    criterion: str
    alpha: float | None
    seed: int
    calibration: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, float] = field(default_factory=dict)

    @property
    def heads(self) -> int:
        """Query heads before the cut."""
        return sum(k.heads for k in self.kept.values())

    @property
    def removed(self) -> int:
        """Query heads that go."""
        return sum(k.heads - len(k.query) for k in self.kept.values())

    def to_json(self) -> str:
        """The plan as JSON text, always the same bytes for the same plan."""
        return dump_json({"format": PLAN_FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> PruningPlan:
        """Read a plan back.

        Raises:
            PlanError: The text is not a plan.
        """
        try:
            fields = json.loads(text)
            if fields.pop("format") != PLAN_FORMAT:
                raise ValueError("unknown format")
            fields["kept"] = {
                name: KeptHeads(
                    query=tuple(k["query"]),
                    key_value=tuple(k["key_value"]),
                    heads=k["heads"],
                    key_value_heads=k["key_value_heads"],
                )
                for name, k in fields["kept"].items()
            }
            return cls(**fields)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"a plan must be JSON written by hies_export (format {PLAN_FORMAT}), got something else ({error!r}); "
                "make one with 'hies-export score' or 'hies-export run'"
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


def dump_json(value: Any) -> str:
    """JSON text with tensors as lists; indented, so that files can be read and compared by people."""

    def encode(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item.tolist()
        if isinstance(item, Path):
            return str(item)
        raise TypeError(f"cannot write {type(item).__name__} as JSON")

    return json.dumps(value, indent=1, default=encode, ensure_ascii=False) + "\n"


def library_versions() -> dict[str, str]:
    """Versions of the libraries that decide what a plan or a measurement means."""
    # The package itself may be run from a checkout.
    return {"hies-export": __version__, **{name: version(name) for name in ("torch", "transformers")}}
