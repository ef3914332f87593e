"""Join the slim and the dense model of a run in one file, and choose how much to cut for it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .. import processes
from ..cascade.export import CascadeExport, CascadeOptions, export_cascade
from ..cascade.graph import PASSED_ON
from ..data.batches import Batch
from ..errors import ParityError, PlanError
from ..evaluate.interval import CONFIDENCE
from ..evaluate.predict import predict
from ..measure.counts import Both
from ..measure.exports import Exporter
from ..measure.forms import Forms
from ..measure.on_rows import time_on_rows
from ..onnx.export import OnnxExport
from ..progress import Progress
from ..report.details import CascadeFacts, SizeTried
from ..report.report import CascadeSummary
from ..runtimes.registry import Served, load_runtime
from .answer import Decided
from .choice import Choice
from .choose import Chooser
from .options import PruneOptions, SizedCascade
from .prepare import Prepared
from .quality import cut_beside

# The folder of a cascade in that of a run.
CASCADE = "onnx-cascade"
# Rows in a batch where the times of cuts are compared, and how many are timed.
BATCH, ROWS = 8, 512


@dataclass(frozen=True)
class Sized:
    """A cut that leaves a share of the FLOPs, and its ONNX export; or the reason why there is none."""

    flops: float
    choice: Choice | None = None
    exported: OnnxExport | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Candidate:
    """A cascade that was tried: its cut, the share of the FLOPs that this leaves, and its file."""

    choice: Choice
    flops: float
    exported: CascadeExport


def answers_of(prepared: Prepared) -> torch.Tensor:
    """Return the dense model's logits on the rows that a promise is made on, (rows, classes)."""
    found = predict(prepared.model, prepared.rows.promised)
    assert isinstance(found, torch.Tensor)
    return found


def choose_size(
    prepared: Prepared, options: PruneOptions, asked: SizedCascade, dtype: torch.dtype | None, progress: Progress
) -> Decided:
    """Choose the share of the FLOPs whose cascade answers the held-out rows fastest; statistics are computed once.

    Raises PlanError if no share has a cascade that keeps the promise.
    """
    processes.refuse_several("a cascade that chooses its size")
    chooser = Chooser(prepared, options, progress, dtype)
    exporter = Exporter(options.export.unquantized, prepared.sample, prepared.processor)
    with tempfile.TemporaryDirectory(prefix="hies-sizes-") as temporary:
        folder = Path(temporary)
        forms = Forms({"dense": prepared.model}, exporter, folder, progress)
        dense = _onnx(forms, "dense")
        cuts = cut_sizes(prepared, chooser, forms, asked.flops, like=None)
        tried, sizes = join_sizes(prepared, cuts, dense, answers_of(prepared), asked, folder, progress)
        if not tried:
            problems = "; ".join(f"with {size.flops:.2f} of the FLOPs, {size.problem}" for size in sizes)
            raise PlanError(f"no cascade keeps the promise: {problems}")
        progress.stage("time the cascades on the held-out rows")
        joined = [Served(asked.runtime, found.exported.folder, asked.dtype) for found in tried]
        batches = {BATCH: mixed(prepared.rows.promised, BATCH)}
        (times,) = time_on_rows([Served(asked.runtime, dense.folder), *joined], batches, progress=progress).values()
    ratios = {found.flops: one.ratio.median for found, one in zip(tried, times[1:], strict=True)}
    sizes = [replace(size, time=ratios.get(size.flops)) for size in sizes]
    best = min(tried, key=lambda found: ratios[found.flops])
    return Decided(choice=best.choice, cascade=asked, sizes=tuple(sizes))


def cut_sizes(
    prepared: Prepared,
    chooser: Chooser,
    forms: Forms,
    shares: Sequence[float],
    *,
    like: Choice | None,
) -> list[Sized]:
    """Cut the dense model to each share of its FLOPs, and export the result.

    `like` is as for `Chooser.at`.
    """
    cuts = []
    for share in shares:
        forms.progress.stage(f"cut to {share:g} of the FLOPs for a cascade")
        try:
            choice = chooser.at(share, like)
            slim = cut_beside(prepared.model, choice.plan.kept, prepared.modules, choice.refit)
            forms.add(name := f"{share:g}-for-cascade", slim)
            exported = _onnx(forms, name)
        except (PlanError, ParityError) as error:
            cuts.append(Sized(share, problem=str(error)))
            continue
        cuts.append(Sized(chooser.flops_left(choice.plan.kept), choice, exported))
    return cuts


def join_sizes(
    prepared: Prepared,
    cuts: Sequence[Sized],
    dense: OnnxExport,
    answers: torch.Tensor,
    asked: CascadeOptions,
    folder: Path,
    progress: Progress,
) -> tuple[list[Candidate], list[SizeTried]]:
    """Join each cut with the dense model in a cascade; return the cascades, and what was tried for each size."""
    found, sizes = [], []
    for number, cut in enumerate(cuts):
        size = SizeTried(flops=cut.flops, problem=cut.problem)
        if cut.choice is not None and cut.exported is not None:
            progress.stage(f"join {cut.flops:.2f} of the FLOPs in a cascade on {asked.runtime} in {asked.bits}")
            place = folder / f"cascade-{asked.runtime}-{asked.bits}-{number}"
            try:
                exported = _join(asked, cut.exported, dense, prepared, answers, place)
            except (PlanError, ParityError) as error:
                size = replace(size, problem=str(error))
            else:
                promise = exported.promise
                size = replace(size, passed_on=promise.passed_on, differ=promise.differ)
                found.append(Candidate(cut.choice, cut.flops, exported))
        sizes.append(size)
    return found, sizes


def _onnx(forms: Forms, name: str) -> OnnxExport:
    exported = forms.export(name, forms.exporter.options.unquantized)
    assert isinstance(exported, OnnxExport)
    return exported


def _join(
    asked: CascadeOptions, slim: OnnxExport, dense: OnnxExport, prepared: Prepared, answers: torch.Tensor, folder: Path
) -> CascadeExport:
    return export_cascade(slim, dense, folder, batches=prepared.rows.promised, answers=answers, options=asked)


def mixed(batches: Sequence[Batch], size: int) -> list[Batch]:
    """Return 512 rows at most in batches of a size, cut out of larger ones, in an order that is not by length."""
    parts = [
        {name: value[start : start + size] for name, value in batch.items()}
        for batch in batches
        for start in range(0, len(next(iter(batch.values()))), size)
    ]
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(0))
    return [parts[place] for place in order.tolist()][: ROWS // size]


def write_cascade(
    prepared: Prepared, forms: Forms, asked: CascadeOptions, answers: torch.Tensor, folder: Path
) -> CascadeExport:
    """Write `onnx-cascade/` into the folder of a run."""
    return _join(asked, _onnx(forms, "slim"), _onnx(forms, "dense"), prepared, answers, folder / CASCADE)


def cascade_facts(
    asked: CascadeOptions,
    exported: CascadeExport,
    forms: Forms,
    batches: Sequence[Batch],
    stability: float,
    tried: Sequence[SizeTried],
) -> tuple[CascadeSummary, CascadeFacts]:
    """Return the report's facts about a cascade that keeps this share of answers on the evaluation batches."""
    promise, plain = exported.promise, forms.exporter.options.unquantized
    slim = forms.export("slim", replace(plain, quantize=asked.quantize))
    parts = Both(forms.export("dense", plain).bytes, slim.bytes)
    summary = CascadeSummary(
        disagreement=promise.disagreement,
        confidence=CONFIDENCE,
        threshold=promise.threshold,
        rows=promise.rows,
        passed_on=_passed_on(asked, exported, batches),
        stability=stability,
        bytes=exported.bytes,
    )
    facts = CascadeFacts(
        file=f"{exported.folder.name}/{exported.file.name}",
        quantize=exported.quantize,
        parts=parts,
        shared_bytes=exported.shared_bytes,
        held_out_passed_on=promise.passed_on,
        differ=promise.differ,
        bound=promise.bound,
        max_abs=exported.max_abs,
        tried=tuple(tried),
    )
    return summary, facts


def _passed_on(asked: CascadeOptions, exported: CascadeExport, batches: Sequence[Batch]) -> float:
    """Return the share of rows that go on to the dense part."""
    runtime = load_runtime(asked.runtime, exported.folder, dtype=asked.dtype)
    found = [runtime.compute(batch)[PASSED_ON] for batch in batches]
    return float(sum(part.sum() for part in found) / sum(part.size for part in found))
