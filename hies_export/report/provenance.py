"""The record of what a run was asked for and read: its command line, and digests of its inputs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..checkpoint.beside import fetch
from ..errors import RequestError
from .report import Report

# The model and the data files by field, as `PruningRecipe.inputs`.
Inputs = Mapping[str, str | Path]


@dataclass(frozen=True)
class RunRecord:
    """What a run was asked for, beside its recipe.yaml, and what it read."""

    digests: Mapping[str, str]  # name of an input -> SHA-256 of the input's files, or commit of a Hub model
    command: str | None = None  # None for a run from Python

    @classmethod
    def of(cls, inputs: Inputs, *, command: str | None = None, commit: str | None = None) -> RunRecord:
        """Return the record of a run; `commit` is that of a Hub model."""
        digests = digests_of(inputs)
        if commit is not None:
            digests.setdefault("model", commit)
        return cls(digests, command)


def model_of(inputs: Inputs) -> str:
    """Return the absolute folder of the dense model, or its Hub id."""
    model = str(inputs["model"])
    folder = Path(model).expanduser()
    return os.path.abspath(folder) if folder.exists() else model


def dense_model(folder: Path) -> str | None:
    """Return the folder or Hub id of the dense model that a run read; None if it is unknown or gone.

    For a Hub model, it is the folder of the commit that the run read.
    """
    try:
        report = Report.from_file(folder)
        record = TypeAdapter(RunRecord).validate_python(report.details.run)
    except (RequestError, ValidationError):  # no report, or one without a record
        return None
    if os.path.isabs(report.model):
        return report.model if os.path.isdir(report.model) else None
    commit = record.digests.get("model")
    return report.model if commit is None else str(fetch(report.model, commit))


def digests_of(inputs: Inputs) -> dict[str, str]:
    """Return, by name, one SHA-256 of the files of each input that is on this machine."""
    files = {name: _files(name, path) for name, path in inputs.items()}
    return {name: _digest(paths) for name, paths in files.items() if paths}


def _digest(files: Mapping[str, Path]) -> str:
    """Return one SHA-256 over the names of files, sorted, and the SHA-256 of their contents."""
    total = hashlib.sha256()
    for name in sorted(files):
        content = hashlib.sha256()
        with files[name].open("rb") as file:
            while block := file.read(1 << 20):
                content.update(block)
        total.update(f"{name}\0{content.hexdigest()}\n".encode())
    return total.hexdigest()


def _files(name: str, path: str | Path) -> dict[str, Path]:
    """Return an input's files by file name, or by path within the folder of data; none for a Hub id.

    For a model these are the files of its folder, except Markdown. For data they are a file, the files that match a
    pattern, or the images of a folder, in a folder per label.
    """
    path = Path(path).expanduser()
    if name == "model":
        return {file.name: file for file in path.glob("*") if file.is_file() and file.suffix != ".md"}
    if path.is_dir():
        return {file.relative_to(path).as_posix(): file for file in path.glob("*/*") if file.is_file()}
    return {file.name: file for file in ([path] if path.exists() else path.parent.glob(path.name))}
