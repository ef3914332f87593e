"""Write two exported classifiers as one ONNX graph whose answers keep a promise, prove that, and report it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ...checkpoint.folders import new_folder, refuse_existing
from ...data.batches import Batch
from ...equal import OTHER_PROGRAM, REGROUPED_IN_FEWER_BITS
from ...errors import ParityError
from ...evaluate.interval import CONFIDENCE, upper_rate
from ...evaluate.predict import logits_by
from ..formats import Export, export_options
from ..measure.counts import Both, Count, Record, Share, Size
from ..onnx.export import copy_beside, save_program
from ..onnx.quantize import Quantize
from ..runtimes.base import load_runtime
from ..runtimes.bits import quantize_graph
from ..runtimes.ort import ONNX_FILE
from .join import LOGITS, PASSED_ON, join_graphs
from .threshold import Promise, choose_threshold, margins

# Metadata of a joined graph: its promise, as JSON.
PROMISE = "hies_export.forms.cascade"
# How far a margin may move in another graph or batch, relative to the largest logit: in float32, and by the rounding of
# both logits in bfloat16.
RESOLUTION, RESOLUTION_BITS = 1e-4, torch.finfo(torch.bfloat16).eps


@dataclass(frozen=True, kw_only=True)
class CascadeOptions:
    """What a cascade promises, and the runtime that serves it.

    Attributes:
        disagreement: Largest share of answers that may differ from the dense model's, in (0, 1).
        confidence: The probability that the promise holds, in (0, 1).
        quantize: "int8" writes the linear layers of the slim part in 8 bits. Embeddings stay in float32: the dense part
            reads them too.
        runtime: The runtime that serves the file, as in `load_runtime`.
        dtype: What the runtime computes in, if it has a choice.
    """

    disagreement: float
    confidence: float = CONFIDENCE
    quantize: Quantize | None = None
    runtime: str = "onnxruntime-cpu"
    dtype: str | None = None

    @property
    def bits(self) -> str:
        """What the linear layers of the slim part are computed in."""
        return self.quantize or self.dtype or "float32"


@dataclass(frozen=True, kw_only=True)
class SizeTried:
    """A share of the FLOPs that was tried for a cascade, and the result.

    Attributes:
        flops: Share that the cut leaves.
        passed_on: Share of the held-out rows that go on to the dense part.
        differ: Number of held-out rows whose answer differs from the dense model's.
        time: Time of the cascade relative to the dense model's; None if it was not timed when the size was chosen.
        problem: Why it has no cascade.
    """

    flops: Share
    passed_on: Share | None = None
    differ: Count | None = None
    time: float | None = None
    problem: str | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class CascadeSummary(Record):
    """The slim and the dense model in one file, and what it promises, as in `Promise`.

    `passed_on` is the share of the evaluation rows that go on to the dense part, `stability` that of their answers that
    equal the dense model's, and `bytes` the size of the file.
    """

    disagreement: Share
    confidence: Share
    threshold: float
    rows: Count
    passed_on: Share
    stability: Share
    bytes: Size


@dataclass(frozen=True, kw_only=True)
class CascadeFacts:
    """The parts of a cascade, and the evidence for its promise on the held-out rows, as in `Promise` and `Export`.

    `parts` are the sizes of the files of both models alone; the cascade, `file` in the run's folder, stores their
    `shared_bytes` once. `tried` are the sizes among which this one was chosen, if it was.
    """

    file: str
    quantize: str | None
    parts: Both[Size]
    shared_bytes: Size
    held_out_passed_on: Share
    differ: Count
    bound: Share
    max_abs: float
    tried: tuple[SizeTried, ...] = ()


def export_cascade(
    slim: Export,
    dense: Export,
    folder: str | Path,
    *,
    batches: Sequence[Batch],
    answers: torch.Tensor,
    options: CascadeOptions,
    overwrite: bool = False,
) -> Export:
    """Write `folder/model.onnx`: the slim graph, and the dense one for the rows that the slim one is unsure of.

    Both exports are for provider cpu in float32. The threshold is chosen by the logits of both graphs on the runtime
    that will serve them. The written file then answers all held-out rows. If it does not agree with the two graphs, or
    breaks the promise, a ParityError is raised, and nothing is kept. `answers` are the logits of the dense model in
    torch on these rows, (rows, classes), whose answers the promise is about.

    In the result, `max_abs` is the largest difference from the two graphs' logits over all held-out rows. The facts are
    the `promise`, which has the threshold, and `shared_bytes`, the size of the weights that are stored once. Raises
    RequestError if the exports differ in inputs or are of another kind, or the rows are too few for the promise, and
    PlanError if the dense graph, as it is served, changes too many answers itself.
    """
    import onnx_ir

    folder = Path(folder)
    refuse_existing(folder, overwrite=overwrite)
    graphs = [onnx_ir.load(export.file) for export in (slim, dense)]
    if options.quantize:
        quantize_graph(graphs[0].graph, tables=False)

    def logits(file: Path) -> torch.Tensor:
        return logits_by(load_runtime(options.runtime, file, dtype=options.dtype).prediction, batches)

    with new_folder(folder, overwrite=overwrite) as staging, TemporaryDirectory() as temporary:
        sure, certain = Path(temporary) / ONNX_FILE, logits(dense.file)
        save_program(graphs[0], sure)
        found = logits(sure)
        largest = max(1.0, certain.abs().max().item(), found.abs().max().item())
        exact = options.dtype in (None, "float32")
        resolution = (RESOLUTION if exact else RESOLUTION_BITS) * largest
        promise = choose_threshold(
            found,
            answers,
            options.disagreement,
            passed_on=certain,
            confidence=options.confidence,
            resolution=resolution,
        )
        program = onnx_ir.load(sure)
        shared = join_graphs(program.graph, graphs[1].graph, promise.threshold)
        program.metadata_props[PROMISE] = json.dumps(asdict(promise))
        copy_beside(slim, staging)
        save_program(program, staging / ONNX_FILE)
        joined = logits(staging / ONNX_FILE)
        max_abs = _compared(
            joined,
            found,
            certain,
            apart=margins(found) - promise.threshold,
            near=resolution,
            tolerance=(OTHER_PROGRAM["float32"] if exact else REGROUPED_IN_FEWER_BITS) * largest,
        )
        _check_promise(joined, answers, promise)
        size = sum(file.stat().st_size for file in staging.glob(f"{ONNX_FILE}*"))
    return Export(
        format="onnx",
        folder=folder,
        file=folder / ONNX_FILE,
        files=(ONNX_FILE,),
        bytes=size,
        how=export_options(quantize=options.quantize),
        max_abs=max_abs,
        checked_on=options.runtime,
        inputs=slim.inputs,
        outputs=(LOGITS, PASSED_ON),
        facts={"promise": promise, "shared_bytes": shared},
    )


def _compared(
    joined: torch.Tensor,
    slim: torch.Tensor,
    dense: torch.Tensor,
    *,
    apart: torch.Tensor,
    near: float,
    tolerance: float,
) -> float:
    """Return the largest difference between the logits of the joined graph and of the two graphs run separately.

    `apart`, (rows,), is each margin minus the threshold. Rows within `near` of it may have either graph's logits.
    Raises ParityError if the difference exceeds the tolerance.
    """
    to_slim, to_dense = ((joined - part).abs().amax(-1) for part in (slim, dense))
    differences = torch.where(apart <= 0, to_dense, to_slim)
    worst = torch.where(apart.abs() <= near, torch.minimum(to_slim, to_dense), differences).max().item()
    if not worst <= tolerance:
        raise ParityError(
            f"the graph of a cascade must agree with its two models to {tolerance:.2e}, but differs by {worst:.2e}; "
            "report the model"
        )
    return worst


def _check_promise(joined: torch.Tensor, answers: torch.Tensor, promise: Promise) -> None:
    differ = int((joined.argmax(-1) != answers.argmax(-1)).sum())
    if upper_rate(differ, promise.rows, promise.confidence) > promise.disagreement:
        raise ParityError(
            f"the graph of a cascade must keep the promised disagreement of {promise.disagreement:g}, but changes "
            f"{differ} of {promise.rows:,} held-out answers (its two models in torch: {promise.differ}); serve it in "
            "float32"
        )


def cascade_facts(
    options: CascadeOptions,
    exported: Export,
    batches: Sequence[Batch],
    *,
    parts: Both[int],
    stability: float,
    tried: Sequence[SizeTried],
) -> tuple[CascadeSummary, CascadeFacts]:
    """Return a report's facts about a cascade, which keeps this share of the answers on the evaluation batches.

    `parts` are the sizes of the files of both models alone.
    """
    promise = exported.facts["promise"]
    assert exported.max_abs is not None
    summary = CascadeSummary(
        disagreement=promise.disagreement,
        confidence=CONFIDENCE,
        threshold=promise.threshold,
        rows=promise.rows,
        passed_on=_passed_on(options, exported, batches),
        stability=stability,
        bytes=exported.bytes,
    )
    facts = CascadeFacts(
        file=f"{exported.folder.name}/{exported.file.name}",
        quantize=exported.how.quantize,
        parts=parts,
        shared_bytes=exported.facts["shared_bytes"],
        held_out_passed_on=promise.passed_on,
        differ=promise.differ,
        bound=promise.bound,
        max_abs=exported.max_abs,
        tried=tuple(tried),
    )
    return summary, facts


def _passed_on(options: CascadeOptions, exported: Export, batches: Sequence[Batch]) -> float:
    """Return the share of rows that go on to the dense part."""
    runtime = load_runtime(options.runtime, exported.folder, dtype=options.dtype)
    found = [runtime.compute(batch)[PASSED_ON] for batch in batches]
    return float(sum(part.sum() for part in found) / sum(part.size for part in found))
