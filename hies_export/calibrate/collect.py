"""Collect, in one forward and one backward pass per batch, the statistics that criteria need."""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.targets import batches_fingerprint, check_label_tokens, is_regression, size_of
from ..errors import DataError, StepError
from ..model.attention import use_attention
from ..model.modes import checkpointing, frozen, without_cache
from ..model.watch import intercept
from ..progress import SILENT, Progress
from ..units import PrunableModule
from ..values import Calibration, Statistics
from . import inputs, weights
from .entropy import Entropies
from .gates import Gates, summed_loss, with_labels

logger = logging.getLogger(__name__)

# Statistics that every run collects.
DEFAULT_NEEDS = ("his", "entropy", "weight_l2")


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
    and unit has a gate, so one backward pass per batch gives each sample's own gradient. All weights are frozen. The
    entropy is the mean over a sample's real query tokens of H(attention row) / log(keys the row sees). Only heads have
    one. No attention map is stored.

    If labels are tokens, sample i's loss is the mean over its own n_i label tokens. The model's loss is the mean over
    all N label tokens of the batch, so the gates' gradient of N times that loss is divided by n_i.

    If a batch does not fit into memory, it and all later batches are halved, as often as needed. Gradient checkpointing
    is used if it is switched on (without dropout). No key/value cache is kept.

    Args:
        model: The model; its weights, mode and gradients are restored. It may be in half precision (all sums are
            float64) or spread over devices.
        batches: Keyword arguments of the model. Without `labels`, the predicted classes or tokens replace them.
        modules: From `find_attention`. Modules of an image tower must see one image per sample. A unit whose output is
            not used (as in the last layer of LLaVA's tower) has an HIS of 0.
        needs: Statistics to collect beside "his", "fisher", "entropy" and "weight_l2", which are always collected:
            "activation_l2", "output_norm" and "obs" (see `inputs.InputSums`), "taylor" and "channel_taylor" (see
            `weights.WeightGradients`).
        progress: Shows the loop over the batches.

    Returns:
        The statistics: (units,) float64 on CPU per module, except "channel_taylor", (groups * unit_width,).

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
    labelled = _check_labels(model, batches, needs)
    device = next(model.parameters()).device
    collected = _Pass(model, modules, needs)
    his = {module.name: torch.zeros(module.units, dtype=torch.float64) for module in modules}
    fisher = {name: torch.zeros_like(total) for name, total in his.items()}
    attention = [module for module in modules if module.kind == "attention"]
    entropy = {module.name: torch.zeros(module.units, dtype=torch.float64) for module in attention}
    samples, samples_with_rows = 0, {module.name: 0 for module in attention}
    at_once = max(size_of(batch) for batch in batches)
    with collected.running():
        for index, batch in enumerate(progress.track(batches, "score")):
            done = 0
            while done < size_of(batch):
                part = _part(batch, done, at_once)
                try:
                    found = collected.run({key: value.to(device) for key, value in part.items()}, index)
                except RuntimeError as error:
                    if not _out_of_memory(error):
                        raise
                    at_once = _halved(part, index, error)
                    found = None
                if found is None:
                    # Inside the handler, the traceback still holds the tensors of the failed attempt.
                    collected.reset()
                    gc.collect()
                    torch.cuda.empty_cache()
                    continue
                for name, gradients in found.gradients.items():
                    his[name] += gradients.abs().sum(0)
                    fisher[name] += gradients.square().sum(0)
                for name, (entropies, counted) in found.entropies.items():
                    entropy[name] += entropies.sum(0)
                    samples_with_rows[name] += counted
                done += size_of(part)
            samples += done
    values = {
        "his": {name: total / samples for name, total in his.items()},
        "fisher": {name: total / samples for name, total in fisher.items()},
        "entropy": {name: total / max(samples_with_rows[name], 1) for name, total in entropy.items()},
        "weight_l2": {module.name: weights.weight_l2(model, module) for module in modules},
    }
    calibration = Calibration(
        samples=samples,
        labels="data" if labelled else "predictions",
        fingerprint=batches_fingerprint(list(batches)),
        batch_size=at_once,
    )
    return Statistics(values | collected.sums(), calibration)


def _check_labels(model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], needs: Collection[str]) -> bool:
    """Return whether the batches have labels.

    Raises:
        DataError: There is no batch, or a statistic needs labels that are missing.
    """
    if not batches:
        raise DataError("calibration needs at least one sample, got none; raise calibration.samples")
    labelled = "labels" in batches[0]
    if not labelled and is_regression(model.config):
        raise DataError(
            "a regression model needs labels to be calibrated (against its own predictions its loss has no gradient), "
            "but the recipe names no label column; set data.label"
        )
    if not labelled and model.can_generate() and not set(weights.STATISTICS).isdisjoint(needs):
        raise DataError("this model needs labels to be scored by the gradients of its weights; set data.label")
    check_label_tokens(batches)
    return labelled


@dataclass(frozen=True)
class _Found:
    """Gradients and entropies of one batch.

    Attributes:
        gradients: Module -> gradients of each sample's own loss to its gates, (batch, units) float64 on CPU.
        entropies: Module -> entropies, (batch, units) float64 on CPU, and the number of samples with a row to average.
    """

    gradients: Mapping[str, Tensor]
    entropies: Mapping[str, tuple[Tensor, int]]


class _Pass:
    """One forward and one backward pass per batch, with everything attached that collects statistics."""

    def __init__(self, model: PreTrainedModel, modules: Sequence[PrunableModule], needs: Collection[str]):
        self._model, self._modules = model, modules
        self._entropies = Entropies(model, [module for module in modules if module.kind == "attention"])
        self._inputs = None if set(inputs.STATISTICS).isdisjoint(needs) else inputs.InputSums(model, modules, needs)
        self._weights = None if set(weights.STATISTICS).isdisjoint(needs) else weights.WeightGradients(model, modules)
        self._samples = 0
        self.reset()

    def reset(self) -> None:
        """Discard what the last batch left."""
        self._gates = Gates(self._modules)
        self._read: dict[str, list[Tensor]] = {}
        self._entropies.take()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Attach gates, entropies and sums to the model inside the block, with its weights frozen."""
        consumers = {module.name: module.consumer for module in self._modules}
        with ExitStack() as stack:
            stack.enter_context(frozen(self._model))
            stack.enter_context(without_cache(self._model))
            stack.enter_context(checkpointing(self._model))
            stack.enter_context(use_attention(self._model, self._entropies))
            stack.enter_context(intercept(self._model, consumers, self._on_read))
            if self._weights is not None:
                stack.enter_context(self._weights.trainable())
            yield

    def _on_read(self, name: str, x: Tensor) -> Tensor:
        if not self._entropies.enabled:
            return x
        if self._inputs is not None and self._entropies.recording:
            self._read.setdefault(name, []).append(x.detach())
        return self._gates.apply(name, x, samples=self._samples, rows=self._entropies.rows.get(name))

    def run(self, batch: dict[str, Tensor], index: int) -> _Found:
        """Run a batch forward and backward, and return its gradients and entropies.

        Args:
            batch: The batch, on the model's device; without labels, the model's predictions replace them.
            index: Number of the batch, for messages.
        """
        self.reset()
        batch = with_labels(self._model, batch)
        self._samples = size_of(batch)
        self._entropies.enabled = self._entropies.recording = True
        try:
            with torch.enable_grad():
                total, losses = summed_loss(self._model, batch, index)
                self._entropies.recording = False
                gates = self._gates.tensors
                parameters = [] if self._weights is None else self._weights.parameters
                gradients = torch.autograd.grad(total, [*gates.values(), *parameters], allow_unused=True)
        finally:
            self._entropies.enabled = self._entropies.recording = False
        found = _Found(
            self._gates.per_sample(dict(zip(gates, gradients, strict=False)), losses, index), self._entropies.take()
        )
        if self._weights is not None:
            self._weights.add(gradients[len(gates) :], size_of(batch) / losses.sum().item())
        if self._inputs is not None:
            self._inputs.add(batch, self._read)
        return found

    def sums(self) -> dict[str, dict[str, Tensor]]:
        """Return statistic -> module -> values, for the optional statistics that were asked for."""
        return {
            **({} if self._inputs is None else self._inputs.values()),
            **({} if self._weights is None else self._weights.values()),
        }


def _part(batch: dict[str, Tensor], start: int, size: int) -> dict[str, Tensor]:
    """Return up to `size` samples of a batch, from sample `start` on."""
    if size >= size_of(batch):
        return batch
    return {key: value[start : start + size] for key, value in batch.items()}


def _out_of_memory(error: RuntimeError) -> bool:
    # The CPU allocator, and some GPU libraries, raise a plain RuntimeError.
    phrases = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError) or any(phrase in str(error).lower() for phrase in phrases)


def _halved(part: Mapping[str, Tensor], index: int, error: RuntimeError) -> int:
    """Return half the number of samples of a batch that did not fit into memory.

    Raises:
        StepError: The batch cannot be halved.
    """
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
