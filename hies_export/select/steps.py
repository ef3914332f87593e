"""Prune in steps: what the heads that are left mean is found out again after each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import PlanError
from ..values import AttentionSite, HeadScores, HeadStatistics, KeptHeads, PruningPlan
from .constraints import bundle_count, check_budget

Values = TypeVar("Values", HeadStatistics, HeadScores)


def sizes_of_steps(
    sites: Sequence[AttentionSite], *, heads: float, steps: int, **options: Any
) -> Iterator[Callable[[Sequence[AttentionSite]], dict[str, Any]]]:
    """How much each step removes; steps that would remove nothing are left out.

    Args:
        sites: The modules that may lose heads, before the first step.
        heads: Share of heads that all steps together remove.
        steps: How many; the first n of them remove n/steps of that share.
        options: As `check_budget` takes.

    Yields:
        A function from the modules as the steps before left them to what `select_heads` wants: `heads` or `counts`.
    """
    bundles = [bundle_count(site, options.get("unit", "group")) for site in sites]

    def left(now: Sequence[AttentionSite]) -> list[int]:
        return [bundle_count(site, options.get("unit", "group")) for site in now]

    before: int | list[int] = 0
    for step in range(1, steps + 1):
        # The last says why when nothing can go.
        with contextlib.suppress(PlanError) if step < steps else contextlib.nullcontext():
            wanted = check_budget(sites, heads=heads * step / steps, **options)
            if wanted == before:
                continue
            before = wanted

            def size(now: Sequence[AttentionSite], wanted: int | list[int] = wanted) -> dict[str, Any]:
                if isinstance(wanted, int):
                    return {"heads": (wanted - sum(bundles) + sum(left(now))) / sum(left(now))}
                return {"counts": [w - b + n for w, b, n in zip(wanted, bundles, left(now), strict=True)]}

            yield size


def compose(first: PruningPlan, second: PruningPlan) -> PruningPlan:
    """The plan that does to a model what `second` does to the model that `first` leaves."""
    kept = {}
    for name, before in first.kept.items():
        after = second.kept[name]
        kept[name] = KeptHeads(
            tuple(before.query[i] for i in after.query),
            tuple(before.key_value[i] for i in after.key_value),
            before.heads,
            before.key_value_heads,
        )
    return replace(second, kept=kept, model=first.model)


def filled_in(earlier: Values, later: Values, plan: PruningPlan) -> Values:
    """Numbers of all heads: of those that `plan` left for a later step its own, of the others the earlier ones."""
    fields = ("scores",) if isinstance(earlier, HeadScores) else ("his", "entropy", "weight_l2")

    def merged(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kept = {name: torch.tensor(plan.kept[name].query) for name in old}
        return {name: values.index_copy(0, kept[name], new[name]) for name, values in old.items()}

    values: dict[str, Any] = {field: merged(getattr(earlier, field), getattr(later, field)) for field in fields}
    return replace(later, **values)
