"""Give dataclasses that report.json holds its keys, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Record(Mapping[str, Any]):
    """A dataclass that is also the mapping that report.json holds: `report.quality.slim`, `report.quality["slim"]`.

    Subclasses are dataclasses with `eq=False`, which makes them equal to a mapping of the same values.
    """

    def __getitem__(self, key: str) -> Any:
        return vars(self)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))
