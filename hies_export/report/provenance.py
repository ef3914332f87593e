"""The record of what a run was asked for, and of which dense model it read."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..checkpoint.beside import fetch_whole
from ..errors import RequestError
from .report import Report


@dataclass(frozen=True)
class RunRecord:
    """What a run was asked for, beside its recipe.yaml, and the commit of its dense model."""

    command: str | None  # None for a run from Python
    commit: str | None  # None for a model from a folder


def model_of(model: str | Path) -> str:
    """Return the absolute folder of a model, or its Hub id."""
    folder = Path(model).expanduser()
    return os.path.abspath(folder) if folder.exists() else str(model)


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
    return report.model if record.commit is None else str(fetch_whole(report.model, revision=record.commit))
