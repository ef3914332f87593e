"""Word what a budget allows and how a model met it, for reports, and for errors before there is a report."""

from __future__ import annotations

from ..recipe.budget import KeepBudget, Outcome
from .interval import CONFIDENCE
from .metrics import counted_by, title_of

_COSTS = {"flops": "FLOPs", "parameters": "parameters", "latency": "time"}


def asked_words(outcome: Outcome) -> str:
    """Return what a budget, but not one of heads, allows: "99 % of the predictions", "at most 0.8 of the FLOPs"."""
    budget, keep = outcome.budget, outcome.budget.keep
    if keep is None:
        return f"at most {budget.ratio:g} of the {_COSTS[budget.kind]}"
    index = {None: "", "dense": " with your index as it is", "slim": " with everything re-embedded"}
    kept = _counted(outcome) or f"{title_of(str(keep.metric))}{index[keep.index]}"
    if budget.share is None:
        return f"a loss of at most {budget.by:g} of {kept}"
    return f"{100 * budget.share:g} % of {kept}"


def loss_words(asked: KeepBudget) -> str:
    """Return how much worse a metric may get: "a loss of at most 0.01 of F1"."""
    return f"a loss of at most {asked.by:g} of {asked.metric}"


def stays_words(outcome: Outcome) -> str:
    """Return what follows the percentage that stays: "of the sentences stay", or "of nDCG@10 stays"."""
    counted = _counted(outcome)
    return f"of {counted} stay" if counted else f"of {title_of(str(outcome.budget.metric))} stays"


def _counted(outcome: Outcome) -> str | None:
    """Return what a promised share counts, such as "the sentences"; None if the promise is about a metric's value."""
    metric = outcome.budget.metric
    counted = f"{outcome.word}s" if metric is None else counted_by(metric)
    return None if counted is None or outcome.budget.by is not None else f"the {counted}"


def found_words(outcome: Outcome) -> str:
    """Return in words what the slim model reaches of a budget: "99.20 % (at least 99.03 % with 95 % confidence)"."""
    budget, found = outcome.budget, outcome.found
    assert found is not None
    if budget.keep is None:
        return f"{found.value:.3f}"
    confidence = f"with {100 * CONFIDENCE:g} % confidence"
    if outcome.confidence is not None and outcome.confidence > CONFIDENCE:
        confidence += ", corrected for all cuts tried"
    if budget.share is None:
        return f"a loss of {found.value:.4g} (at most {found.bound:.4g} {confidence})"
    return f"{100 * found.value:.2f} % (at least {100 * found.decides:.2f} % {confidence})"
