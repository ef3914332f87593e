"""Products of matrices whose last bits differ from call to call, as they do on other processors and in other libraries.

`HIES_DISTURB=1 python -m pytest ...` multiplies every number that a product or a solver gives on the CPU by 1 + eps or
1 - eps, at random: eps of its dtype, times the value of the variable. Two calls with the same matrices differ, as they
do where MKL computes differently in other memory. Units, plans and counts must not depend on that, and
`support.tolerance` says how far numbers may.
"""

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

EPS = float(os.environ.get("HIES_DISTURB", "0"))
# Operators with a variant that writes to `out`: it is not replaced, and computes what the other gives.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv")
SOLVERS = {torch: ("cholesky_solve", "cholesky_inverse"), torch.linalg: ("solve", "inv", "cholesky", "lstsq")}
_signs = torch.Generator()
_library: list[torch.library.Library] = []


def disturb() -> None:
    """Replace the products and solvers of this process, if HIES_DISTURB is set."""
    if not EPS or _library:
        return
    _library.append(torch.library.Library("aten", "IMPL"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        for name in PRODUCTS:
            _library[0].impl(name, _product(getattr(torch.ops.aten, name).out), "CPU")
    for module, names in SOLVERS.items():
        for name in names:
            setattr(module, name, _solver(getattr(module, name)))


def start_again() -> None:
    """Begin the sequence of signs anew, so that a test alone meets those that it meets among others."""
    _signs.manual_seed(0)


def _product(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def disturbed(*arguments: Any, **options: Any) -> Tensor:
        first = next(value for value in arguments if isinstance(value, Tensor))
        return _disturbed(operator(*arguments, **options, out=first.new_empty(0)))

    return disturbed


def _solver(function: Callable[..., Any]) -> Callable[..., Any]:
    def disturbed(*arguments: Any, **options: Any) -> Any:
        found = function(*arguments, **options)
        return _disturbed(found) if type(found) is Tensor and found.device.type == "cpu" else found

    return disturbed


def _disturbed(found: Tensor) -> Tensor:
    if not found.is_floating_point():
        return found
    signs = torch.randint(0, 2, found.shape, generator=_signs, dtype=torch.int8) * 2 - 1
    return found.mul_(1 + EPS * torch.finfo(found.dtype).eps * signs.to(found.dtype))
