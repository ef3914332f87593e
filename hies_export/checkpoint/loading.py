"""Load a slim checkpoint without executing code from its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import cached_file

from ..cut import slim_class
from ..errors import RequestError


def load(path: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Load a checkpoint, slim or not, as the model class it was saved from.

    The folder's own `modeling_hies.py` is not executed: the same code ships with this package. A checkpoint whose heads
    were pruned by transformers 4 (`pruned_heads` in its config) comes as a slim model, which can be saved as one.

    Args:
        path: Folder or Hub id.
        **kwargs: Passed to `from_pretrained`, e.g. `dtype` (default: the checkpoint's own), `revision`, `token`.

    Returns:
        The model, in evaluation mode.

    Raises:
        RequestError: There is no model at `path`, or its class is not one of transformers'.

    Examples:
        >>> slim.save_pretrained(folder / "slim")
        >>> type(load(folder / "slim")).__name__, count_parameters(load(folder / "slim")) == count_parameters(slim)
        ('BertForSequenceClassification', True)
    """
    hub = hub_options(kwargs)
    if read_config(path, **hub).get("pruned_heads"):
        from .version4 import load_version4

        return load_version4(path, **kwargs)[0]
    model_class = find_model_class(path, **hub)
    try:
        return model_class.from_pretrained(path, **kwargs)
    except OSError as error:
        raise RequestError(f"the model at {path} cannot be loaded: {_first_line(error)}") from error


class HIESModel:
    """The Auto class of slim checkpoints: `HIESModel.from_pretrained("user/repo")` is `load("user/repo")`.

    The task class is the one the checkpoint was saved from, e.g. `BertForSequenceClassification`.
    """

    def __init__(self) -> None:
        raise TypeError("HIESModel makes models of any class; use HIESModel.from_pretrained(folder or Hub id)")

    @classmethod
    def from_pretrained(cls, path: str | Path, **kwargs: Any) -> PreTrainedModel:
        """Load a checkpoint, slim or not; see `load`."""
        return load(path, **kwargs)


def hub_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options of `from_pretrained` that say where and how to look on the Hub."""
    return {k: options[k] for k in ("revision", "token", "cache_dir", "local_files_only") if k in options}


def find_model_class(path: str | Path, **hub: Any) -> type[PreTrainedModel]:
    """The class a checkpoint names in its config, as its slim twin where the checkpoint is a slim one.

    Args:
        path: Folder or Hub id.
        **hub: Where and how to look on the Hub, as in `from_pretrained`.

    Raises:
        RequestError: There is no config at `path`, or its class is not one of transformers'.
    """
    config = read_config(path, **hub)
    names = config.get("architectures") or []
    stock = getattr(transformers, names[0], None) if len(names) == 1 else None
    if not (isinstance(stock, type) and issubclass(stock, PreTrainedModel)):
        raise RequestError(
            f"the config of a model must name one model class of transformers {transformers.__version__} in "
            f"'architectures', but {path} names {names or 'none'}"
        )
    return slim_class(stock) if "hies_export" in config else stock


def read_config(path: str | Path, **hub: Any) -> dict[str, Any]:
    """The config.json of a folder or Hub id.

    Raises:
        RequestError: There is none.
    """
    try:
        file = cached_file(str(path), "config.json", **hub)
        return json.loads(Path(str(file)).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        # What the Hub's client says of an absolute path is about repository names.
        local = Path(path).is_absolute() or Path(path).exists()
        reason = "there is no config.json" if local else _first_line(error)
        raise RequestError(
            f"a model must be a folder with a config.json or a Hub id, but {path} is not: {reason}"
        ) from error


def load_config(path: str | Path, **hub: Any) -> Any:
    """The `PreTrainedConfig` of a folder or Hub id, without loading weights or executing code from it.

    Raises:
        RequestError: There is none, or this transformers does not know its model type.
    """
    config = read_config(path, **hub)
    try:
        return AutoConfig.for_model(**config)
    except (KeyError, ValueError, TypeError) as error:
        raise RequestError(
            f"the config of a model must have a model_type known to transformers {transformers.__version__}, but "
            f"{path} has {config.get('model_type')!r}: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
