"""Generate text greedily, from a checkpoint in torch or from an exported folder in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..checkpoint.classes import AGAIN
from ..checkpoint.folders import Contents, refuse_other
from ..checkpoint.load import load
from ..data.columns import image_of_file
from ..data.processors import load_processor
from ..errors import DataError, RecipeError, RequestError, refusing
from ..tasks import TASKS
from .onnx.generator import OnnxGenerator
from .runtimes.ort import DECODER_FILE, ONNX_FILE, QUANTIZED_FILE


def generate_text(
    folder: str | Path, prompts: Sequence[str], *, images: Sequence[str | Path] = (), max_new_tokens: int = 20
) -> list[str]:
    """Continue prompts with the most likely tokens.

    Args:
        folder: A folder that `export_onnx` wrote, run in ONNX Runtime; or a checkpoint, slim or not, run in torch in
            float32.
        prompts: Texts, padded on the left to run together.
        images: Files, one for each prompt or one for all; a prompt without an image token gets it in front.
        max_new_tokens: Most tokens to add.

    Returns:
        The new text of each prompt, without special tokens.

    Raises:
        RequestError: The folder does not generate, or has no tokenizer; a prompt or an image cannot be read.
    """
    if max_new_tokens < 1:
        raise RecipeError([f"max_new_tokens must be at least 1, got {max_new_tokens}"])
    refuse_other(folder, Contents.ONNX)
    task = TASKS["image-text-to-text" if images else "text-generation"]
    processor = load_processor(folder, task=task, for_prompts=True)
    batch = encode_prompts(processor, prompts, images)
    tokens = load_generator(folder)(batch, max_new_tokens)
    return processor.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def encode_prompts(processor: Any, prompts: Sequence[str], images: Sequence[str | Path] = ()) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask`, (batch, sequence), of prompts, and `pixel_values` of images.

    Raises DataError if there is no prompt, one has no tokens, or an image does not decode or has no prompt.
    """
    if not prompts:
        raise DataError("at least one prompt is needed, got none")
    if images and len(images) not in (1, len(prompts)):
        raise DataError(f"images must be one for all prompts or one for each of {len(prompts)}, got {len(images)}")
    options: dict[str, Any] = {"padding": True, "return_tensors": "pt"}
    if images:
        pictures = [image_of_file(file) for file in images]
        token = processor.image_token
        texts = [prompt if token in prompt else f"{token}\n{prompt}" for prompt in prompts]
        encoded = processor(text=texts, images=pictures * (len(prompts) // len(pictures)), **options)
    else:
        encoded = processor(list(prompts), **options)
    batch = {name: encoded[name] for name in ("input_ids", "attention_mask", "pixel_values") if name in encoded}
    empty = [prompt for prompt, mask in zip(prompts, batch["attention_mask"], strict=True) if not mask.any()]
    if empty or not batch["input_ids"].numel():
        raise DataError(f"a prompt must have at least one token, got {(empty or prompts)[0]!r}")
    return batch


def load_generator(folder: str | Path) -> Callable[[dict[str, Tensor], int], Tensor]:
    """Load a function of a batch and a number of tokens to add, which returns all tokens, (batch, sequence).

    The folder is as `generate_text` takes; raises RequestError if it does not generate.
    """
    if any((Path(folder) / name).is_file() for name in (ONNX_FILE, QUANTIZED_FILE, DECODER_FILE)):
        exported = OnnxGenerator.from_folder(folder)
        return lambda batch, most: exported.generate(**batch, max_new_tokens=most)
    model = load(folder, dtype=torch.float32).eval()
    if not model.can_generate():
        raise RequestError(f"a checkpoint must generate text to be prompted, and {type(model).__name__} does not")
    own = model.generation_config
    padding = own.pad_token_id if own is not None else None

    def generate(batch: dict[str, Tensor], most: int) -> Tensor:
        greedy = GenerationConfig(
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            max_new_tokens=most,
            pad_token_id=0 if padding is None else padding,
        )
        with refusing(f"the model at {folder} must continue the prompts, and fails", AGAIN):
            return model.generate(**batch, generation_config=greedy)

    return generate
