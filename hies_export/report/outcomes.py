"""Put a budget, and how a run met it, into words."""

from __future__ import annotations

from ..evaluate.interval import CONFIDENCE
from ..evaluate.metrics import counted_by, title_of
from ..recipe.budget import Outcome


def asked_words(outcome: Outcome) -> str:
    """Return what a promise asks for: "99 % of the predictions", or "a loss of at most 0.01 of accuracy"."""
    budget = outcome.budget
    if budget.max_drop is not None:
        return f"a loss of at most {budget.by:g} of {budget.metric}"
    if budget.share is None:
        return f"at most {budget.by:g} of {kept_words(outcome)}"
    return f"{100 * budget.share:g} % of {kept_words(outcome)}"


def kept_words(outcome: Outcome) -> str:
    """Return what is kept: "the predictions", "the sentences" or "the entities", or the metric with its index."""
    keep = outcome.budget.keep
    assert keep is not None
    index = {None: "", "dense": " with your index as it is", "slim": " with everything re-embedded"}
    return _counted(outcome) or f"{title_of(str(keep.metric))}{index[keep.index]}"


def stays_words(outcome: Outcome) -> str:
    """Return the words after a percentage: "of the sentences stay", or "of nDCG@10 stays"."""
    counted = _counted(outcome)
    return f"of {counted} stay" if counted else f"of {title_of(str(outcome.budget.metric))} stays"


def _counted(outcome: Outcome) -> str | None:
    """Return what is counted, such as "the sentences"; None if the promise is about the value of a metric."""
    metric = outcome.budget.metric
    counted = f"{outcome.word}s" if metric is None else counted_by(metric)
    return None if counted is None or outcome.budget.by is not None else f"the {counted}"


def found_words(outcome: Outcome) -> str:
    """Return what the slim model has of what was promised."""
    found = outcome.found
    assert found is not None
    if outcome.budget.max_drop is not None:
        return f"one of {found.value:.4g}"
    sure = f"with {100 * CONFIDENCE:g} % confidence"
    if outcome.confidence is not None and outcome.confidence > CONFIDENCE:
        sure += ", corrected for all cuts tried"
    if outcome.budget.share is None:
        return f"a loss of {found.value:.4g} (at most {found.bound:.4g} {sure})"
    return f"{100 * found.value:.2f} % (at least {100 * found.decides:.2f} % {sure})"
