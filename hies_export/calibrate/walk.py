"""Take all batches through a model one block at a time, forward and backward.

A model is a row of blocks, the elements of its `nn.ModuleList`s. All batches wait in front of a block until it has been
read, changed or run, so memory holds the activations of one block at a time, beside the hidden states between blocks.
The model's own forward runs in a coroutine (a greenlet) for each batch. A block's `forward` is replaced by a switch to
the caller, who computes the output and sends it back. So every family of models calls its blocks by its own code.

Backward, the last block first, each block is computed anew from its inputs; only the graph between blocks is held.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.utils import _pytree as tree
from transformers import Cache, PreTrainedModel

from ..data.batches import in_rows, inputs_of
from ..errors import UnsupportedModelError
from ..model.internals import forwards_set
from ..model.memory import give_back_memory
from ..model.modes import evaluating, output_alone, wide_products, widens
from ..model.tokens import short_samples
from ..units.units import PrunableModule

WHOLE = ""  # the name of the one block of a model that is not a row of blocks


@dataclass(eq=False)
class Call:
    """The arguments with which a batch calls a layer, and the layer's output."""

    layer: str  # its dotted name
    batch: int  # number of the batch
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    gradients: list[Tensor | None] = field(default_factory=list)  # of the output's floating tensors, set by `backward`


class Walk:
    """Batches on their way through the blocks of a model, or through the layers of one block.

    Blocks compute on `device_of_blocks`: the weights of one at a time go there and back. The other weights, and the
    hidden states between blocks, stay on the model's device. On a CPU a block of half precision computes in float32
    where that is faster (see `widens`); hidden states between blocks keep the model's dtype.

    Args:
        model: The model; the forward methods of its layers are replaced inside of `forward` alone.
        batches: Number -> batch, as `run` takes it. Each of several processes has its own batches only.
        layers: Names of the blocks or layers to wait in front of, in the order in which they are called.
        run: Runs the model on the number and the batch. After the last layer, one batch runs after the other.
    """

    def __init__(
        self, model: nn.Module, batches: Mapping[int, Any], layers: Sequence[str], run: Callable[[int, Any], None]
    ):
        self._batches, self._run = batches, run
        self._layers = {name: model.get_submodule(name) for name in layers}
        self._forwards: dict[str, Callable[..., Any]] = {}  # layer -> its own forward
        self._device, self._coroutines = device_of_blocks(model), dict[int, greenlet]()  # by number of the batch
        self.trail: dict[str, list[Call]] = {}  # block -> its calls, once a forward with gradients has passed it

    def forward(self, *, gradients: bool = False) -> Generator[tuple[str, list[Call]], None, None]:
        """Yield every layer with its calls, in order; the caller sets `output` of each call.

        A batch may skip layers, as texts alone skip an image tower: it then waits for the others. What comes after the
        last layer runs unless the caller closes the generator there. With `gradients`, calls are kept for `backward`.
        An UnsupportedModelError says that a layer is called again, or in another order.
        """
        self.trail = {}
        with self._waiting():
            for number, batch in self._batches.items():
                coroutine = self._coroutines[number] = greenlet(partial(self._run, number, batch))
                coroutine.gr_context, coroutine.number = copy_context(), number
            waiting = {number: self._switch(number) for number in self._coroutines}  # None for a batch at its end
            for layer in self._layers:
                calls = [call for call in waiting.values() if call is not None and call.layer == layer]
                with self.at_hand(layer):
                    yield layer, calls
                if gradients:
                    self.trail[layer] = calls
                for call in calls:
                    output = call.output
                    if gradients:
                        call.output = tree.tree_map_only(is_float, lambda t: t.detach().requires_grad_(), output)
                        with torch.enable_grad():  # also for a caller inside of `torch.no_grad`
                            output = tree.tree_map_only(is_float, _Identity.apply, call.output)
                    else:  # whoever still has the call holds no hidden states by it
                        call.args, call.kwargs, call.output = (), {}, None
                    waiting[call.batch] = self._switch(call.batch, output)
                del calls
                give_back_memory()
            late = [call for call in waiting.values() if call is not None]
            if late:
                raise UnsupportedModelError(
                    f"layers must be called once and in their order, but {late[0].layer} is called after {layer}; "
                    "please report this architecture"
                )

    def compute(self, call: Call, dtype: torch.dtype | None = None) -> Any:
        """Return a layer's output for a call, without gradients; with `dtype`, it is computed and returned in that."""
        with self.at_hand(call.layer, dtype), torch.no_grad():
            return self._run_layer(call, dtype=dtype)

    def backward(self) -> Iterator[tuple[str, list[Call]]]:
        """Yield every block with its calls, the last first, after a `forward` with gradients.

        `run` must have called `backward` on what it made of the last block's output. The caller passes each call to
        `gradients_in`, which also hands the gradients on to earlier blocks.
        """
        for block, calls in reversed(self.trail.items()):
            for call in calls:
                call.gradients = [t.grad for t in _float_tensors(call.output)]
                call.output = None
            with self.at_hand(block):
                yield block, calls
            give_back_memory()

    def gradients_in(self, call: Call, read: Callable[[], Sequence[Tensor]], *, hand_on: bool = True) -> list[Tensor]:
        """Run one block backward, and return the gradients of tensors inside of it; zeros where there is none.

        `call` is one that `backward` yields, while its block is `at_hand`. `read` returns the tensors, once the block
        has been computed anew. `hand_on`, at most once for each call, adds the gradients of the call's arguments to
        those of the outputs of earlier blocks, and then detaches the arguments.
        """
        # The block runs on leaves in place of its arguments. By id, as it may be called with one tensor several times.
        arguments = {id(t): t for t in _float_tensors((call.args, call.kwargs)) if t.requires_grad}
        leaves = {key: t.detach().requires_grad_() for key, t in arguments.items()}
        with torch.enable_grad():
            output = self._run_layer(call, lambda t: leaves.get(id(t), t))
            inside = read()
            wanted = [*inside, *leaves.values()]
            pairs = zip(_float_tensors(output), call.gradients, strict=True)
            used = [(value, g) for value, g in pairs if g is not None and value.requires_grad]
            grads: Sequence[Tensor | None] = [None] * len(wanted)
            if used:
                grads = torch.autograd.grad([v for v, _ in used], wanted, [g for _, g in used], allow_unused=True)
        if hand_on:  # what nothing depends on has no gradient to hand on
            given = [(t, g) for t, g in zip(arguments.values(), grads[len(inside) :], strict=True) if g is not None]
            if given:
                # Several blocks may read one tensor, through what the model computes between them.
                torch.autograd.backward([t for t, _ in given], [g for _, g in given], retain_graph=True)
            # The leaves hold no graph of what ran before.
            call.args, call.kwargs = tree.tree_map(lambda t: leaves.get(id(t), t), (call.args, call.kwargs))
        return [torch.zeros_like(t) if g is None else g for t, g in zip(inside, grads, strict=False)]

    def _run_layer(
        self, call: Call, replaced: Callable[[Any], Any] = lambda value: value, dtype: torch.dtype | None = None
    ) -> Any:
        """Return the output of a layer, on the device of the call's tensors, after `replaced` has mapped each of them.

        It is computed and returned in `dtype`; None for the dtypes that the class describes.
        """
        # Says where the output goes, and in which dtype if the layer is widened.
        like = next(iter(_float_tensors((call.args, call.kwargs))), torch.empty(0, device=self._device))
        widened = dtype is None and self._device.type == "cpu" and widens(like)
        compute_dtype = torch.float32 if widened else dtype
        args, kwargs = tree.tree_map(lambda t: _to(replaced(t), self._device, compute_dtype), (call.args, call.kwargs))
        output = self._forwards[call.layer](*args, **kwargs)
        return tree.tree_map(lambda t: _to(t, like.device, like.dtype if widened else dtype), output)

    @contextmanager
    def at_hand(self, name: str, dtype: torch.dtype | None = None) -> Iterator[None]:
        """Move a layer's weights to where it computes, and to `dtype` if given, inside the block.

        Afterwards they are the tensors from before, with the changes that were made inside.
        """
        layer = self._layers[name]
        moved: list[tuple[Tensor, Tensor]] = []  # parameter or buffer, and its data from before
        for tensor in (*layer.parameters(), *layer.buffers()):
            widened = dtype is None and self._device.type == "cpu" and widens(tensor)
            here = _to(tensor.data, self._device, torch.float32 if widened else dtype)
            if (here.device, here.dtype) != (tensor.device, tensor.dtype):
                moved.append((tensor, tensor.data))
                tensor.data = here
        try:
            yield
        finally:
            for tensor, data in moved:
                after = tensor.data.to(data)
                if not torch.equal(after, data):
                    data.copy_(after)
                tensor.data = data

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Let calls of the layers switch to the caller inside the block; end the coroutines afterwards."""
        self._forwards = {name: layer.forward for name, layer in self._layers.items()}
        with forwards_set({layer: partial(self._wait, name) for name, layer in self._layers.items()}):
            try:
                yield
            finally:
                for coroutine in self._coroutines.values():
                    if coroutine:  # started, and not at its end
                        coroutine.throw()

    def _switch(self, number: int, output: Any = None) -> Call | None:
        """Start a batch, or send it a layer's output; return its next call, or None at its end."""
        coroutine = self._coroutines[number]
        # Whether gradients are taken is a mode of the thread: each side gets its own back.
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            sent: Any = coroutine.switch(output) if coroutine else coroutine.switch()  # true once it has started
        return sent if isinstance(sent, Call) and not coroutine.dead else None

    def _wait(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Stand in for a layer's forward: wait until the caller sends the output, and return it."""
        if getcurrent() not in self._coroutines.values():  # the model is run outside of the walk meanwhile
            return self._forwards[name](*args, **kwargs)
        mode = torch.is_grad_enabled()
        # A cache that the model makes unasked would keep what a block adds each time it is computed.
        args, kwargs = tree.tree_map(lambda v: None if isinstance(v, Cache) else v, (args, kwargs))
        output = getcurrent().parent.switch(Call(name, current_batch(), args, kwargs))
        torch.set_grad_enabled(mode)
        return output


def device_of_blocks(model: nn.Module) -> torch.device:
    """Return where blocks compute: on the model's device, but on the GPU, if there is one, for a model on the CPU."""
    own = next(model.parameters()).device
    return torch.device("cuda", torch.cuda.current_device()) if own.type == "cpu" and torch.cuda.is_available() else own


def current_batch() -> int:
    """Return the number of the batch whose coroutine calls this."""
    return int(getcurrent().number)


def blocks_of(
    model: PreTrainedModel, modules: Sequence[PrunableModule], batch: Mapping[str, Tensor]
) -> dict[str, list[PrunableModule]]:
    """Return block -> the modules inside, in the order in which a few tokens of the batch call the blocks.

    A block is the innermost element of an `nn.ModuleList` around a module, or the one around that if the list is in
    another block. Elements of other lists are blocks without modules, because the graph between blocks is held for all
    batches. The whole model is one block if a module is in no list, or if a block is called twice (as in ALBERT).
    """
    layers = dict(model.named_modules(remove_duplicate=False))
    positions = {name: position for position, name in enumerate(layers)}
    elements = [name for name in layers if isinstance(layers[name.rpartition(".")[0]], nn.ModuleList)]
    modules = sorted(modules, key=lambda module: positions[module.consumer])
    around = [max((e for e in elements if _inside(module.consumer, e)), key=len, default=WHOLE) for module in modules]
    if WHOLE in around:
        return {WHOLE: modules}
    blocks: list[str] = []
    for element in [*sorted(around, key=len), *elements]:  # the outermost ones around modules first
        if not any(_inside(element, other) or _inside(other, element) or element == other for other in blocks):
            blocks.append(element)
    blocks.sort(key=positions.__getitem__)
    called: list[str] = []  # a block once for each call

    def record(block: str, *_: Any) -> None:
        called.append(block)

    with ExitStack() as hooks, evaluating(model), output_alone(model), wide_products(model), torch.no_grad():
        for block in blocks:
            hooks.enter_context(model.get_submodule(block).register_forward_pre_hook(partial(record, block)))
        first = inputs_of(in_rows(short_samples(batch), 2)[0])
        model(**{key: value.to(next(model.parameters()).device) for key, value in first.items()})
    if set(called) == set(blocks):
        blocks = [*dict.fromkeys(called)]
    if called != [block for block in blocks if block in called]:  # a block is called again, or out of order
        return {WHOLE: modules}
    return {block: [module for module in modules if _inside(module.consumer, block)] for block in blocks}


def _inside(name: str, block: str) -> bool:
    return name.startswith(f"{block}.")


def _to(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Return a tensor on a device and, if it is floating, in `dtype` if given; return any other value as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else None)


def is_float(value: Any) -> bool:
    """Return whether a value is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _float_tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree.tree_leaves(value) if is_float(leaf)]


class _Identity(torch.autograd.Function):
    """Returns a leaf as a tensor that the model may change in place, which is forbidden for leaves and their views."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
