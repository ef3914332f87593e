"""Choose units as Kwon et al. 2022 do (A Fast Post-Training Pruning Framework, https://arxiv.org/abs/2204.09656).

Their method has three steps, for masks m of heads and neurons at one:

1. Search (section 4.2): minimise the diagonal of the empirical Fisher information, sum_{m_i = 0} E (dL/dm_i)^2, under a
   budget of FLOPs. Here this is the criterion `fisher` under the budget's knapsack, which minimises the same sum.
2. Rearrangement (section 4.3): in every layer, with as many units as the search left there, minimise
   (1 - m)^T I (1 - m) with the Fisher information I of the layer's masks, cross terms included. `rearranged` does it
   greedily, in one round, as their code does (github.com/WoosukKwon/retraining-free-pruning, `greedy_rearrange`).
3. Tuning (section 4.4): a scalar per unit that stays, by linear least squares, layer by layer. This is `scale_units`,
   the compensation `scalars` of a sweep.

What differs: the search is exact for modules of any cost (theirs assumes that all heads cost the same, and all
neurons). Scalars are fitted from the dense model's inputs in one pass, towards the consumer's dense output (theirs from
the cut model's, layer by layer, with the difference in the residual stream in the target). Held-out tokens choose the
ridge that shrinks them towards one, and whether a layer gets any (theirs: a fixed ridge, and none beyond 10).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hies_export.calibrate import statistics
from hies_export.calibrate.moments import LayerMoments, Moments, MomentStore
from hies_export.calibrate.readings import Gradients, Read, walking
from hies_export.data.batches import Batch
from hies_export.model.linear import weight_of
from hies_export.tasks import task_of
from hies_export.units.units import PrunableModule, Selection, Units

# Candidates for the ridge, relative to the mean of the diagonal of the system.
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)


def mask_gradients(
    model: PreTrainedModel, batches: Sequence[Batch], modules: Sequence[PrunableModule]
) -> dict[str, Tensor]:
    """Return the gradient of every sample's own loss to a mask on every unit, (samples, units) float64 by module.

    The Fisher information of a module's masks is the mean over samples of the products of two of its columns, and the
    statistic "fisher" of `collect_statistics` its diagonal. Without `labels`, the model's predictions replace them.
    """
    given = []
    with walking(model):
        for batch in batches:
            on_device = {key: value.to(model.device) for key, value in batch.items()}
            given.append(task_of(model).with_labels(model, on_device))
    found: dict[str, list[Tensor]] = {module.name: [] for module in modules}
    gradients = Gradients(model, given, modules, "loss")

    def add(inside: Sequence[PrunableModule], read: Read) -> None:
        for number in range(len(given)):
            for name, values in statistics.mask_gradients(read(number), inside, gradients.counts[number]).items():
                found[name].append(values)

    gradients.collect(add)
    return {name: torch.cat(parts) for name, parts in found.items()}


def rearranged(selection: Selection, modules: Sequence[Units], gradients: Mapping[str, Tensor]) -> Selection:
    """Exchange units within every module, so that the Fisher information of the removed ones falls; counts stay."""
    found = dict(selection)
    for module in modules:
        kept = selection[module.name]
        of_group = gradients[module.name].view(-1, module.groups, module.group_size).sum(-1)  # (samples, groups)
        removed = exchanged(of_group, kept.removed_groups)
        stay = sorted(set(range(module.groups)) - set(removed))
        found[module.name] = module.kept(g * module.group_size + i for g in stay for i in range(module.group_size))
    return found


def exchanged(gradients: Tensor, removed: Sequence[int]) -> list[int]:
    """Return as many units to remove, so that |sum of their gradients|^2 over the samples is smaller or the same.

    This sum is (1 - m)^T I (1 - m) times the number of samples; `gradients` are (samples, units). Every kept unit is
    removed in turn, in the order of its own Fisher information. Then the removed unit whose return makes the sum least
    comes back.
    """
    if not removed:
        return []
    alone = gradients.square().sum(0)  # the diagonal of I, times the number of samples
    gone = torch.zeros(gradients.shape[1], dtype=torch.bool)
    gone[list(removed)] = True
    total = gradients[:, gone].sum(1)
    order = [unit for unit in alone.argsort(stable=True).tolist() if not gone[unit]]
    for unit in order:
        gone[unit] = True
        total = total + gradients[:, unit]
        # |total - g_i|^2 without |total|^2, which is the same for every unit i.
        without = alone - 2 * (total @ gradients)
        back = int(without.masked_fill(~gone, torch.inf).argmin())
        gone[back] = False
        total = total - gradients[:, back]
    return gone.nonzero().flatten().tolist()


def scale_units(
    slim: PreTrainedModel, selection: Selection, modules: Sequence[PrunableModule], moments: MomentStore
) -> None:
    """Multiply every unit that stays by a scalar of its own, in place, in the consumers of modules that lost units.

    A module whose error on held-out tokens no ridge makes smaller is left as it was cut.
    """
    columns = {m.name: m.columns(selection[m.name].units) for m in modules if selection[m.name].removed}

    def work(inside: Sequence[PrunableModule], sums: Mapping[str, LayerMoments]) -> None:
        for module in inside:
            layer = slim.get_submodule(module.consumer)
            fitting, held_out = sums[module.name].mixed(columns=columns[module.name])
            weight = weight_of(layer).detach().to(fitting.x)
            bias = layer.bias.detach().to(weight) if isinstance(layer.bias, Tensor) else None
            errors = {0.0: held_out.error(weight, bias)}  # by the ridge; zero stands for scalars of one
            for ridge in RIDGES:
                errors[ridge] = held_out.error(weight * scalars(fitting, layer, ridge, module.unit_width), bias)
            if best := min(errors, key=errors.__getitem__):
                with torch.no_grad():
                    weight_of(layer).copy_(weight * scalars(fitting + held_out, layer, best, module.unit_width))

    if columns:
        moments.each(work, columns)


def scalars(moments: Moments, layer: nn.Module, ridge: float, width: int) -> Tensor:
    """Return the scalar of each input's unit, (inputs,), by least squares with a ridge that pulls scalars towards one.

    The squared error is s^T A s - 2 s^T c + const, with A_uv = tr(W_u^T W_v E x_v x_u^T) and
    c_u = tr(W_u^T E (y - b) x_u^T). The moments are of the kept inputs, of which a unit has `width`.
    """
    weight, xx, yx = weight_of(layer).detach().to(moments.x), moments.xx / moments.tokens, moments.yx / moments.tokens
    if isinstance(layer.bias, Tensor):
        yx = yx - torch.outer(layer.bias.detach().to(weight), moments.x / moments.tokens)
    units = len(xx) // width
    products = (weight.T @ weight * xx).view(units, width, units, width).sum((1, 3))  # A, (units, units)
    wanted = (weight * yx).sum(0).view(units, width).sum(1)  # c, (units,)
    damped = products + ridge * products.diagonal().mean() * torch.eye(units, dtype=xx.dtype, device=xx.device)
    change = torch.linalg.solve(damped, wanted - products.sum(1))
    return (1 + change).repeat_interleave(width)
