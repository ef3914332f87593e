"""Turn statistics into one score per head. Higher means keep."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import RecipeError
from ..values import HeadScores, HeadStatistics
from .normalize import NORMALIZE, min_max

Criterion = Callable[..., Mapping[str, Tensor]]

CRITERIA: dict[str, Criterion] = {}
"""Criteria by name; `criterion` adds to it."""

# Ours, greedy: it needs more of the model than averages per head, so it has stages of its own in `compensated`.
COMPENSATED = "hies-compensated"


def criterion(function: Criterion) -> Criterion:
    """Register a criterion under its function's name, with hyphens for underscores.

    A criterion takes a `HeadStatistics` and, by keyword, any of `alpha`, `normalize` and `seed` it wants, and returns
    one float64 tensor of shape (heads,) per attention module; higher means keep. The recipe, the command line and the
    sweep find it by name.

    Args:
        function: The criterion.

    Returns:
        The function itself: this is a decorator.

    Examples:
        >>> @criterion
        ... def his_per_weight(statistics):
        ...     return {name: his / statistics.weight_l2[name] for name, his in statistics.his.items()}
        >>> score_heads(statistics, criterion="his-per-weight").criterion
        'his-per-weight'
    """
    CRITERIA[function.__name__.replace("_", "-")] = function
    return function


@criterion
def hies(statistics: HeadStatistics, *, alpha: float, normalize: str) -> Mapping[str, Tensor]:
    """HIES_h = alpha * HIS^_h + (1 - alpha) * (1 - AE^_h), the Head Importance-Entropy Score (its paper's Eq. 1)."""
    importance = min_max(statistics.his, normalize=normalize, what="HIS")
    entropy = min_max(statistics.entropy, normalize=normalize, what="entropy")
    return {name: alpha * importance[name] + (1 - alpha) * (1 - entropy[name]) for name in importance}


@criterion
def his(statistics: HeadStatistics, *, normalize: str) -> Mapping[str, Tensor]:
    """HIS^_h alone (Michel et al. 2019): heads to which the loss is least sensitive go first."""
    return min_max(statistics.his, normalize=normalize, what="HIS")


@criterion
def ad(statistics: HeadStatistics, *, normalize: str) -> Mapping[str, Tensor]:
    """AE^_h alone (attention diversity): heads with the lowest entropy go first, as in the paper's AD baseline."""
    return min_max(statistics.entropy, normalize=normalize, what="entropy")


@criterion
def l2(statistics: HeadStatistics, *, normalize: str) -> Mapping[str, Tensor]:
    """L2 norm of the head's q/k/v/o weights: small heads go first."""
    return min_max(statistics.weight_l2, normalize=normalize, what="weight norm")


@criterion
def random(statistics: HeadStatistics, *, seed: int) -> Mapping[str, Tensor]:
    """Uniform random scores: what any criterion must beat."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(values.shape[0], generator=generator, dtype=torch.float64)
        for name, values in statistics.his.items()
    }


@criterion
def activation_l2(statistics: HeadStatistics, *, normalize: str) -> Mapping[str, Tensor]:
    """Mean norm of what the head gives: heads that give little go first."""
    return min_max(statistics.signals["activation_l2"], normalize=normalize, what="activation norm")


@criterion
def output_norm(statistics: HeadStatistics, *, normalize: str) -> Mapping[str, Tensor]:
    """E |W_h x_h|, the mean norm of what the head writes into the residual stream; forward only."""
    return min_max(statistics.signals["output_norm"], normalize=normalize, what="output norm")


@criterion
def obs(statistics: HeadStatistics, *, normalize: str) -> Mapping[str, Tensor]:
    """What losing the head alone costs once the others have made up for it (optimal brain surgeon, by groups)."""
    return min_max(statistics.signals["obs"], normalize=normalize, what="OBS score")


@criterion
def llm_pruner_block(statistics: HeadStatistics) -> Mapping[str, Tensor]:
    """First-order Taylor importance of a head's weights, as LLM-Pruner's block-wise mode (Ma et al. 2023).

    It keeps the first three layers and the last; here, of models of at least 8 layers, these lose heads only where the
    others have none left. What is approximated: only attention is pruned, and key/value groups are not fixed to heads.
    """
    found = min_max(statistics.signals["taylor"], normalize="model", what="Taylor importance")
    last = len(found) - 1
    kept = {0, 1, 2, last} if last >= 7 else set()
    return {name: values + (1.0 if layer in kept else 0.0) for layer, (name, values) in enumerate(found.items())}


def ae_and_activation_l2(statistics: HeadStatistics, *, alpha: float, normalize: str) -> Mapping[str, Tensor]:
    """HIES with the norm of the head's output in the place of its HIS (the paper's last appendix)."""
    norm = min_max(statistics.signals["activation_l2"], normalize=normalize, what="activation norm")
    entropy = min_max(statistics.entropy, normalize=normalize, what="entropy")
    return {name: alpha * norm[name] + (1 - alpha) * (1 - entropy[name]) for name in norm}


CRITERIA["ae + activation-l2"] = ae_and_activation_l2

# Those that read `HeadStatistics.signals`, which `collect_signals` fills in a pass of its own.
SIGNAL_CRITERIA = ("activation-l2", "output-norm", "obs", "llm-pruner-block", "ae + activation-l2")


# Baselines that remove something else than heads: a sweep judges what the model would compute, nothing is cut.
CHANNELS, SLICED, SLICED_TUNED = "llm-pruner-channel", "slicegpt", "slicegpt-tuned"
JUDGED_ONLY = (CHANNELS, SLICED, SLICED_TUNED)
# They have their own calibration samples, the same whatever the others are scored on.
OWN_SAMPLES = (COMPENSATED, SLICED, SLICED_TUNED)

# How rows that are approximations differ from the methods they are named after.
DIFFERENCES = {
    "llm-pruner-block": "only attention is pruned; the first three layers and the last lose heads where no others are "
    "left, and, below 8 layers, like any other",
    CHANNELS: "channels of heads, in attention only, as many weights as the heads have; masked, because heads of "
    "unequal width cannot be saved",
    SLICED: "only what q, k, v read and what o writes is projected, by the same share of every matrix; masked, and the "
    "rotations, which would take about as many weights again, are not counted, so it has it easier than the others",
    SLICED_TUNED: "slicegpt, then three epochs of q, k, v and o towards the dense model's predictions on unlabelled "
    "rows (the original tunes low-rank adapters on text)",
}


def criterion_names() -> tuple[str, ...]:
    """Every criterion a recipe may name."""
    return (*CRITERIA, COMPENSATED)


def sweep_names() -> tuple[str, ...]:
    """Every criterion a sweep may name."""
    return (*criterion_names(), *JUDGED_ONLY)


def uses_alpha(name: str) -> bool:
    """Whether a criterion weighs two terms by alpha."""
    return name in CRITERIA and "alpha" in inspect.signature(CRITERIA[name]).parameters


def score_heads(
    statistics: HeadStatistics,
    *,
    criterion: str = "hies",
    alpha: float = 0.9,
    normalize: str = "model",
    seed: int = 0,
) -> HeadScores:
    """Score every head by a criterion; any number of calls may reuse the same statistics.

    Args:
        statistics: From `collect_statistics`.
        criterion: A name in `CRITERIA`.
        alpha: Weight of HIS against entropy in `hies`, in [0, 1).
        normalize: "model" takes minimum and maximum over all heads, "layer" within each attention module.
        seed: Seed of `random`.

    Returns:
        Scores, and the parameters the criterion used.

    Raises:
        RecipeError: Unknown criterion or normalisation, or alpha outside [0, 1).

    Examples:
        >>> scores = score_heads(statistics, criterion="hies", alpha=0.5)
        >>> scores.parameters
        {'alpha': 0.5, 'normalize': 'model'}
    """
    problems = []
    if criterion not in CRITERIA:
        remedy = f"; {COMPENSATED} is scored by score_compensated" if criterion == COMPENSATED else ""
        problems.append(f"criterion must be one of {', '.join(CRITERIA)}, got {criterion!r}{remedy}")
    if not 0 <= alpha < 1:
        problems.append(f"alpha must be in [0, 1), got {alpha}; for importance alone use criterion: his")
    if normalize not in NORMALIZE:
        problems.append(f"normalize must be model or layer, got {normalize!r}")
    if criterion in SIGNAL_CRITERIA and not statistics.signals:
        problems.append(f"{criterion} needs statistics with signals; add those of collect_signals")
    if problems:
        raise RecipeError(problems)
    function = CRITERIA[criterion]
    options = {"alpha": alpha, "normalize": normalize, "seed": seed}
    parameters: dict[str, Any] = {k: v for k, v in options.items() if k in inspect.signature(function).parameters}
    return HeadScores(criterion=criterion, parameters=parameters, scores=function(statistics, **parameters))
