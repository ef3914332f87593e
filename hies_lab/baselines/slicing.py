"""Slice attention as SliceGPT does (Ashkboos et al. 2024, https://arxiv.org/abs/2401.15024).

The inputs of q, k and v and the output of o are projected onto their first principal components. Without a share s of
the components, each of the four matrices has 1 - s of its rows or columns in the rotated basis. Removing a share s of
the heads has the same effect on their size.

The original slices the whole residual stream, and so MLPs and embeddings as well. It merges the rotations into the
residual connections; here they are not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hies_export.data.batches import Batch, inputs_of, size_of
from hies_export.errors import UnsupportedModelError
from hies_export.model.modes import evaluating, frozen, output_alone, requiring_gradients, watch
from hies_export.model.tokens import real_tokens
from hies_export.tasks import Predictions, task_of
from hies_export.units.units import PrunableModule


@dataclass(frozen=True)
class Bases:
    """Principal components of attention's inputs (of q, k and v) and outputs (of o); uncentred, float64 on CPU.

    Each is (width, width) by module: one component per column, largest variance first.
    """

    read: Mapping[str, Tensor]
    written: Mapping[str, Tensor]


def collect_bases(model: PreTrainedModel, batches: Sequence[Batch], modules: Sequence[PrunableModule]) -> Bases:
    """Return the principal components of attention modules, from one forward pass per batch; padding is excluded."""
    layers = {name: name for module in modules for name in module.layers}
    sums: dict[tuple[str, int], Tensor] = {}
    written: defaultdict[str, list[Tensor]] = defaultdict(list)  # module -> outputs of its consumer, one for each call

    def record(name: str, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        written[name].append(output)

    with ExitStack() as hooks, evaluating(model), output_alone(model), watch(model, layers) as read_by, torch.no_grad():
        for module in modules:
            consumer = model.get_submodule(module.consumer)
            hooks.enter_context(consumer.register_forward_hook(partial(record, module.name)))
        for batch in batches:
            on_device = {key: value.to(model.device) for key, value in inputs_of(batch).items()}
            read_by.clear()
            written.clear()
            model(**on_device)
            for module in modules:
                read = [read_by[name] for name in module.producers]
                if any(x is not first for other in read for x, first in zip(other, read[0], strict=True)):
                    raise UnsupportedModelError(
                        f"slicegpt needs attention whose projections read the same, but those of {module.name} do "
                        "not; leave it out of the criteria"
                    )
                for what, calls in enumerate((read[0], written[module.name])):
                    for x in calls:
                        real = x[real_tokens(model, module.name, on_device, x)].double()  # (tokens, width)
                        sums[module.name, what] = sums.get((module.name, what), 0) + real.T @ real
    bases = {key: torch.linalg.eigh(total).eigenvectors.flip(-1).cpu() for key, total in sums.items()}
    return Bases(*({module.name: bases[module.name, what] for module in modules} for what in (0, 1)))


@contextmanager
def sliced(model: PreTrainedModel, modules: Sequence[PrunableModule], bases: Bases, *, share: float) -> Iterator[None]:
    """Project inputs and outputs of attention onto their principal components but for a share, in the block."""
    with ExitStack() as stack:
        for module in modules:
            output: Any = model.get_submodule(module.consumer)
            read, written = (
                basis[:, : max(1, round((1 - share) * len(basis)))].to(output.weight)
                for basis in (bases.read[module.name], bases.written[module.name])
            )
            for name in module.producers:
                layer = model.get_submodule(name)
                stack.enter_context(
                    layer.register_forward_pre_hook(lambda _, x, basis=read: (x[0] @ basis @ basis.T, *x[1:]))
                )
            stack.enter_context(output.register_forward_hook(lambda _, x, y, basis=written: y @ basis @ basis.T))
        yield


@contextmanager
def fine_tuned(
    model: PreTrainedModel,
    modules: Sequence[PrunableModule],
    batches: Sequence[Batch],
    targets: Predictions,
    *,
    epochs: int = 3,
    rate: float = 5e-5,
) -> Iterator[None]:
    """Fine-tune the weights of attention, already `sliced`, inside the block; they are restored after it.

    AdamW trains only the q, k, v and o layers, without dropout, at a learning rate that falls to zero linearly. The
    loss of a classifier is the cross-entropy to the dense model's probabilities, that of a regressor the squared error
    to the dense model's output (`targets`, on the same batches), and that of a language model its own loss on the text.
    """
    names = dict.fromkeys(name for module in modules for name in module.layers)
    trained = [parameter for name in names for parameter in model.get_submodule(name).parameters()]
    before = [parameter.detach().clone() for parameter in trained]
    steps = epochs * len(batches)
    sizes = [size_of(batch) for batch in batches]
    wanted = [None] * len(batches) if targets.nll is not None else targets.values.split(sizes)
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    try:
        with frozen(model), output_alone(model), torch.enable_grad(), requiring_gradients(trained):
            generator = torch.Generator().manual_seed(0)
            for index in torch.cat([torch.randperm(len(batches), generator=generator) for _ in range(epochs)]).tolist():
                on_device = {key: value.to(model.device) for key, value in batches[index].items()}
                optimizer.zero_grad()
                _distance(model, on_device, wanted[index]).backward()
                optimizer.step()
                schedule.step()
            optimizer.zero_grad()
        yield
    finally:
        with torch.no_grad():
            for parameter, old in zip(trained, before, strict=True):
                parameter.copy_(old)


def _distance(model: PreTrainedModel, batch: dict[str, Tensor], target: Tensor | None) -> Tensor:
    if target is None:
        loss: Tensor = model(**batch).loss
        return loss
    task = task_of(model)
    output = task.output(model, batch)
    target = target.to(output.device)
    if target.shape[-1] == 1:
        return torch.nn.functional.mse_loss(output, target)
    if task.predicts == "labels":
        return torch.nn.functional.binary_cross_entropy_with_logits(output, target.sigmoid())
    return torch.nn.functional.cross_entropy(output, target.softmax(-1))
