"""Find the tensors of a checkpoint in its files, and the model they belong to, without reading weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..checkpoint.classes import class_config, find_model_class, read_config
from ..checkpoint.schema import empty_model, read_weight_map
from ..checkpoint.stored import checkpoint_dtype
from ..checkpoint.tensors import StoredTensor, read_blocks, read_header
from ..checkpoint.weights import check_files
from ..errors import RequestError, quoted
from ..model import internals
from ..model.online import hub_or_cache
from .companions import COMPANIONS
from .renaming import Step, loading_steps

# Files that are fetched beside the weights.
SIDE_FILES = (CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, *COMPANIONS)


def fetch(model: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint, after fetching the files of a Hub id, at a revision if one is given."""
    read_config(model, revision=revision)
    if Path(model).is_dir():
        return Path(model)
    try:
        with hub_or_cache(model, "model"):
            folder = Path(
                snapshot_download(str(model), allow_patterns=[*SIDE_FILES, SAFE_WEIGHTS_NAME], revision=revision)
            )
            if not (folder / SAFE_WEIGHTS_NAME).is_file() and (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
                files = sorted(set(read_weight_map(folder / SAFE_WEIGHTS_INDEX_NAME).values()))
                folder = Path(snapshot_download(str(model), allow_patterns=[*SIDE_FILES, *files], revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise RequestError(f"the files of {model} must be on this machine or on the Hub, but: {error}") from error
    return folder


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return where the tensors of a checkpoint are, by name, and check the size of every file."""
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        return read_header(folder / SAFE_WEIGHTS_NAME)
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        found = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".h5", ".msgpack"))
        raise RequestError(
            f"a checkpoint must have {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}, but {folder} has "
            f"{', '.join(found) or 'no weights'}; convert it once: load it with transformers and save_pretrained it"
        )
    weight_map = read_weight_map(index)
    files = sorted(set(weight_map.values()))
    missing = [quoted(file) for file in files if not os.path.isfile(folder / file)]
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
            f"{', '.join(map(quoted, absent[:3]))}; fetch the checkpoint again"
        )
    return tensors


def build_skeleton(folder: Path, tensors: Mapping[str, StoredTensor]) -> tuple[PreTrainedModel, dict[str, Step]]:
    """Return the model of a checkpoint on the meta device, as `from_pretrained` would load it in its own dtype.

    Also, for every name in its `state_dict`, the step of loading that it comes from; the names of tied parameters share
    one.
    """
    model_class = find_model_class(folder)
    config = class_config(folder, model_class)
    check_files(model_class, config, folder)
    if getattr(config, "quantization_config", None) is not None:
        raise RequestError(f"the weights must be plain numbers, but {folder} is quantised; dequantise it first")
    # In the order of `from_pretrained`.
    names = sorted(tensors, key=lambda name: (tensors[name].file, name))
    dtype = checkpoint_dtype((tensors[name].dtype for name in names), config) or torch.float32
    stored = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
    model = empty_model(model_class, config, folder, dtype)
    info = internals.load_shapes(model, stored, dtype)
    steps = loading_steps(model, stored)
    internals.finish_loading(model, info, lambda one, other: _same_bytes(steps[one], steps[other], tensors))
    wrong = [f"{name}: {tuple(found)}, not {tuple(need)}" for name, found, need in sorted(info.mismatched_keys)]
    wrong += [f"{name}: absent" for name in sorted(info.missing_keys)]
    wrong += [f"{name}: {text.splitlines()[-1]}" for name, text in sorted(info.conversion_errors.items())]
    if wrong:
        raise RequestError(
            f"the files must have every parameter of {type(model).__name__}, in its shape, but in {folder} "
            f"{len(wrong)} are not so: {'; '.join(wrong[:3])}. A part that was never trained must be saved once with "
            "save_pretrained"
        )
    internals.load_generation_config(model, folder)
    return model.eval(), _with_tied(model, steps)


def _same_bytes(one: Step, other: Step, tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether two parameters have the same values in the files."""
    if one.convert or other.convert:
        return one == other
    a, b = tensors[one.sources[0]], tensors[other.sources[0]]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    pairs = zip(read_blocks(a, {}, a.dtype, bytearray()), read_blocks(b, {}, b.dtype, bytearray()), strict=True)
    return all(x == y for x, y in pairs)


def _with_tied(model: PreTrainedModel, steps: Mapping[str, Step]) -> dict[str, Step]:
    """Return the step of every name; the names of tied parameters share one."""
    tensors = {name: id(model.get_parameter_or_buffer(name)) for name in model.state_dict()}
    by_tensor: dict[int, Step] = {}
    for name, tensor in tensors.items():
        if name in steps:
            by_tensor.setdefault(tensor, steps[name])
    return {name: by_tensor[tensor] for name, tensor in tensors.items() if tensor in by_tensor}
