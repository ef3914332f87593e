"""Read rows and columns of tensors in safetensors files, block by block.

The memory map of safetensors is not used: mapped pages count as the process's memory until the system takes them back.
The format is the length of the header in eight bytes, a header of JSON, and the tensors' bytes one after the other
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from ..errors import RequestError, StepError, quoted
from ..files import MEGABYTE, Rule, Schema, check, parse_json
from ..units import runs

BLOCK_BYTES = 8 * 2**20

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}

_Offset = Annotated[int, Field(ge=0, lt=2**60)]


class _Entry(Schema):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[_Offset]
    data_offsets: Annotated[list[_Offset], Field(min_length=2, max_length=2)]


# The format itself allows no longer header.
_HEADER = Rule("weights must be a safetensors file", "fetch or save it again", megabytes=100)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, in its dtype and shape there."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # in bytes from the beginning of the file

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, by name, in the order of their bytes."""
    size = file.stat().st_size
    tensors = {}
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(size, _HEADER.megabytes * MEGABYTE):
            raise _HEADER.refused(f"{file} is not: its header is longer than the file, or than any header may be")
        header = parse_json(stream.read(length), dict[str, Any], _HEADER, where=f"the header of {file}")
    header.pop("__metadata__", None)
    check(header, dict[str, _Entry], _HEADER, where=str(file))
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in DTYPES:
            raise RequestError(
                f"tensors must be of a dtype that torch can cut ({', '.join(DTYPES)}), but {quoted(name)} in "
                f"{file} is {quoted(entry['dtype'])}; dequantise the checkpoint first"
            )
        begin, end = entry["data_offsets"]
        tensor = StoredTensor(file, DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + begin)
        if end - begin != tensor.bytes:
            raise _HEADER.refused(
                f"{quoted(name)} has {end - begin} bytes in {file} where its shape makes {tensor.bytes}"
            )
        tensors[name] = tensor
    whole = max((t.offset + t.bytes for t in tensors.values()), default=8 + length)
    if size != whole:
        raise RequestError(
            f"{file} must have the {whole} bytes that its header describes, but has {size}; it is cut short or "
            "damaged: fetch or save it again"
        )
    return tensors


def read_blocks(
    tensor: StoredTensor, kept: Mapping[int, Tensor], dtype: torch.dtype, buffer: bytearray
) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, converted to a dtype, in order, a block at a time.

    `kept` has, by axis (0 or 1), the ascending indices of the rows or columns that stay.
    """
    if not tensor.bytes:
        return
    rows, row_shape = (tensor.shape[0], tensor.shape[1:]) if tensor.shape else (1, ())
    row_bytes = tensor.bytes // rows
    per_block = max(1, BLOCK_BYTES // row_bytes)
    if len(buffer) < min(per_block, rows) * row_bytes:
        buffer.extend(bytes(min(per_block, rows) * row_bytes - len(buffer)))
    columns = kept.get(1)
    with memoryview(buffer) as whole, tensor.file.open("rb", buffering=0) as stream:
        if hasattr(os, "posix_fadvise"):
            # The system then reads further ahead, which is several times faster from a cold disk.
            os.posix_fadvise(stream.fileno(), tensor.offset, tensor.bytes, os.POSIX_FADV_SEQUENTIAL)
        for first, length in runs(kept[0].tolist()) if 0 in kept else [(0, rows)]:
            stream.seek(tensor.offset + first * row_bytes)
            for done in range(0, length, per_block):
                count = min(per_block, length - done)
                block = whole[: count * row_bytes]
                _fill(stream, block, tensor.file)
                if columns is None and dtype == tensor.dtype:
                    yield block
                    continue
                values = torch.frombuffer(block, dtype=tensor.dtype).view(count, *row_shape)
                values = values if columns is None else values.index_select(1, columns)
                yield as_bytes(values.to(dtype))


def read_tensor(tensor: StoredTensor, dtype: torch.dtype, buffer: bytearray) -> Tensor:
    """Read a whole tensor, as a dtype."""
    values = torch.empty(tensor.shape, dtype=dtype)
    target, position = as_bytes(values), 0
    for block in read_blocks(tensor, {}, dtype, buffer):
        target[position : position + len(block)] = block
        position += len(block)
    return values


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy if it is contiguous."""
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]


def _fill(stream: Any, block: memoryview, file: Path) -> None:
    done = 0
    while done < len(block):
        count = stream.readinto(block[done:])
        if not count:
            raise StepError(f"{file} ended too early; was it changed during the cut? Nothing was kept")
        done += count
