"""Write two exported classifiers as one ONNX graph whose answers keep a promise, prove that, and report it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from ...checkpoint.folders import new_folder
from ...data.batches import Batch, samples_of
from ...equal import OTHER_PROGRAM
from ...errors import ParityError, RequestError
from ...evaluate.interval import CONFIDENCE, upper_rate
from ...evaluate.predict import logits_by
from ...tasks.classification import Classification
from ...tasks.registry import task_by_class, task_of
from ...units.counts import Both, Count, Record, Share, Size, si
from ..deployment import SizeTried
from ..form import Form
from ..formats import Export, export_options
from ..onnx.export import copy_beside, save_program
from ..runtimes.base import load_runtime
from ..runtimes.bits import quantize_graph
from ..runtimes.ort import ONNX_FILE
from .join import LOGITS, PASSED_ON, join_graphs
from .threshold import Promise, check_rows, choose_threshold, margins

# Metadata of a joined graph: its promise, as JSON.
PROMISE = "hies_export.forms.cascade"
# How far a margin may move in another graph or batch, relative to the largest logit.
RESOLUTION = 1e-4


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

    def text(self, details: Any) -> str:
        """Return the promise, its evidence and its results in words; `details` are those of the report."""
        facts: CascadeFacts = details.cascade
        kept = "as promised" if 1 - self.stability <= self.disagreement else "fewer than promised"
        tried = ""
        if facts.tried:
            shares = ", ".join(f"{size.flops:.2f}" for size in facts.tried if size.problem is None)
            tried = f" Cascades with {shares} of the FLOPs were tried, and this one is the fastest of them."
            for size in facts.tried:
                if size.problem is not None:
                    tried += f" With {size.flops:.2f} there is none: {size.problem}."
        return (
            f"Cascade: at most {100 * self.disagreement:g} % of the answers differ from the dense model's, with "
            f"{100 * self.confidence:g} % confidence (Clopper-Pearson, {self.rows:,} held-out rows, {facts.differ} of "
            f"which differ). Rows whose two largest logits are at most {self.threshold:.3f} apart go on to the dense "
            f"part: {100 * self.passed_on:.1f} % of the evaluated rows. Of all of these, {100 * self.stability:.2f} % "
            f"keep their answer, {kept}. The file has {si(self.bytes)}B; the dense model alone has "
            f"{si(facts.parts.dense)}B, the slim one {si(facts.parts.slim)}B.{tried}"
        )


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


@dataclass(frozen=True, kw_only=True)
class CascadeForm:
    """A request for a slim and a dense classifier in one file, whose answers keep a promise.

    Attributes:
        name: What reports call the model.
        folder: Name of its folder in that of a run.
        runtime: The runtime that serves the file.
        runtimes: The runtimes of whose bits its slim part may be.
        disagreement: Largest share of answers that may differ from the dense model's, in (0, 1).
        confidence: The probability that the promise holds, in (0, 1).
        bits: What the linear layers of the slim part are computed in. In int8, embeddings stay in float32, because the
            dense part reads them too.
    """

    name: ClassVar[str] = "cascade"
    folder: ClassVar[str] = "onnx-cascade"
    runtime: ClassVar[str] = "onnxruntime-cpu"
    runtimes: ClassVar[tuple[str, ...]] = ("onnxruntime-cpu", "onnxruntime-cpu-int8")
    disagreement: float
    confidence: float = CONFIDENCE
    bits: str = "float32"

    def check(self, model: PreTrainedModel, rows: Sequence[Batch]) -> None:
        """Refuse, by a RequestError, a model that is no classifier, and rows that are too few for the promise."""
        task = task_by_class(type(model).__name__, model.config)
        if task is None or not issubclass(task, Classification) or task_of(model).predicts != "classes":
            raise RequestError(
                f"a cascade needs a model that predicts one class for each row, and {type(model).__name__} does not; "
                "sets of labels, numbers and tokens have no margin between two classes that says how sure the model "
                "is, so leave the cascade out"
            )
        check_rows(samples_of(rows), self.disagreement, self.confidence)

    def join(
        self, slim: Export, dense: Export, folder: Path, *, batches: Sequence[Batch], answers: torch.Tensor
    ) -> Export:
        """Write `folder/model.onnx`: the slim graph, and the dense one for the rows that the slim one is unsure of.

        Both exports are for provider cpu in float32. The threshold is chosen by the logits of the slim graph. `answers`
        are the logits of the dense model in torch, (rows, classes), which the promise is about. The written file then
        answers all held-out rows.

        In the result, `max_abs` is the largest difference from the two graphs' logits on these rows. The facts are the
        `promise`, which has the threshold, and `shared_bytes`, the size of the weights that are stored once. Raises
        ParityError if the file does not agree with the graphs or breaks the promise, and RequestError if the exports
        differ in inputs or the rows are too few.
        """
        import onnx_ir

        slim_program, dense_program = (onnx_ir.load(export.file) for export in (slim, dense))
        if self.bits == "int8":
            quantize_graph(slim_program.graph, tables=False)

        def logits(file: Path) -> torch.Tensor:
            return logits_by(load_runtime(self.runtime, file).prediction, batches)

        with new_folder(folder) as staging, TemporaryDirectory() as temporary:
            slim_file, joined_file = Path(temporary) / ONNX_FILE, staging / ONNX_FILE
            save_program(slim_program, slim_file)
            of_slim, of_dense = logits(slim_file), logits(dense.file)
            largest = max(1.0, of_slim.abs().max().item(), of_dense.abs().max().item())
            near, tolerance = RESOLUTION * largest, OTHER_PROGRAM["float32"] * largest
            promise = choose_threshold(of_slim, answers, self.disagreement, confidence=self.confidence, resolution=near)
            program = onnx_ir.load(slim_file)
            shared = join_graphs(program.graph, dense_program.graph, promise.threshold)
            program.metadata_props[PROMISE] = json.dumps(asdict(promise))
            copy_beside(slim, staging)
            size = save_program(program, joined_file)
            joined = logits(joined_file)
            gap = margins(of_slim) - promise.threshold
            max_abs = _largest_difference(joined, of_slim, of_dense, gap=gap, near=near, tolerance=tolerance)
            _check_promise(promise, joined, answers)
        return Export(
            format="onnx",
            folder=folder,
            file=folder / ONNX_FILE,
            files=(ONNX_FILE,),
            bytes=size,
            how=export_options(quantize="int8" if self.bits == "int8" else None),
            max_abs=max_abs,
            checked_on=self.runtime,
            inputs=slim.inputs,
            outputs=(LOGITS, PASSED_ON),
            facts={"promise": promise, "shared_bytes": shared},
        )

    def form(self, exported: Export) -> Form:
        """Return an export of this cascade as a form on its runtime."""
        return Form(self.name, self.runtime, exported.folder, self.bits, exported.bytes)

    def facts(
        self,
        exported: Export,
        batches: Sequence[Batch],
        *,
        parts: Both[int],
        stability: float,
        tried: Sequence[SizeTried],
    ) -> tuple[CascadeSummary, CascadeFacts]:
        """Return a report's summary and details of a cascade; the last three arguments are fields of these."""
        promise = exported.facts["promise"]
        assert exported.max_abs is not None
        runtime = load_runtime(self.runtime, exported.folder)
        passed_on = [runtime.compute(batch)[PASSED_ON] for batch in batches]
        summary = CascadeSummary(
            disagreement=promise.disagreement,
            confidence=CONFIDENCE,
            threshold=promise.threshold,
            rows=promise.rows,
            passed_on=float(sum(rows.sum() for rows in passed_on) / sum(rows.size for rows in passed_on)),
            stability=stability,
            bytes=exported.bytes,
        )
        return summary, CascadeFacts(
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


def _check_promise(promise: Promise, joined: torch.Tensor, answers: torch.Tensor) -> None:
    """Raise ParityError if a joined graph's logits change more of the dense model's answers than was promised."""
    differ = int((joined.argmax(-1) != answers.argmax(-1)).sum())
    if upper_rate(differ, promise.rows, promise.confidence) > promise.disagreement:
        raise ParityError(
            f"the graph of a cascade must keep the promised disagreement of {promise.disagreement:g}, but changes "
            f"{differ} of {promise.rows:,} held-out answers (its two models in torch: {promise.differ}); report the "
            "model"
        )


def _largest_difference(
    joined: torch.Tensor, slim: torch.Tensor, dense: torch.Tensor, *, gap: torch.Tensor, near: float, tolerance: float
) -> float:
    """Return the largest difference between the logits of the joined graph and of the two graphs run separately.

    `gap`, (rows,), is each margin minus the threshold. Rows within `near` of the threshold may have either graph's
    logits. Raises ParityError if the difference exceeds the tolerance.
    """
    to_slim, to_dense = (joined - slim).abs().amax(-1), (joined - dense).abs().amax(-1)
    expected = torch.where(gap <= 0, to_dense, to_slim)
    worst = torch.where(gap.abs() <= near, torch.minimum(to_slim, to_dense), expected).max().item()
    if not worst <= tolerance:
        raise ParityError(
            f"the graph of a cascade must agree with its two models to {tolerance:.2e}, but differs by {worst:.2e}; "
            "report the model"
        )
    return worst
