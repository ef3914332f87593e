"""Load a slim checkpoint without executing code from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..model.internals import never_asking
from .classes import class_named, hub_options, read_config
from .version4 import load_version4
from .weights import load_weights


@never_asking()
def load(path: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Load a checkpoint, slim or not, as the model class it was saved from.

    The folder's own `modeling_hies.py` is not executed, as the same code ships with this package. A checkpoint whose
    heads were pruned by transformers 4 (`pruned_heads` in its config) loads as a slim model.

    Args:
        path: Folder or Hub id.
        **kwargs: Passed to `from_pretrained`, such as `dtype` (default: the checkpoint's own), `revision`, `token`.

    Returns:
        The model, in evaluation mode.

    Raises:
        RequestError: There is no model at `path`, its class is not one of transformers', or its files are damaged,
            incomplete or do not fit each other.

    Examples:
        >>> slim.save_pretrained(folder / "slim")
        >>> type(load(folder / "slim")).__name__, count_parameters(load(folder / "slim")) == count_parameters(slim)
        ('BertForSequenceClassification', True)
    """
    config = read_config(path, **hub_options(kwargs))
    if config.get("pruned_heads"):
        return load_version4(path, **kwargs)[0]
    return load_weights(class_named(config, path), path, **kwargs)


class HIESModel:
    """Load slim checkpoints as an Auto class does: `HIESModel.from_pretrained("user/repo")` is `load("user/repo")`.

    The model is of the class that the checkpoint was saved from, such as `BertForSequenceClassification`.
    """

    def __init__(self) -> None:
        raise TypeError("HIESModel makes models of any class; use HIESModel.from_pretrained(folder or Hub id)")

    @classmethod
    def from_pretrained(cls, path: str | Path, **kwargs: Any) -> PreTrainedModel:
        """Load a checkpoint, slim or not; see `load`."""
        return load(path, **kwargs)
