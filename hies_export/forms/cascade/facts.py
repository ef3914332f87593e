"""What a report says of a cascade."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...data.batches import Batch
from ...evaluate.interval import CONFIDENCE
from ..formats import Export
from ..measure.counts import Both, Count, Record, Share, Size
from ..runtimes.base import load_runtime
from .export import CascadeOptions
from .join import PASSED_ON


@dataclass(frozen=True, kw_only=True)
class SizeTried:
    """A share of the FLOPs that was tried for a cascade, and the result.

    Attributes:
        flops: Share that the cut leaves.
        passed_on: Share of the held-out rows that go on to the dense part.
        differ: Number of them that get another answer than the dense model's.
        time: Time of the cascade relative to the dense model's; None if there was only one size to time.
        problem: Why it has no cascade.
    """

    flops: Share
    passed_on: Share | None = None
    differ: Count | None = None
    time: float | None = None
    problem: str | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class CascadeSummary(Record):
    """The slim and the dense model in one file, and what it promises.

    Attributes:
        disagreement: Largest share of the answers that may differ from the dense model's.
        confidence: The probability that this holds.
        threshold: Rows whose margin, the distance of the two largest logits, is at most this go on to the dense part.
        rows: Number of held-out rows that it was chosen on.
        passed_on: Share of the evaluation rows that go on.
        stability: Share of their answers that equal the dense model's.
        bytes: Size of the file.
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
    """The parts of a cascade, and the evidence for its promise.

    Attributes:
        file: The graph, in the run's folder.
        quantize: "int8" if the slim part is in 8 bits.
        parts: Sizes of the files of both models alone; the cascade stores their `shared_bytes` once.
        held_out_passed_on: Share of the held-out rows that went on to the dense part.
        differ: Number of them that got another answer than the dense model's.
        bound: Upper end of the interval of that share.
        max_abs: Largest difference from the logits of both graphs, over all held-out rows.
        tried: The sizes among which this one was chosen, if it was.
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
