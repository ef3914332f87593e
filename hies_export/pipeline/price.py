"""Estimate the minutes and the memory that a language model's pruning takes, and correct the minutes as stages end.

Work is counted in tokens that pass forward through all blocks. How long one takes is measured on the first block. What
else a stage computes grows with the same tokens, in models of 100 million to 8 billion parameters in about the same
proportion, which the constants below include; see `docs/guides/size.md`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..calibrate.walk import blocks_of
from ..data.batches import Batch
from ..model.linear import features_of
from ..model.tokens import count_tokens
from ..progress import Progress
from ..score.criteria import COMPENSATED
from .pruning import Pruning

T = TypeVar("T")

# Passes that a token takes: to be scored on (forward, and twice as much backward), to find effects and orders of
# removal on, to collect moments and refit layer by layer on, and to judge both models on.
SCORE, ORDER, MOMENTS, REFIT, JUDGE = 3.0, 11.0, 1.5, 2.5, 2.0
# Bytes that Python, torch and this package take.
BASE = 0.75e9
# Seconds below which nothing is said.
WORTH_SAYING = 60.0
# How the name of a stage begins -> its key in `Size.work`, in the order of a run.
STAGES = {"score units": "score", "rank units": "rank", "refit the output": "refit", "evaluate both": "judge"}


@dataclass(frozen=True)
class Size:
    """The numbers that work and memory follow from."""

    scored: int  # tokens to score on
    refitted: int  # tokens to refit on
    judged: int  # tokens to evaluate on
    batch: int  # tokens of a batch to score on
    hidden: int  # width of the hidden states
    widest: int  # inputs of the widest projection that reads units
    vocabulary: int  # outputs of the head; 0 without one
    blocks: int
    parameters: int  # of all blocks
    weights: int  # bytes of the model's weights
    itemsize: int  # bytes of a weight
    left: float = 1.0  # share of the blocks that stays
    ranked: float = 0.0  # share of the modules that a run that was killed has ranked before
    done: float = 0.0  # share of the modules that it has refitted

    @property
    def work(self) -> dict[str, float]:
        """Work by stage, in the order of a run, in passes of a token."""
        return {
            "score": SCORE * self.scored,
            "rank": (1 - self.ranked) * (ORDER * self.scored + MOMENTS * self.refitted),
            "refit": (1 - self.done) * REFIT * self.refitted,
            "judge": JUDGE * self.judged,
        }

    @property
    def memory(self) -> float:
        """Bytes at the peak of memory."""
        # Hidden states in front of every block and their gradients, beside the logits of a batch with two copies.
        states = 2 * self.scored * self.hidden * self.blocks * self.itemsize
        logits = 3 * 4 * self.batch * self.vocabulary
        # Moments of both parts of the rows and an inverse in float64; inputs and gradients of one projection.
        ranking = 2 * self.refitted * self.hidden * self.itemsize + 24 * self.widest * (self.widest + self.scored)
        # The slim blocks; the rows in both models, in front of a block and inside of it.
        rows = self.refitted * (4 * self.hidden + (1 + self.left) * self.widest)
        refitting = (self.left * self.parameters + rows) * self.itemsize + 24 * (self.left * self.widest) ** 2
        return BASE + self.weights + max(states + logits, states + ranking, refitting)


def size_of_pruning(pruning: Pruning) -> Size | None:
    """Return the size of the pruning of a language model by `compensated`, refitted layer by layer; else None."""
    options, budget, rows, model = pruning.options, pruning.budget, pruning.rows, pruning.model
    layer_by_layer = options.compensation is not None and options.compensation.sequential
    if not (pruning.cuts_once and options.criterion == COMPENSATED and layer_by_layer and pruning.task.generative):
        return None

    def tokens(batches: Sequence[Batch]) -> int:
        return sum(count_tokens(model, batch) for batch in batches)

    blocks = {name: inside for name, inside in blocks_of(model, pruning.scored, rows.score[0]).items() if inside}
    consumers = [features_of(model.get_submodule(units.consumer)) for units in pruning.scored]  # (outputs, inputs)
    head = model.get_output_embeddings()
    return Size(
        scored=tokens(rows.score),
        refitted=tokens(rows.refit),
        judged=tokens(rows.evaluation or rows.held_out),
        batch=max(count_tokens(model, batch) for batch in rows.score),
        hidden=consumers[0][0],
        widest=max(inputs for _, inputs in consumers),
        vocabulary=0 if head is None else features_of(head)[0],
        blocks=len(blocks),
        parameters=sum(p.numel() for name in blocks for p in model.get_submodule(name).parameters()),
        weights=sum(p.numel() * p.element_size() for p in model.parameters()),
        itemsize=next(model.parameters()).element_size(),
        left=budget.ratio or 1.0,
        ranked=len(pruning.chains or ()) / len(pruning.scored),
        done=len(pruning.fits or ()) / len(pruning.scored),
    )


class Priced:
    """Progress that shows an estimate of the whole run after the first block, and of what is left with each stage."""

    def __init__(self, shown: Progress, clock: Callable[[], float] = time.monotonic):
        self._shown, self._clock = shown, clock
        self._size: Size | None = None
        self._left: dict[str, float] = {}  # work of the stage that runs, and of those after it
        # Of the stage that runs: its key in `_left`, empty without one; the name that is shown; and when it began.
        self._stage, self._name, self._began = "", "", 0.0
        # Seconds and work of the stages that ended, and passes of a token in a second, 0 until they are measured.
        self._spent, self._worked, self._pace = 0.0, 0.0, 0.0

    def expect(self, size: Size | None) -> None:
        """Show estimates for a run of this size from now on; without a size, none."""
        self._size, self._left = size, {} if size is None else size.work

    def stage(self, name: str) -> None:
        """Report that a stage begins, and how long it and those after it take."""
        if self._stage and self._pace:
            # The pace of all stages so far, because an estimate that is wrong for one is mostly wrong for the others.
            self._spent += self._clock() - self._began
            self._worked += self._left.pop(self._stage)
            self._pace = self._worked / self._spent
        self._stage = next((key for start, key in STAGES.items() if name.startswith(start) and key in self._left), "")
        left = 0.0  # seconds
        if self._stage:
            keys = [*self._left]
            self._left = {key: self._left[key] for key in keys[keys.index(self._stage) :]}  # the others did not run
            left = sum(self._left.values()) / self._pace if self._pace else 0.0
        self._began, self._name = self._clock(), name
        self._shown.stage(f"{name} (about {in_words(left)} left)" if left >= WORTH_SAYING else name)

    def track(self, items: Sequence[T], name: str) -> Iterator[T]:
        """Yield the items of a loop in order, and report each; the first item, a block, is timed for the estimate."""
        for number, item in enumerate(self._shown.track(items, name)):
            if number == 0:
                began = self._clock()
            elif number == 1 and self._size is not None and self._stage and not self._pace:
                size, seconds = self._size, max(self._clock() - began, 1e-6)
                work = MOMENTS * size.refitted if name == "moments" else size.scored
                self._pace = work / size.blocks / seconds
                takes = sum(self._left.values()) / self._pace
                if takes >= WORTH_SAYING:
                    memory = f"{max(1, round(size.memory / 1e9))} GB of memory"
                    self._shown.stage(f"{self._name}; all takes about {in_words(takes)} and {memory}")
            yield item


def in_words(seconds: float) -> str:
    """Return a time such as "1 minute" or "12 minutes", from 90 minutes on as "1.5 hours"."""
    minutes = max(1, round(seconds / 60))
    if minutes >= 90:
        return f"{seconds / 3600:.1f} hours"
    return "1 minute" if minutes == 1 else f"{minutes} minutes"
