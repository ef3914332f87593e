"""Name the baselines of a sweep, and say how they differ from the methods they are named after."""

from __future__ import annotations

from ..score.criteria import AUTO, COMPENSATED_NAMES, criterion_names

# Baselines that do not remove whole heads. A sweep evaluates what the smaller model would compute; nothing is cut.
CHANNELS, SLICED, SLICED_TUNED = "llm-pruner-channel", "slicegpt", "slicegpt-tuned"
JUDGED_ONLY = (CHANNELS, SLICED, SLICED_TUNED)
# Baselines that remove whole heads and neurons. A sweep cuts and compensates them like the criteria of a recipe.
KWON, FLAP = "kwon", "flap"
# Methods with calibration samples of their own, whatever the samples of the other criteria.
OWN_SAMPLES = (*COMPENSATED_NAMES, FLAP, SLICED, SLICED_TUNED)

# Approximated method -> how it differs from the original. Reports and the reference print this.
DIFFERENCES = {
    "llm-pruner-block": "only attention is pruned; the first three layers and the last lose heads where no others are "
    "left, and, below 8 layers, like any other",
    CHANNELS: "channels of heads, in attention only, as many weights as the heads have; masked, because heads of "
    "unequal width cannot be saved",
    SLICED: "only what q, k, v read and what o writes is projected, by the same share of every matrix; masked, and the "
    "rotations, which would take about as many weights again, are not counted, so it has it easier than the others",
    SLICED_TUNED: "slicegpt, then three epochs of q, k, v and o towards the dense model's predictions on unlabelled "
    "rows (the original tunes low-rank adapters on text)",
    KWON: "its published form is with scalars; here they come from the dense model's inputs in one pass, not layer by "
    "layer from the cut model's, and the search solves a knapsack for modules of any cost",
    FLAP: "its published form is with bias; a consumer without a bias gets none, and padding is left out",
}


def sweep_names() -> tuple[str, ...]:
    """Return the names of all criteria and baselines that a sweep may use."""
    return (*(name for name in criterion_names() if name != AUTO), KWON, FLAP, *JUDGED_ONLY)
