"""Run a model on many batches abreast: all of them wait in front of a layer until it has been changed.

So layers can be refitted one after the other, each by what the layers before it give now, in one pass over the rows. A
batch runs in a coroutine (a greenlet) that the hook of a layer leaves, so the model's own code stays as it is. What a
forward pass holds at one layer is held for all batches at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..equal import SAME_CODE, Difference
from ..errors import RequestError
from ..model.internals import uncompiled
from ..model.modes import evaluating, output_alone
from ..model.tokens import real_tokens, short_samples
from ..tasks import task_of
from ..units.units import PrunableModule
from .readings import by_sample, least_logits


@dataclass(frozen=True)
class Place:
    """Where to read the residual stream that a consumer's output is added to: the last input or output of a layer."""

    layer: str
    returned: bool


@dataclass(frozen=True)
class Waiting:
    """A batch in front of a consumer."""

    inputs: Tensor  # (batch, tokens, inputs)
    stream: Tensor | None  # (batch, tokens, outputs), what the output will be added to; None if that is not known
    real: Tensor  # (batch, tokens) bool, the tokens that are not padding


def residual_places(
    model: PreTrainedModel, modules: Sequence[PrunableModule], batch: Mapping[str, Tensor]
) -> dict[str, Place | None]:
    """Return module -> where to read the residual stream that its output is added to, in the order of the calls.

    The stream is recognised by its numbers: it is the earlier tensor that equals what a later layer reads minus the
    module's output. The place is None if no layer reads such a sum, for example if the output is normalised first.

    Raises:
        RequestError: A module is called more than once, or never.
    """
    consumers = {module.consumer: module.name for module in modules}
    names = {layer: name for name, layer in model.named_modules() if name}
    earlier: list[tuple[Place, Tensor]] = []  # what layers read and returned since the last consumer
    # That consumer's module, its output, and what was earlier than it.
    last: tuple[str, Tensor, list[tuple[Place, Tensor]]] | None = None
    calls: list[str] = []
    found: dict[str, Place | None] = {}

    def before(layer: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal last
        if not args or not isinstance(x := args[0], Tensor):
            return
        # Some blocks flatten the tokens of all samples.
        if last is not None and x is not last[1] and x.numel() == last[1].numel():
            name, y, before_it = last
            without = x.reshape(y.shape) - y
            alike = ((at, t.reshape(y.shape)) for at, t in before_it if t.numel() == y.numel())
            found[name] = next((at for at, t in alike if Difference.of(without, t).within(SAME_CODE)), None)
            last = None if found[name] else last
        earlier.append((Place(names[layer], returned=False), x))

    def after(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nonlocal last, earlier
        name = names[layer]
        if name in consumers:
            calls.append(consumers[name])
            found.setdefault(consumers[name], None)
            last, earlier = (consumers[name], output, earlier), []
        elif isinstance(output, Tensor):
            earlier.append((Place(name, returned=True), output))

    with ExitStack() as stack:
        for layer in names:
            stack.enter_context(layer.register_forward_pre_hook(before))
            stack.enter_context(layer.register_forward_hook(after))
        stack.enter_context(_forward_alone(model))
        _forward(model, short_samples(model, batch))
    for module in modules:
        if calls.count(module.name) != 1:
            raise RequestError(
                f"a refit layer by layer needs every layer to run once, but {module.name} runs "
                f"{calls.count(module.name)} times; leave out compensation.sequential"
            )
    return found


@contextmanager
def abreast(
    model: PreTrainedModel,
    modules: Sequence[PrunableModule],
    batches: Sequence[Mapping[str, Tensor]],
    places: Mapping[str, Place | None],
) -> Iterator[Callable[[int, PrunableModule], Waiting]]:
    """Yield a function that lets a batch, by its number, run to a module's consumer, where it then waits.

    Modules come in the order of their calls. A batch that is never run takes no memory.

    Args:
        model: The model; its mode is restored.
        modules: The modules whose consumers batches wait at.
        batches: Inputs of the model.
        places: From `residual_places`.
    """
    runs = [greenlet(partial(_forward, model, batch)) for batch in batches]
    streams: dict[int, Tensor] = {}  # by batch, in front of the consumer that comes next
    running = 0

    def run(number: int, module: PrunableModule) -> Waiting:
        nonlocal running
        running, batch = number, batches[number]
        name, x = runs[number].switch()
        assert name == module.name, (name, module.name)
        x = by_sample(model, name, batch, x)
        # None also where the layer that shows it was removed as a whole.
        stream = streams.pop(number, None)
        stream = None if stream is None else by_sample(model, name, batch, stream)
        return Waiting(x, stream, real_tokens(model, name, batch, x))

    def keep(place: Place, layer: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
        streams[running] = output if place.returned else args[0]

    def pause(name: str, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        getcurrent().parent.switch((name, args[0]))

    def stop() -> None:
        for one in runs:
            if one:  # it was started, and has not ended
                one.throw()

    with ExitStack() as stack:
        stack.enter_context(_forward_alone(model))
        for place in dict.fromkeys(filter(None, places.values())):
            layer = model.get_submodule(place.layer)
            hook = layer.register_forward_hook if place.returned else layer.register_forward_pre_hook
            stack.enter_context(hook(partial(keep, place)))
        # After the hooks that keep: a layer may be both.
        for module in modules:
            consumer = model.get_submodule(module.consumer)
            stack.enter_context(consumer.register_forward_pre_hook(partial(pause, module.name)))
        stack.callback(stop)
        yield run


@contextmanager
def _forward_alone(model: PreTrainedModel) -> Iterator[None]:
    with evaluating(model), output_alone(model), uncompiled(model), torch.no_grad():
        yield


def _forward(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> None:
    """Run a batch without its labels, and without the head of a language model as far as it can be left out."""
    task_of(model, batch).output(model, {**batch, **least_logits(model)})
