"""Build models of real shapes with random weights, which is enough for time, and prune them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPVisionConfig,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MPNetConfig,
    MPNetForSequenceClassification,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

from hies_export import PrunableModule, PruningPlan, find_attention
from hies_export.kinds import BOTH
from hies_export.model.tokens import synthetic_batch
from hies_export.slim.bundles import cut_bundles
from hies_export.slim.cut import prune_units
from hies_export.units.find import find_modules
from hies_export.units.heads import tower_of

BERT_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
VIT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
LLAMA_1B = {
    **{"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"intermediate_size": 8192, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 4096},
    "tie_word_embeddings": True,
}
LLAMA_SMALL = {
    **{"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4},
    **{"intermediate_size": 1376, "vocab_size": 32000, "max_position_embeddings": 1024},
}
LLAMA_7B = {"vocab_size": 32064, "max_position_embeddings": 4096}  # the rest are the defaults of LlamaConfig
CLIP_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 96}


@dataclass(frozen=True)
class Shape:
    """A model to be built: its name, its config by image size (0 for text), its class, and how to make its inputs."""

    name: str
    config: Callable[[int], Any]
    model_class: type[PreTrainedModel]
    batch: Callable[[PreTrainedModel, int, int], dict[str, Tensor]]
    image_size: int = 0

    def build(self, *, device: str, dtype: torch.dtype) -> PreTrainedModel:
        """Build the model with random weights, in evaluation mode."""
        with _default_dtype(dtype), torch.device(device):
            return self.model_class(self.config(self.image_size)).eval().requires_grad_(False)

    def modules(self) -> tuple[PrunableModule, ...]:
        """Find its attention modules, without weights and on a small image."""
        small = 28 if self.image_size else 0
        with torch.device("meta"):
            model = self.model_class(self.config(small)).eval()
        return find_attention(model, self.batch(model, 2, 8))


def text_batch(model: PreTrainedModel, batch: int, sequence: int) -> dict[str, Tensor]:
    return synthetic_batch(model, batch=batch, sequence=sequence)


def image_text_batch(model: PreTrainedModel, batch: int, sequence: int) -> dict[str, Tensor]:
    """Make rows of one image and `sequence` text tokens after it."""
    vision = model.config.vision_config
    tokens = (vision.image_size // vision.patch_size) ** 2
    text = text_batch(model, batch, sequence)["input_ids"] % (model.config.image_token_id - 1)
    ids = torch.cat([torch.full((batch, tokens), model.config.image_token_id), text], dim=1)
    pixels = torch.randn(batch, 3, vision.image_size, vision.image_size)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def bert(name: str, **sizes: Any) -> Shape:
    return Shape(name, lambda _: BertConfig(**sizes), BertForSequenceClassification, text_batch)


def vit(name: str, image_size: int, patch_size: int = 16, **sizes: Any) -> Shape:
    def config(size: int) -> ViTConfig:
        return ViTConfig(**sizes, image_size=size, patch_size=min(patch_size, size // 2))

    return Shape(name, config, ViTForImageClassification, text_batch, image_size)


def llama(name: str, **sizes: Any) -> Shape:
    return Shape(name, lambda _: LlamaConfig(**sizes), LlamaForCausalLM, text_batch)


def llava(name: str, image_size: int, *, text: Mapping[str, Any], vision: Mapping[str, Any]) -> Shape:
    def config(size: int) -> LlavaConfig:
        language, tower = LlamaConfig(**text), CLIPVisionConfig(**vision, image_size=size, patch_size=14)
        image = language.vocab_size - 2
        return LlavaConfig(text_config=language, vision_config=tower, image_token_index=image)

    return Shape(name, config, LlavaForConditionalGeneration, image_text_batch, image_size)


def uniformly_pruned(model: PreTrainedModel, heads: float, modules: tuple[PrunableModule, ...]) -> PreTrainedModel:
    """Remove the same share of the heads of every layer, in a copy that shares its other weights with the model.

    Of a composite model, the language model loses heads.
    """
    towers = {module.name: tower_of(model, module) for module in modules}
    chosen = [m for m in modules if towers[m.name] == "language" or "language" not in towers.values()]
    removed = {module.name: round(heads * module.groups) for module in chosen}
    return cut_bundles(model, chosen, removed, unit="group")


def cut_like(model: PreTrainedModel, plan: PruningPlan, batch: dict[str, Tensor]) -> PreTrainedModel:
    """Remove the shares of heads and neurons that a plan removes from each layer, stretched over the model's layers.

    Which heads and neurons go does not matter for time, so it is the last of each layer.
    """
    modules = find_modules(model, batch, kinds=BOTH)
    selection = {}
    for kind in BOTH:
        known, own = list(plan.of_kind(kind).values()), [module for module in modules if module.kind == kind]
        for number, module in enumerate(own):
            part = known[number * len(known) // len(own)]
            groups = max(1, round(module.groups * len(part.units) / part.total))
            selection[module.name] = module.kept(range(groups * module.group_size))
    return prune_units(model, {module.name: selection[module.name] for module in modules}, modules)


# As microsoft/deberta-v3-base and sentence-transformers/all-mpnet-base-v2, with a smaller vocabulary: it takes no time.
DEBERTA = Shape(
    "DeBERTa-v3-base",
    lambda _: DebertaV2Config(
        **BERT_BASE,
        **{"vocab_size": 30522, "type_vocab_size": 0, "relative_attention": True, "position_biased_input": False},
        **{
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_buckets": 256,
        },
        **{"max_relative_positions": -1, "pooler_hidden_size": 768, "layer_norm_eps": 1e-7},
    ),
    DebertaV2ForSequenceClassification,
    text_batch,
)
MPNET = Shape(
    "all-mpnet-base-v2",
    lambda _: MPNetConfig(**BERT_BASE, vocab_size=30527, max_position_embeddings=514),
    MPNetForSequenceClassification,
    text_batch,
)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
