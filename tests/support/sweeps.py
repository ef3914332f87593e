"""Make rows of a sweep without one, and small projects to sweep over."""

import json
from pathlib import Path
from typing import Any

from support.models import save_project, save_text_model


def sweep_row(criterion: str, **fields: Any) -> dict[str, Any]:
    """Return a row of sweep.json; HIES has an alpha of 0.5 that was given."""
    alpha, by = (0.5, "given") if criterion == "hies" else (None, None)
    return {
        **{"criterion": criterion, "alpha": alpha, "alpha_by": by, "sparsity": None, "seed": 0},
        **{"calibration_samples": 8, "compensation": "none", "metric": "accuracy", "quality": 0.8},
        **{"quality_dense": 0.9, "stability": 0.9, "flops_ratio": 0.9, "heads_removed": 3},
        **fields,
    }


def write_sweep(folder: Path, rows: list[dict[str, Any]], details: dict[str, Any]) -> Path:
    """Write what a finished sweep leaves for its figures and its page."""
    folder.mkdir(exist_ok=True)
    (folder / "sweep.json").write_text(json.dumps(rows))
    (folder / "details.json").write_text(json.dumps(details))
    return folder


def save_sweep_project(folder: Path, **prune: Any) -> Path:
    """Write a project with few rows, whose recipe has these fields of `prune`, and return the recipe."""
    project = save_project(
        folder,
        train=60,
        validation=40,
        calibration={"samples": 8, "batch_size": 5},
        evaluation={"batch_size": 7},
        prune={"alpha": 0.5, "compensation": {"samples": 40}} | prune,
        measure={"shapes": [[2, 16]]},
    )
    save_text_model(project / "model", num_hidden_layers=2)
    return project / "recipe.yaml"
