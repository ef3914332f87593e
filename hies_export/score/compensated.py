"""Score units by greedy removal: how much the prediction still changes after least squares has refitted the others.

A unit whose output the other units can reproduce is cheap to remove, even if the prediction depends strongly on it. The
importance of single units does not show this, nor does any score that ignores which units are already removed.

For a consumer y = W x + b with kept inputs K and removed inputs M, least squares (`compensate`) leaves the error

    delta_t = (W'_K x_t,K + b') - y_t = -W_M r_t,   r_t = (x_t,M - mu_M) - C_MK (C_KK + lambda I)^-1 (x_t,K - mu_K)

at token t. (A consumer without a bias has mu = 0 and uncentred moments C.) To first order, the error changes a sample's
prediction by sum_t <g_t, delta_t> = -sum_t <h_t,M, r_t>. Here g and h = W^T g are the gradients of the prediction with
respect to the consumer's output and input. The effect of keeping K is e(K) = E_x (sum_t <h_t,M, r_t>)^2, in the same
unit for every layer. Groups are removed one by one, each time the one that raises the sum of e over the layers least.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..calibrate.effects import Effects, LayerEffects
from ..errors import RecipeError
from ..progress import SILENT, Progress
from ..units import PrunableModule
from ..values import Scores
from .criteria import COMPENSATED


def score_compensated(
    effects: Effects,
    modules: Sequence[PrunableModule],
    *,
    ridge: float = 0.1,
    squared: bool = True,
    progress: Progress = SILENT,
) -> Scores:
    """Score every unit by its rank in a greedy removal of all groups, divided by the number of groups.

    A budget then removes the first groups of that order. The units of a group share its score. The last group of every
    module ranks after all others, because every module keeps one; these are ordered by the effect of their removal.

    Args:
        effects: From `collect_effects`.
        modules: The modules that `effects` were collected of.
        ridge: lambda relative to the mean of the diagonal of C over all inputs of the module. (`compensate` takes the
            mean over the kept inputs.) A fixed lambda lets every e(K) follow from one inverse by downdating.
        squared: Whether to average the square of each sample's effect, or its absolute value.
        progress: Shows the loop over the modules.

    Returns:
        Scores in [0, 1), (units,) float64 per module.

    Raises:
        RecipeError: The ridge is not positive.

    Examples:
        >>> score_compensated(collect_effects(model, batches, modules), modules).criterion
        'hies-compensated'
    """
    if not ridge > 0:
        raise RecipeError([f"ridge must be above 0, got {ridge}"])
    orders = [
        removal_order(effects.layers[module.name], module.groups, effects.samples, ridge=ridge, squared=squared)
        for module in progress.track(modules, "greedy removal")
    ]
    ranks = [[0] * module.groups for module in modules]
    for rank, (i, group) in enumerate(_merged(orders)):
        ranks[i][group] = rank
    total = sum(module.groups for module in modules)
    scores = {
        module.name: (torch.tensor(ranks[i], dtype=torch.float64) / total).repeat_interleave(module.group_size)
        for i, module in enumerate(modules)
    }
    return Scores(criterion=COMPENSATED, parameters={"ridge": ridge, "squared": squared}, scores=scores)


def removal_order(
    layer: LayerEffects, groups: int, samples: int, *, ridge: float, squared: bool
) -> list[tuple[int, float]]:
    """Return the order in which greedy removal takes the groups of one module.

    Let G be the inverse of C_KK + lambda I. Removing a kept group g leaves the residual G_gg^-1 (G x_K)_g, and the
    gradients of the others become h_K + P^T h_g with P = -G_gg^-1 G_gK. The inverse without g is
    G_KK - G_Kg G_gg^-1 G_gK (optimal brain surgeon, Hassibi and Stork 1992). So judging a candidate takes only a system
    as large as one group.

    Args:
        layer: Inputs and gradients of the module's consumer.
        groups: Number of groups.
        samples: Number of samples.
        ridge, squared: As in `score_compensated`.

    Returns:
        Every group and how much its removal raises e, in the order of removal; of equals the later group goes first.
    """
    gradient, read = layer.gradients.double(), layer.inputs.double()  # (tokens, kept inputs)
    if layer.centred:
        read = read - read.mean(0)
    moments = read.T @ read / len(read)
    # If all inputs are zero, any damping above zero will do.
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
    """Yield (module, group) in the order of greedy removal from all modules; of equals the later module goes first.

    A module's effect does not depend on what the others keep, so only the next removal of each module is compared.
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
