"""Make random batches, and describe the tokens of a batch: which are real (no padding), their positions and number."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import RecipeError, RequestError, UnsupportedModelError
from .copies import share_weights
from .internals import auto_classes
from .modes import output_alone

# These models number positions from pad_token_id + 1, so their first pad_token_id + 1 position embeddings are unused.
_POSITIONS_START_AFTER_PAD = {
    *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm"),
    *("mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}
# So many tokens show what a model's code does with a text: its windows and chunks are rarely longer.
SHORT = 64
# Attributes of a config: placeholder tokens for the features of an image, a video or a sound.
_PLACEHOLDERS = tuple(f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index"))


def longest_sequence(config: Any) -> int | None:
    """Return the longest sequence, in tokens, that a model of this configuration takes; None if there is no limit."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is None or positions < 1:  # some configurations use -1 for no limit
        return None
    if numbers_by_padding(config) and text.pad_token_id is not None:
        positions -= text.pad_token_id + 1
    return positions


def shortest_limit(*limits: Any) -> int | None:
    """Return the smallest of limits in tokens; None where all are None, or so large that they stand for no limit."""
    return min((int(n) for n in limits if isinstance(n, (int, float)) and 0 < n < 1e9), default=None)


def is_token(number: Any, config: Any) -> TypeGuard[int]:
    """Return whether a value is the id of a token in the vocabulary of a model of this configuration."""
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    is_number = isinstance(number, int) and not isinstance(number, bool)
    return is_number and number >= 0 and (vocabulary is None or number < vocabulary)


def token_ids(value: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return as a tuple the value of a config's field that has no id, one or several, such as `eos_token_id`."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def finds_end_by_padding(model: PreTrainedModel) -> bool:
    """Return whether a model classifies by the last token that is not padding, as a decoder with such a head does."""
    # The code of `forward` then names this field of the config.
    reads_padding = "pad_token_id" in inspect.unwrap(type(model).forward).__code__.co_names
    return reads_padding and "AutoModelForSequenceClassification" in _auto_classes_of(model)


def numbers_by_padding(config: Any) -> bool:
    """Return whether a model counts positions from `pad_token_id` + 1 on, over tokens that are not padding."""
    return config.get_text_config().model_type in _POSITIONS_START_AFTER_PAD


def real_tokens(model: PreTrainedModel, name: str, batch: Mapping[str, Tensor], y: Tensor) -> Tensor:
    """Return a mask, (batch, tokens), of the real tokens in an attention module's output y, (batch, tokens, width).

    The `attention_mask` describes text only: all patches of an image are real, even if an image has as many patches as
    the text has tokens.
    """
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape == y.shape[:2] and _reads_text(model, name):
        return mask.bool().to(y.device)
    return torch.ones(y.shape[:2], dtype=torch.bool, device=y.device)


def refuse_encoder_decoder(config: Any, name: str) -> None:
    """Refuse, by an UnsupportedModelError, a class whose models have an encoder and a decoder, such as T5 and BART.

    The encoder alone of such a model, as sentence-transformers loads it, may have the same config.
    """
    if config.is_encoder_decoder and not name.endswith(("Encoder", "EncoderModel")):
        raise UnsupportedModelError(
            f"encoder-decoders cannot be pruned, got a {name}; give a model that is an encoder or a decoder"
        )


def judged_tokens(model: PreTrainedModel, batch: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """Return a mask of the tokens of a text, shaped as `like`, (batch, tokens), that a language model has to predict.

    These are all real tokens that follow a real one, except placeholders of images, videos and audio. A mask and tokens
    of another shape are those of an encoder, and are not used.
    """
    by_token = {name: tensor for name, tensor in batch.items() if tensor.shape == like.shape}
    real = by_token.get("attention_mask", torch.ones_like(like)).bool()
    judged = real.clone()
    judged[:, 1:] &= real[:, :-1]  # with padding on the left, nothing real predicts the first token
    ids = by_token.get("input_ids")
    return judged if ids is None else judged & ~torch.isin(ids, placeholders(model.config).to(ids))


def placeholders(config: Any) -> Tensor:
    """Return the ids of the tokens that stand for features of an image, a video or a sound, (tokens,) int64."""
    ids = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return torch.tensor([token for token in ids if isinstance(token, int)], dtype=torch.int64)


def refuse_tokens_first(model: PreTrainedModel, name: str, batch: Mapping[str, Tensor], x: Tensor) -> None:
    """Refuse, by an UnsupportedModelError, a module whose input x is (tokens, samples, width), as XLNet's.

    Taken for (samples, tokens, width), it would mix samples. With one sample there is nothing to mix.
    """
    tokens, samples = x.shape[:2]
    is_swapped = any(tensor.shape == (samples, tokens) for tensor in batch.values())
    if x.dim() == 3 and samples > 1 and samples != tokens and is_swapped and _reads_text(model, name):
        raise UnsupportedModelError(
            f"a module must read samples before tokens, but {name} of {type(model).__name__} reads {tokens} tokens of "
            f"{samples} samples as {tuple(x.shape)}; make batches of one sample, or leave the module alone"
        )


def _reads_text(model: PreTrainedModel, name: str) -> bool:
    """Return whether the innermost `PreTrainedModel` that is or holds a module takes text."""
    innermost: Any = model.get_submodule(name)
    while name and not isinstance(innermost, PreTrainedModel):
        name = name.rpartition(".")[0]
        innermost = model.get_submodule(name)  # in the end `model` itself, whose name is empty
    return innermost.main_input_name == "input_ids"


def synthetic_batch(
    model: PreTrainedModel,
    *,
    batch: int,
    sequence: int | None = None,
    image: Sequence[int] | None = None,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Make random inputs of one shape, as the model's task takes them.

    They are `input_ids` and a mask of ones, both (batch, sequence), or `pixel_values`, (batch, *image), or if a
    `sequence` is given, all three for a model of images that also reads text. An `image`, (channels, height, width),
    has by default the size of the config, though processors may make others. Multiple choice has one choice per row,
    so its tokens are (batch, 1, sequence). Tokens that stand for images, videos or audio are not drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    accepted = inspect.signature(model.forward).parameters
    if model.main_input_name == "pixel_values":
        images = {"pixel_values": random_images(model.config, batch, generator, image)}
        if sequence is None or "input_ids" not in accepted:
            return images
        return images | _random_text(model, batch, sequence, generator)
    if "input_ids" not in accepted:
        raise RequestError(
            f"random inputs can be made for models of text and of images, and {type(model).__name__} takes "
            f"{model.main_input_name}"
        )
    return _random_text(model, batch, sequence, generator)


def sample_batch(model: PreTrainedModel, *, sequence: int | None = None) -> dict[str, torch.Tensor]:
    """Make random inputs on which the modules of a model are found: two short rows of `synthetic_batch`.

    A decoder that classifies reads the last token that is not padding. If its config names no padding token, it takes
    one row only.
    """
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    takes_one_row = pad is None and "AutoModelForSequenceClassification" in _auto_classes_of(model)
    return synthetic_batch(model, batch=1 if takes_one_row else 2, sequence=sequence)


def _auto_classes_of(model: PreTrainedModel) -> list[str]:
    return auto_classes(type(model).__name__, model.config.model_type)


def random_images(config: Any, batch: int, generator: torch.Generator, image: Sequence[int] | None = None) -> Tensor:
    """Return normal values, (batch, *image) float32; by default in the size in the config, or in its image tower's."""
    if image is None:
        configs = [config, getattr(config, "vision_config", None), getattr(config, "encoder", None)]
        vision = next((tower for tower in configs if hasattr(tower, "image_size")), config)
        size = getattr(vision, "image_size", 224)
        sides = size if isinstance(size, (list, tuple)) else (size, size)
        image = (getattr(vision, "num_channels", 3), *sides)
    return torch.randn((batch, *image), generator=generator, dtype=torch.float32)


def _random_text(
    model: PreTrainedModel, batch: int, sequence: int | None, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return random tokens and a mask of ones under the names of the model's inputs; see `synthetic_batch`."""
    config = model.config
    refuse_encoder_decoder(config, type(model).__name__)
    longest = longest_sequence(config)
    if sequence is None or sequence < 1 or (longest is not None and sequence > longest):
        allowed = f"1..{'any' if longest is None else longest}"
        raise RecipeError(f"sequence must be in {allowed} for {type(model).__name__}, got {sequence}")
    vocabulary = getattr(config.get_text_config(), "vocab_size", 256)  # CANINE has none: it reads code points
    forbidden = placeholders(config)
    substitute = next(token for token in range(vocabulary) if token not in forbidden.tolist())
    ids = torch.randint(0, vocabulary, (batch, sequence), generator=generator)
    ids = ids.where(~torch.isin(ids, forbidden), substitute)
    if "AutoModelForMultipleChoice" in _auto_classes_of(model):
        ids = ids[:, None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def first_samples(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the first two samples of a batch, enough to find heads or to trace a graph."""
    return {key: value[:2] for key, value in batch.items()}


def short_samples(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the first two samples of a batch of texts, cut to `SHORT` tokens that are real in both.

    That is enough for what depends on a model's code alone. A batch stays whole if one of its inputs has axes other
    than (samples, tokens, ...) or (samples,), or if fewer than `SHORT` tokens are real in both samples.
    """
    shape = batch["input_ids"].shape if "input_ids" in batch else ()
    by_token = [name for name, tensor in batch.items() if tensor.dim() > 1]
    if len(shape) != 2 or any(batch[name].shape[:2] != shape for name in by_token):
        return dict(batch)
    samples = first_samples(batch)
    real = samples.get("attention_mask", torch.ones(shape)).bool().all(0)
    if len(columns := real.nonzero()[:SHORT, 0]) < SHORT:
        return dict(batch)
    return {name: t[:, columns.to(t.device)] if name in by_token else t for name, t in samples.items()}


def sequence_length(model: PreTrainedModel, batch: Mapping[str, Any]) -> int:
    """Return the number of tokens in each row, padding included, or of hidden states of each image."""
    if "input_ids" in batch:
        return int(batch["input_ids"].shape[-1])
    # Only the model's code knows how many patches an image has; on the meta device it computes shapes alone.
    base = share_weights(model.base_model, device="meta").eval()
    inputs = {name: tensor.to("meta") for name, tensor in forward_inputs(base, batch).items()}
    with output_alone(base), torch.no_grad():
        return int(base(**inputs).last_hidden_state.shape[1])


def count_tokens(model: PreTrainedModel, batch: Mapping[str, Any]) -> int:
    """Return the number of real tokens of a batch; of images, the number of patches and special tokens."""
    mask = batch.get("attention_mask")
    if mask is not None:
        return int(mask.sum())
    return len(next(iter(batch.values()))) * sequence_length(model, batch)  # samples, the first axis of any input


def forward_inputs(model: torch.nn.Module, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch that the model's forward takes, in its order, without labels."""
    accepted = [name for name in inspect.signature(model.forward).parameters if name != "labels"]
    return {name: batch[name] for name in accepted if isinstance(batch.get(name), torch.Tensor)}


def positions_of(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return each token's position, (batch, sequence), from the first real one; left padding has position 0."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
