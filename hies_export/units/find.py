"""Find everything in a model that can be pruned."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor
from transformers import PreTrainedModel

from ..errors import RequestError
from ..kinds import ATTENTION, MLP
from ..model.copies import refuse_devices
from ..model.tokens import refuse_encoder_decoder, short_samples
from ..tasks.registry import refuse_adapters
from .heads import find_attention
from .neurons import find_mlp
from .units import PrunableModule

FINDERS = {ATTENTION: find_attention, MLP: find_mlp}  # kind of units -> what finds the modules with such units


def find_modules(
    model: PreTrainedModel, batch: Mapping[str, Tensor], *, kinds: Collection[str] = (ATTENTION,)
) -> tuple[PrunableModule, ...]:
    """Find the heads and neurons of a model that can be removed.

    Args:
        model: The model; not changed, and its weights neither read nor needed: it may be on the meta device.
        batch: Inputs of the model; two short samples are enough.
        kinds: "attention" for heads, "mlp" for the neurons of feed-forward blocks.

    Returns:
        One `PrunableModule` for each attention layer or feed-forward block: those of the first kind, in the order the
        forward pass reaches them, then those of the next.

    Raises:
        RequestError: A kind is unknown, or the model has an adapter in it or is on a device such as MPS.
        UnsupportedModelError: The model is an encoder-decoder, or some module cannot be cut; the message says why.

    Examples:
        >>> modules = find_modules(model, batches[0], kinds=("attention", "mlp"))
        >>> [(module.kind, module.units) for module in modules][::3]
        [('attention', 6), ('mlp', 64)]
    """
    for kind in kinds:
        if kind not in FINDERS:
            raise RequestError(f"kinds must be among {', '.join(FINDERS)}, got {kind!r}")
    refuse_encoder_decoder(model.config, type(model).__name__)
    refuse_adapters(model)
    refuse_devices(model)
    samples = short_samples(batch)
    return tuple(module for kind in kinds for module in FINDERS[kind](model, samples))
