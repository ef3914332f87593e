"""Run an exported embedding model as the module of a SentenceTransformer.

The `modules.json` of an export by `hies-export export` names `hies_export.served.OnnxEncoder`, which
sentence-transformers imports if this package is installed. The graph does it all, from tokens to the embedding.

    SentenceTransformer(folder, trust_remote_code=True).encode(texts)

Version 6 of sentence-transformers needs `trust_remote_code` for modules that are not its own, also of local folders.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

try:
    from sentence_transformers.base.modules import InputModule
except ImportError:  # version 5
    from sentence_transformers.models import InputModule

from .checkpoint.served_settings import SERVED_FILE, Served, read_served
from .data.processors import read_as_asked
from .forms.runtimes.base import Runtime, load_runtime


class OnnxEncoder(InputModule):  # type: ignore[misc, unused-ignore]
    """Embeds texts by a graph in ONNX Runtime or OpenVINO.

    Args:
        folder: Where the graph and the tokenizer are.
        settings: The graph, the runtime, and how texts are read.
    """

    config_file_name = SERVED_FILE
    save_in_root = True

    def __init__(self, folder: str | Path, settings: Served):
        super().__init__()
        self.folder, self.settings = Path(folder), settings
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        if settings.max_seq_length is not None:
            self.tokenizer.model_max_length = settings.max_seq_length
        read_as_asked(self.tokenizer, settings.attributes, lower=settings.do_lower_case)
        self._loaded: Runtime | None = None
        self._runtime()  # refused now, not at the first text

    @property
    def max_seq_length(self) -> int:
        """Longest text in tokens."""
        length: int = self.tokenizer.model_max_length
        return length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        self.tokenizer.model_max_length = value

    def _runtime(self) -> Runtime:
        if self._loaded is None:
            asked = self.settings
            file = self.folder / asked.file
            self._loaded = load_runtime(asked.runtime, file, threads=asked.threads, dtype=asked.dtype)
        return self._loaded

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the session, which cannot be copied or sent to another process: it is opened there."""
        return {**self.__dict__, "_loaded": None}

    def preprocess(
        self, inputs: Sequence[str], prompt: str | None = None, task: str | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the tokens of texts, padded to the longest; `task` is "query", "document" or none."""
        texts = [f"{prompt or ''}{text}" for text in inputs]
        options: dict[str, Any] = {"max_length": self.settings.lengths.get(task or "text")}
        options |= {"add_special_tokens": self.settings.special_tokens, "return_tensors": "pt"}
        return dict(self.tokenizer(texts, padding=True, truncation=True, **options))

    def tokenize(self, texts: Sequence[str], **kwargs: Any) -> dict[str, Any]:
        """Return the tokens of texts: the name of `preprocess` in version 5."""
        return self.preprocess(texts)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add the embeddings of texts, (texts, dimension), and of tokens, (texts, tokens, width), where there are."""
        tokens: Mapping[str, Any] = {name: v for name, v in features.items() if isinstance(v, torch.Tensor)}
        outputs = self._runtime().compute(tokens)
        device = features["input_ids"].device
        for name, output in (("sentence_embedding", "sentence_embedding"), ("token_embeddings", "last_hidden_state")):
            if output in outputs:
                features[name] = torch.from_numpy(outputs[output]).to(device)
        return features

    def get_embedding_dimension(self) -> int:
        """Return the width of the embeddings."""
        return self.settings.dimension

    def get_sentence_embedding_dimension(self) -> int:
        """Return the width of the embeddings: the name in version 5."""
        return self.settings.dimension

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings, with the longest text as it is now."""
        return {**self.settings.model_dump(), "max_seq_length": self.max_seq_length}

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Copy the graph, and write the tokenizer and the settings."""
        for source in self.folder.glob(f"{Path(self.settings.file).stem}.*"):
            if source.is_file() and source.resolve() != (Path(output_path) / source.name).resolve():
                shutil.copyfile(source, Path(output_path) / source.name)
        self.tokenizer.save_pretrained(output_path)
        self.save_config(output_path)

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        **kwargs: Any,
    ) -> OnnxEncoder:
        """Load the module from a folder, or from a repository of the Hub, which is fetched."""
        folder = cls.load_dir_path(
            model_name_or_path,
            subfolder=subfolder,
            token=token,
            cache_folder=cache_folder,
            revision=revision,
            local_files_only=local_files_only,
        )
        return cls(folder, read_served(Path(folder)))
