"""Check the JSON files of a checkpoint before transformers reads them: config, generation config, index of shards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, model_validator
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..errors import HiesError, RequestError, quoted, root_cause
from ..files import Rule, Schema, read_json
from ..model import internals
from ..model.linear import is_linear
from ..model.modeling_hies import get_attribute

# The deepest models have about a hundred layers; building a million would fill the memory.
MOST_LAYERS = 10_000
_LAYERS = re.compile(r"(layers?|depths?|n_blocks|num_blocks)$")

Size = Annotated[int, Field(ge=1, lt=2**31)]
TokenId = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class SlimBlock(Schema):
    """The `hies_export` block of a slim checkpoint's config; see `modeling_hies`."""

    linear: dict[str, Annotated[list[Size], Field(min_length=2, max_length=2)]]
    attributes: dict[str, dict[str, int]]
    parameters: dict[str, list[Size]] = Field(default_factory=dict)
    per_layer_config: dict[Annotated[str, Field(pattern=r"^\d{1,5}$")], dict[str, Size]] = Field(default_factory=dict)


class ConfigFile(Schema):
    """The fields of a config.json that this package reads itself, and the most layers that it may ask for."""

    model_config = ConfigDict(extra="allow")

    model_type: str | None = None
    architectures: list[str] | None = None
    hies_export: SlimBlock | None = None
    pruned_heads: dict[Annotated[str, Field(pattern=r"^\d{1,5}$")], list[Annotated[int, Field(ge=0)]]] | None = None

    @model_validator(mode="after")
    def _buildable(self) -> ConfigFile:
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


class GenerationFile(Schema):
    """The fields of a generation_config.json that this package reads."""

    eos_token_id: TokenId | list[TokenId] | None = None
    pad_token_id: TokenId | None = None
    bos_token_id: TokenId | list[TokenId] | None = None


class WeightIndex(Schema):
    """The index of a checkpoint in shards."""

    weight_map: Annotated[dict[str, Annotated[str, Field(min_length=1, max_length=1000)]], Field(min_length=1)]


_AGAIN = "save or fetch the checkpoint again"
CONFIG = Rule("the config of a model must be what transformers or hies_export wrote", _AGAIN)
GENERATION = Rule("a generation config must be what transformers wrote", _AGAIN)
INDEX = Rule("the index of a sharded checkpoint must name the file of every tensor", _AGAIN, megabytes=256)


def read_weight_map(index: Path) -> dict[str, str]:
    """Return tensor -> name of its file, from the index of a checkpoint in shards."""
    return {name: Path(file).name for name, file in read_json(index, WeightIndex, INDEX)["weight_map"].items()}


def check_side_files(folder: str | Path) -> None:
    """Check the JSON files beside a folder's config that transformers reads; nothing for a Hub id."""
    folder = Path(folder)
    if (folder / "generation_config.json").is_file():
        read_json(folder / "generation_config.json", GenerationFile, GENERATION)
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file() and not (folder / SAFE_WEIGHTS_NAME).is_file():
        read_weight_map(folder / SAFE_WEIGHTS_INDEX_NAME)


def check_slim_names(block: Mapping[str, Any], stock: PreTrainedModel, where: str | Path) -> None:
    """Check that every name in a `hies_export` block has the kind that the block gives it."""
    base = stock.base_model
    modules, parameters = dict(base.named_modules()), dict(base.named_parameters())
    for name in block["linear"]:
        if name not in modules or not is_linear(modules[name]):
            raise _stranger("linear", name, "a linear layer", stock, where)
    for name, shape in block.get("parameters", {}).items():
        if name not in parameters or parameters[name].dim() != len(shape):
            raise _stranger("parameters", name, f"a parameter of {len(shape)} dimensions", stock, where)
    for name, changed in block["attributes"].items():
        if name not in modules:
            raise _stranger("attributes", name, "a module", stock, where)
        for attribute in changed:
            try:
                found = get_attribute(modules[name], attribute)
            except AttributeError:
                found = None
            if not isinstance(found, int):
                raise _stranger(f'attributes["{name}"]', attribute, "a number", stock, where)


def _stranger(place: str, name: str, wanted: str, stock: PreTrainedModel, where: str | Path) -> RequestError:
    return CONFIG.refused(
        f"in {where} hies_export.{place} names {quoted(name)}, which is not {wanted} of its {type(stock).__name__}"
    )


def empty_model(model_class: type[PreTrainedModel], config: Any, where: str | Path, dtype: Any = None) -> Any:
    """Return a model of a checkpoint's config on the meta device; raise a `RequestError` if none can be built."""
    with refusing(f"no {model_class.__name__} can be built of {where}"):
        return internals.empty_model(model_class, config, dtype)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Refuse a config if the code of transformers or of its models raises anything in the block."""
    try:
        yield
    except (HiesError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each raises its own kind
        raise CONFIG.refused(f"{what} ({root_cause(error)})") from error
