"""hies_lab, hidden from all tests but its own and those of pages and benches: the product is proved to need none."""

import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

from hies_export import entry_points

TESTS = Path(__file__).parents[1]
SHOWN = {TESTS / "lab", TESTS / "test_docs.py", TESTS / "cli" / "test_bench_scripts.py"}


class Lab:
    """What finds hies_lab and its entry points, only where they are `shown`."""

    def __init__(self) -> None:
        self._shown = False
        self._modules: dict[str, ModuleType] = {}
        self._criteria: dict[str, Any] = {}
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        entry_points.entry_points = self._entry_points  # type: ignore[assignment]

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Refuse the import, or leave it to others."""
        if _is_lab(name) and not self._shown:
            raise ModuleNotFoundError("hies_lab is hidden: see tests/support/lab.py", name=name)

    def _entry_points(self, *, group: str) -> list[EntryPoint]:
        found = importlib.metadata.entry_points(group=group)
        return [point for point in found if self._shown or not _is_lab(point.value)]

    @contextmanager
    def shown(self, path: Path) -> Iterator[None]:
        """Show hies_lab in the block, if a path is one of `SHOWN`, or inside."""
        if SHOWN.isdisjoint([path, *path.parents]):
            yield
            return
        self._shown, criteria = True, entry_points.CRITERIA
        sys.modules |= self._modules
        criteria.data |= self._criteria
        vars(criteria).pop("_points", None)
        try:
            yield
        finally:
            self._shown = False
            self._modules = {name: sys.modules.pop(name) for name in [*sys.modules] if _is_lab(name)}
            lab = [name for name, one in criteria.data.items() if _is_lab(one.function.__module__)]
            self._criteria = {name: criteria.data.pop(name) for name in lab}
            vars(criteria).pop("_points", None)


def _is_lab(name: str) -> bool:
    return name.partition(".")[0] == "hies_lab"


LAB = Lab()
