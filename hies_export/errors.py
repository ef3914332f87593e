"""Every error this package raises on purpose, and whose fault each one is.

    HiesError
    ├── RequestError                the request was wrong (exit code 2); nothing was started
    │   ├── RecipeError             a recipe has unknown, missing or impossible fields
    │   ├── DataError               a file, split, column or label is not what the recipe says
    │   ├── UnsupportedModelError   the attention of this model cannot be cut
    │   ├── PlanError               a pruning plan does not fit the model, or the budget cannot be met
    │   ├── OutputExistsError       the output folder, or something else in its place, is already there
    │   └── MissingRuntimeError     a runtime was asked for that is not installed
    └── StepError                   a step failed (exit code 1); nothing half-written is left behind
        ├── NonFiniteError          NaN or infinity in a loss, a gradient or a score
        ├── CutMismatchError        the cut model differs from the masked model
        ├── ReloadMismatchError     the saved checkpoint does not come back as it was saved
        ├── ExportError             the exporter failed
        ├── ParityError             the exported graph differs from torch
        ├── PushError               the upload to the Hub did not finish
        └── DropError               the refitted model lost more quality than its budget allows

A message says what must hold, what was given, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any


class HiesError(Exception):
    """Base class of every error raised on purpose by hies_export."""

    exit_code = 1


class RequestError(HiesError):
    """The request was wrong; nothing was started."""

    exit_code = 2


class RecipeError(RequestError):
    """A recipe has unknown, missing or impossible fields.

    Args:
        problems: One sentence per problem; all of them are shown at once.
    """

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            message = self.problems[0]
        else:
            message = f"{len(self.problems)} problems:\n" + "\n".join(f"  - {p}" for p in self.problems)
        super().__init__(message)


class DataError(RequestError):
    """A file, split, column or label is not what the recipe says."""


class UnsupportedModelError(RequestError):
    """The attention of this model cannot be cut; the message says why."""


class PlanError(RequestError):
    """A pruning plan does not fit the model, or the budget cannot be met."""


class OutputExistsError(RequestError):
    """The output folder is already there, or the repository holds something else."""


class MissingRuntimeError(RequestError):
    """A runtime was asked for that is not installed; the message names the extra to install."""


class StepError(HiesError):
    """A step failed; nothing half-written is left behind."""


class NonFiniteError(StepError):
    """NaN or infinity in a loss, a gradient or a score; the message names the batch, or the head."""


class CutMismatchError(StepError):
    """The cut model's output differs from the dense model's with the same heads masked."""


class ReloadMismatchError(StepError):
    """The saved checkpoint does not come back as it was saved."""


class ExportError(StepError):
    """The exporter failed; the message carries its reason."""


class DropError(StepError):
    """The compensated model loses more on the held-out rows than `max_drop` allows, though the masked one did not."""


class ParityError(StepError):
    """The exported graph's output differs from torch's."""


class PushError(StepError):
    """The upload to the Hub did not finish; nothing of it is visible there."""


def require_package(module: str, *, who: str, package: str, extra: str, otherwise: str = "") -> None:
    """Check that a package of an optional extra is there, without importing it.

    Args:
        module: What would be imported.
        who: What needs it, with the verb: "figures need".
        package: The package, as people call it.
        extra: The extra it comes with.
        otherwise: What else can be done than installing it.

    Raises:
        MissingRuntimeError: It is not installed.
    """
    if find_spec(module) is None:
        raise MissingRuntimeError(
            f'{who} {package}, which is not installed; install it with: pip install "hies-export[{extra}]"{otherwise}'
        )


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The end of a sentence that names the known word nearest to `word`; empty where none is near.

    Args:
        word: What was given.
        known: What there is.
        cutoff: How alike the two must be, in [0, 1], as in `difflib.get_close_matches`.
    """
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def listed(names: Iterable[Any]) -> str:
    """Name at most twenty, for an error message."""
    shown = [str(name) for name in names]
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more" if len(shown) > 20 else "")


def root_cause(error: BaseException) -> str:
    """Quote on one line the error of another library that all the others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return ": ".join([type(error).__name__, *filter(None, [" ".join(str(error).split())])])
