"""Do what the command line does, and kill this process, as a power cut would, when the run has kept some results.

    python -m support.killed NUMBER ARGUMENT...

NUMBER is how many modules were ranked or refitted by then.
"""

import os
import signal
import sys
from typing import Any

from hies_export.pipeline.journal import _FileMapping
from support.runs import hies, without_tracing


def main(number: int, arguments: list[str]) -> int:
    """Run the command; return its exit code if it ends before."""
    kept, done = _FileMapping.__setitem__, 0

    def keep(self: Any, name: str, value: Any) -> None:
        nonlocal done
        kept(self, name, value)
        done += 1
        if done == number:
            os.kill(os.getpid(), signal.SIGKILL)

    _FileMapping.__setitem__ = keep  # type: ignore[method-assign]
    with without_tracing():
        return hies(*arguments)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
