"""What tasks compute with, imported once something of it is needed.

A recipe is checked against the class attributes of tasks before torch is imported, which takes seconds. So the files of
tasks import these names from here, as if they were the modules themselves, and the types, which only annotations name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Batch", "PreTrainedModel", "Tensor", "data", "datasets", "np", "torch"]

if TYPE_CHECKING:
    import datasets
    import numpy as np
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from .. import data
    from ..data import Batch
else:

    class _Late:
        """A module that is imported when it is first asked for one of its names."""

        def __init__(self, module: str) -> None:
            self._module = module

        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module(self._module), name)

    data, datasets, np, torch = map(_Late, ("hies_export.data", "datasets", "numpy", "torch"))
    Batch = PreTrainedModel = Tensor = Any
