"""Multiply every head's output by a gate of one, and read its gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.targets import IGNORED, predicted_positions
from ..errors import NonFiniteError, UnsupportedModelError
from ..model.attention import AttentionCall
from ..model.kernels import VisibleKeys, attend, attend_with_entropy
from ..values import AttentionSite


class _Collector:
    """The attention function of calibration: multiplies each head's output by a gate of one, and sums entropies."""

    def __init__(self, model: PreTrainedModel, sites: Sequence[AttentionSite]):
        self._model = model
        self._names: dict[nn.Module, str] = {model.get_submodule(site.name): site.name for site in sites}
        self._visible = VisibleKeys()
        self._recording = True
        self.reset()

    def reset(self) -> None:
        """Forget the last batch."""
        self._gates: dict[str, Tensor] = {}
        self._entropy: dict[str, list[tuple[Tensor, Tensor]]] = {}

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Nothing is recorded, whether by a forward pass or by one repeated under gradient checkpointing."""
        self._recording = False
        try:
            yield
        finally:
            self._recording = True

    def __call__(self, call: AttentionCall) -> Tensor:
        name = self._names.get(call.module)
        gate = None if name is None else self._gates.get(name)
        if name is None or (gate is None and not self._recording):
            return attend(call, self._visible)
        # A repeated pass must do what the first one did, entropies included, for checkpointing to match the two.
        output, entropy, rows = attend_with_entropy(call, self._visible)
        if gate is None:
            # In float32, so that a half-precision model's gradient is not rounded when it is summed up.
            dtype = torch.promote_types(output.dtype, torch.float32)
            gate = torch.ones(len(output), output.shape[1], 1, 1, dtype=dtype, device=output.device)
            self._gates[name] = gate.requires_grad_()
        if self._recording:
            self._entropy.setdefault(name, []).append((entropy, rows))
        return (output * gate).to(output.dtype)

    def run(self, inputs: dict[str, Tensor], index: int) -> dict[str, tuple[Tensor, Tensor, int]]:
        """Run a batch forward and backward.

        Returns:
            Per attention module the gradients of every sample's own loss, (batch, heads), the entropies, (batch,
            heads), both float64 on CPU, and how many samples had a row to count.
        """
        self.reset()
        if "labels" not in inputs:
            with self._idle(), torch.no_grad():
                inputs["labels"] = _own_labels(self._model(**inputs).logits, inputs.get("attention_mask"))
        labels = inputs["labels"]
        # How many losses the model averages, and how many of them are each sample's: (batch,)
        own = predicted_positions(labels).sum(-1) if labels.dim() == 2 else torch.ones(len(labels))
        with torch.enable_grad():
            loss = self._model(**inputs).loss
            if not torch.isfinite(loss):
                raise NonFiniteError(
                    f"the loss of every calibration batch must be finite, but batch {index} gave {loss.item()}; "
                    "check the rows of that batch and the model's dtype"
                )
            with self._idle():
                gradients = torch.autograd.grad(
                    loss * own.sum().to(loss.device), list(self._gates.values()), allow_unused=True
                )
        out = {}
        for (name, gate), gradient in zip(self._gates.items(), gradients, strict=True):
            if len(gate) != len(labels):
                raise UnsupportedModelError(
                    f"every sample must be one row of an attention module, but {name} sees {len(gate)} rows for "
                    f"{len(labels)} samples; give every sample one image of one tile, or score the other tower only"
                )
            per_sample = torch.zeros_like(gate) if gradient is None else gradient
            if not torch.isfinite(per_sample).all():
                raise NonFiniteError(
                    f"every gradient must be finite, but batch {index} gave NaN or infinity at the heads of {name}; "
                    "check the rows of that batch and the model's dtype"
                )
            calls = self._entropy[name]
            entropies = torch.stack([e for e, _ in calls]).mean(0).double().cpu()
            counted = int((calls[0][1] > 0).sum())
            out[name] = (per_sample[:, :, 0, 0].double().cpu() / own.clamp(min=1).cpu()[:, None], entropies, counted)
        return out


def _own_labels(logits: Tensor, attention_mask: Tensor | None) -> Tensor:
    """A model's predictions as its labels: classes (batch,), or tokens (batch, tokens) each after what foretold it."""
    predicted = logits.argmax(-1)
    if predicted.dim() == 1:
        return predicted
    labels = torch.full_like(predicted, IGNORED)
    labels[:, 1:] = predicted[:, :-1]
    return labels if attention_mask is None else labels.masked_fill(attention_mask == 0, IGNORED)
