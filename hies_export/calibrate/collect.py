"""Collect, in one forward and one backward pass per batch, everything the criteria need."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hies_export.progress import Track

from ..data.targets import batches_fingerprint, check_label_tokens, is_regression, size_of
from ..errors import DataError, StepError
from ..model.attention import use_attention
from ..model.modes import checkpointing, frozen, without_cache
from ..values import AttentionSite, HeadStatistics
from .gates import _Collector
from .weights import _weight_l2

logger = logging.getLogger(__name__)


def collect_statistics(
    model: PreTrainedModel,
    batches: Sequence[dict[str, Tensor]],
    sites: Sequence[AttentionSite],
    *,
    progress: Track | None = None,
) -> HeadStatistics:
    """Average HIS and attention entropy of every head over the calibration samples.

    HIS is E_x |dL(x)/dm_h| with a mask m_h = 1 on the head's output (Michel et al. 2019, "Are Sixteen Heads Really
    Better than One?", https://arxiv.org/abs/1905.10650, Eq. 3): a gate per sample and head receives each sample's own
    gradient from a single backward pass, with every weight frozen. The entropy is the mean over a sample's real query
    tokens of H(attention row) / log(keys the row sees); no attention map is stored.

    Where labels are tokens, sample i's loss is the mean over its own n_i label tokens. The model's loss is the mean
    over all N of the batch, so the gates' gradient of N times that loss is divided by n_i.

    A batch that does not fit into memory is halved, again and again, and so are those after it. Gradient checkpointing
    is used where it is switched on (without dropout), and no key/value cache is kept.

    Args:
        model: The model; its weights, mode and gradients are left as they were found. It may be in half precision (all
            sums are float64) or spread over devices.
        batches: What `model(**batch)` takes. With `labels` the loss is the model's own; without, the predicted class or
            tokens stand in for the labels.
        sites: The attention modules, from `find_attention`. Those of an image tower must see one image per sample. A
            head whose output is not used (as in the last layer of LLaVA's tower) has an HIS of 0.
        progress: Wraps the batches, e.g. in a progress bar.

    Returns:
        The statistics; tensors of shape (heads,), float64, on CPU.

    Raises:
        DataError: There is no batch, a regression model has no labels, or a sample has no label token.
        UnsupportedModelError: An attention module sees another number of rows than there are samples.
        NonFiniteError: A loss or a gradient is NaN or infinite; the message names the batch.
        StepError: Not even one sample fits into memory.

    Examples:
        >>> statistics = collect_statistics(model, batches, sites)
        >>> statistics.samples, statistics.labels, statistics.his[sites[0].name].shape
        (32, 'data', torch.Size([6]))
    """
    if not batches:
        raise DataError("calibration needs at least one sample, got none; raise calibration.samples")
    labelled = "labels" in batches[0]
    if not labelled and is_regression(model.config):
        raise DataError(
            "a regression model needs labels to be calibrated (against its own predictions its loss has no gradient), "
            "but the recipe names no label column; set data.label"
        )
    check_label_tokens(batches)
    device = next(model.parameters()).device
    his = {site.name: torch.zeros(site.heads, dtype=torch.float64) for site in sites}
    entropy = {site.name: torch.zeros(site.heads, dtype=torch.float64) for site in sites}
    samples, samples_with_rows = 0, {site.name: 0 for site in sites}
    at_once = max(size_of(batch) for batch in batches)
    collector = _Collector(model, sites)
    with frozen(model), without_cache(model), checkpointing(model), use_attention(model, collector):
        for index, batch in enumerate(progress(batches) if progress else batches):
            done = 0
            while done < size_of(batch):
                part = _part(batch, done, at_once)
                try:
                    found = collector.run({key: value.to(device) for key, value in part.items()}, index)
                except RuntimeError as error:
                    if not _out_of_memory(error):
                        raise
                    at_once = _fewer(part, index, error)
                    found = None
                if found is None:
                    # Only here, outside of the handler, are the tensors of the failed attempt free.
                    collector.reset()
                    gc.collect()
                    torch.cuda.empty_cache()
                    continue
                for name, (gradients, entropies, counted) in found.items():
                    his[name] += gradients.abs().sum(0)
                    entropy[name] += entropies.sum(0)
                    samples_with_rows[name] += counted
                done += size_of(part)
            samples += done
    return HeadStatistics(
        his={name: total / samples for name, total in his.items()},
        entropy={name: total / max(samples_with_rows[name], 1) for name, total in entropy.items()},
        weight_l2={site.name: _weight_l2(model, site) for site in sites},
        samples=samples,
        labels="data" if labelled else "predictions",
        fingerprint=batches_fingerprint(list(batches)),
        batch_size=at_once,
    )


def _part(batch: dict[str, Tensor], start: int, size: int) -> dict[str, Tensor]:
    """Some samples of a batch."""
    if size >= size_of(batch):
        return batch
    return {key: value[start : start + size] for key, value in batch.items()}


def _out_of_memory(error: RuntimeError) -> bool:
    # On CPU, and from some libraries on GPU, it has no class of its own.
    said = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error).lower() for words in said)


def _fewer(part: Mapping[str, Tensor], index: int, error: RuntimeError) -> int:
    """Half the samples of what did not fit into memory."""
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
