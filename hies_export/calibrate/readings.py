"""Read the inputs of consumers block by block, and the gradients of a loss or of the prediction to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate, repeat
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.batches import size_of
from ..errors import NonFiniteError, UnsupportedModelError
from ..model.internals import uncompiled
from ..model.memory import lean_memory
from ..model.modes import evaluating, frozen, output_alone, watch, wide_products
from ..model.tokens import real_tokens, refuse_tokens_first
from ..processes import is_own, mapped
from ..progress import SILENT, Progress
from ..tasks import task_of
from ..units.units import PrunableModule
from .walk import Call, Walk, blocks_of


@dataclass(frozen=True)
class Reading:
    """One call of a consumer, for one batch."""

    name: str  # of the module
    inputs: Tensor  # (batch, tokens, inputs)
    gradients: Tensor | None  # to the inputs, (batch, tokens, inputs), of the sum over samples; None if not asked for
    real: Tensor  # (batch, tokens) bool, the tokens that are not padding


Read: TypeAlias = Callable[[int], list[Reading]]
"""Runs a batch, by its number, through a block; returns a reading for each call of a consumer, module by module."""

Work: TypeAlias = Callable[[list[PrunableModule], Read], None]
"""Works on the modules of a block. It must read each batch that `mapped` gives this process, once."""

Inputs: TypeAlias = Mapping[str, list[Tensor]]  # module -> what its consumer read in each of its calls
Batches: TypeAlias = Sequence[Mapping[str, Tensor]]
BOUNDED = 0.02  # share of the tokens whose effects are bounded


def read_forward(
    model: PreTrainedModel,
    batches: Batches,
    modules: Sequence[PrunableModule],
    work: Work,
    *,
    name: str = "",
    progress: Progress = SILENT,
) -> None:
    """Take batches forward through a model, and call `work` with the modules of each block, in the model's order.

    Labels are left out, and nothing after the last block with modules is run. The model is restored afterwards.
    """
    blocks = blocks_of(model, modules, batches[0])
    last = max(number for number, inside in enumerate(blocks.values()) if inside)
    blocks = dict([*blocks.items()][: last + 1])
    walk = walk_forward(model, batches, [*blocks])

    def compute(call: Call, _: Inputs) -> Iterator[None]:
        call.output = walk.compute(call)
        return repeat(None)  # no gradient, however many inputs were read

    with walking(model), closing(walk.forward()) as steps:
        for block in progress.track([*blocks], name) if name else blocks:
            _, calls = next(steps)
            with _reader(model, blocks[block], batches, calls, compute) as read:
                _work_on(work, blocks[block], read, calls)


def _work_on(work: Work | None, modules: list[PrunableModule], read: Read, calls: Sequence[Call]) -> None:
    """Call `work` with the modules of a block; without work or modules, only run the block's calls."""
    if work is not None and modules:
        work(modules, read)
        return
    for call in calls:
        read(call.batch)


def walk_forward(model: PreTrainedModel, batches: Batches, blocks: Sequence[str]) -> Walk:
    """Return a walk that takes this process's share of the batches forward through the blocks, without labels."""
    return Walk(model, own_batches(batches), blocks, lambda _, batch: run_forward(model, batch))


def run_forward(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> None:
    """Run a batch without its labels, and if possible the head of a language model for the last token only."""
    with torch.no_grad():
        # That head costs as much as many layers.
        last: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
        task_of(model).output(model, {**batch, **last})


@contextmanager
def walking(model: PreTrainedModel, *, gradients: bool = False) -> Iterator[None]:
    """Keep a model in evaluation mode, with `gradients` also frozen, uncompiled and lean in memory inside the block."""
    mode = frozen(model) if gradients else evaluating(model)
    with mode, output_alone(model), uncompiled(model), wide_products(model), lean_memory():
        yield


def own_batches(batches: Sequence[Any]) -> dict[int, Any]:
    """Return the batches that `mapped` gives this process, by number."""
    return {number: batch for number, batch in enumerate(batches) if is_own(number)}


class Gradients:
    """Readings with gradients, of one block at a time, after all batches went forward and backward once.

    The inputs of every block and the gradients of its output may be kept, which takes two hidden states of all batches
    for each block. From these, `collect_again` computes a block anew, once. The model is restored after each use.

    What is differentiated is the sum of all terms of the "loss" of a batch with labels (`Task.loss`), or of each
    sample's "effect" (`Task.effect`). `numbers` are those of the batches in messages, where these are parts of others.
    `within` makes a context that is open during each walk.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batches: Sequence[dict[str, Tensor]],
        modules: Sequence[PrunableModule],
        target: Literal["loss", "effect"],
        *,
        numbers: Sequence[int] | None = None,
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        if target == "effect":
            task_of(model).check_batches(batches)
        self._model, self._target, self._within, self.batches = model, target, within, batches
        self._numbers = numbers or range(len(batches))
        self.blocks = blocks_of(model, modules, batches[0])
        self._walk = Walk(model, own_batches(batches), [*self.blocks], self._run)
        self.counts: dict[int, Tensor] = {}  # batch -> number of terms of the loss that belong to each sample, (batch,)

    def _run(self, number: int, batch: dict[str, Tensor]) -> None:
        """Run the model on a batch, and run backward from the loss or the effect to the last block's output."""
        with torch.enable_grad():
            task, number_in_messages = task_of(self._model), self._numbers[number]
            if self._target == "loss":
                total, self.counts[number] = task.loss(self._model, batch, number_in_messages)
            else:
                predicted = task.effect(self._model, batch, task.output(self._model, batch), number)
                _check_finite([predicted], f"predictions of batch {number_in_messages}")
                total = predicted.sum()
            if total.requires_grad:  # else it depends on nothing that is read
                # What a model computes before a block may go around it too, and is needed again for that block.
                total.backward(retain_graph=True)

    def collect(
        self,
        work: Work | None = None,
        *,
        keep: Collection[str] = (),
        around: Callable[[int], AbstractContextManager[Any]] = nullcontext,
        name: str = "",
        progress: Progress = SILENT,
    ) -> None:
        """Take all batches forward and backward, and call `work` with the modules of each block, the last block first.

        `work` is as for `read_forward`, with gradients in the readings; None if nothing is done yet. What
        `collect_again` needs is kept for the blocks to `keep`. `around` makes a context from a batch's number that is
        open while the batch goes forward through a block. The loop over the blocks, both ways, is shown as `name`.
        """
        steps = iter(progress.track([*self.blocks] * 2, name) if name else ())
        with walking(self._model, gradients=True), self._within():
            with closing(self._walk.forward(gradients=True)) as forward:
                for _, calls in forward:
                    next(steps, None)
                    for call in calls:
                        with around(call.batch):
                            call.output = self._walk.compute(call)
            for block, calls in self._walk.backward():
                next(steps, None)
                with self._reader(block, calls, hand_on=True) as read:
                    _work_on(work, self.blocks[block], read, calls)
        next(steps, None)
        self._walk.trail = {block: calls for block, calls in self._walk.trail.items() if block in keep}

    def collect_again(self, block: str, work: Work) -> None:
        """Call `work` with the modules of a block that `collect` kept, and drop what was kept for it."""
        reader, at_hand = self._reader(block, self._walk.trail.pop(block), hand_on=False), self._walk.at_hand(block)
        with walking(self._model, gradients=True), self._within(), at_hand, reader as read:
            work(self.blocks[block], read)

    def _reader(self, block: str, calls: Sequence[Call], *, hand_on: bool) -> AbstractContextManager[Read]:
        """Return a context with the function that reads a block with gradients; `hand_on` as in `gradients_in`."""
        modules = self.blocks[block]

        def compute(call: Call, seen: Inputs) -> list[Tensor]:
            gradients = self._walk.gradients_in(
                call, lambda: [x for module in modules for x in seen[module.name]], hand_on=hand_on
            )
            _check_finite(gradients, f"gradients of batch {self._numbers[call.batch]} in {block}")
            return gradients

        return _reader(self._model, modules, self.batches, calls, compute, gradients=True)


@contextmanager
def _reader(
    model: PreTrainedModel,
    modules: Sequence[PrunableModule],
    batches: Batches,
    calls: Sequence[Call],
    compute: Callable[[Call, Inputs], Iterable[Tensor | None]],
    *,
    gradients: bool = False,
) -> Iterator[Read]:
    """Yield the function that reads the consumers of a block for one batch, by its number.

    `compute` runs a call and returns the gradients of what each module's consumer read, in the order of the modules.
    """
    by_batch = {call.batch: call for call in calls}
    with watch(model, {m.name: m.consumer for m in modules}, gradients=gradients) as seen:

        def read(number: int) -> list[Reading]:
            seen.clear()
            if number not in by_batch:  # a batch may skip a block, as texts alone skip an image tower
                return []
            gradients_in_order = iter(compute(by_batch[number], seen))  # this runs the call, which fills `seen`
            inputs = [(module.name, x.detach()) for module in modules for x in seen[module.name]]
            return [reading_of(model, name, batches[number], x, next(gradients_in_order)) for name, x in inputs]

        yield read
        seen.clear()  # the graph of the last reading holds the weights of the block


def reading_of(
    model: PreTrainedModel, name: str, batch: Mapping[str, Tensor], x: Tensor, gradient: Tensor | None = None
) -> Reading:
    """Return a reading of the consumer of module `name` from its input x and the gradient to that, of any shape."""
    x = by_sample(model, name, batch, x)
    gradient = None if gradient is None else by_sample(model, name, batch, gradient)
    return Reading(name, x, gradient, real_tokens(model, name, batch, x))


def by_sample(model: PreTrainedModel, name: str, batch: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the input, output or gradient x of a module's consumer as (batch, tokens, features).

    Some feed-forward blocks, such as OPT's, flatten the tokens of all samples into one axis. Swin's attention reads
    several windows of each sample, and ConvNeXt's blocks read rows and columns.
    """
    refuse_tokens_first(model, name, batch, x)
    samples = size_of(batch)
    if x.dim() == 3 and len(x) == samples:
        return x
    # More axes hold several images or tiles per sample, of which some may be padding that the model leaves out.
    one_image = all(len(value) == samples and value.dim() <= 4 for value in batch.values() if value.dim())
    if len(x) % samples or not (one_image or x.dim() == 2):
        raise UnsupportedModelError(
            f"every sample must be as many rows of a layer's input as any other, but an input of {name} has the shape "
            f"{tuple(x.shape)} for {samples} samples; give every sample one image of one tile, or leave the layer alone"
        )
    return x.reshape(samples, -1, x.shape[-1])


def _check_finite(values: Sequence[Tensor], what: str) -> None:
    """Refuse predictions or gradients that are NaN or infinite."""
    if not all(torch.isfinite(value).all() for value in values):
        raise NonFiniteError(
            f"every prediction and gradient must be finite, but the {what} have NaN or infinity; check the rows of "
            "that batch and the model's dtype"
        )


@dataclass(frozen=True)
class LayerEffects:
    """Inputs of one consumer at the real tokens of all samples, and the gradients there; 8 bytes a token and input."""

    inputs: Tensor  # (tokens, inputs) float32
    gradients: Tensor  # (tokens, inputs) float32, of the sample's prediction to these inputs, `bounded`
    sample: Tensor  # (tokens,) int64, the sample that each token belongs to
    centred: bool  # the consumer has a bias, which can absorb the mean of the removed inputs


def effects_of(
    model: PreTrainedModel, batches: Batches, modules: Sequence[PrunableModule], read: Read
) -> dict[str, LayerEffects]:
    """Return module -> `LayerEffects`, for the modules of one block, from readings with gradients."""
    first = [0, *accumulate(map(size_of, batches))]

    def effects(number: int, _: Mapping[str, Tensor]) -> dict[str, list[tuple[Tensor, Tensor, Tensor]]]:
        calls: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {m.name: [] for m in modules}  # as in `LayerEffects`
        for reading in read(number):
            assert reading.gradients is not None
            inputs, gradients = (t[reading.real].float() for t in (reading.inputs, reading.gradients))
            calls[reading.name].append((inputs, gradients, first[number] + reading.real.nonzero()[:, 0].cpu()))
        return calls

    batch_effects = mapped(batches, effects)
    layers = {}
    for module in modules:
        calls = [call for of_batch in batch_effects for call in of_batch.pop(module.name)]
        inputs, gradients, sample = (torch.cat(tensors) for tensors in zip(*calls, strict=True))
        centred = model.get_submodule(module.consumer).bias is not None
        layers[module.name] = LayerEffects(inputs, bounded(inputs, gradients), sample, centred)
    return layers


def bounded(inputs: Tensor, gradients: Tensor) -> Tensor:
    """Return gradients, (tokens, inputs), scaled down at the 2 % of tokens where inputs times gradients are largest.

    Their norm becomes that of the token at the border. A removal changes the prediction in proportion to the gradient
    only while the change is small, so that without a bound few tokens decide: in the first layers of SmolLM2-135M, 8 of
    8,192 tokens had 40 % of the squared effects. Tokens that do not reach the prediction are not counted.
    """
    sizes = (inputs * gradients).norm(dim=1)
    reaching = sizes[sizes > 0]
    if not len(reaching):
        return gradients
    border = reaching.kthvalue(len(reaching) - int(BOUNDED * len(reaching))).values
    return gradients * (border / sizes).clamp(max=1)[:, None]
