"""Choose the margin below which answers are left to the dense model, as a promise about the share that changes."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass

from torch import Tensor

from ...errors import RequestError
from ...evaluate.interval import CONFIDENCE, rate_rows_needed, upper_rate


@dataclass(frozen=True, kw_only=True)
class Promise:
    """At most a share of the answers differs from the dense model's, on rows like those it was made on."""

    disagreement: float  # the share that is promised
    confidence: float  # the probability that the promise holds, over draws of the rows
    threshold: float  # rows whose margin is at most this go on to the dense model
    rows: int  # number of rows that the threshold was chosen on
    passed_on: float  # share of these rows that go on to the dense model
    differ: int  # number of these rows whose answer differs from the dense model's
    bound: float  # upper confidence bound of the share of answers that differ; at most `disagreement`


def margins(logits: Tensor) -> Tensor:
    """Return by how much the largest logit of each row exceeds the next one, (rows,), of logits (rows, classes)."""
    first, second = logits.topk(2, dim=-1).values.unbind(-1)
    return first - second


def choose_threshold(
    slim: Tensor, dense: Tensor, disagreement: float, *, confidence: float = CONFIDENCE, resolution: float = 0.0
) -> Promise:
    """Choose the smallest threshold with which the promise holds.

    The share of answers that differ only falls as the threshold rises. So the smallest threshold whose Clopper-Pearson
    bound is small enough keeps the promise with the confidence of a single bound, although it is chosen among many.

    Both logits are (rows, classes), of the same held-out rows: `slim` as served, and `dense`, whose largest are the
    right answers. `resolution` is how far a margin may move when rows are served; the threshold is higher by it. Raises
    RequestError if the rows are too few to promise it.

    Source: Bates et al., "Distribution-free, risk-controlling prediction sets", J. ACM 68 (2021), theorem 1.
    """
    count = len(slim)
    check_rows(count, disagreement, confidence)
    margin, wrong = margins(slim), slim.argmax(-1) != dense.argmax(-1)
    # The most answers that may differ: the bound rises with their number, and is low enough for none, see `check_rows`.
    allowed = bisect(range(count), disagreement, key=lambda n: upper_rate(n, count, confidence)) - 1
    wrong_margins = margin[wrong].sort(descending=True).values
    # The `allowed` wrong answers of the largest margins stay as they are, and the next one goes on.
    threshold = _above(margin, wrong_margins[allowed]) + resolution if len(wrong_margins) > allowed else 0.0
    unsure = margin <= threshold
    differ = int((wrong & ~unsure).sum())
    return Promise(
        disagreement=disagreement,
        confidence=confidence,
        threshold=threshold,
        rows=count,
        passed_on=unsure.double().mean().item(),
        differ=differ,
        bound=upper_rate(differ, count, confidence),
    )


def _above(all_margins: Tensor, margin: Tensor) -> float:
    """Return the middle between a margin and the next larger one; the margin itself if it is the largest."""
    # In the middle, so that no row lies at the threshold.
    larger = all_margins[all_margins > margin]
    return (margin.item() + larger.min().item()) / 2 if len(larger) else margin.item()


def check_rows(count: int, disagreement: float, confidence: float = CONFIDENCE) -> None:
    """Refuse, by a RequestError, a number of rows that is too small for the promise."""
    needed = rate_rows_needed(disagreement, confidence)
    if count < needed:
        raise RequestError(
            f"disagreement: {disagreement:g} can be promised with {100 * confidence:g} % confidence from {needed:,} "
            f"held-out rows or more, and there are {count:,}; give more rows, or promise less"
        )
