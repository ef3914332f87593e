"""Find out how an attention module without heads is skipped: what it returns, and which layer in it gives the bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..kinds import ATTENTION
from ..model.copies import share_weights
from ..model.modes import output_alone
from ..model.sentence import TextEncoder
from ..model.tokens import sample_batch
from ..units import PrunableModule

# Attention returns its output, and often its weights beside it, which are None without heads.
_MOST_OUTPUTS = 2


def how_to_skip(model: PreTrainedModel, modules: Sequence[PrunableModule]) -> dict[str, dict[str, Any]]:
    """Return for each attention module what `modeling_hies.skip` needs, from a run on two short random rows.

    Feed-forward blocks need nothing: their layers without features compute nothing.

    Raises:
        UnsupportedModelError: A module does more after its consumer, or returns more than its output and its weights.
    """
    attention = [module for module in modules if module.kind == ATTENTION]
    if not attention:
        return {}
    if isinstance(model, TextEncoder):
        return how_to_skip(model.auto_model, [module.below(model.base_model_prefix) for module in attention])
    if model.config.is_encoder_decoder:
        raise _refusal(attention[0], "is part of an encoder-decoder")
    batch = sample_batch(model, sequence=4)
    try:
        return _seen(share_weights(model, device="meta"), attention, {k: v.to("meta") for k, v in batch.items()})
    except (RuntimeError, NotImplementedError):  # the forward depends on the values of its inputs
        return _seen(share_weights(model), attention, {k: v.to(model.device) for k, v in batch.items()})


def _seen(
    model: PreTrainedModel, modules: Sequence[PrunableModule], batch: Mapping[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """Run a copy of the model, and return how each module is skipped."""
    read: dict[str, tuple[Tensor, Tensor]] = {}  # module -> input and output of its consumer
    found: dict[str, tuple[Tensor, Any]] = {}  # module -> its own input and output

    def record(into: dict[str, Any], name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        into.setdefault(name, (next(iter((*args, *kwargs.values()))), output))

    for module in modules:
        for layer, into in ((module.consumer, read), (module.name, found)):
            hook = partial(record, into, module.name)
            model.get_submodule(layer).register_forward_hook(hook, with_kwargs=True)
    with output_alone(model.eval()), torch.no_grad():
        model(**batch)
    return {module.name: _how(module, *found[module.name], *read[module.name]) for module in modules}


def _how(module: PrunableModule, given: Tensor, returned: Any, read: Tensor, computed: Tensor) -> dict[str, Any]:
    """Return how one module is skipped, from its input and output, and those of its consumer."""
    inside = module.consumer.startswith(f"{module.name}.")
    outputs = returned if isinstance(returned, tuple) else (returned,)
    if len(outputs) > _MOST_OUTPUTS:
        raise _refusal(module, f"returns {len(outputs)} values")
    if inside and not outputs[0].is_set_to(computed):
        raise _refusal(module, f"computes more after {module.consumer}")
    if given.shape[:-1] != read.shape[:-1]:
        raise _refusal(module, f"gives {module.consumer} other rows than it takes")
    consumer = module.consumer.removeprefix(f"{module.name}.") if inside else ""
    return {"outputs": len(outputs) if isinstance(returned, tuple) else 0, "consumer": consumer}


def _refusal(module: PrunableModule, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"attention can lose all its heads where its output is that of its consumer, but {module.name} {reason}; set "
        "min_heads to at least 1"
    )
