"""Copy the modules of a model, and share its weights, convert them or leave them out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from ..errors import RequestError

Model = TypeVar("Model", bound=torch.nn.Module)

# Devices that models are scored and timed on: sums are in float64, and clocks wait for the device. MPS, for one, has no
# float64. "meta" has no values at all.
DEVICES = ("cpu", "cuda", "meta")


def refuse_devices(model: torch.nn.Module) -> None:
    """Refuse, by a RequestError, a model that is on several devices, or on one that is not in `DEVICES`."""
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise RequestError(
            f"a model must be on one device, but its weights are on {' and '.join(sorted(devices))}; load it without "
            "device_map: blocks of a model on the CPU go to the GPU one at a time"
        )
    for name, parameter in model.named_parameters():
        if parameter.device.type not in DEVICES:
            raise RequestError(
                f"a model must be on the CPU or on a GPU of CUDA or ROCm, but {name} is on {parameter.device}, where "
                'nothing was tried; move it with model.to("cpu")'
            )


def share_weights(model: Model, *, device: str | None = None) -> Model:
    """Copy a model's modules and config, but share its tensors; on the device "meta" the copy has shapes without data.

    The copy has its own evaluation mode, attention implementation and forward wrappers.
    """
    return convert(model, device=device)


def convert(
    model: Model, *, dtype: torch.dtype | Mapping[str, torch.dtype] | None = None, device: str | None = None
) -> Model:
    """Copy a model's modules and config, with its tensors in another dtype or on another device.

    `dtype` is that of the floating tensors, or name of a parameter or buffer -> dtype; other tensors keep theirs.
    Tensors that need no change are shared.
    """
    dtype_by_id: dict[int, torch.dtype] = {}
    if isinstance(dtype, Mapping):
        named = (*model.named_parameters(), *model.named_buffers())
        dtype_by_id = {id(tensor): dtype[name] for name, tensor in named if name in dtype}

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        wanted = dtype_by_id.get(id(tensor)) if isinstance(dtype, Mapping) else dtype
        new = tensor.detach().to(device=device, dtype=wanted if tensor.is_floating_point() else None)
        if new.dtype == tensor.dtype and new.device == tensor.device:
            return tensor
        return torch.nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else new

    return copy_with(model, converted)


def round_each(model: torch.nn.Module, dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Round a model's tensors in place to values that other dtypes can hold; return the names of those that overflow.

    `dtypes` is name -> dtype; tensors that it does not name keep their values. None changes its own dtype.
    """
    overflown = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        dtype = dtypes.get(name, tensor.dtype)
        if dtype == tensor.dtype or not tensor.is_floating_point():
            continue
        with torch.no_grad():
            rounded = tensor.to(dtype).to(tensor.dtype)
            if not torch.equal(rounded.isfinite(), tensor.isfinite()):
                overflown.append(name)
            tensor.copy_(rounded)
    return overflown


def copy_with(model: Model, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> Model:
    """Copy a model's modules and config, and replace each of its tensors by what `stand_in` returns for it.

    It is called once for each parameter, then each buffer, then each other tensor that a module holds.
    """
    attributes = [value for module in model.modules() for value in vars(module).values()]
    tensors = [*model.parameters(), *model.buffers(), *(v for v in attributes if isinstance(v, torch.Tensor))]
    by_id = {id(tensor): tensor for tensor in tensors}
    # deepcopy takes what its memo, id -> copy, already holds for the finished copy.
    return copy.deepcopy(model, {key: stand_in(tensor) for key, tensor in by_id.items()})


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Return whether two models have equal parameters and buffers, by name."""
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def parameter_bytes(model: torch.nn.Module) -> int:
    """Return the bytes that the parameters take in memory, tied ones once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
