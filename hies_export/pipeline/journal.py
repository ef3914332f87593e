"""Keep what a run has ranked and refitted beside its output until it ends, so that a killed run can go on.

What takes long are the orders of removal, and the layers that are refitted one after the other. Each is a file, which
appears complete or not at all. Only a kill leaves them behind; a run that ends, fails or is interrupted removes them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar
from urllib.parse import quote, unquote

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .. import processes
from ..checkpoint.folders import new_file, new_folder, replace_file
from ..errors import OutputExistsError, RequestError, StepError, refusing
from ..files import Rule, Schema, read_json
from ..progress import Progress
from ..score.criteria import Chain, Removal
from ..slim.refit import LayerFit

T = TypeVar("T")
# A value as it is stored in a safetensors file: tensors and texts by name.
_Stored: TypeAlias = tuple[Mapping[str, Tensor], Mapping[str, str]]
# The parameters of a refitted layer, and how well it was refitted.
_Refit: TypeAlias = tuple[Mapping[str, Tensor], LayerFit]
_HEAD, _RANKED, _REFITTED, _SUFFIX = "journal.json", "ranked", "refitted", ".safetensors"
_RULE = Rule(must="a journal must begin with the JSON that hies_export wrote", remedy="delete its folder")


class _Head(Schema):
    fingerprint: str  # of the model, the rows and the options
    began: str  # when the run began, such as "2025-06-01 12:30"
    host: str
    process: int


@dataclass(frozen=True)
class Journal:
    """What a run has found so far: module -> its chain, and module -> its refit; None if nothing is kept."""

    chains: MutableMapping[str, Chain] | None = None
    fits: MutableMapping[str, _Refit] | None = None


@contextmanager
def journal(output: Path, fingerprint: str, progress: Progress) -> Iterator[Journal]:
    """Yield a journal that is kept in a folder beside the output until the block ends, however it ends.

    It begins with what a killed run with the same fingerprint has left there; that of another is removed. While another
    run still uses the folder, nothing is kept. Raises OutputExistsError if something else is in its place.
    """
    folder = output.with_name(f"{output.name}.resume")
    if (found := processes.on_main(lambda: _opened(folder, fingerprint))) is None:
        yield Journal()
        return
    note, files = found
    try:
        if note:
            progress.stage(note)
        yield Journal(
            _Kept(folder / _RANKED, files, _stored_chain, _chain),
            _Kept(folder / _REFITTED, files, _stored_refit, _refit),
        )
    finally:
        if processes.is_first():
            shutil.rmtree(folder, ignore_errors=True)


class _Kept(MutableMapping[str, T], Generic[T]):
    """Values by name, each a file in a folder; of several processes the first reads and writes for all."""

    def __init__(self, folder: Path, files: set[Path], store: Callable[[T], _Stored], read: Callable[[_Stored], T]):
        self._folder, self._store, self._read = folder, store, read
        self._names = {unquote(file.name.removesuffix(_SUFFIX)): None for file in files if file.parent == folder}

    def _file(self, name: str) -> Path:
        return self._folder / f"{quote(name, safe='')}{_SUFFIX}"

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        return self._read(processes.on_main(lambda: _read_file(self._file(name))))

    def __setitem__(self, name: str, value: T) -> None:
        if processes.is_first():
            tensors, texts = self._store(value)
            with _room(self._folder.parent), new_file(self._file(name)) as new:
                save_file(dict(tensors), new, metadata=dict(texts))
        self._names[name] = None

    def __delitem__(self, name: str) -> None:
        del self._names[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _opened(folder: Path, fingerprint: str) -> tuple[str, set[Path]] | None:
    """Make the folder of a journal, or open the one there; return a note for the user, and its complete files.

    Return None if another run still uses it.
    """
    note, files = "", set[Path]()
    if os.path.lexists(folder) and not (folder / _HEAD).is_file():
        raise OutputExistsError(
            f"a run keeps what it has found so far in {folder}, but something else is there; move it, or choose "
            "another output"
        )
    with suppress(RequestError):  # there is no journal, or a damaged one
        head = _Head.model_validate(read_json(folder / _HEAD, _Head, _RULE))
        if _runs(head):
            return None
        if head.fingerprint == fingerprint:
            files = {file for file in folder.glob(f"*/*{_SUFFIX}") if _is_whole(file)}
            ranked = sum(file.parent.name == _RANKED for file in files)
            counts = f"{ranked} modules were ranked, and {len(files) - ranked} refitted"
            note = f"going on where a run that began at {head.began} was killed: {counts}" if files else ""
        else:
            note = f"starting anew: a run that began at {head.began} and was killed had another model, rows or options"
    now, process = f"{datetime.now():%Y-%m-%d %H:%M}", os.getpid()
    head = _Head(fingerprint=fingerprint, began=now, host=socket.gethostname(), process=process)
    with _room(folder):
        if files:
            replace_file(folder / _HEAD, head.model_dump_json())
        else:
            shutil.rmtree(folder, ignore_errors=True)
            with new_folder(folder) as new:
                (new / _HEAD).write_text(head.model_dump_json(), encoding="utf-8")
    return note, files


def _room(folder: Path) -> AbstractContextManager[None]:
    """Return a context that raises a StepError of one sentence if writing fails in it."""
    must = f"what a run has found so far must fit on the disk of its output until it ends, but not in {folder}"
    return refusing(must, "free space there, or choose an output on another disk", StepError)


def _runs(head: _Head) -> bool:
    """Return whether the run that wrote this still goes on; no for another machine, which cannot be asked."""
    if head.host != socket.gethostname() or head.process == os.getpid() or os.name == "nt":
        return False
    try:
        os.kill(head.process, 0)  # only asks whether there is such a process
    except OSError as error:  # of another class for another user's process
        return not isinstance(error, ProcessLookupError)
    return True


def _is_whole(file: Path) -> bool:
    with suppress(OSError, SafetensorError), safe_open(file, "pt"):
        return True
    return False


def _read_file(file: Path) -> _Stored:
    with safe_open(file, "pt") as stored:
        return {name: stored.get_tensor(name) for name in stored.keys()}, stored.metadata() or {}  # noqa: SIM118


def _stored_chain(chain: Chain) -> _Stored:
    tensors = {
        "units": torch.tensor([unit for removal in chain for unit in removal.units]),
        "counts": torch.tensor([len(removal.units) for removal in chain]),
        "effects": torch.tensor([removal.effect for removal in chain], dtype=torch.float64),
    }
    return tensors, {"module": chain[0].module}


def _chain(stored: _Stored) -> Chain:
    tensors, texts = stored
    units = tensors["units"].split(tensors["counts"].tolist())
    pairs = zip(units, tensors["effects"].tolist(), strict=True)
    return tuple(Removal(texts["module"], tuple(of.tolist()), effect) for of, effect in pairs)


def _stored_refit(refit: _Refit) -> _Stored:
    parameters, fit = refit
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in parameters.items()}
    return tensors, {"fit": json.dumps(asdict(fit))}


def _refit(stored: _Stored) -> _Refit:
    tensors, texts = stored
    return tensors, LayerFit(**json.loads(texts["fit"]))
