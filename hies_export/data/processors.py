"""Load the tokenizer, the image processor, or the processor of both."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import PIL.Image
import torch
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel

from ..errors import DataError, refusing
from ..model.internals import AutoImageProcessor, never_asking
from ..model.online import hub_or_cache
from .images import MODES
from .targets import image_shape
from .tokens import give_padding

if TYPE_CHECKING:
    from ..tasks import Task

# Whether a task reads texts, and images -> the loader of its processor, and the processor's name in messages.
LOADERS: dict[tuple[bool, bool], tuple[Any, str]] = {
    (True, False): (AutoTokenizer, "a tokenizer"),
    (False, True): (AutoImageProcessor, "an image processor"),
    (True, True): (AutoProcessor, "a processor of images and text"),
}
# Height and width of an image that shows in which size a processor gives images to a model.
SQUARE = 224
REMEDY = "save the one the model was trained with into that folder with save_pretrained"


def load_processor(path: str | Path, *, task: Task, revision: str | None = None, for_prompts: bool = False) -> Any:
    """Load the tokenizer, the image processor, or the processor of both that a task needs.

    Images always go through the Pillow backend, so results do not depend on torchvision being installed. Code of the
    checkpoint is neither executed nor asked about. With `for_prompts` it pads on the left, with its end-of-text or
    unknown token if it has no padding token.
    """
    loader, what = LOADERS[task.text, task.images]
    needs = f"prompts need {what}" if for_prompts else f"{task.name} needs {what}"
    options: dict[str, Any] = {"trust_remote_code": False}
    if revision is not None:
        options["revision"] = revision
    if task.images:
        options["backend"] = "pil"
    with refusing(f"{needs}, but none could be loaded from {path}", REMEDY, DataError):
        with never_asking(), hub_or_cache(path, "model", error=DataError):
            loaded = loader.from_pretrained(path, **options)
        tokenizer = getattr(loaded, "tokenizer", loaded)
        words = set()
        if hasattr(tokenizer, "get_vocab"):
            special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
            words = set(tokenizer.get_vocab().values()) - special
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


def image_shape_of(processor: Any, model: PreTrainedModel) -> tuple[int, ...] | None:
    """Return the shape, (channels, height, width), that a model's processor gives a square image.

    None if there is no processor, or the model takes no images.
    """
    if processor is None or "pixel_values" not in inspect.signature(model.forward).parameters:
        return None
    mode = MODES.get(getattr(model.config, "num_channels", 3), "RGB")
    image = PIL.Image.new(mode, (SQUARE, SQUARE))
    return image_shape(getattr(processor, "image_processor", processor)(image, return_tensors="pt"))


def _try_out(processor: Any, task: Task) -> None:
    """Read an empty text and a small image: many settings of a processor's files are only looked at by then."""
    if task.text:
        # A copy, as a fast tokenizer keeps how it was last called, and saves that.
        copy.deepcopy(getattr(processor, "tokenizer", processor))([""], truncation=True, verbose=False)
    if task.images:
        image = PIL.Image.new("RGB", (64, 48))
        for name, value in getattr(processor, "image_processor", processor)(image, return_tensors="pt").items():
            if not torch.as_tensor(value).isfinite().all():
                raise ValueError(f"it makes NaN or infinity of a black image's {name}")
