"""Stand-ins for large libraries, which import them at the first use.

A recipe is checked against the class attributes of tasks before torch is imported, which takes seconds; and libraries
that read rows and compute metrics take 140 MB, which pruning on batches of tensors does without. So files import these
names from here, as if they were the modules themselves, and the types, which only annotations name.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import datasets
    import evaluate
    import numpy as np
    import pandas
    import pyarrow as pa
    import sklearn.metrics as sklearn_metrics
    import torch
    from pyarrow import parquet
    from scipy import interpolate, stats
    from torch import Tensor
    from transformers import PreTrainedModel


class Late:
    """A module that is imported when it is first asked for one of its names."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


if not TYPE_CHECKING:
    np, torch = map(Late, ("numpy", "torch"))
    datasets, evaluate, pandas = map(Late, ("datasets", "evaluate", "pandas"))
    pa, parquet = map(Late, ("pyarrow", "pyarrow.parquet"))
    interpolate, sklearn_metrics, stats = map(Late, ("scipy.interpolate", "sklearn.metrics", "scipy.stats"))
    PreTrainedModel = Tensor = Any


def is_data_set(given: object) -> TypeGuard[datasets.Dataset]:
    """Return whether something is a `datasets.Dataset`, without importing that library to find out."""
    return "datasets" in sys.modules and isinstance(given, datasets.Dataset)
