"""Collect, in a walk forward and one backward, the statistics that criteria need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.batches import OWN_KEY, Batch, batches_fingerprint, size_of
from ..errors import DataError
from ..kinds import ATTENTION
from ..model.linear import weight_of
from ..processes import added_up
from ..progress import SILENT, Progress
from ..tasks import task_of
from ..units.units import PrunableModule, Slice
from .entropy import Entropies, zeros_by_unit
from .moments import MomentStore
from .readings import Gradients, Read, Reading, own_batches, walking

DEFAULT_NEEDS = ("his", "entropy", "weight_l2")  # statistics that every run collects

Collect: TypeAlias = Callable[[PreTrainedModel, Sequence[Batch], Sequence[PrunableModule]], Mapping[str, Tensor]]
"""Takes the model, calibration batches and modules, and returns module -> (units,) float64 on CPU."""

OWN: dict[str, Collect] = {}  # statistics that criteria bring, by name, see `score.criteria.criterion`


def sum_by_unit(module: PrunableModule, elements: Callable[[str], Tensor]) -> Tensor:
    """Return the sum over every unit's weights of one number per weight, (units,) float64 on CPU.

    A group's sum counts for each of its units. `elements` gives the numbers of a layer by its name, (out_features,
    in_features) float64 on any device; it is called for one layer at a time.
    """
    of_units = elements(module.consumer).sum(0).cpu().view(module.units, -1).sum(1)
    of_groups = torch.zeros(module.groups, dtype=torch.float64)
    for name in module.producers:
        rows = elements(name).sum(1).cpu()
        for part in slices_of(module, name):
            owned = part.owner >= 0  # rows of no unit have -1
            sums = of_groups if part.per_group else of_units
            sums.index_add_(0, part.owner[owned], rows[owned])
    return of_units + of_groups.repeat_interleave(module.group_size)


def slices_of(module: PrunableModule, producer: str) -> list[Slice]:
    """Return the slices of a producer, those owned by units before those owned by groups."""
    return sorted((part for part in module.slices if part.tensor == producer), key=lambda part: part.per_group)


@dataclass(frozen=True)
class Calibration:
    """The calibration run that produced the statistics, with its number of samples."""

    samples: int
    labels: str  # "data", or "predictions" if the model's own predictions replaced missing labels
    fingerprint: str  # SHA-256 of the batches


@dataclass(frozen=True)
class Statistics:
    """Statistics of every unit over the calibration samples.

    Attributes:
        values: Statistic -> module -> (units,) float64 on CPU; `collect_statistics` says what each is.
        moments: Moments of the consumers over the rows to refit on, collected when first used; None without such rows.
    """

    values: Mapping[str, Mapping[str, Tensor]]
    calibration: Calibration
    moments: MomentStore | None = None

    def __getitem__(self, statistic: str) -> Mapping[str, Tensor]:
        return self.values[statistic]

    def of(self, modules: Collection[str]) -> Statistics:
        """Return the statistics of some modules, by their names, without the moments."""
        values = {name: {m: v for m, v in by_module.items() if m in modules} for name, by_module in self.values.items()}
        return Statistics(values, self.calibration)


def collect_statistics(
    model: PreTrainedModel,
    batches: Sequence[dict[str, Tensor]],
    modules: Sequence[PrunableModule],
    *,
    needs: Collection[str] = DEFAULT_NEEDS,
    progress: Progress = SILENT,
) -> Statistics:
    """Collect the statistics of every unit, averaged over the calibration samples.

    HIS is E_x |dL(x)/dm_u| with a mask m_u = 1 on the output of unit u (Michel et al. 2019, "Are Sixteen Heads Really
    Better than One?", https://arxiv.org/abs/1905.10650, Eq. 3). "fisher" is E_x (dL(x)/dm_u)^2, the diagonal of the
    empirical Fisher information of the masks (Kwon et al. 2022, https://arxiv.org/abs/2204.09656, Eq. 6). The gradient
    of a mask is the sum, over a sample's tokens and the unit's elements, of the consumer's input times the gradient of
    the loss there. The entropy, of heads, is the mean over a sample's real queries of H(attention row)/log(keys seen).

    If labels are tokens, sample i's loss is the mean over its own n_i label tokens. The model's loss is the mean over
    all N label tokens of the batch, so the gradient of N times that loss is divided by n_i.

    An embedding has no loss: several random projections of it stand in, see `tasks/feature_extraction.py`. For a
    regression without labels, the predicted number does. Processes share the batches. No key/value cache is kept.

    Args:
        model: The model, in half precision too, as sums are float64; its weights, mode and gradients are restored.
        batches: Keyword arguments of the model. Without `labels`, the predicted classes, labels or tokens replace them.
        modules: From `find_attention`. Modules of an image tower must see one image per sample. A unit whose output is
            not used (as in the last layer of LLaVA's tower) has an HIS of 0.
        needs: Statistics to collect beside "his", "fisher", "entropy" and "weight_l2", the L2 norm of a unit's weights:
            "activation_l2", the mean norm of a unit's output over real tokens, and those that criteria bring.
        progress: Shows the loop over the blocks, forward and backward.

    Returns:
        The statistics: (units,) float64 on CPU per module.

    Raises:
        DataError: There is no batch, labels are needed and missing, or a sample has no label token.
        UnsupportedModelError: The number of rows that a module sees is not the number of samples.
        NonFiniteError: A loss or a gradient is NaN or infinite; the message names the batch.

    Examples:
        >>> statistics = collect_statistics(model, batches, modules)
        >>> statistics.calibration.samples, statistics.calibration.labels, statistics["his"][modules[0].name].shape
        (32, 'data', torch.Size([6]))
    """
    calibration, task = calibration_of(model, batches), task_of(model)
    brought = {name: OWN[name](model, batches, modules) for name in dict.fromkeys(needs) if name in OWN}
    attention = [module for module in modules if module.kind == ATTENTION]
    entropies, with_norms = Entropies(model, attention), "activation_l2" in needs
    sums = entropies.sums | zeros_by_unit(modules, "his", "fisher", "norms", "tokens")  # statistic -> module -> sums
    parts, numbers = _parts(model, batches)
    gradients = Gradients(model, parts, modules, "loss", numbers=numbers, within=entropies.attached)

    def add(block_modules: list[PrunableModule], read: Read) -> None:
        for number in own_batches(parts):
            readings = read(number)
            for name, values in mask_gradients(readings, block_modules, gradients.counts[number]).items():
                sums["his"][name] += values.abs().sum(0)
                sums["fisher"][name] += values.square().sum(0)
            for reading in readings if with_norms else ():
                tokens = reading.inputs[reading.real].double().unflatten(1, (len(sums["norms"][reading.name]), -1))
                sums["norms"][reading.name] += tokens.norm(dim=-1).sum(0).cpu()
                sums["tokens"][reading.name] += len(tokens)

    gradients.collect(add, around=lambda n: entropies.recorded(parts[n]), name="score", progress=progress)
    added_up(total for of_modules in sums.values() for total in of_modules.values())
    samples = task.repeats * calibration.samples
    values = {key: {name: total / samples for name, total in sums[key].items()} for key in ("his", "fisher")}
    if all(maps.all() for maps in sums["maps"].values()):  # every module has entropies
        rows = sums["rows"]
        values["entropy"] = {name: total / rows[name].clamp(min=1) for name, total in sums["entropy"].items()}
    values["weight_l2"] = {
        m.name: sum_by_unit(m, lambda name: weight_of(model.get_submodule(name)).detach().double().pow(2)).sqrt()
        for m in modules
    }
    if with_norms:
        values["activation_l2"] = {name: total / sums["tokens"][name] for name, total in sums["norms"].items()}
    return Statistics(values | brought, calibration)


def calibration_of(model: PreTrainedModel, batches: Sequence[dict[str, Tensor]]) -> Calibration:
    """Return the description of calibration batches; refuse none at all, and those without labels that a loss needs."""
    if not batches:
        raise DataError("calibration needs at least one sample, got none; raise calibration.samples")
    task_of(model).check_batches(batches)
    labels = "data" if "labels" in batches[0] and OWN_KEY not in batches[0] else "predictions"
    return Calibration(sum(map(size_of, batches)), labels, batches_fingerprint(batches))


def _parts(model: PreTrainedModel, batches: Sequence[dict[str, Tensor]]) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Return the batches with labels, in parts that the task computes at once, and the number of each part's batch."""
    device, task = next(model.parameters()).device, task_of(model)
    parts, numbers = list[dict[str, Tensor]](), list[int]()
    with walking(model):
        for number, batch in enumerate(batches):
            for part in task.parts({key: value.to(device) for key, value in batch.items()}):
                repeated = {key: value.repeat_interleave(task.repeats, 0) for key, value in part.items()}
                parts.append(task.with_labels(model, repeated))
                numbers.append(number)
    return parts, numbers


def mask_gradients(readings: Sequence[Reading], modules: Sequence[PrunableModule], counts: Tensor) -> dict[str, Tensor]:
    """Return module -> gradients of each sample's own loss to masks of one on its units, (batch, units) float64 on CPU.

    The readings are of one batch, with gradients of the sum of all terms of its loss; `counts`, (batch,), says how many
    of these belong to each sample. Modules of the block without a reading get zeros.
    """
    sums = {module.name: torch.zeros(len(counts), module.units, dtype=torch.float64) for module in modules}
    for reading in readings:
        assert reading.gradients is not None
        # A mask changes the loss by its input times the gradient there, over all calls, tokens and elements.
        of_input = (reading.inputs.float() * reading.gradients.float()).sum(1)  # (batch, inputs)
        sums[reading.name] += of_input.unflatten(1, (sums[reading.name].shape[1], -1)).sum(-1).double().cpu()
    return {name: values / counts.clamp(min=1).cpu()[:, None] for name, values in sums.items()}
