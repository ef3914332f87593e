"""Collect, in one forward and one backward pass per batch, everything the criteria need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention import AttentionCall, VisibleKeys, attend, attend_with_entropy, use_attention
from .data import batches_fingerprint
from .errors import DataError, NonFiniteError
from .labels import is_regression
from .linear import weight_of
from .modes import frozen
from .values import AttentionSite, HeadStatistics

Progress = Callable[[Sequence[dict[str, Tensor]]], Iterable[dict[str, Tensor]]]


def collect_statistics(
    model: PreTrainedModel,
    batches: Sequence[dict[str, Tensor]],
    sites: Sequence[AttentionSite],
    *,
    progress: Progress | None = None,
) -> HeadStatistics:
    """Average HIS and attention entropy of every head over the calibration samples.

    HIS is E_x |dL(x)/dm_h| with a mask m_h = 1 on the head's output (Michel et al. 2019, "Are Sixteen Heads Really
    Better than One?", https://arxiv.org/abs/1905.10650, Eq. 3): a gate per sample and head receives each sample's own
    gradient from a single backward pass, with every weight frozen. The entropy is the mean over a sample's real query
    tokens of H(attention row) / log(keys the row sees); no attention map is stored.

    Args:
        model: The model; its weights, mode and gradients are left as they were found.
        batches: What `model(**batch)` takes. With `labels` the loss is the model's own; without, the predicted class
            stands in for the label.
        sites: The attention modules, from `find_attention`.
        progress: Wraps the batches, e.g. in a progress bar.

    Returns:
        The statistics; tensors of shape (heads,), float64, on CPU.

    Raises:
        DataError: There is no batch, or a regression model has no labels.
        NonFiniteError: A loss or a gradient is NaN or infinite; the message names the batch.
    """
    if not batches:
        raise DataError("calibration needs at least one sample, got none; raise calibration.samples")
    labelled = "labels" in batches[0]
    if not labelled and is_regression(model.config):
        raise DataError(
            "a regression model needs labels to be calibrated (against its own predictions its loss has no gradient), "
            "but the recipe names no label column; set data.label"
        )
    device = next(model.parameters()).device
    his = {site.name: torch.zeros(site.heads, dtype=torch.float64) for site in sites}
    entropy = {site.name: torch.zeros(site.heads, dtype=torch.float64) for site in sites}
    samples, samples_with_rows = 0, {site.name: 0 for site in sites}
    collector = _Collector(model, sites)
    with frozen(model), use_attention(model, collector):
        for index, batch in enumerate(progress(batches) if progress else batches):
            inputs = {key: value.to(device) for key, value in batch.items()}
            if not labelled:
                with collector.idle(), torch.no_grad():
                    inputs["labels"] = model(**inputs).logits.argmax(-1)
            size = inputs["labels"].shape[0]
            gradients = collector.run(inputs, size, index)
            for site in sites:
                his[site.name] += gradients[site.name].abs().double().sum(0).cpu()
                sample_entropy, counted = collector.entropy(site.name)
                entropy[site.name] += sample_entropy.double().sum(0).cpu()
                samples_with_rows[site.name] += counted
            samples += size
    return HeadStatistics(
        his={name: total / samples for name, total in his.items()},
        entropy={name: total / max(samples_with_rows[name], 1) for name, total in entropy.items()},
        weight_l2={site.name: _weight_l2(model, site) for site in sites},
        samples=samples,
        labels="data" if labelled else "predictions",
        fingerprint=batches_fingerprint(list(batches)),
    )


class _Collector:
    """The attention function of calibration: multiplies each head's output by a gate of one, and sums entropies."""

    def __init__(self, model: PreTrainedModel, sites: Sequence[AttentionSite]):
        self._model = model
        self._names: dict[nn.Module, str] = {model.get_submodule(site.name): site.name for site in sites}
        self._visible = VisibleKeys()
        self._idle = False
        self._reset()

    def _reset(self) -> None:
        self._gates: dict[str, Tensor] = {}
        self._entropy: dict[str, list[tuple[Tensor, Tensor]]] = {}

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Attention as it is, nothing collected."""
        self._idle = True
        try:
            yield
        finally:
            self._idle = False
            self._reset()

    def __call__(self, call: AttentionCall) -> Tensor:
        name = self._names.get(call.module)
        if self._idle or name is None:
            return attend(call, self._visible)
        output, entropy, rows = attend_with_entropy(call, self._visible)
        if name not in self._gates:
            shape = (output.shape[0], output.shape[1], 1, 1)
            self._gates[name] = torch.ones(shape, dtype=output.dtype, device=output.device, requires_grad=True)
        self._entropy.setdefault(name, []).append((entropy, rows))
        return output * self._gates[name]

    def run(self, inputs: Mapping[str, Tensor], size: int, index: int) -> dict[str, Tensor]:
        """Gradients of every sample's own loss, (batch, heads) per attention module."""
        self._reset()
        with torch.enable_grad():
            loss = self._model(**inputs).loss
            if not torch.isfinite(loss):
                raise NonFiniteError(
                    f"the loss of every calibration batch must be finite, but batch {index} gave {loss.item()}; "
                    "check the rows of that batch and the model's dtype"
                )
            # The model averages over samples; times their number, each gate gets the gradient of its own sample's loss.
            gradients = torch.autograd.grad(loss * size, list(self._gates.values()))
        out = {}
        for name, gradient in zip(self._gates, gradients, strict=True):
            if not torch.isfinite(gradient).all():
                raise NonFiniteError(
                    f"every gradient must be finite, but batch {index} gave NaN or infinity at the heads of {name}; "
                    "check the rows of that batch and the model's dtype"
                )
            out[name] = gradient[:, :, 0, 0]
        return out

    def entropy(self, name: str) -> tuple[Tensor, int]:
        """Entropies of the batch just run, (batch, heads), and how many of its samples had a row to count."""
        calls = self._entropy[name]
        entropy = torch.stack([e for e, _ in calls]).mean(0)
        return entropy, int((calls[0][1] > 0).sum())


def _weight_l2(model: PreTrainedModel, site: AttentionSite) -> Tensor:
    """L2 norm over a head's q, k and v rows and o columns; a shared key/value head counts for each of its queries."""
    output = weight_of(model.get_submodule(site.output)).detach().double().cpu()
    query = output.pow(2).sum(0).view(site.heads, -1).sum(1)
    key_value = torch.zeros(site.key_value_heads, dtype=torch.float64)
    for projection in site.projections:
        rows = weight_of(model.get_submodule(projection.name)).detach().double().cpu().pow(2).sum(1)
        for total, per_head in ((query, projection.query), (key_value, projection.key_value)):
            for head, features in enumerate(per_head):
                total[head] += rows[list(features)].sum()
    return (query + key_value.repeat_interleave(site.group_size)).sqrt()
