"""Generate text greedily, from an exported folder in ONNX Runtime or from a checkpoint in torch."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ...checkpoint.beside import fetch
from ...checkpoint.classes import AGAIN, load_config
from ...checkpoint.folders import Contents, refuse_other
from ...checkpoint.load import load
from ...data.columns import image_of_file
from ...data.processors import load_processor
from ...errors import DataError, RecipeError, RequestError, refusing
from ...model.tokens import longest_sequence, token_ids
from ...tasks import TASKS
from ..runtimes.ort import DECODER_FILE, EMBED_FILE, ONNX_FILE, QUANTIZED_FILE, VISION_FILE, OnnxRuntime
from .multimodal import merge_images


@dataclass(frozen=True)
class OnnxGenerator:
    """Greedy generation in ONNX Runtime; the cache stays in ONNX Runtime's memory between steps."""

    decoder: OnnxRuntime  # from tokens or embeddings, and cache, to logits and cache
    embed_tokens: OnnxRuntime | None  # from tokens to embeddings; None if the decoder takes tokens
    vision_encoder: OnnxRuntime | None  # from images to features; None for text
    image_token_id: int | None  # the token that stands for one image feature; None for text
    positions: int | None  # largest number of tokens in a row; None for no limit
    eos_token_ids: tuple[int, ...]  # the tokens that end a row
    pad_token_id: int  # the token that fills a row after its end

    @classmethod
    def from_folder(cls, folder: str | Path, *, runtime: type[OnnxRuntime] = OnnxRuntime) -> OnnxGenerator:
        """Load a folder with an exported decoder; raises RequestError if it has none."""
        folder = Path(folder)
        has_vision = (folder / DECODER_FILE).is_file()  # only a vision-language model has that file
        sources = [folder / name for name in (DECODER_FILE, EMBED_FILE, VISION_FILE)] if has_vision else [folder]
        config = load_config(folder)
        ends, padding = _special_tokens(folder, config)
        decoder, *others = (runtime(source, threads=torch.get_num_threads()) for source in sources)
        if "past_key_values.0.key" not in decoder.inputs:
            raise RequestError(
                f"a folder to generate from must have a decoder, which takes past_key_values, and the graph in "
                f"{folder} takes {', '.join(decoder.inputs)}: an encoder does not generate"
            )
        embed_tokens, vision_encoder = (others[0], others[1]) if has_vision else (None, None)
        image_token_id = config.image_token_id if has_vision else None
        return cls(decoder, embed_tokens, vision_encoder, image_token_id, longest_sequence(config), ends, padding)

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor | None = None, *, max_new_tokens: int
    ) -> Tensor:
        """Return prompts, padded on the left, and their greedy continuation, (batch, sequence + new).

        After its end, a row is filled with padding until all rows have ended. Raises DataError if prompts are too long,
        or do not fit the images.
        """
        if self.positions is not None and input_ids.shape[1] + max_new_tokens > self.positions:
            raise DataError(
                f"prompt and new tokens must fit into the model's {self.positions} positions, got {input_ids.shape[1]} "
                f"and {max_new_tokens}"
            )
        if pixel_values is None and self.image_token_id is not None and (input_ids == self.image_token_id).any():
            raise DataError(f"prompts with image tokens (id {self.image_token_id}) need pixel_values, got none")
        tokens, mask = input_ids, attention_mask
        ends = torch.tensor(self.eos_token_ids, dtype=torch.int64)
        finished = torch.zeros(len(tokens), dtype=torch.bool)
        inputs, cache = self.decoder_inputs(tokens, pixel_values), None
        for _ in range(max_new_tokens):
            logits, cache = self.step(inputs, mask, cache)
            chosen = logits[:, -1].argmax(-1).masked_fill(finished, self.pad_token_id)  # (batch)
            tokens = torch.cat([tokens, chosen[:, None]], dim=1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            finished |= torch.isin(chosen, ends)
            if finished.all():
                break
            inputs = self.decoder_inputs(chosen[:, None])
        return tokens

    def decoder_inputs(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> dict[str, Any]:
        """Return the decoder's inputs: `input_ids` (batch, sequence), or `inputs_embeds` (batch, sequence, hidden)."""
        if self.embed_tokens is None:
            return {"input_ids": input_ids}
        embeds = _run(self.embed_tokens, {"input_ids": input_ids})["inputs_embeds"]
        # Without images, as for a generated image token, the token keeps its own embedding, as in torch.
        if pixel_values is None or self.vision_encoder is None or self.image_token_id is None:
            return {"inputs_embeds": embeds}
        features = _run(self.vision_encoder, {"pixel_values": pixel_values})["image_features"]
        return {"inputs_embeds": merge_images(_tensor(embeds), input_ids, _tensor(features), self.image_token_id)}

    def step(
        self, inputs: Mapping[str, Any], attention_mask: Tensor, cache: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Run the decoder once on a prompt, a chunk or a single token, as `decoder_inputs` returns it.

        The mask, (batch, past + sequence), is of all tokens, the cached ones first. Returns logits in float32, (batch,
        sequence, vocabulary), and the cache for the next step by input name, as ONNX Runtime's own values.
        """
        outputs = _run(self.decoder, {**inputs, "attention_mask": attention_mask, **(cache or {})})
        logits = _tensor(outputs.pop("logits")).float()
        return logits, {name.replace("present", "past_key_values", 1): value for name, value in outputs.items()}


def _run(runtime: OnnxRuntime, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Run a graph; return its outputs by name, as ONNX Runtime's own values."""
    return runtime.values(runtime.run_once(batch))


def _tensor(value: Any) -> Tensor:
    return torch.from_numpy(value.numpy())


def _special_tokens(folder: Path, config: Any) -> tuple[tuple[int, ...], int]:
    """Return the ids of the tokens that end a text, and that of padding, by the files beside a graph."""
    with refusing(f"a generation config must be what transformers wrote, but that of {folder} is not", AGAIN):
        if (folder / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(folder)
        else:
            generation = GenerationConfig.from_model_config(config)
        ends = tuple(operator.index(token) for token in token_ids(generation.eos_token_id))  # refuses what is no number
        if generation.pad_token_id is not None:
            return ends, operator.index(generation.pad_token_id)
        return ends, ends[0] if ends else 0  # as in transformers


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
    processor = load_processor(fetch(folder), task=task, for_prompts=True)
    batch = encode_prompts(processor, prompts, images)
    tokens = _continue(folder, batch, max_new_tokens)
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
        pictures, token = [image_of_file(file) for file in images], processor.image_token
        if len(pictures) == 1:
            pictures *= len(prompts)
        texts = [prompt if token in prompt else f"{token}\n{prompt}" for prompt in prompts]
        encoded = processor(text=texts, images=pictures, **options)
    else:
        encoded = processor(list(prompts), **options)
    batch = {name: encoded[name] for name in ("input_ids", "attention_mask", "pixel_values") if name in encoded}
    for prompt, mask in zip(prompts, batch["attention_mask"], strict=True):
        if not mask.any():
            raise DataError(f"a prompt must have at least one token, got {prompt!r}")
    return batch


def _continue(folder: str | Path, batch: dict[str, Tensor], max_new_tokens: int) -> Tensor:
    """Return the ids of prompts with up to `max_new_tokens` more; raise RequestError if the folder cannot generate."""
    if any((Path(folder) / name).is_file() for name in (ONNX_FILE, QUANTIZED_FILE, DECODER_FILE)):
        return OnnxGenerator.from_folder(folder).generate(**batch, max_new_tokens=max_new_tokens)
    model = load(folder, dtype=torch.float32).eval()
    if not model.can_generate():
        raise RequestError(f"a checkpoint must generate text to be prompted, and {type(model).__name__} does not")
    # What is not set here is the model's own: the tokens that end a text, and padding, by default the first of these.
    greedy = GenerationConfig(do_sample=False, num_beams=1, repetition_penalty=1.0, max_new_tokens=max_new_tokens)
    with refusing(f"the model at {folder} must continue the prompts, and fails", AGAIN):
        return model.generate(**batch, generation_config=greedy)
