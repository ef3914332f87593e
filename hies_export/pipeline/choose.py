"""Choose the units to keep: calibrate, score, select."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ..data.targets import batches_fingerprint, samples_of, size_of
from ..errors import PlanError
from ..evaluate.judge import Judge
from ..evaluate.metrics import quality_loss
from ..evaluate.predict import predict
from ..progress import Progress
from ..prunable.find import find_modules
from ..recipe import BudgetSection, DropBudget, KeepBudget, PruneSection, TimedSection
from ..report.details import BudgetOutcome, KeepOutcome, MaxDropOutcome, Tried
from ..runtimes.base import RUNTIMES
from ..score.criteria import AUTO, COMPENSATED
from ..select.iterative import filled_in
from ..slim.fingerprint import fingerprint
from ..units import Selection
from ..values import Provenance, PruningPlan, Scores, Statistics, library_versions
from .candidates import Candidates, criterion_of
from .choice import Choice
from .prepare import Prepared
from .quality import Predictor, cut_beside
from .refitting import Refitting
from .search import Candidate, HeldOut, Verdict, choose_alpha, choose_by_agreement, choose_largest
from .serving import predictor
from .targets import Round, Targets

# Returns the numbers of a cut, by the runtime that predicts (None: torch) and the weights of tokens in its refit; the
# last argument judges it.
Recall = Callable[[Selection, str | None, float, Callable[[], tuple[float, float]]], tuple[float, float]]


def judged_anew(
    selection: Selection, runtime: str | None, weights: float, judge: Callable[[], tuple[float, float]]
) -> tuple[float, float]:
    """Judge a cut that was not judged before."""
    return judge()


# Below this share of the dense cost, removal in steps is the default of `criterion: auto`. Above, steps cost quality.
STEPS_BELOW = 0.45


def choose(
    prepared: Prepared, options: PruneSection, *, dtype: torch.dtype | None = None, progress: Progress
) -> Choice:
    """Calibrate, score and select, for a slim model that is saved in a dtype.

    `alpha: auto` and `criterion: auto` are chosen on the held-out rows. With `steps`, the budget is spent in that many
    rounds. Each round scores the model that the previous rounds left, cut and, with compensation, refitted. The
    statistics of a unit are those of the last round it was part of.
    """
    return Chooser(prepared, options, progress, dtype).choose()


@dataclass(frozen=True)
class _Picked:
    """The result of some rounds of choosing; the selection is one of the dense model."""

    statistics: Statistics
    scores: Scores
    selection: Selection
    curve: tuple[Mapping[str, Any], ...] = ()


class Chooser:
    """Choice of the units to keep in a dense model; statistics, moments and orders are computed once."""

    def __init__(self, prepared: Prepared, options: PruneSection, progress: Progress, dtype: torch.dtype | None = None):
        self._prepared, self._options, self._progress = prepared, options, progress
        self._refitting = Refitting(prepared, options, progress, dtype)
        # Before scoring, so that a budget that cannot be met fails early.
        self._targets = Targets(prepared, options, progress)
        self._judge: Judge | None = None

    def choose(self) -> Choice:
        """Choose as the options ask; see `choose`."""
        budget = self._options.budget
        if budget.max_drop is not None:
            return self.by_max_drop(budget.max_drop)
        if budget.keep is not None:
            return self.by_keep(budget.keep)
        if self._options.criterion == AUTO:
            return self.automatically()
        return self.as_told()

    def as_told(self) -> Choice:
        """Choose by the requested criterion, in the requested number of rounds."""
        return self._choice(self._in_rounds(self._options.steps, self._options.criterion))

    def automatically(self) -> Choice:
        """Choose the criterion, and the weights of tokens, whose refitted model agrees most with the dense one."""
        (goal,) = self._targets.goals(1)
        first = self._targets.round(goal)
        candidates = self._candidates(first)
        statistics = candidates.statistics
        picked = [_Picked(statistics, scores, self._targets.select(scores, first)) for scores in candidates.by(AUTO)]
        steps = [1] * len(picked)
        if self._steps_of_auto() > 1:
            # First, so that it is taken unless another is clearly better.
            picked.insert(0, self._in_rounds(self._steps_of_auto(), COMPENSATED))
            steps.insert(0, self._steps_of_auto())
        held_out = {
            weights: self._held_out(self._prepared.judged.metrics, weights) for weights in self._refitting.tried
        }
        self._progress.stage("choose the criterion on held-out rows")
        tried = choose_by_agreement(
            [(p.scores, p.selection) for p in picked], held_out, steps=steps, progress=self._progress
        )
        (number,) = (n for n, t in enumerate(tried) if t.chosen)
        return self._choice(picked[tried[number].candidate], tried=tried, token_weights=tried[number].token_weights)

    def _steps_of_auto(self) -> int:
        """Return in how many steps `criterion: auto` also removes units."""
        if self._options.steps > 1:
            return self._options.steps
        deep = self._targets.ratio is not None and self._targets.ratio <= STEPS_BELOW
        return 2 if deep and self._options.compensation is not None else 1

    def _in_rounds(self, count: int, criterion: str) -> _Picked:
        """Choose in a number of rounds, each of which scores the model that the previous ones left."""
        picked: _Picked | None = None
        for number, goal in enumerate(self._targets.goals(count), start=1):
            if count > 1:
                self._progress.stage(f"step {number} of {count}")
            if picked is None:
                picked = self._pick(self._targets.round(goal), criterion)
                continue
            part = self._targets.round(goal, before=picked.selection, left=self._left_by(picked.selection))
            picked = _after(picked, self._pick(part, criterion))
        assert picked is not None
        return picked

    def _pick(self, part: Round, criterion: str) -> _Picked:
        """Choose in one round; with several alphas, by their quality on the held-out rows."""
        candidates = self._candidates(part)
        statistics, scored = candidates.statistics, candidates.by(criterion)

        def select(scores: Scores) -> Selection:
            return part.of_dense(self._targets.select(scores, part))

        if len(scored) == 1:
            return _Picked(statistics, scored[0], select(scored[0]))
        self._progress.stage("choose alpha on held-out rows")
        chosen = choose_alpha(
            self._progress.track(scored, "choose alpha"), select, self._held_out(self._prepared.judged.metrics)
        )
        return _Picked(statistics, chosen.scores, chosen.selection, chosen.curve)

    def _candidates(self, part: Round) -> Candidates:
        if part.before is None:
            return self._of_dense
        return Candidates(part.prepared, self._options, self._progress)

    @cached_property
    def _of_dense(self) -> Candidates:
        """The candidates of the dense model, whose moments the refits need as well."""
        return Candidates(self._prepared, self._options, self._progress, self._refitting.moments)

    def score(self) -> list[Scores]:
        """Return the scores of the dense model's units to choose by; they are computed once."""
        return self._of_dense.by(self._options.criterion)

    def flops_left(self, selection: Selection) -> float:
        """Return the share of the dense model's FLOPs that a selection leaves."""
        return self._targets.flops_left(selection)

    def at(self, share: float, like: Choice | None = None) -> Choice:
        """Choose a selection within a share of the dense model's FLOPs; all shares use the same statistics.

        The scores and the weights of tokens are those of a choice, if one is given.
        """
        options = self._options.model_copy(update={"budget": BudgetSection(flops=share)})
        other = Chooser(self._prepared, options, self._progress, None)
        other._refitting, other._of_dense = self._refitting, self._of_dense
        if like is None:
            return other.choose()
        (goal,) = other._targets.goals(1)
        picked = _Picked(like.statistics, like.scores, other._targets.select(like.scores, other._targets.round(goal)))
        weights = None if like.compensation is None else like.compensation.token_weights
        return other._choice(picked, token_weights=weights)

    def _left_by(self, selection: Selection) -> Prepared:
        """Return the prepared run with the dense model replaced by the one cut, and refitted, by a selection."""
        prepared = self._prepared
        slim = cut_beside(prepared.model, selection, prepared.modules, self._refitting.by())
        modules = find_modules(slim, prepared.sample, kinds=self._options.modules)
        names = {module.name for module in prepared.scored}
        return replace(prepared, model=slim, modules=modules, scored=tuple(m for m in modules if m.name in names))

    def _choice(
        self,
        picked: _Picked,
        *,
        tried: tuple[Tried, ...] = (),
        token_weights: float | None = None,
        outcome: BudgetOutcome | None = None,
    ) -> Choice:
        plan = self._plan(picked)
        return Choice(
            statistics=picked.statistics,
            scores=picked.scores,
            plan=plan,
            alpha_curve=picked.curve,
            tried=tried,
            budget=outcome or self._targets.outcome(plan.kept),
            compensation=self._refitting.compensation(token_weights),
            refit=self._refitting.by(token_weights) if self._refitting.collected else None,
        )

    def _plan(self, picked: _Picked) -> PruningPlan:
        scores, calibration = picked.scores, picked.statistics.calibration
        if scores.criterion == COMPENSATED:
            rows = self._of_dense.effect_batches
            calibration = replace(
                calibration,
                samples=sum(map(size_of, rows)),
                labels="predictions",
                fingerprint=batches_fingerprint(rows),
            )
        provenance = Provenance(
            criterion=criterion_of(scores, self._options),
            alpha=scores.parameters.get("alpha"),
            seed=self._prepared.seed,
            calibration={
                "samples": calibration.samples,
                "labels": calibration.labels,
                "fingerprint": calibration.fingerprint,
            },
            versions=library_versions(),
            model=fingerprint(self._prepared.model, self._prepared.modules),
            compensation={} if (how := self._options.compensation) is None else {"method": how.method},
        )
        return PruningPlan.of(picked.selection, provenance)

    def _held_out(
        self, metrics: tuple[str, ...], token_weights: float | None = None, by: Predictor = predict
    ) -> HeldOut:
        """Return the judge of selections on the held-out rows; it refits them if models are compensated."""
        prepared = self._prepared
        if self._judge is None or self._judge.metrics != metrics:
            judged = replace(prepared.judged, metrics=metrics)
            self._judge = Judge.on(prepared.model, prepared.rows.held_out, **asdict(judged))
        return HeldOut(self._judge, prepared.model, prepared.modules, self._refitting.by(token_weights), by)

    def by_max_drop(self, asked: DropBudget) -> Choice:
        """Choose the scores, and remove as much as the held-out metric allows."""
        held_out = self._held_out((asked.metric,))
        dense = held_out.dense()

        def judge(selection: Selection) -> Verdict:
            value = held_out.value(selection)
            return Verdict(quality_loss(asked.metric, dense, value) <= asked.by, {asked.metric: value})

        def problem(judged: Sequence[Mapping[str, Any]]) -> str:
            least = min((quality_loss(asked.metric, dense, row[asked.metric]) for row in judged), default=0.0)
            return (
                f"max_drop allows {asked.metric} to get worse by {asked.by:g}, but on the held-out rows even the "
                f"smallest cut makes it worse by {least:.4g} (dense {dense:.4g}); allow more, or use compensation with "
                "a budget of heads"
            )

        found = self._largest({1.0: judge}, problem)
        value = found.verdict.numbers[asked.metric]
        outcome = MaxDropOutcome(
            kind="max_drop",
            metric=asked.metric,
            by=asked.by,
            dense=dense,
            refitted=value if held_out.refit else None,
            masked=None if held_out.refit else value,
            samples=samples_of(self._prepared.rows.held_out),
            judged=found.judged,
        )
        return self._choice(found.picked, outcome=outcome)

    def by_keep(
        self,
        asked: KeepBudget,
        *,
        served: TimedSection | None = None,
        stop: Callable[[], bool] = lambda: False,
        recall: Recall = judged_anew,
    ) -> Choice:
        """Choose the scores and the weights of tokens, and remove as much as the promise allows.

        Models are judged as they are `served`, by default as the promise says; torch predicts if that names no runtime.
        Once `stop` returns true, nothing more is judged, and the largest cut so far is taken. `recall` may know the
        results of a cut. Raises PlanError if no cut keeps the promise.
        """
        metrics = self._prepared.judged.metrics if asked.metric is None else (asked.metric,)
        samples = samples_of(self._prepared.rows.held_out)
        blank = KeepOutcome(
            kind="keep", predictions=asked.predictions, metric=asked.metric, by=asked.by, samples=samples, judged=()
        )

        names = ("kept", "at_least") if asked.metric is None else ("lost", "at_most")

        def judges(runtime: str | None, by: Predictor) -> dict[float, Callable[[Selection], Verdict]]:
            """Return a judge for each weight of tokens that is tried."""
            return {w: judge_of(w, self._held_out(metrics, w, by), runtime) for w in self._refitting.tried}

        def judge_of(weights: float, rows: HeldOut, runtime: str | None) -> Callable[[Selection], Verdict]:
            def judge(selection: Selection) -> Verdict:
                numbers = rows.kept if asked.metric is None else rows.lost
                found, end = recall(selection, runtime, weights, lambda: numbers(selection))
                holds = replace(blank, slim=found, slim_end=end).met
                return Verdict(holds, dict(zip(names, (found, end), strict=True)))

            return judge

        def problem(judged: Sequence[Mapping[str, Any]]) -> str:
            if not judged:
                return "keep needs time to judge a cut, and there was none; allow more"
            found, end = (judged[-1][name] for name in names)
            least = replace(blank, slim=found, slim_end=end).found
            return (
                f"keep asks for {blank.asked} on {samples:,} held-out rows, and the mildest cut has {least}; ask for "
                "less, compensate, or give more held-out rows, which narrow the interval"
            )

        served = served or asked.timed
        if served is None or RUNTIMES[served.runtime].reads_models:
            by = predictor(self._prepared, served)
            runtime = None if served is None else served.runtime
            found = self._largest(judges(runtime, by), problem, stop, runtime)
        else:
            # An export takes longer than judging it, so torch first finds roughly the size.
            found = self._largest(judges("torch", predict), problem, stop, "torch")
            judge = judges(served.runtime, predictor(self._prepared, served))[found.token_weights]
            found = self._largest_near(found, judge, served.runtime, problem, stop)
        predicted = self._targets.predicted(found.picked.selection)
        where = {} if served is None else self._targets.where(served)
        outcome = replace(blank, judged=found.judged, predicted=predicted, **where)
        return self._choice(found.picked, token_weights=found.token_weights, outcome=outcome)

    def nothing(self, asked: KeepBudget) -> Choice:
        """Choose to remove nothing, because no cut keeps a promise."""
        samples = samples_of(self._prepared.rows.held_out)
        outcome = KeepOutcome(
            kind="keep", predictions=asked.predictions, metric=asked.metric, by=asked.by, samples=samples, judged=()
        )
        whole = {module.name: module.kept(range(module.units)) for module in self._prepared.modules}
        picked = _Picked(self._of_dense.statistics, self.score()[0], whole)
        return replace(self._choice(picked, outcome=outcome), refit=None)

    def _largest(
        self,
        judges: Mapping[float, Callable[[Selection], Verdict]],
        problem: Callable[[Sequence[Mapping[str, Any]]], str],
        stop: Callable[[], bool] = lambda: False,
        runtime: str | None = None,
    ) -> _Largest:
        """Find the largest cut that the held-out rows allow, over all scores and then over the weights of tokens.

        `judges` are by weights of tokens; `runtime` predicts in them. If no cut is allowed, raises PlanError with the
        `problem` that the judged cuts have.
        """
        scored = self.score()
        self._progress.stage("choose how much to remove, on held-out rows")
        sizes = self._targets.sizes()

        def select(scores: Scores, size: int) -> Selection:
            return self._targets.select(scores, sizes[size - 1])

        weights, *others = judges
        tracked = self._progress.track(scored, "choose how much to remove")
        first = (Candidate(scores, judges[weights], runtime) for scores in tracked)
        found = choose_largest(first, select, sizes=len(sizes), stop=stop)
        if found.candidate is None:
            raise PlanError(problem(found.judged))
        scores, judged = scored[found.candidate], found.judged
        candidates = [Candidate(scores, judges[other], runtime) for other in others]
        more = choose_largest(candidates, select, sizes=len(sizes), at_least=found.size, stop=stop)
        if more.candidate is not None:
            found, weights = more, others[more.candidate]
        assert found.verdict is not None
        picked = _Picked(self._of_dense.statistics, scores, select(scores, found.size))
        return _Largest(picked, weights, found.size, found.verdict, (*judged, *more.judged))

    def _largest_near(
        self,
        guess: _Largest,
        judge: Callable[[Selection], Verdict],
        runtime: str,
        problem: Callable[[Sequence[Mapping[str, Any]]], str],
        stop: Callable[[], bool],
    ) -> _Largest:
        """Find the largest cut by the scores and weights of a guess, around its size, by another judge."""
        self._progress.stage(f"judge cuts near that size on {runtime}")
        sizes, scores, held = self._targets.sizes(), guess.picked.scores, False

        def judged(selection: Selection) -> Verdict:
            nonlocal held
            verdict = judge(selection)
            held = held or verdict.holds
            return verdict

        found = choose_largest(
            [Candidate(scores, judged, runtime)],
            lambda scores, size: self._targets.select(scores, sizes[size - 1]),
            sizes=len(sizes),
            near=guess.size,
            # Until one holds, smaller ones are judged even after the limit: otherwise there would be no result.
            stop=lambda: held and stop(),
        )
        if found.verdict is None:
            raise PlanError(problem(found.judged))
        picked = replace(guess.picked, selection=self._targets.select(scores, sizes[found.size - 1]))
        return _Largest(picked, guess.token_weights, found.size, found.verdict, (*guess.judged, *found.judged))


@dataclass(frozen=True)
class _Largest:
    """The largest cut that held-out rows allow: units, weights of tokens, size, verdict, and all that was judged."""

    picked: _Picked
    token_weights: float
    size: int
    verdict: Verdict
    judged: tuple[Mapping[str, Any], ...]


def _after(earlier: _Picked, later: _Picked) -> _Picked:
    """Merge the picks of two successive rounds; the selection of the later one already is one of the dense model."""
    kept = earlier.selection
    values = {
        name: filled_in(earlier.statistics[name], later.statistics[name], kept) for name in earlier.statistics.values
    }
    return replace(
        later,
        statistics=replace(later.statistics, values=values),
        scores=replace(later.scores, scores=filled_in(earlier.scores.scores, later.scores.scores, kept), chains=()),
    )
