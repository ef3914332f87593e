"""Judge forms and files by their own predictions, and write what was judged and timed as report.json has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import FiniteFloat

from ..errors import one_of
from ..evaluate.judge import Judge
from ..progress import SILENT, Progress
from ..units.counts import Count, Ratio, Record, Share, Size
from .form import COMPOUNDS, Form, Forms
from .formats import Export, runtime_of
from .runtimes.base import RUNTIMES
from .runtimes.ort import ONNX_FILE
from .time import Phase, Timed

# The folder of the slim checkpoint in that of a run.
SLIM = "slim"


@dataclass(frozen=True)
class FormTime:
    """The time of a form at a shape, and its ratio to the first form's with a 95 % interval, as in `Timed`."""

    batch: int
    sequence: int
    phase: Phase
    ms: FiniteFloat
    ratio: Ratio
    ratio_low: Ratio
    ratio_high: Ratio
    noisy: bool

    def __post_init__(self) -> None:
        if self.ratio_low > self.ratio_high:
            raise ValueError(f"ratio_low must be at most ratio_high, got {self.ratio_low} and {self.ratio_high}")

    @classmethod
    def of(cls, timed: Timed) -> FormTime:
        """Return a time as report.json has it."""
        return cls(*timed.shape, timed.phase, timed.ms, timed.ratio, timed.low, timed.high, timed.noisy)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A form, judged on the evaluation rows and timed beside the others: an entry of `details.forms` in report.json.

    Attributes:
        model: "dense", "slim", or the name of a compound of both.
        runtime: Name of the runtime.
        bits: What its linear layers are computed in: "float32", "bfloat16", "float16" or "int8"; for a compound, its
            slim part's.
        bytes: Size of the exported file; None if the runtime reads no export.
        quality: The first metric.
        metrics: All metrics, by name.
        stability: Share of predictions that equal the dense model's.
        stability_low, stability_high: Ends of its 95 % interval.
        times: A row for each shape and phase; of a form that is no candidate to deploy, for the first one only. For the
            first form, its control's.
        kept, at_least: If something is promised, the share that is kept on the held-out rows, as in `Judge.kept`, and
            the lower end of its 95 % interval.
    """

    model: str
    runtime: str
    bits: str
    bytes: Size | None
    quality: float
    stability: Share
    times: list[FormTime]
    metrics: Mapping[str, float] = field(default_factory=dict)
    stability_low: Share | None = None
    stability_high: Share | None = None
    kept: Ratio | None = None
    at_least: Ratio | None = None

    def __post_init__(self) -> None:
        if self.model not in (known := ("dense", "slim", *COMPOUNDS)):
            raise ValueError(one_of("model", known, self.model))


@dataclass(frozen=True, eq=False)
class Metric(Record):
    """A metric by name, and its value."""

    metric: str
    value: float


@dataclass(frozen=True, eq=False)
class ExportedFile(Record):
    """The slim model's export, run on the evaluation rows as it will be deployed.

    Attributes:
        file: Where it is in the folder of the run.
        format: A name in `FORMATS`, such as "onnx", "openvino" or "gguf".
        quantize: "int8" if its linear layers are in 8 bits.
        bytes: Size of graph and weights.
        quality: The first metric; None if no runtime here gives the file's logits (GGUF, models in several graphs).
        stability: Share of predictions that equal the dense model's; None with `quality`.
        layers: Number of linear layers by dtype, if some are in 8 bits.
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
    forms: Sequence[Form], rows: Judge, held_out: Judge | None = None, *, progress: Progress = SILENT
) -> list[Judged]:
    """Judge every form by its own predictions on `rows`, and by `held_out`, if given, what it keeps of a promise.

    `times` is left empty.
    """
    judged = []
    for form in forms:
        progress.stage(f"evaluate the {form.model} model on {form.runtime} in {form.bits}")
        predictions = form.predict(rows.batches, rows.task, progress)
        quality, (low, high) = rows.of(predictions), rows.agreement_ends(predictions)
        promised = None if held_out is None else held_out.kept(form.predict(held_out.batches, held_out.task, progress))
        kept, at_least = promised or (None, None)
        judged.append(
            Judged(
                model=form.model,
                runtime=form.runtime,
                bits=str(form.bits),
                bytes=form.bytes,
                quality=quality.metrics[rows.metrics[0]],
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


def with_times(judged: Sequence[Judged], timed: Sequence[Timed]) -> list[Judged]:
    """Return what was judged of forms with the times that `time` gave of them."""
    return [
        replace(form, times=[FormTime.of(one) for one in timed[number :: len(judged)]])
        for number, form in enumerate(judged)
    ]


def judge_exported(exported: Export, folder: Path, judge: Judge, forms: Sequence[Judged]) -> ExportedFile:
    """Return the exported file of a run with its quality on the evaluation rows, that of a form that ran it if any."""
    metric, how, quantize = judge.metrics[0], exported.how, exported.how.quantize
    own = (exported.checked_on, how.dtype) if quantize is None else (runtime_of(how, quantize), quantize)
    # If nothing was cut, the last form in these bits is the dense one's.
    models = [form for form in forms if form.model not in COMPOUNDS and (form.runtime, form.bits) == own]
    known = [(form.quality, form.stability) for form in models[-1:]]
    if not known and quantize is None and exported.checked_on is not None:
        found = judge.of(Form("slim", exported.checked_on, exported.folder).predict(judge.batches, judge.task))
        known = [(found.metrics[metric], found.stability)]
    quality, stability = known[0] if known else (None, None)
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
    """Return the file of a form in the folder of a run, after moving its export there if it lies elsewhere.

    If both models are the `same`, the slim one's file is that of the dense one too. In torch, the file of the slim
    model is its checkpoint, and the dense one has none there.
    """
    if form.model in COMPOUNDS:
        return f"{COMPOUNDS[form.model].folder}/{ONNX_FILE}"
    if RUNTIMES[form.runtime].reads_models:
        return SLIM if same or form.model == "slim" else None
    export = forms.export("slim" if same else form.model, forms.read_by(form.runtime, form.bits))
    place = export.folder
    if place.parent != folder:
        place = place.rename(folder / f"{form.model}-{export.format}-{form.bits}")
    return (place.relative_to(folder) / export.file.relative_to(export.folder)).as_posix()


def frontier(times: Sequence[float], same: Sequence[float]) -> list[int]:
    """Return the numbers of forms on the Pareto frontier of time and agreement, fastest first; of equals the first."""
    best, line = -1.0, []
    for number in sorted(range(len(times)), key=lambda number: (times[number], -same[number])):
        if same[number] > best:
            best = same[number]
            line.append(number)
    return line


def deciding_step(forms: Sequence[Judged]) -> int | None:
    """Return the first shape that was not too noisy to compare times at; None if all were, or there are no forms."""
    steps = range(len(forms[0].times)) if forms else ()
    return next((step for step in steps if not forms[0].times[step].noisy), None)


def relative_times(forms: Sequence[Judged], step: int) -> list[float | None]:
    """Return the times of forms at a step relative to the first form's, which counts as 1; None where unknown."""
    return [1.0, *(form.times[step].ratio if step < len(form.times) else None for form in forms[1:])]
