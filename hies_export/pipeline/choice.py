"""Hold what was chosen, and write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..calibrate.collect import DEFAULT_NEEDS
from ..report.details import BudgetOutcome, Tried
from ..slim.refit import Compensation
from ..values import PruningPlan, Scores, Statistics, dump_json
from .quality import Refit


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
