"""The grid of a sweep: criteria, alphas, sparsities, seeds, calibration sizes and compensations."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ..baselines.names import JUDGED_ONLY, OWN_SAMPLES, sweep_names
from ..errors import RecipeError, did_you_mean
from ..score.criteria import uses_alpha
from ..slim.refit import METHODS

# `auto` chooses an alpha for each sparsity, `auto-area` one alpha for all sparsities.
AUTOMATIC = ("auto", "auto-area")


@dataclass(frozen=True)
class SweepGrid:
    """The values whose combinations a sweep evaluates.

    Attributes:
        criteria: Names from `hies_export.baselines.names.sweep_names()`.
        alphas: For criteria that use alpha: numbers in [0, 1), "auto" (chosen for every sparsity on held-out rows) or
            "auto-area" (one for all, by the weighted area under the quality-sparsity curve).
        sparsities: Shares of heads to remove.
        seeds: Seeds of the draw of calibration rows.
        calibration_sizes: Numbers of calibration rows to score on.
        compensations: "none", "bias" or "least_squares"; always "none" for criteria that do not remove heads.

    Raises:
        RecipeError: A value is out of range or unknown; the message lists all problems.
    """

    criteria: tuple[str, ...] = ("hies", "his", "ad", "l2", "random")
    alphas: tuple[float | str, ...] = ("auto",)
    sparsities: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7)
    seeds: tuple[int, ...] = (0, 1, 2)
    calibration_sizes: tuple[int, ...] = (32,)
    compensations: tuple[str, ...] = ("none",)

    def __post_init__(self) -> None:
        problems = [f"a sweep needs at least one of {name}, got none" for name, v in asdict(self).items() if not v]
        known = sweep_names()
        problems += [
            f"a criterion must be one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}"
            for name in self.criteria
            if name not in known
        ]
        for alpha in self.alphas:
            if alpha not in AUTOMATIC and not (isinstance(alpha, (int, float)) and 0 <= alpha < 1):
                problems.append(f"an alpha must be a number in [0, 1), auto or auto-area, got {alpha!r}")
        problems += [f"a sparsity must be in (0, 1), got {s:g}" for s in self.sparsities if not 0 < s < 1]
        problems += [f"a seed must be at least 0, got {s}" for s in self.seeds if s < 0]
        problems += [f"a calibration size must be at least 1, got {s}" for s in self.calibration_sizes if s < 1]
        methods = ("none", *METHODS)
        problems += [
            f"a compensation must be one of {', '.join(methods)}, got {name!r}{did_you_mean(name, methods)}"
            for name in self.compensations
            if name not in methods
        ]
        if problems:
            raise RecipeError(problems)

    def cells(self) -> list[Cell]:
        """Return all distinct combinations, in the order of the rows."""
        found = []
        for seed in self.seeds:
            for samples in self.calibration_sizes:
                for compensation in self.compensations:
                    for criterion in self.criteria:
                        alphas = self.alphas if uses_alpha(criterion) else (None,)
                        given = 0 if criterion in OWN_SAMPLES else samples
                        by = "none" if criterion in JUDGED_ONLY else compensation
                        found += [
                            Cell(criterion, alpha, sparsity, seed, given, by)
                            for alpha in alphas
                            for sparsity in self.sparsities
                        ]
        return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Cell:
    """One combination of a grid; `samples` is 0 for criteria with a number of samples of their own, `OWN_SAMPLES`."""

    criterion: str
    alpha: float | str | None
    sparsity: float
    seed: int
    samples: int
    compensation: str

    def key(self, grid: SweepGrid) -> str:
        """Return the cell's name in the journal; under "auto-area" it includes all sparsities, which decide alpha."""
        over = [grid.sparsities] if self.alpha == "auto-area" else []
        return "|".join(str(value) for value in (*asdict(self).values(), *over))
