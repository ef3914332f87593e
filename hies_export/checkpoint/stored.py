"""Find the files that hold the weights of a checkpoint, and the dtype they are stored in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from ..errors import refusing
from ..model.internals import file_of
from ..model.online import hub_or_cache
from .classes import AGAIN

_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def weight_files(path: str | Path, **hub: Any) -> list[Path]:
    """Return the files that `from_pretrained` reads weights from; none if the checkpoint has none that it knows."""
    with hub_or_cache(path, "model", local_files_only=hub.get("local_files_only", False)):
        for name, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
            if (whole := file_of(path, name, **hub)) is not None:
                return [whole]
            if (listing := file_of(path, index, **hub)) is not None:
                with refusing(f"the index of a sharded checkpoint must name its files, but {listing} does not", AGAIN):
                    names = {Path(name).name for name in json.loads(listing.read_bytes())["weight_map"].values()}
                shards = [file_of(path, shard, **hub) for shard in sorted(names)]
                return [shard for shard in shards if shard is not None]
    return []


def describe_tensors(file: Path) -> Iterator[tuple[str, str, list[int]]]:
    """Yield name, dtype in the words of safetensors, and shape of every tensor in a file."""
    with refusing(f"weights must be a safetensors file, but {file} is none", AGAIN), safe_open(file, "pt") as tensors:
        for name in list(tensors.keys()):
            part = tensors.get_slice(name)
            yield name, part.get_dtype(), part.get_shape()


def stored_dtype(files: Iterable[Path], config: Any) -> torch.dtype | None:
    """Return the dtype that a checkpoint is stored in, and its slim version is saved in; None if it is unknown.

    It is the one that its config names, as in transformers, or a narrower one of its tensors. The narrower one counts
    if all floating tensors have it; otherwise a slim checkpoint could be larger than its source. If the config has no
    dtype, that of the first tensor counts.
    """
    safe = [file for file in files if file.suffix == ".safetensors"]
    floats = [_FLOATS[dtype] for file in safe for _, dtype, _ in describe_tensors(file) if dtype in _FLOATS]
    named = getattr(config, "dtype", None)
    named = getattr(torch, named, None) if isinstance(named, str) else named
    if not isinstance(named, torch.dtype):
        return floats[0] if floats else None
    return floats[0] if len(set(floats)) == 1 and floats[0].itemsize < named.itemsize else named
