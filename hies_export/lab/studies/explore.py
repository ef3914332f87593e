"""Predict units, FLOPs and quality of plans that a finished run or sweep did not evaluate.

No model is loaded. Scores and plans are computed from the statistics in the folder. Quality is predicted from the plans
that the run or sweep evaluated, as a function of the share of importance (HIS) that the removed heads hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.isotonic import IsotonicRegression
from sklearn.model_selection import LeaveOneOut, cross_val_predict

from ...calibrate.statistics import DEFAULT_NEEDS, Calibration, Statistics
from ...errors import RequestError, root_cause
from ...files import read_json
from ...kinds import ATTENTION, MLP
from ...report.report import Report
from ...report.words import held_out_rows
from ...score.criteria import Scores, score_units
from ...select.constraints import Constraints
from ...select.plan import PruningPlan, library_versions
from ...select.select import select_units
from ...units.units import Kept, Units
from ..schemas import REMOVES, SCORES, SWEEP, SWEEP_DETAILS, ScoresFile, SweepAbout, SweepDetails, SweepFile

# Quality is predicted from plans of these criteria. At equal HIS lost, plans of other criteria differ in quality.
FAMILY = ("hies", "his")


@dataclass(frozen=True)
class Trial:
    """A plan that was evaluated; `how` describes in words the models and rows, and `label` the plan.

    The metric is None if it is unknown or undefined, and so are FLOPs that were not counted.
    """

    plan: PruningPlan
    label: str
    how: str
    quality: float | None
    stability: float
    flops_ratio: float | None = None


def same_units(one: PruningPlan, other: PruningPlan) -> bool:
    """Return whether two plans keep the same units."""
    return {name: kept.units for name, kept in one.kept.items()} == {n: kept.units for n, kept in other.kept.items()}


def trials_of(trials: Sequence[Trial], plan: PruningPlan) -> dict[str, Trial]:
    """Return the trials of the same units, the first of each `how`."""
    found: dict[str, Trial] = {}
    for trial in trials:
        if same_units(trial.plan, plan):
            found.setdefault(trial.how, trial)
    return found


@dataclass(frozen=True)
class Measured:
    """Plans that were evaluated in the same way.

    `lost` is the share of the model's HIS that each removes; `quality` is empty if any metric is unknown.
    """

    how: str
    lost: tuple[float, ...]
    quality: tuple[float, ...]
    stability: tuple[float, ...]


@dataclass(frozen=True)
class Exploration:
    """The statistics, the plan and the measurements of a finished run or sweep.

    Attributes:
        model: Path or Hub id of the dense model; empty if the folder does not name it.
        statistics: Of every head that may be removed, and of every neuron if neurons may be.
        normalize: Normalisation of the criterion, as in recipes.
        plan: The folder's own plan; all other plans have its modules, seed and model.
        flops_per_head, flops_per_neuron: Share of the dense model's FLOPs that a unit costs, averaged over those
            removed; 0 for neurons if none may be removed.
        shape: Shape at which FLOPs were counted, as "batch x sequence"; empty if the folder does not name it.
        metric: Name of the metric of quality.
        measured: The trials that quality is predicted from.
        trials: All evaluated plans whose units the folder has.
    """

    model: str
    statistics: Statistics
    normalize: str
    plan: PruningPlan
    flops_per_head: float
    shape: str
    metric: str
    measured: tuple[Measured, ...] = ()
    flops_per_neuron: float = 0.0
    trials: tuple[Trial, ...] = ()

    @property
    def modules(self) -> tuple[Units, ...]:
        """The modules of the folder's plan, in its order."""
        return tuple(
            Units(name=name, units=kept.total, groups=kept.groups, kind=kept.kind)
            for name, kept in self.plan.kept.items()
        )

    @property
    def unit(self) -> str:
        """The unit that the folder's plan removes: "group" (key/value groups) or "query" (heads of each group)."""
        cut = [kept for kept in self.plan.of_kind(ATTENTION).values() if kept.removed]
        return "query" if any(not kept.removed_groups for kept in cut) else "group"

    @property
    def allocation(self) -> str:
        """The allocation of the folder's plan: "uniform" if all modules keep equally many units, else "global"."""
        ranked = [kept for name, kept in self.plan.kept.items() if name in self.statistics["his"]]
        counts = {(kept.kind, len(kept.units)) for kept in ranked}
        return "uniform" if len(counts) == len({kind for kind, _ in counts}) else "global"

    @property
    def ranks_neurons(self) -> bool:
        """Whether the folder has the importance of the neurons, so that other shares of them can be removed."""
        return any(name in self.statistics["his"] for name in self.plan.of_kind(MLP))

    def scores(self, alpha: float) -> Scores:
        """Return the HIES of every head at an alpha, and the HIS of every neuron; heads and neurons do not compare."""
        found = [
            score_units(statistics, criterion=criterion, alpha=alpha, normalize=self.normalize)
            for kind, criterion in ((ATTENTION, "hies"), (MLP, "his"))
            if (statistics := self.statistics.of(self.plan.of_kind(kind)))["his"]
        ]
        scores = {name: values for part in found for name, values in part.scores.items()}
        return replace(found[0], scores=scores)

    def plan_at(self, alpha: float, sparsity: float, allocation: str, *, neurons: float | None = None) -> PruningPlan:
        """Return a plan for an alpha and a share of heads to remove; heads go as `hies-export run` would remove them.

        `neurons` is the share of neurons to remove, in [0, 1), those of smallest HIS first; by default, and where the
        folder does not have their HIS, the neurons of the folder's own plan go. The plan of a compensated folder is
        compensated too; only the folder's own plan has refitted layers there.

        Raises:
            PlanError: The allocation does not allow that share.
        """
        constraints = Constraints(allocation=allocation, unit=self.unit)
        scores = self.scores(alpha)
        kept = dict(self.plan.kept)
        for kind, share in ((ATTENTION, sparsity), (MLP, neurons if self.ranks_neurons else None)):
            modules = [module for module in self.modules if module.kind == kind]
            if share and modules:
                kept |= select_units(scores, modules, heads=share, constraints=constraints)
            elif share == 0:
                kept |= {module.name: module.kept(range(module.units)) for module in modules}
        known = {key: getattr(self.statistics.calibration, key) for key in ("samples", "labels", "fingerprint")}
        own = kept == self.plan.kept
        return PruningPlan(
            kept=kept,
            criterion="hies",
            alpha=alpha,
            seed=self.plan.seed,
            calibration={key: value for key, value in known.items() if value},
            versions=library_versions(),
            model=self.plan.model,
            compensation={key: value for key, value in self.plan.compensation.items() if key != "refit" or own},
        )

    def flops_ratio(self, plan: PruningPlan) -> float:
        """Return the FLOPs of a plan's model as a share of the dense model's.

        They are exact if the folder counted them, or all units of a kind cost the same.
        """
        counted = [trial.flops_ratio for trial in self.trials if same_units(trial.plan, plan)]
        if counted and counted[0] is not None:
            return counted[0]
        return 1 - self.flops_per_head * plan.removed - self.flops_per_neuron * plan.removed_neurons


@dataclass(frozen=True)
class Estimate:
    """An estimated metric or stability.

    Outside the measured range, `value` is that of the nearest measured plan and only a bound, "at least" or "at most".
    `error` is the mean absolute error over the measured plans, each estimated from the others; None for fewer than
    four.
    """

    value: float
    bound: str
    error: float | None


def fit(lost: Sequence[float], values: Sequence[float], *, higher_is_better: bool = True) -> Callable[[float], float]:
    """Fit a metric or stability, which does not rise as a plan removes more HIS, by isotonic regression.

    Source: https://scikit-learn.org/stable/modules/isotonic.html
    """
    model = _isotonic(higher_is_better).fit(lost, values)
    return lambda at: float(model.predict([at])[0])


def estimate(lost: Sequence[float], values: Sequence[float], at: float, *, higher_is_better: bool = True) -> Estimate:
    """Estimate a metric or stability with `fit`, and its error by leaving out one plan at a time."""
    value = fit(lost, values, higher_is_better=higher_is_better)(at)
    bound = ""
    if not min(lost) <= at <= max(lost):
        bound = "at least" if (at < min(lost)) == higher_is_better else "at most"
    if len(lost) < 4:
        return Estimate(value, bound, None)
    found = cross_val_predict(_isotonic(higher_is_better), np.array(lost), np.array(values), cv=LeaveOneOut())
    return Estimate(value, bound, float(np.abs(found - values).mean()))


def _isotonic(higher_is_better: bool) -> IsotonicRegression:
    return IsotonicRegression(increasing=not higher_is_better, out_of_bounds="clip")


def lost_share(his: Mapping[str, torch.Tensor], plan: PruningPlan) -> float:
    """Return the share of the model's HIS that the units removed by a plan hold, in [0, 1]."""
    total = sum(float(values.sum()) for values in his.values())
    stays = sum(float(values[list(plan.kept[name].units)].sum()) for name, values in his.items())
    return 1 - stays / total if total else 0.0


def read_exploration(folder: str | Path) -> Exploration:
    """Read the folder of a finished run or sweep; refuse one that is neither, or whose files do not fit."""
    folder = Path(folder)
    try:
        if (folder / "sweep.json").is_file():
            return _of_sweep(folder)
        if (folder / "scores.json").is_file():
            return _of_run(folder)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, StopIteration) as error:
        raise RequestError(
            f"the files in {folder} must be of one run or sweep of this version, but they do not fit each other "
            f"({root_cause(error)}); run it again"
        ) from error
    raise RequestError(
        f"ui needs the folder of a finished run (scores.json, plan.json, report.json) or sweep (sweep.json, "
        f"details.json), but {folder} is neither; give the folder that 'hies-export run' or 'sweep' wrote"
    )


def _of_run(folder: Path) -> Exploration:
    report, plan = Report.from_file(folder), PruningPlan.from_file(folder / "plan.json")
    written = read_json(folder / "scores.json", ScoresFile, SCORES)
    statistics = Statistics(
        {name: _tensors(written[name]) for name in DEFAULT_NEEDS},
        Calibration(written["samples"], written["labels"], written["fingerprint"]),
    )
    _check_units(statistics, plan)
    per_head, per_neuron = _flops_per_unit(report, plan)
    found = Exploration(
        model=report.model,
        statistics=statistics,
        normalize=written["parameters"].get("normalize", "model"),
        plan=plan,
        flops_per_head=per_head,
        flops_per_neuron=per_neuron,
        shape=" x ".join(str(size) for size in report.flops["shape"]),
        metric=report.quality["metric"],
    )
    compensated = bool(plan.compensation or report.details.compensation)
    how, dense = "this run's slim model, on the evaluation rows", {}
    if plan.criterion in FAMILY:
        how = "the dense model and this run's slim one" + (", cut and compensated" if compensated else "")
        dense[how] = report.quality["dense"]
    ratio = report.flops.slim / report.flops.dense
    trials = [Trial(plan, "this run's plan", how, _finite(report.quality["slim"]), report.stability, ratio)]
    curve, outcome = report.details.alpha_curve, report.details.outcome
    share = None if outcome is None else outcome.budget.heads
    plans = [found.plan_at(p.alpha, share, found.allocation) for p in curve if share is not None]
    # The folder does not record all constraints (min_heads, keep_layers, ...). If they changed the run's own plan, the
    # plans computed here are not those that were evaluated.
    if any(found.kept == plan.kept for found in plans):
        judged = "cut and compensated" if compensated else "masked"
        how = f"this run's search for alpha: {judged}, on {held_out_rows(report)}"
        trials += [
            Trial(p, f"alpha {point.alpha:g}", how, _finite(point.quality), point.stability)
            for p, point in zip(plans, curve, strict=True)
        ]
    return replace(found, measured=_measured(trials, statistics["his"], dense), trials=tuple(trials))


def _measured(
    trials: Sequence[Trial], his: Mapping[str, torch.Tensor], dense: Mapping[str, float]
) -> tuple[Measured, ...]:
    """Return the trials that predict quality, by `how`; `dense` is the metric of the dense model where it is known."""
    found: dict[str, list[tuple[float, float | None, float]]] = {}
    for trial in trials:
        if trial.plan.criterion in FAMILY:
            begun = [(0.0, _finite(dense[trial.how]), 1.0)] if trial.how in dense else []
            point = lost_share(his, trial.plan), trial.quality, trial.stability
            found.setdefault(trial.how, begun).append(point)
    measured = []
    for how, points in found.items():
        lost, quality, stability = zip(*points, strict=True)
        measured.append(Measured(how, lost, () if None in quality else quality, stability))
    return tuple(measured)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _check_units(statistics: Statistics, plan: PruningPlan) -> None:
    """Raise ValueError if statistics do not match the units of a plan."""
    for statistic, found in statistics.values.items():
        for name, values in found.items():
            kept = plan.kept.get(name)
            if kept is None or len(values) != kept.total or any(unit >= kept.total for unit in kept.units):
                raise ValueError(f"{statistic} of {name} is not of the units of the plan")
    if not statistics["his"]:
        raise ValueError("his is missing, as a deployment does not compute it: explore a run")
    heads = plan.of_kind(ATTENTION)
    known = statistics["entropy"].keys()  # none of a model that returns no attention maps
    if known and known != {name for name in statistics["his"] if name in heads}:
        raise ValueError("entropy and his must be of the same heads")


def _flops_per_unit(report: Report, plan: PruningPlan) -> tuple[float, float]:
    """Return the share of the dense FLOPs of a head and of a neuron, averaged over those removed, or over all."""
    dense, slim = report.flops.dense, report.flops.slim
    if not plan.neurons:
        return (1 - slim / dense) / max(1, plan.removed), 0.0
    layers = report.details.flops_per_layer
    if layers is None:
        raise ValueError("details.flops_per_layer of report.json is missing")

    def cost(parts: Sequence[str], total: int, removed: int) -> float:
        before, after = (sum(getattr(row, p) for row in rows for p in parts) for rows in (layers.dense, layers.slim))
        return ((before - after) / removed if removed else before / max(1, total)) / dense

    return (
        cost(("projections", "products"), plan.heads, plan.removed),
        cost(("feed_forward",), plan.neurons, plan.removed_neurons),
    )


def _of_sweep(folder: Path) -> Exploration:
    rows = read_json(folder / "sweep.json", SweepFile, SWEEP)
    details = read_json(folder / "details.json", SweepDetails, SWEEP_DETAILS)
    his = _tensors(details["his"])
    plans = {_sweep_key(p): _sweep_plan(p, details) for p in details["plans"]}
    calibration = Calibration(details["calibration_samples"], "", "")
    statistics = Statistics({"his": his, "entropy": _tensors(details["entropy"])}, calibration)
    for plan in plans.values():
        _check_units(statistics, plan)
    trials = _trials(rows, plans, seed=details["seed"])
    dense = {_how(row): row["quality_dense"] for row in rows}
    per_head, per_neuron = _flops_by_rows(rows)
    about = SweepAbout(**details["about"])
    return Exploration(
        model=about.model,
        statistics=statistics,
        normalize=details["normalize"],
        plan=next(iter(plans.values())),
        flops_per_head=per_head,
        flops_per_neuron=per_neuron,
        shape=" x ".join(map(str, about.shape)),
        metric=rows[0]["metric"],
        measured=_measured(trials, his, dense),
        trials=trials,
    )


def _trials(
    rows: Sequence[Mapping[str, Any]], plans: Mapping[tuple[Any, ...], PruningPlan], *, seed: int
) -> tuple[Trial, ...]:
    """Return the trials of a sweep's plans, from the rows of their seed and the first calibration size."""
    found: dict[tuple[Any, ...], Trial] = {}
    for row in rows:
        key, how = _sweep_key(row), _how(row)
        if row["seed"] == seed and key in plans and (key, how) not in found:
            numbers = _finite(row["quality"]), row["stability"], row["flops_ratio"]
            found[key, how] = Trial(plans[key], _label(row), how, *numbers)
    return tuple(trial for key in plans for (of, _), trial in found.items() if of == key)


def _how(row: Mapping[str, Any]) -> str:
    """Return how a sweep made the model of a row, and on which rows it was judged."""
    made = "masked" if row["compensation"] == "none" else f"cut and compensated ({row['compensation']})"
    return f"the dense model and the sweep's plans: {made}, on the evaluation rows"


def _label(row: Mapping[str, Any]) -> str:
    """Return the name of the plan of a sweep's row."""
    alpha = "" if row["alpha"] is None else f", alpha {row['alpha']:g}"
    target = row.get("flops_target")
    if target is None:
        return f"{row['criterion']}{alpha}: {100 * row['sparsity']:g}% of the heads removed"
    return f"{row['criterion']}{alpha}: {100 * target:g}% of the FLOPs left, {REMOVES[row['modules']]}"


def _sweep_key(found: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key of a sweep's plan, from the plan or from its row; older ones remove only heads."""
    flops = found.get("flops_target")
    modules = None if flops is None else found["modules"]
    return (found["criterion"], found["alpha"], found["sparsity"], flops, modules)


def _flops_by_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the share of the dense model's FLOPs that a head and a neuron cost, fitted to the rows of a sweep."""
    counted = [row for row in rows if row["flops_ratio"] is not None]
    removed = np.array([[row["heads_removed"], row.get("neurons_removed") or 0] for row in counted], dtype=float)
    saved = np.array([1 - row["flops_ratio"] for row in counted])
    per_head, per_neuron = np.linalg.lstsq(removed, saved, rcond=None)[0]
    return float(per_head), float(per_neuron)


def _sweep_plan(plan: Mapping[str, Any], details: Mapping[str, Any]) -> PruningPlan:
    kept = {}
    for name, heads in plan["kept"].items():
        # A module without statistics keeps all its heads.
        total = len(details["his"].get(name, heads))
        groups = details["key_value_heads"][name]
        kept[name] = Kept(tuple(heads), total, groups, details["kinds"][name])
    return PruningPlan(kept=kept, criterion=plan["criterion"], alpha=plan["alpha"], seed=details["seed"])


def _tensors(values: Mapping[str, Sequence[float]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(row, dtype=torch.float64) for name, row in values.items()}
