"""Fetch the files of a checkpoint, and copy those beside its weights that a slim one needs, and no others."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from ..errors import RequestError, refusing
from ..model.internals import commit_of, file_of
from ..model.online import hub_or_cache
from ..model.sentence import TextEncoder
from .classes import read_config
from .weights import weight_files


def _in_any_case(pattern: str) -> str:
    """Return a pattern that matches letters of both cases, for `glob` and for the Hub's client."""
    return "".join(f"[{letter.lower()}{letter.upper()}]" if letter.isalpha() else letter for letter in pattern)


# What says by whom a model is and what one may do with it. README is left out: a slim model has a card of its own.
DOCUMENTS = (
    *map(_in_any_case, ("*license*", "*licence*", "licenses/*", "notice*", "copying*", "copyright*", "patents*")),
    *map(_in_any_case, ("*use_policy*", "terms*", "citation*", "authors*", "*.md")),
    "data_config.json",  # the training data of a SentenceTransformer
)
CARD = "README.md"
# Files that make the folder of a checkpoint that of a SentenceTransformer or CrossEncoder.
SENTENCE_FILES = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json")
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

logger = logging.getLogger(__name__)


def fetch(model: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint, after fetching the files of a Hub id, at a revision if one is given."""
    read_config(model, revision=revision)
    with _fetching(model):
        weight_files(model, revision=revision)
    return fetch_files(model, (CONFIG_NAME, GENERATION_CONFIG_NAME, *SENTENCE_FILES, *COMPANIONS), revision)


def fetch_files(model: str | Path, patterns: Sequence[str], revision: str | None = None) -> Path:
    """Return the folder of a checkpoint, after fetching those files of a Hub id whose names match a pattern."""
    folder = str(model)
    if not Path(model).is_dir():
        with _fetching(model):
            folder = snapshot_download(folder, allow_patterns=list(patterns), revision=revision)
    return Path(folder)


@contextmanager
def _fetching(model: str | Path) -> Iterator[None]:
    """Refuse a model whose files cannot be fetched in the block."""
    remedy = "try again, or give the folder of a download"
    with (
        refusing(f"the files of {model} must be on this machine or on the Hub, but", remedy),
        hub_or_cache(model, "model"),
    ):
        yield


def copy_companions(source: Path, folder: Path, patterns: Sequence[str] = COMPANIONS) -> None:
    """Copy the files that match a pattern and are not in the folder yet: by default processor and documents.

    The card and hidden files are left out.
    Links are followed only as the Hub's cache uses them: from a snapshot to the blobs of the same repository. Others
    are left out with a warning, because they may lead to files that must not be passed on.
    """
    root = source.resolve()
    for pattern in patterns:
        for path in sorted(source.glob(pattern)):
            name = path.relative_to(source)
            if not path.is_file() or (folder / name).exists() or name.name.lower().startswith((".", "readme")):
                continue
            real = path.resolve()
            if real != root / name and not _is_blob(real, root):
                logger.warning(
                    "%s was not copied, because it is a link to %s; copy it if it is the model's", path, real
                )
                continue
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(real, folder / name)


def documents_of(model: PreTrainedModel) -> Path | None:
    """Return the folder with the documents and the card of what a model was loaded from; None if it is not known.

    Those of a model that was loaded from the Hub are fetched.
    """
    if isinstance(model, TextEncoder):
        return model.settings.folder or documents_of(model.auto_model)
    name = model.config.name_or_path
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        config = file_of(name, CONFIG_NAME, local_files_only=True)
        # The commit that the cache has; a name without one may be that of a folder that is gone.
        return None if config is None else fetch_files(name, DOCUMENTS, commit_of(config))
    except (OSError, RequestError) as error:
        logger.warning("no licence was copied, as the files of %s cannot be read; add it: %s", name, error)
        return None


def copy_documents(model: PreTrainedModel, folder: Path) -> None:
    """Copy the licence and other documents of what a model was loaded from, if that is known."""
    source = documents_of(model)
    if source is not None:
        copy_companions(source, folder, DOCUMENTS)


def _is_blob(file: Path, snapshot: Path) -> bool:
    """Return whether a file is a blob of the repository whose snapshot a folder is, in a cache of the Hub."""
    return snapshot.parent.name == "snapshots" and file.is_relative_to(snapshot.parents[1] / "blobs")
