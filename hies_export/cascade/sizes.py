"""Join cuts of several sizes with the dense model, each in a cascade of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..data.batches import Batch
from ..errors import ParityError, PlanError
from ..onnx.export import OnnxExport
from ..progress import Progress
from .export import CascadeExport, CascadeOptions, export_cascade
from .facts import SizeTried


@dataclass(frozen=True)
class Sized:
    """A cut that leaves a share of the FLOPs, as an ONNX export; or the reason why there is none."""

    flops: float
    exported: OnnxExport | None = None
    problem: str | None = None


def join_sizes(
    cuts: Sequence[Sized],
    dense: OnnxExport,
    options: CascadeOptions,
    *,
    batches: Sequence[Batch],
    answers: torch.Tensor,
    folder: Path,
    progress: Progress,
) -> list[tuple[SizeTried, CascadeExport | None]]:
    """Join each cut with the dense model, see `export_cascade`; return what was tried, and its cascade if it has one.

    Every cascade gets its own folder in `folder`.
    """
    found: list[tuple[SizeTried, CascadeExport | None]] = []
    for number, cut in enumerate(cuts):
        size, exported = SizeTried(flops=cut.flops, problem=cut.problem), None
        if cut.exported is not None:
            progress.stage(f"join {cut.flops:.2f} of the FLOPs in a cascade on {options.runtime} in {options.bits}")
            place = folder / f"cascade-{options.runtime}-{options.bits}-{number}"
            try:
                exported = export_cascade(cut.exported, dense, place, batches=batches, answers=answers, options=options)
            except (PlanError, ParityError) as error:
                size = replace(size, problem=str(error))
            else:
                promise = exported.promise
                size = replace(size, passed_on=promise.passed_on, differ=promise.differ)
        found.append((size, exported))
    return found
