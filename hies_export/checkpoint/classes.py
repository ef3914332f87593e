"""Find the config and the model class of a checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from pydantic import ConfigDict, model_validator
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from ..errors import RequestError, quoted, refusing
from ..files import Rule, Schema, read_json
from ..model.internals import file_of
from ..model.online import hub_or_cache
from ..slim.config import slim_class
from .contents import MUST, refuse_other

AGAIN = "save or fetch the checkpoint again"
_CONFIG = Rule("the config of a model must be what transformers or hies_export wrote", AGAIN)
# The deepest models have about two hundred layers; building a million would fill the memory, even without weights.
MOST_LAYERS = 1000
_LAYERS = re.compile(r"(layers?|depths?|n_blocks|num_blocks)$")


class _Config(Schema):
    """The fields of a config.json that this package reads itself, and the most layers that it may ask for."""

    model_config = ConfigDict(extra="allow")

    model_type: str | None = None
    architectures: list[str] | None = None
    hies_export: dict[str, Any] | None = None
    pruned_heads: dict[str, list[int]] | None = None

    @model_validator(mode="after")
    def _buildable(self) -> _Config:
        for name, count in _layer_counts(self.model_extra or {}):
            if count > MOST_LAYERS:
                raise ValueError(f"{name} must be at most {MOST_LAYERS}, got {quoted(count)}")
        return self


def _layer_counts(fields: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield name and value of every number of layers in a config, those of the configs inside it too."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _layer_counts(value)
        elif _LAYERS.search(name):
            counts = value if isinstance(value, list) else [value]
            yield from ((name, count) for count in counts if isinstance(count, int))


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
    config: dict[str, Any] = read_json(_config_file(path, **hub), _Config, _CONFIG)
    return config


def _config_file(path: str | Path, **hub: Any) -> Path:
    file: Path | None = Path(path) / "config.json"
    # The Hub's client refuses an absolute path as a bad repository name, which misleads.
    if not (Path(path).is_absolute() or os.path.exists(path)):
        offline = hub.get("local_files_only", False)
        with refusing(f"{MUST}, but {path} is not", AGAIN), hub_or_cache(path, "model", local_files_only=offline):
            file = file_of(path, "config.json", required=True, **hub)
    if file is None or not file.is_file():
        refuse_other(path)
        raise RequestError(f"{MUST}, but {path} has no config.json")
    return file


def load_config(path: str | Path, **hub: Any) -> Any:
    """Return the `PreTrainedConfig` of a folder or Hub id, without executing code from it."""
    file = _config_file(path, **hub)
    config = read_json(file, _Config, _CONFIG)
    must = f"the config of a model must have a model_type known to transformers {transformers.__version__} and values"
    with refusing(f"{must} it takes, but {path} has {quoted(config.get('model_type'))}", AGAIN):
        # The class reads the file itself: there, infinity is {"__float__": "Infinity"}.
        found = CONFIG_MAPPING[config["model_type"]].from_json_file(file)
        check_text_config(found)
        return found


def check_text_config(config: Any) -> None:
    """Refuse a config whose part for texts, where most fields are read, is not a config too."""
    part = config.get_text_config()
    if not isinstance(part, PreTrainedConfig):
        raise TypeError(f"its text_config, decoder, generator or text_encoder must be a config, got {quoted(part)}")
