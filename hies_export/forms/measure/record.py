"""Make dataclasses readable like the JSON that they are written to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Record(Mapping[str, Any]):
    """Base of dataclasses that are also mappings: `report.quality.slim` and `report.quality["slim"]` are the same.

    Subclasses are dataclasses with `eq=False`, so that they equal a mapping with the same items.
    """

    def __getitem__(self, key: str) -> Any:
        return vars(self)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))
