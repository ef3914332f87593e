"""Tiny models whose checkpoints differ in how they name, fuse and tie their tensors, and digests of their files."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hies_export import load
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


def without_version5(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without `rope_parameters`. transformers 5 then reads the keys of version 4, as version 4 does.

    `scripts/try interop` asks version 4 itself.
    """
    rest = {key: value for key, value in config.items() if key != "rope_parameters"}
    return {key: without_version5(value) if isinstance(value, dict) else value for key, value in rest.items()}


def saved_by_version4(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Save a model with a config as transformers 4 writes it for rotary embeddings, and load it again."""
    model.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for part in (config, config.get("text_config", {})):
        if "rope_parameters" in part:
            part |= _of_version4(part["model_type"], part.pop("rope_parameters"))
    file.write_text(json.dumps(config))
    return load(folder)


def _of_version4(model_type: str, rotary: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of transformers 4 for parameters of rotary embeddings."""
    base, share = (
        ("rotary_emb_base", "rotary_pct") if model_type == "gpt_neox" else ("rope_theta", "partial_rotary_factor")
    )
    keys = {base: rotary.pop("rope_theta")}
    if "partial_rotary_factor" in rotary:
        keys[share] = rotary.pop("partial_rotary_factor")
    return keys | {"rope_scaling": None if rotary.get("rope_type", "default") == "default" else rotary}
