"""Add settings that some readers need, and that transformers leaves out, to a saved folder."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..model.internals import layers_unwarned
from ..model.sentence import TextEncoder
from ..slim.config import is_slim


def complete_settings(model: PreTrainedModel, folder: Path) -> None:
    """Complete the config and the tokenizer's settings of a model that was saved in a folder, in place."""
    file = folder / "config.json"
    _keep_labels(model.config, file)
    written = completed = json.loads(file.read_text(encoding="utf-8"))
    if not is_slim(model):  # a slim class of ours needs transformers 5
        older = _with_older_keys(completed)
        completed = older if _reads_the_same(type(model.config), older, completed) else completed
    if completed != written:
        _write(completed, file)
    name_tokenizer(folder)


def write_config(model: PreTrainedModel, folder: Path) -> None:
    """Write the config of a model beside its export, without pointers to code, and with a mark of who wrote it."""
    config = copy.deepcopy(model.config)
    of_config = model.auto_model if isinstance(model, TextEncoder) else model
    config.architectures = [type(of_config).__name__]
    config.dtype = model.dtype
    if hasattr(config, "auto_map"):
        del config.auto_map
    config.exported_by = "hies-export"
    config.to_json_file(folder / "config.json")
    _keep_labels(config, folder / "config.json")


def name_tokenizer(folder: Path) -> None:
    """Name the tokenizer's class and its special tokens in a folder as transformers 4 does, which 5 reads too."""
    file = folder / "tokenizer_config.json"
    if not file.exists():
        return
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):  # `apply` copies the file as it is
        return
    if not isinstance(written, dict):
        return
    settings = dict(written)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if settings != written:
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _keep_labels(config: Any, file: Path) -> None:
    """Write the labels of a classifier into its saved config if transformers left some out.

    It leaves out two labels with its default names, LABEL_0 and LABEL_1, even if the config's class has another number
    of labels by default, such as three in `BartConfig`. The head would then be loaded with that number of outputs. It
    also leaves out a `label2id` that was never set beside an `id2label` that was.
    """
    with layers_unwarned():
        read = type(config).from_json_file(file)
    if config.id2label and (read.num_labels != config.num_labels or not read.label2id):
        labels = {
            "id2label": {str(number): label for number, label in config.id2label.items()},
            "label2id": {str(label): int(number) for number, label in config.id2label.items()},
        }
        _write({**json.loads(file.read_text(encoding="utf-8")), **labels}, file)


def _write(config: Mapping[str, Any], file: Path) -> None:
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _with_older_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved config with the settings of rotary embeddings under the keys of transformers 4 too.

    Version 5 writes them into `rope_parameters`. Version 4 does not read that, uses the defaults of the class, and so
    computes something else without an error. If kinds of layers differ in their parameters, nothing is added: the keys
    of version 4 hold for all layers.
    """
    parts = {key: _with_older_keys(value) for key, value in config.items() if isinstance(value, dict)}
    rotary, older = config.get("rope_parameters"), {}
    if isinstance(rotary, dict) and "rope_theta" in rotary:
        names = _OLDER_NAMES.get(config.get("model_type", ""), _OLDER)
        older = {names[key]: rotary[key] for key in names if key in rotary}
        scaling = {key: value for key, value in rotary.items() if key not in names}
        if scaling.keys() - {"rope_type"} or scaling.get("rope_type", "default") != "default":
            older["rope_scaling"] = scaling
        elif config.get("model_type") in _SCALED_BY_DEFAULT:
            older["rope_scaling"] = None
    return {**older, **config, **parts}


def _reads_the_same(config_class: Any, longer: dict[str, Any], config: dict[str, Any]) -> bool:
    """Return whether transformers 5 reads a config with more keys as the same; some classes interpret them differently.

    The keys themselves may stay, as fields that nothing reads.
    """
    try:
        # Copies: a config keeps the dicts that it is made from, and adds to them.
        return _covers(*(config_class.from_dict(copy.deepcopy(keys)).to_dict() for keys in (longer, config)))
    except Exception:  # whatever a config's own code raises on keys that it does not expect
        return False


def _covers(one: Any, other: Any) -> bool:
    """Return whether every field of `other` is in `one`, with the same value."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return bool(one == other)
    return all(key in one and _covers(one[key], value) for key, value in other.items())


# Key in `rope_parameters` -> the key of transformers 4 at the top of the config; by model type where that has its own.
_OLDER = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
# Without `rope_scaling`, transformers 4 scales the embeddings of these types as their first checkpoints do.
_SCALED_BY_DEFAULT = ("apertus", "gpt_oss")
_OLDER_NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
