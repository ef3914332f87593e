"""Write safetensors files of known shapes, block by block; see `checkpoint.tensors` for the format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save
from torch import Tensor

from ..checkpoint.tensors import DTYPES
from ..errors import StepError

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ShardWriter:
    """Write a safetensors file of known shapes, in the layout of safetensors, its tensors in any order.

    `tensors` are on the meta device. `offsets` has where the bytes of each begin, from the end of the header.
    """

    def __init__(self, file: Path, tensors: Mapping[str, Tensor]):
        self._stream: BinaryIO = file.open("wb")
        self.offsets: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name in _layout(tensors):
            tensor = tensors[name]
            entry = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
            header[name] = entry | {"data_offsets": [position, position + tensor.nbytes]}
            self.offsets[name] = position
            position += tensor.nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._stream.write(len(text).to_bytes(8, "little") + text)
        self._begin = 8 + len(text)
        self._sizes = {name: tensor.nbytes for name, tensor in tensors.items()}

    def write(self, name: str, blocks: Iterator[memoryview]) -> None:
        """Write the bytes of one tensor, whose number must fit its shape."""
        self._stream.seek(self._begin + self.offsets[name])
        written = 0
        for block in blocks:
            self._stream.write(block)
            written += len(block)
        if written != self._sizes[name]:
            raise StepError(
                f"{name} must have {self._sizes[name]} bytes after the cut, but {written} were left of it; please "
                "report this architecture"
            )

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def _layout(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the order in which safetensors lays out tensors."""
    # Safetensors decides by names and dtypes, so tensors without elements show it.
    data = save({name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()})
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [name for name in header if name != "__metadata__"]
