"""Work out how much a budget removes, in one round or several, and select the units that stay."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .. import processes
from ..errors import PlanError
from ..forms.cost.flops import flops_table
from ..forms.cost.latency import TimedOn, compare_with_full, latency_table
from ..forms.cost.parameters import parameters_table
from ..kinds import ATTENTION, MLP
from ..progress import Progress
from ..recipe.budget import Budget, Found, Outcome, TimedSection
from ..score.criteria import Scores
from ..select import goal as iterative
from ..select.constraints import Constraints, bundles_lost, check_budget
from ..select.cost import CostTable, check_reachable, lowest_ratio, shares_to_try
from ..select.select import select_units
from ..units.units import Selection
from .prepare import Prepared
from .recipe import PruneSection

# If held-out rows decide how much to remove, the removable cost is divided into this many sizes.
SIZES = 100


@dataclass(frozen=True)
class Round:
    """How much one round removes from a model: a share of heads, bundles of each module, or cost."""

    prepared: Prepared  # the model that the previous rounds left
    constraints: Constraints
    heads: float | None = None
    counts: Sequence[int] | None = None
    ratio: float | None = None  # greatest share of the dense cost left, not counting what earlier rounds saved
    table: CostTable | None = None  # what removals save; given with `ratio`
    before: Selection | None = None  # of the dense model, by the previous rounds; None in the first round

    def select(self, scores: Scores) -> Selection:
        """Return the units of the dense model that stay, by scores of this round's model."""
        found = select_units(
            scores,
            self.prepared.modules,
            heads=self.heads,
            counts=self.counts,
            table=self.table,
            ratio=self.ratio,
            constraints=self.constraints,
        )
        return found if self.before is None else iterative.compose(self.before, found)


# What all rounds up to one remove together: a share of heads, or the greatest cost left.
Goal = iterative.HeadTarget | float


class Targets:
    """How much a budget removes from a dense model; PlanError if the constraints allow no cut that meets it."""

    def __init__(self, prepared: Prepared, options: PruneSection, progress: Progress):
        self._prepared, self._options, self._progress = prepared, options, progress
        self._constraints, self.ratio = options.constraints, options.goal.ratio
        # Time of the dense model in the bits of the budget / time of the budget's reference.
        self._full = self._time_in_full()
        if self.ratio is not None:
            self.ratio /= self._full
        self._table = self._cost_table()

    def goals(self, count: int) -> list[Goal]:
        """Return the goals of a number of rounds, without those that would remove nothing."""
        if self.ratio is not None:
            return [1 - (1 - self.ratio) * number / count for number in range(1, count + 1)]
        heads, scored = self._options.goal.heads, self._prepared.scored
        assert heads is not None
        return [*iterative.head_targets(scored, heads=heads, count=count, constraints=self._constraints)]

    def round(self, goal: Goal, *, before: Selection | None = None, left: Prepared | None = None) -> Round:
        """Return the round that reaches a goal."""
        current = left or self._prepared
        if isinstance(goal, iterative.HeadTarget):
            heads, counts = goal.size(current.scored)
            return Round(current, self._constraints, heads=heads, counts=counts, before=before)
        assert self._table is not None
        if before is None:
            return Round(current, self._constraints, ratio=goal, table=self._table)
        lost = self._lost(before)
        already = 1 - self._table.ratio(lost)
        table = self._table.after(lost)
        return Round(current, self._constraints, ratio=goal + already, table=table, before=before)

    def sizes(self) -> list[Round]:
        """Return rounds that remove more and more of the dense model, for budgets that held-out rows decide.

        Each removes a hundredth more of the removable time or FLOPs; for heads alone and no runtime, one head more.
        """
        prepared, scored = self._prepared, self._prepared.scored
        found: list[Round] = []
        table = self._table
        if table is None and any(module.kind == MLP for module in scored):
            table = self._flops_table
        if table is not None:
            least = lowest_ratio(scored, table, self._constraints)
            if least < 1:
                # In floats, 1 - (1 - least) may be slightly less than least, which no selection reaches.
                ratios = [max(least, 1 - (1 - least) * step / SIZES) for step in range(1, SIZES + 1)]
                found = [Round(prepared, self._constraints, ratio=ratio, table=table) for ratio in ratios]
        else:
            for share in shares_to_try(scored, self._constraints):
                with contextlib.suppress(PlanError):  # more than the constraints allow
                    check_budget(scored, heads=share, constraints=self._constraints)
                    found.append(Round(prepared, self._constraints, heads=share))
        if not found:
            raise PlanError(
                f"{self._options.goal.kind} needs units that may go, but the constraints leave none; loosen them"
            )
        return found

    def _cost_table(self) -> CostTable | None:
        """Return the cost table for a budget of FLOPs, parameters or time; None for other budgets."""
        prepared, budget, unit = self._prepared, self._options.goal, self._constraints.unit
        if budget.timed is not None:
            self._progress.stage("time cuts of several sizes, to predict the time of a plan")
            where = timed_on(self._prepared, self._options)
            # Times differ between processes, but their choices must not.
            table = processes.on_main(
                lambda: latency_table(
                    prepared.model,
                    prepared.scored,
                    where,
                    unit=unit,
                    skippable=self._constraints.skippable,
                    progress=self._progress,
                )
            )
        elif budget.flops is not None:
            table = self._flops_table
        elif budget.parameters is not None:
            table = parameters_table(prepared.model, prepared.scored, unit=unit)
        else:
            return None
        if self.ratio is not None:
            check_reachable(prepared.scored, table, ratio=self.ratio, constraints=self._constraints)
        return table

    def _time_in_full(self) -> float:
        """Return the dense model's time in the bits of the budget / its time in float32, if the ratio is to float32."""
        timed, model = self._options.goal.latency, self._prepared.model
        if timed is None or timed.of == "same":
            return 1.0
        self._progress.stage("time the dense model in the bits of the budget, and in float32")
        found = processes.on_main(
            lambda: (
                compare_with_full(model, model, timed_on(self._prepared, self._options), progress=self._progress).ratio
            )
        )
        if found <= timed.ratio:
            raise PlanError(
                f"the budget asks for at most {timed.ratio:g} of the time of dense float32, and the dense model on "
                f"{timed.runtime} takes {found:.3f} of it as it is: nothing has to go; lower the ratio"
            )
        return found

    @cached_property
    def _flops_table(self) -> CostTable:
        prepared, unit = self._prepared, self._constraints.unit
        return flops_table(prepared.model, prepared.scored, batch=next(iter(prepared.measured.values())), unit=unit)

    def _lost(self, selection: Selection) -> dict[str, int]:
        """Return how many bundles each module loses that loses any."""
        return bundles_lost(selection, self._prepared.scored, unit=self._constraints.unit)

    def predicted(self, selection: Selection) -> float | None:
        """Return the share of the cost that a selection leaves; None for a budget without a table of cost."""
        return None if self._table is None else self._table.ratio(self._lost(selection))

    def flops_left(self, selection: Selection) -> float:
        """Return the share of the dense model's FLOPs that a selection leaves."""
        return self._flops_table.ratio(self._lost(selection))

    def filled_in(self, budget: Budget, served: TimedSection | None = None) -> Budget:
        """Return a budget with where it is timed, by default as it says itself; the same if nothing is timed."""
        timed = served or budget.timed
        if timed is None:
            return budget
        batch, sequence = _budget_shape(self._prepared, timed)
        where = {"runtime": timed.runtime, "batch": batch, "sequence": sequence, "dtype": timed.dtype}
        return budget.model_copy(update={budget.kind: getattr(budget, budget.kind).model_copy(update=where)})

    def outcome(self, selection: Selection) -> Outcome:
        """Return the budget with what the cost table predicts; `run` adds what is measured."""
        budget, table = self.filled_in(self._options.goal), self._table
        if table is None or self.ratio is None:
            heads = [kept for kept in selection.values() if kept.kind == ATTENTION]
            return Outcome(budget, found=Found(sum(len(of.removed) for of in heads) / sum(of.total for of in heads)))
        predicted = table.ratio(self._lost(selection))
        return Outcome(budget, predicted=predicted * self._full, table=table.measured or ())


def timed_on(prepared: Prepared, options: PruneSection) -> TimedOn:
    """Return where a latency budget is measured."""
    timed = options.goal.timed
    assert timed is not None
    return TimedOn(
        runtime=timed.runtime,
        batch=prepared.measured[_budget_shape(prepared, timed)],
        exporter=prepared.exporter,
        dtype=timed.dtype,
        repeats=prepared.timing.repeats,
        min_seconds=prepared.timing.min_seconds,
    )


def _budget_shape(prepared: Prepared, timed: TimedSection) -> tuple[int, int]:
    """Return the measured (batch, sequence) of a latency budget.

    For images and prompts only the batch is compared, because every batch has the same sequence.
    """
    rows = None if prepared.length is None else prepared.length.tokens
    of_batch = [shape for shape in prepared.measured if shape[0] == timed.batch]
    return next((shape for shape in of_batch if shape[1] == (timed.sequence or rows)), of_batch[0])
