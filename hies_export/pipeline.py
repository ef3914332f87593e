"""The whole line: recipe -> calibrate -> score -> select -> cut -> save -> export -> measure -> report.

`prepare` and this file are the only places where a recipe is unpacked; every stage is a function that can be called
without one.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from . import measure
from .alpha import ALPHAS, Judgement, choose_alpha
from .calibrate import collect_statistics
from .compare import count_both_flops, time_on
from .compensate import LayerFit, compensate_heads
from .compensated import collect_effects, score_compensated
from .cut import check_cut, is_slim, masked_heads, prune_heads
from .evaluate_model import Predictions, compute_metrics, predict, predicted, references, stability, standard_error
from .export import OnnxExport, export_onnx
from .folders import new_folder, refuse_existing
from .metrics import METRICS
from .prepare import AUTO_CLASSES, Prepared, budget_options, few, prepare
from .progress import Progress, Silent
from .recipe import PruningRecipe
from .report import Report, head_map, render_card, render_markdown
from .runtimes import require_onnxruntime
from .save import save_slim
from .score import COMPENSATED, SIGNAL_CRITERIA, score_heads
from .select import select_heads
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
    """

    statistics: HeadStatistics
    scores: HeadScores
    plan: PruningPlan
    alpha_curve: tuple[Mapping[str, Any], ...]


def run(recipe: PruningRecipe, *, overwrite: bool = False, progress: Progress | None = None) -> Report:
    """Do the whole line and write `recipe.output`: scores.json, plan.json, slim/, onnx/, report.json, report.md.

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
        quality = evaluate(prepared, slim, plan, recipe, progress=progress)
        with seconds("export"):
            onnx = export(prepared, slim, recipe, folder / "onnx", progress=progress)
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
        (folder / "report.md").write_text(render_markdown(report), encoding="utf-8")
    return report


def choose(prepared: Prepared, recipe: PruningRecipe, *, progress: Progress) -> Choice:
    """Calibrate, score, select; with `alpha: auto`, at the alpha that does best on the held-out rows."""
    progress.stage("score")
    prune, seed = recipe.prune, recipe.calibration.seed
    statistics = collect_statistics(
        prepared.model,
        prepared.calibration,
        prepared.scored,
        progress=lambda batches: progress.track(batches, "score"),
    )
    if prune.criterion in SIGNAL_CRITERIA:
        signals = collect_signals(prepared.model, prepared.calibration, prepared.scored)
        statistics = replace(statistics, signals=signals)
    calibration = {
        "samples": statistics.samples,
        "labels": "predictions" if prune.criterion == COMPENSATED else statistics.labels,
        "fingerprint": statistics.fingerprint,
    }

    def plan_by(scores: HeadScores) -> PruningPlan:
        return select_heads(scores, prepared.sites, **budget_options(recipe), seed=seed, calibration=calibration)

    if prune.criterion == COMPENSATED:
        effects = collect_effects(
            prepared.model,
            prepared.calibration,
            prepared.scored,
            progress=lambda batches: progress.track(batches, "effects"),
        )
        scores = score_compensated(
            effects, prepared.scored, progress=lambda sites: progress.track(sites, "greedy removal")
        )
        return Choice(statistics, scores, plan_by(scores), ())

    def plan_at(alpha: float) -> tuple[HeadScores, PruningPlan]:
        options: dict[str, Any] = {"criterion": prune.criterion, "normalize": prune.normalize, "seed": seed}
        scores = score_heads(statistics, alpha=alpha, **options)
        return scores, plan_by(scores)

    if not prepared.held_out:
        return Choice(statistics, *plan_at(0.0 if prune.alpha == "auto" else prune.alpha), ())
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

    alphas = tuple(progress.track(ALPHAS, "choose alpha"))
    higher_is_better = METRICS[prepared.metrics[0]].higher_is_better
    chosen = choose_alpha(plan_at, judge_masked, alphas=alphas, higher_is_better=higher_is_better)
    return Choice(statistics, chosen.scores, chosen.plan, chosen.curve)


def _predicted(recipe: PruningRecipe) -> str:
    """What a prediction is, whose share that stays the same is the stability."""
    if recipe.data.answer is not None:
        return "answer"
    return "next token" if recipe.task == "text-generation" else "prediction"


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
) -> tuple[dict[str, float], float]:
    """Metrics of some logits, and their stability.

    Without labels the dense model's predictions are the reference, and its own value is perfect by definition.
    """
    labelled = "labels" in batches[0]
    expected = references(batches) if labelled else predicted(dense_logits, regression=prepared.regression)
    metrics = compute_metrics(logits, expected, names=prepared.metrics, regression=prepared.regression)
    tolerance = recipe.evaluation.stability_tolerance
    return metrics, stability(dense_logits, logits, regression=prepared.regression, tolerance=tolerance)


def export(
    prepared: Prepared, model: PreTrainedModel, recipe: PruningRecipe, folder: Path, *, progress: Progress
) -> OnnxExport:
    """Write a model, dense or slim, as the recipe wants its ONNX folder."""
    progress.stage("export" if model is not prepared.model else "export the dense model, to compare with")
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
        if any(name.startswith("onnxruntime") for name in prepared.runtimes):
            export(prepared, dense, recipe, dense_folder, progress=progress)
        progress.stage("measure")
        for name in prepared.runtimes:
            sources = (dense, slim) if name == "torch" else (dense_folder, onnx.folder)
            latency += time_on(
                name,
                *sources,
                batches=batches,
                flops=flops,
                repeats=recipe.measure.repeats,
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
