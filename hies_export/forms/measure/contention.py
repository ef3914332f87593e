"""Measure, on Linux, how many cores other work uses while something is timed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from .record import Record

# Counters of all cores since the start of the system. Source: https://man7.org/linux/man-pages/man5/proc_stat.5.html
STAT = Path("/proc/stat")
# Columns of a core's busy time: user, nice, system, irq, softirq, and steal, the time of another guest.
_BUSY = (0, 1, 2, 5, 6, 7)
# Other work is reported from this share of the cores on. Ticks of 10 ms are too coarse for short times.
MATTERS, SHORTEST_SECONDS = 0.05, 0.5


@dataclass(frozen=True, eq=False)
class OtherWork(Record):
    """How many of this process's `cores` other programs `used` on average, including other guests of the host."""

    used: float
    cores: int

    @property
    def matters(self) -> bool:
        """Whether it should be reported."""
        return self.used > MATTERS * self.cores

    def __str__(self) -> str:
        return f"other work used {self.used:.1f} of {self.cores} core{'s' * (self.cores != 1)}"


class CpuWatch:
    """Counts from its creation; this process and its finished children are not other work."""

    def __init__(self) -> None:
        self._started, self._before = time.monotonic(), _busy_seconds()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._started

    def seen(self) -> OtherWork | None:
        """Return the other work so far; None if the system does not tell, or the time is too short."""
        seconds, now = self.seconds, _busy_seconds()
        if self._before is None or now is None or seconds < SHORTEST_SECONDS:
            return None
        of_others = (now[0] - self._before[0]) - (now[1] - self._before[1])
        cores = now[2]
        return OtherWork(min(max(of_others / seconds, 0.0), cores), cores)


def _busy_seconds() -> tuple[float, float, int] | None:
    """Return the busy seconds of this process's cores, the seconds of this process, and the number of cores.

    None if the system does not tell.
    """
    try:
        lines = [line.split() for line in STAT.read_text(encoding="ascii").splitlines() if line.startswith("cpu")]
        mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        counted = [[int(value) for value in values] for name, *values in lines if name in mine]
        ticks = sum(values[column] for values in counted for column in _BUSY)
        own = sum(os.times()[:4])
        return (ticks / os.sysconf("SC_CLK_TCK"), own, len(counted)) if counted else None
    except (OSError, AttributeError, ValueError, IndexError):
        return None
