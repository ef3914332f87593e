"""Find the config and the model class of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel

from ..errors import RequestError, first_line, quoted, root_cause
from ..files import read_json
from ..model.internals import file_of
from ..model.online import hub_or_cache
from ..slim.config import slim_class
from .contents import refuse_other
from .schema import CONFIG, ConfigFile, refusing


def hub_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `from_pretrained` that say where and how to look on the Hub."""
    return {k: options[k] for k in ("revision", "token", "cache_dir", "local_files_only") if k in options}


def find_model_class(path: str | Path, **hub: Any) -> type[PreTrainedModel]:
    """Return the model class of a checkpoint folder or Hub id; see `class_named` and `read_config`."""
    return class_named(read_config(path, **hub), path)


def class_named(config: Mapping[str, Any], path: str | Path) -> type[PreTrainedModel]:
    """Return the class that a config.json names, or its slim version if the checkpoint is slim."""
    names = config.get("architectures") or []
    stock = getattr(transformers, names[0], None) if len(names) == 1 else None
    if not (isinstance(stock, type) and issubclass(stock, PreTrainedModel)):
        raise RequestError(
            f"the config of a model must name one model class of transformers {transformers.__version__} in "
            f"'architectures', but {path} names {quoted(names) if names else 'none'}"
        )
    return slim_class(stock) if "hies_export" in config else stock


def read_config(path: str | Path, **hub: Any) -> dict[str, Any]:
    """Return the config.json of a folder or Hub id; raise a `RequestError` if there is none or it is damaged."""
    config: dict[str, Any] = read_json(_config_file(path, **hub), ConfigFile, CONFIG)
    return config


def _config_file(path: str | Path, **hub: Any) -> str:
    try:
        with hub_or_cache(path, "model", local_files_only=hub.get("local_files_only", False)):
            file = file_of(path, "config.json", required=True, **hub)
        if file is None:  # of a folder
            raise FileNotFoundError(path)
    except (OSError, ValueError) as error:
        # The Hub's client refuses an absolute path as a bad repository name, which misleads.
        local = Path(path).is_absolute() or os.path.exists(path)
        if local:
            refuse_other(path)
        reason = "there is no config.json" if local else first_line(error)
        raise RequestError(
            f"a model must be a folder with a config.json or a Hub id, but {path} is not: {reason}"
        ) from error
    return str(file)


def load_config(path: str | Path, **hub: Any) -> Any:
    """Return the `PreTrainedConfig` of a folder or Hub id, without executing code from it."""
    file = _config_file(path, **hub)
    config = read_json(file, ConfigFile, CONFIG)
    try:
        # The class reads the file itself: there, infinity is {"__float__": "Infinity"}.
        return CONFIG_MAPPING[config["model_type"]].from_json_file(file)
    except Exception as error:  # transformers and its configs: each raises its own kind
        raise RequestError(
            f"the config of a model must have a model_type known to transformers {transformers.__version__} and values "
            f"it takes, but {path} has {quoted(config.get('model_type'))}: {root_cause(error)}"
        ) from error


def class_config(path: str | Path, model_class: type[PreTrainedModel], **hub: Any) -> Any:
    """Return the config of a checkpoint for its class; a value that the class does not take is a `RequestError`."""
    offline = hub.get("local_files_only", False)
    with (
        refusing(f"{path} has none for {model_class.__name__}"),
        hub_or_cache(path, "model", local_files_only=offline),
    ):
        return model_class.config_class.from_pretrained(path, **hub)  # type: ignore[union-attr]
