"""Score heads by what their removal still does to the prediction after least squares has made up for it; greedy.

A head that others can stand in for is cheap to remove however much the prediction leans on it, and a head that nothing
replaces is not; importance of single heads cannot tell, and neither can scores that ignore what has already gone.

For an output projection y = W x + b with kept inputs K and removed inputs M, least squares (`compensate_heads`) leaves

    delta_t = (W'_K x_t,K + b') - y_t = -W_M r_t,   r_t = (x_t,M - mu_M) - C_MK (C_KK + lambda I)^-1 (x_t,K - mu_K)

(no means and uncentred moments where the projection has no bias). To first order that moves a sample's prediction by
sum_t <g_t, delta_t> = -sum_t <h_t,M, r_t>, with g and h = W^T g the gradients of the prediction at the projection's
output and input. The effect of keeping K is e(K) = E_x (sum_t <h_t,M, r_t>)^2, in the same unit for every layer. One
group after the other goes, each time the one that raises the sum of e over the layers least.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .compensate import real_tokens
from .data.targets import check_label_tokens, is_regression, predicted_positions
from .errors import DataError, NonFiniteError, RecipeError
from .model.modes import frozen, without_cache
from .score import COMPENSATED
from .values import AttentionSite, HeadScores

Progress = Callable[[Sequence[Any]], Iterable[Any]]


@dataclass(frozen=True)
class LayerEffects:
    """What an output projection read at the real tokens of all samples, and how the prediction depends on it; on CPU.

    Attributes:
        inputs: (tokens, inputs) float32.
        gradients: (tokens, inputs) float32, of the sample's prediction to these inputs.
        sample: (tokens,) int64, the sample each token belongs to.
        centred: Whether the projection has a bias, which makes up for the mean.
    """

    inputs: Tensor
    gradients: Tensor
    sample: Tensor
    centred: bool


@dataclass(frozen=True)
class Effects:
    """What `score_compensated` needs to know of a model on its calibration samples.

    Attributes:
        layers: Per attention module.
        samples: How many samples there were.
    """

    layers: Mapping[str, LayerEffects]
    samples: int


def collect_effects(
    model: PreTrainedModel,
    batches: Sequence[dict[str, Tensor]],
    sites: Sequence[AttentionSite],
    *,
    progress: Progress | None = None,
) -> Effects:
    """Record what every output projection reads, and the gradient of the model's prediction to it.

    The prediction is a regressor's output, the margin of a classifier's predicted class over the runner-up, or, of a
    language model, the log-probability of its text: the sum over the label positions (of the token it would itself
    choose there it is nearly certain, and its gradient says little: perplexity 12.2 instead of 9.4 in dev/LOG.md).
    One forward and one backward pass per batch, with every weight frozen. Memory is 8 bytes for each real token and
    input of each projection, e.g. 150 MB for 8,000 tokens and 6 layers of width 384.

    Args:
        model: A classifier, regressor or language model; its weights, mode and gradients are left as they were found.
        batches: What `model(**batch)` takes; padding is left out by their `attention_mask`. Covariances of hundreds of
            inputs want about 256 samples; with few, take a greater ridge.
        sites: The attention modules, from `find_attention`.
        progress: Wraps the batches, e.g. in a progress bar.

    Returns:
        Per attention module the inputs of its output projection and the gradients there, of all real tokens.

    Raises:
        DataError: There is no batch, or a language model's sample has no label token.
        NonFiniteError: A prediction or a gradient is NaN or infinite; the message names the batch.
    """
    if not batches:
        raise DataError("scoring needs at least one sample, got none; raise calibration.samples")
    check_label_tokens(batches)
    parts: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {site.name: [] for site in sites}
    samples = 0
    with frozen(model), without_cache(model), _inputs_of(model, sites) as inputs, torch.enable_grad():
        for index, batch in enumerate(progress(batches) if progress else batches):
            inputs.clear()
            on_device = {key: value.to(model.device) for key, value in batch.items() if key != "labels"}
            logits = model(**on_device).logits
            if logits.dim() == 3:
                if "labels" not in batch:
                    raise DataError("labels must say which tokens of a language model count, but batches have none")
                predictions = _log_probabilities(logits, batch["labels"].to(logits.device))
            else:
                predictions = _predictions(logits, regression=is_regression(model.config))
            read = [(site.name, x) for site in sites for x in inputs[site.name]]
            # Samples do not see each other, so the gradient of the sum holds each sample's own. What nothing uses, such
            # as the last layer of LLaVA's image tower, has none.
            found = torch.autograd.grad(predictions.sum(), [x for _, x in read], allow_unused=True)
            gradients = [torch.zeros_like(x) if g is None else g for (_, x), g in zip(read, found, strict=True)]
            if not all(torch.isfinite(values).all() for values in (predictions, *gradients)):
                raise NonFiniteError(
                    f"every prediction and gradient must be finite, but batch {index} gave NaN or infinity; check the "
                    "rows of that batch and the model's dtype"
                )
            numbers = torch.arange(samples, samples + len(predictions))
            samples += len(predictions)
            for (name, x), gradient in zip(read, gradients, strict=True):
                real = real_tokens(model, name, on_device, x)  # (batch, tokens)
                sample = numbers[:, None].expand(real.shape)[real.cpu()]
                parts[name].append((x.detach()[real].float().cpu(), gradient[real].float().cpu(), sample))
    layers = {}
    for site in sites:
        inputs_read, gradients_read, sample = (torch.cat(p) for p in zip(*parts.pop(site.name), strict=True))
        centred = model.get_submodule(site.output).bias is not None
        layers[site.name] = LayerEffects(inputs_read, gradients_read, sample, centred)
    return Effects(layers=layers, samples=samples)


def score_compensated(
    effects: Effects,
    sites: Sequence[AttentionSite],
    *,
    ridge: float = 0.1,
    squared: bool = True,
    progress: Progress | None = None,
) -> HeadScores:
    """Score every head by when greedy removal takes it: rank / number of groups, so that any budget takes a prefix.

    What goes at once is a key/value group, whose heads share its score. Every module keeps one group, and these rank
    last, by what losing them too would do.

    Args:
        effects: From `collect_effects`.
        sites: The same attention modules.
        ridge: lambda relative to the mean of the diagonal of C. It is fixed for a module by the C of all its inputs,
            where `compensate_heads` takes that of the kept ones: so every e(K) follows from one inverse by
            downdating.
        squared: Average the square of a sample's effect; otherwise its absolute value.
        progress: Wraps the attention modules.

    Returns:
        Scores in (0, 1], of shape (heads,) per module.

    Raises:
        RecipeError: The ridge is not positive.

    Examples:
        >>> scores = score_compensated(collect_effects(model, batches, sites), sites)
        >>> select_heads(scores, sites, heads=0.5).criterion
        'hies-compensated'
    """
    if not ridge > 0:
        raise RecipeError([f"ridge must be above 0, got {ridge}"])
    orders = [
        removal_order(effects.layers[site.name], site.key_value_heads, effects.samples, ridge=ridge, squared=squared)
        for site in (progress(sites) if progress else sites)
    ]
    ranks = [[0] * site.key_value_heads for site in sites]
    for rank, (i, group) in enumerate(_merged(orders)):
        ranks[i][group] = rank
    total = sum(site.key_value_heads for site in sites)
    scores = {
        site.name: (torch.tensor(ranks[i], dtype=torch.float64) / total).repeat_interleave(site.group_size)
        for i, site in enumerate(sites)
    }
    return HeadScores(criterion=COMPENSATED, parameters={"ridge": ridge, "squared": squared}, scores=scores)


def removal_order(
    layer: LayerEffects, groups: int, samples: int, *, ridge: float, squared: bool
) -> list[tuple[int, float]]:
    """Remove the groups of one module greedily.

    With G the inverse of C_KK + lambda I, the inputs of a kept group g leave the residual G_gg^-1 (G x_K)_g, and the
    others take over its gradient: h_K + P^T h_g with P = -G_gg^-1 G_gK. Once g is gone the inverse is
    G_KK - G_Kg G_gg^-1 G_gK (optimal brain surgeon, Hassibi and Stork 1992). So every candidate costs no more than the
    width of one group.

    Returns:
        Every group and how much its removal raises e, in the order they go; ties go to the later group.
    """
    gradient, read = layer.gradients.double(), layer.inputs.double()  # (tokens, kept inputs)
    if layer.centred:
        read = read - read.mean(0)
    moments = read.T @ read / len(read)
    # Inputs that are always zero need no damping of any particular size.
    damping = ridge * (moments.diagonal().mean().item() or 1.0)
    identity = torch.eye(len(moments), dtype=moments.dtype)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments + damping * identity))
    read = read @ inverse
    width = len(moments) // groups
    kept, order = list(range(groups)), []
    effect = torch.zeros(samples, dtype=torch.float64)

    def size(effect: Tensor) -> float:
        return (effect.square() if squared else effect.abs()).mean().item()

    while kept:
        candidates = []
        for position in range(len(kept)):
            block = slice(position * width, (position + 1) * width)
            residual = torch.linalg.solve(inverse[block, block], read[:, block], left=False)
            moved = (gradient[:, block] * residual).sum(1)
            candidates.append(effect.index_add(0, layer.sample, moved))
        sizes = [size(candidate) for candidate in candidates]
        position = min(range(len(kept)), key=lambda p: (sizes[p], -p))
        order.append((kept.pop(position), sizes[position] - size(effect)))
        effect = candidates[position]
        gone = slice(position * width, (position + 1) * width)
        stay = torch.ones(len(inverse), dtype=torch.bool)
        stay[gone] = False
        taken_over = torch.linalg.solve(inverse[gone, gone], inverse[gone][:, stay])  # -P
        gradient = gradient[:, stay] - gradient[:, gone] @ taken_over
        read = read[:, stay] - read[:, gone] @ taken_over
        inverse = inverse[stay][:, stay] - inverse[stay][:, gone] @ taken_over
    return order


def _merged(orders: Sequence[Sequence[tuple[int, float]]]) -> Iterator[tuple[int, int]]:
    """(module, group) in the order of greedy removal from all modules; ties go to the later module.

    A module's effect does not depend on what the others keep, so only the next removal of each needs to be compared.
    """
    waiting = [(order[0][1], -i, 0) for i, order in enumerate(orders) if len(order) > 1]
    heapq.heapify(waiting)
    while waiting:
        _, negative, position = heapq.heappop(waiting)
        order = orders[-negative]
        yield -negative, order[position][0]
        if position + 2 < len(order):
            heapq.heappush(waiting, (order[position + 1][1], negative, position + 1))
    last = sorted((order[-1][1], -i, order[-1][0]) for i, order in enumerate(orders))
    yield from ((-negative, group) for _, negative, group in last)


def _predictions(logits: Tensor, *, regression: bool) -> Tensor:
    """One number per sample, (batch,): the output, or the margin of the predicted class over the runner-up."""
    if regression:
        return logits.float().sum(-1)
    best, second = logits.float().topk(2, dim=-1).values.unbind(-1)
    return best - second


def _log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Per sample, (batch,), the sum over label positions of the log-probability of the label.

    Args:
        logits: (batch, tokens, vocabulary)
        labels: (batch, tokens), -100 where none.
    """
    judged = predicted_positions(labels)
    wanted = labels[:, 1:][judged][:, None]
    found = logits[:, :-1][judged].float().log_softmax(-1).gather(-1, wanted)[:, 0]  # (judged tokens,)
    sample = judged.nonzero()[:, 0]
    return torch.zeros(len(logits), device=logits.device).index_add(0, sample, found)


@contextmanager
def _inputs_of(model: PreTrainedModel, sites: Sequence[AttentionSite]) -> Iterator[dict[str, list[Tensor]]]:
    """Record the inputs of the output projections, as tensors that take a gradient; a shared layer is called often."""
    inputs: dict[str, list[Tensor]] = {}

    def record(name: str) -> Callable[..., tuple[Tensor, ...]]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            # With frozen weights nothing before the first projection takes a gradient: its input is where they begin.
            x = args[0] if args[0].requires_grad else args[0].detach().requires_grad_()
            inputs.setdefault(name, []).append(x)
            return (x, *args[1:])

        return hook

    handles = [model.get_submodule(site.output).register_forward_pre_hook(record(site.name)) for site in sites]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()
