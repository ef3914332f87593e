"""Estimate the minutes and the memory that a run takes from shapes alone, and the time left from its own pace.

Work is counted in multiplications at the pace of a block's forward pass; slower operations weigh more. The pace is
measured on the first block of the first pass: for statistics, if a report shows them, else for moments or effects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..calibrate.walk import blocks_of
from ..data.batches import Batch, size_of
from ..kinds import KINDS
from ..model.linear import features_of
from ..model.modes import widens
from ..model.tokens import count_tokens
from ..progress import Progress
from ..score.criteria import COMPENSATED
from ..slim.certainty import PREDICTIONS
from .pruning import Pruning

T = TypeVar("T")

# Cost of an operation, relative to a multiplication of a block's forward pass. Measured with one thread of AVX2 on
# blocks of SmolLM2-135M's shape, with 28 billion multiplications a second in batches of 4 x 256 tokens.
DOUBLE = 1.75  # a multiplication in float64: factorisations and products of matrices of 1,500 to 4,900 columns
HEAD = 0.75  # a multiplication in a language model's head
HEADS = 6.0  # a token and two inputs of a projection of heads, in the order of removal, which solves many small systems
PASSED = 220.0  # a token and a neuron at each step of an order: 8 ns, mostly of memory traffic
RIDGES = 5.0  # a refit solves for four ridges in float32, and for one in float64
# Seconds below which nothing is said.
WORTH_SAYING = 60.0
# Bytes that Python, torch and this package take, and copies of logits that the loss of a batch holds.
BASE, LOGITS = 0.75e9, 3
# How the name of a stage begins -> its key in `Size.work`.
STAGES = {"score units": "score", "rank units": "rank", "refit the output": "refit", "evaluate both": "judge"}


@dataclass(frozen=True)
class Module:
    """The shape of a projection that reads units."""

    inputs: int
    outputs: int
    step: float  # share of the units that go at once, as in `Kind`


@dataclass(frozen=True)
class Size:
    """The numbers that work and memory follow from."""

    scored: int  # tokens to score on
    refitted: int  # tokens to refit on
    judged: int  # tokens to evaluate on
    batch: int  # tokens of a batch to score on
    length: int  # tokens of one of its rows
    hidden: int  # width of the hidden states
    vocabulary: int  # outputs of the head; 0 for a head that costs nothing
    blocks: tuple[tuple[Module, ...], ...]
    parameters: int  # of all blocks
    weights: int  # bytes of the model's weights
    itemsize: int  # bytes of a weight
    widened: bool = False  # whether a block computes in a float32 copy of its weights
    sequential: bool = True  # whether layers are refitted one after the other
    left: float = 1.0  # share of the units that stay
    ranked: float = 0.0  # share of the modules that a run that was killed has ranked before
    done: float = 0.0  # share of the modules that it has refitted

    @property
    def forward(self) -> float:
        """Multiplications of one token's forward pass through all blocks, attention included, without the head."""
        return self.parameters + 2 * self.length * self.hidden * len(self.blocks)

    def work(self, double: float = DOUBLE, passed: float = PASSED) -> dict[str, float]:
        """Return the work of the stages score, rank, refit and judge in multiplications of a forward pass."""
        modules, head = [module for block in self.blocks for module in block], HEAD * self.hidden * self.vocabulary
        # Forward twice, and backward through frozen weights, which costs as much as forward.
        score = 3 * self.scored * (self.forward + head)
        # Effects take as much as scores, and mostly each block once more. Moments take a forward pass, and half of the
        # products of inputs.
        moments = sum(self.refitted * module.inputs**2 / 2 for module in modules)
        orders = sum(self._order(module, double, passed) for module in modules) + 2 * self.scored * self.forward
        rank = 0.0
        if self.ranked < 1:
            rank = score + self.refitted * self.forward + (1 - self.ranked) * (moments + orders)
        kept = [replace(module, inputs=round(self.left * module.inputs)) for module in modules]
        sums = sum(self.refitted * module.inputs * (module.inputs / 2 + module.outputs) for module in kept)
        fits = sum(RIDGES * (module.inputs**3 / 3 + 2 * module.inputs**2 * module.outputs) for module in kept)
        passes = 1 + self.left if self.sequential else 1  # of the dense model, and of the slim one layer by layer
        refit = passes * self.refitted * self.forward + (1 - self.done) * (sums + fits)
        refit += min(PREDICTIONS, self.refitted) * ((1 + self.left) * self.forward + 2 * head)  # the logits' scale
        judge = 2 * self.judged * (self.forward + head)
        return {"score": score, "rank": rank, "refit": refit, "judge": judge}

    def _order(self, module: Module, double: float, passed: float) -> float:
        """Return the work of one module's order of removal, with the inverse matrix that it begins with."""
        tokens, inputs = self.scored, module.inputs
        inverse = 4 / 3 * double * inputs**3
        if not module.step:
            return inverse + HEADS * tokens * inputs**2
        # Each step passes over the inputs that are left, half of all on average.
        steps = 1 / module.step
        return inverse + tokens * inputs * (inputs + steps / 2 * (passed + 2 * inputs / steps))

    def memory(self) -> dict[str, float]:
        """Return the bytes at the peak of memory by what holds them, such as "weights", "states" and "block"."""
        inputs = max(sum(module.inputs for module in block) for block in self.blocks)
        widest = max(module.inputs for block in self.blocks for module in block)
        widened = 4 * self.parameters / len(self.blocks) if self.widened else 0.0  # a float32 copy of one block
        states = 2 * self.scored * self.hidden * len(self.blocks) * self.itemsize
        waiting = self.refitted * self.hidden * self.itemsize
        # Moments of both parts of the rows, and the inverse; inputs and gradients, in float32 and in parts.
        ranking = {"states": states + 2 * waiting, "block": 3 * 8 * widest**2 + 24 * self.scored * inputs + widened}
        scoring = {"states": states, "batch": 4.0 * LOGITS * self.batch * self.vocabulary, "block": widened}
        # Both models wait, in front of a block and inside of it.
        inside = (1 + self.left) * self.refitted * widest * self.itemsize
        refitting = {"states": 2 * 2 * waiting, "block": inside + 3 * 8 * (self.left * widest) ** 2 + 2 * widened}
        refitting["slim"] = self.left * self.parameters * self.itemsize
        peak = max(ranking, scoring, refitting, key=lambda stage: sum(stage.values()))
        return {"process": BASE, "weights": float(self.weights), **peak}


def size_of_pruning(pruning: Pruning) -> Size | None:
    """Return the size of a language model's pruning that ranks by `compensated`, refits and cuts once; else None."""
    budget, rows, how = pruning.budget, pruning.rows, pruning.options.compensation
    if not pruning.cuts_once or pruning.options.criterion != COMPENSATED or how is None or not pruning.task.generative:
        return None
    model, batch = pruning.model, pruning.rows.score[0]

    def module(consumer: str, kind: str) -> Module:
        outputs, inputs = features_of(model.get_submodule(consumer))
        return Module(inputs, outputs, KINDS[kind].step)

    def tokens(batches: Sequence[Batch]) -> int:
        return sum(count_tokens(model, batch) for batch in batches)

    blocks = {name: inside for name, inside in blocks_of(model, pruning.scored, batch).items() if inside}
    modules = tuple(tuple(module(units.consumer, units.kind) for units in inside) for inside in blocks.values())
    head = model.get_output_embeddings()
    size = Size(
        scored=tokens(rows.score),
        refitted=tokens(rows.refit),
        judged=tokens(rows.evaluation or rows.held_out),
        batch=max(count_tokens(model, batch) for batch in rows.score),
        length=count_tokens(model, batch) // size_of(batch),
        hidden=modules[0][0].outputs,
        vocabulary=0 if head is None else features_of(head)[0],
        blocks=modules,
        parameters=sum(p.numel() for name in blocks for p in model.get_submodule(name).parameters()),
        weights=sum(p.numel() * p.element_size() for p in model.parameters()),
        itemsize=next(model.parameters()).element_size(),
        widened=widens(next(model.parameters())),
        sequential=bool(how.sequential),
        ranked=len(pruning.chains or ()) / len(pruning.scored),
        done=len(pruning.fits or ()) / len(pruning.scored),
    )
    if (share := budget.flops or budget.parameters) is None:
        return replace(size, left=1 - (budget.heads or 0))
    # The share is of the whole model, but blocks alone get smaller, so they lose more than 1 - share.
    return replace(size, left=max(0.0, 1 - (1 - share) * (1 + size.hidden * size.vocabulary / size.forward)))


class Priced:
    """Progress that shows an estimate of the whole run after the first block, and of what is left with each stage."""

    def __init__(self, shown: Progress, clock: Callable[[], float] = time.monotonic):
        self._shown, self._clock = shown, clock
        self._size: Size | None = None
        self._work: dict[str, float] = {}  # by stages that have not ended
        # Of the stage that runs: its key in `_work`, empty without one; the name that is shown; and when it began.
        self._stage, self._name, self._began = "", "", 0.0
        # Seconds and work of the stages that ended, and multiplications a second, 0 until they are measured.
        self._spent, self._worked, self.pace = 0.0, 0.0, 0.0

    def expect(self, size: Size | None) -> None:
        """Show estimates for a run of this size from now on; without a size, none."""
        self._size, self._work = size, {} if size is None else size.work()

    def stage(self, name: str) -> None:
        """Report that a stage begins, and how long it and those after it take."""
        if self._stage and self.pace:
            # The pace of all stages so far, because an estimate that is wrong for one is mostly wrong for the others.
            self._spent += self._clock() - self._began
            self._worked += self._work.pop(self._stage)
            self.pace = self._worked / self._spent
        known = [key for start, key in STAGES.items() if name.startswith(start) and key in self._work]
        self._stage = known[0] if known else ""
        if self._stage == "rank":
            self._work.pop("score", None)  # nothing was collected
        self._began, self._name = self._clock(), name
        left = sum(self._work.values()) / self.pace if self.pace and self._stage else 0.0  # seconds
        self._shown.stage(f"{name} (about {in_words(left)} left)" if left >= WORTH_SAYING else name)

    def track(self, items: Sequence[T], name: str) -> Iterator[T]:
        """Yield the items of a loop in order, and report each; the first item, a block, is timed for the estimate."""
        for number, item in enumerate(self._shown.track(items, name)):
            if number == 0:
                began = self._clock()
            elif number == 1 and self._size is not None and self._stage and not self.pace:
                self._show_estimate(self._size, name, self._clock() - began)
            yield item

    def _show_estimate(self, size: Size, loop: str, seconds: float) -> None:
        """Set the pace by the seconds of a loop's first block, and show what the whole run takes."""
        tokens, products = size.scored, 0.0
        if loop == "moments":
            tokens, products = size.refitted, sum(size.refitted * module.inputs**2 / 2 for module in size.blocks[0])
        self.pace = (tokens * size.forward / len(size.blocks) + products) / max(seconds, 1e-6)
        takes, memory = sum(self._work.values()) / self.pace, sum(size.memory().values())
        if takes >= WORTH_SAYING:
            self._shown.stage(f"{self._name}; all takes about {in_words(takes)} and {memory / 1e9:.1f} GB of memory")


def in_words(seconds: float) -> str:
    """Return a time such as "1 minute" or "12 minutes", from 90 minutes on as "1.5 hours"."""
    minutes = max(1, round(seconds / 60))
    if minutes >= 90:
        return f"{seconds / 3600:.1f} hours"
    return "1 minute" if minutes == 1 else f"{minutes} minutes"
