"""Claim cells of a sweep through lock files, so that any number of processes and machines can share one folder.

A claim is a `SoftFileLease` of filelock: a file created exclusively that names host, process and start, and that its
holder touches every `LEASE_SECONDS` / 3. Another worker takes over at once if the holder was a process of the same
machine that is gone, and otherwise when it has not seen the file change for `LEASE_SECONDS` by its own monotonic clock;
no two clocks are compared. A holder that was only asleep may continue beside its successor: both compute the same row,
and readers of the journals take one.

Source: https://py-filelock.readthedocs.io
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import SoftFileLease, Timeout

from ...errors import OutputExistsError

LEASE_SECONDS = 60.0
# Seconds to wait before asking again for work that another worker holds.
POLL_SECONDS = 1.0
_PREFIX = ".claim-"


class Claims:
    """The claims on the work in a sweep's folder, as one worker sees them.

    After `lease_seconds` without a sign of life, the same for all workers, a claim may be taken over.
    """

    def __init__(self, folder: Path, *, lease_seconds: float = LEASE_SECONDS):
        self._folder, self._lease_seconds = folder, lease_seconds
        # Kept from one attempt to the next: a lease remembers since when it has seen no change.
        self._leases: dict[str, SoftFileLease] = {}

    @contextmanager
    def tried(self, work: str) -> Iterator[bool]:
        """Claim some work inside the block, and yield whether it is ours; do not wait for it."""
        lease = self._lease(work)
        try:
            lease.acquire(blocking=False)
        except Timeout:
            yield False
            return
        try:
            _flush(Path(lease.lock_file))
            yield True
        finally:
            lease.release()

    @contextmanager
    def waited(self, work: str) -> Iterator[None]:
        """Claim some work inside the block, after waiting for whoever holds it."""
        with self._lease(work).acquire(poll_interval=POLL_SECONDS) as lease:
            _flush(Path(lease.lock_file))
            yield

    def held(self) -> set[str]:
        """Return the names of the claims that anyone holds, living or not, as `name` gives them."""
        return {path.name for path in self._folder.glob(f"{_PREFIX}*.lock")}

    def holder(self, work: str) -> str | None:
        """Return who holds some work, such as "process 4711 on node3"; None if nobody does."""
        return _owner(self._lease(work))

    def refuse_others(self) -> None:
        """Refuse to discard the work of workers that are alive."""
        for path in sorted(self._folder.glob(f"{_PREFIX}*.lock")):
            lease = SoftFileLease(path, lease_duration=self._lease_seconds)
            who = _owner(lease) or "a worker"
            try:
                with lease.acquire(blocking=False):
                    continue
            except Timeout:
                raise OutputExistsError(
                    f"--overwrite must not discard what others work on, but {who} holds {path}; wait for it, or delete "
                    "that file if it is gone"
                ) from None

    def forget(self, works: Iterable[str]) -> None:
        """Delete claims on finished work that killed processes have left."""
        for name in self.held().intersection(map(self.name, works)):
            (self._folder / name).unlink(missing_ok=True)

    @staticmethod
    def name(work: str) -> str:
        """Return the name of the claim on some work."""
        return f"{_PREFIX}{hashlib.sha256(work.encode()).hexdigest()[:16]}.lock"

    def _lease(self, work: str) -> SoftFileLease:
        name = self.name(work)
        if name not in self._leases:
            self._leases[name] = SoftFileLease(self._folder / name, lease_duration=self._lease_seconds)
        return self._leases[name]


def _owner(lease: SoftFileLease) -> str | None:
    owner = lease.owner
    return None if owner is None else f"process {owner.pid} on {owner.hostname}"


def _flush(path: Path) -> None:
    """Write a claim through to a file system that may be on a network; others would see an empty file until then."""
    file = os.open(path, os.O_RDWR)
    try:
        os.fsync(file)
    finally:
        os.close(file)
