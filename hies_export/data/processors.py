"""Load tokenizers and image processors, and make them agree with a model on padding, length and vocabulary."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import PIL.Image
import torch
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel

from ..errors import DataError, refusing
from ..model.internals import AutoImageProcessor, never_asking
from ..model.tokens import finds_end_by_padding, is_token, longest_sequence, shortest_limit
from .batches import FILL, image_shape, padded

logger = logging.getLogger(__name__)


class TaskInputs(Protocol):
    """A task, by its name and whether it reads texts, images or both: all that its processor depends on."""

    name: str
    text: bool
    images: bool


# Whether a task reads texts, and images -> the loader of its processor, and the processor's name in messages.
LOADERS: dict[tuple[bool, bool], tuple[Any, str]] = {
    (True, False): (AutoTokenizer, "a tokenizer"),
    (False, True): (AutoImageProcessor, "an image processor"),
    (True, True): (AutoProcessor, "a processor of images and text"),
}
# Height and width of an image that shows in which size a processor gives images to a model.
SQUARE = 224
# No model has as many embeddings; the largest vocabularies have 262,144 tokens.
MOST_TOKENS = 1 << 24
REMEDY = "save the one the model was trained with into that folder with save_pretrained"


def tokenizer_of(processor: Any) -> Any:
    """Return the tokenizer of a processor; a tokenizer is its own."""
    return getattr(processor, "tokenizer", processor)


def load_processor(path: str | Path, *, task: TaskInputs, for_prompts: bool = False) -> Any:
    """Load the tokenizer, the image processor, or the processor of both that a task needs.

    Images always go through the Pillow backend, so results do not depend on torchvision being installed. Code of the
    checkpoint is neither executed nor asked about. With `for_prompts` it pads on the left, with its end-of-text or
    unknown token if it has no padding token.

    Raises:
        DataError: There is none, or it does not work.
    """
    loader, what = LOADERS[task.text, task.images]
    needs = f"prompts need {what}" if for_prompts else f"{task.name} needs {what}"
    options: dict[str, Any] = {"trust_remote_code": False}
    if task.images:
        options["backend"] = "pil"
    with refusing(f"{needs}, but none could be loaded from {path}", REMEDY, DataError):
        with never_asking():
            loaded = loader.from_pretrained(path, **options)
        tokenizer = tokenizer_of(loaded)
        words = set()
        if hasattr(tokenizer, "get_vocab"):
            words = token_numbers(tokenizer) - {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    with refusing(f"{needs} that works, but the one of {path} does not", REMEDY, DataError):
        _try_out(loaded, task)
    if not task.text:
        return loaded
    if task.images and not (hasattr(loaded, "tokenizer") and hasattr(loaded, "image_processor")):
        raise DataError(f"{needs}, but {path} has only a {type(loaded).__name__}; {REMEDY}")
    # If the files are missing, transformers 5 makes a tokenizer with only special tokens.
    if len(words) < 2:
        raise DataError(f"{needs}, but the one of {path} has no vocabulary; {REMEDY}")
    if for_prompts:
        tokenizer.padding_side = "left"
        give_padding(tokenizer)
    return loaded


def _try_out(processor: Any, task: TaskInputs) -> None:
    """Call a processor once, as transformers reads many settings of its files only then; any error means a refusal."""
    if task.text:
        # A copy, as a fast tokenizer keeps how it was last called, and saves that.
        copy.deepcopy(tokenizer_of(processor))([""], truncation=True, verbose=False)
    if task.images:
        image = PIL.Image.new("RGB", (64, 48))
        for name, value in getattr(processor, "image_processor", processor)(image, return_tensors="pt").items():
            if not torch.as_tensor(value).isfinite().all():
                raise ValueError(f"it makes NaN or infinity of a black image's {name}")


def token_numbers(tokenizer: Any) -> set[int]:
    """Return the numbers of a tokenizer's tokens; raise a ValueError if one is far above those of any model.

    The library tokenizers copies a vocabulary by looking up every number up to the largest one.
    """
    numbers = set(tokenizer.get_vocab().values())
    largest = max(numbers, default=0)
    if largest >= MOST_TOKENS:
        raise ValueError(f"it numbers a token {largest:,}")
    return numbers


def image_shape_of(processor: Any, model: PreTrainedModel) -> tuple[int, ...] | None:
    """Return the shape, (channels, height, width), of an image from a processor; None without one, or for no images."""
    if processor is None or "pixel_values" not in inspect.signature(model.forward).parameters:
        return None
    image = PIL.Image.new("L" if getattr(model.config, "num_channels", 3) == 1 else "RGB", (SQUARE, SQUARE))
    return image_shape(getattr(processor, "image_processor", processor)(image, return_tensors="pt"))


def padding_token(tokenizer: Any, config: Any) -> int:
    """Return the token to pad with: the one that the model's config names, else one of the tokenizer's.

    Some models look for their config's token to find where a text ends, or to count positions. Of the tokenizer's
    special tokens, one that does not end its texts is preferred. Raises DataError if there is none.
    """
    named = getattr(config.get_text_config(), "pad_token_id", None)
    if is_token(named, config):
        return named
    own = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
    known = [int(token) for token in own if token is not None]
    if not known:
        raise DataError(
            "texts of different length need a padding token, but the tokenizer has neither a padding nor another "
            "special token; set tokenizer.pad_token and save it with the model"
        )
    return next((token for token in known if token != _last_token_of_a_text(tokenizer)), known[0])


def _last_token_of_a_text(tokenizer: Any) -> int:
    """Return the end-of-text token, if the tokenizer adds one to every text; else the last token of the text "a"."""
    return int(tokenizer("a", verbose=False)["input_ids"][-1])


def give_padding(tokenizer: Any) -> None:
    """Give a tokenizer without a padding token its end-of-text or unknown token for one, in place."""
    if tokenizer.pad_token is None:  # any will do, as models that read prompts look at the mask alone
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token


def settle_padding(model: PreTrainedModel, tokenizer: Any) -> None:
    """Set the padding token in a model's config, in place, if it names none and the model finds texts' ends by it.

    Raises DataError if the only candidate is the token that all texts end in: it would be taken for padding.
    """
    text = model.config.get_text_config()
    if not finds_end_by_padding(model) or text.pad_token_id is not None:
        return
    text.pad_token_id = padding_token(tokenizer, model.config)
    if text.pad_token_id == _last_token_of_a_text(tokenizer):
        raise DataError(
            f"{type(model).__name__} tells padding from text by its config's pad_token_id, which must not be the token "
            f"that the tokenizer ends texts with, {text.pad_token_id}, and it has no other; set it in config.json"
        )
    logger.warning("the model's config has no pad_token_id: it is set to %d", text.pad_token_id)


def token_limit(tokenizer: Any, config: Any, max_length: int | None) -> int | None:
    """Return how many tokens a sample may have: `max_length`, else what tokenizer and model take; None for no limit."""
    longest = longest_sequence(config)
    if max_length is None:
        return shortest_limit(tokenizer.model_max_length, longest)
    if max_length < 1 or (longest is not None and longest < max_length):
        allowed = "at least 1" if longest is None else f"in [1, {longest}], what the model takes"
        raise DataError(f"max_length must be {allowed}, got {max_length}")
    return max_length


def encoded(
    tokenizer: Any, config: Any, *texts: Sequence[str], max_length: int | None, **options: Any
) -> dict[str, torch.Tensor]:
    """Return a batch of texts, or of pairs of texts in two sequences, cut to the limit and padded to the longest."""
    return as_batch(tokenize(tokenizer, config, *texts, max_length=max_length, **options), tokenizer, config)


def tokenize(tokenizer: Any, config: Any, *texts: Sequence[Any], max_length: int | None, **options: Any) -> Any:
    """Return the `BatchEncoding` of texts, or of pairs of texts, cut to the limit; `options` are the tokenizer's."""
    limit = token_limit(tokenizer, config, max_length)
    with refusing("the tokenizer must read every text, but fails", "correct its files", DataError):
        return tokenizer(
            *map(list, texts),
            max_length=limit,
            return_attention_mask=True,
            # A model of fewer than two segments has no use for segment ids, or no embedding for the second.
            return_token_type_ids=None if getattr(config, "type_vocab_size", 0) >= 2 else False,
            **{"truncation": limit is not None, **options},
        )


def as_batch(lists: Mapping[str, Sequence[Any]], tokenizer: Any, config: Any) -> dict[str, torch.Tensor]:
    """Return lists of one number per token as int64 tensors, (batch, longest of the batch), padded on the right."""
    # On the right whatever the tokenizer's side, so that models count positions from where a text begins.
    fill = {**FILL, "input_ids": padding_token(tokenizer, config), "token_type_ids": tokenizer.pad_token_type_id}
    batch = {
        key: padded([torch.tensor(row, dtype=torch.int64) for row in rows], fill.get(key, 0), left=False)
        for key, rows in lists.items()
    }
    check_vocabulary(batch["input_ids"], config)
    return batch


def check_vocabulary(input_ids: torch.Tensor, config: Any) -> None:
    """Refuse, by a DataError, tokens of a batch that the model does not know."""
    known = config.get_text_config().vocab_size
    if input_ids.max() >= known:
        raise DataError(
            f"the tokenizer must be the model's own, but it gives the token {input_ids.max()} "
            f"and the model knows {known} tokens"
        )
