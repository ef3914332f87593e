"""Say what differs between the kinds of units that can be removed."""

from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True)
class Kind:
    """A kind of units."""

    unit: str  # what one is called; options name it with an s: `min_heads`, `multiple_of.neurons`
    module: str  # what a module with such units is called
    # Share of a module's units that greedy removal takes at once, and then puts in order. With 0 it takes one bundle
    # (the units that go together in one removal) at a time, whose units share a rank.
    step: float = 0.0

    @property
    def units(self) -> str:
        """What several units are called."""
        return f"{self.unit}s"


KindName = Literal["attention", "mlp"]
ATTENTION: Final = "attention"
MLP: Final = "mlp"
KINDS = {ATTENTION: Kind("head", "attention module"), MLP: Kind("neuron", "feed-forward block", step=0.01)}
"""Name in recipes and plans -> kind, in the order in which they are cut."""
BOTH = (ATTENTION, MLP)
"""The kinds that go where a recipe names none."""
