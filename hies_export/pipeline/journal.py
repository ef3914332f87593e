"""Keep what a run has ranked and refitted beside its output until it ends, so that a killed run can go on.

What takes long are the orders of removal (`Chain`), and the layers that are refitted one after the other. Each is a
file, which appears complete or not at all. Only a kill leaves them; a run that ends in any other way removes them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from .. import processes
from ..checkpoint.folders import new_file
from ..errors import StepError, refusing
from ..progress import Progress
from ..score.criteria import Chain, Removal
from ..slim.refit import LayerFit, Refits

T = TypeVar("T")
_SUFFIX = ".pt"
# Folders of a journal are named by a fingerprint, a SHA-256.
_FINGERPRINT = re.compile("[0-9a-f]{64}")


@contextmanager
def journal(output: Path, fingerprint: str, progress: Progress) -> Iterator[tuple[MutableMapping[str, Chain], Refits]]:
    """Yield module -> its chain, and module -> its refit, kept beside the output until the block ends, however it ends.

    Its folder is `NAME.resume/FINGERPRINT`. It begins with what a killed run with the same fingerprint has left there;
    what runs with another fingerprint have left is removed. Of two runs at once with one output, the one that ends
    first removes the folder, and the other may fail.
    """
    parent = output.with_name(f"{output.name}.resume")
    folder = parent / fingerprint
    if processes.is_first():
        _remove(parent, [other for other in parent.glob("*") if _FINGERPRINT.fullmatch(other.name) and other != folder])
    chains: _FileMapping[Chain] = _FileMapping(folder / "ranked")
    fits: _FileMapping[Any] = _FileMapping(folder / "refitted")
    try:
        if chains or fits:
            counts = f"{len(chains)} modules were ranked, and {len(fits)} refitted"
            progress.stage(f"going on where a run was killed: {counts}")
        yield chains, fits
    finally:
        if processes.is_first():
            _remove(parent, [folder])


class _FileMapping(MutableMapping[str, T]):
    """Values by name, each a file in a folder; of several processes the first reads and writes for all."""

    def __init__(self, folder: Path):
        self._folder = folder
        names = processes.on_main(lambda: [file.name.removesuffix(_SUFFIX) for file in folder.glob(f"*{_SUFFIX}")])
        self._names = dict.fromkeys(names)  # keys alone, as a set in the order of insertion

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"

    def _read(self, name: str) -> Any:
        remedy = "run the same command again, which starts anew"
        with (
            refusing("what a killed run has found must be files that can be read", remedy, StepError),
            torch.serialization.safe_globals([Removal, LayerFit]),
        ):
            return torch.load(self._file(name), map_location="cpu", weights_only=True)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        value: T = processes.on_main(lambda: self._read(name))
        return value

    def __setitem__(self, name: str, value: T) -> None:
        if processes.is_first():
            must = "what a run has found so far must fit on the disk of its output until it ends, but not in "
            remedy = "free space there, or choose an output on another disk"
            with refusing(f"{must}{self._folder}", remedy, StepError), new_file(self._file(name)) as new:
                torch.save(value, new)
        self._names[name] = None

    def __delitem__(self, name: str) -> None:
        del self._names[name]  # the file goes with the folder, when the block ends

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _remove(parent: Path, folders: list[Path]) -> None:
    """Remove folders of journals, and the folder that holds them if nothing else is there."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # it is not empty, or does not exist
        parent.rmdir()
