"""Average what consumers read, channel by channel, in forward passes alone.

FLAP and Wanda-sp need no more than the mean and the mean square of each channel. The moments of a refit have those too,
but also a product for every pair of channels, which takes far longer to add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from ...calibrate.readings import reading
from ...errors import DataError
from ...model.modes import threads_for
from ...progress import SILENT, Progress
from ...units.units import PrunableModule


@dataclass(frozen=True)
class Averages:
    """Mean of x and of x^2 for every input channel x of a consumer, (inputs,) float64, over a number of tokens."""

    mean: Tensor
    square: Tensor
    tokens: int

    @property
    def variance(self) -> Tensor:
        """Sample variance of every channel over tokens, (inputs,)."""
        return (self.square - self.mean.square()).clamp(min=0) * self.tokens / max(1, self.tokens - 1)


def input_averages(
    model: PreTrainedModel,
    batches: Sequence[Mapping[str, Tensor]],
    modules: Sequence[PrunableModule],
    *,
    progress: Progress = SILENT,
) -> dict[str, Averages]:
    """Return the averages of what the consumer of every module reads, by module name; padding is left out."""
    if not batches:
        raise DataError("averages of inputs need at least one sample, got none; raise compensation.samples")
    sums: dict[str, tuple[Tensor, Tensor, int]] = {}
    with reading(model, modules) as read, threads_for(model, batches):
        for index, batch in enumerate(progress.track(batches, "averages of inputs")):
            for one in read(batch, index):
                x = one.inputs[one.real].double()  # (tokens, inputs)
                total, squares, tokens = sums.get(one.name, (0, 0, 0))
                sums[one.name] = total + x.sum(0), squares + x.square().sum(0), tokens + len(x)
    return {name: Averages(total / n, squares / n, n) for name, (total, squares, n) in sums.items()}
