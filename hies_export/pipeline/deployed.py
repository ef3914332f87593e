"""Run exported models on the evaluation rows, as they will be deployed, and time them beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..cascade.export import CascadeOptions
from ..data.batches import Batch
from ..evaluate.judge import Judge
from ..gguf.export import GgufExport
from ..measure.compare import Step, compare_forms
from ..measure.exports import Exported
from ..measure.forms import Forms
from ..measure.latency import LatencyComparison
from ..measure.on_rows import RowsTime, time_on_rows
from ..measure.timing import Timing
from ..onnx.export import OnnxExport
from ..onnx.quantize import Quantize
from ..report.details import CascadeFacts, Deployment, Form, FormTime
from ..report.report import CascadeSummary, ExportedFile, Metric
from ..runtimes.base import RUNTIMES
from ..runtimes.ort import ONNX_FILE, OnnxRuntime
from ..runtimes.registry import Served
from .answer import Answer, Decided
from .cascade import CASCADE, cascade_facts, write_cascade
from .measure import MeasureOptions
from .prepare import Prepared
from .resolve import Resolved
from .serving import predict_served

# Sizes of the batches in which a cascade is timed on the rows.
BATCHES = (1, 8, 32)
# The form that forms of a quantised model are compared with, and the runtime for each number of bits.
_FULL = ("onnxruntime-cpu", "float32")
_QUANTIZED = {"int8": "onnxruntime-cpu-int8", "int4": "onnxruntime-cpu"}


@dataclass(frozen=True)
class Deployed:
    """How what a run exports predicts on the evaluation rows, and how fast it is."""

    file: ExportedFile
    forms: list[Form]  # of both models, in several runtimes and bits
    deployment: Deployment | None  # which of them to deploy, if that was asked
    cascade: tuple[CascadeSummary, CascadeFacts] | None


def judge_deployed(
    resolved: Resolved,
    forms: Forms,
    judge: Judge,
    decided: Decided,
    answers: torch.Tensor | None,
    folder: Path,
    *,
    same: bool,
) -> Deployed:
    """Judge and time all exports of a run, and write the cascade of both models if one is asked for.

    Args:
        resolved: The dense model, the rows to time a cascade on, and what to measure.
        forms: Both models, "dense" and "slim", and their exports.
        judge: The judge on the evaluation rows.
        decided: The cascade, and the promise that a deployment keeps.
        answers: The dense model's logits of the rows that a cascade promises on.
        folder: The folder of the run.
        same: Whether nothing was cut.
    """
    prepared, options, asked = resolved.prepared, forms.exporter.options, decided.cascade
    answer = decided if isinstance(decided, Answer) else None
    joined, cascades, rows = None, [], None
    if asked is not None and answers is not None:
        forms.progress.stage("join both models in a cascade, and compare it with them")
        joined = write_cascade(prepared, forms, asked, answers, folder)
        cascades.append((Served(asked.runtime, joined.folder, asked.bits), joined.bytes))
        rows = {size: resolved.in_order(size) for size in BATCHES}
    judged = judge_forms(
        prepared,
        forms,
        judge,
        form_ways(resolved.measure, options.quantize, asked) if answer is None else answer.ways,
        resolved.measure.timing,
        None if answer is None else answer.dense.judge,
        same=same,
        cascades=cascades,
        rows=rows,
    )
    deployment = cascade = None
    if answer is not None:
        deployment = answer.outcome(judged, lambda form: keep_file(forms, form, folder, same=same))
    if asked is not None and joined is not None:
        cascade = cascade_facts(asked, joined, forms, judge.batches, judged[-1].stability, decided.sizes)
    exported = judge_exported(forms.export("slim", options), folder, judge, judged)
    return Deployed(exported, judged, deployment, cascade)


def form_ways(
    options: MeasureOptions, quantize: Quantize | None, cascade: CascadeOptions | None = None
) -> list[tuple[str, str]]:
    """Return the runtimes and bits to judge both models in: those measured, those exported, and float32.

    Empty if all are float32, unless a cascade is compared with them.
    """
    ways = [(name, dtype) for name, dtype in options.ways if dtype is not None]
    if quantize is not None:
        fewer = [way for way in ways if way[1] != "float32"]
        ways = [_FULL, (_QUANTIZED[quantize], quantize), *fewer]
    if cascade is not None:
        own = [] if cascade.quantize else [(cascade.runtime, cascade.bits)]
        ways = list(dict.fromkeys([_FULL, *ways, *own]))
    elif all(dtype == "float32" for _, dtype in ways):
        return []
    return ways


def judge_forms(
    prepared: Prepared,
    forms: Forms,
    judge: Judge,
    ways: Sequence[tuple[str, str]],
    timing: Timing,
    held_out: Judge | None = None,
    *,
    same: bool = False,
    cascades: Sequence[tuple[Served, int]] = (),
    rows: Mapping[int, Sequence[Batch]] | None = None,
) -> list[Form]:
    """Judge and time both models in several forms, all in one interleaved run; `held_out` also judges the promise.

    If both are the `same`, because nothing was cut, only the dense one is judged. Models in several graphs have no
    forms. Cascades, with the size of their files, come last. All are timed on `rows` (batches by their size) if given,
    and otherwise on the batches to measure with.
    """
    if prepared.task.in_parts:
        return []
    progress = forms.progress
    found: list[tuple[Literal["dense", "slim", "cascade"], Served, int | None]] = []
    both: tuple[Literal["dense", "slim"], ...] = ("dense",) if same else ("dense", "slim")
    for way in ways:
        found += [(name, forms.served(name, *way), forms.bytes_of(name, *way)) for name in both]
    found += [("cascade", served, size) for served, size in cascades]
    qualities, ends = [], []
    for model, served, _ in found:
        progress.stage(f"evaluate the {model} model on {served.runtime} in {served.dtype}")
        predictions = predict_served(served, judge.batches)
        qualities.append(judge.of(predictions))
        kept = (None, None) if held_out is None else held_out.kept(predict_served(served, held_out.batches))
        low, high = judge.kept_ends(predictions)
        ends.append({"stability_low": low, "stability_high": high, "kept": kept[0], "at_least": kept[1]})
    if not found:
        return []
    progress.stage("time all forms of both models")
    timed = [served for _, served, _ in found]
    # A single form is timed beside itself.
    timed = timed if len(timed) > 1 else timed * 2
    if rows is None:
        compared = compare_forms(timed, prepared.measured, timing=timing, progress=progress)
        times = [[_time(step, found, index) for step, found in compared.items()] for index in range(len(timed))]
    else:
        on_rows = time_on_rows(timed, rows, progress=progress)
        times = [[_time_on_rows(size, found[index]) for size, found in on_rows.items()] for index in range(len(timed))]
    return [
        Form(
            model=model,
            runtime=served.runtime,
            bits=str(served.dtype),
            bytes=size,
            quality=quality.metrics[judge.metrics[0]],
            stability=quality.stability,
            times=times[index],
            **ends[index],
        )
        for index, ((model, served, size), quality) in enumerate(zip(found, qualities, strict=True))
    ]


def keep_file(forms: Forms, form: Form, folder: Path, *, same: bool = False) -> str:
    """Return the file of a form in the folder of a run, after moving its export there if it lies elsewhere.

    If both models are the `same`, the slim one's file is that of the dense one too.
    """
    if form.model == "cascade":
        return f"{CASCADE}/{ONNX_FILE}"
    export = forms.export("slim" if same else form.model, forms.read_by(form.runtime, form.bits))
    place = export.folder
    if place.parent != folder:
        kind = "gguf" if isinstance(export, GgufExport) else "onnx"
        place = place.rename(folder / f"{form.model}-{kind}-{form.bits}")
    return (place.relative_to(folder) / export.file.relative_to(export.folder)).as_posix()


def _time(step: Step, found: Sequence[LatencyComparison], index: int) -> FormTime:
    """Return the time of a form; for the first form, the control's ratio."""
    (batch, sequence), phase = step
    one = found[max(0, index - 1)]
    ms, ratio = (one.slim.p50_ms, one.ratio) if index else (one.dense.p50_ms, one.control)
    return FormTime(batch, sequence, phase, ms, ratio.median, ratio.low, ratio.high, one.noisy)


def _time_on_rows(size: int, found: RowsTime) -> FormTime:
    """Return the time of a form on the rows; for the first form, the control's ratio."""
    ratio = found.ratio
    return FormTime(size, found.tokens, "rows", found.ms, ratio.median, ratio.low, ratio.high, found.noisy)


def judge_exported(exported: Exported, folder: Path, judge: Judge, forms: Sequence[Form]) -> ExportedFile:
    """Return the exported file of a run with its quality on the evaluation rows; it is not run again if a form was."""
    quantize = None if isinstance(exported, GgufExport) else exported.quantize
    metric, known = judge.metrics[0], []
    if quantize is not None:
        # If nothing was cut, the last form in these bits is the dense one's.
        known = [(form.quality, form.stability) for form in forms if form.bits == quantize][-1:]
    elif (runtime := _runtime_of(exported)) is not None:
        found = judge.of(predict_served(Served(runtime, exported.folder), judge.batches))
        known = [(found.metrics[metric], found.stability)]
    quality, stability = known[0] if known else (None, None)
    return ExportedFile(
        file=exported.file.relative_to(folder).as_posix(),
        format="gguf" if isinstance(exported, GgufExport) else "onnx",
        quantize=quantize,
        bytes=exported.bytes,
        quality=None if quality is None else Metric(metric, quality),
        stability=stability,
        layers=exported.layers if quantize and isinstance(exported, OnnxExport) else None,
        float_neurons=0 if quantize else None,
    )


def _runtime_of(exported: Exported) -> str | None:
    """Return the runtime on which an export was compared with torch; None if it was not, or has several graphs."""
    if isinstance(exported, GgufExport):
        return None if exported.parity is None else "llamacpp"
    if len(exported.files) > 1:
        return None
    known = {name: runtime.requested for name, runtime in RUNTIMES.items() if issubclass(runtime, OnnxRuntime)}
    return next((name for name, provider in known.items() if provider == exported.checked_on), None)
