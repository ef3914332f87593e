"""Find out what a path holds."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from ..errors import RequestError


class Contents(Enum):
    """What a local path holds, in words that end "PATH is ..."."""

    NOTHING = "not there"
    CHECKPOINT = "a checkpoint"
    ONNX = "an ONNX folder"
    GGUF = "a GGUF file"
    RUN = "the folder of a run"
    SCORED = "a folder of scores and their plan"
    QUICKSTART = "the folder of a quickstart"
    SWEEP = "the folder of a sweep"
    FILE = "a file"
    OTHER = "a folder of something else"


_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
# An export has a config too.
_EXPORTS = {"*.onnx": Contents.ONNX, "*.gguf": Contents.GGUF}
# Files that identify a folder without a config, the most specific first.
_TELLING = {
    "sweep.json": Contents.SWEEP,
    "report.json": Contents.RUN,
    "slim/config.json": Contents.RUN,
    "plan.json": Contents.SCORED,
    "run/report.json": Contents.QUICKSTART,
}


def contents(path: str | Path) -> Contents:
    """Return what a path holds; nothing for a Hub id."""
    folder = Path(path)
    if folder.is_file():
        return Contents.GGUF if folder.suffix == ".gguf" else Contents.FILE
    if not folder.is_dir():
        return Contents.NOTHING
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        for pattern, what in _EXPORTS.items():
            if any(folder.glob(pattern)):
                return what
    # First: a pushed run has the files of the checkpoint and the report in one folder.
    if (folder / "config.json").is_file():
        return Contents.CHECKPOINT
    known = (what for name, what in _TELLING.items() if (folder / name).is_file())
    return next(known, Contents.SWEEP if any(folder.glob("journal*.jsonl")) else Contents.OTHER)


def refuse_other(
    path: str | Path, *welcome: Contents, must: str = "a model must be a folder with a config.json or a Hub id"
) -> None:
    """Refuse a path that is known to hold neither a checkpoint nor anything in `welcome`; say what to give instead.

    `must` begins the sentence.
    """
    found = contents(path)
    if found not in (Contents.NOTHING, Contents.CHECKPOINT, Contents.OTHER, *welcome):
        raise RequestError(f"{must}, but {path} is {found.value}; {_instead(Path(path), found)}")


def _instead(path: Path, found: Contents) -> str:
    """Return what to give instead of a path that holds no checkpoint."""
    slim, beside = path / "slim", path.parent / "slim"
    if found is Contents.RUN:
        return f"give {slim}" if (slim / "config.json").is_file() else "its slim/ has no config.json: run it again"
    if found is Contents.QUICKSTART:
        return f"give its run, {path / 'run'}, or its dense model, {path / 'vit-digits'}"
    if found is Contents.SCORED:
        return "cut the dense model by its plan, with apply_plan, and give the slim folder"
    if found is Contents.SWEEP:
        return "it keeps no models: run its recipe with the criterion and the budget of the row you want"
    if found in _EXPORTS.values():
        return f"give {beside}" if beside.is_dir() else "give the checkpoint that it was exported from"
    whole = contents(path.parent) in (Contents.CHECKPOINT, Contents.RUN, *_EXPORTS.values())
    return f"give the folder it is in, {path.parent}" if whole else "give a folder"
