"""Choose the units to keep: calibrate, score, select."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..calibrate.collect import DEFAULT_NEEDS
from ..data.targets import batches_fingerprint, samples_of, size_of
from ..evaluate.judge import Judge
from ..model.copies import share_weights
from ..progress import Progress
from ..prunable.find import find_modules
from ..report.details import BudgetOutcome, MaxDropOutcome, Tried
from ..score.criteria import AUTO, COMPENSATED
from ..select.iterative import filled_in
from ..slim.cut import prune_units
from ..slim.fingerprint import fingerprint
from ..slim.refit import Compensation
from ..units import Selection
from ..values import Provenance, PruningPlan, Scores, Statistics, dump_json, library_versions
from .candidates import Candidates, criterion_of
from .options import PruneOptions
from .prepare import Prepared
from .quality import Refit
from .refitting import Refitting
from .search import HeldOut, choose_alpha, choose_by_agreement, choose_by_max_drop
from .targets import Round, Targets

# Below this share of the dense cost, `criterion: auto` trusts removal in steps most. Above, a step costs quality.
STEPS_BELOW = 0.45


@dataclass(frozen=True)
class Choice:
    """The plan of a run, and the statistics and scores that it was chosen from."""

    statistics: Statistics
    scores: Scores
    plan: PruningPlan
    alpha_curve: tuple[Mapping[str, Any], ...]  # one entry per alpha under `alpha: auto`, see `AlphaChoice`
    tried: tuple[Tried, ...]  # what `criterion: auto` judged
    budget: BudgetOutcome  # with what is predicted for the plan
    compensation: Compensation | None = None
    refit: Refit | None = None  # from moments that were collected in choosing; None if there are none


def choose(prepared: Prepared, options: PruneOptions, *, progress: Progress) -> Choice:
    """Calibrate, score and select.

    With `alpha: auto` or `criterion: auto`, what is chosen is judged on the held-out rows. With `steps`, the budget is
    spent in that many rounds. Each round scores the model that the previous rounds left, cut and, with compensation,
    refitted. The statistics of a unit are those of the last round it was part of.
    """
    chooser = _Chooser(prepared, options, progress)
    if options.budget.max_drop is not None:
        return chooser.by_max_drop()
    if options.criterion == AUTO:
        return chooser.automatically()
    return chooser.as_told()


@dataclass(frozen=True)
class _Picked:
    """What rounds of choosing ended in; the selection is one of the dense model."""

    statistics: Statistics
    scores: Scores
    selection: Selection
    curve: tuple[Mapping[str, Any], ...] = ()


class _Chooser:
    """Choice of the units to keep in a dense model."""

    def __init__(self, prepared: Prepared, options: PruneOptions, progress: Progress):
        self._prepared, self._options, self._progress = prepared, options, progress
        self._refitting = Refitting(prepared, options, progress)
        # Before scoring, so that a budget that cannot be met fails early.
        self._targets = Targets(prepared, options, progress)
        self._judge: Judge | None = None

    def as_told(self) -> Choice:
        """Choose by the criterion that is asked for, in as many rounds."""
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

    def _left_by(self, selection: Selection) -> Prepared:
        """Return the prepared run with the dense model replaced by the one cut, and refitted, by a selection."""
        prepared = self._prepared
        slim = prune_units(share_weights(prepared.model), selection, prepared.modules, inplace=True)
        refit = self._refitting.by()
        if refit is not None:
            refit(slim, selection)
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
            seed=self._options.seed,
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

    def _held_out(self, metrics: tuple[str, ...], token_weights: float | None = None) -> HeldOut:
        """Return the judge of selections on the held-out rows; it refits them where models are compensated."""
        prepared = self._prepared
        if self._judge is None or self._judge.metrics != metrics:
            judged = replace(prepared.judged, metrics=metrics)
            self._judge = Judge.on(prepared.model, prepared.rows.held_out, **asdict(judged))
        return HeldOut(self._judge, prepared.model, prepared.modules, self._refitting.by(token_weights))

    def by_max_drop(self) -> Choice:
        """Choose the scores, and remove as much as the held-out metric allows."""
        prepared, max_drop = self._prepared, self._options.budget.max_drop
        assert max_drop is not None
        statistics, scored = self._of_dense.statistics, self._of_dense.by(self._options.criterion)
        self._progress.stage("choose the sparsity on held-out rows")
        sizes = self._targets.of_max_drop()
        held_out = self._held_out((max_drop.metric,))

        def select(scores: Scores, size: int) -> Selection:
            return self._targets.select(scores, sizes[size - 1])

        tracked = self._progress.track(scored, "choose sparsity")
        chosen = choose_by_max_drop(tracked, select, held_out, sizes=len(sizes), by=max_drop.by)
        outcome = MaxDropOutcome(
            kind="max_drop",
            metric=max_drop.metric,
            by=max_drop.by,
            dense=held_out.dense(),
            refitted=chosen.value if held_out.refit else None,
            masked=None if held_out.refit else chosen.value,
            samples=samples_of(prepared.rows.held_out),
            judged=chosen.judged,
        )
        return self._choice(_Picked(statistics, chosen.scores, chosen.selection), outcome=outcome)


def _after(earlier: _Picked, later: _Picked) -> _Picked:
    """Merge what two successive rounds picked; the selection of the later one is of the dense model already."""
    kept = earlier.selection
    values = {
        name: filled_in(earlier.statistics[name], later.statistics[name], kept) for name in earlier.statistics.values
    }
    return replace(
        later,
        statistics=replace(later.statistics, values=values),
        scores=replace(later.scores, scores=filled_in(earlier.scores.scores, later.scores.scores, kept), chains=()),
    )


def write_choice(folder: Path, choice: Choice) -> None:
    """Write scores.json (statistics and scores per unit) and plan.json."""
    statistics, scores = choice.statistics, choice.scores
    calibration = statistics.calibration
    written = {
        "criterion": scores.criterion,
        "parameters": scores.parameters,
        "scores": scores.scores,
        **{name: statistics[name] for name in DEFAULT_NEEDS},
        "samples": calibration.samples,
        "labels": calibration.labels,
        "fingerprint": calibration.fingerprint,
        "alpha_curve": choice.alpha_curve,
    }
    (folder / "scores.json").write_text(dump_json(written), encoding="utf-8")
    (folder / "plan.json").write_text(choice.plan.to_json(), encoding="utf-8")


def head_numbers(choice: Choice) -> dict[str, dict[str, list[float]]]:
    """Return lists of HIS, entropy and score over the heads: module name -> "his", "entropy" or "score" -> list."""
    values = {"his": choice.statistics["his"], "entropy": choice.statistics["entropy"], "score": choice.scores.scores}
    return {
        name: {what: numbers[name].tolist() for what, numbers in values.items() if name in numbers}
        for name in choice.scores.scores
    }
