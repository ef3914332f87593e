"""Find and cut the feed-forward neurons of tiny models by their names: by hand, without the package's own finder."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hies_export.kinds import MLP
from hies_export.units import PrunableModule, Selection, Slice, Span

# Name of a consumer -> names of its module and producers.
NAMES = (
    (r"(.*)\.mlp\.fc2", "{}.mlp", ("{}.mlp.fc1",)),
    (r"(.*)\.fc2", "{}", ("{}.fc1",)),
    (r"(.*)\.mlp\.down_proj", "{}.mlp", ("{}.mlp.gate_proj", "{}.mlp.up_proj")),
    (r"(.*layer\.\d+)\.output\.dense", "{}", ("{}.intermediate.dense",)),
)


def block(name: str, units: int, *, producers: Sequence[str], consumer: str) -> PrunableModule:
    """Return a block in which neuron i owns row i of every producer and column i of the consumer."""
    rows = (Span(0, units, 0, 1, 1),)
    slices = tuple(Slice(producer, 0, rows) for producer in producers)
    return PrunableModule(name=name, units=units, kind=MLP, unit_width=1, consumer=consumer, slices=slices)


def neurons(model: PreTrainedModel) -> tuple[PrunableModule, ...]:
    """Return the feed-forward blocks of a tiny BERT, ViT, CLIP, OPT or LLaMA."""
    found = []
    for name, layer in model.named_modules():
        for pattern, module, producers in NAMES:
            match = re.fullmatch(pattern, name)
            if match:
                units = layer.weight.shape[1]
                found.append(
                    block(
                        module.format(match[1]), units, producers=[p.format(match[1]) for p in producers], consumer=name
                    )
                )
                break
    return tuple(found)


# By the names of their models; the patterns tell them apart.
bert_blocks = llama_blocks = neurons


def half(modules: Sequence[PrunableModule]) -> Selection:
    """Return a selection that keeps every other neuron."""
    return {module.name: module.kept(range(0, module.units, 2)) for module in modules}


def cut_neurons(dense: PreTrainedModel, selection: Selection, modules: Sequence[PrunableModule]) -> PreTrainedModel:
    """Return a copy of a model without the neurons that a selection does not keep."""
    slim = copy.deepcopy(dense)
    for module in modules:
        kept = list(selection[module.name].units)
        for part in module.slices:
            layer = slim.get_submodule(part.tensor)
            layer.weight = torch.nn.Parameter(layer.weight.detach()[kept])
            if layer.bias is not None:
                layer.bias = torch.nn.Parameter(layer.bias.detach()[kept])
        layer = slim.get_submodule(module.consumer)
        layer.weight = torch.nn.Parameter(layer.weight.detach()[:, kept])
    return slim


def one_by_one(batches: Sequence[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the samples of batches, each as a batch without padding."""
    for batch in batches:
        for i in range(len(next(iter(batch.values())))):
            one = {key: value[i : i + 1] for key, value in batch.items()}
            if "attention_mask" in one:
                real = one["attention_mask"][0].bool()
                one = {k: v[:, real] if v.shape == one["attention_mask"].shape else v for k, v in one.items()}
            yield one
