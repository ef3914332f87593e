"""The grid of a sweep: criteria, alphas, modules, budgets, seeds, calibration sizes and compensations."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from hies_export.errors import RecipeError, did_you_mean
from hies_export.kinds import ATTENTION, BOTH, MLP
from hies_export.pipeline.options import PruneSection
from hies_export.recipe.sections import CompensationSection
from hies_export.score.criteria import CRITERIA, uses_alpha

from ..baselines.names import JUDGED_ONLY, MARTRA, OWN_SAMPLES, sweep_names

# The largest seed that libraries hold.
MOST = 2**31 - 1
# The methods of `CompensationSection`.
METHODS = ("bias", "least_squares")
# `auto` chooses an alpha for each budget, `auto-area` one alpha for all budgets.
AUTOMATIC = ("auto", "auto-area")
SPARSITIES = (0.1, 0.3, 0.5, 0.7)
# Names of what may lose units -> the kinds of modules.
MODULES = {ATTENTION: (ATTENTION,), MLP: (MLP,), "both": BOTH}
# Least squares in which tokens weigh this + (1 - this) times the relative squared gradient of the prediction there.
WEIGHTED, TOKEN_WEIGHTS = "weighted", 0.3
SEQUENTIAL = "sequential"
# A factor for every unit that stays, see `baselines.kwon`.
SCALARS = "scalars"
COMPENSATIONS = ("none", *METHODS, SCALARS, WEIGHTED, SEQUENTIAL)


@dataclass(frozen=True)
class SweepGrid:
    """The values whose combinations a sweep evaluates.

    Attributes:
        criteria: Names from `hies_lab.baselines.names.sweep_names()`.
        alphas: For criteria that use alpha: numbers in [0, 1), "auto" (chosen for every budget on held-out rows) or
            "auto-area" (one for all, by the weighted area under the curve of quality against the share removed).
        sparsities: Shares of heads to remove; by default `SPARSITIES`, unless `flops` are given.
        seeds: Seeds of the draw of calibration rows.
        calibration_sizes: Numbers of calibration rows to score on.
        compensations: "none", "bias", "scalars", "least_squares", "weighted" (least squares with token weights of
            `TOKEN_WEIGHTS`) or "sequential" (least squares layer by layer); always "none" for criteria that do not
            remove whole units.
        flops: Instead of sparsities, largest shares of the dense model's FLOPs that may be left.
        modules: Modules that lose units: "attention", "mlp" or "both"; by default "attention" for sparsities, and else
            the recipe's. A criterion that scores heads only has no cells with "mlp" alone, and one that scores neurons
            only has cells with "mlp" alone.

    Raises:
        RecipeError: A value is out of range or unknown; the message lists all problems.
    """

    criteria: tuple[str, ...] = ("hies", "his", "ad", "l2", "random")
    alphas: tuple[float | str, ...] = ("auto",)
    sparsities: tuple[float, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    calibration_sizes: tuple[int, ...] = (32,)
    compensations: tuple[str, ...] = ("none",)
    flops: tuple[float, ...] = ()
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.sparsities and not self.flops:
            object.__setattr__(self, "sparsities", SPARSITIES)
        needed = ("criteria", "alphas", "seeds", "calibration_sizes", "compensations")
        problems = [f"a sweep needs at least one of {name}, got none" for name in needed if not getattr(self, name)]
        problems += self._unknown_names()
        for alpha in self.alphas:
            if alpha not in AUTOMATIC and not (isinstance(alpha, (int, float)) and 0 <= alpha < 1):
                problems.append(f"an alpha must be a number in [0, 1), auto or auto-area, got {alpha!r}")
        problems += [f"a sparsity must be in (0, 1), got {s:g}" for s in self.sparsities if not 0 < s < 1]
        problems += [f"a share of FLOPs must be in (0, 1), got {f:g}" for f in self.flops if not 0 < f < 1]
        problems += [f"a seed must be in [0, {MOST}], got {s}" for s in self.seeds if not 0 <= s <= MOST]
        problems += [f"a calibration size must be at least 1, got {s}" for s in self.calibration_sizes if s < 1]
        problems += self._unfit_budgets()
        if problems:
            raise RecipeError(problems)

    def _unknown_names(self) -> list[str]:
        """Return a problem for every name that a sweep does not know."""
        known = {"criterion": sweep_names(), "compensation": COMPENSATIONS, "kind of modules": tuple(MODULES)}
        given = {"criterion": self.criteria, "compensation": self.compensations, "kind of modules": self.modules}
        return [
            f"a {what} must be one of {', '.join(known[what])}, got {name!r}{did_you_mean(name, known[what])}"
            for what, names in given.items()
            for name in names
            if name not in known[what]
        ]

    def _unfit_budgets(self) -> list[str]:
        """Return a problem for every budget that does not fit the rest of the grid."""
        problems = []
        if self.sparsities and self.flops:
            problems.append("a sweep takes sparsities or flops, got both; leave out one")
        if self.sparsities and (names := ", ".join(name for name in self.modules if name != ATTENTION)):
            problems.append(f"sparsities are shares of heads, but modules are {names}; give flops instead")
        if self.flops and (names := ", ".join(name for name in self.criteria if name in JUDGED_ONLY)):
            problems.append(f"{names} takes shares of heads, got flops; leave it out or give sparsities")
        return problems

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of modules that lose units in any cell."""
        wanted = {kind for name in self.modules for kind in MODULES[name]}
        return tuple(kind for kind in BOTH if kind in wanted)

    def for_modules(self, kinds: tuple[str, ...]) -> SweepGrid:
        """Return the grid with the kinds of modules of a recipe, unless its own say what: named, or shares of heads."""
        names = {kinds_of: name for name, kinds_of in MODULES.items()}
        return self if self.modules else replace(self, modules=(ATTENTION if self.sparsities else names[kinds],))

    def cells(self) -> list[Cell]:
        """Return all distinct combinations, in the order of the rows."""
        found = []
        modules_of = self.modules or (ATTENTION,)
        for seed, samples, compensation, criterion, modules in itertools.product(
            self.seeds, self.calibration_sizes, self.compensations, self.criteria, modules_of
        ):
            if not _scores_any(criterion, MODULES[modules]):
                continue
            given = 0 if criterion in OWN_SAMPLES else samples
            by = "none" if criterion in JUDGED_ONLY else compensation
            found += [
                Cell(criterion, alpha, sparsity, seed, given, by, flops, modules)
                for alpha in (self.alphas if uses_alpha(criterion) else (None,))
                for sparsity, flops in self.budgets()
            ]
        return list(dict.fromkeys(found))

    def budgets(self) -> list[tuple[float | None, float | None]]:
        """Return the budgets as pairs of a sparsity and a share of FLOPs, one of which is None."""
        return [*((sparsity, None) for sparsity in self.sparsities), *((None, flops) for flops in self.flops)]


def _scores_any(criterion: str, kinds: tuple[str, ...]) -> bool:
    """Return whether a criterion has cells with some kinds of modules."""
    if criterion == MARTRA:
        return kinds == (MLP,)
    return kinds != (MLP,) or criterion not in CRITERIA or MLP in CRITERIA[criterion].kinds


@dataclass(frozen=True)
class Cell:
    """One combination of a grid.

    `alpha` is None for criteria that do not use it, and either `sparsity` or `flops` is None. `samples` is the number
    of calibration rows to score on, 0 for criteria with their own number, `OWN_SAMPLES`. `modules` is in `MODULES`.
    """

    criterion: str
    alpha: float | str | None
    sparsity: float | None
    seed: int
    samples: int
    compensation: str
    flops: float | None = None
    modules: str = ATTENTION

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of modules that lose units."""
        return MODULES[self.modules]

    @property
    def removed(self) -> float:
        """Share that the budget removes, of the heads or of the FLOPs."""
        assert self.sparsity is not None or self.flops is not None
        return self.sparsity if self.sparsity is not None else 1 - self.flops  # type: ignore[operator]


def compensation_of(name: str, options: PruneSection) -> CompensationSection | None:
    """Return how a compensation of the grid refits, with the ridge of a recipe; None for "none"."""
    if name == "none":
        return None
    named: dict[str, Any] = {"method": name if name in METHODS else "least_squares", "sequential": name == SEQUENTIAL}
    named["token_weights"] = TOKEN_WEIGHTS if name == WEIGHTED else None
    return (options.compensation or CompensationSection()).model_copy(update=named)
