"""Compute the entropies of attention rows during a forward pass: the one statistic that only attention has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..model.attention import AttentionCall
from ..model.kernels import VisibleKeys, attend, attend_with_entropy
from ..units import PrunableModule


class Entropies:
    """The attention function of calibration; its outputs equal those of the model's own.

    `enabled` says whether entropies are computed at all, `recording` whether they are kept: gradient checkpointing
    repeats the forward pass, which must compute them again to match the first one, but must not count them twice.
    `rows` has the number of rows (samples) in the last call of each module.
    """

    def __init__(self, model: nn.Module, modules: Sequence[PrunableModule]):
        self._names = {model.get_submodule(module.name): module.name for module in modules}
        self._visible = VisibleKeys()
        self._calls: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.enabled = self.recording = False
        self.rows: dict[str, int] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        """Return the heads' outputs, (batch, heads, queries, value width)."""
        name = self._names.get(call.module)
        if name is None or not self.enabled:
            return attend(call, self._visible)
        output, entropy, rows = attend_with_entropy(call, self._visible)
        self.rows[name] = len(output)
        if self.recording:
            self._calls.setdefault(name, []).append((entropy, rows))
        return output

    def take(self) -> dict[str, tuple[Tensor, int]]:
        """Return the entropies of the recorded batch, and discard them.

        By module: entropies in [0, 1], (batch, heads) float64 on CPU, and the number of samples that have a row.
        """
        found = {}
        for name, calls in self._calls.items():
            mean = torch.stack([entropy for entropy, _ in calls]).mean(0).double().cpu()
            found[name] = mean, int((calls[0][1] > 0).sum())
        self._calls = {}
        return found
