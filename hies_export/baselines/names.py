"""Name what a sweep compares beside the criteria, and say how it differs from the method it is named after."""

from __future__ import annotations

from ..score.criteria import COMPENSATED, criterion_names

# Baselines that remove something else than heads: a sweep judges what the model would compute, nothing is cut.
CHANNELS, SLICED, SLICED_TUNED = "llm-pruner-channel", "slicegpt", "slicegpt-tuned"
JUDGED_ONLY = (CHANNELS, SLICED, SLICED_TUNED)
# They have their own calibration samples, the same whatever the others are scored on.
OWN_SAMPLES = (COMPENSATED, SLICED, SLICED_TUNED)

# How rows that are approximations differ from the methods they are named after.
DIFFERENCES = {
    "llm-pruner-block": "only attention is pruned; the first three layers and the last lose heads where no others are "
    "left, and, below 8 layers, like any other",
    CHANNELS: "channels of heads, in attention only, as many weights as the heads have; masked, because heads of "
    "unequal width cannot be saved",
    SLICED: "only what q, k, v read and what o writes is projected, by the same share of every matrix; masked, and the "
    "rotations, which would take about as many weights again, are not counted, so it has it easier than the others",
    SLICED_TUNED: "slicegpt, then three epochs of q, k, v and o towards the dense model's predictions on unlabelled "
    "rows (the original tunes low-rank adapters on text)",
}


def sweep_names() -> tuple[str, ...]:
    """Return every criterion that a sweep may name."""
    return (*criterion_names(), *JUDGED_ONLY)
