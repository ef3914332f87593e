"""Judge many ways to prune one model: criteria x alphas x sparsities x seeds x calibration sizes x compensations.

Statistics are collected once for every seed and calibration size, moments and effects once for every seed, and plans
that are equal are evaluated once. What is finished stands in a journal: a sweep that was killed goes on where it was.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..baselines.channels import check_channels, masked_channels, select_channels
from ..baselines.names import CHANNELS, JUDGED_ONLY, OWN_SAMPLES, SLICED, SLICED_TUNED
from ..baselines.slicing import Bases, collect_bases, fine_tuned, sliced
from ..calibrate.collect import collect_statistics
from ..calibrate.effects import Effects, collect_effects
from ..calibrate.moments import SplitMoments, collect_moments
from ..calibrate.signals import collect_signals
from ..data.lengths import by_length
from ..data.targets import size_of
from ..errors import RecipeError
from ..evaluate.judge import Judge, Judgement
from ..evaluate.metrics import METRICS
from ..evaluate.predict import Predictions, predict
from ..legacy import HeadStatistics, select_heads
from ..measure.counts import count_flops
from ..model.copies import share_weights
from ..pipeline.prepare import Prepared, budget_options, prepare
from ..pipeline.quality import Refit, predict_pruned
from ..pipeline.search import ALPHAS, choose_alpha
from ..progress import Progress, Silent
from ..recipe import PruningRecipe
from ..score.compensated import score_compensated
from ..score.criteria import COMPENSATED, SIGNAL_CRITERIA, score_units, uses_alpha
from ..select.constraints import check_budget
from ..slim.cut import prune_units
from ..slim.refit import LayerFit
from ..values import PruningPlan, Scores, library_versions
from .grid import AUTOMATIC, Cell, SweepGrid
from .journal import Journal
from .tables import write_results

# What `hies-compensated` is scored on: covariances of hundreds of inputs want more than a score does.
EFFECT_SAMPLES = 256
# Fields of the recipe that give way to the grid, by section.
_GIVEN_BY_THE_GRID = {"calibration": ("samples", "seed"), "prune": ("criterion", "alpha", "budget")}


@dataclass(frozen=True)
class SweepResult:
    """What a sweep came to.

    Attributes:
        rows: One per cell, as in sweep.json.
        seconds: How long what took, in this process.
        evaluations: How many masked or cut models were judged on the evaluation rows, in this process.
    """

    rows: list[dict[str, Any]]
    seconds: dict[str, float]
    evaluations: int


def sweep(
    recipe: PruningRecipe,
    grid: SweepGrid,
    folder: Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> SweepResult:
    """Try every cell of a grid and write sweep.json, details.json, sweep.csv, tables.md and tables.tex.

    Without compensation a plan is judged masked, nothing is cut; with it, the model is cut and refitted from moments of
    the dense model. Stopped half-way, it goes on where it was when it is called again; with another grid, finished rows
    that are in it are taken from the journal.

    Args:
        recipe: Model, data, evaluation and constraints; its criterion, alpha, budget, compensation method, calibration
            seed and size give way to the grid's.
        grid: What to try.
        folder: Where to write; new, or with the journal of a sweep of the same recipe.
        overwrite: Begin anew where there is a journal.
        progress: Told about stages and loops.

    Raises:
        RequestError: The recipe, the grid, the data or the model does not allow it, or the folder holds something else.
        StepError: A step failed; what was finished stays in the journal.
    """
    progress = progress or Silent()
    if recipe.prune.steps > 1:
        raise RecipeError(
            [f"a sweep scores heads once for all sparsities, got prune.steps: {recipe.prune.steps}; set it to 1"]
        )
    with Journal(folder, asked=_asked(recipe), overwrite=overwrite) as journal:
        runner = _Runner(recipe, grid, journal, progress)
        rows = runner.run()
        write_results(folder, rows, details=runner.details())
    return SweepResult(rows=rows, seconds=runner.seconds, evaluations=runner.evaluations)


def weighted_area(sparsities: Sequence[float], values: Sequence[float]) -> float:
    """Mean of a curve over sparsity, weighted by the sparsity: what is cut deep counts most.

    The integral of s * value(s) over that of s, by trapezoids; of a single point its value.
    """
    points = sorted(zip(sparsities, values, strict=True))
    if len(points) == 1:
        return points[0][1]
    pairs = list(itertools.pairwise(points))
    area = sum((t - s) * (s * v + t * w) / 2 for (s, v), (t, w) in pairs)
    return area / sum((t - s) * (s + t) / 2 for (s, _), (t, _) in pairs)


def _asked(recipe: PruningRecipe) -> dict[str, Any]:
    """What decides every row beside its cell, by the field a person would change: a grid may be widened later.

    Fields at their defaults are left out, so that the journal of a version that lacked one is still good.
    """
    fields = recipe.model_dump(mode="json", exclude={"output", "export", "measure"}, exclude_defaults=True)
    for section, left_out in _GIVEN_BY_THE_GRID.items():
        fields[section] = {k: v for k, v in fields.get(section, {}).items() if k not in left_out}
    return fields | {"versions": library_versions()}


@dataclass(frozen=True)
class _Calibrated:
    """What the heads are known by for one seed and calibration size."""

    prepared: Prepared
    statistics: HeadStatistics


class _Runner:
    """Does the cells that the journal has not, and keeps what they share."""

    def __init__(self, recipe: PruningRecipe, grid: SweepGrid, journal: Journal, progress: Progress):
        self._recipe, self._grid, self._journal, self._progress = recipe, grid, journal, progress
        self.seconds: dict[str, float] = {}
        self.evaluations = 0
        self._once: dict[Any, Any] = {}
        self._kept: dict[int, Any] = {}  # what belongs to the seed at hand
        progress.stage("load")
        with self._timed("load"):
            self._base = prepare(self._variant(grid.seeds[0], grid.calibration_sizes[0]))
        for sparsity in grid.sparsities:
            check_budget(self._base.scored, **budget_options(recipe) | {"heads": sparsity})
        if CHANNELS in grid.criteria:
            check_channels(self._base.scored)
        with self._timed("evaluate"):
            self._evaluation = self._judge_on(self._base.evaluation)
            self._dense = self._evaluation.of(self._evaluation.dense)
        # Plans that are equal give equal results: what the journal knows of them is not computed again.
        self._judged = {row["judged"]: row["result"] for row in journal.rows.values()}

    def run(self) -> list[dict[str, Any]]:
        cells = self._grid.cells()
        waiting = [cell for cell in cells if cell.key(self._grid) not in self._journal.rows]
        if len(waiting) < len(cells):
            self._progress.stage(f"{len(cells) - len(waiting)} of {len(cells)} rows are in the journal")
        started, part = time.perf_counter(), None
        for number, cell in enumerate(self._progress.track(waiting, f"sweep, {len(waiting)} rows")):
            if part != (cell.seed, cell.compensation):
                part = (cell.seed, cell.compensation)
                left = (time.perf_counter() - started) / number * (len(waiting) - number) if number else None
                known = "" if left is None else f", about {left / 60:.0f} min left"
                name = f"seed {cell.seed}, compensation {cell.compensation}"
                self._progress.stage(f"{name}: {number} of {len(waiting)} rows done{known}")
            self._journal.add(cell.key(self._grid), self._do(cell))
        return [self._row(cell) for cell in cells]

    def details(self) -> dict[str, Any]:
        """Statistics and plans of the first seed and size, and every alpha curve."""
        first = self._calibrated(self._grid.seeds[0], self._grid.calibration_sizes[0])
        cells = [
            c
            for c in self._grid.cells()
            if c.seed == self._grid.seeds[0]
            and c.samples == self._grid.calibration_sizes[0]
            and c.criterion not in JUDGED_ONLY
        ]
        plans = {}
        for cell in cells:
            entry = self._journal.rows[cell.key(self._grid)]
            scores = self._scores(cell, entry["alpha"])
            kept = {name: kept.query for name, kept in self._plan(scores, cell).kept.items()}
            label = {"criterion": cell.criterion, "alpha": entry["alpha"], "sparsity": cell.sparsity}
            plans["|".join(map(str, label.values()))] = label | {"kept": kept}
        return {
            "seed": self._grid.seeds[0],
            "calibration_samples": first.statistics.samples,
            "key_value_heads": {site.name: site.key_value_heads for site in self._base.sites},
            "his": first.statistics.his,
            "entropy": first.statistics.entropy,
            "plans": list(plans.values()),
            "alpha_curves": list(self._journal.alphas.values()),
        }

    def _do(self, cell: Cell) -> dict[str, Any]:
        alpha = self._alpha(cell) if isinstance(cell.alpha, str) else cell.alpha
        plan = None
        judged = f"{cell.criterion}|{cell.seed}|{cell.sparsity}"
        if cell.criterion not in (SLICED, SLICED_TUNED):
            plan = self._plan(self._scores(cell, alpha), cell)
            # Moments differ from seed to seed.
            kind = cell.criterion if cell.criterion == CHANNELS else cell.compensation
            heads = ";".join(f"{kept.query}" for kept in plan.kept.values())
            judged = f"{kind}|{'' if cell.compensation == 'none' else cell.seed}|{heads}"
        if judged not in self._judged:
            self._judged[judged] = self._judge(plan, cell)
        return {"judged": judged, "alpha": alpha, "samples": self._samples(cell), "result": self._judged[judged]}

    def _samples(self, cell: Cell) -> int:
        if cell.criterion == COMPENSATED:
            return self._effects(cell.seed).samples
        return cell.samples or sum(map(size_of, self._unlabelled(cell.seed)))

    def _row(self, cell: Cell) -> dict[str, Any]:
        entry = self._journal.rows[cell.key(self._grid)]
        return {
            "criterion": cell.criterion,
            "alpha": entry["alpha"],
            "alpha_by": cell.alpha if isinstance(cell.alpha, str) else None if cell.alpha is None else "given",
            "sparsity": cell.sparsity,
            "seed": cell.seed,
            "calibration_samples": entry["samples"],
            "compensation": cell.compensation,
            **entry["result"],
        }

    def _judge(self, plan: PruningPlan | None, cell: Cell) -> dict[str, Any]:
        if cell.criterion in JUDGED_ONLY:
            logits = self._baseline(plan, cell)
        else:
            assert plan is not None
            refit = self._refit(cell)
            with self._timed("evaluate"):
                logits = predict_pruned(self._base.model, plan, self._base.sites, self._base.evaluation, refit=refit)
        self.evaluations += 1
        quality = self._evaluation.of(logits)
        name = self._base.metrics[0]
        heads = None if cell.criterion in JUDGED_ONLY else plan
        return {
            "metric": name,
            "quality": quality.metrics[name],
            "quality_dense": self._dense.metrics[name],
            "stability": quality.stability,
            "flops_ratio": heads and self._flops_ratio(heads),
            "heads_removed": heads and heads.removed,
        }

    def _refit(self, cell: Cell) -> Refit | None:
        if cell.compensation == "none":
            return None
        moments, compensation = self._moments(cell.seed), self._recipe.prune.compensation
        ridge = None if compensation is None else compensation.ridge

        def refit(slim: PreTrainedModel, plan: PruningPlan) -> list[LayerFit]:
            with self._timed("refit"):
                return refit(slim, plan, self._base.sites, moments, method=cell.compensation, ridge=ridge)

        return refit

    def _baseline(self, plan: PruningPlan | None, cell: Cell) -> Predictions:
        """What the model predicts without some channels, by a plan of channels, or with its inputs sliced."""
        dense, sites = self._base.model, self._base.scored
        with ExitStack() as stack:
            if plan:
                stack.enter_context(masked_channels(dense, sites, plan))
            else:
                bases, batches, targets = self._bases(cell.seed)
                stack.enter_context(sliced(dense, sites, bases, share=cell.sparsity))
                if cell.criterion == SLICED_TUNED:
                    with self._timed("fine-tune"):
                        stack.enter_context(fine_tuned(dense, sites, batches, targets))
            with self._timed("evaluate"):
                return predict(dense, self._base.evaluation)

    def _plan(self, scores: Scores, cell: Cell) -> PruningPlan:
        options = budget_options(self._recipe) | {"heads": cell.sparsity}
        if cell.criterion == CHANNELS:
            shared = {name: options[name] for name in ("heads", "allocation", "min_heads", "keep_layers")}
            return select_channels(scores, self._base.scored, **shared, seed=cell.seed)
        return select_heads(scores, self._base.sites, **options, seed=cell.seed)

    def _scores(self, cell: Cell, alpha: float | None) -> Scores:
        if cell.criterion == COMPENSATED:
            return self._of_seed(cell.seed, "compensated scores", self._compensated_scores)
        statistics = self._calibrated(cell.seed, cell.samples).statistics
        if cell.criterion in (*SIGNAL_CRITERIA, CHANNELS):
            signals = self._of_seed(cell.seed, f"signals of {cell.samples}", lambda _: self._signals(cell))
            if cell.criterion == CHANNELS:
                return Scores(CHANNELS, {}, signals["channel_taylor"])
            statistics = replace(statistics, signals=signals)
        normalize = self._recipe.prune.normalize
        given = {} if alpha is None else {"alpha": alpha}
        return score_units(statistics, criterion=cell.criterion, normalize=normalize, seed=cell.seed, **given)

    def _signals(self, cell: Cell) -> dict[str, dict[str, Tensor]]:
        batches = self._calibrated(cell.seed, cell.samples).prepared.calibration
        with self._timed("signals"):
            return collect_signals(self._base.model, batches, self._base.scored)

    def _alpha(self, cell: Cell) -> float:
        if cell.alpha == "auto":
            return float(self._curve(cell, cell.sparsity)["chosen"])
        # One for all: the greatest weighted area under what the held-out rows say; ties go to the greater alpha.
        curves = [self._curve(cell, sparsity)["curve"] for sparsity in self._grid.sparsities]
        labelled = curves[0][0]["quality"] is not None
        sign = 1 if not labelled or METRICS[self._base.metrics[0]].higher_is_better else -1
        what = "quality" if labelled else "stability"
        areas = [
            (sign * weighted_area(self._grid.sparsities, [curve[i][what] for curve in curves]), alpha)
            for i, alpha in enumerate(ALPHAS)
        ]
        return max(areas)[1]

    def _curve(self, cell: Cell, sparsity: float) -> dict[str, Any]:
        """What every alpha comes to on the held-out rows, at a sparsity; and the chosen one."""
        at = replace(cell, alpha=None, sparsity=sparsity)
        key = at.key(self._grid)
        if key not in self._journal.alphas:
            calibrated = self._calibrated(cell.seed, cell.samples)
            held_out, refit = calibrated.prepared.held_out, self._refit(cell)
            judge = self._of_seed(cell.seed, f"judge of held-out {cell.samples}", lambda _: self._judge_on(held_out))

            def plan_at(alpha: float) -> tuple[Scores, PruningPlan]:
                scores = self._scores(at, alpha)
                return scores, self._plan(scores, at)

            def judged(plan: PruningPlan) -> Judgement:
                return judge.judgement(predict_pruned(self._base.model, plan, self._base.sites, held_out, refit=refit))

            with self._timed("choose alpha"):
                higher = METRICS[self._base.metrics[0]].higher_is_better
                choice = choose_alpha(plan_at, judged, higher_is_better=higher)
            found = {name: value for name, value in asdict(at).items() if name != "alpha"}
            found |= {"chosen": choice.scores.parameters["alpha"], "curve": list(choice.curve)}
            self._journal.add_alpha(key, found)
        return self._journal.alphas[key]

    def _calibrated(self, seed: int, samples: int) -> _Calibrated:
        def collect(seed: int) -> _Calibrated:
            with self._timed("load"):
                prepared = prepare(self._variant(seed, samples), loaded=self._base)
            with self._timed("statistics"):
                statistics = collect_statistics(prepared.model, prepared.calibration, prepared.scored)
            return _Calibrated(prepared, statistics)

        return self._of_seed(seed, f"calibrated on {samples}", collect)

    def _unlabelled(self, seed: int) -> list[dict[str, Tensor]]:
        return self._calibrated(seed, self._grid.calibration_sizes[0]).prepared.compensation

    def _bases(self, seed: int) -> tuple[Bases, list[dict[str, Tensor]], Predictions]:
        """Principal components, and what a fine-tune goes by: batches, and the dense model's predictions on them."""

        def collect(seed: int) -> tuple[Bases, list[dict[str, Tensor]], Predictions]:
            batches = by_length(self._unlabelled(seed), config=self._base.model.config)
            with self._timed("principal components"):
                bases = collect_bases(self._base.model, batches, self._base.scored)
            return bases, batches, predict(self._base.model, batches)

        return self._of_seed(seed, "bases", collect)

    def _moments(self, seed: int) -> SplitMoments:
        def collect(seed: int) -> SplitMoments:
            batches = by_length(self._unlabelled(seed), config=self._base.model.config)
            with self._timed("moments"):
                return collect_moments(self._base.model, self._base.sites, batches)

        return self._of_seed(seed, "moments", collect)

    def _effects(self, seed: int) -> Effects:
        def collect(seed: int) -> Effects:
            batches: list[dict[str, Tensor]] = []
            samples = 0
            for batch in self._unlabelled(seed):
                if samples >= EFFECT_SAMPLES:
                    break
                batches.append(batch)
                samples += size_of(batch)
            batches = by_length(batches, config=self._base.model.config)
            with self._timed("effects"):
                return collect_effects(self._base.model, batches, self._base.scored)

        return self._of_seed(seed, "effects", collect)

    def _compensated_scores(self, seed: int) -> Scores:
        effects = self._effects(seed)
        with self._timed("effects"):
            return score_compensated(effects, self._base.scored)

    def _of_seed(self, seed: int, what: str, make: Callable[[int], Any]) -> Any:
        """Make something once for a seed; what belongs to another seed is forgotten."""
        if seed not in self._kept:
            self._kept = {seed: {}}
        if what not in self._kept[seed]:
            self._kept[seed][what] = make(seed)
        return self._kept[seed][what]

    def _judge_on(self, batches: list[dict[str, Tensor]]) -> Judge:
        return Judge.on(
            self._base.model,
            batches,
            metrics=self._base.metrics,
            regression=self._base.regression,
            tolerance=self._recipe.evaluation.stability_tolerance,
        )

    def _flops_ratio(self, plan: PruningPlan) -> float:
        """FLOPs of the slim model relative to the dense one, at the recipe's first shape; nothing is cut for it."""
        batch = next(iter(self._base.measured.values()))
        counts = tuple((len(kept.query), len(kept.key_value)) for kept in plan.kept.values())
        with self._timed("count FLOPs"):
            if "dense" not in self._once:
                self._once["dense"] = count_flops(self._base.model, batch)
            if counts not in self._once:
                # A model that looks for its images among the tokens cannot be run on shapes alone.
                looks = self._recipe.task == "image-text-to-text"
                shapes = share_weights(self._base.model, device=None if looks else "meta")
                self._once[counts] = count_flops(prune_units(shapes, plan, self._base.sites, inplace=True), batch)
        return float(self._once[counts] / self._once["dense"])

    def _variant(self, seed: int, samples: int) -> PruningRecipe:
        """The recipe with what the grid says of calibration, and every row drawn that some cell needs."""
        grid, recipe = self._grid, self._recipe
        unlabelled = not set(OWN_SAMPLES).isdisjoint(grid.criteria) or set(grid.compensations) != {"none"}
        automatic = any(alpha in AUTOMATIC for alpha in grid.alphas) and any(map(uses_alpha, grid.criteria))
        fields = recipe.model_dump()
        compensation = fields["prune"]["compensation"] or {}  # the recipe's, or the defaults
        fields["calibration"] |= {"seed": seed, "samples": samples}
        fields["prune"] |= {
            "criterion": "hies" if automatic else "his",
            "alpha": "auto" if automatic else 0.5,
            "compensation": compensation if unlabelled else None,
            "budget": {"heads": grid.sparsities[0]},
        }
        # Only torch is needed, and of measuring only the first shape.
        fields["measure"]["runtimes"] = ("torch",)
        return type(recipe)(**fields)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started, within = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            # What was timed inside the block counts there, and not twice.
            inner = sum(self.seconds.values()) - within
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started - inner
