"""Collect the moments of the inputs and outputs of consumers: all that least squares needs, without activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import processes
from ..data.batches import size_of
from ..errors import DataError
from ..model.linear import features_of, weight_of
from ..model.threads import threads_for
from ..progress import SILENT, Progress
from ..units import PrunableModule, Selection
from .readings import Reading, reading
from .stream import Stream, usual_limit
from .sums import LayerMoments, LayerSums, Sums, TargetSums

# Every fifth sample is held out: enough to judge a fit, and most tokens are left to fit it.
HELD_OUT_EVERY = 5


class MomentStream(Stream[LayerMoments]):
    """The moments of every consumer, module by module, under a memory limit; see `Stream`.

    A module takes 16 bytes for each pair of inputs, and with a `selection` as many for each pair of an input and an
    output (else those products follow from the others); twice that if `weighted`.

    With a `selection`, the moments cover only the inputs of the kept units. If `weighted`, tokens are also added up
    weighted by the gradient of the prediction; this takes a backward pass, and uses a language model's labels if the
    batches have them.
    """

    def __init__(
        self,
        dense: PreTrainedModel,
        modules: Sequence[PrunableModule],
        batches: Sequence[dict[str, Tensor]],
        *,
        selection: Selection | None = None,
        limit_bytes: float | None = None,
        weighted: bool = False,
        progress: Progress = SILENT,
    ):
        check_samples(batches)
        self.selection, self.weighted = selection, weighted
        self._dense, self._batches, self._progress = dense, batches, progress
        sizes = [bytes_of(dense, module, selection=selection, weighted=weighted) for module in modules]
        limit = usual_limit(dense) if limit_bytes is None else limit_bytes
        super().__init__(modules, sizes, limit, what="the moments")

    def _collect(self, group: Sequence[PrunableModule]) -> dict[str, LayerMoments]:
        selection, by_name = self.selection, {module.name: module for module in group}
        sums = {m.name: new_sums(self._dense, m, selection, weighted=self.weighted) for m in group}
        first = [0, *accumulate(map(size_of, self._batches))]
        with ExitStack() as stack:
            stack.enter_context(threads_for(self._dense, self._batches))
            read = stack.enter_context(reading(self._dense, group, gradients=self.weighted))
            for index, batch in self._progress.track(processes.share(self._batches), "moments"):
                for one in read(batch, index):
                    x = one.inputs
                    if selection is not None:
                        x = x.index_select(-1, by_name[one.name].columns(selection[one.name].units).to(x.device))
                    add_reading(sums[one.name], replace(one, inputs=x), first[index])
        for name, found in sums.items():
            found.finish(self.owners.get(name))
        return {name: found for name, found in sums.items() if self.owners.get(name) in (None, processes.rank())}


def bytes_of(
    dense: PreTrainedModel, module: PrunableModule, *, selection: Selection | None = None, weighted: bool = False
) -> int:
    """Return the bytes that the moments of one module take in a `MomentStream`."""
    inputs, outputs, derived = _shape(dense, module, selection)
    return 2 * (1 + weighted) * 8 * inputs * (inputs + (0 if derived else outputs))


def _shape(dense: PreTrainedModel, module: PrunableModule, selection: Selection | None) -> tuple[int, int, bool]:
    """Return the numbers of covered inputs and of outputs, and whether sums over outputs follow from those over inputs.

    With only some of the inputs, they do not.
    """
    outputs, inputs = features_of(dense.get_submodule(module.consumer))
    if selection is None:
        return inputs, outputs, True
    return len(selection[module.name].units) * module.unit_width, outputs, False


def new_sums(
    dense: PreTrainedModel, module: PrunableModule, selection: Selection | None, *, weighted: bool = False
) -> LayerMoments:
    """Return sums of zero for the inputs of a consumer, or with a selection for those of the kept units."""
    layer = dense.get_submodule(module.consumer)
    device = weight_of(layer).device
    inputs, outputs, derived = _shape(dense, module, selection)

    def new() -> Sums:
        return LayerSums(layer, device) if derived else TargetSums(inputs, outputs, device)

    return LayerMoments((new(), new()), (new(), new()) if weighted else None)


def add_reading(sums: LayerMoments, read: Reading, first: int) -> None:
    """Add a consumer's tokens in one batch to the sums for fitting, or for judging if their samples are held out.

    `first` is the number of the batch's first sample.
    """
    x = read.inputs
    held = torch.arange(first, first + len(x), device=x.device) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    # Sums over targets that follow from those over inputs need no y.
    y = read.outputs if isinstance(sums.uniform[0], TargetSums) else read.outputs[..., :0]
    for part, samples in enumerate((~held, held)):
        rows = (read.real & samples[:, None]).flatten().nonzero()[:, 0]
        x_part, y_part = (t.flatten(0, 1).index_select(0, rows) for t in (x, y))
        sums.uniform[part].add(x_part, y_part, None)
        if sums.weighted is not None:
            assert read.gradients is not None
            weights = read.gradients.float().square().sum(-1).flatten().index_select(0, rows)
            sums.weighted[part].add(x_part, y_part, weights)


def check_samples(batches: Sequence[Mapping[str, Tensor]]) -> None:
    """Refuse batches with too few samples to hold one out."""
    samples = sum(map(size_of, batches))
    if samples < HELD_OUT_EVERY:
        raise DataError(
            f"compensation needs at least {HELD_OUT_EVERY} samples, one of them to hold out, got {samples}; "
            "raise compensation.samples"
        )
