"""Judge forms by their own predictions, and time them beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import FiniteFloat
from torch import Tensor

from ..data.batches import Batch
from ..evaluate.judge import Judge
from ..progress import SILENT, Progress
from .compare import compare_forms
from .form import Form
from .measure.counts import Ratio, Shape, Share, Size
from .measure.timing import Phase, Timing
from .on_rows import time_on_rows

# Enough to see which form is faster by more than a few percent.
QUICK = Timing(repeats=10)


@dataclass(frozen=True)
class FormTime:
    """Median time of a form at a shape, and its ratio to the first form's with a 95 % interval, as in `LatencyRow`.

    On rows, it is the mean time of a batch, and `sequence` the mean number of tokens of a row.
    """

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


@dataclass(frozen=True, kw_only=True)
class JudgedForm:
    """A form, judged on the evaluation rows and timed beside the others: an entry of `details.forms` in report.json.

    Attributes:
        model: "dense", "slim", or "cascade": the slim one, and the dense one for the rows that it is unsure of.
        runtime: Name of the runtime.
        bits: What its linear layers are computed in: "float32", "bfloat16", "float16" or "int8"; for a cascade, its
            slim part's.
        bytes: Size of the exported file; None if the runtime reads no export.
        quality: The first metric.
        metrics: All metrics, by name.
        stability: Share of predictions that equal the dense model's.
        stability_low, stability_high: Ends of its 95 % interval.
        times: A row for each shape and phase. For the first form, its control's.
        kept, at_least: If something is promised, the share that is kept on the held-out rows, as in `Judge.kept`, and
            the lower end of its 95 % interval.
    """

    model: Literal["dense", "slim", "cascade"]
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


def judge_forms(
    forms: Sequence[Form], judge: Judge, held_out: Judge | None = None, *, progress: Progress = SILENT
) -> list[JudgedForm]:
    """Judge what the forms of a run predict; `times` is empty. `held_out` judges what is promised, if anything is."""
    judged = []
    for form in forms:
        progress.stage(f"evaluate the {form.model} model on {form.runtime} in {form.bits}")
        judged.append(_judged(form, judge, held_out))
    return judged


def _judged(form: Form, judge: Judge, held_out: Judge | None) -> JudgedForm:
    predictions = form.predict(judge.batches, judge.task)
    quality, (low, high) = judge.of(predictions), judge.agreement_ends(predictions)
    kept, at_least = (None, None) if held_out is None else held_out.kept(form.predict(held_out.batches, judge.task))
    return JudgedForm(
        model=form.model,  # type: ignore[arg-type]  # one of a run
        runtime=form.runtime,
        bits=str(form.bits),
        bytes=form.bytes,
        quality=quality.metrics[judge.metrics[0]],
        metrics=quality.metrics,
        stability=quality.stability,
        times=[],
        stability_low=low,
        stability_high=high,
        kept=kept,
        at_least=at_least,
    )


def time_forms(
    forms: Sequence[Form],
    batches: Mapping[Shape, Mapping[str, Tensor]],
    *,
    timing: Timing = QUICK,
    decode: bool = False,
    progress: Progress = SILENT,
) -> list[list[FormTime]]:
    """Time forms as `compare_forms` does; return the times of each at every shape and phase.

    The first form's ratios are those of its control. A single form is timed beside itself.
    """
    beside = forms if len(forms) > 1 else [*forms, *forms]
    found = compare_forms(beside, batches, timing=timing, decode=decode, progress=progress)
    times: list[list[FormTime]] = [[] for _ in forms]
    for ((batch, sequence), phase), compared in found.items():
        for number, of_form in enumerate(times):
            one = compared[max(0, number - 1)]
            ms, ratio = (one.slim.p50_ms, one.ratio) if number else (one.dense.p50_ms, one.control)
            of_form.append(FormTime(batch, sequence, phase, ms, ratio.median, ratio.low, ratio.high, one.noisy))
    return times


def time_forms_on_rows(
    forms: Sequence[Form], rows: Mapping[int, Sequence[Batch]], *, progress: Progress = SILENT
) -> list[list[FormTime]]:
    """Time forms as `time_on_rows` does; return the times of each at every size of batches, as `time_forms` does."""
    found = time_on_rows(forms, rows, progress=progress)
    return [
        [
            FormTime(size, one.tokens, "rows", one.ms, one.ratio.median, one.ratio.low, one.ratio.high, one.noisy)
            for size, of_size in found.items()
            for one in (of_size[number],)
        ]
        for number in range(len(forms))
    ]


def deciding_step(forms: Sequence[JudgedForm]) -> int | None:
    """Return the first shape that was not too noisy to compare times at; None if all were, or there are no forms."""
    steps = range(len(forms[0].times)) if forms else ()
    return next((step for step in steps if not forms[0].times[step].noisy), None)


def relative_times(forms: Sequence[JudgedForm], step: int) -> list[float]:
    """Return the time of every form at a step relative to the first form's."""
    return ratios([form.times for form in forms], step)


def ratios(times: Sequence[Sequence[FormTime]], step: int = 0) -> list[float]:
    """Return the times of forms at a step relative to the first form's, whose own row is its control."""
    return [1.0, *(of_form[step].ratio for of_form in times[1:])]
