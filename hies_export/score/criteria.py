"""Turn statistics into one score per unit; higher means keep."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from ..calibrate.statistics import OWN, Collect, Statistics
from ..entry_points import AUTO as AUTO
from ..entry_points import COMPENSATED as COMPENSATED
from ..entry_points import CRITERIA as KNOWN
from ..entry_points import Registry
from ..entry_points import criterion_names as criterion_names
from ..errors import RecipeError
from ..kinds import ATTENTION, KINDS
from ..units.units import Units


@dataclass(frozen=True)
class Removal:
    """One step of a chain of removals: the units that a module loses, by their original indices.

    `effect` is the effect of this and all earlier removals of the chain on the prediction or the loss. It is in the
    same unit for all chains, so that heads and neurons can be compared.
    """

    module: str
    units: tuple[int, ...]
    effect: float


Chain = tuple[Removal, ...]
"""Removals that can only be taken in this order; the effects of different chains add up."""


@dataclass(frozen=True)
class Scores:
    """One score per unit; higher means keep.

    Attributes:
        criterion: Name in `hies_export.score.CRITERIA`, or "compensated".
        parameters: Options of the criterion, such as alpha.
        scores: Module -> (units,) float64.
        effects: Module -> (units,) float64, how much removing each unit alone changes the prediction or the loss. It is
            in the same unit for all modules, so that removals of heads and of neurons can be compared.
        ranked: Kinds of modules whose units the scores order across modules. Effects compare units of other kinds.
        chains: Orders of removal that take earlier removals into account. If given, they alone decide.
    """

    criterion: str
    parameters: Mapping[str, Any]
    scores: Mapping[str, Tensor]
    effects: Mapping[str, Tensor] = field(default_factory=dict)
    ranked: tuple[str, ...] = ()
    chains: tuple[Chain, ...] = ()


ScoreFunction = Callable[..., Mapping[str, Tensor]]
"""Takes `Statistics` and, by keyword, any of `alpha`, `normalize` and `seed`; returns module -> (units,) float64."""


@dataclass(frozen=True)
class Criterion:
    """A named function that scores units."""

    name: str  # its name in recipes
    function: ScoreFunction
    needs: tuple[str, ...]  # statistics it reads, by their names in `collect_statistics`
    kinds: tuple[str, ...]  # kinds of modules it can score, see `PrunableModule.kind`
    effect: str = "fisher"  # statistic by which a removal is compared across kinds of modules
    # Whether the scores only order the units of one kind. If false, the effects order the units as the scores do, and
    # are compared across modules.
    ranks: bool = True

    @cached_property
    def options(self) -> tuple[str, ...]:
        """Names of the options that the function takes, among `alpha`, `normalize` and `seed`."""
        return tuple(inspect.signature(self.function).parameters)[1:]


CRITERIA: Registry[Criterion] = KNOWN
"""Name -> criterion; `criterion` adds entries."""

FALLBACK = "fisher"  # scores the kinds of modules that a criterion cannot score


class DegenerateRangeWarning(UserWarning):
    """All units have the same value, so min-max normalisation cannot tell them apart and scores them all 0."""


def min_max(values: Mapping[str, Tensor], *, normalize: str, what: str) -> Mapping[str, Tensor]:
    """Return (s - min) / (max - min) of every unit, (units,) by module, over the model or over each module.

    `what` names the values in the warning if all are equal; they then become 0.
    """
    parts = {what: values} if normalize == "model" else {f"{what} in {name}": {name: v} for name, v in values.items()}
    scaled: dict[str, Tensor] = {}
    for label, part in parts.items():
        everything = torch.cat(list(part.values()))
        low, high = everything.min(), everything.max()
        if high == low:
            message = f"{label} is the same for every head, so it cannot tell them apart and counts as 0"
            warnings.warn(message, DegenerateRangeWarning, stacklevel=3)
            scaled |= {name: torch.zeros_like(v) for name, v in part.items()}
        else:
            scaled |= {name: (v - low) / (high - low) for name, v in part.items()}
    return scaled


def criterion(
    function: ScoreFunction | None = None,
    *,
    name: str | None = None,
    needs: tuple[str, ...] = ("his", "entropy", "weight_l2"),
    kinds: Collection[str] = (ATTENTION,),
    effect: str = "fisher",
    ranks: bool = True,
    collects: Mapping[str, Collect] = MappingProxyType({}),
) -> Any:
    """Register a criterion, so that recipes, the command line and sweeps find it by its name.

    Use it as `@criterion` or `@criterion(needs=..., kinds=...)`. `Criterion` says what the function takes and returns.

    Args:
        function: The function that scores.
        name: Name in recipes; by default the function's name, with hyphens for underscores.
        needs, kinds, effect, ranks: See `Criterion`.
        collects: Statistics that the criterion brings and `needs` names: name -> a function that `collect_statistics`
            calls with the model, the calibration batches and the modules, and which returns module -> (units,) float64
            on the CPU. It can use `calibrate.readings.read_forward` to read the inputs of consumers.

    Returns:
        The function itself.

    Examples:
        >>> @criterion
        ... def his_per_weight(statistics):
        ...     return {name: his / statistics["weight_l2"][name] for name, his in statistics["his"].items()}
        >>> score_units(statistics, criterion="his-per-weight").criterion
        'his-per-weight'
    """

    def register(function: ScoreFunction) -> ScoreFunction:
        key = name or function.__name__.replace("_", "-")
        OWN.update(collects)
        CRITERIA[key] = Criterion(key, function, needs, tuple(kinds), effect, ranks)
        return function

    return register if function is None else register(function)


@criterion(needs=("his", "entropy"))
def hies(statistics: Statistics, *, alpha: float, normalize: str) -> Mapping[str, Tensor]:
    """HIES_h = alpha * HIS^_h + (1 - alpha) * (1 - AE^_h), the Head Importance-Entropy Score (its paper's Eq. 1)."""
    importance = min_max(statistics["his"], normalize=normalize, what="HIS")
    entropy = min_max(statistics["entropy"], normalize=normalize, what="entropy")
    return {name: alpha * importance[name] + (1 - alpha) * (1 - entropy[name]) for name in importance}


@criterion(needs=("his",), kinds=KINDS, effect="his", ranks=False)
def his(statistics: Statistics, *, normalize: str) -> Mapping[str, Tensor]:
    """HIS^_h alone (Michel et al. 2019): units to which the loss is least sensitive go first."""
    return min_max(statistics["his"], normalize=normalize, what="HIS")


@criterion(needs=("fisher",), kinds=KINDS, ranks=False)
def fisher(statistics: Statistics, *, normalize: str) -> Mapping[str, Tensor]:
    """Mean squared gradient of each sample's loss to a mask on the unit (Kwon et al. 2022, Eq. 6)."""
    return min_max(statistics["fisher"], normalize=normalize, what="Fisher information")


@criterion(needs=("entropy",))
def ad(statistics: Statistics, *, normalize: str) -> Mapping[str, Tensor]:
    """AE^_h alone (attention diversity): heads with the lowest entropy go first, as in the paper's AD baseline."""
    return min_max(statistics["entropy"], normalize=normalize, what="entropy")


@criterion(needs=("weight_l2",), kinds=KINDS)
def l2(statistics: Statistics, *, normalize: str) -> Mapping[str, Tensor]:
    """L2 norm of the unit's weights in producers and consumer: units with small weights go first."""
    return min_max(statistics["weight_l2"], normalize=normalize, what="weight norm")


@criterion(needs=("activation_l2",), kinds=KINDS)
def activation(statistics: Statistics, *, normalize: str) -> Mapping[str, Tensor]:
    """Mean norm of the unit's output: units with a small output go first."""
    return min_max(statistics["activation_l2"], normalize=normalize, what="activation norm")


@criterion(needs=("his",), kinds=KINDS)
def random(statistics: Statistics, *, seed: int) -> Mapping[str, Tensor]:
    """Uniform random scores: the baseline that every criterion must beat."""
    generator = torch.Generator().manual_seed(seed)
    units = {name: len(values) for name, values in statistics["his"].items()}
    return {name: torch.rand(count, generator=generator, dtype=torch.float64) for name, count in units.items()}


def needs_of(*names: str) -> tuple[str, ...]:
    """Return the names of the statistics that criteria read; names that are not in `CRITERIA` are ignored."""
    return tuple(dict.fromkeys(need for name in names if name in CRITERIA for need in CRITERIA[name].needs))


def uses_alpha(name: str) -> bool:
    """Return whether a criterion weighs two terms by alpha."""
    return name in CRITERIA and "alpha" in CRITERIA[name].options


def score_units(
    statistics: Statistics,
    modules: Sequence[Units] | None = None,
    *,
    criterion: str = "hies",
    alpha: float = 0.9,
    normalize: str = "model",
    seed: int = 0,
) -> Scores:
    """Score every unit by a criterion.

    Units are ranked among those of their kind. A criterion that cannot score neurons, such as HIES, ranks the heads,
    and neurons are then scored by `fisher`.

    Args:
        statistics: From `collect_statistics`.
        modules: The modules that may lose units. If given, the scores also have the effect of removing each unit, in a
            unit common to heads and neurons. By default all modules of the statistics, which must be of one kind.
        criterion: A name in `CRITERIA`.
        alpha: Weight of HIS against entropy in `hies`, in [0, 1).
        normalize: "model" takes the minimum and maximum over all units of a kind, "layer" over those of each module.
        seed: Seed of `random`.

    Returns:
        The scores, with the options that the criterion used.

    Raises:
        RecipeError: The criterion or normalisation is unknown, alpha is outside [0, 1), or a statistic is missing.

    Examples:
        >>> scores = score_units(statistics, criterion="hies", alpha=0.5)
        >>> scores.parameters
        {'alpha': 0.5, 'normalize': 'model'}
    """
    _check(statistics, criterion, alpha, normalize, compared=modules is not None)
    asked = CRITERIA[criterion]

    def options_of(scorer: Criterion) -> dict[str, Any]:
        options = {"alpha": alpha, "normalize": normalize, "seed": seed}
        return {name: value for name, value in options.items() if name in scorer.options}

    if modules is None:
        return Scores(criterion, options_of(asked), asked.function(statistics, **options_of(asked)))
    scores: dict[str, Tensor] = {}
    kinds = dict.fromkeys(module.kind for module in modules)
    scorers = {kind: asked if kind in asked.kinds else CRITERIA[FALLBACK] for kind in kinds}
    for kind, scorer in scorers.items():
        of_kind = statistics.of([module.name for module in modules if module.kind == kind])
        scores |= scorer.function(of_kind, **options_of(scorer))
    parameters = options_of(asked) if asked in scorers.values() else {}
    # Ranks cannot compare kinds; the effect that the criterion names, or the Fisher information by default, can.
    effects = {name: statistics[asked.effect][name] for name in scores}
    return Scores(criterion, parameters, scores, effects, tuple(kind for kind, s in scorers.items() if s.ranks))


def _check(statistics: Statistics, criterion: str, alpha: float, normalize: str, *, compared: bool) -> None:
    """Refuse, in one `RecipeError`, all options of `score_units` that are wrong; `compared` scores need an effect."""
    problems = []
    if criterion not in CRITERIA:
        problems.append(f"criterion must be one of {', '.join(CRITERIA)}, got {criterion!r}")
    if not 0 <= alpha < 1:
        problems.append(f"alpha must be in [0, 1), got {alpha}; for importance alone use criterion: his")
    if normalize not in ("model", "layer"):
        problems.append(f"normalize must be model or layer, got {normalize!r}")
    effect = (CRITERIA[criterion].effect,) if compared and criterion in CRITERIA else ()
    missing = [need for need in dict.fromkeys(needs_of(criterion) + effect) if need not in statistics.values]
    if "entropy" in missing:
        problems.append(
            f"{criterion} needs the entropy of attention maps, which this model does not return; use criterion: "
            f"{COMPENSATED}, fisher or his"
        )
    elif missing:
        problems.append(
            f"{criterion} needs statistics with {' and '.join(missing)}; collect them with "
            f"collect_statistics(..., needs={missing})"
        )
    if problems:
        raise RecipeError(problems)


def in_order_of_slopes(curves: Iterable[tuple[Sequence[float], Sequence[float]]]) -> list[tuple[int, int]]:
    """Return the removals of several curves, each as the number of its curve and its place there, least slope first.

    A curve has the savings and the effects of the first 1, 2, ... removals. The slope, effect per saving, is that of
    the lower convex hull of its points from (0, 0) on. Where an estimated effect falls, the highest so far counts.
    Removals that save nothing go with the next one that saves, and are left out at the end. Among equal slopes, those
    of later curves come first.
    """
    removals = []  # slope, -(number of the curve), place
    for number, curve in enumerate(curves):
        saved, effects = (np.maximum.accumulate([0.0, *values]) for values in curve)
        points = np.array([0, *(np.flatnonzero(np.diff(saved)) + 1)])  # removals after which more is saved
        if len(points) > 1:
            savings = np.diff(saved[points])
            # The slopes of the hull are the closest ascending ones, up to rounding.
            points = points[isotonic_regression(np.diff(effects[points]) / savings, weights=savings).blocks]
            slopes = np.maximum.accumulate(np.diff(effects[points]) / np.diff(saved[points]))
            removals += [(slope, -number, place) for place, slope in enumerate(slopes.repeat(np.diff(points)))]
    return [(-number, place) for _, number, place in sorted(removals)]


def merged(chains: Sequence[Chain]) -> list[Removal]:
    """Return the removals of all chains by least effect per unit; among equals, those of later chains come first."""
    curves = (([*accumulate(len(r.units) for r in chain)], [r.effect for r in chain]) for chain in chains)
    return [chains[number][place] for number, place in in_order_of_slopes(curves)]
