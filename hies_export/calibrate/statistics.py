"""Collect, in one forward and one backward pass per batch, the statistics that criteria need."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.batches import OWN_KEY, batches_fingerprint, size_of
from ..errors import DataError, NonFiniteError, StepError, UnsupportedModelError, memory_failure
from ..kinds import ATTENTION, UNIT_NAMES
from ..model.internals import checkpointing
from ..model.linear import weight_of
from ..model.modes import frozen, intercept, output_alone
from ..model.tokens import real_tokens, refuse_tokens_first
from ..progress import SILENT, Progress
from ..tasks import task_of
from ..units.units import PrunableModule, Slice
from .entropy import Entropies
from .moments import MomentStream
from .passes import run_pass
from .readings import by_sample


def weight_l2(model: PreTrainedModel, module: PrunableModule) -> Tensor:
    """Return the L2 norm of every unit's weights in the producers and the consumer, (units,) float64."""

    def squares(name: str) -> Tensor:
        return weight_of(model.get_submodule(name)).detach().double().pow(2)

    return sum_by_unit(module, squares).sqrt()


def sum_by_unit(module: PrunableModule, elements: Callable[[str], Tensor]) -> Tensor:
    """Return the sum of a number per weight over every unit, (units,) float64 on CPU.

    A group's sum counts for each of its units. `elements` gives the numbers of a layer by its name, (out_features,
    in_features) float64 on any device, one layer at a time.
    """
    of_units = elements(module.consumer).sum(0).cpu().view(module.units, -1).sum(1)
    of_groups = torch.zeros(module.groups, dtype=torch.float64)
    for name in module.producers:
        rows = elements(name).sum(1).cpu()
        for part in slices_of(module, name):
            total = of_groups if part.per_group else of_units
            for span in part.spans:
                owned = span.start + torch.arange(span.units)[:, None] * span.step + torch.arange(span.width)
                total[span.first : span.first + span.units] += rows[owned].sum(1)
    return of_units + of_groups.repeat_interleave(module.group_size)


def slices_of(module: PrunableModule, producer: str) -> list[Slice]:
    """Return the slices of a producer, those owned by units before those owned by groups."""
    return sorted((part for part in module.slices if part.tensor == producer), key=lambda part: part.per_group)


class Gates:
    """Gates of one batch, created when a consumer is first called: module -> (batch, units, 1, 1)."""

    def __init__(self, modules: Sequence[PrunableModule]):
        self._modules = {module.name: module for module in modules}
        self.tensors: dict[str, Tensor] = {}

    def apply(self, name: str, x: Tensor, *, samples: int, rows: int | None = None, even: bool = False) -> Tensor:
        """Return the input of a consumer, (..., units * unit_width), times the gates of its module.

        `rows` is the number of samples in x if it is known. By default it is the length of x, or `samples` if x is
        flat: some models flatten (samples, tokens) in front of their feed-forward blocks. If the samples are `even`, of
        one shape, a module that sees each of them in several windows sees as many of every one.
        """
        if rows is None:
            rows = samples if x.dim() == 2 else len(x)
        if even and rows % samples == 0:
            rows = samples
        module = self._modules[name]
        gate = self.tensors.get(name)
        if gate is None:
            # Autograd sums a gate's gradient in the gate's dtype; half precision would round it.
            dtype = torch.promote_types(x.dtype, torch.float32)
            gate = torch.ones(rows, module.units, 1, 1, dtype=dtype, device=x.device).requires_grad_()
            self.tensors[name] = gate
        units = x.reshape(rows, -1, module.units, module.unit_width).transpose(1, 2)  # (batch, units, tokens, width)
        return (units * gate).to(x.dtype).transpose(1, 2).reshape(x.shape)

    def per_sample(self, gradients: Mapping[str, Tensor | None], losses: Tensor, index: int) -> dict[str, Tensor]:
        """Return module -> gradients of each sample's own loss to its gates, (batch, units) float64 on CPU.

        `gradients` are those of the sum over all losses of the batch, None if nothing reads the module. `losses` is
        the number of these losses that belong to each sample, (batch,).
        """
        found = {}
        for name, gate in self.tensors.items():
            if len(gate) != len(losses):
                raise UnsupportedModelError(
                    f"every sample must be one row of an attention module, but {name} sees {len(gate)} rows for "
                    f"{len(losses)} samples; give every sample one image of one tile, or score the other tower only"
                )
            gradient = gradients[name]
            gradient = torch.zeros_like(gate) if gradient is None else gradient
            if not torch.isfinite(gradient).all():
                units = UNIT_NAMES[self._modules[name].kind] + "s"
                raise NonFiniteError(
                    f"every gradient must be finite, but batch {index} gave NaN or infinity at the {units} of {name}; "
                    "check the rows of that batch and the model's dtype"
                )
            found[name] = gradient[:, :, 0, 0].double().cpu() / losses.clamp(min=1).cpu()[:, None]
        return found


logger = logging.getLogger(__name__)

# Statistics that every run collects.
DEFAULT_NEEDS = ("his", "entropy", "weight_l2")

# Takes the model, calibration batches and modules, and returns module -> (units,) float64 on CPU.
Collect: TypeAlias = Callable[
    [PreTrainedModel, Sequence[dict[str, Tensor]], Sequence[PrunableModule]], Mapping[str, Tensor]
]
# Statistics that criteria bring, by name, see `score.criteria.criterion`.
OWN: dict[str, Collect] = {}


@dataclass(frozen=True)
class Calibration:
    """The calibration run that produced the statistics, with its number of samples."""

    samples: int
    labels: str  # "data", or "predictions" if the model's own predictions replaced missing labels
    fingerprint: str  # SHA-256 of the batches
    batch_size: int = 1  # most samples in one forward pass; fewer than a batch has if that did not fit into memory


@dataclass(frozen=True)
class Statistics:
    """Statistics of every unit over the calibration samples.

    Attributes:
        values: Statistic -> module -> (units,) float64 on CPU. "his" is the mean over samples of the absolute gradient
            of the loss with respect to a mask of one on the unit's output, and "fisher" that of its square. "entropy"
            (attention only) is the mean entropy of the head's attention rows, normalised by their length to [0, 1].
            "weight_l2" is the L2 norm of the unit's weights. The docstring of `hies_export.calibrate` lists the others.
        calibration: The run that produced them.
        moments: What consumers read on the rows to refit on, collected when first asked for; None without such rows.
    """

    values: Mapping[str, Mapping[str, Tensor]]
    calibration: Calibration
    moments: MomentStream | None = None

    def __getitem__(self, statistic: str) -> Mapping[str, Tensor]:
        return self.values[statistic]

    def of(self, modules: Collection[str]) -> Statistics:
        """Return the statistics of some modules, by their names."""
        values = {
            name: {module: v for module, v in by_module.items() if module in modules}
            for name, by_module in self.values.items()
        }
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
    empirical Fisher information of the masks (Kwon et al. 2022, https://arxiv.org/abs/2204.09656, Eq. 6). Every sample
    and unit has a gate, so one backward pass per batch gives each sample's own gradient. The entropy, of heads alone,
    is the mean over a sample's real query tokens of H(attention row) / log(keys the row sees).

    If labels are tokens, sample i's loss is the mean over its own n_i label tokens. The model's loss is the mean over
    all N label tokens of the batch, so the gates' gradient of N times that loss is divided by n_i.

    Several processes share the batches, and add up their sums at the end.

    An embedding has no loss: its place takes a random projection of it, and every text is scored by several;
    see `tasks/feature_extraction.py`. A regression without labels has none either: its number takes that place.

    If a batch does not fit into memory, it and all later batches are halved, as often as needed. Gradient checkpointing
    is used if it is switched on (without dropout). No key/value cache is kept.

    Args:
        model: The model; its weights, mode and gradients are restored. It may be in half precision (all sums are
            float64) or spread over devices.
        batches: Keyword arguments of the model. Without `labels`, the predicted classes, labels or tokens replace them.
        modules: From `find_attention`. Modules of an image tower must see one image per sample. A unit whose output is
            not used (as in the last layer of LLaVA's tower) has an HIS of 0.
        needs: Statistics to collect beside "his", "fisher", "entropy" and "weight_l2", which are always collected:
            "activation_l2", the mean norm of a unit's output over real tokens, and those that criteria bring.
        progress: Shows the loop over the batches.

    Returns:
        The statistics: (units,) float64 on CPU per module.

    Raises:
        DataError: There is no batch, labels are needed and missing, or a sample has no label token.
        UnsupportedModelError: The number of rows that a module sees is not the number of samples.
        NonFiniteError: A loss or a gradient is NaN or infinite; the message names the batch.
        StepError: Not even one sample fits into memory.

    Examples:
        >>> statistics = collect_statistics(model, batches, modules)
        >>> statistics.calibration.samples, statistics.calibration.labels, statistics["his"][modules[0].name].shape
        (32, 'data', torch.Size([6]))
    """
    labelled = _check_labels(model, batches)
    own = {name: OWN[name](model, batches, modules) for name in dict.fromkeys(needs) if name in OWN}
    passing = _Pass(model, modules, needs, at_once=max(map(size_of, batches)))
    times = task_of(model, batches[0]).repeats

    def add(number: int, batch: dict[str, Tensor]) -> int:
        return passing.add({key: value.repeat_interleave(times, 0) for key, value in batch.items()}, number)

    with passing.running():
        at_once = run_pass(model, batches, add, passing.tensors(), name="score", progress=progress)
    calibration = _calibration(batches, labelled=labelled, batch_size=min(at_once))
    return Statistics(passing.values(times * calibration.samples) | own, calibration)


def without_statistics(model: PreTrainedModel, batches: Sequence[dict[str, Tensor]]) -> Statistics:
    """Return what is known of the calibration rows without a pass over them, for criteria that read no statistic.

    Raises:
        DataError: There is no batch, or a sample has no label token.
    """
    labelled = _check_labels(model, batches)
    return Statistics({}, _calibration(batches, labelled=labelled, batch_size=max(map(size_of, batches))))


def _calibration(batches: Sequence[dict[str, Tensor]], *, labelled: bool, batch_size: int) -> Calibration:
    return Calibration(
        samples=sum(map(size_of, batches)),
        labels="data" if labelled else "predictions",
        fingerprint=batches_fingerprint(list(batches)),
        batch_size=batch_size,
    )


def _check_labels(model: PreTrainedModel, batches: Sequence[dict[str, Tensor]]) -> bool:
    """Return whether the batches have labels; refuse batches without labels that the loss needs."""
    if not batches:
        raise DataError("calibration needs at least one sample, got none; raise calibration.samples")
    labelled = "labels" in batches[0] and OWN_KEY not in batches[0]
    task_of(model, batches[0]).check_batches(batches)
    return labelled


class _OfBatch(NamedTuple):
    """What a batch adds to the sums."""

    gates: Mapping[str, Tensor]  # module -> (batch, units)
    entropies: Mapping[str, tuple[Tensor, int]]
    norms: Sequence[tuple[str, Tensor, int]]  # module, sums of norms over tokens, (units,), and how many tokens


class _Pass:
    """One forward and one backward pass per `at_once` samples of a batch; fewer if they do not fit into memory."""

    def __init__(
        self, model: PreTrainedModel, modules: Sequence[PrunableModule], needs: Collection[str], *, at_once: int
    ):
        self._model, self._modules, self._at_once = model, modules, at_once
        attention = [module for module in modules if module.kind == ATTENTION]
        self._entropies = Entropies(model, attention)
        self._units = {module.name: module.units for module in modules} if "activation_l2" in needs else {}
        # By what is added up, and by module, (units,): also the samples with attention rows, and batches with maps.
        self._sums = {name: _zeros(modules) for name in ("his", "fisher", "norms", "tokens")}
        self._sums |= {name: _zeros(attention) for name in ("entropy", "rows", "maps")}
        self._samples, self._even = 0, False
        self._reset()

    def _reset(self) -> None:
        self._gates = Gates(self._modules)
        self._norms: list[tuple[str, Tensor, int]] = []
        self._entropies.take()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Attach gates and entropies to the model inside the block, with its weights frozen."""
        consumers = {module.name: module.consumer for module in self._modules}
        with ExitStack() as stack:
            stack.enter_context(frozen(self._model))
            stack.enter_context(output_alone(self._model))
            stack.enter_context(checkpointing(self._model))
            stack.enter_context(self._entropies.attached())
            stack.enter_context(intercept(self._model, consumers, self._on_read))
            yield

    def _on_read(self, name: str, x: Tensor) -> Tensor:
        if not self._entropies.enabled:
            return x
        batch = self._entropies.batch
        refuse_tokens_first(self._model, name, batch, x)
        if self._units and self._entropies.recording:
            outputs = by_sample(self._model, name, batch, x.detach())
            tokens = outputs[real_tokens(self._model, name, batch, outputs)].double()  # (tokens, inputs)
            norms = tokens.unflatten(1, (self._units[name], -1)).norm(dim=-1).sum(0).cpu()
            self._norms.append((name, norms, len(tokens)))
        rows = self._entropies.rows.get(name)
        return self._gates.apply(name, x, samples=self._samples, rows=rows, even=self._even)

    def add(self, batch: dict[str, Tensor], index: int) -> int:
        """Add a batch, with its number for messages, in parts that fit into memory; return their most samples."""
        device = next(self._model.parameters()).device
        done = 0
        while done < size_of(batch):
            part = _part(batch, done, self._at_once)
            found = None
            try:
                found = self._run({key: value.to(device) for key, value in part.items()}, index)
            except RuntimeError as error:
                if memory_failure(error) is None:
                    raise
                self._at_once = _halved(part, index, error)
            if found is None:
                # Inside the handler, the traceback still holds the tensors of the failed attempt.
                self._reset()
                gc.collect()
                torch.cuda.empty_cache()
                continue
            self._add(found)
            done += size_of(part)
        return self._at_once

    def _run(self, batch: dict[str, Tensor], index: int) -> _OfBatch:
        """Run a batch, on the model's device, forward and backward; without labels, predictions replace them."""
        self._reset()
        task = task_of(self._model, batch)
        batch = task.with_labels(self._model, batch)
        self._samples = size_of(batch)
        # More axes hold several images or tiles per sample, of which some may be padding that the model leaves out.
        self._even = all(len(value) == self._samples and value.dim() <= 4 for value in batch.values())
        self._entropies.batch = batch
        self._entropies.enabled = self._entropies.recording = True
        try:
            with torch.enable_grad():
                total, losses = task.loss(self._model, batch, index)
                self._entropies.recording = False
                gates = self._gates.tensors
                gradients = torch.autograd.grad(total, [*gates.values()], allow_unused=True)
        finally:
            self._entropies.enabled = self._entropies.recording = False
        return _OfBatch(
            self._gates.per_sample(dict(zip(gates, gradients, strict=True)), losses, index),
            self._entropies.take(),
            self._norms,
        )

    def _add(self, found: _OfBatch) -> None:
        for name, values in found.gates.items():
            self._sums["his"][name] += values.abs().sum(0)
            self._sums["fisher"][name] += values.square().sum(0)
        for name, (entropies, counted) in found.entropies.items():
            self._sums["entropy"][name] += entropies.sum(0)
            self._sums["rows"][name] += counted
            self._sums["maps"][name] += 1
        for name, norms, tokens in found.norms:
            self._sums["norms"][name] += norms
            self._sums["tokens"][name] += tokens

    def tensors(self) -> list[Tensor]:
        return [*chain(*(sums.values() for sums in self._sums.values()))]

    def values(self, samples: int) -> dict[str, dict[str, Tensor]]:
        """Return statistic -> module -> values of its units, float64 on CPU, after `samples`."""
        sums = self._sums
        found = {what: {name: total / samples for name, total in sums[what].items()} for what in ("his", "fisher")}
        if all(seen.all() for seen in sums["maps"].values()):
            rows = sums["rows"]
            found["entropy"] = {name: total / rows[name].clamp(min=1) for name, total in sums["entropy"].items()}
        found["weight_l2"] = {module.name: weight_l2(self._model, module) for module in self._modules}
        if self._units:
            found["activation_l2"] = {name: total / sums["tokens"][name] for name, total in sums["norms"].items()}
        return found


def _zeros(modules: Sequence[PrunableModule]) -> dict[str, Tensor]:
    return {module.name: torch.zeros(module.units, dtype=torch.float64) for module in modules}


def _part(batch: dict[str, Tensor], start: int, size: int) -> dict[str, Tensor]:
    if size >= size_of(batch):
        return batch
    return {key: value[start : start + size] for key, value in batch.items()}


def _halved(part: Mapping[str, Tensor], index: int, error: RuntimeError) -> int:
    """Return half the number of samples of a batch that did not fit into memory, or refuse it."""
    size = size_of(part)
    if any(len(value) != size for value in part.values()):
        raise StepError(
            f"calibration batch {index} of {size} samples does not fit into memory and cannot be halved, because its "
            "tensors do not have a row per sample; lower calibration.batch_size"
        ) from error
    if size == 1:
        raise StepError(
            f"one sample must fit into memory, but one of calibration batch {index} does not; lower data.max_length, "
            "load the model in bfloat16, or switch on its gradient checkpointing"
        ) from error
    logger.warning("a batch of %d samples does not fit into memory: going on with %d at once", size, size // 2)
    return size // 2
