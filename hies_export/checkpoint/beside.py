"""Read and write the files beside the weights: processor, card, and settings that transformers leaves out."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData, metadata_load, snapshot_download, try_to_load_from_cache
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from ..errors import RequestError, refusing
from ..model.internals import commit_of, configs_in
from ..model.text_encoder import TextEncoder
from ..slim.config import is_slim
from .folders import refuse_other

logger = logging.getLogger(__name__)


def _in_any_case(pattern: str) -> str:
    """Return a glob pattern that ignores case, for `Path.glob` and the Hub's client."""
    return "".join(f"[{letter.lower()}{letter.upper()}]" if letter.isalpha() else letter for letter in pattern)


# Files about authors, licence and use. README is left out: a slim model has a card of its own.
DOCUMENTS = (
    *map(_in_any_case, ("*license*", "*licence*", "licenses/*", "*use_policy*", "terms*", "notice*", "copying*")),
    *map(_in_any_case, ("copyright*", "patents*", "citation*", "authors*", "*.md")),
    "data_config.json",  # the training data of a SentenceTransformer
)
CARD = "README.md"
MODULES_FILE = "modules.json"  # of sentence-transformers, which loads a folder that has one
# Vocabularies of tokenizers. transformers saves tokenizer.json instead, but converters to other formats read these.
VOCABULARIES = (
    *("vocab.json", "vocab.txt", "merges.txt", "bpe.codes", "dict.txt", "vocab-src.json", "vocab-tgt.json"),
    *("entity_vocab.json", "target_vocab.json", "word_shape.json", "word_pronunciation.json", "emoji.json"),
    *("tokenizer.model*", "spiece.model", "spm.model", "spm_char.model", "sentencepiece*.model"),
    *("*.spm", "*.tiktoken", "tekken.json", "prophetnet.tokenizer", "normalizer.json", "byte_maps.json"),
)
# Files of tokenizers, image processors and their chat templates.
PROCESSORS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("audio_tokenizer_config.json", "chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
    *VOCABULARIES,
)
COMPANIONS = (*PROCESSORS, *DOCUMENTS)
SETTINGS = ("*.json", "*.jinja", *COMPANIONS)  # all files of a repository but weights
# The weights that transformers and sentence-transformers read; the latter's modules have folders such as 2_Dense.
WEIGHTS = ("model.safetensors", "model-*.safetensors", "[0-9]*_*/*")
OLDER_WEIGHTS = ("pytorch_model.bin", "pytorch_model-*.bin")


def fetch(model: str | Path, patterns: Sequence[str] = SETTINGS, **hub: Any) -> Path:
    """Return the folder of a checkpoint; of a Hub id, fetch the files that match a pattern first.

    By default these are all but weights. The Hub's client, which takes options `hub` such as `revision`, uses its cache
    if the Hub does not answer.
    """
    if Path(model).is_dir():
        return Path(model)
    refuse_other(model)
    must = f"a model must be a folder, on the Hub or in its cache, but {model} is not"
    with refusing(must, "give a folder, or try again when the Hub answers"):
        return Path(snapshot_download(str(model), allow_patterns=list(patterns), **hub))


def fetch_whole(model: str | Path, **hub: Any) -> Path:
    """Return the folder of a checkpoint; of a Hub id, fetch its settings and its weights first."""
    folder = fetch(model, (*SETTINGS, *WEIGHTS), **hub)
    return folder if any(folder.glob("model*.safetensors")) else fetch(model, OLDER_WEIGHTS, **hub)


def copy_companions(source: Path, folder: Path, patterns: Sequence[str] = COMPANIONS) -> None:
    """Copy the files that match a pattern and are not in the folder yet, except the card and hidden files.

    Links are followed only as the Hub's cache uses them: from a snapshot to the blobs of the same repository. Others
    are left out, because they may lead to files that must not be passed on.
    """
    root = source.resolve()
    for pattern in patterns:
        for path in source.glob(pattern):
            target, real = folder / path.relative_to(source), path.resolve()
            is_blob = root.parent.name == "snapshots" and real.is_relative_to(root.parents[1] / "blobs")
            may_be_read = path.is_file() and (is_blob or real == root / path.relative_to(source))
            if may_be_read and not target.exists() and not path.name.lower().startswith((".", "readme")):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


def documents_of(model: PreTrainedModel) -> Path | None:
    """Return the folder with the documents and card of a model's source, fetched if needed; None if it is unknown."""
    name = model.config.name_or_path
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    try:
        # Of the commit in the cache; a name that is not cached may be that of a folder that is gone.
        cached = try_to_load_from_cache(name, CONFIG_NAME)
        return fetch(name, DOCUMENTS, revision=commit_of(cached)) if isinstance(cached, str) else None
    except (ValueError, RequestError) as error:  # the former of a name that is no Hub id
        logger.warning("no licence was copied, as the files of %s cannot be read; add it: %s", name, error)
        return None


def copy_documents(model: PreTrainedModel, folder: Path) -> None:
    """Copy the licence and other documents of a model's source into a folder, if the source is known."""
    if (source := documents_of(model)) is not None:
        copy_companions(source, folder, DOCUMENTS)


# Metadata that the card of a slim model inherits from the dense model's.
LICENSE_KEYS = ("license", "license_name", "license_link")


def read_card(model: str | Path) -> dict[str, Any]:
    """Return `base_model` and the licence of a model's card, from its folder or the Hub; empty without a card."""
    try:
        metadata = metadata_load(fetch(model, (CARD,)) / CARD)
    except (RequestError, OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    if not isinstance(metadata, dict):
        return {}
    values = {key: metadata.get(key) for key in ("base_model", *LICENSE_KEYS)}
    # Values other than text and lists of text are left out.
    lists = {key: value if isinstance(value, list) else [value] for key, value in values.items()}
    return {key: values[key] for key in values if all(isinstance(item, str) for item in lists[key])}


def write_card(folder: Path, source: Path | None) -> None:
    """Write a folder's README.md with the licence that the card in `source` names, if it names one."""
    source_card = {} if source is None else read_card(source)
    licence = {key: source_card[key] for key in LICENSE_KEYS if key in source_card}
    if not licence:
        return
    library = "sentence-transformers" if (folder / MODULES_FILE).is_file() else "transformers"
    metadata = ModelCardData(library_name=library, tags=["hies-export", "pruning"], **licence).to_yaml()
    (folder / CARD).write_text(f"---\n{metadata}\n---\n\n# A slim checkpoint, cut by hies-export\n", encoding="utf-8")


def complete_settings(model: PreTrainedModel, folder: Path, source: Path | None = None) -> None:
    """Rewrite a saved model's config.json and tokenizer_config.json so that transformers 4 and others read them too.

    `source` is the folder of the dense model, if it is known.
    """
    file = folder / CONFIG_NAME
    written = completed = json.loads(file.read_text(encoding="utf-8"))
    if completed.get("tie_word_embeddings") and _has_own_head(model):
        # transformers 5 reads the head all the same, but other readers would put the embeddings in its place.
        completed = {**completed, "tie_word_embeddings": False}
    # A slim class of ours needs transformers 5.
    if source is not None and (source / CONFIG_NAME).is_file() and not is_slim(model):
        with_rotary = _with_rotary_keys(completed, json.loads((source / CONFIG_NAME).read_text(encoding="utf-8")))
        parsed = type(model.config).from_dict(copy.deepcopy(with_rotary))  # a config adds to the dict it is made from
        if _rotary_in(parsed) == _rotary_in(model.config):  # else they were changed after loading
            completed = with_rotary
    if completed != written:
        file.write_text(json.dumps(completed, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    use_version4_names(folder)


def _has_own_head(model: PreTrainedModel) -> bool:
    """Return whether the output layer of a language model has weights of its own, not those of the embeddings."""
    head = getattr(model.get_output_embeddings(), "weight", None)
    return head is not None and head is not model.get_input_embeddings().weight


def write_config(model: PreTrainedModel, folder: Path) -> None:
    """Write the config of a model beside its export, without `auto_map` and marked as written by this package."""
    config = copy.deepcopy(model.config)
    encoder = model.auto_model if isinstance(model, TextEncoder) else model  # whose config it is
    config.architectures = [type(encoder).__name__]
    config.dtype = model.dtype
    config.label2id = label_numbers(config)
    vars(config).pop("auto_map", None)
    config.exported_by = "hies-export"
    config.to_json_file(folder / CONFIG_NAME)


def use_version4_names(folder: Path) -> None:
    """Rewrite tokenizer_config.json with the class and the keys of transformers 4, which version 5 reads too."""
    file = folder / "tokenizer_config.json"
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):  # a missing or damaged file is left alone
        return
    if not isinstance(written, dict):
        return
    settings = dict(written)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if settings != written:
        write_json(file, settings)


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file in the format of tokenizers and sentence-transformers."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def label_numbers(config: Any) -> dict[str, int] | None:
    """Return label -> number of a config, by `id2label` if `label2id` was never set."""
    # transformers would leave out a `label2id` that is missing.
    if config.label2id or not config.id2label:
        return config.label2id or config.id2label
    return {str(label): int(number) for number, label in config.id2label.items()}


# Settings of rotary embeddings in a config of transformers 4; version 5 writes `rope_parameters` in their place, which
# version 4 ignores.
_ROTARY = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_emb_base", "rotary_pct")


def _with_rotary_keys(config: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the keys of rotary embeddings that it lacks and its source has, also in its sub-configs."""
    completed = {**{key: source[key] for key in _ROTARY if key in source}, **config}
    for key, value in config.items():
        if isinstance(value, dict) and isinstance(source.get(key), dict):
            completed[key] = _with_rotary_keys(value, source[key])
    return completed


def _rotary_in(config: PreTrainedConfig) -> list[Any]:
    """Return the parameters of rotary embeddings in a config and its sub-configs."""
    return [getattr(each, "rope_parameters", None) for each in configs_in(config)]
