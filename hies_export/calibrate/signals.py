"""What baselines need to know of every head beyond `HeadStatistics`, in one pass of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hies_export.progress import Track

from ..data.targets import is_regression, size_of
from ..errors import DataError, NonFiniteError
from ..model.linear import weight_of
from ..model.modes import frozen, without_cache
from ..model.tokens import real_tokens
from ..values import AttentionSite
from .weights import has_channels, sum_by_channel, sum_by_head

# Relative to the mean of the diagonal, for the inverse of the moments.
RIDGE = 1e-2


def collect_signals(
    model: PreTrainedModel,
    batches: Sequence[dict[str, Tensor]],
    sites: Sequence[AttentionSite],
    *,
    progress: Track | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Measure heads by what they give, and by what their weights mean to the loss.

    With x_h what a head gives at a token (the input of the output projection W that belongs to it), over the real
    tokens of all samples:

        activation_l2  E |x_h|
        output_norm    E |W_h x_h|, which needs no backward pass
        obs            tr(W_h ((M + lambda I)^-1_hh)^-1 W_h^T) with M = E x x^T: the error that losing the head leaves
                       once the others have made up for it (optimal brain surgeon, Hassibi and Stork 1992, by groups)
        taylor         the sum of |w dL/dw| over the q, k, v and o weights of a head, L the loss of all batches
                       (LLM-Pruner, Ma et al. 2023, https://arxiv.org/abs/2305.11627, "param_first"); a shared key/value
                       head counts for each of its queries
        channel_taylor the same sum for every channel of the key/value heads, (key/value heads * width,), where heads
                       have channels; see `baselines.channels`

    Args:
        model: The model; its weights, mode and gradients are left as they were found.
        batches: What `model(**batch)` takes; without labels, predicted classes stand in.
        sites: The attention modules, from `find_attention`.
        progress: Wraps the batches.

    Returns:
        Signal -> attention module -> (heads,) float64 on CPU, or (channels,).

    Raises:
        DataError: There is no batch, or a regression or language model has no labels.
        NonFiniteError: A loss is NaN or infinite.
    """
    if not batches:
        raise DataError("calibration needs at least one sample, got none; raise calibration.samples")
    labelled = "labels" in batches[0]
    if not labelled and (is_regression(model.config) or model.can_generate()):
        raise DataError("this model needs labels to be scored by the gradients of its weights; set data.label")
    activation = {site.name: torch.zeros(site.heads, dtype=torch.float64) for site in sites}
    written = {site.name: torch.zeros(site.heads, dtype=torch.float64) for site in sites}
    moments: dict[str, Tensor] = {}
    tokens = dict.fromkeys(activation, 0)
    inputs: dict[str, list[Tensor]] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs.setdefault(name, []).append(args[0].detach())

        return hook

    names = dict.fromkeys(name for s in sites for name in (*(p.name for p in s.projections), s.output))
    layers = {name: model.get_submodule(name) for name in names}
    parameters: list[Any] = [layer.weight for layer in layers.values()]
    gradients = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
    trainable = [parameter.requires_grad for parameter in parameters]
    handles = [model.get_submodule(s.output).register_forward_pre_hook(record(s.name)) for s in sites]
    try:
        with frozen(model), without_cache(model), torch.enable_grad():
            for parameter in parameters:
                parameter.requires_grad_(True)
            for index, batch in enumerate(progress(batches) if progress else batches):
                inputs.clear()
                on_device = {key: value.to(model.device) for key, value in batch.items()}
                if labelled:
                    loss = model(**on_device).loss
                else:
                    logits = model(**on_device).logits
                    loss = torch.nn.functional.cross_entropy(logits, logits.argmax(-1))
                if not torch.isfinite(loss):
                    raise NonFiniteError(f"every loss must be finite, but batch {index} gave {loss.item()}")
                size = size_of(batch)
                found = torch.autograd.grad(loss * size, parameters, allow_unused=True)
                for total, gradient in zip(gradients, found, strict=True):
                    if gradient is not None:
                        total += gradient.float()
                for site in sites:
                    weight = weight_of(model.get_submodule(site.output)).detach().double()
                    by_head = weight.unflatten(1, (site.heads, -1))  # (width, heads, value_dim)
                    for x in inputs[site.name]:
                        real = x[real_tokens(model, site.name, on_device, x)].double()  # (tokens, inputs)
                        heads = real.unflatten(1, (site.heads, -1))  # (tokens, heads, value_dim)
                        activation[site.name] += heads.norm(dim=-1).sum(0).cpu()
                        gram = torch.einsum("ohd,ohe->hde", by_head, by_head)  # |W_h x|^2 = x^T W_h^T W_h x
                        squares = torch.einsum("thd,hde,the->th", heads, gram, heads)
                        written[site.name] += squares.clamp(min=0).sqrt().sum(0).cpu()
                        moments[site.name] = moments.get(site.name, 0) + real.T @ real
                        tokens[site.name] += len(real)
    finally:
        for parameter, before in zip(parameters, trainable, strict=True):
            parameter.requires_grad_(before)
        for handle in handles:
            handle.remove()
    salience = {}
    for (name, layer), gradient in zip(layers.items(), gradients, strict=True):
        product = (layer.weight.detach().float() * gradient).abs().double().cpu()  # type: ignore[operator]
        salience[name] = product if weight_of(layer).shape == product.shape else product.T
    of_channels = {}
    if has_channels(sites):
        of_channels["channel_taylor"] = {s.name: sum_by_channel(s, salience.__getitem__) for s in sites}
    return {
        **of_channels,
        "activation_l2": {name: total / tokens[name] for name, total in activation.items()},
        "output_norm": {name: total / tokens[name] for name, total in written.items()},
        "obs": {s.name: _obs(model, s, moments[s.name] / tokens[s.name]) for s in sites},
        "taylor": {s.name: sum_by_head(s, salience.__getitem__) for s in sites},
    }


def _obs(model: PreTrainedModel, site: AttentionSite, moments: Tensor) -> Tensor:
    """(heads,)"""
    weight = weight_of(model.get_submodule(site.output)).detach().double()
    damping = RIDGE * (moments.diagonal().mean().item() or 1.0)
    inverse = torch.linalg.inv(moments + damping * torch.eye(len(moments), dtype=moments.dtype, device=moments.device))
    scores = []
    for head in range(site.heads):
        block = slice(head * site.value_dim, (head + 1) * site.value_dim)
        solved = torch.linalg.solve(inverse[block, block], weight[:, block].T)  # (value_dim, width)
        scores.append((weight[:, block].T * solved).sum())
    return torch.stack(scores).cpu()
