"""Load the dense model, and check first that it can be loaded as asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import processes
from ..errors import RequestError, quoted, require_package, root_cause
from ..model.copies import parameter_bytes
from ..model.internals import auto_classes, commit_of, never_asking
from ..tasks import TASKS
from .classes import find_model_class
from .companions import COMPANIONS, SENTENCE_FILES, fetch_files
from .weights import load_weights, stored_dtype, weight_files

# Device maps of accelerate other than the names of devices.
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class Source:
    """How a dense model is stored.

    Attributes:
        folder: Where its files are; of a Hub id, those that were fetched.
        dtype: What its slim version is saved in.
        bytes: Size of its files of weights.
        commit: Of a Hub id, the commit that its files are of.
    """

    folder: Path
    dtype: torch.dtype
    bytes: int
    commit: str | None


def source_of(model: PreTrainedModel, path: str | Path, config: Any, *, asked: str | None = None, **hub: Any) -> Source:
    """Return how a model is stored.

    A slim checkpoint is saved in the dtype of its source, unless another one is asked for; the dtype of computing does
    not matter.
    """
    files = weight_files(path, **hub)
    dtype = (stored_dtype(files, config) or model.dtype) if asked in (None, "auto") else getattr(torch, str(asked))
    folder = fetch_files(path, (*COMPANIONS, *SENTENCE_FILES), hub.get("revision"))
    size = sum(file.stat().st_size for file in files) or parameter_bytes(model)
    return Source(folder, dtype, size, commit_of(folder))


def task_class(path: str | Path, config: Any, *, task: str, **hub: Any) -> type[PreTrainedModel]:
    """Return the model class of a checkpoint, and check that it fits the task."""
    model_class = find_model_class(path, **hub)
    auto_class = TASKS[task].auto_class
    if auto_class not in auto_classes(model_class.__name__, config.model_type):
        own: Any = model_class.config_class
        if auto_class in auto_classes(model_class.__name__, own.model_type):
            raise RequestError(
                f"the model_type of a config must be that of the class in 'architectures', {own.model_type!r} of "
                f"{model_class.__name__}, but {path} has {config.model_type!r}; correct its config.json"
            )
        raise RequestError(
            f"{task} needs a model fine-tuned for it (one that {auto_class} loads), but {path} is a "
            f"{model_class.__name__}; fine-tune it for the task first, or change the task"
        )
    if config.is_encoder_decoder and not TASKS[task].encoder_decoders:
        raise RequestError(
            f"{task} needs a model without a decoder, but {path} is a {model_class.__name__}, an encoder-decoder; "
            "give an encoder, such as BERT"
        )
    return model_class


def check_device_map(device_map: str | None) -> None:
    """Refuse a device map that this machine does not have."""
    if device_map is None or device_map in DEVICE_MAPS:
        return
    try:
        reason = "it holds no weights" if torch.empty(0, device=device_map).is_meta else None
    except (RuntimeError, AssertionError) as error:  # torch that was built without CUDA raises the latter
        reason = root_cause(error)
    if reason is not None:
        raise RequestError(
            f"device_map must be one of {', '.join(DEVICE_MAPS)} or a device of this machine, got "
            f"{quoted(device_map)}: {reason}"
        )


@never_asking()
def load_dense(
    path: str | Path, model_class: Any, *, dtype: str | None = None, device_map: str | None = None, **hub: Any
) -> PreTrainedModel:
    """Load the model to prune, on the GPU if there is one; each of several processes has a model of its own.

    By default the dtype is float32 on CPU, and the checkpoint's own ("auto") on GPU. With a device map, each of several
    processes on a machine takes an equal part of the GPUs.
    """
    if device_map is not None:
        require_package("accelerate", who="device_map needs", package="accelerate", extra="big")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = dtype or ("float32" if device == "cpu" else "auto")
    model: Any = load_weights(
        model_class,
        path,
        dtype=name if name == "auto" else getattr(torch, name),
        device_map=device_map,
        max_memory=_max_memory(device_map),
        **hub,
    )
    left = sum(parameter.numel() for parameter in model.parameters() if parameter.is_meta)
    if left:
        raise RequestError(
            f"a model must fit on the devices that it is spread over, but device_map {device_map} leaves {left:,} of "
            f"{model.num_parameters():,} parameters to the CPU or the disk, where they cannot be scored or cut; use "
            "more GPUs or a smaller dtype, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on the CPU"
        )
    return model if device_map is not None else model.to(device)


def _max_memory(device_map: str | None) -> dict[int, int] | None:
    """Return how much of which GPU a model may take, in bytes; None for no limit."""
    devices = None if device_map is None else processes.own_devices()
    return None if devices is None else {device: torch.cuda.mem_get_info(device)[0] for device in devices}
