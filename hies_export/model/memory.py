"""Hold less: map the weights of a large model from a file, and give memory that was freed back to the system."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.weak import WeakIdKeyDictionary

from .copies import parameter_bytes

# Weights of more bytes are not held twice: they are mapped from a file while other programs run the model, compared
# with what was saved without loading it, and timed without a copy.
LARGE_BYTES = 1 << 30
# Tensors of this size and more are mapped in a walk; outside, of the largest size that glibc itself sets. Mapping those
# of 1 MiB, too, took a fifth of the time of a small model's walks, for new pages.
LEAN_BYTES, USUAL_BYTES = 8 << 20, 32 << 20
M_MMAP_THRESHOLD = -3  # glibc's number of the option
# Parameters that are mapped -> the file, and the name of the tensor there.
_MAPPED: MutableMapping[torch.Tensor, tuple[Path, str]] = WeakIdKeyDictionary()


def map_weights(model: torch.nn.Module, file: Path) -> None:
    """Write the weights of a large model on the CPU to a file and map them from there, so that they take no memory.

    The model is changed in place, and the file must stay for as long as it is used. A small model stays as it is.
    """
    if parameter_bytes(model) <= LARGE_BYTES or os.name == "nt":  # there, a file that is mapped cannot be removed
        return
    named = {str(number): one for number, one in enumerate(model.parameters()) if one.device.type == "cpu"}
    save_file({name: parameter.detach().contiguous() for name, parameter in named.items()}, file)
    _MAPPED.update({parameter: (file, name) for name, parameter in named.items()})
    let_go(model)


def let_go(model: torch.nn.Module) -> None:
    """Map the weights of `map_weights` anew, which frees the pages that were read; they are read again on use."""
    files: dict[Path, dict[str, torch.Tensor]] = {}
    for parameter in filter(_MAPPED.__contains__, model.parameters()):
        file, name = _MAPPED[parameter]
        files.setdefault(file, {})[name] = parameter
    for file, named in files.items():
        with safe_open(file, "pt") as mapped:
            for name, tensor in named.items():
                tensor.data = mapped.get_tensor(name)
    give_back_memory()


@cache
def _libc() -> Any:
    """Return glibc, whose allocator keeps freed memory for itself; None elsewhere."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        return libc if hasattr(libc, "malloc_trim") else None
    except OSError:
        return None


def give_back_memory() -> None:
    """Give memory that was freed back to the operating system, where the allocator would keep it."""
    if (libc := _libc()) is not None:
        libc.malloc_trim(0)


@contextmanager
def lean_memory() -> Iterator[None]:
    """Let the allocator map each large tensor separately inside the block, which gives it back once it is freed.

    Otherwise tensors of many sizes leave holes between them: on SmolLM2-135M a third of the resident memory was free.
    """
    if (libc := _libc()) is not None:
        libc.mallopt(M_MMAP_THRESHOLD, LEAN_BYTES)
    try:
        yield
    finally:
        if libc is not None:
            libc.mallopt(M_MMAP_THRESHOLD, USUAL_BYTES)
