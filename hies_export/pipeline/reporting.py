"""Write the results of a run's stages as its report."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..calibrate.statistics import DEFAULT_NEEDS
from ..checkpoint.beside import read_card
from ..data.batches import has_references, samples_of
from ..data.rows import DataFacts
from ..evaluate.metrics import METRICS
from ..forms.machine import machine_facts
from ..report.card import render_card
from ..report.html import render_html, render_markdown
from ..report.provenance import RunRecord, model_of
from ..report.report import Details, FirstMetric, Report, head_map, neuron_counts, plan_counts
from ..report.words import FIRST_HIT
from ..select.plan import dump_json
from ..slim.config import is_slim
from .delivery import Delivery
from .measure import Measured
from .pruning import Pruning
from .stages import Choice, Evaluation, Slim


def build_report(
    pruning: Pruning,
    delivery: Delivery,
    choice: Choice,
    slim: Slim,
    evaluation: Evaluation,
    measured: Measured,
    command: str | None,
    processes: int,
) -> Report:
    """Return the report of a run from what all its stages returned, the command line and the number of processes."""
    plan, metric, sizes, exported = choice.plan, pruning.metrics[0], measured.sizes, measured.exported
    counts: dict[str, Any] = plan_counts(plan)
    differences: dict[str, Any] = {"onnx_max_abs": None}
    if exported.format in ("onnx", "gguf"):
        differences[f"{exported.format}_max_abs"] = exported.max_abs
    model, heads = model_of(delivery.dense), head_map(plan)
    low, high = evaluation.kept_ends or (None, None)
    assert delivery.source is not None
    summary, cascade = measured.cascade or (None, None)
    # Fields of some runs alone, which are left out of the report where they say nothing.
    optional: dict[str, Any] = {"neurons": neuron_counts(plan), "forms": measured.forms, "cascade": cascade}
    optional["deployment"] = measured.deployment
    graph_names = {"inputs": exported.inputs, "outputs": exported.outputs} if exported.inputs else {}
    details = Details(
        base_model=None if Path(model).exists() else model,
        head_map=heads,
        heads=_numbers_of_heads(choice, heads),
        outcome=measured.outcome,
        metrics=evaluation.metrics,
        compensation=slim.fits,
        logit_scale=slim.logit_scale,
        tried=choice.tried,
        stability_of=FIRST_HIT if evaluation.ranking else _prediction_name(pruning, delivery),
        stability_tolerance=evaluation.tolerance,
        kept_low=low,
        kept_high=high,
        custom_code=is_slim(slim.model),
        auto_class=pruning.task.auto_class,
        **{exported.format: {**graph_names, **exported.facts}},
        **{name: value for name, value in optional.items() if value},
        data=_data_facts(pruning, delivery, choice),
        run=asdict(RunRecord(command, delivery.source.commit)),
    )
    return Report(
        model=model,
        task=pruning.task.name,
        criterion=plan.criterion,
        alpha=plan.alpha,
        seed=plan.seed,
        **counts,
        vocabulary=None if pruning.trimming is None else pruning.trimming.facts,
        parameters=sizes.parameters,
        bytes=sizes.bytes,
        flops=sizes.flops,
        cache_bytes_per_token=sizes.cache_bytes_per_token,
        quality=FirstMetric(metric=metric, **asdict(evaluation.metrics[metric])),
        stability=evaluation.stability,
        cut_max_abs=slim.cut_max_abs,
        reload_max_abs=measured.saved.reload_max_abs,
        **differences,
        seconds=pruning.clock.seconds,
        latency=sizes.latency,
        environment={**machine_facts(), "processes": processes},
        exported=measured.file,
        cascade=summary,
        ranking=evaluation.ranking or None,
        details=details,
    )


def _numbers_of_heads(choice: Choice, modules: Container[str]) -> dict[str, dict[str, list[float]]]:
    """Return module -> statistic -> one number per head, for `modules` of heads; all neurons would fill megabytes."""
    assert choice.statistics is not None
    assert choice.scores is not None
    known = {**choice.statistics.values, "score": choice.scores.scores}
    shown = {name: known[name] for name in ("his", "entropy", "score") if name in known}
    return {
        module: {name: numbers[module].tolist() for name, numbers in shown.items() if module in numbers}
        for module in choice.scores.scores
        if module in modules
    }


def _data_facts(pruning: Pruning, delivery: Delivery, choice: Choice) -> DataFacts:
    """Return what the report says of the rows of each use."""
    assert choice.statistics is not None
    assert delivery.splits is not None
    rows, calibration, splits = pruning.rows, choice.statistics.calibration, delivery.splits
    data, evaluated, held_out = splits.data, splits.evaluation.split, splits.held_out
    return DataFacts(
        labels=choice.plan.calibration["labels"],
        calibration_samples=calibration.samples,
        compensation_samples=samples_of(rows.refit),
        evaluation_samples=samples_of(rows.evaluation),
        evaluation_of=delivery.evaluation_of,
        evaluation_split=evaluated,
        evaluation_labelled=has_references(rows.evaluation[0]),
        held_out_samples=samples_of(rows.held_out),
        held_out_split=splits.calibration.split if held_out is None else held_out.split,
        held_out_further=held_out is None,
        name=data.name,
        file=data.files[evaluated.partition("[")[0]].name if data.files else None,  # without a slice, as in "test[:9]"
        fingerprint=calibration.fingerprint,
    )


def write_choice(choice: Choice, folder: Path) -> None:
    """Write scores.json (statistics and scores per unit) and plan.json."""
    assert choice.statistics is not None
    assert choice.scores is not None
    statistics, scores, calibration = choice.statistics, choice.scores, choice.statistics.calibration
    written = {
        "criterion": scores.criterion,
        "parameters": scores.parameters,
        "scores": scores.scores,
        **{name: statistics.values.get(name, {}) for name in DEFAULT_NEEDS},
        "samples": calibration.samples,
        "labels": calibration.labels,
        "fingerprint": calibration.fingerprint,
        "tried": [asdict(candidate) for candidate in choice.tried],
    }
    (folder / "scores.json").write_text(dump_json(written), encoding="utf-8")
    (folder / "plan.json").write_text(choice.plan.to_json(), encoding="utf-8")


def write_report(folder: Path, report: Report) -> None:
    """Write report.json, report.html and report.md, and the model card of slim/."""
    origin = read_card(report.model)
    if not Path(report.model).exists():
        origin["base_model"] = report.model
    written = {
        "slim/README.md": render_card(report, origin=origin),
        "report.json": report.to_json(),
        "report.html": render_html(report),
        "report.md": render_markdown(report),
    }
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8")


def _prediction_name(pruning: Pruning, delivery: Delivery) -> str:
    """Return the report's word for one prediction: "choice", "answer", "label set", "next token" or "prediction"."""
    assert delivery.splits is not None
    if METRICS[pruning.metrics[0]].of == "choices":
        return "choice"
    return "answer" if delivery.splits.data.answer is not None else pruning.task.word
