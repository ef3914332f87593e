"""Write folders and files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..errors import OutputExistsError


@contextmanager
def new_folder(folder: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` when the block ends without an exception, and else is deleted.

    Raises:
        OutputExistsError: The folder exists and `overwrite` is off, before the block or after it.
    """
    folder = Path(folder)
    refuse_existing(folder, overwrite=overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as parent:
        temporary = Path(parent) / folder.name
        temporary.mkdir()
        yield temporary
        refuse_existing(folder, overwrite=overwrite)
        if folder.exists():
            # The old folder goes only once the new one is whole; the temporary parent takes it along.
            folder.rename(Path(parent) / "replaced")
        temporary.rename(folder)


def refuse_existing(
    folder: str | Path, *, overwrite: bool = False, inputs: Mapping[str, str | Path] | None = None
) -> None:
    """Refuse to write to a folder that exists, or to replace one that is, holds or lies inside what is read.

    Args:
        folder: The output.
        overwrite: Whether it may be replaced.
        inputs: What is read, such as "model" -> its folder. Names that are no paths of this machine are ignored.

    Raises:
        OutputExistsError: The folder exists and `overwrite` is off, or replacing it would delete an input.
    """
    if not os.path.lexists(folder):
        return
    if not overwrite:
        raise OutputExistsError(
            f"the output folder must not exist, but {folder} does; choose another or pass --overwrite to replace it"
        )
    output = Path(folder).resolve()
    for what, given in (inputs or {}).items():
        path = Path(given).resolve()
        if not path.exists():
            continue
        relation = _relation(output, path)
        if relation is not None:
            raise OutputExistsError(
                f"--overwrite must not delete what is read, but the output folder {folder} {relation} the {what} "
                f"{given}; choose another folder"
            )


def _relation(output: Path, path: Path) -> str | None:
    """Return how an output folder overlaps an input, both resolved; None if it does not."""
    if output == path:
        return "is"
    if path.is_relative_to(output):
        return "holds"
    return "lies inside" if output.is_relative_to(path) else None


def replace_file(file: Path, text: str) -> None:
    """Write a file whole or not at all, with the folders above it; replace one that exists."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{file.name}-", dir=file.parent) as temporary:
        written = Path(temporary) / file.name
        written.write_text(text, encoding="utf-8")
        written.replace(file)


def user_cache(what: str) -> Path:
    """Return the folder for what is kept between runs, in $XDG_CACHE_HOME or ~/.cache.

    Args:
        what: Name of the folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hies_export" / what
