"""Make folders and files that appear complete or not at all, and tell what a path holds."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from enum import Enum
from pathlib import Path

from ..errors import MERGE, OutputExistsError, RequestError

# Outputs are written in a hidden folder `.NAME.tmp-xxxxxxxx` beside NAME.
WRITING = ".tmp-"
# Files by which to recognise an output of this package: a run or scores, a slim checkpoint, a quickstart.
_OURS = (("plan.json", "scores.json"), ("hies_plan.json",), ("vit-digits/config.json", "recipe.yaml"))
# Text in the config.json of an export, from `write_config`.
_EXPORTED = '"exported_by": "hies-export"'


@contextmanager
def new_folder(folder: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` if the block raises nothing, and is deleted otherwise."""
    folder = Path(folder)
    refuse_existing(folder, overwrite=overwrite)
    with _hidden(folder) as written:
        written.mkdir()
        yield written
        refuse_existing(folder, overwrite=overwrite)  # again, as the block may take hours
        _put(written, folder)


@contextmanager
def set_aside(folder: Path) -> Iterator[None]:
    """Move a folder away while the block puts another in its place; put it back if the block raises and leaves none."""
    with _hidden(folder) as old:
        try:
            if folder.exists():
                folder.rename(old)
            yield
        except BaseException:  # an interrupt too: the old folder must not be deleted with the hidden one
            if os.path.lexists(old) and not folder.exists():
                old.rename(folder)
            raise


def replace_file(file: Path, text: str) -> None:
    """Write a file completely or not at all, and create its parent folders; an existing file is replaced."""
    with new_file(file) as written:
        written.write_text(text, encoding="utf-8")


@contextmanager
def new_file(file: Path) -> Iterator[Path]:
    """Yield a temporary path whose file becomes `file` if the block raises nothing; an existing one is replaced."""
    with _hidden(file) as written:
        yield written
        _put(written, file)


@contextmanager
def _hidden(output: Path) -> Iterator[Path]:
    """Yield a path for an output, in a hidden folder beside it that is deleted when the block ends."""
    output.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{output.name}{WRITING}"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=output.parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder) / output.name


def _put(written: Path, output: Path) -> None:
    """Move a written file or folder to its place; an old folder there is deleted with the hidden one."""
    # All files get the permissions of the output: safetensors makes its own readable by their owner alone.
    mode = written.stat().st_mode & 0o666
    for path in written.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) | mode)
    with set_aside(output) if written.is_dir() else nullcontext():  # a rename replaces files and empty folders only
        written.replace(output)


def refuse_existing(
    folder: str | Path, *, overwrite: bool = False, inputs: Mapping[str, str | Path] | None = None
) -> None:
    """Refuse to write to an existing folder, or to overwrite one that is not ours, that is read, or that cannot move.

    `inputs` are paths that are read, such as "model" -> its folder; Hub ids are ignored.
    """
    if not os.path.lexists(folder):
        return
    output = Path(folder).resolve()
    # A mount cannot be renamed, and renaming the working folder would change the meaning of relative paths.
    if os.path.ismount(folder) or Path.cwd().is_relative_to(output):
        raise OutputExistsError(
            "the output folder must be one that can be renamed, which a mount and the working folder cannot, but it is "
            f"{folder}; choose a new folder inside it, such as {Path(folder) / 'run'}"
        )
    if not overwrite:
        raise OutputExistsError(
            f"the output folder must not exist, but {folder} does; choose another, or give --overwrite (in Python "
            "overwrite=True) to replace it"
        )
    for what, given in (inputs or {}).items():
        path = Path(os.path.expanduser(given)).resolve()
        if path.exists() and (path.is_relative_to(output) or output.is_relative_to(path)):
            raise OutputExistsError(
                f"overwriting must not delete what is read, but the output folder {folder} is, holds or lies inside "
                f"the {what} {given}; choose another folder"
            )
    if not _is_ours(output):
        raise OutputExistsError(
            f"overwriting replaces only an empty folder or one that hies-export wrote, but {folder} is something "
            "else; choose another folder, or move or delete that one yourself"
        )


def _is_ours(path: Path) -> bool:
    """Return whether a path is an empty folder or an output of this package."""
    if not path.is_dir():
        return False
    is_empty = not any(path.iterdir())
    if is_empty or any(all((path / name).is_file() for name in names) for names in _OURS):
        return True
    config = path / "config.json"
    return config.is_file() and _EXPORTED in config.read_text(encoding="utf-8", errors="replace")


def refuse_other_file(file: Path, what: str, is_ours: Callable[[str], bool]) -> None:
    """Refuse to replace a file that is not `what`, such as "a page of this package"; `is_ours` judges its text."""
    if not os.path.lexists(file):
        return
    with suppress(OSError, ValueError, RecursionError):  # it cannot be read, so it is not ours
        if file.is_file() and is_ours(file.read_text(encoding="utf-8")):  # reading a pipe would have no end
            return
    raise OutputExistsError(
        f"a file is replaced only if it is {what}, but {file} is something else; choose another file, or move or "
        "delete that one yourself"
    )


class Contents(Enum):
    """Kinds of content of a local path; the values complete the sentence "PATH is ..."."""

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
# The rule of `huggingface_hub.utils.validate_repo_id`, whose import takes time.
_HUB_ID = re.compile(r"(\b[\w.-]+\b/)?\b[\w.-]{1,96}\b")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_EXPORTS = {"*.onnx": Contents.ONNX, "openvino_model.xml": Contents.OPENVINO, "*.gguf": Contents.GGUF}
# Files that identify a folder; the first match counts. An export has a config too, but no weights beside it; a pushed
# run has the files of the checkpoint and the report in one folder.
_IDENTIFYING = {
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
    """Return what a path holds; `NOTHING` for a Hub id."""
    path = Path(path)
    if not path.is_dir():
        if path.suffix == ".gguf":
            return Contents.GGUF
        return Contents.OTHER if path.exists() else Contents.NOTHING
    weights = {file.name for pattern in _WEIGHTS for file in path.glob(pattern)} - {"openvino_model.bin"}
    identifying = _IDENTIFYING if weights else _EXPORTS | _IDENTIFYING
    return next((kind for pattern, kind in identifying.items() if any(path.glob(pattern))), Contents.OTHER)


def refuse_other(path: str | Path, *welcome: Contents, must: str = MUST) -> None:
    """Refuse a path that is no Hub id, no checkpoint and of no `welcome` kind; `must` begins the message."""
    kind = contents(path)
    if kind in (Contents.CHECKPOINT, *welcome) or (kind is Contents.NOTHING and _HUB_ID.fullmatch(str(path))):
        return
    children = sorted(Path(path).glob("*")) if kind is Contents.OTHER else []
    nearby = (Path(path, "slim"), Path(path).parent / "slim", *children)
    checkpoint = next((folder for folder in nearby if (folder / "config.json").is_file()), None)
    advice = "" if checkpoint is None else f"; give {checkpoint}"
    raise RequestError(f"{must}, but {path} is {kind.value}{advice}")
