"""Hand out the cells of a sweep that nobody has finished, one at a time, to this worker."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Mapping

from ...progress import Progress
from . import claims as claiming
from .claims import Claims
from .grid import Cell
from .journal import Journal


def remaining(
    cells: Mapping[str, Cell], journal: Journal, claims: Claims, progress: Progress
) -> Generator[Cell, None, None]:
    """Yield the cells that no journal has, each claimed until the next one is asked for.

    The caller writes the row of a cell to its journal before it asks for another. When all cells left are claimed by
    others, this waits: it ends when every cell is in a journal, and yields those whose worker is gone. A worker stays
    with a seed, whose statistics it has, and then goes to the one on which the fewest others work.
    """
    seed: int | None = None
    said = False
    while True:
        journal.refresh()
        waiting = {key: cell for key, cell in cells.items() if key not in journal.rows}
        if not waiting:
            return
        held = claims.held()
        others = Counter(cell.seed for key, cell in waiting.items() if claims.name(key) in held)
        for key, cell in sorted(waiting.items(), key=lambda item: _rank(item[1], seed, others)):
            with claims.tried(key) as ours:
                # Whoever held the claim may have finished the cell.
                if not ours or key in journal.refresh().rows:
                    continue
                seed = cell.seed
                yield cell
                break
        else:
            if not said:
                who = sorted({name for key in waiting if (name := claims.holder(key))})
                progress.stage(f"wait for {len(waiting)} rows of {', '.join(who) or 'other workers'}")
                said = True
            time.sleep(claiming.POLL_SECONDS)


def _rank(cell: Cell, seed: int | None, others: Mapping[int, int]) -> tuple[bool, int]:
    """Return the place of a cell in the order of work; cells of equal rank stay in the order of the grid."""
    return cell.seed != seed, others[cell.seed]
