"""The record of what a run was asked for and read: its recipe, command line, and digests of its inputs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from ..checkpoint.beside import fetch
from ..errors import RequestError
from .report import Report


@dataclass(frozen=True)
class Request:
    """What a run is asked for.

    Attributes:
        fields: The fields of its recipe that were given, without `output`.
        inputs: The model and the data files by field, as `PruningRecipe.inputs`.
        output: The folder to write.
    """

    fields: Mapping[str, Any]
    inputs: Mapping[str, str | Path]
    output: Path

    @property
    def model(self) -> str:
        """Folder or Hub id of the dense model."""
        return str(self.inputs["model"])


@checked(frozen=True)
class RunRecord:
    """What a run was asked for and what it read; all paths are absolute."""

    recipe: Mapping[str, Any]  # the fields that were given, without `output`
    folder: str  # that the run was told to write
    digests: Mapping[str, str]  # name in `Request.inputs` -> SHA-256 of the input's files, or commit of a Hub model
    command: str | None = None  # None for a run from Python

    @classmethod
    def of(cls, asked: Request, *, command: str | None = None, commit: str | None = None) -> RunRecord:
        """Return the record of a run; `commit` is that of a Hub model."""
        digests = digests_of(asked.inputs)
        if commit is not None:
            digests.setdefault("model", commit)
        return cls(_with_absolute_paths(asked.fields), os.path.abspath(asked.output), digests, command)

    def model_at(self, folder: Path) -> str | None:
        """Return the current path or Hub id of the dense model, given the run's current folder; None if it is gone.

        A path relative to the run's folder is found again if both were moved together. For a Hub model with a revision,
        it is the folder of the commit that the run read.
        """
        model = str(self.recipe["model"])
        if not os.path.isabs(model):
            asked = self.recipe.get("revision")
            return str(fetch(model, self.digests.get("model", asked))) if asked else model
        moved = os.path.normpath(folder.resolve() / os.path.relpath(model, self.folder))
        return next((path for path in (moved, model) if os.path.isdir(path)), None)


def dense_model(folder: Path) -> str | None:
    """Return the path or Hub id of the dense model that a run read; None if it is unknown or gone."""
    try:
        return TypeAdapter(RunRecord).validate_python(Report.from_file(folder).details.run).model_at(folder)
    except (RequestError, ValidationError):  # no report, or one without a record
        return None


def digests_of(inputs: Mapping[str, str | Path]) -> dict[str, str]:
    """Return one SHA-256 of the files of each of the `Request.inputs` that is on this machine."""
    return {name: _digest(files) for name, path in inputs.items() if (files := _files(name, path))}


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
    """Return the files of an input by their names in it; none for a Hub id.

    For a model these are the files of its folder, except Markdown. For data they are a file, the files that match a
    pattern, or the images of a folder, in a folder per label.
    """
    path = Path(path).expanduser()
    if name == "model":
        return {file.name: file for file in path.glob("*") if file.is_file() and file.suffix != ".md"}
    if path.is_dir():
        return {file.relative_to(path).as_posix(): file for file in path.glob("*/*") if file.is_file()}
    return {file.name: file for file in ([path] if path.exists() else path.parent.glob(path.name))}


def _with_absolute_paths(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's fields with all paths made absolute; Hub ids and names of metrics stay."""

    def absolute(text: str | Path) -> str:
        return os.path.abspath(Path(text).expanduser())

    def changed(text: str) -> str:
        return absolute(text) if Path(text).expanduser().exists() else text

    data, evaluation = dict(fields["data"]), dict(fields.get("evaluation", {}))
    if data.get("files"):
        data["files"] = {split: absolute(path) for split, path in data["files"].items()}
    if evaluation.get("metrics"):
        evaluation["metrics"] = [changed(text) for text in evaluation["metrics"]]
    given = {"evaluation": evaluation} if evaluation else {}
    if vocabulary := fields.get("vocabulary"):
        given["vocabulary"] = {**vocabulary, "files": [absolute(path) for path in vocabulary.get("files", ())]}
    return {**fields, "model": changed(fields["model"]), "data": data, **given}
