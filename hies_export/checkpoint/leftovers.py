"""Write in a hidden folder beside the output, and remove the hidden folders of killed processes.

A process holds a lock on a file in its hidden folder. The kernel releases the lock when the process ends for any
reason, so a folder whose file can be locked is left over. On file systems without locks, and on Windows, nothing is
removed.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Held by the process that writes; its content is the name of the machine, as a lock may hold on that machine only.
OWNER = "hies_export.owner"
REPLACED = ".replaced"

logger = logging.getLogger(__name__)


@contextmanager
def hidden_folder(output: Path) -> Iterator[Path]:
    """Yield a new hidden folder beside an output, `.NAME-xxxxxxxx`, which is deleted when the block ends."""
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        owner = (folder / OWNER).open("wb", buffering=0)
    except OSError:
        folder.rmdir()
        raise
    with owner:
        with suppress(OSError):  # if the disk is full, writing the first file of the output will say so
            if _lock(owner):
                owner.write(_machine())
        try:
            yield folder
        finally:
            _remove(folder)


def replace(written: Path, output: Path) -> None:
    """Move a file or folder from a hidden folder to the place of the output, durably even if the power fails.

    A folder that was there before is deleted with the hidden one, but only if the new one takes its place.
    """
    lasting = _is_to_last(output)
    if lasting:
        for path in (written, *written.rglob("*")):
            _to_disk(path)
    old = written.with_name(output.name + REPLACED)
    try:
        if written.is_dir() and output.exists():
            output.rename(old)
        written.replace(output)
    except BaseException:  # an interrupt too: the old folder must not be deleted with the hidden one
        if old.exists() and not output.exists():
            old.rename(output)
        raise
    if lasting:
        _to_disk(output.parent)


def _is_to_last(output: Path) -> bool:
    """Return whether an output is permanent: not in the temporary folder, nor part of another being written."""
    parents = output.absolute().parents
    return Path(tempfile.gettempdir()) not in parents and not any((parent / OWNER).exists() for parent in parents)


def _to_disk(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk: a name alone may survive a power loss."""
    if path.is_symlink() or (path.is_dir() and platform.system() == "Windows"):
        return
    with suppress(OSError) if path.is_dir() else nullcontext():  # some file systems cannot sync folders
        descriptor = os.open(path, os.O_RDWR if platform.system() == "Windows" else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def clean_up(output: Path) -> None:
    """Remove what killed processes of this machine left in the folder of an output, and say so.

    If one died between the two steps of a replacement, when the new folder was complete, the replacement is finished.
    Leftovers of this output that cannot be removed safely are named in a warning.
    """
    for folder in sorted(output.parent.glob(".*-*")):
        if not folder.is_dir() or folder.is_symlink():
            continue
        with _abandoned(folder) as abandoned:
            if abandoned:
                _finish(folder)
                _remove(folder)
                done = "could not remove" if folder.exists() else "removed"
                logger.warning("%s %s, which a killed run left behind", done, folder)
            elif _looks_like(folder, output):
                _judge(folder, output)


def _machine() -> bytes:
    return platform.node().encode()


def _lock(owner: IO[bytes]) -> bool:
    """Lock a file for this process; return whether it is locked now."""
    with suppress(OSError):
        if fcntl is not None:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False


@contextmanager
def _abandoned(folder: Path) -> Iterator[bool]:
    """Yield whether the writer of a hidden folder is gone; no other process can remove it during the block."""
    try:
        owner = (folder / OWNER).open("r+b")
    except OSError:
        yield False
        return
    with owner:
        yield _lock(owner) and owner.read() == _machine()


def _finish(folder: Path) -> None:
    """Finish the replacement that a process had begun before it was killed."""
    for old in folder.glob(f"*{REPLACED}"):
        output = folder.parent / old.name.removesuffix(REPLACED)
        new = folder / output.name
        if new.is_dir() and not output.exists():
            new.rename(output)
            logger.warning("%s was complete when its run was killed, and was moved into place", output)


def _remove(folder: Path) -> None:
    """Delete a hidden folder, the file with the lock last, so that it can be found again after a kill in between."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != OWNER:
            path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _looks_like(folder: Path, output: Path) -> bool:
    """Return whether a folder has the name of a hidden one of this output."""
    prefix = f".{output.name}-"
    return folder.name.startswith(prefix) and len(folder.name) == len(prefix) + 8


def _judge(folder: Path, output: Path) -> None:
    """Name a hidden folder of this output that may be in use: by an older version, another machine, without a lock."""
    with suppress(OSError):
        inside = {path.name for path in folder.iterdir()}
        machine = (folder / OWNER).read_bytes() if OWNER in inside else b""
        if not machine and inside <= {OWNER}:
            _remove(folder)  # killed before it wrote anything
        elif not machine and output.name in inside:
            _warn_once(f"{folder} may be left over from a killed run; delete it if nothing writes there")
        elif machine not in (b"", _machine()):
            _warn_once(f"{folder} belongs to a run on {machine.decode(errors='replace')}; delete it if that has ended")


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
