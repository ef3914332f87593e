"""Keep the names of the first design, which knew attention heads only.

Old name                      New name

find_attention, collect_statistics, apply_plan, ...   unchanged
AttentionSite, Projection     PrunableModule, Slice; the old classes take the old fields
KeptHeads                     Kept; takes the old fields
HeadStatistics                Statistics; takes the old fields
HeadScores                    Scores
score_heads                   score_units
select_heads                  select_units, which returns a Selection instead of a PruningPlan
prune_heads                   prune_units
masked_heads, check_cut       masked_units, compare_cut, which take the modules as well
compensate_heads              compensate, which takes a Compensation
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .errors import PlanError
from .model.attention import AttentionCall, use_attention
from .model.kernels import VisibleKeys, attend
from .progress import SILENT, Progress
from .prunable.attention import find_attention
from .score.criteria import score_units as score_heads
from .select.constraints import Constraints
from .select.select import select_units
from .slim.check import compare_cut
from .slim.cut import prune_units
from .slim.refit import Compensation, LayerFit, compensate
from .units import Count, Kept, PrunableModule, Slice, spans_of
from .values import Calibration, PruningPlan, Statistics, library_versions
from .values import Scores as HeadScores

__all__ = [
    "AttentionSite",
    "HeadScores",
    "HeadStatistics",
    "KeptHeads",
    "Projection",
    "check_cut",
    "compensate_heads",
    "masked_heads",
    "prune_heads",
    "score_heads",
    "select_heads",
]


@dataclass(frozen=True)
class Projection:
    """The features that each head owns in a linear layer; now up to two `Slice`s.

    Attributes:
        name: Dotted name of the layer.
        query: The features of every query head.
        key_value: The features of every key/value head.
    """

    name: str
    query: tuple[tuple[int, ...], ...] = ()
    key_value: tuple[tuple[int, ...], ...] = ()


class AttentionSite(PrunableModule):
    """A `PrunableModule` of attention heads that is built from the fields of the first design."""

    def __init__(
        self,
        name: str,
        heads: int,
        key_value_heads: int,
        query_dim: int,
        value_dim: int,
        projections: Sequence[Projection],
        output: str,
        **others: Any,
    ):
        parameters: Sequence[Projection] = others.get("parameters", ())
        slices = [
            Slice(part.name, 0, spans_of(owned), per_group=per_group, parameter=is_parameter)
            for is_parameter, parts in ((False, projections), (True, parameters))
            for part in parts
            for per_group, owned in ((False, part.query), (True, part.key_value))
            if owned
        ]
        widths = {"query_width": query_dim, "output_width": value_dim}
        group_widths = {"key_width": query_dim, "value_width": value_dim}
        counts = {
            "heads": Count("units"),
            "key_value_heads": Count("groups"),
            "group_size": Count("group_size"),
            **{what: Count("units", width) for what, width in widths.items()},
            **{what: Count("groups", width) for what, width in group_widths.items()},
        }
        super().__init__(
            name=name,
            kind="attention",
            units=heads,
            unit_width=value_dim,
            consumer=output,
            slices=tuple(slices),
            attributes={key: counts[what] for key, what in others.get("attributes", {}).items()},
            groups=key_value_heads,
            key_width=query_dim,
        )


class KeptHeads(Kept):
    """A `Kept` that is built from the fields of the first design."""

    def __init__(self, query: Sequence[int], key_value: Sequence[int], heads: int, key_value_heads: int):
        super().__init__(tuple(query), heads, key_value_heads)
        if self.kept_groups != tuple(key_value):
            raise PlanError(
                f"a key/value head goes when, and only when, its query heads go, got query heads {list(query)} with "
                f"key/value heads {list(key_value)}"
            )


class HeadStatistics(Statistics):
    """A `Statistics` that is built from the fields of the first design."""

    def __init__(
        self,
        his: Mapping[str, Tensor],
        entropy: Mapping[str, Tensor],
        weight_l2: Mapping[str, Tensor],
        samples: int,
        labels: str,
        fingerprint: str,
        batch_size: int = 1,
        signals: Mapping[str, Mapping[str, Tensor]] | None = None,
    ):
        values = {"his": his, "entropy": entropy, "weight_l2": weight_l2, **(signals or {})}
        super().__init__(values, Calibration(samples, labels, fingerprint, batch_size))


def select_heads(
    scores: HeadScores,
    sites: Sequence[PrunableModule],
    *,
    heads: float | None = None,
    counts: Sequence[int] | None = None,
    seed: int = 0,
    calibration: Mapping[str, Any] | None = None,
    model: Mapping[str, tuple[float, ...]] | None = None,
    **constraints: Any,
) -> PruningPlan:
    """Return the plan that `select_units` selects, with its provenance.

    Args:
        scores, sites, heads, counts: As in `select_units`.
        seed, calibration, model: As in `Provenance`.
        constraints: The fields of `Constraints`.

    Examples:
        >>> plan = select_heads(scores, modules, heads=0.5)
        >>> plan.removed, plan.heads
        (9, 18)
    """
    return PruningPlan(
        kept=select_units(scores, sites, heads=heads, counts=counts, constraints=Constraints(**constraints)),
        criterion=scores.criterion,
        alpha=scores.parameters.get("alpha"),
        seed=seed,
        calibration=dict(calibration or {}),
        versions=library_versions(),
        model=dict(model or {}),
    )


def prune_heads(
    model: PreTrainedModel, plan: PruningPlan, sites: Sequence[PrunableModule], *, inplace: bool = False
) -> PreTrainedModel:
    """Return the slim model that `prune_units` cuts by a plan."""
    return prune_units(model, plan, sites, inplace=inplace)


@contextmanager
def masked_heads(model: PreTrainedModel, plan: PruningPlan) -> Iterator[None]:
    """Multiply the outputs of the attention heads that a plan removes by zero, inside the block.

    It replaces the model's attention function, so it needs no modules. `masked_units` masks units of any kind, at the
    input of their consumer.

    Args:
        model: The dense model; restored after the block.
        plan: The heads that stay.

    Examples:
        >>> with masked_heads(model, plan):
        ...     logits = model(**batches[0]).logits
    """
    masks = {}
    for name, kept in plan.kept.items():
        mask = torch.zeros(1, kept.total, 1, 1)
        mask[:, list(kept.units)] = 1
        masks[model.get_submodule(name)] = mask
    visible = VisibleKeys()

    def function(call: AttentionCall) -> Tensor:
        output = attend(call, visible)
        mask = masks.get(call.module)
        return output if mask is None else output * mask.to(output)

    with use_attention(model, function):
        yield


def check_cut(dense: PreTrainedModel, slim: PreTrainedModel, plan: PruningPlan, batch: Mapping[str, Tensor]) -> float:
    """Compare the cut model with the masked model by `compare_cut`, after finding the modules again.

    Returns:
        The largest absolute difference of any element of the output.

    Raises:
        CutMismatchError: The difference is not below 1e-4.
    """
    return compare_cut(dense, slim, plan, find_attention(dense, batch), batch)


def compensate_heads(
    dense: PreTrainedModel,
    slim: PreTrainedModel,
    plan: PruningPlan,
    sites: Sequence[PrunableModule],
    batches: Sequence[dict[str, Tensor]],
    *,
    progress: Progress = SILENT,
    **how: Any,
) -> list[LayerFit]:
    """Refit the output projections by `compensate`; `how` takes the fields of `Compensation`."""
    return compensate(dense, slim, plan, sites, batches, Compensation(**how), progress=progress)
