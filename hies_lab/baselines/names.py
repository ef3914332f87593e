"""Names of a sweep's baselines, and how they differ from the methods they are named after."""

from __future__ import annotations

from hies_export.score.criteria import AUTO, COMPENSATED, criterion_names

# Baselines that do not remove whole heads. A sweep evaluates what the smaller model would compute; nothing is cut.
CHANNELS, SLICED, SLICED_TUNED = "llm-pruner-channel", "slicegpt", "slicegpt-tuned"
JUDGED_ONLY = (CHANNELS, SLICED, SLICED_TUNED)
# Baselines that remove whole heads and neurons. A sweep cuts and compensates them like the criteria of a recipe.
KWON, FLAP, WANDA, MARTRA = "kwon", "flap", "wanda-sp", "martra"
WHOLE_UNITS = (KWON, FLAP, WANDA, MARTRA)
# Those under which every module loses the same share.
UNIFORM = (WANDA, MARTRA)
# Methods with calibration samples of their own, whatever the samples of the other criteria; one reads none.
OWN_SAMPLES = (COMPENSATED, FLAP, WANDA, MARTRA, SLICED, SLICED_TUNED)

# Approximated method -> how it differs from the original. Reports and the reference print this.
DIFFERENCES = {
    "llm-pruner-block": "only attention is pruned; the first three layers and the last lose heads only if no others "
    "are left (in models of fewer than 8 layers, they lose heads like the others)",
    CHANNELS: "it removes channels of heads, in attention only, until as many weights are gone as with whole heads; "
    "it is masked, because heads of unequal width cannot be saved",
    SLICED: "only the inputs of q, k, v and the outputs of o are projected, by the same share of every matrix; it is "
    "masked, and the rotations, which would take about as many weights again, are not counted, which favours it",
    SLICED_TUNED: "slicegpt, then three epochs of q, k, v and o towards the dense model's predictions on unlabelled "
    "rows (the original tunes low-rank adapters on text)",
    KWON: "it was published with scalars; here they are fitted to the dense model's inputs in one pass, not layer by "
    "layer to the cut model's, and the search solves a knapsack for modules of any cost",
    FLAP: "it was published with bias, which a consumer without one gets too, to be judged but not saved; padding is "
    "left out",
    WANDA: "it was published without compensation; it reads inputs of the dense model, not of the layers cut so far",
    MARTRA: "it was published without compensation, for neurons alone",
}


def sweep_names() -> tuple[str, ...]:
    """Return the names of all criteria and baselines that a sweep may use."""
    return (*(name for name in criterion_names() if name != AUTO), *WHOLE_UNITS, *JUDGED_ONLY)
