"""The whole line: recipe -> calibrate -> score -> select -> cut -> save -> export -> measure -> report.

`prepare` and this file are the only places where a recipe is unpacked; every stage is a function that can be called
without one.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from . import measure
from .alpha import ALPHAS, Judgement, choose_alpha
from .budget import CostTable, check_reachable, counts_within, flops_table, latency_table, uniform_shares
from .calibrate import collect_statistics
from .compare import count_both_flops, time_on
from .compensate import LayerFit, compensate_heads
from .compensated import collect_effects, score_compensated
from .cut import check_cut, is_slim, masked_heads, prune_heads, weight_norms
from .drop import choose_by_drop, metric_drop
from .errors import DropError, PlanError
from .evaluate_model import Predictions, compute_metrics, predict, predicted, references, stability, standard_error
from .export import OnnxExport, export_onnx
from .folders import new_folder, refuse_existing
from .metrics import METRICS
from .prepare import AUTO_CLASSES, Prepared, budget_options, few, prepare
from .progress import Progress, Silent
from .recipe import PruningRecipe
from .report import Report, head_map, render_card, render_markdown
from .report_html import render_html
from .runtimes import RUNTIMES, require_onnxruntime
from .save import save_slim
from .score import COMPENSATED, SIGNAL_CRITERIA, score_heads, uses_alpha
from .select import bundle_count, check_budget, select_heads
from .signals import collect_signals
from .values import HeadScores, HeadStatistics, PruningPlan, dump_json


@dataclass(frozen=True)
class Choice:
    """What was found out about the heads, and which of them stay.

    Attributes:
        statistics: From calibration.
        scores: By the recipe's criterion.
        plan: The heads that stay.
        alpha_curve: What every alpha came to under `alpha: auto`, see `AlphaChoice`; else empty.
        budget: What the plan promises, and why it is as large as it is.
    """

    statistics: HeadStatistics
    scores: HeadScores
    plan: PruningPlan
    alpha_curve: tuple[Mapping[str, Any], ...]
    budget: Mapping[str, Any] = field(default_factory=dict)


def run(recipe: PruningRecipe, *, overwrite: bool = False, progress: Progress | None = None) -> Report:
    """Do the whole line and write `recipe.output`: scores.json, plan.json, slim/, onnx/ and report.json, .md and .html.

    The folder appears only when everything is done and checked.

    Args:
        recipe: What to do.
        overwrite: Replace an existing output folder.
        progress: Told about stages and loops.

    Returns:
        The report that was written.

    Raises:
        RequestError: The recipe, the data or the model does not allow the run; raised before anything is computed.
        StepError: A step failed; nothing is left behind.
    """
    progress = progress or Silent()
    refuse_existing(recipe.output, overwrite=overwrite)
    require_onnxruntime()
    progress.stage("load")
    prepared = prepare(recipe)
    with new_folder(recipe.output, overwrite=overwrite) as folder:
        seconds = _Stopwatch()
        with seconds("score"):
            choice = choose(prepared, recipe, progress=progress)
        statistics, plan = choice.statistics, choice.plan
        write_choice(folder, choice)
        with seconds("cut"):
            slim, fits, cut_max_abs, reload_max_abs = prune(prepared, plan, recipe, folder / "slim", progress=progress)
            budget = confirm_drop(prepared, slim, recipe, choice.budget, progress=progress)
        quality = evaluate(prepared, slim, plan, recipe, progress=progress)
        with seconds("export"):
            progress.stage("export")
            onnx = export(prepared, slim, recipe, folder / "onnx")
        with seconds("measure"):
            gains = measure_gains(prepared, slim, onnx, recipe, progress=progress)
        report = Report(
            model=recipe.model,
            task=recipe.task,
            criterion=plan.criterion,
            alpha=plan.alpha,
            seed=plan.seed,
            heads={
                "total": plan.heads,
                "removed": plan.removed,
                "kept_per_layer": [len(kept.query) for kept in plan.kept.values()],
            },
            parameters=gains["parameters"],
            bytes=gains["bytes"],
            flops=gains["flops"],
            cache_bytes_per_token=gains["cache_bytes_per_token"],
            quality={"metric": prepared.metrics[0], **quality["metrics"][prepared.metrics[0]]},
            stability=quality["stability"],
            cut_max_abs=cut_max_abs,
            reload_max_abs=reload_max_abs,
            onnx_max_abs=onnx.max_abs,
            seconds=seconds.spent,
            latency=gains["latency"],
            environment=measure.environment(),
            details={
                "head_map": head_map(plan),
                "heads": head_numbers(choice),
                "budget": _measured_budget(budget, gains),
                "metrics": quality["metrics"],
                "uncompensated": quality["uncompensated"],
                "compensation": [asdict(fit) for fit in fits],
                "alpha_curve": choice.alpha_curve,
                "stability_of": _predicted(recipe),
                "stability_tolerance": recipe.evaluation.stability_tolerance if prepared.regression else None,
                "custom_code": is_slim(slim),
                "auto_class": AUTO_CLASSES[recipe.task],
                "onnx": {"inputs": onnx.inputs, "outputs": onnx.outputs, "fused": onnx.fused_ops},
                "data": {
                    "labels": plan.calibration["labels"],
                    "calibration_samples": statistics.samples,
                    "calibration_batch": statistics.batch_size,
                    "calibration_batch_asked": min(recipe.calibration.batch_size, statistics.samples),
                    "evaluation_samples": sum(len(next(iter(batch.values()))) for batch in prepared.evaluation),
                    "evaluation_split": recipe.evaluation.split,
                    "fingerprint": statistics.fingerprint,
                },
            },
        )
        (folder / "slim" / "README.md").write_text(render_card(report), encoding="utf-8")
        (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
        (folder / "report.html").write_text(render_html(report), encoding="utf-8")
        (folder / "report.md").write_text(render_markdown(report), encoding="utf-8")
    return report


def choose(prepared: Prepared, recipe: PruningRecipe, *, progress: Progress) -> Choice:
    """Calibrate, score, select; with `alpha: auto`, at the alpha that does best on the held-out rows."""
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
    options = budget_options(recipe)

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
    dense_logits = predict(prepared.model, prepared.held_out)

    def judge_masked(plan: PruningPlan) -> Judgement:
        with masked_heads(prepared.model, plan):
            logits = predict(prepared.model, prepared.held_out)
        metrics, share = judge(prepared, prepared.held_out, dense_logits, logits, recipe)
        if "labels" not in prepared.held_out[0]:
            return Judgement(None, 0.0, share)
        options: dict[str, Any] = {"name": prepared.metrics[0], "regression": prepared.regression}
        error = standard_error(logits, references(prepared.held_out), **options)
        return Judgement(metrics[prepared.metrics[0]], error, share)

    scores_of = dict(zip(ALPHAS, candidates, strict=True))
    chosen = choose_alpha(
        lambda alpha: (scores_of[alpha], plan_by(scores_of[alpha])),
        judge_masked,
        alphas=tuple(progress.track(ALPHAS, "choose alpha")),
        higher_is_better=METRICS[prepared.metrics[0]].higher_is_better,
    )
    budget = _budget_details(recipe, prepared, table, chosen.plan)
    return Choice(statistics, chosen.scores, chosen.plan, chosen.curve, budget)


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
        table = latency_table(
            prepared.model,
            prepared.scored,
            runtime=budget.latency.runtime,
            batch=prepared.measured[_budget_shape(recipe, prepared)],
            export=lambda model, folder: export(prepared, model, recipe, folder),
            repeats=recipe.measure.repeats,
            min_seconds=recipe.measure.min_seconds,
            track=progress.track,
            **common,
        )
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

    def judge_masked(plan: PruningPlan) -> float:
        with masked_heads(prepared.model, plan):
            logits = predict(prepared.model, prepared.held_out)
        return held_out_metric(prepared, recipe, dense_logits, logits)

    chosen = choose_by_drop(
        progress.track(candidates, "choose sparsity"),
        lambda scores, step: select_heads(scores, prepared.sites, heads=shares[step - 1], **options, **recorded),
        judge_masked,
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
        "masked": chosen.value,
        "samples": sum(len(next(iter(batch.values()))) for batch in prepared.held_out),
        "judged": chosen.judged,
    }
    return Choice(statistics, chosen.scores, chosen.plan, (), details)


def held_out_metric(prepared: Prepared, recipe: PruningRecipe, dense_logits: Predictions, logits: Predictions) -> float:
    """The budget's metric on the held-out rows; without labels, against the dense model's predictions."""
    drop = recipe.prune.budget.max_drop
    assert drop is not None
    metrics, _ = judge(prepared, prepared.held_out, dense_logits, logits, recipe, names=(drop.metric,))
    return metrics[drop.metric]


def confirm_drop(
    prepared: Prepared, slim: PreTrainedModel, recipe: PruningRecipe, budget: Mapping[str, Any], *, progress: Progress
) -> dict[str, Any]:
    """Judge the model that was cut, and refitted, on the rows that its number of heads was chosen on.

    Returns:
        What there is to say of the budget, with `slim`, its metric.

    Raises:
        DropError: It got worse by more than the budget allows: the refit did harm.
    """
    drop = recipe.prune.budget.max_drop
    if drop is None:
        return dict(budget)
    progress.stage("confirm")
    dense_logits = predict(prepared.model, prepared.held_out)
    value = held_out_metric(prepared, recipe, dense_logits, predict(slim, prepared.held_out))
    lost = metric_drop(drop.metric, budget["dense"], value)
    if lost > drop.by:
        raise DropError(
            f"{drop.metric} on the held-out rows may get worse by {drop.by:g}, and the masked model kept to it, but "
            f"the compensated one lost {lost:.4g}; compensate on more samples, or not at all"
        )
    return {**budget, "slim": value}


def _measured_budget(budget: Mapping[str, Any], gains: Mapping[str, Any]) -> dict[str, Any]:
    """What became of a budget of cost."""
    if budget["kind"] == "flops":
        return {**budget, "measured": gains["flops"]["slim"] / gains["flops"]["dense"]}
    if budget["kind"] == "latency":
        same = ("runtime", "batch", "sequence")
        row = next(r for r in gains["latency"] if all(r[key] == budget[key] for key in same))
        return {**budget, "measured": row["ratio"], "noisy": row["noisy"]}
    return dict(budget)


def _predicted(recipe: PruningRecipe) -> str:
    """What a prediction is, whose share that stays the same is the stability."""
    if recipe.data.answer is not None:
        return "answer"
    return "next token" if recipe.task == "text-generation" else "prediction"


def head_numbers(choice: Choice) -> dict[str, dict[str, list[float]]]:
    """Per attention module that may lose heads what was found out about each head."""
    found = {"his": choice.statistics.his, "entropy": choice.statistics.entropy, "score": choice.scores.scores}
    return {
        name: {what: values[name].tolist() for what, values in found.items() if name in values}
        for name in choice.scores.scores
    }


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


def prune(
    prepared: Prepared,
    plan: PruningPlan,
    recipe: PruningRecipe,
    folder: Path,
    *,
    overwrite: bool = False,
    progress: Progress,
) -> tuple[PreTrainedModel, list[LayerFit], float, float]:
    """Cut by a plan, check against the masked model, compensate if the recipe says so, save, check the reload.

    Returns:
        The slim model, what compensation did, and the largest output differences of the cut and of the reload.
    """
    progress.stage("cut")
    batch = few(prepared.calibration[0])
    slim = prune_heads(prepared.model, plan, prepared.sites)
    cut_max_abs = check_cut(prepared.model, slim, plan, batch)
    fits = []
    if recipe.prune.compensation is not None:
        progress.stage("compensate")
        fits = compensate_heads(
            prepared.model,
            slim,
            plan,
            prepared.sites,
            prepared.compensation,
            method=recipe.prune.compensation.method,
            ridge=recipe.prune.compensation.ridge,
            sequential=recipe.prune.compensation.sequential,
            progress=lambda batches: progress.track(batches, "compensate"),
        )
    progress.stage("save")
    reload_max_abs = save_slim(slim, folder, plan=plan, batch=batch, processor=prepared.processor, overwrite=overwrite)
    return slim, fits, cut_max_abs, reload_max_abs


def evaluate(
    prepared: Prepared, slim: PreTrainedModel, plan: PruningPlan, recipe: PruningRecipe, *, progress: Progress
) -> dict[str, Any]:
    """Judge dense and slim on the evaluation batches; where there was compensation, also what it started from.

    Returns:
        metrics: name -> dense and slim value; stability: share of equal predictions; uncompensated: metrics and
        stability of the cut alone, or None.
    """
    progress.stage("evaluate")

    def logits_of(model: PreTrainedModel) -> Predictions:
        return predict(model, prepared.evaluation, progress=lambda batches: progress.track(batches, "evaluate"))

    dense_logits, slim_logits = logits_of(prepared.model), logits_of(slim)

    def judged(logits: Predictions) -> tuple[dict[str, float], float]:
        return judge(prepared, prepared.evaluation, dense_logits, logits, recipe)

    uncompensated = None
    if recipe.prune.compensation is not None:
        # The masked model is the cut one without compensation: `check_cut` has just shown it.
        with masked_heads(prepared.model, plan):
            metrics, share = judged(logits_of(prepared.model))
        uncompensated = {"metrics": metrics, "stability": share}
    (dense, _), (slim_values, share) = judged(dense_logits), judged(slim_logits)
    return {
        "metrics": {name: {"dense": dense[name], "slim": slim_values[name]} for name in prepared.metrics},
        "stability": share,
        "uncompensated": uncompensated,
    }


def judge(
    prepared: Prepared,
    batches: list[dict[str, Tensor]],
    dense_logits: Predictions,
    logits: Predictions,
    recipe: PruningRecipe,
    *,
    names: Sequence[str] = (),
) -> tuple[dict[str, float], float]:
    """Metrics of some logits, by default the report's, and their stability.

    Without labels the dense model's predictions are the reference, and its own value is perfect by definition.
    """
    labelled = "labels" in batches[0]
    expected = references(batches) if labelled else predicted(dense_logits, regression=prepared.regression)
    metrics = compute_metrics(logits, expected, names=names or prepared.metrics, regression=prepared.regression)
    tolerance = recipe.evaluation.stability_tolerance
    return metrics, stability(dense_logits, logits, regression=prepared.regression, tolerance=tolerance)


def export(prepared: Prepared, model: PreTrainedModel, recipe: PruningRecipe, folder: Path) -> OnnxExport:
    """Write a model, dense or slim, as the recipe wants its ONNX folder."""
    return export_onnx(
        model,
        folder,
        batch=few(prepared.calibration[0]),
        processor=prepared.processor,
        provider=recipe.export.provider,
        dtype=recipe.export.dtype,
    )


def measure_gains(
    prepared: Prepared, slim: PreTrainedModel, onnx: OnnxExport, recipe: PruningRecipe, *, progress: Progress
) -> dict[str, Any]:
    """Count parameters, bytes and FLOPs, and time both models on every runtime and shape."""
    dense, batches = prepared.model, prepared.measured
    flops = count_both_flops(dense, slim, batches)
    latency = []
    # Beside the slim one, so that both are read from the same disk; the dense graph is not kept.
    with tempfile.TemporaryDirectory(prefix=".dense-", dir=onnx.folder.parent) as temporary:
        dense_folder = Path(temporary) / "onnx"
        if not all(RUNTIMES[name].reads_models for name in prepared.runtimes):
            progress.stage("export the dense model, to compare with")
            export(prepared, dense, recipe, dense_folder)
        progress.stage("measure")
        for name in prepared.runtimes:
            sources = (dense, slim) if RUNTIMES[name].reads_models else (dense_folder, onnx.folder)
            latency += time_on(
                name,
                *sources,
                batches=batches,
                flops=flops,
                repeats=recipe.measure.repeats,
                min_seconds=recipe.measure.min_seconds,
                track=progress.track,
            )
    shape = next(iter(batches))
    dense_flops, slim_flops = flops[shape]
    return {
        "parameters": {"dense": measure.count_parameters(dense), "slim": measure.count_parameters(slim)},
        "bytes": {
            "dense": measure.parameter_bytes(dense),
            "slim": measure.parameter_bytes(slim),
            "onnx": onnx.bytes,
        },
        "flops": {"dense": dense_flops, "slim": slim_flops, "shape": list(shape)},
        "cache_bytes_per_token": _cache_bytes(dense, slim),
        "latency": latency,
    }


def _cache_bytes(dense: PreTrainedModel, slim: PreTrainedModel) -> dict[str, int] | None:
    """What both models remember of a token while they generate; None where they do not."""
    found = [measure.cache_bytes_per_token(model) for model in (dense, slim)]
    return None if found[0] is None or found[1] is None else {"dense": found[0], "slim": found[1]}


class _Stopwatch:
    """`with seconds("cut"): ...` adds to `seconds.spent["cut"]`."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def __call__(self, name: str) -> _Stopwatch:
        self._name = name
        return self

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.spent[self._name] = time.perf_counter() - self._started
