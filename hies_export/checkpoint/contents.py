"""Find out what a path holds."""

from __future__ import annotations

from enum import Enum
from itertools import chain
from pathlib import Path

from ..errors import MERGE, RequestError


class Contents(Enum):
    """What a local path holds, in words that end "PATH is ..."."""

    NOTHING = "not there"
    CHECKPOINT = "a checkpoint"
    ONNX = "an ONNX folder"
    OPENVINO = "an OpenVINO folder"
    GGUF = "a GGUF file"
    RUN = "the folder of a run"
    ADAPTER = f"an adapter without its model; {MERGE}"
    SCORED = "a folder of scores and their plan"
    SWEEP = "the folder of a sweep"
    OTHER = "something else"


MUST = "a model must be a folder with a config.json or a Hub id"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_EXPORTS = {"*.onnx": Contents.ONNX, "openvino_model.xml": Contents.OPENVINO, "*.gguf": Contents.GGUF}
# Files that identify a folder, the most specific first. An export has a config too, but no weights beside it; a pushed
# run has the files of the checkpoint and the report in one folder.
_TELLING = {
    "config.json": Contents.CHECKPOINT,
    "adapter_config.json": Contents.ADAPTER,
    "sweep.json": Contents.SWEEP,
    "journal*.jsonl": Contents.SWEEP,
    "report.json": Contents.RUN,
    "slim/config.json": Contents.RUN,
    "modules.json": Contents.CHECKPOINT,  # a SentenceTransformer whose encoder has a folder of its own
    "plan.json": Contents.SCORED,
}


def contents(path: str | Path) -> Contents:
    """Return what a path holds; nothing for a Hub id."""
    path = Path(path)
    if not path.is_dir():
        return Contents.GGUF if path.suffix == ".gguf" else Contents.OTHER if path.exists() else Contents.NOTHING
    telling = _TELLING
    weights = (file for pattern in _WEIGHTS for file in path.glob(pattern))
    if all(file.name == "openvino_model.bin" for file in weights):
        telling = _EXPORTS | _TELLING
    return next((what for pattern, what in telling.items() if any(path.glob(pattern))), Contents.OTHER)


def refuse_other(path: str | Path, *welcome: Contents, must: str = MUST) -> None:
    """Refuse a local path that holds neither a checkpoint nor anything in `welcome`; `must` begins the sentence."""
    found = contents(path)
    if found in (Contents.NOTHING, Contents.CHECKPOINT, *welcome):
        return
    inside = (config.parent for config in sorted(Path(path).glob("*/config.json")) if found is Contents.OTHER)
    slim = (folder for folder in (Path(path, "slim"), Path(path).parent / "slim") if (folder / "config.json").is_file())
    near = chain(slim, inside)
    instead = f"; give {folder}" if (folder := next(near, None)) else ""
    raise RequestError(f"{must}, but {path} is {found.value}{instead}")
