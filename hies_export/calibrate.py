"""Collect, in one forward and one backward pass per batch, everything the criteria need."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .data.targets import IGNORED, batches_fingerprint, check_label_tokens, is_regression, predicted_positions, size_of
from .errors import DataError, NonFiniteError, StepError, UnsupportedModelError
from .heads.attention import AttentionCall, VisibleKeys, attend, attend_with_entropy, use_attention
from .model.linear import weight_of
from .model.modes import checkpointing, frozen, without_cache
from .values import AttentionSite, HeadStatistics

logger = logging.getLogger(__name__)

Progress = Callable[[Sequence[dict[str, Tensor]]], Iterable[dict[str, Tensor]]]


def collect_statistics(
    model: PreTrainedModel,
    batches: Sequence[dict[str, Tensor]],
    sites: Sequence[AttentionSite],
    *,
    progress: Progress | None = None,
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


class _Collector:
    """The attention function of calibration: multiplies each head's output by a gate of one, and sums entropies."""

    def __init__(self, model: PreTrainedModel, sites: Sequence[AttentionSite]):
        self._model = model
        self._names: dict[nn.Module, str] = {model.get_submodule(site.name): site.name for site in sites}
        self._visible = VisibleKeys()
        self._recording = True
        self.reset()

    def reset(self) -> None:
        """Forget the last batch."""
        self._gates: dict[str, Tensor] = {}
        self._entropy: dict[str, list[tuple[Tensor, Tensor]]] = {}

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Nothing is recorded, whether by a forward pass or by one repeated under gradient checkpointing."""
        self._recording = False
        try:
            yield
        finally:
            self._recording = True

    def __call__(self, call: AttentionCall) -> Tensor:
        name = self._names.get(call.module)
        gate = None if name is None else self._gates.get(name)
        if name is None or (gate is None and not self._recording):
            return attend(call, self._visible)
        # A repeated pass must do what the first one did, entropies included, for checkpointing to match the two.
        output, entropy, rows = attend_with_entropy(call, self._visible)
        if gate is None:
            # In float32, so that a half-precision model's gradient is not rounded when it is summed up.
            dtype = torch.promote_types(output.dtype, torch.float32)
            gate = torch.ones(len(output), output.shape[1], 1, 1, dtype=dtype, device=output.device)
            self._gates[name] = gate.requires_grad_()
        if self._recording:
            self._entropy.setdefault(name, []).append((entropy, rows))
        return (output * gate).to(output.dtype)

    def run(self, inputs: dict[str, Tensor], index: int) -> dict[str, tuple[Tensor, Tensor, int]]:
        """Run a batch forward and backward.

        Returns:
            Per attention module the gradients of every sample's own loss, (batch, heads), the entropies, (batch,
            heads), both float64 on CPU, and how many samples had a row to count.
        """
        self.reset()
        if "labels" not in inputs:
            with self._idle(), torch.no_grad():
                inputs["labels"] = _own_labels(self._model(**inputs).logits, inputs.get("attention_mask"))
        labels = inputs["labels"]
        # How many losses the model averages, and how many of them are each sample's: (batch,)
        own = predicted_positions(labels).sum(-1) if labels.dim() == 2 else torch.ones(len(labels))
        with torch.enable_grad():
            loss = self._model(**inputs).loss
            if not torch.isfinite(loss):
                raise NonFiniteError(
                    f"the loss of every calibration batch must be finite, but batch {index} gave {loss.item()}; "
                    "check the rows of that batch and the model's dtype"
                )
            with self._idle():
                gradients = torch.autograd.grad(
                    loss * own.sum().to(loss.device), list(self._gates.values()), allow_unused=True
                )
        out = {}
        for (name, gate), gradient in zip(self._gates.items(), gradients, strict=True):
            if len(gate) != len(labels):
                raise UnsupportedModelError(
                    f"every sample must be one row of an attention module, but {name} sees {len(gate)} rows for "
                    f"{len(labels)} samples; give every sample one image of one tile, or score the other tower only"
                )
            per_sample = torch.zeros_like(gate) if gradient is None else gradient
            if not torch.isfinite(per_sample).all():
                raise NonFiniteError(
                    f"every gradient must be finite, but batch {index} gave NaN or infinity at the heads of {name}; "
                    "check the rows of that batch and the model's dtype"
                )
            calls = self._entropy[name]
            entropies = torch.stack([e for e, _ in calls]).mean(0).double().cpu()
            counted = int((calls[0][1] > 0).sum())
            out[name] = (per_sample[:, :, 0, 0].double().cpu() / own.clamp(min=1).cpu()[:, None], entropies, counted)
        return out


def _own_labels(logits: Tensor, attention_mask: Tensor | None) -> Tensor:
    """A model's predictions as its labels: classes (batch,), or tokens (batch, tokens) each after what foretold it."""
    predicted = logits.argmax(-1)
    if predicted.dim() == 1:
        return predicted
    labels = torch.full_like(predicted, IGNORED)
    labels[:, 1:] = predicted[:, :-1]
    return labels if attention_mask is None else labels.masked_fill(attention_mask == 0, IGNORED)


def _weight_l2(model: PreTrainedModel, site: AttentionSite) -> Tensor:
    """L2 norm over a head's q, k and v rows and o columns; a shared key/value head counts for each of its queries."""

    def squares(name: str) -> Tensor:
        return weight_of(model.get_submodule(name)).detach().double().cpu().pow(2)

    return sum_by_head(site, squares).sqrt()


def sum_by_head(site: AttentionSite, elements: Callable[[str], Tensor]) -> Tensor:
    """Add up what belongs to each head; what belongs to a shared key/value head counts for each of its queries.

    Args:
        site: The attention module.
        elements: Of a projection or the output projection, by name, a float64 number per weight, (out_features,
            in_features), on CPU; asked for one at a time.

    Returns:
        (heads,) float64.
    """
    query = elements(site.output).sum(0).view(site.heads, -1).sum(1)
    key_value = torch.zeros(site.key_value_heads, dtype=torch.float64)
    for projection in site.projections:
        rows = elements(projection.name).sum(1)
        for total, per_head in ((query, projection.query), (key_value, projection.key_value)):
            for head, features in enumerate(per_head):
                total[head] += rows[list(features)].sum()
    return query + key_value.repeat_interleave(site.group_size)
