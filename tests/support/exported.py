"""Decoders that are exported to ONNX, and prompts for them."""

from __future__ import annotations

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from support.models import shake

VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 8,
}
TEXT = {
    "vocab_size": 100,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def llama(**options: object) -> LlamaForCausalLM:
    return shake(LlamaForCausalLM(LlamaConfig(**(TEXT | options))))


def llava() -> LlavaForConditionalGeneration:
    text = LlamaConfig(**TEXT)
    return shake(
        LlavaForConditionalGeneration(
            LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=text, image_token_index=99)
        )
    )


def padded_prompts(rows: int = 3, length: int = 9) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 99, (rows, length))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 2 * row] = 0
        ids[row, : 2 * row] = 0
    return {"input_ids": ids, "attention_mask": mask}
