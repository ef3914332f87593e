"""Write the results of a run's stages as its report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..checkpoint.beside import read_card
from ..data.batches import has_references, samples_of
from ..data.rows import DataFacts
from ..evaluate.metrics import METRICS
from ..forms.formats import Export
from ..forms.machine import machine_facts
from ..kinds import ATTENTION
from ..report.card import render_card
from ..report.html import render_html, render_markdown
from ..report.provenance import RunRecord
from ..report.report import Details, FirstMetric, Report, head_map, neuron_counts, plan_counts
from ..report.words import FIRST_HIT
from ..slim.config import families, is_slim
from .job import Job
from .measure import Measured
from .stages import Choice, Evaluation, Saved, Slim


def build_report(
    job: Job,
    choice: Choice,
    slim: Slim,
    saved: Saved,
    evaluation: Evaluation,
    measured: Measured,
    *,
    command: str | None,
    processes: int,
) -> Report:
    """Return the report of a run: the only place that knows what all its stages returned."""
    plan, metric, sizes = choice.plan, job.metrics[0], measured.sizes
    heads, neurons = plan_counts(plan)
    assert job.asked is not None
    return Report(
        model=job.asked.model,
        task=job.task.name,
        criterion=plan.criterion,
        alpha=plan.alpha,
        seed=plan.seed,
        heads=heads,
        neurons=neurons,
        vocabulary=None if job.trimming is None else job.trimming.facts,
        parameters=sizes.parameters,
        bytes=sizes.bytes,
        flops=sizes.flops,
        cache_bytes_per_token=sizes.cache_bytes_per_token,
        quality=FirstMetric(metric=metric, **asdict(evaluation.metrics[metric])),
        stability=evaluation.stability,
        cut_max_abs=slim.cut_max_abs,
        reload_max_abs=saved.reload_max_abs,
        **_export_differences(measured.exported),
        seconds=job.clock.seconds,
        latency=sizes.latency,
        environment={**machine_facts(), "processes": processes},
        exported=measured.file,
        **measured.compound[0],
        ranking=evaluation.ranking or None,
        details=_details(job, choice, slim, evaluation, measured, command),
    )


def _details(
    job: Job, choice: Choice, slim: Slim, evaluation: Evaluation, measured: Measured, command: str | None
) -> Details:
    plan, asked, neurons = choice.plan, job.asked, neuron_counts(choice.plan)
    low, high = evaluation.kept_ends or (None, None)
    assert asked is not None
    assert job.source is not None
    return Details(
        base_model=None if Path(asked.model).exists() else asked.model,
        head_map=head_map(plan),
        # The statistics of all neurons would fill megabytes.
        heads={name: of for name, of in choice.head_numbers().items() if plan.kept[name].kind == ATTENTION},
        **({"neurons": neurons} if neurons else {}),
        outcome=measured.outcome,
        metrics=evaluation.metrics,
        uncompensated=evaluation.uncompensated,
        compensation=slim.fits,
        alpha_curve=choice.alpha_curve,
        tried=choice.tried,
        stability_of=FIRST_HIT if evaluation.ranking else _prediction_name(job),
        stability_tolerance=evaluation.tolerance,
        kept_low=low,
        kept_high=high,
        custom_code=is_slim(slim.model),
        family=families(job.model.config, slim.model.config),
        flops_per_layer=measured.sizes.flops_per_layer,
        auto_class=job.task.auto_class,
        **_export_details(measured.exported),
        **({"forms": measured.forms} if measured.forms else {}),
        **({"deployment": measured.deployment} if measured.deployment else {}),
        **measured.compound[1],
        **({"row_length": job.length} if job.length else {}),
        data=_data_facts(job, choice),
        run=asdict(RunRecord.of(asked, command=command, commit=job.source.commit)),
    )


def _data_facts(job: Job, choice: Choice) -> DataFacts:
    assert choice.statistics is not None
    assert job.rows.splits is not None
    rows, calibration, splits = job.rows, choice.statistics.calibration, job.rows.splits
    data, split, held_out = splits.data, splits.evaluation.split, splits.held_out
    return DataFacts(
        labels=choice.plan.calibration["labels"],
        calibration_samples=calibration.samples,
        compensation_samples=samples_of(rows.refit),
        evaluation_samples=samples_of(rows.evaluation),
        evaluation_of=rows.evaluation_of,
        evaluation_rows=splits.evaluation.rows,
        evaluation_split=split,
        evaluation_labelled=has_references(rows.evaluation[0]),
        held_out_samples=samples_of(rows.held_out),
        held_out_split=splits.calibration.split if held_out is None else held_out.split,
        held_out_further=held_out is None,
        name=data.name,
        file=data.files[split.partition("[")[0]].name if data.files else None,
        fingerprint=calibration.fingerprint,
    )


def _export_differences(exported: Export) -> dict[str, Any]:
    """Return how far the exported model's outputs are from torch's, as fields of a report."""
    found = {"onnx": None, exported.format: exported.max_abs}
    return {f"{format}_max_abs": found[format] for format in ("onnx", "gguf") if format in found}


def _export_details(exported: Export) -> dict[str, Any]:
    names = {"inputs": exported.inputs, "outputs": exported.outputs} if exported.inputs else {}
    return {exported.format: {**names, **exported.facts}}


def write_report(folder: Path, report: Report) -> None:
    """Write report.json, report.html and report.md, and the model card of slim/."""
    origin = read_card(report.model)
    if not Path(report.model).exists():
        origin["base_model"] = report.model
    (folder / "slim" / "README.md").write_text(render_card(report, origin=origin), encoding="utf-8")
    (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
    (folder / "report.html").write_text(render_html(report), encoding="utf-8")
    (folder / "report.md").write_text(render_markdown(report), encoding="utf-8")


def _prediction_name(job: Job) -> str:
    """Return the report's word for one prediction: "choice", "answer", "label set", "next token" or "prediction"."""
    assert job.rows.splits is not None
    if METRICS[job.metrics[0]].of == "choices":
        return "choice"
    return "answer" if job.rows.splits.data.answer is not None else job.task.word
