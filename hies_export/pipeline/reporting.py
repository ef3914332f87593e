"""Write the results of a run's stages as its report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.beside import read_card
from ..data.batches import has_references, samples_of
from ..data.splits import DataFacts
from ..evaluate.metrics import METRICS
from ..forms.cascade.facts import CascadeFacts, CascadeSummary
from ..forms.deployment import Deployment
from ..forms.exported import ExportedFile
from ..forms.exports import Exported
from ..forms.gguf.export import GgufExport
from ..forms.judge import Judged
from ..forms.measure.machine import machine_facts
from ..forms.measured import Measurements
from ..forms.onnx.export import OnnxExport
from ..kinds import ATTENTION
from ..report.card import render_card
from ..report.details import Details
from ..report.html import render_html
from ..report.jinja import render_markdown
from ..report.maps import head_map, neuron_counts
from ..report.provenance import RunRecord
from ..report.report import FirstMetric, Report, plan_counts
from ..report.text import FIRST_HIT
from ..slim.config import families, is_slim
from .prepare import Prepared
from .prune import PruneResult
from .resolve import Resolved
from .search import Evaluation
from .stages import Saved


@dataclass(frozen=True)
class Deployed:
    """How what a run exports predicts on the evaluation rows, and how fast it is."""

    file: ExportedFile
    forms: list[Judged]  # of both models, in several runtimes and bits
    deployment: Deployment | None  # which of them to deploy, if that was asked
    cascade: tuple[CascadeSummary, CascadeFacts] | None


@dataclass(frozen=True)
class Finished:
    """Everything that the stages of a run returned."""

    resolved: Resolved
    result: PruneResult
    saved: Saved
    evaluation: Evaluation
    exported: Exported
    deployed: Deployed
    measured: Measurements
    processes: int


def build_report(done: Finished, seconds: dict[str, float], command: str | None) -> Report:
    """Return the report of a run."""
    plan, measured, evaluation = done.result.plan, done.measured, done.evaluation
    metric = done.resolved.prepared.judged.metrics[0]
    heads, neurons = plan_counts(plan)
    return Report(
        model=done.resolved.request.model,
        task=done.resolved.prepared.task.name,
        criterion=plan.criterion,
        alpha=plan.alpha,
        seed=plan.seed,
        heads=heads,
        neurons=neurons,
        parameters=measured.parameters,
        bytes=measured.bytes,
        flops=measured.flops,
        cache_bytes_per_token=measured.cache_bytes_per_token,
        quality=FirstMetric(metric=metric, **asdict(evaluation.metrics[metric])),
        stability=evaluation.stability,
        cut_max_abs=done.result.slim.cut_max_abs,
        reload_max_abs=done.saved.reload_max_abs,
        **_export_differences(done.exported),
        seconds=seconds,
        latency=measured.latency,
        environment={**machine_facts(), "processes": done.processes},
        exported=done.deployed.file,
        cascade=done.deployed.cascade and done.deployed.cascade[0],
        ranking=evaluation.ranking or None,
        details=_details(done, command),
    )


def _details(done: Finished, command: str | None) -> Details:
    """Return the part of a report beyond the summary, for its renderings."""
    prepared, plan, evaluation = done.resolved.prepared, done.result.plan, done.evaluation
    choice, deployed = done.result.choice, done.deployed
    asked, answers = done.resolved.request, done.resolved.splits.data.answer is not None
    assert choice is not None
    neurons = neuron_counts(plan)
    return Details(
        base_model=None if Path(asked.model).exists() else asked.model,
        head_map=head_map(plan),
        # The statistics of all neurons would fill megabytes.
        heads={name: of for name, of in choice.head_numbers().items() if plan.kept[name].kind == ATTENTION},
        **({"neurons": neurons} if neurons else {}),
        outcome=done.result.outcome,
        metrics=evaluation.metrics,
        benchmarks=evaluation.benchmarks,
        uncompensated=evaluation.uncompensated,
        compensation=done.result.fits,
        alpha_curve=choice.alpha_curve,
        tried=choice.tried,
        stability_of=FIRST_HIT if evaluation.ranking else _prediction_name(prepared, answers=answers),
        stability_tolerance=evaluation.tolerance,
        custom_code=is_slim(done.result.model),
        family=families(prepared.model.config, done.result.model.config),
        flops_per_layer=done.measured.flops_per_layer,
        auto_class=prepared.task.auto_class,
        **_export_details(done.exported),
        **({"forms": deployed.forms} if deployed.forms else {}),
        **({"deployment": deployed.deployment} if deployed.deployment else {}),
        **({"cascade": deployed.cascade[1]} if deployed.cascade else {}),
        **({"row_length": prepared.length} if prepared.length else {}),
        data=_data_facts(done),
        run=asdict(RunRecord.of(asked, command=command, commit=done.resolved.source.commit)),
    )


def _data_facts(done: Finished) -> DataFacts:
    """Return which rows the run read, and what for."""
    assert done.result.choice is not None
    rows, calibration = done.resolved.prepared.rows, done.result.choice.statistics.calibration
    splits = done.resolved.splits
    data, split, held_out = splits.data, splits.evaluation.split, splits.held_out
    return DataFacts(
        labels=done.result.plan.calibration["labels"],
        calibration_samples=calibration.samples,
        calibration_batch=calibration.batch_size,
        calibration_batch_asked=min(splits.calibration.batch_size, calibration.samples),
        compensation_samples=samples_of(rows.compensation),
        evaluation_samples=samples_of(done.resolved.evaluation),
        evaluation_of=done.resolved.evaluation_of,
        evaluation_rows=splits.evaluation.rows,
        evaluation_split=split,
        evaluation_labelled=has_references(done.resolved.evaluation[0]),
        held_out_samples=samples_of(rows.held_out),
        held_out_split=splits.calibration.split if held_out is None else held_out.split,
        held_out_further=held_out is None,
        name=data.name,
        file=data.files[split.partition("[")[0]].name if data.files else None,
        fingerprint=calibration.fingerprint,
    )


def _export_differences(exported: Exported) -> dict[str, float | None]:
    """Return how far the exported model's outputs are from torch's, as fields of a report."""
    if not isinstance(exported, GgufExport):
        return {"onnx_max_abs": exported.max_abs}
    return {"onnx_max_abs": None, "gguf_max_abs": exported.parity.max_abs if exported.parity else None}


def _export_details(exported: Exported) -> dict[str, Any]:
    """Return the report's details about the exported model."""
    if isinstance(exported, GgufExport):
        parity = asdict(exported.parity) if exported.parity else None
        return {"gguf": {"architecture": exported.architecture, "types": exported.types, "parity": parity}}
    assert isinstance(exported, OnnxExport)  # OpenVINO's format is made from it
    return {"onnx": {"inputs": exported.inputs, "outputs": exported.outputs, "fused": exported.fused_ops}}


def write_report(folder: Path, report: Report) -> None:
    """Write report.json, report.html and report.md, and the model card of slim/."""
    origin = read_card(report.model)
    if not Path(report.model).exists():
        origin["base_model"] = report.model
    (folder / "slim" / "README.md").write_text(render_card(report, origin=origin), encoding="utf-8")
    (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
    (folder / "report.html").write_text(render_html(report), encoding="utf-8")
    (folder / "report.md").write_text(render_markdown(report), encoding="utf-8")


def _prediction_name(prepared: Prepared, *, answers: bool) -> str:
    """Return the report's word for one prediction: "choice", "answer", "label set", "next token" or "prediction"."""
    if METRICS[prepared.judged.metrics[0]].of == "choices":
        return "choice"
    if answers:
        return "answer"
    return prepared.judged.task.word
