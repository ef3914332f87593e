"""Run an exported embedding model as the module of a SentenceTransformer.

The `modules.json` of an export by `hies-export export` names `hies_export.served.OnnxEncoder`, which
sentence-transformers imports if this package is installed. The graph does it all, from tokens to the embedding.

    SentenceTransformer(folder, trust_remote_code=True).encode(texts)

sentence-transformers needs `trust_remote_code` for modules that are not its own, also of local folders.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn

from .checkpoint.sentence import SERVED_FILE, read_served
from .forms.runtimes.base import Runtime, load_runtime


class Graph(nn.Module):
    """A graph in ONNX Runtime or OpenVINO, in place of a model of transformers.

    `folder` holds the graph and its settings, and `config` is that of the model that was exported.
    """

    def __init__(self, folder: Path, config: Any) -> None:
        super().__init__()
        self.folder, self.config, self.settings = folder, config, read_served(folder)
        self._loaded: Runtime | None = None
        self._runtime()  # so that a runtime that cannot load it is refused now, not at the first text

    def _runtime(self) -> Runtime:
        """Return the open session; open it where there is none, as in another process."""
        if self._loaded is None:
            served = self.settings
            file = self.folder / served.file
            self._loaded = load_runtime(served.runtime, file, threads=served.threads, dtype=served.dtype)
        return self._loaded

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the session, which cannot be copied or sent to another process: it is opened there."""
        return {**self.__dict__, "_loaded": None}

    def forward(self, **tokens: Tensor) -> dict[str, Tensor]:
        """Return the outputs of the graph by name, on the device of the tokens."""
        device = tokens["input_ids"].device
        return {name: torch.from_numpy(array).to(device) for name, array in self._runtime().compute(tokens).items()}

    def save_pretrained(self, path: str, **_: Any) -> None:
        """Copy the graph and its settings, and write the config."""
        stem, target = Path(self.settings.file).stem, Path(path)
        for source in (*self.folder.glob(f"{stem}.*"), self.folder / SERVED_FILE):
            if source.is_file() and source.resolve() != (target / source.name).resolve():
                shutil.copyfile(source, target / source.name)
        self.config.save_pretrained(path)


class OnnxEncoder(Transformer):  # type: ignore[misc, unused-ignore]
    """Reads texts as a Transformer does, and embeds them by a graph in ONNX Runtime or OpenVINO."""

    def _load_model(self, path: str, task: str, config: Any, *args: Any, **kwargs: Any) -> Graph:
        return Graph(Path(path), config)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add to the features, in place, embeddings of texts (texts, dimension) and tokens (texts, tokens, width)."""
        outputs = self.model(**{name: value for name, value in features.items() if isinstance(value, Tensor)})
        for name, output in (("sentence_embedding", "sentence_embedding"), ("token_embeddings", "last_hidden_state")):
            if output in outputs:
                features[name] = outputs[output]
        return features

    def get_embedding_dimension(self) -> int:
        """Return the width of the embeddings."""
        return self.model.settings.dimension

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> OnnxEncoder:
        """Load the module from a folder, or from a repository of the Hub, which is fetched."""
        names = ("token", "cache_folder", "revision", "local_files_only")
        hub = {name: kwargs[name] for name in names if name in kwargs}
        folder = cls.load_dir_path(model_name_or_path, subfolder=subfolder, **hub)
        return super().load(folder, **kwargs)
