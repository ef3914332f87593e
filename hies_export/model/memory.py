"""Hold less in memory: map the weights of a large model from a file, and give freed memory back to the system."""

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
# Bytes from which on the allocator maps a tensor separately: in `lean_memory`, and elsewhere, where it is the most that
# glibc itself sets. From 1 MiB on, new pages took a fifth of the time of scoring a small model layer by layer.
LEAN_BYTES, USUAL_BYTES = 8 << 20, 32 << 20
M_MMAP_THRESHOLD = -3  # glibc's number of this option of mallopt
# Mapped parameter -> the file, and the name of the tensor there.
_MAPPED: MutableMapping[torch.Tensor, tuple[Path, str]] = WeakIdKeyDictionary()


def map_weights(model: torch.nn.Module, file: Path) -> None:
    """Write the weights of a large model on the CPU to a file and map them from there, so that they take no memory.

    The model is changed in place, and the file must stay for as long as it is used. A small model stays as it is.
    """
    if parameter_bytes(model) <= LARGE_BYTES or os.name == "nt":  # Windows cannot remove a file that is mapped
        return
    named = {str(number): p for number, p in enumerate(model.parameters()) if p.device.type == "cpu"}
    save_file({name: parameter.detach().contiguous() for name, parameter in named.items()}, file)
    _MAPPED.update({parameter: (file, name) for name, parameter in named.items()})
    let_go(model)


def let_go(model: torch.nn.Module) -> None:
    """Free the memory of weights that were read from the file of `map_weights`; they are read again on use."""
    mapped = [parameter for parameter in model.parameters() if parameter in _MAPPED]
    for file in {_MAPPED[parameter][0] for parameter in mapped}:
        with safe_open(file, "pt") as tensors:
            for parameter in mapped:
                if _MAPPED[parameter][0] == file:
                    parameter.data = tensors.get_tensor(_MAPPED[parameter][1])  # a new map, of which nothing is read
    give_back_memory()


@cache
def _libc() -> Any:
    """Return glibc, whose allocator keeps freed memory for itself; None if the system has another C library."""
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
    libc = _libc()
    if libc is not None:
        libc.mallopt(M_MMAP_THRESHOLD, LEAN_BYTES)
    try:
        yield
    finally:
        if libc is not None:
            libc.mallopt(M_MMAP_THRESHOLD, USUAL_BYTES)
