"""GPUs for machines that have none: tensors that say `cuda:N`, compute on the CPU, and refuse what CUDA refuses.

`with pretend_gpus(2) as gpus: model.to("cuda:1")`. What reaches a kernel is checked, as CUDA and the kernels' own code
would: one device per operator (numbers and indices may be on the CPU), generators of that device, no NumPy, no kernel
that CUDA lacks, and the layouts that fused attention demands. `gpus` counts the bytes that tensors hold, and raises
OutOfMemoryError beyond `memory_bytes`.

How it works: Python sees `cuda:N`, and torch's C++ code the device `meta:N`, which needs no driver and on which
autograd runs. `Tensor.to` translates devices, and a dispatch mode runs every operator on the values.
What it cannot show: speed, streams, the rounding of CUDA's own kernels, and CUDA graphs. `torch.tensor` must be given a
GPU with its number.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Operators that move values between devices.
_COPIES = {aten._to_copy.default, aten.copy_.default}
# Operators whose index tensors may be on the CPU, from the second argument on.
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# Operators that take numbers from tensors of no axis on the CPU without being marked as pointwise.
_TAKE_NUMBERS = {aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.where.self}
_CPU_ONLY = {"aten::_scaled_dot_product_flash_attention_for_cpu", "aten::histogram"}


class PretendTensor(Tensor):
    """A tensor whose values are on the CPU, and which says that it is on GPU `index`."""

    on_cpu: Tensor
    gpu: int

    @staticmethod
    def __new__(cls, values: Tensor, index: int | None = None, requires_grad: bool = False) -> Any:
        if index is None:  # `type(parameter)(data, requires_grad=...)`, as accelerate makes one from another
            return nn.Parameter(values, requires_grad=requires_grad)
        # A tensor made in inference mode has no version, which views of other tensors need here.
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                values.size(),
                strides=values.stride(),
                storage_offset=values.storage_offset(),
                dtype=values.dtype,
                device=torch.device("meta", index),
            )
        made.on_cpu, made.gpu = values, index
        return made

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    device = property(lambda self: torch.device("cuda", self.gpu))
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, new: Any) -> None:
        if not isinstance(new, PretendTensor):  # to the CPU
            Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
            return
        torch._C.TensorBase.data.__set__(self, new)  # type: ignore[attr-defined]
        self.on_cpu, self.gpu = new.on_cpu, new.gpu

    def get_device(self) -> int:
        return self.gpu

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.on_cpu.untyped_storage()

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    def tolist(self) -> Any:
        return self.on_cpu.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first")

    def __array__(self, *_: object, **__: object) -> Any:
        return self.numpy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = self.detach().clone()
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        return memo[id(self)]

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"{self.on_cpu!r} on {self.device}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} has a tensor of a pretend GPU, outside of `pretend_gpus`")

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Gpus(TorchDispatchMode):
    """Runs operators on tensors of pretend GPUs, and counts the bytes that these hold."""

    def __init__(self, count: int, memory_bytes: int):
        super().__init__()
        self.count, self.memory_bytes = count, memory_bytes
        self.held, self.peak = [0] * count, [0] * count
        self.synchronised = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is aten.is_pinned.default:
            return False
        if _is_composite(func):  # as they come in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        tensors: list[Tensor] = []
        values, named = _values(args, tensors), {key: _values(value, tensors) for key, value in kwargs.items()}
        of_gpus = [one for one in tensors if isinstance(one, PretendTensor)]
        place = _index_of(kwargs.get("device"))
        if place is not None:
            named["device"] = torch.device("cpu")
        elif of_gpus and kwargs.get("device") is None:
            place = next((one.gpu for one in of_gpus if one.dim()), of_gpus[0].gpu)
        if place is None and not of_gpus:
            return func(*args, **kwargs)
        if func not in _COPIES:
            _check(func, args, kwargs, tensors, of_gpus)
        found = _EMULATED.get(func, func)(*values, **named)
        if func is aten.copy_.default:
            return args[0]
        owners = {id(one.on_cpu): one for one in of_gpus}
        if isinstance(found, (tuple, list)):
            return type(found)(self._placed(func, one, owners, place) for one in found)
        return self._placed(func, found, owners, place)

    def _placed(self, func: Any, found: Any, owners: Mapping[int, PretendTensor], place: int | None) -> Any:
        """Return a result of an operator as a tensor of its device; one that was written to is the argument itself."""
        if not isinstance(found, Tensor) or isinstance(found, PretendTensor):
            return found
        if (owner := owners.get(id(found))) is not None:
            if owner.shape != found.shape:
                raise NotImplementedError(f"{func} changes the shape of a tensor in place")
            return owner
        if place is None or found.is_meta:
            return found
        if place >= self.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal {place}")
        self._count(found, place)
        return PretendTensor(found, place)

    def _count(self, found: Tensor, place: int) -> None:
        storage = found.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        if self.held[place] + size > self.memory_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes on GPU {place}")
        self._storages.add(key)
        self.held[place] += size
        self.peak[place] = max(self.peak[place], self.held[place])
        weakref.finalize(storage, self._freed, key, size, place)

    def _freed(self, key: int, size: int, place: int) -> None:
        self._storages.discard(key)
        self.held[place] -= size


@cache
def _is_composite(func: Any) -> bool:
    # `prim::device`, which tensors without values are asked for, is no operator of the dispatcher.
    known = torch._C._dispatch_has_kernel(func.name())
    return known and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _translated(given: Any) -> Any:
    """Return the device that C++ sees, for one that names a GPU; anything else as it is."""
    device = torch.device(given) if isinstance(given, str) and given.startswith("cuda") else given
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("meta", device.index or 0)
    return given


def _moved(original: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Do what `Tensor.to` does."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    elif args and isinstance(args[0], int):
        args = (torch.device("cuda", args[0]), *args[1:])
    return original(tensor, *map(_translated, args), **{key: _translated(value) for key, value in kwargs.items()})


def _index_of(device: torch.device | None) -> int | None:
    """Return the number of the GPU that a device names, translated or not; None for others, and for no device."""
    device = _translated(device)
    return None if device is None or device.type != "meta" else device.index


def _values(given: Any, tensors: list[Tensor]) -> Any:
    """Return what operators on the CPU take in place of an argument, and append its tensors to a list."""
    if isinstance(given, Tensor):
        tensors.append(given)
        return given.on_cpu if isinstance(given, PretendTensor) else given
    return [_values(one, tensors) for one in given] if isinstance(given, (list, tuple)) else given


def _check(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[Tensor], of_gpus: list[PretendTensor]
) -> None:
    """Refuse an operator that CUDA lacks, or whose arguments are on several devices."""
    name = func._schema.name
    if (generator := kwargs.get("generator")) is not None:
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found {generator.device.type!r}")
    if not of_gpus:
        return
    if name in _CPU_ONLY:
        raise NotImplementedError(f"Could not run '{name}' with arguments from the 'CUDA' backend")
    devices = {one.gpu for one in of_gpus if one.dim()} or {of_gpus[0].gpu}
    if len(devices) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} has some on cuda:{devices}")
    others = [one for one in tensors if not isinstance(one, PretendTensor)]
    if func in _INDEXING and isinstance(args[0], PretendTensor):
        put = args[2] if len(args) > 2 else None
        others = [put] if isinstance(put, Tensor) and put.device.type == "cpu" and put.dim() else []
    elif torch.Tag.pointwise in func.tags or func in _TAKE_NUMBERS:
        written = func._schema.is_mutable and not isinstance(args[0], PretendTensor)
        others = [one for one in others if one.dim() or written]
    if others:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} has some on cuda:{devices.pop()} and "
            f"{[tuple(one.shape) for one in others]} on {others[0].device}"
        )


# Fused attention


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[tuple[Tensor, ...], dict[str, Any], Tensor | None]:
    """Return arguments of the CPU's kernel that compute the same, and which rows see no key."""
    _check_fused(query, key, value, bias)
    width = max(query.shape[-1], value.shape[-1])
    padded = [nn.functional.pad(one, (0, width - one.shape[-1])) for one in (query, key, value)]
    options: dict[str, Any] = {"dropout_p": 0.0, "is_causal": is_causal, "attn_mask": None, "scale": scale}
    blind = None
    if bias is not None:
        once = bias[tuple(slice(1) if stride == 0 else slice(None) for stride in bias.stride())]
        blind = (once == -math.inf).all(-1, keepdim=True)
        options["attn_mask"] = once.masked_fill(blind, 0).contiguous()
    return tuple(padded), options, blind


def _check_fused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> None:
    """Check what the kernel demands.

    Source: aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h of pytorch, `check_supported`.
    """
    aligned = 16 // query.element_size()
    for one in (query, key, value):
        assert one.dtype == query.dtype, "query, key and value must have one dtype"
        assert one.shape[:2] == query.shape[:2], "keys and values must be repeated for every head"
        assert one.stride(-1) == 1, "the last axis must be contiguous"
    for what, one in {"query": query, "key": key}.items():
        if any(stride % aligned for stride in one.stride()[1:3]):
            raise RuntimeError(f"{what} is not correctly aligned, strides {one.stride()}")
    if bias is not None:
        assert bias.dtype == query.dtype, "the bias must have the dtype of the query"
        assert bias.shape == (*query.shape[:3], key.shape[2]), "the bias must be expanded"
        if any(stride % aligned for stride in bias.stride()[:3]):
            raise RuntimeError(f"attn_bias is not correctly aligned, strides {bias.stride()}, multiple of {aligned}")


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *rest: Any, scale: float
) -> tuple[Tensor, ...]:
    is_causal = rest[2:] == (True,)  # behind compute_log_sumexp and dropout_p
    tensors, options, blind = _attend(query, key, value, bias, is_causal, scale)
    output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(*tensors, **options)
    rows = query.shape[2]
    whole = torch.full((*query.shape[:2], -(-rows // 32) * 32), math.inf)  # rounded up, and filled with infinity
    whole[..., :rows] = logsumexp
    if blind is not None:  # 0, and infinity
        output, whole[..., :rows] = output.masked_fill(blind, 0), logsumexp.masked_fill(blind[..., 0], math.inf)
    output = output[..., : value.shape[-1]].transpose(1, 2).contiguous().transpose(1, 2)
    return output, whole, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def _efficient_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *rest: Any, scale: float
) -> tuple[Tensor | None, ...]:
    is_causal = rest[6:] == (True,)  # behind out, logsumexp, seed, offset, dropout_p and grad_input_mask
    tensors, options, blind = _attend(query, key, value, bias, is_causal, scale)
    output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(*tensors, **options)
    grad = nn.functional.pad(grad, (0, output.shape[-1] - grad.shape[-1]))
    grad = grad if blind is None else grad.masked_fill(blind, 0)
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *tensors, output, logsumexp, 0.0, is_causal, attn_mask=options["attn_mask"], scale=scale
    )
    return *(one[..., : given.shape[-1]] for one, given in zip(found, (query, key, value), strict=True)), None


_EMULATED: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}


# torch.cuda


class _Event:
    def __init__(self, **_: object) -> None:
        self.at = 0.0

    def record(self, *_: object) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return (end.at - self.at) * 1e3


def _number(device: Any) -> int:
    device = torch.device(device) if isinstance(device, str) else device
    return (device.index or 0) if isinstance(device, torch.device) else device or 0


def _cuda_of(gpus: Gpus) -> dict[str, Any]:
    """Return what of `torch.cuda` is replaced."""

    def reset(device: Any = None) -> None:
        gpus.peak[_number(device)] = gpus.held[_number(device)]

    def free(device: Any = None) -> tuple[int, int]:
        return gpus.memory_bytes - gpus.held[_number(device)], gpus.memory_bytes

    def synchronise(*_: object) -> None:
        gpus.synchronised += 1

    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: gpus.count,
        "current_device": lambda: 0,
        "device": lambda *_: nullcontext(),
        "get_device_name": lambda *_: "pretend",
        "Event": _Event,
        "synchronize": synchronise,
        "empty_cache": lambda: None,
        "mem_get_info": free,
        "memory_allocated": lambda device=None: gpus.held[_number(device)],
        "max_memory_allocated": lambda device=None: gpus.peak[_number(device)],
        "reset_peak_memory_stats": reset,
    }


@contextmanager
def pretend_gpus(count: int = 1, *, memory_bytes: int = 2**40) -> Iterator[Gpus]:
    """Let torch have GPUs of that much memory each, inside the block."""
    gpus, to, data = Gpus(count, memory_bytes), Tensor.to, Tensor.data

    def set_data(tensor: Tensor, new: Tensor) -> None:
        """Move a tensor to another device in place, as torch does between the CPU and a GPU of its own."""
        if isinstance(tensor, PretendTensor) == isinstance(new, PretendTensor):
            data.__set__(tensor, new)  # type: ignore[attr-defined]
            return
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, new)

    with ExitStack() as stack:
        for name, replacement in _cuda_of(gpus).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        for owner, name, replacement in (
            (Tensor, "to", lambda *args, **kwargs: _moved(to, *args, **kwargs)),
            (Tensor, "cuda", lambda tensor, device=None: tensor.to("cuda" if device is None else device)),
            (Tensor, "data", property(lambda tensor: tensor.detach(), set_data)),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        # `torch.tensor` makes its values on the CPU, and copies them as `Tensor.to` does.
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        stack.enter_context(gpus)
        yield gpus
