"""Judge forms (models on runtimes) and exported files by their own predictions, as report.json has the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..evaluate.judge import Judge
from ..progress import SILENT, Progress
from ..units.counts import Count, Ratio, Record, Share, Size
from .cascade.export import CascadeForm
from .form import Form, Forms
from .formats import Export, runtime_of
from .runtimes.base import RUNTIMES
from .runtimes.ort import ONNX_FILE
from .time import TimedRow


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A form, judged on the evaluation rows and timed beside the others: an entry of `details.forms` in report.json.

    Attributes:
        model: "dense", "slim" or "cascade".
        bits: What its linear layers are computed in: "float32", "bfloat16", "float16" or "int8"; for a cascade, its
            slim part's.
        bytes: Size of the exported file; None if the runtime reads no export.
        quality: The first of the metrics.
        stability: Share of predictions that equal the dense model's.
        stability_low, stability_high: Ends of its 95 % interval.
        times: A row for each shape and phase; of a form that is no candidate to deploy, for the first one only. For the
            first form, its control's.
        kept, at_least: The share that is kept on the held-out rows, as in `Judge.kept`, and the lower end of its 95 %
            interval; None if nothing is promised.
    """

    model: str
    runtime: str
    bits: str
    bytes: Size | None
    quality: float
    stability: Share
    stability_low: Share
    stability_high: Share
    times: list[TimedRow]
    metrics: Mapping[str, float] = field(default_factory=dict)
    kept: Ratio | None = None
    at_least: Ratio | None = None


@dataclass(frozen=True, eq=False)
class Metric(Record):
    """A metric by name, and its value."""

    metric: str
    value: float


@dataclass(frozen=True, eq=False)
class ExportedFile(Record):
    """The slim model's export, run on the evaluation rows as it will be deployed.

    Attributes:
        file: Its path relative to the folder of the run.
        format: A name in `FORMATS`.
        quantize: "int8" or "int4" if its linear layers are in 8 or 4 bits.
        bytes: Size of graph and weights.
        quality: The first metric; None if no runtime here gives the file's logits (GGUF, models in several graphs).
        stability: Share of predictions that equal the dense model's; None with `quality`.
        layers: Number of linear layers by dtype, if some are quantised.
        float_neurons: Number of neurons that are computed in float32 inside quantised layers. On ONNX Runtime it is 0:
            with a scale for each token, an outlier takes no range from other tokens.
    """

    file: str
    format: str
    quantize: str | None
    bytes: Size
    quality: Metric | None
    stability: float | None
    layers: Mapping[str, Count] | None
    float_neurons: Count | None


def judge(
    forms: Sequence[Form], evaluation: Judge, held_out: Judge | None = None, *, progress: Progress = SILENT
) -> list[Judged]:
    """Judge every form by its predictions on the evaluation and, if given, the held-out rows; `times` stay empty."""
    judged = []
    for form in forms:
        progress.stage(f"evaluate the {form.model} model on {form.runtime} in {form.bits}")
        predictions = form.predict(evaluation.batches, evaluation.task, progress)
        quality, (low, high) = evaluation.of(predictions), evaluation.agreement_ends(predictions)
        kept, at_least = None, None
        if held_out is not None:
            kept, at_least = held_out.kept(form.predict(held_out.batches, held_out.task, progress))
        judged.append(
            Judged(
                model=form.model,
                runtime=form.runtime,
                bits=str(form.bits),
                bytes=form.bytes,
                quality=quality.metrics[evaluation.metrics[0]],
                metrics=quality.metrics,
                stability=quality.stability,
                times=[],
                stability_low=low,
                stability_high=high,
                kept=kept,
                at_least=at_least,
            )
        )
    return judged


def with_times(judged: Sequence[Judged], timed: Sequence[Sequence[TimedRow]]) -> list[Judged]:
    """Return the judged forms with the times of each."""
    return [replace(form, times=[*times]) for form, times in zip(judged, timed, strict=True)]


def judge_exported(exported: Export, folder: Path, judge: Judge, forms: Sequence[Judged]) -> ExportedFile:
    """Return the exported file of a run with its quality on the evaluation rows.

    The quality is that of a form that ran the file if there is one; else an export that is not quantised is run.
    """
    metric, how, quantize = judge.metrics[0], exported.how, exported.how.quantize
    runtime, bits = (exported.checked_on, how.dtype) if quantize is None else (runtime_of(how, quantize), quantize)
    quality, stability = None, None
    alone = [form for form in forms if form.model != CascadeForm.name]
    matches = [form for form in alone if (form.runtime, form.bits) == (runtime, bits)]
    if matches:
        # The last one is the slim model or, if nothing was cut, the dense one, which is then the same.
        quality, stability = matches[-1].quality, matches[-1].stability
    elif quantize is None and runtime is not None:
        result = judge.of(Form("slim", runtime, exported.folder).predict(judge.batches, judge.task))
        quality, stability = result.metrics[metric], result.stability
    return ExportedFile(
        file=exported.file.relative_to(folder).as_posix(),
        format=exported.format,
        quantize=quantize,
        bytes=exported.bytes,
        quality=None if quality is None else Metric(metric, quality),
        stability=stability,
        layers=exported.facts.get("layers"),
        float_neurons=exported.facts.get("float_neurons", 0) if quantize else None,
    )


def keep_file(forms: Forms, form: Judged, folder: Path, *, same: bool) -> str | None:
    """Return the path of a form's file relative to a run's folder; an export that lies elsewhere is moved there.

    In torch it is "slim", a checkpoint; None for the dense model. If nothing was cut (`same`), slim files do for both.
    """
    if form.model == CascadeForm.name:
        return f"{CascadeForm.folder}/{ONNX_FILE}"
    if RUNTIMES[form.runtime].reads_models:
        return "slim" if same or form.model == "slim" else None
    export = forms.export("slim" if same else form.model, forms.options_for(form.runtime, form.bits))
    kept = export.folder
    if kept.parent != folder:
        kept = kept.rename(folder / f"{form.model}-{export.format}-{form.bits}")
    return (kept.relative_to(folder) / export.file.relative_to(export.folder)).as_posix()


def frontier(times: Sequence[float], kept: Sequence[float]) -> list[int]:
    """Return indices of forms on the Pareto frontier of time and share of kept answers, fastest first; no equals."""
    best, indices = -1.0, []
    for index in sorted(range(len(times)), key=lambda index: (times[index], -kept[index])):
        if kept[index] > best:  # of equal forms, the first one is on the frontier
            best = kept[index]
            indices.append(index)
    return indices
