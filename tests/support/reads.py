"""What a damaged file is read by, and what comes of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hies_export import HiesError
from support.mutations import damaged, damaged_setting

LONGEST_MESSAGE = 5000


@dataclass(frozen=True)
class Read:
    """A valid file, and what the tool does with it."""

    name: str
    kind: str  # what `damaged` damages it as
    file: Path
    read: Callable[[], object]
    share: int = 10  # of all cases: fewer where one takes long

    @contextmanager
    def damage(self, chance: random.Random) -> Iterator[bytes]:
        """Damage the file in the block."""
        before = self.file.read_bytes()
        setting = self.kind == "setting"
        now = damaged_setting(chance).encode() if setting else damaged(before, self.kind, chance)
        self.file.write_bytes(now)
        try:
            yield now
        finally:
            self.file.write_bytes(before)


def outcome(read: Callable[[], object]) -> tuple[str, BaseException | None]:
    """Read, and return what came of it, "accepted", "refused", "failed" or "foreign", and the error if there was one.

    An error of ours that is no sentence but quotes a whole file counts as foreign.
    """
    try:
        read()
    except HiesError as error:
        if len(str(error)) > LONGEST_MESSAGE:
            return "foreign", error
        return "refused" if error.exit_code == 2 else "failed", error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # panics of Rust are no Exception
        return "foreign", error
    return "accepted", None
