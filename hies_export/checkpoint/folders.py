"""Write folders and files that appear complete or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..errors import OutputExistsError
from .leftovers import clean_up, hidden_folder, replace
from .marker import MARKER, find_foreign, mark


@contextmanager
def new_folder(folder: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` if the block ends without an exception, and else is deleted.

    `refuse_existing` may refuse it before the block and after it.
    """
    folder = Path(folder)
    refuse_existing(folder, overwrite=overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with hidden_folder(folder) as parent:
        temporary = parent / folder.name
        temporary.mkdir()
        yield temporary
        mark(temporary)
        _share(temporary)
        refuse_existing(folder, overwrite=overwrite)
        # The old folder is removed only once the new one is complete.
        replace(temporary, folder)


def _share(folder: Path) -> None:
    """Let whoever may read one file of a folder read all: safetensors makes its files private to their owner."""
    mode = stat.S_IMODE((folder / MARKER).stat().st_mode)
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(stat.S_IMODE(file.stat().st_mode) | mode)


def refuse_existing(
    folder: str | Path, *, overwrite: bool = False, inputs: Mapping[str, str | Path] | None = None
) -> None:
    """Refuse to write to a folder that exists, or to replace more than what this package wrote.

    Leftovers of killed processes beside the folder are removed first. `inputs` are read and must stay, such as "model"
    -> its folder; Hub ids are ignored.
    """
    clean_up(Path(folder))
    if not os.path.lexists(folder):
        above = next(parent for parent in Path(folder).absolute().parents if os.path.lexists(parent))
        if not above.is_dir():
            raise OutputExistsError(f"an output must lie in folders, but {above} above {folder} is none")
        return
    if not overwrite:
        raise OutputExistsError(
            f"the output folder must not exist, but {folder} does; choose another or pass overwrite=True to replace it"
        )
    output = Path(folder).resolve()
    for what, given in (inputs or {}).items():
        path = Path(given).resolve()
        if not path.exists():
            continue
        relation = _relation(output, path)
        if relation is not None:
            raise OutputExistsError(
                f"overwrite=True must not delete what is read, but the output folder {folder} {relation} the {what} "
                f"{given}; choose another folder"
            )
    foreign = find_foreign(output)
    if foreign is not None:
        raise OutputExistsError(
            f"overwrite=True replaces only what hies-export wrote, but {folder} {foreign}; choose another folder, or "
            "move or delete that one yourself"
        )


def _relation(output: Path, path: Path) -> str | None:
    """Return how an output folder overlaps an input, both resolved; None if it does not."""
    if output == path:
        return "is"
    if path.is_relative_to(output):
        return "holds"
    return "lies inside" if output.is_relative_to(path) else None


def replace_file(file: Path, text: str) -> None:
    """Write a file completely or not at all, and create its parent folders; an existing file is replaced."""
    file.parent.mkdir(parents=True, exist_ok=True)
    clean_up(file)
    with hidden_folder(file) as temporary:
        written = temporary / file.name
        written.write_text(text, encoding="utf-8")
        replace(written, file)


def refuse_other_file(file: Path, what: str, is_ours: Callable[[str], bool]) -> None:
    """Refuse to replace a file that is not `what`, such as "a page of this package"; `is_ours` judges by its text."""
    if not os.path.lexists(file):
        return
    try:
        ours = file.is_file() and is_ours(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        ours = False
    if not ours:
        raise OutputExistsError(
            f"a file is replaced only if it is {what}, but {file} is something else; choose another file, or move or "
            "delete that one yourself"
        )


def user_cache(what: str) -> Path:
    """Return the cache folder of this package, in $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hies_export" / what
