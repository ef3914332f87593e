"""Naive formulas that the package is compared with."""

from __future__ import annotations

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from hies_export.legacy import AttentionSite
from hies_export.prunable.attention import find_attention
from hies_export.slim.cut import prune_units
from hies_export.values import PruningPlan
from support.contract import random_plan


def prepared(
    dense: PreTrainedModel, batch: dict[str, Tensor]
) -> tuple[PreTrainedModel, PruningPlan, tuple[AttentionSite, ...]]:
    sites = find_attention(dense, batch)
    plan = random_plan(sites, uniform=False)
    return prune_units(dense, plan, sites), plan, sites


def kept_columns(plan: PruningPlan, site: AttentionSite) -> list[int]:
    width = site.value_dim
    return [head * width + j for head in plan.kept[site.name].query for j in range(width)]


def design_formula(
    w: np.ndarray, b: np.ndarray | None, x: np.ndarray, kept: list[int], ridge: float
) -> tuple[np.ndarray, np.ndarray | None]:
    """W'_K and b' as DESIGN writes them, by numpy, from all inputs x."""
    removed = sorted(set(range(x.shape[1])) - set(kept))
    mean = x.mean(0) if b is not None else np.zeros(x.shape[1])
    c = (x - mean).T @ (x - mean) / len(x)
    c_kk, c_mk = c[np.ix_(kept, kept)], c[np.ix_(removed, kept)]
    damping = ridge * np.trace(c_kk) / len(kept) * np.eye(len(kept))
    new = w[:, kept] + w[:, removed] @ c_mk @ np.linalg.inv(c_kk + damping)
    if b is None:
        return new, None
    return new, b + w[:, removed] @ mean[removed] + (w[:, kept] - new) @ mean[kept]


RIDGE = 0.1


def naive_effect(
    model: PreTrainedModel,
    site: AttentionSite,
    samples: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
    groups: list[int],
    *,
    squared: bool,
) -> float:
    """E_x of sum_t <g_t, delta_t>, with the compensated layer really built for the kept groups."""
    layer = model.get_submodule(site.output)
    w = layer.weight.detach().double().numpy()
    b = np.zeros(len(w)) if layer.bias is None else layer.bias.detach().double().numpy()
    width = site.group_size * site.value_dim
    kept = [g * width + j for g in groups for j in range(width)]
    removed = sorted(set(range(w.shape[1])) - set(kept))
    x = np.concatenate([x for x, _, _ in samples])
    mean = np.zeros(x.shape[1]) if layer.bias is None else x.mean(0)
    c = (x - mean).T @ (x - mean) / len(x)
    damped = c[np.ix_(kept, kept)] + RIDGE * np.trace(c) / len(c) * np.eye(len(kept))
    new = w[:, kept] + w[:, removed] @ c[np.ix_(removed, kept)] @ np.linalg.inv(damped)
    shift = b + w[:, removed] @ mean[removed] + (w[:, kept] - new) @ mean[kept]
    effects = [((x[:, kept] @ new.T + shift - y) * g).sum() for x, y, g in samples]
    return float(np.mean(np.square(effects) if squared else np.abs(effects)))
