"""Registries by name, to which other packages add by entry points.

A recipe is checked against these names before torch is imported, which takes seconds. So three registries are made
here, and the files that define their values (`forms.runtimes.base`, `forms.formats`, `score.criteria`) give them their
types.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, TypeVar

from .errors import RequestError, one_of

T = TypeVar("T")


class Registry(UserDict[str, T]):
    """A mapping from names to what modules register, of this package or of packages with an entry point.

    A module is imported when its name is first looked up. Names can be listed without an import.
    """

    def __init__(self, group: str, modules: Mapping[str, str] = MappingProxyType({})):
        """Make a registry for the entry points `hies_export.GROUP`; `modules` maps this package's names to modules."""
        super().__init__()
        self._group, self._modules = group, modules

    @cached_property
    def _points(self) -> dict[str, EntryPoint]:
        return entry_points_of(self._group)

    def __contains__(self, name: object) -> bool:
        return name in self.data or name in self._modules or name in self._points

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._modules, *self.data, *self._points]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __missing__(self, name: str) -> T:
        """Import the module that registers a name, and return what it registered."""
        if name in self._modules:
            import_module(f"hies_export.{self._modules[name]}")  # adds the name to `data`
            return self.data[name]
        point = self._points[name]  # a KeyError for an unknown name
        load_point(point)
        if name not in self.data:
            raise _refusal(point, f"registers {', '.join(self.data) or 'nothing'}")
        return self.data[name]

    def check(self, name: str, *, what: str) -> None:
        """Raise a RequestError, which calls the name `what`, if it is not in the registry; nothing is imported."""
        if name not in self:
            raise RequestError(one_of(what, self, name))


def entry_points_of(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of `hies_export.GROUP` by name; nothing is imported."""
    return {point.name: point for point in entry_points(group=f"hies_export.{group}")}


def load_point(point: EntryPoint) -> Any:
    """Import and return what an entry point names; raise a RequestError that names its package if that fails."""
    try:
        return point.load()
    except Exception as error:
        raise _refusal(point, f"fails: {error}") from error


def _refusal(point: EntryPoint, problem: str) -> RequestError:
    """Return the error about an entry point; `problem` says what its module does, such as "fails: ..."."""
    return RequestError(
        f"the entry point {point.name} of {point.group} must import what registers that name, but {point.value} "
        f"{problem}; correct or uninstall its package"
    )


RUNTIMES: Registry[Any] = Registry(
    "runtimes",
    {
        "torch": "forms.runtimes.pytorch",
        "torch-compile": "forms.runtimes.pytorch",
        "onnxruntime-cpu": "forms.runtimes.ort",
        "onnxruntime-cpu-int8": "forms.runtimes.ort",
        "openvino": "forms.runtimes.openvino",
        "onnxruntime-cuda": "forms.runtimes.ort_gpu",
        "llamacpp": "forms.runtimes.llamacpp",
    },
)

FORMATS: Registry[Any] = Registry(
    "formats", {"onnx": "forms.onnx.quantize", "openvino": "forms.openvino.export", "gguf": "forms.gguf.export"}
)

# In the order of help and of error messages.
_CRITERIA = ("hies", "his", "fisher", "ad", "l2", "random", "activation")
CRITERIA: Registry[Any] = Registry("criteria", dict.fromkeys(_CRITERIA, "score.criteria"))
# Not in `CRITERIA`, because it needs more than averages per unit; see `score_compensated`.
COMPENSATED = "compensated"
# Chooses among criteria on held-out rows; see `pipeline.choose`.
AUTO = "auto"


def criterion_names() -> tuple[str, ...]:
    """Return the names of all criteria that a recipe may use."""
    return (*CRITERIA, COMPENSATED, AUTO)
