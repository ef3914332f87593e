"""Collect the moments of the inputs and outputs of consumers: all that least squares needs, without activations.

MomentStream      the moments of all modules, under a memory limit
collect_moments   the moments of all modules at once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import processes
from ..data.targets import size_of
from ..errors import DataError
from ..model.linear import features_of, weight_of
from ..model.threads import threads_for
from ..progress import SILENT, Progress
from ..units import PrunableModule, Selection
from .readings import Reading, reading
from .ridge import Moments, SplitMoments, Spread
from .stream import LIMIT_BYTES, Stream
from .sums import LayerMoments, LayerSums, Sums, TargetSums, check_mix

__all__ = [
    "LayerMoments",
    "MomentStream",
    "Moments",
    "SplitMoments",
    "Spread",
    "bytes_of",
    "check_mix",
    "collect_moments",
]

# Every fifth sample is held out: enough to judge a fit, and most tokens are left to fit it.
HELD_OUT_EVERY = 5


class MomentStream(Stream[LayerMoments]):
    """The moments of every consumer, module by module, under a memory limit; see `Stream`.

    A module takes 16 bytes for each pair of inputs, and as many for each pair of an input and an output if it has no
    more inputs than outputs (with more, those products follow from the others); twice that if `weighted`.

    Args:
        dense: The dense model.
        modules: The modules whose consumers to watch, in the order in which the model runs them.
        batches: Inputs of the model; padding is excluded by the `attention_mask`. Labels are read only from batches of
            a language model, if `weighted`.
        selection: Cover the inputs of the kept units only.
        limit_bytes: Bytes that the moments of a group of modules may take.
        weighted: Also add up tokens weighted by the gradient of the prediction; it takes a backward pass as well.
        progress: Shows the loops over the batches.

    Raises:
        DataError: Fewer than five samples.

    Examples:
        >>> for module, moments in MomentStream(model, modules, batches, weighted=True):
        ...     half = moments.mixed(0.5)
    """

    def __init__(
        self,
        dense: PreTrainedModel,
        modules: Sequence[PrunableModule],
        batches: Sequence[dict[str, Tensor]],
        *,
        selection: Selection | None = None,
        limit_bytes: float = LIMIT_BYTES,
        weighted: bool = False,
        progress: Progress = SILENT,
    ):
        check_samples(batches)
        self.selection, self.weighted = selection, weighted
        self._dense, self._batches, self._progress = dense, batches, progress
        sizes = [bytes_of(dense, module, selection=selection, weighted=weighted) for module in modules]
        super().__init__(modules, sizes, limit_bytes, what="the moments")

    def _collect(self, group: Sequence[PrunableModule]) -> dict[str, LayerMoments]:
        return _collect(
            self._dense,
            group,
            self._batches,
            owners=self.owners,
            selection=self.selection,
            weighted=self.weighted,
            progress=self._progress,
        )


def bytes_of(
    dense: PreTrainedModel, module: PrunableModule, *, selection: Selection | None = None, weighted: bool = False
) -> int:
    """Return the bytes that the moments of one module take in a `MomentStream`."""
    outputs, inputs = features_of(dense.get_submodule(module.consumer))
    derived = selection is None and inputs > outputs
    inputs = inputs if selection is None else len(selection[module.name].units) * module.unit_width
    return 2 * (1 + weighted) * 8 * inputs * (inputs + (0 if derived else outputs))


def collect_moments(
    dense: PreTrainedModel,
    modules: Sequence[PrunableModule],
    batches: Sequence[dict[str, Tensor]],
    *,
    selection: Selection | None = None,
    slim: PreTrainedModel | None = None,
    progress: Progress = SILENT,
) -> dict[str, SplitMoments]:
    """Collect the moments of every consumer's inputs and dense outputs, in one pass over the batches.

    Without a selection, the moments cover all inputs. Those of any selection are sub-blocks of them, so one pass serves
    any number of plans. Memory is then 16 bytes for each pair of inputs, and of an input and an output, of each
    consumer, e.g. 28 MB for the heads of 6 layers of width 384, and 17 GB for those of 32 layers of width 4096.
    `MomentStream` takes as many passes as a limit makes necessary.

    Args:
        dense: The dense model.
        modules: The modules whose consumers to watch.
        batches: Inputs of the model; labels are not used, and padding is excluded by the `attention_mask`.
        selection: Cover the inputs of the kept units only.
        slim: Take the inputs from this model, cut by `selection`, and only the outputs from the dense one.
        progress: Shows the loop over the batches.

    Returns:
        Module -> moments of its consumer.

    Raises:
        DataError: Fewer than five samples.
    """
    check_samples(batches)
    found = _collect(dense, modules, batches, selection=selection, slim=slim, progress=progress)
    return {name: moments.mixed() for name, moments in found.items()}


def _collect(
    dense: PreTrainedModel,
    modules: Sequence[PrunableModule],
    batches: Sequence[dict[str, Tensor]],
    *,
    owners: Mapping[str, int] | None = None,
    selection: Selection | None = None,
    slim: PreTrainedModel | None = None,
    weighted: bool = False,
    progress: Progress = SILENT,
) -> dict[str, LayerMoments]:
    """Return the sums of every consumer that this process owns, or without owners of all, from one pass."""
    by_name = {module.name: module for module in modules}
    # The products of all inputs of a wide consumer with its targets follow from those of the inputs.
    whole = selection is None and slim is None
    sums = {m.name: _new_sums(dense, m, None if whole else selection, weighted=weighted) for m in modules}
    first = [0, *accumulate(map(size_of, batches))]
    with ExitStack() as stack:
        stack.enter_context(threads_for(dense, batches))
        read = stack.enter_context(reading(dense, modules, gradients=weighted))
        read_slim = None if slim is None else stack.enter_context(reading(slim, modules))
        for index, batch in progress.track(processes.share(batches), "moments"):
            held = torch.arange(first[index], first[index + 1]) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
            readings = read(batch, index)
            slim_readings = readings if read_slim is None else read_slim(batch, index)
            for one, other in zip(readings, slim_readings, strict=True):
                x = other.inputs
                if selection is not None and slim is None:
                    x = x.index_select(-1, by_name[one.name].columns(selection[one.name].units).to(x.device))
                _add(sums[one.name], one, x, held.to(x.device))
    for name, found in sums.items():
        found.finish(None if owners is None else owners[name])
    return {name: found for name, found in sums.items() if owners is None or owners[name] == processes.rank()}


def _new_sums(
    dense: PreTrainedModel, module: PrunableModule, selection: Selection | None, *, weighted: bool
) -> LayerMoments:
    """Return sums of zero for the inputs of a consumer, or with a selection for those of the kept units."""
    layer = dense.get_submodule(module.consumer)
    outputs, inputs = features_of(layer)
    device = weight_of(layer).device

    def new() -> Sums:
        # For square consumers, such as attention's, the products with the outputs are cheap to add up.
        if selection is None and inputs > outputs:
            return LayerSums(layer, device)
        kept = inputs if selection is None else len(selection[module.name].units) * module.unit_width
        return TargetSums(kept, outputs, device)

    return LayerMoments((new(), new()), (new(), new()) if weighted else None)


def _add(sums: LayerMoments, read: Reading, x: Tensor, held: Tensor) -> None:
    """Add what a consumer read in one batch to the sums for fitting, and of held-out samples to those for judging.

    Args:
        sums: The sums of the consumer.
        read: The reading of the dense model.
        x: (batch, tokens, inputs), the inputs to add up.
        held: (batch,) bool, the held-out samples.
    """
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
    """Refuse batches with too few samples to hold one out.

    Raises:
        DataError: Fewer than five samples.
    """
    samples = sum(map(size_of, batches))
    if samples < HELD_OUT_EVERY:
        raise DataError(
            f"compensation needs at least {HELD_OUT_EVERY} samples, one of them to hold out, got {samples}; "
            "raise compensation.samples"
        )
