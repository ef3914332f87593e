"""Name the kinds of units that can be removed, and what one unit of each is called."""

ATTENTION, MLP = "attention", "mlp"
KINDS = (ATTENTION, MLP)
UNIT_NAMES = {ATTENTION: "head", MLP: "neuron"}
