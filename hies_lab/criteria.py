"""Criteria that only comparisons use, by entry points of `hies_export.criteria`; some bring statistics of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hies_export.calibrate.readings import Read, Reading, read_forward
from hies_export.calibrate.statistics import Statistics, sum_by_unit
from hies_export.data.batches import Batch, size_of
from hies_export.errors import DataError
from hies_export.kinds import KINDS
from hies_export.model.linear import by_features, weight_of
from hies_export.model.modes import frozen, output_alone, requiring_gradients
from hies_export.score.criteria import criterion, min_max
from hies_export.tasks import task_of
from hies_export.units.units import PrunableModule

Batches: TypeAlias = Sequence[Batch]
Modules: TypeAlias = Sequence[PrunableModule]

# Damping of the inverse of the moments, relative to the mean of their diagonal.
RIDGE = 1e-2


def mean_outputs(model: PreTrainedModel, batches: Batches, modules: Modules) -> dict[str, Tensor]:
    """Return E |W_u x_u| over real tokens, with the inputs x_u that the consumer W reads from unit u."""

    def norms(module: PrunableModule, one: Reading) -> Tensor:
        weight = weight_of(model.get_submodule(module.consumer)).detach().double()
        by_unit = weight.unflatten(1, (module.units, -1))  # (outputs, units, unit_width)
        gram = torch.einsum("ohd,ohe->hde", by_unit, by_unit)  # |W_u x|^2 = x^T W_u^T W_u x
        units = one.inputs[one.real].double().unflatten(1, (module.units, -1))  # (tokens, units, unit_width)
        return torch.einsum("thd,hde,the->th", units, gram, units).clamp(min=0).sqrt().sum(0)

    return {module.name: mean.cpu() for module, mean in _means(model, batches, modules, norms)}


def obs_errors(model: PreTrainedModel, batches: Batches, modules: Modules) -> dict[str, Tensor]:
    """Return tr(W_u ((M + lambda I)^-1_uu)^-1 W_u^T) with M = E x x^T over real tokens.

    It is the error that remains after unit u is removed and the others are refitted (optimal brain surgeon, Hassibi and
    Stork 1992, by blocks).
    """

    def moments(module: PrunableModule, one: Reading) -> Tensor:
        x = one.inputs[one.real].double()
        return x.T @ x

    found = {}
    for module, mean in _means(model, batches, modules, moments):
        weight = weight_of(model.get_submodule(module.consumer)).detach().double().to(mean.device)
        damping = RIDGE * (mean.diagonal().mean().item() or 1.0)
        inverse = torch.linalg.inv(mean + damping * torch.eye(len(mean), dtype=mean.dtype, device=mean.device))
        width, errors = module.unit_width, []
        for block in (slice(unit * width, (unit + 1) * width) for unit in range(module.units)):
            solved = torch.linalg.solve(inverse[block, block], weight[:, block].T)  # (unit_width, outputs)
            errors.append((weight[:, block].T * solved).sum())
        found[module.name] = torch.stack(errors).cpu()
    return found


def _means(
    model: PreTrainedModel, batches: Batches, modules: Modules, function: Callable[[PrunableModule, Reading], Tensor]
) -> list[tuple[PrunableModule, Tensor]]:
    """Return every module with the mean over real tokens of a function that sums over those of a reading."""
    by_name, sums, tokens = {module.name: module for module in modules}, dict[str, Tensor](), dict[str, int]()

    def add(_: Modules, read: Read) -> None:
        for number in range(len(batches)):
            for one in read(number):
                added = function(by_name[one.name], one)
                sums[one.name] = sums[one.name] + added if one.name in sums else added
                tokens[one.name] = tokens.get(one.name, 0) + int(one.real.sum())

    read_forward(model, batches, modules, add)
    return [(by_name[name], total / tokens[name]) for name, total in sums.items()]


def taylor_of_weights(model: PreTrainedModel, batches: Batches, modules: Modules) -> dict[str, Tensor]:
    """Return |w dL/dw| of every weight of producers and consumers, (out_features, in_features) float64 by layer.

    It is the first-order Taylor importance of a weight w, with L the loss over all batches (LLM-Pruner, Ma et al. 2023,
    https://arxiv.org/abs/2305.11627, "param_first").
    """
    if "labels" not in batches[0] and model.can_generate():
        raise DataError("this model needs labels to be scored by the gradients of its weights; set data.label")
    layers: dict[str, Any] = {name: model.get_submodule(name) for module in modules for name in module.layers}
    weights: dict[str, Tensor] = {name: layer.weight for name, layer in layers.items()}
    sums = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in weights.items()}
    times = task_of(model).repeats
    with frozen(model), output_alone(model), requiring_gradients(weights.values()):
        for index, given in enumerate(batches):
            batch = {key: value.repeat_interleave(times, 0).to(model.device) for key, value in given.items()}
            task = task_of(model)
            batch = task.with_labels(model, batch)
            with torch.enable_grad():
                total, losses = task.loss(model, batch, index)
                found = torch.autograd.grad(total, [*weights.values()], allow_unused=True)
            # From the gradient of the sum of all losses to that of the sum of the samples' means.
            factor = size_of(batch) / losses.sum().item()
            for name, gradient in zip(weights, found, strict=True):
                if gradient is not None:
                    sums[name] += gradient.float() * factor
    return {
        name: by_features(layer, (layer.weight.detach().float() * sums[name]).abs().double().cpu())
        for name, layer in layers.items()
    }


def taylor_by_unit(model: PreTrainedModel, batches: Batches, modules: Modules) -> dict[str, Tensor]:
    """Return the sum of `taylor_of_weights` over every unit's weights."""
    found = taylor_of_weights(model, batches, modules)
    return {module.name: sum_by_unit(module, found.__getitem__) for module in modules}


@criterion(needs=("output_norm",), kinds=KINDS, collects={"output_norm": mean_outputs})
def output_norm(statistics: Statistics, *, normalize: str) -> Mapping[str, Tensor]:
    """E |W_u x_u|, the mean norm of the unit's share of the projected output; needs no gradients."""
    return min_max(statistics["output_norm"], normalize=normalize, what="output norm")


@criterion(needs=("obs",), collects={"obs": obs_errors})
def obs(statistics: Statistics, *, normalize: str) -> Mapping[str, Tensor]:
    """Error that remains if the head is removed and the others are refitted (optimal brain surgeon, by blocks)."""
    return min_max(statistics["obs"], normalize=normalize, what="OBS score")


@criterion(needs=("taylor",), collects={"taylor": taylor_by_unit})
def llm_pruner_block(statistics: Statistics) -> Mapping[str, Tensor]:
    """First-order Taylor importance of a head's weights, as in LLM-Pruner's block-wise mode (Ma et al. 2023).

    LLM-Pruner never prunes the first three layers and the last. Here, in models of at least 8 layers, these lose heads
    only after all others. Only attention is pruned, which is a second difference.
    """
    found = min_max(statistics["taylor"], normalize="model", what="Taylor importance")
    last = len(found) - 1
    kept = {0, 1, 2, last} if last >= 7 else set()
    # By 1 alone, the least head of these layers would tie with the greatest of the others, and could go first.
    return {name: values + (2.0 if layer in kept else 0.0) for layer, (name, values) in enumerate(found.items())}


@criterion(name="ae + activation-l2", needs=("entropy", "activation_l2"))
def ae_and_activation_l2(statistics: Statistics, *, alpha: float, normalize: str) -> Mapping[str, Tensor]:
    """HIES with the mean norm of the head's output in place of its HIS (the paper's last appendix)."""
    norm = min_max(statistics["activation_l2"], normalize=normalize, what="activation norm")
    entropy = min_max(statistics["entropy"], normalize=normalize, what="entropy")
    return {name: alpha * norm[name] + (1 - alpha) * (1 - entropy[name]) for name in norm}
