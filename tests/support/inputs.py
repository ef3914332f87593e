"""Make a batch that fits a model of any type, from the names of the inputs that it takes."""

import inspect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

ROWS, LENGTH, DECODER_LENGTH = 3, 11, 7


class NoTinyModel(Exception):
    """Say that no small configuration, or no batch, is known for a model type."""


def tiny_batch(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the first candidate batch that the model accepts."""
    reasons = []
    for batch in _candidates(model):
        try:
            with torch.no_grad():
                output = model(**batch)[0]
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:150]}")
            continue
        if not torch.isfinite(output).all():
            reasons.append("its output is not finite")
            continue
        return batch
    raise NoTinyModel(f"no batch fits it ({'; '.join(dict.fromkeys(reasons))})")


def _candidates(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Yield batches that may fit, first with all inputs that only few models take."""
    own = _own_inputs(model)
    for batch in (*_common(model), {}):
        yield batch | own
        if "bbox" in own:  # some want the places of words as parts of the page
            yield batch | own | {"bbox": own["bbox"] / 1000}
    if own:
        yield from _common(model)


def _drawing(seed: int) -> tuple[torch.Generator, Callable[..., Tensor]]:
    """Return a generator, and what draws a normal tensor of a shape from it."""
    generator = torch.Generator().manual_seed(seed)
    return generator, lambda *shape: torch.randn(shape, generator=generator)


def _own_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the inputs that only few models take, for those that this one takes."""
    config, (generator, normal) = model.config, _drawing(1)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(1, high, shape, generator=generator)

    def boxes() -> Tensor:
        corners = integers(500, ROWS, LENGTH, 4)
        corners[..., 2:] += corners[..., :2]  # left, top, right, bottom
        return corners

    def places() -> Tensor:
        return torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1).view(1, 16, 2)

    def patches() -> Tensor:
        return torch.cat(
            [places()[:, :12].repeat(ROWS, 1, 1) + 1, normal(ROWS, 12, config.vision_config.patch_embed_hidden_size)], 2
        )

    makers: dict[str, Callable[[], Tensor]] = {
        "bbox": boxes,
        "flattened_patches": patches,
        "visual_feats": lambda: normal(ROWS, 5, config.visual_feat_dim),
        "visual_pos": lambda: torch.rand(ROWS, 5, 4, generator=generator),
        "image_embeds_position_mask": lambda: (torch.arange(4 + LENGTH) < 4).repeat(ROWS, 1),
        "image_attention_mask": lambda: torch.ones(ROWS, LENGTH, 1, dtype=torch.int64),
        "query_embeds": lambda: normal(ROWS, 5, config.hidden_size),
        "qformer_input_ids": lambda: integers(90, ROWS, LENGTH),
        "text_inputs": lambda: integers(90, ROWS, LENGTH),
        "task_inputs": lambda: integers(90, ROWS, config.task_seq_len),
        "past_values_padding": lambda: torch.zeros(ROWS, config.context_length, dtype=torch.int64),
        "freq": lambda: torch.zeros(ROWS, 1, dtype=torch.int64),
        "merge_sizes": lambda: torch.full((ROWS,), 2),
        "pixel_position_ids": lambda: places().repeat(ROWS, 1, 1),
        "states": lambda: normal(ROWS, LENGTH, config.state_dim),
        "actions": lambda: normal(ROWS, LENGTH, getattr(config, "act_dim", 4)),
        "returns_to_go": lambda: normal(ROWS, LENGTH, 1),
        "timesteps": lambda: torch.arange(LENGTH).repeat(ROWS, 1),
    }
    return {name: make() for name, make in makers.items() if name in inspect.signature(model.forward).parameters}


def _common(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Yield batches of the inputs that many models take."""
    accepted = inspect.signature(model.forward).parameters
    generator, normal = _drawing(0)
    tokens = min(90, _first_number(model.config.get_text_config(), ("vocab_size",), 90))
    text = {
        "input_ids": torch.randint(3, tokens, (ROWS, LENGTH), generator=generator),
        "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.int64),
    }
    for row in range(1, ROWS):
        text["attention_mask"][row, LENGTH - 2 * row :] = 0
    decoder = {}
    if model.config.is_encoder_decoder and "decoder_input_ids" in accepted:
        decoder["decoder_input_ids"] = torch.randint(3, 90, (ROWS, DECODER_LENGTH), generator=generator)
    if "pixel_values" in accepted:
        vision = getattr(model.config, "vision_config", model.config)
        # Detectors have a backbone that leaves one token of a small image.
        size = getattr(vision, "image_size", 64 if hasattr(vision, "num_queries") else 16)
        if hasattr(model.config, "prompt_encoder_config"):
            size = model.config.prompt_encoder_config.image_size
        height, width = (size, size) if isinstance(size, int) else size if isinstance(size, (list, tuple)) else (16, 16)
        channels = getattr(vision, "num_channels", 3)
        if "spatial_shapes" in accepted:  # images as sequences of patches, which may differ in number
            patches = normal(ROWS, 16, channels * vision.patch_size**2)
            mask, shapes = torch.ones(ROWS, 16, dtype=torch.int64), torch.full((ROWS, 2), 4)
            images = {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}
            yield images | (text if "input_ids" in accepted else {})
        pixels = normal(ROWS, channels if isinstance(channels, int) else 3, height, width)
        if "pixel_position_ids" in accepted:
            yield {"pixel_values": normal(ROWS, 16, channels * vision.patch_size**2)}
        if "noise" in accepted:
            # What a model would draw at random to mask some patches.
            yield {"pixel_values": pixels, "noise": torch.rand(ROWS, 16, generator=generator)}
        if "input_ids" not in accepted:
            yield {"pixel_values": pixels} | decoder
            frames = _first_number(model.config, ("num_frames", "frames_per_clip"), 2)
            yield {"pixel_values": pixels[:, None].repeat(1, frames, 1, 1, 1)}
            if not hasattr(vision, "image_size"):  # each stage makes them smaller
                yield {"pixel_values": normal(ROWS, channels, 64, 64)}
        else:
            yield from _text_and_images(model, text, pixels)
    if "pixel_values_videos" in accepted and "input_ids" not in accepted:
        size = _first_number(model.config, ("crop_size", "image_size"), 16)
        yield {"pixel_values_videos": normal(ROWS, getattr(model.config, "frames_per_clip", 2), 3, size, size)}
    if "flattened_patches" in accepted:
        yield decoder  # the patches are an input of its own
    if "inputs" in accepted:
        yield {"inputs": text["input_ids"], "attention_mask": text["attention_mask"]}
    if "past_values" in accepted:
        yield from _series(model)
    if "input_features" in accepted:
        mels = _first_number(
            model.config, ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim"), 16
        )
        positions = getattr(model.config, "max_source_positions", LENGTH)
        yield {"input_features": normal(ROWS, mels, 2 * positions)} | decoder
        yield {"input_features": normal(ROWS, 4 * LENGTH, mels)} | decoder
        if "input_features_mask" in accepted:
            for shape in ((ROWS, mels, 2 * positions), (ROWS, 4 * LENGTH, mels)):
                for frames in shape[1:]:
                    yield {"input_features": normal(*shape), "input_features_mask": torch.ones(ROWS, frames).long()}
        if "is_longer" in accepted:  # spectra as images
            yield text | {"input_features": normal(ROWS, 1, mels, mels)}
    if "input_values" in accepted:
        yield {"input_values": normal(ROWS, 4000)} | decoder
        yield {"input_values": normal(ROWS, 1, 4000)}
        frames = _first_number(model.config, ("max_length",), 64)
        yield {"input_values": normal(ROWS, frames, _first_number(model.config, ("num_mel_bins",), 16))}
    if "grid_thw" in accepted:  # images of a whole batch as one sequence of patches
        config = model.config
        width = getattr(config, "in_channels", 3) * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
        yield {next(iter(accepted)): normal(ROWS * 16, width), "grid_thw": torch.tensor([[1, 4, 4]] * ROWS)}
    if "input_ids" in accepted:
        yield text | decoder
        if "bbox" in accepted:
            yield text | {"bbox": torch.zeros(ROWS, LENGTH, 4, dtype=torch.int64)} | decoder
        yield {"input_ids": text["input_ids"]} | decoder


def _series(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Yield series of numbers: of several channels, with times and a future, or plain ones."""
    config, (_, normal) = model.config, _drawing(2)
    length = _first_number(config, ("context_length",), 16)
    if hasattr(config, "lags_sequence"):
        past, future = length + max(config.lags_sequence), config.prediction_length
        yield {
            "past_values": normal(ROWS, past),
            "past_time_features": normal(ROWS, past, config.num_time_features),
            "past_observed_mask": torch.ones(ROWS, past),
            "future_values": normal(ROWS, future),
            "future_time_features": normal(ROWS, future, config.num_time_features),
        }
    elif hasattr(config, "num_input_channels"):
        yield {"past_values": normal(ROWS, length, config.num_input_channels)}
    else:
        yield {"past_values": normal(ROWS, length)}


def _first_number(config: PreTrainedConfig, names: tuple[str, ...], otherwise: int) -> int:
    """Return the first of the named attributes of a config that is a number."""
    return next((v for name in names if isinstance(v := getattr(config, name, None), int)), otherwise)


def _text_and_images(model: PreTrainedModel, text: dict[str, Tensor], pixels: Tensor) -> Iterator[dict[str, Tensor]]:
    """Yield images with text that begins with their image tokens, then images with text that has none."""
    ids, mask = text["input_ids"], text["attention_mask"]
    token = _first_number(model.config, ("image_token_id", "image_token_index"), 99)
    accepted = inspect.signature(model.forward).parameters
    for images in (pixels, pixels[:, None]):
        try:
            with torch.no_grad():
                count = _tokens_of(model, images)
        except Exception:  # not all models make features of plain images
            continue
        image = torch.full((ROWS, count), token)
        batch = {
            "input_ids": torch.cat([image, ids], 1),
            "attention_mask": torch.cat([torch.ones_like(image), mask], 1),
            "pixel_values": images,
        }
        if "token_type_ids" in accepted:
            yield batch | {"token_type_ids": (batch["input_ids"] == token).long()}
        yield batch
    frames = _first_number(getattr(model.config, "vision_config", model.config), ("num_frames",), 1)
    yield text | {"pixel_values": pixels}
    yield text | {"pixel_values": pixels[:, None].repeat(1, frames, 1, 1, 1)}


def _tokens_of(model: PreTrainedModel, pixels: Tensor) -> int:
    """Return how many tokens a row has for its image."""
    output = model.get_image_features(pixel_values=pixels)
    features = getattr(output, "pooler_output", output)
    features = output.last_hidden_state if features is None else features
    if isinstance(features, (list, tuple)):
        features = torch.cat([f.reshape(-1, f.shape[-1]) for f in features])
    return int(features.reshape(-1, features.shape[-1]).shape[0] // ROWS)
