"""Find the config and the model class of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from pydantic import ConfigDict, model_validator
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from ..errors import MERGE, RequestError, did_you_mean, quoted, refusing
from ..files import Rule, Schema, read_json
from ..model.internals import configs_in, layers_unwarned, use_torch_attention
from ..model.modeling_hies import keep_layers_for_files
from ..slim.config import slim_class
from .beside import fetch
from .folders import MUST, refuse_other

AGAIN = "save or fetch the checkpoint again"
CORRECT = "correct it there, or save the checkpoint again"
FLOATING = (
    "give the checkpoint that it was made from, or if its weights are floating-point numbers after all, remove "
    "quantization_config from its config.json"
)
CODE = "it needs code of its own (auto_map), which is never run; give a model of a class of transformers"
_VALUES = "the config of a model must have values that its class takes, but {} has others"
_CONFIG = Rule("the config of a model must be what transformers or hies_export wrote", CORRECT)
# The deepest models have about two hundred layers; building a million would fill the memory, even without weights.
MOST_LAYERS = 1000
# transformers makes a name for each class; the largest data sets of images and of texts have some ten thousands.
MOST_CLASSES = 1_000_000
_LAYERS = re.compile(r"(layers?|depths?|n_blocks|num_blocks)$")


class _Config(Schema):
    """The fields of a config.json that this package reads itself, and limits of others that could fill the memory."""

    model_config = ConfigDict(extra="allow")

    model_type: str | None = None
    architectures: list[str] | None = None
    hies_export: dict[str, Any] | None = None
    pruned_heads: dict[str, list[int]] | None = None

    @model_validator(mode="after")
    def _buildable(self) -> _Config:
        """Refuse counts of layers and classes that would fill the memory when the model is built."""
        for fields in _nested_fields(self.model_extra or {}):
            for name, value in fields.items():
                if name == "num_labels" and isinstance(value, int) and value > MOST_CLASSES:
                    raise ValueError(f"{name} must be at most {MOST_CLASSES}, got {quoted(value)}")
                counts = (value if isinstance(value, list) else [value]) if _LAYERS.search(name) else []
                for count in counts:
                    if isinstance(count, int) and count > MOST_LAYERS:
                        raise ValueError(f"{name} must be at most {MOST_LAYERS}, got {quoted(count)}")
        return self


def _nested_fields(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the fields of a config.json, and those of each config inside it."""
    yield fields
    for name, value in fields.items():
        # Names of classes may be any words: ImageNet's "players" ends in "layers", but is no number of layers.
        if isinstance(value, dict) and name not in ("id2label", "label2id"):
            yield from _nested_fields(value)


def find_model_class(path: str | Path) -> type[PreTrainedModel]:
    """Return the model class of a checkpoint folder or Hub id; see `class_named` and `read_config`."""
    return class_named(read_config(path), path)


def class_named(config: Mapping[str, Any], path: str | Path) -> type[PreTrainedModel]:
    """Return the class that a config.json names, or its slim version if the checkpoint is slim; refuse others."""
    names = config.get("architectures") or []
    stock = getattr(transformers, names[0], None) if len(names) == 1 else None
    if not (isinstance(stock, type) and issubclass(stock, PreTrainedModel)):
        if config.get("auto_map"):
            raise RequestError(
                f"the config of a model must name a class of transformers {transformers.__version__} in "
                f"'architectures', but {path} names {quoted(names)}; {CODE}"
            )
        raise RequestError(
            f"the config of a model must name one model class of transformers {transformers.__version__} in "
            f"'architectures', but {path} names {quoted(names) if names else 'none'}; upgrade transformers, or write "
            f"the class that it was trained with into its config.json{did_you_mean(' '.join(names), dir(transformers))}"
        )
    return slim_class(stock) if "hies_export" in config else stock


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the config.json of a folder or Hub id; raise a `RequestError` if there is none or it is damaged."""
    config: dict[str, Any] = read_json(_config_file(path), _Config, _CONFIG)
    return config


def _config_file(path: str | Path) -> Path:
    """Return the path of the config.json of a folder or Hub id; refuse one without."""
    folder = fetch(path)
    if not (folder / "config.json").is_file():
        refuse_other(folder)
        raise RequestError(f"{MUST}, but {path} has no config.json")
    return folder / "config.json"


def refuse_adapter(path: str | Path) -> None:
    """Refuse a checkpoint with an adapter beside its weights, which transformers loads only if peft is installed."""
    if Path(path, "adapter_config.json").is_file():
        raise RequestError(
            f"a checkpoint must be one model, but {path} has an adapter (adapter_config.json) beside its weights; "
            f"{MERGE}, or remove the adapter's files if they are not meant"
        )


def load_config(path: str | Path) -> Any:
    """Return the `PreTrainedConfig` of a folder or Hub id, without executing code from it."""
    file = _config_file(path)
    fields = read_json(file, _Config, _CONFIG)
    model_type = fields.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise RequestError(
            f"the config of a model must have a model_type known to transformers {transformers.__version__}, but that "
            f"of {path} has {quoted(model_type)}; upgrade transformers, or give the type of the class that it was "
            f"trained with{did_you_mean(model_type or '', CONFIG_MAPPING)}"
        )
    with refusing(_VALUES.format(file), CORRECT), layers_unwarned():
        # The class reads the file itself: there, infinity is {"__float__": "Infinity"}.
        config = CONFIG_MAPPING[model_type].from_json_file(file)
        keep_layers_for_files(config)
        check_text_config(config)
        use_torch_attention(config)
    return config


def config_of_class(model_class: Any, path: str | Path) -> Any:
    """Return the `PreTrainedConfig` of a folder as a model class reads it."""
    with refusing(_VALUES.format(path), CORRECT), layers_unwarned():
        config = model_class.config_class.from_pretrained(path)
        keep_layers_for_files(config)
        return config


def is_quantised(config: Any) -> bool:
    """Return whether a config, or one inside it, says that the weights are quantised."""
    return any(getattr(each, "quantization_config", None) is not None for each in configs_in(config))


def refuse_quantised(config: Any, path: str | Path) -> None:
    """Refuse to cut or to quantise a checkpoint whose config says that its weights are quantised."""
    if is_quantised(config):
        raise RequestError(f"the weights must be floating-point numbers, but {path} is quantised; {FLOATING}")


def check_text_config(config: Any) -> None:
    """Raise a TypeError if a config's sub-config for texts, such as its `text_config`, is not a config."""
    inner = config.get_text_config()
    if not isinstance(inner, PreTrainedConfig):
        raise TypeError(f"its text_config, decoder, generator or text_encoder must be a config, got {quoted(inner)}")
