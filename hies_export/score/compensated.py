"""Score heads by what their removal still does to the prediction after least squares has made up for it; greedy.

A head that others can stand in for is cheap to remove however much the prediction leans on it, and a head that nothing
replaces is not; importance of single heads cannot tell, and neither can scores that ignore what has already gone.

For an consumer y = W x + b with kept inputs K and removed inputs M, least squares (`compensate`) leaves

    delta_t = (W'_K x_t,K + b') - y_t = -W_M r_t,   r_t = (x_t,M - mu_M) - C_MK (C_KK + lambda I)^-1 (x_t,K - mu_K)

(no means and uncentred moments where the consumer has no bias). To first order that moves a sample's prediction by
sum_t <g_t, delta_t> = -sum_t <h_t,M, r_t>, with g and h = W^T g the gradients of the prediction at the consumer's
output and input. The effect of keeping K is e(K) = E_x (sum_t <h_t,M, r_t>)^2, in the same unit for every layer. One
group after the other goes, each time the one that raises the sum of e over the layers least.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..calibrate.effects import Effects, LayerEffects
from ..errors import RecipeError
from ..progress import SILENT, Progress
from ..values import PrunableModule, Scores
from .criteria import COMPENSATED


def score_compensated(
    effects: Effects,
    modules: Sequence[PrunableModule],
    *,
    ridge: float = 0.1,
    squared: bool = True,
    progress: Progress = SILENT,
) -> Scores:
    """Score every unit by the rank at which greedy removal takes it, over the number of groups.

    Any budget then takes a prefix of the removals. What goes at once is a group, whose units share its score. Every
    module keeps one group, and these rank last, by what losing them too would do.

    Args:
        effects: From `collect_effects`.
        modules: The same modules.
        ridge: lambda relative to the mean of the diagonal of C. It is fixed for a module by the C of all its inputs,
            where `compensate` takes that of the kept ones: so every e(K) follows from one inverse by
            downdating.
        squared: Average the square of a sample's effect; otherwise its absolute value.
        progress: Told about the loop.

    Returns:
        Scores in (0, 1], of shape (units,) per module.

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
