"""The data that tasks read, imported once a task reads some; see `hies_export/late.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..late import Late

if TYPE_CHECKING:
    from .. import data
    from ..data import Batch
else:
    data, Batch = Late("hies_export.data"), Any
