"""A checkpoint as its files tell of it: where its tensors are, and the model they make, without its weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..checkpoint.classes import find_model_class, read_config
from ..errors import RequestError
from .renaming import Step, loading_steps
from .shards import StoredTensor, read_blocks, read_header

# What a checkpoint needs beside its weights: configs, tokenizer and processor files.
SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")


def fetch(model: str | Path) -> Path:
    """The folder of a checkpoint; what a Hub id needs is fetched first.

    Raises:
        RequestError: There is no such model, or no safetensors.
    """
    read_config(model)
    if Path(model).is_dir():
        return Path(model)
    try:
        folder = Path(snapshot_download(str(model), allow_patterns=[*SIDE_FILES, SAFE_WEIGHTS_NAME]))
        if not (folder / SAFE_WEIGHTS_NAME).is_file() and (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
            files = sorted(set(_weight_map(folder / SAFE_WEIGHTS_INDEX_NAME).values()))
            folder = Path(snapshot_download(str(model), allow_patterns=[*SIDE_FILES, *files]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise RequestError(f"the files of {model} must be at hand or on the Hub, but: {error}") from error
    return folder


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Where the tensors of a checkpoint are; every file is checked for its size.

    Raises:
        RequestError: The checkpoint has no safetensors, a shard is missing or cut short, or is not what the index says.
    """
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        return read_header(folder / SAFE_WEIGHTS_NAME)
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        found = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".h5", ".msgpack"))
        raise RequestError(
            f"a checkpoint must have {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}, but {folder} has "
            f"{', '.join(found) or 'no weights'}; convert it once: load it with transformers and save_pretrained it"
        )
    weight_map = _weight_map(index)
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise RequestError(
            f"{len(files)} shards are named in {index}, but {len(missing)} of them are missing: "
            f"{', '.join(missing[:3])}; fetch the checkpoint again"
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors |= {name: t for name, t in read_header(folder / file).items() if weight_map.get(name) == file}
    absent = sorted(set(weight_map) - set(tensors))
    if absent:
        raise RequestError(
            f"the shards must have every tensor named in {index}, but {len(absent)} are not where it says: "
            f"{', '.join(absent[:3])}; fetch the checkpoint again"
        )
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(Path(file).name) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"{index} must be the index of a sharded checkpoint, but cannot be read: {error!r}"
        ) from error


def build_skeleton(folder: Path, tensors: Mapping[str, StoredTensor]) -> tuple[PreTrainedModel, dict[str, Step]]:
    """The model of a checkpoint on the meta device, as `from_pretrained` would load it.

    Args:
        folder: The checkpoint.
        tensors: From `read_tensors`.

    Returns:
        The model, and for every name in its `state_dict` the tensors in the files that it comes from. Names of tied
        parameters share one.

    Raises:
        RequestError: A parameter is not in the files, has another shape, or is quantised.
    """
    model_class = find_model_class(folder)
    config = model_class.config_class.from_pretrained(folder)  # type: ignore[union-attr]
    if getattr(config, "quantization_config", None) is not None:
        raise RequestError(f"the weights must be plain numbers, but {folder} is quantised; dequantise it first")
    dtype = config.dtype if config.dtype is not None else _first_dtype(tensors)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    stored = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
    with torch.device("meta"):
        model = model_class._from_config(copy.deepcopy(config), dtype=dtype)
    info, _ = convert_and_load_state_dict_in_model(
        model,
        stored,
        LoadStateDictConfig(
            device_map={"": "meta"},
            dtype=dtype,
            dtype_plan=model._get_dtype_plan(dtype),
            weight_mapping=get_model_conversion_mapping(model),  # type: ignore[arg-type]
        ),
    )
    steps = loading_steps(model, stored)
    _tie(model, steps, tensors, info.missing_keys)
    model._adjust_missing_and_unexpected_keys(info)
    wrong = [f"{name}: {tuple(found)}, not {tuple(need)}" for name, found, need in sorted(info.mismatched_keys)]
    wrong += [f"{name}: absent" for name in sorted(info.missing_keys)]
    wrong += [f"{name}: {text.splitlines()[-1]}" for name, text in sorted(info.conversion_errors.items())]
    if wrong:
        raise RequestError(
            f"the files must have every parameter of {type(model).__name__}, in its shape, but in {folder} "
            f"{len(wrong)} are not so: {'; '.join(wrong[:3])}. A part that was never trained must be saved once with "
            "save_pretrained"
        )
    if model.can_generate():
        model.adjust_generation_fn(
            generation_config=None,
            from_auto_class=False,
            from_pipeline=False,
            pretrained_model_name_or_path=folder,
            cache_dir=None,
            force_download=False,
            proxies=None,
            local_files_only=True,
            token=None,
            revision="main",
            subfolder="",
            trust_remote_code=False,
        )
    return model.eval(), _with_tied(model, steps)


def _first_dtype(tensors: Mapping[str, StoredTensor]) -> torch.dtype:
    return next((t.dtype for t in tensors.values() if t.dtype.is_floating_point), torch.float32)


def _tie(
    model: PreTrainedModel, steps: Mapping[str, Step], tensors: Mapping[str, StoredTensor], missing: set[str]
) -> None:
    """Tie what transformers would: of two that are in the files, only those whose values agree."""
    for target, source in list(model.all_tied_weights_keys.items()):
        if target in missing or source in missing:
            continue
        if _same_bytes(steps[target], steps[source], tensors):
            missing.add(target)
        else:
            del model.all_tied_weights_keys[target]
    model.tie_weights(missing_keys=missing, recompute_mapping=False)


def _same_bytes(one: Step, other: Step, tensors: Mapping[str, StoredTensor]) -> bool:
    if one.convert or other.convert:
        return one == other
    a, b = tensors[one.sources[0]], tensors[other.sources[0]]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    pairs = zip(read_blocks(a, {}, a.dtype, bytearray()), read_blocks(b, {}, b.dtype, bytearray()), strict=True)
    return all(x == y for x, y in pairs)


def _with_tied(model: PreTrainedModel, steps: Mapping[str, Step]) -> dict[str, Step]:
    """The steps of all names: those of tied parameters have the same origin."""
    names = list(model.state_dict())
    by_tensor: dict[int, Step] = {}
    tensors: dict[str, Tensor] = {name: model.get_parameter_or_buffer(name) for name in names}
    for name in names:
        if name in steps:
            by_tensor.setdefault(id(tensors[name]), steps[name])
    return {name: by_tensor[id(tensors[name])] for name in names if id(tensors[name]) in by_tensor}
