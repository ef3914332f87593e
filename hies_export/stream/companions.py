"""The files of a checkpoint beside its weights that `apply` copies; nothing else in the folder is copied."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

# Files of tokenizers, image processors and their chat templates, and the licence of the weights.
COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "bpe.codes", "dict.txt", "vocab-src.json", "vocab-tgt.json"),
    *("entity_vocab.json", "target_vocab.json", "word_shape.json", "word_pronunciation.json", "emoji.json"),
    *("tokenizer.model*", "spiece.model", "spm.model", "spm_char.model", "sentencepiece*.model"),
    *("*.spm", "*.tiktoken", "tekken.json", "prophetnet.tokenizer", "normalizer.json", "byte_maps.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("audio_tokenizer_config.json", "chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
    *("LICENSE*", "LICENCE*", "NOTICE*"),
)

logger = logging.getLogger(__name__)


def copy_companions(source: Path, folder: Path) -> None:
    """Copy tokenizer, processor and licence files that are not in the folder yet.

    Links are followed only as the Hub's cache uses them: from a snapshot to the blobs of the same repository. Others
    are left out with a warning, because they may lead to files that must not be passed on.
    """
    root = source.resolve()
    for pattern in COMPANIONS:
        for path in sorted(source.glob(pattern)):
            name = path.relative_to(source)
            if not path.is_file() or (folder / name).exists():
                continue
            real = path.resolve()
            if real != root / name and not _is_blob(real, root):
                logger.warning(
                    "%s was not copied, because it is a link to %s; copy it if it is the model's", path, real
                )
                continue
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(real, folder / name)


def _is_blob(file: Path, snapshot: Path) -> bool:
    """Return whether a file is a blob of the repository whose snapshot a folder is, in a cache of the Hub."""
    return snapshot.parent.name == "snapshots" and file.is_relative_to(snapshot.parents[1] / "blobs")
