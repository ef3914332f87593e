"""Every error this package raises on purpose, and whose fault it is.

    HiesError
    ├── RequestError                exit code 2: the request is wrong, and nothing was done
    │   ├── RecipeError             the recipe has unknown, missing or impossible fields
    │   ├── DataError               the data has no such file, split, column or label
    │   ├── UnsupportedModelError   the model computes its attention or feed-forward blocks in a way that cannot be cut
    │   ├── PlanError               the plan does not fit the model, or no plan meets the budget
    │   ├── OutputExistsError       the output exists already
    │   └── MissingRuntimeError     the installation lacks a package
    └── StepError                   exit code 1: a step failed, and nothing half-written was left behind
        ├── NonFiniteError          the model's numbers: NaN or infinity in a loss, a gradient or a score
        ├── CutMismatchError        our cut: the slim model differs from the dense one with the same heads masked
        ├── ReloadMismatchError     our files, or the disk: the saved checkpoint comes back different
        ├── ExportError             the ONNX exporter
        ├── ParityError             the exported graph: it differs from torch
        ├── PushError               the Hub, or the network: the upload did not finish
        └── DropError               the refit: it lost more quality than the recipe allows

A message says what must hold, what was given, and what to do.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

MOST_LISTED = 20
# What to do with adapters of PEFT.
MERGE = (
    "merge the adapter first, with PeftModel.from_pretrained(model, adapter).merge_and_unload() of peft, and save what "
    "that returns, and the tokenizer, with save_pretrained"
)
# Characters of a value, and of another message, that a message quotes.
LONGEST_VALUE, LONGEST_QUOTE = 100, 1000


class HiesError(Exception):
    """Base class of every error raised on purpose by hies_export."""

    exit_code = 1
    """What the command line exits with."""


class RequestError(HiesError):
    """The request is wrong, and nothing was done; exit code 2."""

    exit_code = 2


class RecipeError(RequestError):
    """The recipe has unknown, missing or impossible fields.

    Args:
        problems: One sentence per problem, shortened if it quotes too much. The message has the first twenty.
    """

    def __init__(self, problems: str | Sequence[str]):
        self.problems = tuple(map(shortened, [problems] if isinstance(problems, str) else problems))
        if len(self.problems) == 1:
            message = self.problems[0]
        else:
            shown = list(self.problems[:MOST_LISTED])
            if len(self.problems) > MOST_LISTED:
                shown.append(f"and {len(self.problems) - MOST_LISTED} more")
            message = f"{len(self.problems)} problems:\n" + "\n".join(f"  - {problem}" for problem in shown)
        super().__init__(message)


class DataError(RequestError):
    """The data has no such file, split, column or label."""


class UnsupportedModelError(RequestError):
    """The model computes its attention or its feed-forward blocks in a way that cannot be cut; the message says how."""


class PlanError(RequestError):
    """The plan does not fit the model, or no plan meets the budget."""


class OutputExistsError(RequestError):
    """The output folder exists already, or the repository holds something else."""


class MissingRuntimeError(RequestError):
    """The installation lacks a package that was asked for; the message names the extra to install."""


class StepError(HiesError):
    """A step failed, and nothing half-written was left behind; exit code 1."""


class NonFiniteError(StepError):
    """The model gave NaN or infinity in a loss, a gradient, a score or a refit; the message names where."""


class CutMismatchError(StepError):
    """Our cut is wrong: the slim model's output differs from the dense model's with the same heads masked."""


class ReloadMismatchError(StepError):
    """Our files or the disk are wrong: the saved checkpoint comes back different."""


class ExportError(StepError):
    """The ONNX exporter failed; the message carries its reason."""


class DropError(StepError):
    """The slim model breaks `keep` on held-out rows, although the model that was judged kept to it."""


class ParityError(StepError):
    """The exported graph's output differs from torch's."""


class PushError(StepError):
    """The Hub or the network failed before the upload was complete; nothing of it is visible on the Hub."""


def require_package(module: str, *, who: str, package: str, extra: str) -> None:
    """Raise a `MissingRuntimeError` if `module` is not installed, which `package` has; it is not imported.

    `who` begins the message, such as "an ONNX file needs", and `extra` is the extra of hies-export to install.
    """
    if find_spec(module) is None:
        raise MissingRuntimeError(
            f'{who} {package}, which is not installed; install it with: pip install "hies-export[{extra}]"'
        )


def one_of(what: str, names: Iterable[str], got: str) -> str:
    """Return the message about a name that is none of `names`, with the closest of them."""
    names = tuple(names)
    return f"{what} must be one of {', '.join(names)}, got {got!r}{did_you_mean(got, names)}"


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the end of a message, "; did you mean 'known'?", or "" where no known word is close; case is ignored.

    Up to two words are named whose similarity reaches `cutoff`, the closest first; see `difflib.get_close_matches`.
    """
    originals = {name.lower(): name for name in known}
    nearest = difflib.get_close_matches(word.lower(), originals, n=2, cutoff=cutoff)
    return f"; did you mean {' or '.join(repr(originals[name]) for name in nearest)}?" if nearest else ""


def listed(names: Iterable[Any], *, most: int = MOST_LISTED) -> str:
    """Return the names separated by commas; beyond `most`, only how many more there are."""
    texts = [str(name) for name in names]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def shortened(text: str) -> str:
    """Return a text that a message quotes, cut in the middle if it is long."""
    half = LONGEST_QUOTE // 2
    return text if len(text) <= LONGEST_QUOTE else f"{text[:half]} ... {text[-half:]}"


@contextmanager
def refusing(what: str, remedy: str = "", kind: type[HiesError] = RequestError) -> Iterator[None]:
    """Turn an error that another library raises in the block into a `kind` whose message has the root cause.

    Errors of this package pass, and so does a lack of memory, which no other input would mend.

    Args:
        what: Beginning of the sentence: what must hold, and what was given.
        remedy: End of the sentence: what to do.
        kind: Class of the error that is raised.
    """
    try:
        yield
    except BaseException as error:  # a panic in a Rust library is no Exception
        foreign = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not foreign or isinstance(error, HiesError) or memory_failure(error) is not None:
            raise
        raise kind(f"{what}: {root_cause(error)}" + (f"; {remedy}" if remedy else "")) from error


def quoted(value: Any) -> str:
    """Return the `repr` of a value, cut in the middle if it is long: it may come from a damaged file."""
    shortening = reprlib.Repr()
    shortening.maxstring = shortening.maxother = shortening.maxlong = LONGEST_VALUE
    text = shortening.repr(value)
    return text if len(text) <= 2 * LONGEST_VALUE else f"{text[:LONGEST_VALUE]}...{text[-LONGEST_VALUE:]}"


def root_cause(error: BaseException, *, limit: int = 300) -> str:
    """Return class and text, on one line and up to `limit` characters, of the first error in a chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    text = text if len(text) <= limit else text[:limit] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def memory_failure(error: BaseException) -> str | None:
    """Return a message for an error by which Python or torch reports that memory ran out; None for any other error."""
    # torch's CPU allocator and some GPU libraries raise a plain RuntimeError.
    phrases = ("out of memory", "not enough memory", "can't allocate memory")
    of_torch = isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in phrases)
    if of_torch or isinstance(error, MemoryError):
        return f"there is not enough memory for this, try smaller batches: {root_cause(error)}"
    return None
