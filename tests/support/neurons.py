"""Find and cut the feed-forward neurons of tiny models by their names: by hand, without the package's own finder."""

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hies_export import find_attention
from hies_export.kinds import MLP
from hies_export.units.units import PrunableModule, Selection, Slice
from support.models import bert, causal_lm, text_batch

Case = tuple[PreTrainedModel, tuple[PrunableModule, ...], dict[str, torch.Tensor]]
"""A tiny model, its modules of both kinds, and a batch."""

# Name of a consumer -> names of its module and producers.
NAMES = (
    (r"(.*)\.mlp\.fc2", "{}.mlp", ("{}.mlp.fc1",)),
    (r"(.*)\.fc2", "{}", ("{}.fc1",)),
    (r"(.*)\.mlp\.down_proj", "{}.mlp", ("{}.mlp.gate_proj", "{}.mlp.up_proj")),
    (r"(.*layer\.\d+)\.output\.dense", "{}", ("{}.intermediate.dense",)),
)


def block(name: str, units: int, *, producers: Sequence[str], consumer: str) -> PrunableModule:
    """Return a block in which neuron i owns row i of every producer and column i of the consumer."""
    slices = tuple(Slice(producer, 0, torch.arange(units)) for producer in producers)
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


def half(modules: Sequence[PrunableModule]) -> Selection:
    """Return a selection that keeps every other neuron."""
    return {module.name: module.kept(range(0, module.units, 2)) for module in modules}


def one_by_one(batches: Sequence[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the samples of batches, each as a batch without padding."""
    for batch in batches:
        for i in range(len(next(iter(batch.values())))):
            one = {key: value[i : i + 1] for key, value in batch.items()}
            if "attention_mask" in one:
                real = one["attention_mask"][0].bool()
                one = {k: v[:, real] if v.shape == one["attention_mask"].shape else v for k, v in one.items()}
            yield one


def bert_case() -> Case:
    """Return a BERT, with its attention modules in front of its blocks."""
    model, batch = bert(), text_batch(2, 12, padding=False, labels=False)
    return model, (*find_attention(model, batch), *neurons(model)), batch


def llama_case() -> Case:
    """Return a decoder with grouped queries and tied embeddings, with modules of both kinds in turn."""
    model, batch = causal_lm(tie_word_embeddings=True), {"input_ids": torch.randint(5, 30, (2, 9))}
    modules = zip(find_attention(model, batch), neurons(model), strict=True)
    return model, tuple(module for pair in modules for module in pair), batch
