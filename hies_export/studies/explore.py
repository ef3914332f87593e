"""Predict heads, FLOPs and quality of plans that a finished run or sweep did not make.

No model is loaded. Scores and plans are computed from the statistics in the folder; quality is predicted from the plans
that the run or sweep has measured, along the share of the importance (HIS) that goes with the heads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.isotonic import IsotonicRegression

from ..calibrate.collect import DEFAULT_NEEDS
from ..errors import RequestError
from ..report.report import Report
from ..score.criteria import score_units
from ..select.constraints import Constraints
from ..select.select import select_units
from ..values import Calibration, Kept, PruningPlan, Scores, Statistics, Units, library_versions

# Criteria that use the same two statistics. Plans of other criteria lose importance at another price.
FAMILY = ("hies", "his")


@dataclass(frozen=True)
class Measured:
    """Plans that were measured in one way.

    Attributes:
        how: On what, in words.
        lost: Per plan, the share of the model's HIS that goes with its heads, in [0, 1].
        quality: Per plan, the metric; empty where there were no labels.
        stability: Per plan, the share of predictions that stay the same.
    """

    how: str
    lost: tuple[float, ...]
    quality: tuple[float, ...]
    stability: tuple[float, ...]


@dataclass(frozen=True)
class Exploration:
    """The statistics, the plan and the measurements of a finished run or sweep.

    Attributes:
        model: Path or Hub id of the dense model; empty where the folder does not say.
        statistics: Of every head that may go.
        normalize: How the criterion normalised.
        plan: The folder's own plan, whose modules, seed and model every other plan shares.
        flops_per_head: Share of the dense model's FLOPs that a query head costs, on average over those that went.
        shape: (batch, sequence) of these FLOPs, in words; empty where the folder does not say.
        metric: Name in `hies_export.metrics`.
        measured: What quality is predicted from.
    """

    model: str
    statistics: Statistics
    normalize: str
    plan: PruningPlan
    flops_per_head: float
    shape: str
    metric: str
    measured: tuple[Measured, ...] = ()

    @property
    def modules(self) -> tuple[Units, ...]:
        """The modules of the folder's plan, in its order."""
        return tuple(Units(name=name, units=kept.total, groups=kept.groups) for name, kept in self.plan.kept.items())

    @property
    def unit(self) -> str:
        """What the folder's plan removes: whole key/value groups, or query heads out of each."""
        cut = [kept for kept in self.plan.kept.values() if kept.removed]
        return "query" if any(not kept.removed_groups for kept in cut) else "group"

    @property
    def allocation(self) -> str:
        """Whether the folder's plan keeps the same number everywhere."""
        counts = {len(self.plan.kept[name].units) for name in self.statistics["his"]}
        return "uniform" if len(counts) == 1 else "global"

    def scores(self, alpha: float) -> Scores:
        """Return the HIES of every head."""
        return score_units(self.statistics, criterion="hies", alpha=alpha, normalize=self.normalize)

    def plan_at(self, alpha: float, sparsity: float, allocation: str) -> PruningPlan:
        """Return the plan of an alpha and a share of heads, as `hies-export run` would make it.

        Raises:
            PlanError: No plan removes that much.
        """
        constraints = Constraints(allocation=allocation, unit=self.unit)
        known = {key: getattr(self.statistics.calibration, key) for key in ("samples", "labels", "fingerprint")}
        return PruningPlan(
            kept=select_units(self.scores(alpha), self.modules, heads=sparsity, constraints=constraints),
            criterion="hies",
            alpha=alpha,
            seed=self.plan.seed,
            calibration={key: value for key, value in known.items() if value},
            versions=library_versions(),
            model=self.plan.model,
        )

    def flops_ratio(self, plan: PruningPlan) -> float:
        """FLOPs of a plan's model relative to the dense one; exact where all heads cost the same."""
        return 1 - self.flops_per_head * plan.removed


@dataclass(frozen=True)
class Prediction:
    """What a quantity should come to.

    Attributes:
        value: Where nothing measured lost as much (or as little), that of the nearest plan, as a bound.
        bound: "" inside what was measured; else "at least" or "at most".
        error: Mean absolute error when every measured plan is predicted from the others; None for fewer than four.
    """

    value: float
    bound: str
    error: float | None


def fit(lost: Sequence[float], values: Sequence[float], *, higher_is_better: bool = True) -> Callable[[float], float]:
    """Fit quality to the share of HIS that a plan loses; constant beyond what was measured.

    The only assumption is that quality does not rise as more importance is lost: isotonic regression, linear between
    points.     Source: https://scikit-learn.org/stable/modules/isotonic.html

    Args:
        lost: Per measured plan, in [0, 1].
        values: Per measured plan, the metric or the stability.
        higher_is_better: Which way the values go.
    """
    model = IsotonicRegression(increasing=not higher_is_better, out_of_bounds="clip").fit(lost, values)
    return lambda at: float(model.predict([at])[0])


def predict(lost: Sequence[float], values: Sequence[float], at: float, *, higher_is_better: bool = True) -> Prediction:
    """Predict by `fit`, with the error of that prediction.

    Args:
        lost, values, higher_is_better: As in `fit`.
        at: Share of HIS lost to predict at.
    """
    value = fit(lost, values, higher_is_better=higher_is_better)(at)
    bound = ""
    if not min(lost) <= at <= max(lost):
        bound = "at least" if (at < min(lost)) == higher_is_better else "at most"
    errors = []
    for i in range(len(lost)) if len(lost) > 3 else ():
        others = [k for k in range(len(lost)) if k != i]
        curve = fit([lost[k] for k in others], [values[k] for k in others], higher_is_better=higher_is_better)
        errors.append(abs(curve(lost[i]) - values[i]))
    return Prediction(value, bound, float(np.mean(errors)) if errors else None)


def lost_share(his: Mapping[str, torch.Tensor], plan: PruningPlan) -> float:
    """Return the share of the model's HIS that goes with the heads a plan removes, in [0, 1]."""
    total = sum(float(values.sum()) for values in his.values())
    stays = sum(float(values[list(plan.kept[name].units)].sum()) for name, values in his.items())
    return 1 - stays / total if total else 0.0


def read_exploration(folder: str | Path) -> Exploration:
    """Read what a run or a sweep wrote.

    Raises:
        RequestError: The folder is neither.
    """
    folder = Path(folder)
    try:
        if (folder / "sweep.json").is_file():
            return _of_sweep(folder)
        if (folder / "scores.json").is_file():
            return _of_run(folder)
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise RequestError(
            f"what is in {folder} must be as a run or a sweep of this version wrote it, but it cannot be read "
            f"({error!r}); run it again"
        ) from error
    raise RequestError(
        f"ui needs the folder of a finished run (scores.json, plan.json, report.json) or sweep (sweep.json, "
        f"details.json), but {folder} is neither; give the folder that 'hies-export run' or 'sweep' wrote"
    )


def _of_run(folder: Path) -> Exploration:
    report, plan = Report.from_file(folder), PruningPlan.from_file(folder / "plan.json")
    written = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    statistics = Statistics(
        {name: _tensors(written[name]) for name in DEFAULT_NEEDS},
        Calibration(written["samples"], written["labels"], written["fingerprint"]),
    )
    found = Exploration(
        model=report.model,
        statistics=statistics,
        normalize=written["parameters"].get("normalize", "model"),
        plan=plan,
        flops_per_head=(1 - report.flops["slim"] / report.flops["dense"]) / plan.removed,
        shape=" x ".join(str(size) for size in report.flops["shape"]),
        metric=report.quality["metric"],
    )
    measured = []
    if report.criterion in FAMILY:
        lost = (0.0, lost_share(statistics["his"], plan))
        quality = (report.quality["dense"], report.quality["slim"])
        measured.append(Measured("the dense model and this run's slim one", lost, quality, (1.0, report.stability)))
    curve, budget = written["alpha_curve"], report.details["budget"]
    plans = [found.plan_at(p["alpha"], budget["target"], found.allocation) for p in curve if budget["kind"] == "heads"]
    # Constraints that the folder does not tell of (min_heads, keep_layers, ...) would have made other plans.
    if any(found.kept == plan.kept for found in plans):
        measured.append(
            Measured(
                "this run's search for alpha: masked, on held-out rows",
                tuple(lost_share(statistics["his"], p) for p in plans),
                tuple(point["quality"] for point in curve if point["quality"] is not None),
                tuple(point["stability"] for point in curve),
            )
        )
    return replace(found, measured=tuple(measured))


def _of_sweep(folder: Path) -> Exploration:
    rows = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    details = json.loads((folder / "details.json").read_text(encoding="utf-8"))
    his = _tensors(details["his"])
    plans = {(p["criterion"], p["alpha"], p["sparsity"]): _sweep_plan(p, details) for p in details["plans"]}
    # Plans are written down for the first seed and calibration size, which the rows begin with.
    own = [row for row in rows if row["criterion"] in FAMILY]
    own = [row for row in own if all(row[key] == own[0][key] for key in ("seed", "calibration_samples"))]
    measured = []
    for compensation in dict.fromkeys(row["compensation"] for row in own):
        some = [row for row in own if row["compensation"] == compensation]
        lost = [lost_share(his, plans[row["criterion"], row["alpha"], row["sparsity"]]) for row in some]
        made = "masked" if compensation == "none" else f"cut and compensated ({compensation})"
        measured.append(
            Measured(
                f"the dense model and the sweep's plans: {made}, on the evaluation rows",
                (0.0, *lost),
                (some[0]["quality_dense"], *(row["quality"] for row in some)),
                (1.0, *(row["stability"] for row in some)),
            )
        )
    return Exploration(
        model="",
        statistics=Statistics(
            {"his": his, "entropy": _tensors(details["entropy"])}, Calibration(details["calibration_samples"], "", "")
        ),
        normalize="model",
        plan=next(iter(plans.values())),
        flops_per_head=(1 - rows[0]["flops_ratio"]) / rows[0]["heads_removed"],
        shape="",
        metric=rows[0]["metric"],
        measured=tuple(measured),
    )


def _sweep_plan(plan: Mapping[str, Any], details: Mapping[str, Any]) -> PruningPlan:
    kept = {}
    for name, heads in plan["kept"].items():
        # A module without statistics keeps all its heads.
        total = len(details["his"].get(name, heads))
        groups = details["key_value_heads"][name]
        kept[name] = Kept(tuple(heads), total, groups)
    return PruningPlan(kept=kept, criterion=plan["criterion"], alpha=plan["alpha"], seed=details["seed"])


def _tensors(values: Mapping[str, Sequence[float]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(row, dtype=torch.float64) for name, row in values.items()}
