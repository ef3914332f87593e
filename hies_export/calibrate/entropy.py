"""Compute the entropies of attention rows during a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..model.attention import AttentionCall, on_interface, use_attention
from ..model.internals import attention_maps, attributes_set, forwards_set
from ..model.kernels import attend, attend_with_entropy
from ..units.units import PrunableModule


class Entropies:
    """The attention function of calibration, which records entropies; its outputs equal those of the model's own.

    A model with attention code of its own keeps that; entropies are then those of the maps that it returns, if any.
    They are computed inside of `recorded` alone, as a block that is computed again must not count twice. `sums` are by
    module, (units,) float64: the "entropy" of all samples, the samples that have "rows", and the batches with "maps".
    """

    def __init__(self, model: PreTrainedModel, modules: Sequence[PrunableModule]):
        self._model = model
        self._modules = {model.get_submodule(module.name): module for module in modules}
        self.sums = zeros_by_unit(modules, "entropy", "rows", "maps")
        self._calls: dict[str, list[tuple[Tensor, Tensor]]] = {}  # module -> entropies and rows of each call
        self._batch: Mapping[str, Tensor] | None = None  # that of `recorded`; None outside of it

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Let the model compute attention by this object inside the block, or, with code of its own, return maps."""
        if not self._modules:
            yield
        elif on_interface(self._model):
            with use_attention(self._model, self):
                yield
        else:
            # Not by hooks: a walk computes a block by its forward alone, and a block may be such a module.
            forwards = {layer: partial(self._with_map, m, layer.forward) for layer, m in self._modules.items()}
            with attention_maps(self._model), forwards_set(forwards):
                yield

    @contextmanager
    def recorded(self, batch: Mapping[str, Tensor]) -> Iterator[None]:
        """Add up entropies of attention computed inside the block; the batch's masks say which tokens are real."""
        with attributes_set([(self, "_batch", batch)]):
            yield
        for name, calls in self._calls.items():
            mean = torch.stack([entropy for entropy, _ in calls]).mean(0)  # (batch, heads)
            self.sums["entropy"][name] += mean.double().cpu().sum(0)
            self.sums["rows"][name] += int((calls[0][1] > 0).sum())
            self.sums["maps"][name] += 1
        self._calls = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        """Return the outputs of one attention call, (batch, heads, queries, value width), and record its entropies."""
        module = self._modules.get(call.module)
        if module is None or self._batch is None:
            return attend(call)
        output, entropy, rows = attend_with_entropy(call)
        self._calls.setdefault(module.name, []).append((entropy, rows))
        return output

    def _with_map(self, module: PrunableModule, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand in for a module's forward: record the entropy of the only attention map in its outputs, if any."""
        outputs = forward(*args, **kwargs)
        tensors = [o for o in outputs if isinstance(o, Tensor)] if isinstance(outputs, (tuple, list)) else []
        shaped = [t for t in tensors if t.dim() == 4 and t.shape[1] == module.units]  # (batch, heads, query, keys)
        maps = [t for t in shaped if (t >= 0).all() and (t.sum(-1) - 1).abs().amax() < 1e-2]  # rows add up to 1
        if self._batch is not None and len(maps) == 1:
            entropy_and_rows = entropy_of_map(maps[0].detach(), self._batch.get("attention_mask"))
            self._calls.setdefault(module.name, []).append(entropy_and_rows)
        return outputs


def zeros_by_unit(modules: Sequence[PrunableModule], *names: str) -> dict[str, dict[str, Tensor]]:
    """Return name -> module -> zeros to add to, (units,) float64."""
    return {name: {m.name: torch.zeros(m.units, dtype=torch.float64) for m in modules} for name in names}


def entropy_of_map(attention: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the length-normalised entropy of an attention map, (batch, heads) float32, and the rows counted, (batch,).

    A row of the map, (batch, heads, query, keys), sees the keys that have a weight in any head; one that sees fewer
    than two has no entropy, and is not counted. `mask` says which tokens are real, (batch, tokens); None if all are. It
    is used for maps from these tokens to themselves, as the rows of padding tokens are arbitrary.
    """
    seen = (attention > 0).any(1)
    keys = seen.sum(-1)  # (batch, query)
    if seen.shape[1] == seen.shape[2]:
        keys = keys * seen.any(1)  # a token that no row sees is padding
        if mask is not None and mask.shape == keys.shape:
            keys = keys * mask.bool().to(keys.device)
    counted = (keys > 1)[:, None]
    greatest = keys.clamp(min=2).float().log()[:, None]  # entropy of a row that weighs all its keys alike
    rows = torch.where(counted, torch.special.entr(attention.float()).sum(-1) / greatest, 0.0)
    row_count = counted.sum(-1).float()  # (batch, 1)
    return rows.sum(-1) / row_count.clamp(min=1), row_count[:, 0]
