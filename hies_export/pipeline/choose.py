"""Calibrate, score and select as a recipe says: which heads stay."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..calibrate.collect import collect_statistics
from ..calibrate.effects import collect_effects
from ..calibrate.moments import collect_moments, moment_bytes
from ..calibrate.signals import collect_signals
from ..cost.flops import flops_table
from ..cost.latency import TimedOn, latency_table
from ..data.targets import size_of
from ..errors import PlanError
from ..evaluate.metrics import METRICS
from ..evaluate.predict import predict
from ..measure.timing import Timing
from ..model.copies import share_weights
from ..progress import Progress
from ..prunable.attention import find_attention
from ..recipe import PruningRecipe
from ..score.compensated import score_compensated
from ..score.criteria import COMPENSATED, SIGNAL_CRITERIA, score_heads, uses_alpha
from ..select.constraints import bundle_count, check_budget
from ..select.knapsack import CostTable, check_reachable, counts_within, uniform_shares
from ..select.select import select_heads
from ..select.steps import compose, filled_in, sizes_of_steps
from ..slim.check import weight_norms
from ..slim.cut import prune_heads
from ..slim.refit import compensate_heads, refit_heads
from ..values import HeadScores, HeadStatistics, PruningPlan, dump_json
from .measure import export
from .prepare import Prepared, budget_options, few
from .quality import Refit, held_out_metric, judgement, predict_pruned
from .search import ALPHAS, Judgement, choose_alpha, choose_by_drop

logger = logging.getLogger(__name__)

# Moments of more than this are not held at once to choose by what refitting makes of a plan.
MOMENT_LIMIT_BYTES = 4 << 30


@dataclass(frozen=True)
class Choice:
    """What was found out about the heads, and which of them stay.

    Attributes:
        statistics: From calibration.
        scores: By the recipe's criterion.
        plan: The heads that stay.
        alpha_curve: What every alpha came to under `alpha: auto`, see `AlphaChoice`; else empty.
        budget: What the plan promises, and why it is as large as it is.
        refit: What compensation does to the dense model cut by a plan, where plans were judged by that; it holds the
            moments of all heads.
    """

    statistics: HeadStatistics
    scores: HeadScores
    plan: PruningPlan
    alpha_curve: tuple[Mapping[str, Any], ...]
    budget: Mapping[str, Any] = field(default_factory=dict)
    refit: Refit | None = None


def choose(prepared: Prepared, recipe: PruningRecipe, *, progress: Progress) -> Choice:
    """Calibrate, score, select; with `alpha: auto`, at the alpha that does best on the held-out rows.

    With `steps`, so much of the budget at a time, each on the model that the steps before leave: cut, and refitted
    where the recipe compensates. What is said of a head is what the last step found that it was there for.
    """
    if recipe.prune.steps == 1:
        return _choose_once(prepared, recipe, progress=progress)
    chosen: Choice | None = None
    for number, size in enumerate(
        sizes_of_steps(prepared.scored, steps=recipe.prune.steps, **budget_options(recipe)), start=1
    ):
        progress.stage(f"step {number}")
        current = prepared if chosen is None else _left_by(chosen.plan, prepared, recipe)
        found = _choose_once(current, recipe, size=size(current.scored), dense=prepared.model, progress=progress)
        if chosen is not None:
            found = replace(
                found,
                statistics=filled_in(chosen.statistics, found.statistics, chosen.plan),
                scores=filled_in(chosen.scores, found.scores, chosen.plan),
                plan=compose(chosen.plan, found.plan),
                refit=None,  # it refits what the steps before left, and the plan is for the dense model
            )
        chosen = found
    assert chosen is not None
    return chosen


def _left_by(plan: PruningPlan, prepared: Prepared, recipe: PruningRecipe) -> Prepared:
    """The model that a run by a plan ends with, in the place of the dense one."""
    slim = prune_heads(share_weights(prepared.model), plan, prepared.sites, inplace=True)
    if recipe.prune.compensation is not None:
        compensate_heads(
            prepared.model,
            slim,
            plan,
            prepared.sites,
            prepared.compensation,
            **recipe.prune.compensation.model_dump(exclude={"samples"}),
        )
    sites = find_attention(slim, few(prepared.calibration[0]))
    names = {site.name for site in prepared.scored}
    return replace(prepared, model=slim, sites=sites, scored=tuple(site for site in sites if site.name in names))


def _choose_once(
    prepared: Prepared,
    recipe: PruningRecipe,
    *,
    size: Mapping[str, Any] | None = None,
    dense: PreTrainedModel | None = None,
    progress: Progress,
) -> Choice:
    """Choose on a model as it is.

    Args:
        prepared: With the model.
        recipe: How.
        size: What goes, for `select_heads`; by default what the recipe's budget says.
        dense: The model that predictions are compared with, if not the same.
        progress: Told about stages and loops.
    """
    prune, seed = recipe.prune, recipe.calibration.seed
    # What a budget of cost allows is known before anything is scored.
    table = _cost_table(prepared, recipe, progress=progress)
    progress.stage("score")
    statistics = collect_statistics(
        prepared.model,
        prepared.calibration,
        prepared.scored,
        progress=lambda batches: progress.track(batches, "score"),
    )
    if prune.criterion in SIGNAL_CRITERIA:
        signals = collect_signals(prepared.model, prepared.calibration, prepared.scored)
        statistics = replace(statistics, signals=signals)
    recorded: dict[str, Any] = {
        "seed": seed,
        "calibration": {
            "samples": statistics.samples,
            "labels": "predictions" if prune.criterion == COMPENSATED else statistics.labels,
            "fingerprint": statistics.fingerprint,
        },
        "model": weight_norms(prepared.model, prepared.sites),
    }
    options = budget_options(recipe) | dict(size or {})

    def plan_by(scores: HeadScores) -> PruningPlan:
        if table is None:
            return select_heads(scores, prepared.sites, **options, **recorded)
        counts = counts_within(scores, prepared.scored, table, ratio=_target(recipe), **options)
        return select_heads(scores, prepared.sites, counts=counts, **options, **recorded)

    def scores_at(alpha: float) -> HeadScores:
        return score_heads(statistics, alpha=alpha, criterion=prune.criterion, normalize=prune.normalize, seed=seed)

    auto = prune.alpha == "auto" and uses_alpha(prune.criterion)
    if prune.criterion == COMPENSATED:
        effects = collect_effects(
            prepared.model,
            prepared.calibration,
            prepared.scored,
            progress=lambda batches: progress.track(batches, "effects"),
        )
        candidates = [
            score_compensated(effects, prepared.scored, progress=lambda sites: progress.track(sites, "greedy removal"))
        ]
    elif auto:
        candidates = [scores_at(alpha) for alpha in ALPHAS]
    else:
        candidates = [scores_at(0.0 if prune.alpha == "auto" else prune.alpha)]
    if prune.budget.max_drop is not None:
        return _choose_by_drop(prepared, recipe, statistics, candidates, recorded, progress=progress)
    if not auto:
        plan = plan_by(candidates[0])
        return Choice(statistics, candidates[0], plan, (), _budget_details(recipe, prepared, table, plan))
    progress.stage("choose alpha")
    model, held_out = prepared.model, prepared.held_out
    dense_logits, refit = predict(dense or model, held_out), _refit(prepared, recipe, progress=progress)

    def judged(plan: PruningPlan) -> Judgement:
        logits = predict_pruned(model, plan, prepared.sites, held_out, refit=refit)
        return judgement(prepared, held_out, dense_logits, logits, recipe)

    scores_of = dict(zip(ALPHAS, candidates, strict=True))
    chosen = choose_alpha(
        lambda alpha: (scores_of[alpha], plan_by(scores_of[alpha])),
        judged,
        alphas=tuple(progress.track(ALPHAS, "choose alpha")),
        higher_is_better=METRICS[prepared.metrics[0]].higher_is_better,
    )
    budget = _budget_details(recipe, prepared, table, chosen.plan)
    return Choice(statistics, chosen.scores, chosen.plan, chosen.curve, budget, refit)


def _refit(prepared: Prepared, recipe: PruningRecipe, *, progress: Progress) -> Refit | None:
    """What compensation will do to a cut model, from moments collected once; None where there will be none."""
    compensation = recipe.prune.compensation
    if compensation is None:
        return None
    needed = moment_bytes(prepared.sites)
    if needed > MOMENT_LIMIT_BYTES:
        logger.warning(
            "what goes is chosen without compensation, and only then compensated: for this model the other would take "
            "%.0f GB",
            needed / 1e9,
        )
        return None
    moments = collect_moments(
        prepared.model,
        prepared.sites,
        prepared.compensation,
        progress=lambda batches: progress.track(batches, "moments"),
    )
    options: dict[str, Any] = {"method": compensation.method, "ridge": compensation.ridge}
    return lambda slim, plan: refit_heads(slim, plan, prepared.sites, moments, **options)


def write_choice(folder: Path, choice: Choice) -> None:
    """Write scores.json (statistics and scores per head) and plan.json."""
    statistics, scores, plan = choice.statistics, choice.scores, choice.plan
    written = {
        "criterion": scores.criterion,
        "parameters": scores.parameters,
        "scores": scores.scores,
        "his": statistics.his,
        "entropy": statistics.entropy,
        "weight_l2": statistics.weight_l2,
        "samples": statistics.samples,
        "labels": statistics.labels,
        "fingerprint": statistics.fingerprint,
        "alpha_curve": choice.alpha_curve,
    }
    (folder / "scores.json").write_text(dump_json(written), encoding="utf-8")
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")


def head_numbers(choice: Choice) -> dict[str, dict[str, list[float]]]:
    """Per attention module that may lose heads what was found out about each head."""
    found = {"his": choice.statistics.his, "entropy": choice.statistics.entropy, "score": choice.scores.scores}
    return {
        name: {what: values[name].tolist() for what, values in found.items() if name in values}
        for name in choice.scores.scores
    }


def _target(recipe: PruningRecipe) -> float:
    """What a budget of cost allows, as a share of the dense model's."""
    budget = recipe.prune.budget
    ratio = budget.flops if budget.latency is None else budget.latency.ratio
    assert ratio is not None
    return ratio


def _cost_table(prepared: Prepared, recipe: PruningRecipe, *, progress: Progress) -> CostTable | None:
    """What heads cost, for a budget of FLOPs or time that can be met; None for the others."""
    budget, options = recipe.prune.budget, budget_options(recipe)
    common: dict[str, Any] = {"unit": recipe.prune.unit}
    if budget.latency is not None:
        progress.stage("time cuts")
        where = TimedOn(
            runtime=budget.latency.runtime,
            batch=prepared.measured[_budget_shape(recipe, prepared)],
            timing=Timing(repeats=recipe.measure.repeats, min_seconds=recipe.measure.min_seconds),
            export=lambda model, folder: export(prepared, model, recipe, folder),
        )
        table = latency_table(prepared.model, prepared.scored, where, track=progress.track, **common)
    elif budget.flops is not None:
        table = flops_table(prepared.model, prepared.scored, batch=next(iter(prepared.measured.values())), **common)
    else:
        return None
    check_reachable(prepared.scored, table, ratio=_target(recipe), **options)
    return table


def _budget_shape(recipe: PruningRecipe, prepared: Prepared) -> tuple[int, int]:
    """The measured shape that a budget of time is about; images and prompts have one sequence for every batch."""
    wanted = recipe.prune.budget.latency
    assert wanted is not None
    of_batch = [shape for shape in prepared.measured if shape[0] == wanted.batch]
    return next((shape for shape in of_batch if shape[1] == wanted.sequence), of_batch[0])


def _budget_details(
    recipe: PruningRecipe, prepared: Prepared, table: CostTable | None, plan: PruningPlan
) -> dict[str, Any]:
    """What the report says of the budget; what was measured of it comes later."""
    budget = recipe.prune.budget
    if table is None:
        return {"kind": "heads", "target": budget.heads}
    lost = {
        site.name: bundle_count(site, recipe.prune.unit) * (site.heads - len(plan.kept[site.name].query)) // site.heads
        for site in prepared.scored
    }
    details = {"target": _target(recipe), "predicted": table.ratio(lost)}
    if budget.latency is None:
        return {"kind": "flops", **details}
    batch, sequence = _budget_shape(recipe, prepared)
    where = {"runtime": budget.latency.runtime, "batch": batch, "sequence": sequence}
    return {"kind": "latency", **where, **details, "table": table.measured}


def _choose_by_drop(
    prepared: Prepared,
    recipe: PruningRecipe,
    statistics: HeadStatistics,
    candidates: Sequence[HeadScores],
    recorded: Mapping[str, Any],
    *,
    progress: Progress,
) -> Choice:
    """The scores and the share of heads by which most can go while the held-out metric holds."""
    progress.stage("choose sparsity")
    drop, options = recipe.prune.budget.max_drop, budget_options(recipe)
    assert drop is not None
    dense_logits = predict(prepared.model, prepared.held_out)
    dense = held_out_metric(prepared, recipe, dense_logits, dense_logits)
    shares = []
    for share in uniform_shares(prepared.scored, allocation=recipe.prune.allocation, unit=recipe.prune.unit):
        with contextlib.suppress(PlanError):  # beyond what the constraints leave
            check_budget(prepared.scored, heads=share, **options)
            shares.append(share)
    if not shares:
        raise PlanError("max_drop needs heads that may go, but the constraints leave none; loosen them")

    refit = _refit(prepared, recipe, progress=progress)

    def judged(plan: PruningPlan) -> float:
        logits = predict_pruned(prepared.model, plan, prepared.sites, prepared.held_out, refit=refit)
        return held_out_metric(prepared, recipe, dense_logits, logits)

    chosen = choose_by_drop(
        progress.track(candidates, "choose sparsity"),
        lambda scores, step: select_heads(scores, prepared.sites, heads=shares[step - 1], **options, **recorded),
        judged,
        steps=len(shares),
        metric=drop.metric,
        dense=dense,
        by=drop.by,
    )
    details = {
        "kind": "max_drop",
        "metric": drop.metric,
        "by": drop.by,
        "dense": dense,
        "refitted" if refit else "masked": chosen.value,
        "samples": sum(map(size_of, prepared.held_out)),
        "judged": chosen.judged,
    }
    return Choice(statistics, chosen.scores, chosen.plan, (), details, refit)
