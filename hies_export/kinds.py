"""Name the kinds of units that can be removed, and what one unit of each is called."""

from typing import Final

ATTENTION: Final = "attention"
MLP: Final = "mlp"
KINDS = (ATTENTION, MLP)
UNIT_NAMES = {ATTENTION: "head", MLP: "neuron"}
