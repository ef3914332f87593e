"""Cut a model to several shares of its FLOPs, and join each cut with the dense model in a cascade."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from transformers import PreTrainedModel

from ..data.batches import Batch
from ..errors import ParityError, PlanError
from .cascade.export import CascadeOptions, export_cascade
from .cascade.facts import SizeTried
from .form import Form, Forms
from .formats import Export

T = TypeVar("T")


@dataclass(frozen=True)
class Sized(Generic[T]):
    """A cut, the share of the FLOPs that it leaves, and the ONNX export of its model; or the reason why it has none."""

    flops: float
    cut: T | None = None
    exported: Export | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Joined(Generic[T]):
    """A cut in a cascade: what a report says of it, and the cascade on its runtime if there is one."""

    cut: T | None
    tried: SizeTried
    form: Form | None = None


def cut_sizes(
    forms: Forms, shares: Sequence[float], cut: Callable[[float], tuple[T, PreTrainedModel, float]]
) -> list[Sized[T]]:
    """Export the dense model's cuts to shares of its FLOPs; `cut` returns a cut, its model, and the share it leaves."""
    found: list[Sized[T]] = []
    for share in shares:
        forms.progress.stage(f"cut to {share:g} of the FLOPs for a cascade")
        try:
            made, model, left = cut(share)
            forms.add(name := f"{share:g}-for-cascade", model)
            found.append(Sized(left, made, forms.plain(name)))
        except (PlanError, ParityError) as error:
            found.append(Sized(share, problem=str(error)))
    return found


def join_sizes(
    forms: Forms,
    cuts: Sequence[Sized[T]],
    options: CascadeOptions,
    *,
    batches: Sequence[Batch],
    answers: torch.Tensor,
) -> list[Joined[T]]:
    """Join each cut with the dense model, see `export_cascade`."""
    found: list[Joined[T]] = []
    runtime, bits = options.runtime, options.bits
    for number, cut in enumerate(cuts):
        tried, form = SizeTried(flops=cut.flops, problem=cut.problem), None
        if cut.exported is not None:
            forms.progress.stage(f"join {cut.flops:.2f} of the FLOPs in a cascade on {runtime} in {bits}")
            dense, place = forms.plain("dense"), forms.folder / f"cascade-{runtime}-{bits}-{number}"
            try:
                made = export_cascade(cut.exported, dense, place, batches=batches, answers=answers, options=options)
            except (PlanError, ParityError) as error:
                tried = replace(tried, problem=str(error))
            else:
                promise = made.facts["promise"]
                tried = replace(tried, passed_on=promise.passed_on, differ=promise.differ)
                form = Form.of_cascade(made, options)
        found.append(Joined(cut.cut, tried, form))
    return found
