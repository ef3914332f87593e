"""Multiply the output of every unit by a gate of one, whose gradient is the one that HIS averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.targets import GROUP_KEY, IGNORED, inputs_of, predicted_positions, size_of
from ..errors import NonFiniteError, UnsupportedModelError
from ..kinds import UNIT_NAMES
from ..model.sentence import TextEncoder, predicted_output
from ..model.tokens import judged_tokens
from ..units import PrunableModule


class Gates:
    """Gates of one batch, created when a consumer is first called: module -> (batch, units, 1, 1)."""

    def __init__(self, modules: Sequence[PrunableModule]):
        self._modules = {module.name: module for module in modules}
        self.tensors: dict[str, Tensor] = {}

    def apply(self, name: str, x: Tensor, *, samples: int, rows: int | None = None) -> Tensor:
        """Return the input of a consumer, (..., units * unit_width), times the gates of its module.

        `rows` is the number of samples in x if it is known. By default it is the length of x, or `samples` if x is
        flat: some models flatten (samples, tokens) in front of their feed-forward blocks.
        """
        if rows is None:
            rows = samples if x.dim() == 2 else len(x)
        module = self._modules[name]
        gate = self.tensors.get(name)
        if gate is None:
            # Autograd sums a gate's gradient in the gate's dtype; half precision would round it.
            dtype = torch.promote_types(x.dtype, torch.float32)
            gate = torch.ones(rows, module.units, 1, 1, dtype=dtype, device=x.device).requires_grad_()
            self.tensors[name] = gate
        units = x.reshape(rows, -1, module.units, module.unit_width).transpose(1, 2)  # (batch, units, tokens, width)
        return (units * gate).to(x.dtype).transpose(1, 2).reshape(x.shape)

    def per_sample(self, gradients: Mapping[str, Tensor | None], losses: Tensor, index: int) -> dict[str, Tensor]:
        """Return module -> gradients of each sample's own loss to its gates, (batch, units) float64 on CPU.

        `gradients` are those of the sum over all losses of the batch, None if nothing reads the module. `losses` is
        the number of these losses that belong to each sample, (batch,).
        """
        found = {}
        for name, gate in self.tensors.items():
            if len(gate) != len(losses):
                raise UnsupportedModelError(
                    f"every sample must be one row of an attention module, but {name} sees {len(gate)} rows for "
                    f"{len(losses)} samples; give every sample one image of one tile, or score the other tower only"
                )
            gradient = gradients[name]
            gradient = torch.zeros_like(gate) if gradient is None else gradient
            if not torch.isfinite(gradient).all():
                units = UNIT_NAMES[self._modules[name].kind] + "s"
                raise NonFiniteError(
                    f"every gradient must be finite, but batch {index} gave NaN or infinity at the {units} of {name}; "
                    "check the rows of that batch and the model's dtype"
                )
            found[name] = gradient[:, :, 0, 0].double().cpu() / losses.clamp(min=1).cpu()[:, None]
        return found


def with_labels(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch with labels: its own, or else what the model predicts: a class, or each of `judged_tokens`.

    An embedding needs none, nor does the score of a reranker's candidate: see `summed_loss`.
    """
    if "labels" in batch or isinstance(model, TextEncoder) or GROUP_KEY in batch:
        return dict(batch)
    with torch.no_grad():
        predicted = model(**batch).logits.argmax(-1)
    if predicted.dim() == 1:
        return {**batch, "labels": predicted}
    labels = torch.full_like(predicted, IGNORED)
    labels[:, 1:] = predicted[:, :-1]
    return {**batch, "labels": labels.where(judged_tokens(model, batch, labels), IGNORED)}


def summed_loss(model: PreTrainedModel, batch: Mapping[str, Tensor], index: int) -> tuple[Tensor, Tensor]:
    """Return the sum of all losses of a batch, and how many of them belong to each sample, (batch,).

    The model averages one loss per label token, or one per sample. Without labels, the loss of an embedding is its
    `projected` value, and that of a reranker's candidate the score itself. `index` is the batch's number.
    """
    if "labels" in batch:
        labels = batch["labels"]
        losses = predicted_positions(labels).sum(-1) if labels.dim() == 2 else torch.ones(len(labels))
        loss = model(**{"labels": labels, **inputs_of(batch)}).loss
    else:
        losses = torch.ones(size_of(batch))
        loss = projected(predicted_output(model(**inputs_of(batch))), index).mean()
    if not torch.isfinite(loss):
        raise NonFiniteError(
            f"the loss of every calibration batch must be finite, but batch {index} gave {loss.item()}; "
            "check the rows of that batch and the model's dtype"
        )
    return loss * losses.sum().to(loss.device), losses


def projected(outputs: Tensor, seed: int) -> Tensor:
    """Return outputs, (samples, dimension), each projected onto random signs of its own, (samples,) float32.

    Over such signs v, the mean of (v . d)^2 is |d|^2, the squared length of a change d of the output. So the gradient
    of one number measures the effect on a whole embedding. With a single dimension, the output itself is returned.

    Source: Hutchinson, Communications in Statistics 18 (1989), for the signs.
    """
    if outputs.shape[-1] == 1:
        return outputs.float()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, outputs.shape, generator=generator) * 2 - 1
    return (outputs.float() * signs.to(outputs.device)).sum(-1)
