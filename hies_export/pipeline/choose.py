"""Choose the units to keep: calibrate, score, select."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ..calibrate.statistics import Statistics
from ..data.batches import Batch, batches_fingerprint, samples_of, size_of
from ..errors import PlanError, RequestError
from ..evaluate.interval import CONFIDENCE, FAILURES, confidence_of_each
from ..evaluate.judge import Judge, Tried
from ..evaluate.metrics import METRICS
from ..evaluate.predict import Predictor, predict
from ..evaluate.ranking import RowsKind, keeps_predictions, kind_of_rows
from ..progress import Progress
from ..recipe.budget import Budget, DropBudget, KeepBudget, Outcome, TimedSection
from ..score.criteria import AUTO, COMPENSATED, Scores
from ..select.goal import filled_in
from ..select.plan import Provenance, PruningPlan, library_versions
from ..slim.check import fingerprint
from ..units.find import find_modules
from ..units.units import Selection
from .candidates import Candidates, choose_alpha, choose_by_agreement, criterion_of
from .prepare import Prepared
from .recipe import PruneSection
from .search import Guess, HeldOut, Judged, Search, Trial, Watch, judging
from .stages import Choice, Refitting, cut_beside
from .targets import Round, Targets

# Below this share of the dense cost, removal in steps is the default of `criterion: auto`. Above, steps cost quality.
STEPS_BELOW = 0.45
# A cut loses this many times as much of nDCG@10 against the dense ranking as of nDCG@10, or more: MiniLM on BoolQ 3.5
# to 9 (bench/results/embedding-quality.txt). Only the guess of a size assumes it.
OWN_LOSS = 3


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
    """The result of some rounds of choosing; the selection is one of the dense model.

    `curve` and `tried` are what was judged to choose alpha or the criterion. `token_weights` are None for the usual.
    """

    statistics: Statistics
    scores: Scores
    selection: Selection
    curve: tuple[Mapping[str, Any], ...] = ()
    tried: tuple[Tried, ...] = ()
    token_weights: float | None = None


class Chooser:
    """Choice of the units to keep in a dense model; statistics, moments and orders are computed once."""

    def __init__(self, prepared: Prepared, options: PruneSection, progress: Progress, dtype: torch.dtype | None = None):
        self._prepared, self._options, self._progress = prepared, options, progress
        self._refitting = Refitting(prepared, options, progress, dtype)
        # Before scoring, so that a budget that cannot be met fails early.
        self._targets = Targets(prepared, options, progress)
        self._judges: dict[tuple[Any, ...], Judge] = {}

    def choose(self) -> Choice:
        """Choose as the options ask; see `choose`."""
        budget = self._options.goal
        if budget.max_drop is not None:
            return self.by_max_drop(budget.max_drop)
        if budget.keep is not None:
            return self.by_keep(budget.keep)
        return self._within(self._targets)

    def at(self, share: float, like: Choice | None = None) -> Choice:
        """Choose a selection within a share of the dense model's FLOPs.

        The scores and the weights of tokens are those of a choice, if one is given.
        """
        options = self._options.model_copy(update={"budget": Budget(flops=share)})
        targets = Targets(self._prepared, options, self._progress)
        if like is None:
            return self._within(targets)
        (goal,) = targets.goals(1)
        weights = None if like.compensation is None else like.compensation.token_weights
        selection = targets.round(goal).select(like.scores)
        picked = _Picked(like.statistics, like.scores, selection, token_weights=weights)
        return self._choice(picked, targets.outcome(selection))

    def _within(self, targets: Targets) -> Choice:
        """Choose a selection that meets targets, by the criterion of the options."""
        if self._options.criterion == AUTO:
            picked = self._automatically(targets)
        else:
            picked = self._in_rounds(targets, self._options.steps, self._options.criterion)
        return self._choice(picked, targets.outcome(picked.selection))

    def _automatically(self, targets: Targets) -> _Picked:
        """Choose the criterion, and the weights of tokens, whose refitted model agrees most with the dense one."""
        (goal,) = targets.goals(1)
        first = targets.round(goal)
        candidates = self._candidates(first)
        picked = [_Picked(candidates.statistics, scores, first.select(scores)) for scores in candidates.by(AUTO)]
        steps = [1] * len(picked)
        if (count := self._steps_of_auto(targets)) > 1:
            # First, so that it is taken unless another is clearly better.
            picked.insert(0, self._in_rounds(targets, count, COMPENSATED))
            steps.insert(0, count)
        judge = self._judge(self._prepared.rows.held_out)
        self._progress.stage("choose the criterion on held-out rows")
        tried = choose_by_agreement(
            [(p.scores, p.selection) for p in picked], self._by_weights(judge), steps=steps, progress=self._progress
        )
        (chosen,) = (one for one in tried if one.chosen)
        return replace(picked[chosen.candidate], tried=tried, token_weights=chosen.token_weights)

    def _steps_of_auto(self, targets: Targets) -> int:
        """Return in how many steps `criterion: auto` also removes units."""
        if self._options.steps > 1:
            return self._options.steps
        deep = targets.ratio is not None and targets.ratio <= STEPS_BELOW
        return 2 if deep and self._options.compensation is not None else 1

    def _in_rounds(self, targets: Targets, count: int, criterion: str) -> _Picked:
        """Choose in a number of rounds, each of which scores the model that the previous ones left."""
        picked: _Picked | None = None
        for number, goal in enumerate(targets.goals(count), start=1):
            if count > 1:
                self._progress.stage(f"step {number} of {count}")
            if picked is None:
                picked = self._pick(targets.round(goal), criterion)
                continue
            part = targets.round(goal, before=picked.selection, left=self._left_by(picked.selection))
            picked = _after(picked, self._pick(part, criterion))
        assert picked is not None
        return picked

    def _pick(self, part: Round, criterion: str) -> _Picked:
        """Choose in one round; with several alphas, by their quality on the held-out rows."""
        candidates = self._candidates(part)
        statistics, scored = candidates.statistics, candidates.by(criterion)
        if len(scored) == 1:
            return _Picked(statistics, scored[0], part.select(scored[0]))
        self._progress.stage("choose alpha on held-out rows")
        rows = self._held_out(self._judge(self._prepared.rows.held_out))
        tracked = self._progress.track(scored, "choose alpha")
        chosen = choose_alpha(((scores, part.select(scores)) for scores in tracked), rows)
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

    def _left_by(self, selection: Selection) -> Prepared:
        """Return the prepared run with the dense model replaced by the one cut, and refitted, by a selection."""
        prepared = self._prepared
        slim = cut_beside(prepared.model, selection, prepared.modules, self._refitting.by())
        modules = find_modules(slim, prepared.sample, kinds=self._options.modules)
        names = {module.name for module in prepared.scored}
        return replace(prepared, model=slim, modules=modules, scored=tuple(m for m in modules if m.name in names))

    def _choice(self, picked: _Picked, outcome: Outcome) -> Choice:
        return Choice(
            statistics=picked.statistics,
            scores=picked.scores,
            plan=self._plan(picked),
            alpha_curve=picked.curve,
            tried=picked.tried,
            outcome=outcome,
            compensation=self._refitting.compensation(picked.token_weights),
            refit=self._refitting.by(picked.token_weights) if self._refitting.collected else None,
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

    def _judge(self, rows: list[Batch], **how: Any) -> Judge:
        """Return the judge on some of the prepared rows; options that are given replace those of the run."""
        key = id(rows), *sorted(how.items())
        if key not in self._judges:
            self._judges[key] = Judge.on(self._prepared.model, rows, **vars(self._prepared.judged) | how)
        return self._judges[key]

    def _held_out(self, judge: Judge, token_weights: float | None = None, by: Predictor = predict) -> HeldOut:
        """Return what judges selections; it refits them if models are compensated."""
        return HeldOut(judge, self._prepared.model, self._prepared.modules, self._refitting.by(token_weights), by)

    def _by_weights(self, judge: Judge, by: Predictor = predict) -> dict[float, HeldOut]:
        return {weights: self._held_out(judge, weights, by) for weights in self._refitting.tried}

    def by_max_drop(self, asked: DropBudget) -> Choice:
        """Choose the scores, and remove as much as the held-out metric allows."""
        rows = self._prepared.rows.held_out
        judge = self._judge(rows, metrics=(asked.metric,))
        held_out, dense = self._held_out(judge), judge.of(judge.dense).metrics[asked.metric]
        promise = Outcome(Budget(max_drop=asked), samples=samples_of(rows), dense=dense)
        scored = self.score()
        self._progress.stage("choose how much to remove, on held-out rows")
        search = Search(promise, {self._refitting.tried[0]: held_out}, self._targets.sizes())
        found = _found(search.largest(self._progress.track(scored, "choose how much to remove")), search)
        outcome = replace(found.outcome, judged=tuple(one.row for one in search.judged))
        return self._choice(self._picked(found.trial), outcome)

    def by_keep(
        self,
        asked: KeepBudget,
        *,
        served: TimedSection | None = None,
        confidence: float = confidence_of_each(FAILURES),
        watch: Watch | None = None,
    ) -> Choice:
        """Choose the scores and the weights of tokens, and remove as much as the promise allows.

        Scores, weights and a guess of the size are chosen in torch, on other rows than the held-out ones. These decide
        nothing but the size, beginning near the guess, by what serves the model. Its files take long to export.

        Args:
            asked: The promise.
            served: What serves the models, by default what the promise names, and torch if it names nothing.
            confidence: That of each interval; by default, this search is the only one on the held-out rows.
            watch: Follows the search.

        Raises:
            PlanError: No cut keeps the promise.
        """
        promise, sizes, served = self.promise(asked, confidence), self._targets.sizes(), served or asked.timed
        guess = self._guess(promise, sizes, None if served is None else "torch", watch)
        runtime = None if served is None else served.runtime
        self._progress.stage(
            f"judge cuts near that size on held-out rows{'' if runtime is None else f', on {runtime}'}"
        )
        judge = self._judge(self._prepared.rows.held_out, **judging(promise))
        held_out = self._held_out(judge, guess.token_weights, self._prepared.predictor(served))
        search = Search(promise, {guess.token_weights: held_out}, sizes, runtime=runtime, watch=watch)
        found = _found(search.near(guess), search)
        outcome = replace(
            promise,
            budget=self._targets.filled_in(promise.budget, served),
            judged=tuple(one.row for one in (*guess.judged, *search.judged)),
            predicted=self._targets.predicted(found.trial.selection),
        )
        return self._choice(self._picked(found.trial), outcome)

    def _guess(self, promise: Outcome, sizes: list[Round], runtime: str | None, watch: Watch | None) -> Guess:
        """Choose the scores and the weights of tokens, and guess the size, on other rows than the promise is made on.

        Without such rows, the guess is the smallest size, by the first scores.
        """
        scored, rows = self.score(), self._choosing_rows(promise)
        smallest = Guess(scored[0], self._refitting.tried[0], 1)
        if rows is None:
            return smallest
        self._progress.stage("guess how much to remove, on rows that are not held out")
        by_own = self._kind(rows) in ("texts", "groups")
        own = {"metrics": ("own_ndcg@10",)} if by_own else {}
        by_weights = self._by_weights(self._judge(rows, **judging(promise) | own))
        guessed = promise
        keep = promise.budget.keep
        if by_own and keep is not None and keep.metric != "own_ndcg@10" and keep.predictions is not None:
            asked = keep.model_copy(update={"predictions": 1 - OWN_LOSS * (1 - keep.predictions)})
            guessed = replace(promise, budget=Budget(keep=asked))
        search = Search(guessed, by_weights, sizes, runtime=runtime, guess=True, watch=watch)
        best = search.largest(self._progress.track(scored, "guess how much to remove"))
        if not search.judged:
            raise PlanError(search.problem)
        if best is None:
            return replace(smallest, judged=search.judged)
        return Guess(best.trial.scores, best.trial.token_weights, best.trial.size, search.judged)

    def nothing(self, asked: KeepBudget, *, confidence: float = confidence_of_each(FAILURES)) -> Choice:
        """Choose to remove nothing, because no cut keeps a promise."""
        whole = {module.name: module.kept(range(module.units)) for module in self._prepared.modules}
        picked = _Picked(self._of_dense.statistics, self.score()[0], whole)
        return replace(self._choice(picked, self.promise(asked, confidence)), refit=None)

    def promise(self, asked: KeepBudget, confidence: float = CONFIDENCE) -> Outcome:
        """Return what is promised on the held-out rows: of rankings or entities, the share of a metric."""
        rows = self._prepared.rows.held_out
        kind, index = self._kind(rows), asked.index
        searched = kind in ("queries", "texts")
        if index is not None and not searched:
            raise RequestError(
                "keep.index says which vectors of documents queries search, and only embeddings of queries and "
                "documents, or of texts alone, have these; leave it out"
            )
        metric = self._prepared.judged.promised(asked.metric, kind)
        left_open = {"metric": metric, "index": index or ("dense" if searched else None)}
        return Outcome(
            Budget(keep=asked.model_copy(update=left_open)),
            samples=samples_of(rows),
            confidence=confidence,
            # What a language model predicts may be answers or choices.
            word="prediction" if self._prepared.task.generative else self._prepared.judged.task.word,
        )

    def _kind(self, rows: Sequence[Batch]) -> RowsKind | None:
        return kind_of_rows(rows, embeds=self._prepared.task.embeds)

    def _choosing_rows(self, promise: Outcome) -> list[Batch] | None:
        """Return rows that nothing is promised on: those refitted on or, for a metric, those scored on, with labels.

        Rankings are guessed from unlabelled texts, or candidates, which are ranked as the dense model does. None for a
        metric of choices, which none of these rows have, and for candidates of which too few are of one query.
        """
        rows, metric = self._prepared.rows, promise.budget.metric
        unlabelled = rows.compensation or rows.calibration
        if keeps_predictions(self._kind(rows.held_out)):
            if metric is None or METRICS[metric].own:
                return unlabelled
            return None if METRICS[metric].of == "choices" else rows.calibration
        kind, count = self._kind(unlabelled), sum(map(size_of, unlabelled))
        return unlabelled if kind in ("texts", "queries") or count >= 2 * samples_of(unlabelled) else None

    def _picked(self, trial: Trial) -> _Picked:
        statistics = self._of_dense.statistics
        return _Picked(statistics, trial.scores, trial.selection, token_weights=trial.token_weights)


def _found(best: Judged | None, search: Search) -> Judged:
    """Return the best cut of a search, or raise PlanError with the reason why there is none."""
    if best is None:
        raise PlanError(search.problem)
    return best


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
