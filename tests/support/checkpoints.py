"""Tiny models whose checkpoints differ in how they name, fuse and tie their tensors, and digests of their files."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hies_export.model.tokens import synthetic_batch
from support.families import architecture, decoder, gpt2
from support.models import bert, llava, vit


def llava_batch() -> dict[str, Tensor]:
    """Return two samples of an image and six words."""
    ids = torch.cat(
        [torch.full((2, 16), 4), torch.randint(5, 32, (2, 6))], dim=1
    )  # 4 is the token of an image's patches
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 16, 16)}


def batch_for(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return two samples that a model takes."""
    return llava_batch() if model.config.model_type == "llava" else synthetic_batch(model, batch=2, sequence=8)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama groups": decoder("Llama"),
    "llama bfloat16, tied": lambda: decoder("Llama", tie_word_embeddings=True)().to(torch.bfloat16),
    "bert": bert,
    "bert masked, tied": architecture("Bert", "ForMaskedLM"),
    "vit, older names": vit,
    "gpt2, transposed": gpt2,
    "phi3, fused": decoder("Phi3"),
    "gpt-oss, sinks": decoder("GptOss", head_dim=8, num_local_experts=3, num_experts_per_tok=2),
    "cohere, a norm for every head": decoder("Cohere", use_qk_norm=True),
    "mixtral, merged experts": decoder("Mixtral", num_local_experts=3),
    "llava, both towers": llava,
}


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a checkpoint but for its plan."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.name != "hies_plan.json"}
