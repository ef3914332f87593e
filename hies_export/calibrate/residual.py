"""Find where to read the residual stream that a consumer's output is added to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..equal import SAME_CODE, Difference
from ..errors import RequestError
from ..model.modes import intercept
from ..model.tokens import short_samples
from ..units.units import PrunableModule
from .readings import run_forward, walking
from .walk import current_batch


class _LastConsumer(NamedTuple):
    module: str
    output: Tensor
    earlier: list[tuple[str, Tensor]]  # layers between the consumer before it and this one, and their inputs


def residual_places(
    model: PreTrainedModel, modules: Sequence[PrunableModule], batch: Mapping[str, Tensor]
) -> dict[str, str | None]:
    """Return module -> a layer that reads the residual stream that its output is added to, in the order of the calls.

    The stream is recognised by its numbers: it is the earlier input that equals a later layer's input minus the
    module's output. The layer is None if none reads such a sum, for example if the output is normalised first. A
    RequestError says that a module is called more than once, or never.
    """
    consumers = {module.consumer: module.name for module in modules}
    names = {layer: name for name, layer in model.named_modules() if name}
    earlier: list[tuple[str, Tensor]] = []  # layers since the last consumer, and their inputs
    last: _LastConsumer | None = None  # while no layer that reads its sum was found
    calls: list[str] = []
    places: dict[str, str | None] = {}

    def before_layer(layer: nn.Module, args: tuple[Any, ...]) -> None:
        """Note which earlier layer read the stream, if this layer reads the stream plus the last consumer's output."""
        nonlocal last
        x = args[0] if args else None
        if not isinstance(x, Tensor):
            return
        # A layer may read the output before it is added. Some blocks flatten the tokens of all samples.
        if last is not None and x is not last.output and x.numel() == last.output.numel():
            y = last.output
            stream = x.reshape(y.shape).to(y.device) - y
            inputs = ((place, t.reshape(y.shape).to(y.device)) for place, t in last.earlier if t.numel() == y.numel())
            same = (place for place, t in inputs if Difference.of(stream, t).within(SAME_CODE))
            places[last.module] = next(same, None)
            last = None if places[last.module] else last
        earlier.append((names[layer], x))

    def after_consumer(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nonlocal last, earlier
        module = consumers[names[layer]]
        calls.append(module)
        places.setdefault(module, None)
        last, earlier = _LastConsumer(module, output, earlier), []

    with walking(model), ExitStack() as hooks:
        for layer, name in names.items():
            hooks.enter_context(layer.register_forward_pre_hook(before_layer))
            if name in consumers:
                hooks.enter_context(layer.register_forward_hook(after_consumer))
        run_forward(model, short_samples(batch))
    for module in modules:
        if calls.count(module.name) != 1:
            raise RequestError(
                f"a refit layer by layer needs every layer to run once, but {module.name} runs "
                f"{calls.count(module.name)} times; set compensation.sequential: false"
            )
    return places


@contextmanager
def streams(model: nn.Module, places: Mapping[str, str | None]) -> Iterator[dict[int, Tensor]]:
    """Record residual streams in a walk: yield batch number -> the tensor at the last place that the batch reached."""
    latest: dict[int, Tensor] = {}

    def keep(_: str, x: Tensor) -> Tensor:
        latest[current_batch()] = x
        return x

    with intercept(model, {place: place for place in places.values() if place is not None}, keep):
        yield latest
