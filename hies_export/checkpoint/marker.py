"""Mark the folders that this package writes, so that overwriting replaces nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from .. import __version__

MARKER = ".hies_export"
# Copies of a folder get new times, and their marker may not be the latest file.
SLACK_SECONDS = 2.0
# Desktops leave these in folders that people look into.
_IGNORED = (MARKER, ".DS_Store", "Thumbs.db", "desktop.ini")


def mark(folder: Path) -> None:
    """Write the marker, last of all files: the version of this package, and the names of the files in the folder.

    Subfolders with a marker get a new one, because files were added after it, such as the card of a slim checkpoint.
    """
    for marker in {folder / MARKER, *folder.rglob(MARKER)}:
        content = {"hies_export": __version__, "files": sorted(_files(marker.parent))}
        marker.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def find_foreign(folder: Path) -> str | None:
    """Return what this package did not write in a folder, as the end of "but FOLDER ..."; None if it wrote all."""
    if not folder.is_dir():
        return "is not a folder"
    found = sorted(_files(folder))
    if not found:
        return None
    if not (folder / MARKER).is_file():
        return f"has no {MARKER}, the file that marks what hies-export wrote"
    written = _written(folder)
    added = next((name for name in found if name not in written), None)
    if added is not None:
        return f"holds {added}, which hies-export did not write with it"
    latest = (folder / MARKER).stat().st_mtime + SLACK_SECONDS
    changed = next((name for name in found if (folder / name).lstat().st_mtime > latest), None)
    return None if changed is None else f"holds {changed}, which was changed after hies-export wrote it"


def _written(folder: Path) -> set[str]:
    """Return the names in the marker; none if it is damaged, so that all files count as added."""
    try:
        return set(json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def _files(folder: Path) -> Iterator[str]:
    """Yield the names of the files below a folder, and of links to folders, without markers."""
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        for name in (*files, *links):
            if name not in _IGNORED:
                yield (Path(parent) / name).relative_to(folder).as_posix()
