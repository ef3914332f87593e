"""`details` of report.json: the content of the renderings beyond the summary, built by a run or read from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, FailFast, Field, FiniteFloat, field_serializer, model_validator

from ..evaluate.judge import AlphaPoint, Quality, Tried
from ..measure.contention import OtherWork
from ..measure.counts import Both, Count, LayerFlops, Ratio, Shape, Share, Size
from ..measure.timing import Phase
from ..outcomes import BudgetOutcome, CostOutcome, KeepOutcome, MaxDropOutcome, Outcome
from ..slim.refit import LayerFit

Marks = Annotated[str, Field(pattern="^[■·]{1,16384}$")]
Numbers = dict[str, Annotated[list[FiniteFloat], FailFast()]]
"""Module -> one number per unit."""


@dataclass(frozen=True)
class NeuronCount:
    """How many neurons of a feed-forward block stay, and how many it had."""

    kept: Count
    total: Annotated[Count, Field(ge=1)]

    def __post_init__(self) -> None:
        if self.kept > self.total:
            raise ValueError(f"kept must be at most total, got {self.kept} of {self.total}")


@dataclass(frozen=True)
class Family:
    """Model types of both models; they differ if the slim one was written as a sibling."""

    dense: str
    slim: str


@dataclass(frozen=True)
class FlopsByLayer:
    """FLOPs of both models by layer, for one forward pass at `shape`, (batch, sequence)."""

    dense: list[LayerFlops]
    slim: list[LayerFlops]
    shape: Shape

    def __post_init__(self) -> None:
        if len(self.dense) != len(self.slim):
            raise ValueError(f"dense and slim must have as many layers, got {len(self.dense)} and {len(self.slim)}")


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Which rows units were scored on, plans were judged on (held out), and metrics were measured on.

    `labels` are "data" or the model's own "predictions"; `evaluation_of` is how many samples the split has; without
    labels (`evaluation_labelled`), metrics compare both models with the dense model's own predictions; held-out rows
    are `further` rows if they come from the calibration split; `name` is on the Hub, and `fingerprint` is that of the
    calibration batches.
    """

    labels: str
    calibration_samples: int
    calibration_batch: int
    calibration_batch_asked: int
    compensation_samples: int
    evaluation_samples: int
    evaluation_of: int
    evaluation_rows: Literal["drawn", "first"]
    evaluation_split: str
    evaluation_labelled: bool = True
    held_out_samples: int
    held_out_split: str
    held_out_further: bool
    name: str | None
    file: str | None
    fingerprint: str


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
class Form:
    """A model as a runtime serves it, judged on the evaluation rows and timed beside the others.

    Attributes:
        model: "dense", "slim", or "cascade": the slim one, and the dense one for the rows that it is unsure of.
        runtime: Name of the runtime.
        bits: What its linear layers are computed in: "float32", "bfloat16", "float16" or "int8"; for a cascade, its
            slim part's.
        bytes: Size of the exported file; None if the runtime reads no export.
        quality: The first metric.
        stability: Share of predictions that equal the dense model's.
        stability_low, stability_high: Ends of its 95 % interval.
        times: A row for each shape and phase. For the first form, its control's.
        kept, at_least: If something is promised, the share of predictions on the held-out rows that stay, and the lower
            end of its 95 % interval.
    """

    model: Literal["dense", "slim", "cascade"]
    runtime: str
    bits: str
    bytes: Size | None
    quality: float
    stability: Share
    times: list[FormTime]
    stability_low: Share | None = None
    stability_high: Share | None = None
    kept: Share | None = None
    at_least: Share | None = None


def deciding_step(forms: Sequence[Form]) -> int | None:
    """Return the first shape that was not too noisy to compare times at; None if all were, or there are no forms."""
    steps = range(len(forms[0].times)) if forms else ()
    return next((step for step in steps if not forms[0].times[step].noisy), None)


def relative_times(forms: Sequence[Form], step: int) -> list[float]:
    """Return the time of every form at a step relative to the first form, whose own row is its control."""
    return [1.0, *(form.times[step].ratio for form in forms[1:])]


@dataclass(frozen=True)
class DeployWay:
    """A runtime and bits that were tried, and the result.

    Attributes:
        kept, at_least: Share of the dense model's predictions on the held-out rows that stay in these bits, and the
            lower end of its 95 % interval.
        dense_ratio: Time of the dense model, relative to the first way's.
        flops: Share of the FLOPs left by the largest cut that keeps the promise; None if no cut was searched for.
        judged: The cuts that were tried, see `LargestCut`.
        problem: Why the runtime does not serve the model.
        search: Why no cut was found.
    """

    runtime: str
    bits: str
    kept: float | None = None
    at_least: float | None = None
    dense_ratio: float | None = None
    flops: float | None = None
    judged: tuple[Mapping[str, Any], ...] = ()
    problem: str | None = None
    search: str | None = None


@dataclass(frozen=True)
class Deployment:
    """Which form to deploy: the fastest that keeps a share of `promise` on held-out rows, by its lower end.

    `form` is its index among the forms, None if none keeps the promise; `step` is the index of the compared times, the
    first that are not noisy; `seconds` is the time of the search; `file` is the form's file in the run's folder.
    """

    promise: Share
    form: int | None
    step: int
    ways: list[DeployWay]
    seconds: float
    file: str | None = None


@dataclass(frozen=True, kw_only=True)
class SizeTried:
    """A share of the FLOPs that was tried for a cascade, and the result.

    Attributes:
        flops: Share that the cut leaves.
        passed_on: Share of the held-out rows that go on to the dense part.
        differ: Number of them that get another answer than the dense model's.
        time: Time of the cascade relative to the dense model's; None if there was only one size to time.
        problem: Why it has no cascade.
    """

    flops: Share
    passed_on: Share | None = None
    differ: Count | None = None
    time: float | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class CascadeFacts:
    """The parts of a cascade, and the evidence for its promise.

    Attributes:
        file: The graph, in the run's folder.
        quantize: "int8" if the slim part is in 8 bits.
        parts: Sizes of the files of both models alone; the cascade stores their `shared_bytes` once.
        held_out_passed_on: Share of the held-out rows that went on to the dense part.
        differ: Number of them that got another answer than the dense model's.
        bound: Upper end of the interval of that share.
        max_abs: Largest difference from the logits of both graphs, over all held-out rows.
        tried: The sizes among which this one was chosen, if it was.
    """

    file: str
    quantize: str | None
    parts: Both[Size]
    shared_bytes: Size
    held_out_passed_on: Share
    differ: Count
    bound: Share
    max_abs: float
    tried: tuple[SizeTried, ...] = ()


class Details(BaseModel):
    """The content of the renderings beyond the summary, in the order of report.json.

    Attributes:
        base_model: Hub id of the dense model; None if it was read from a folder.
        head_map: Attention module -> a mark per head, ■ kept, · cut.
        heads: Attention module -> "his", "entropy" or "score" -> one number per head.
        uncompensated: Quality of the cut alone; None if nothing was compensated.
        alpha_curve, tried: Candidates of `alpha: auto` and `criterion: auto`.
        stability_of: Word for one prediction: "choice", "answer", "next token" or "prediction".
        stability_tolerance: Largest difference of equal predictions of a regression.
        custom_code: Whether transformers needs `modeling_hies.py` to load the slim model, as its `auto_class`.
        deployment: Which form to deploy; None if that was not asked.
        cascade: The parts of the cascade; None if none was asked for.
        forms: Both models in float32 and in fewer bits; the dense one in float32 comes first.
        run: The recipe and what it read, a `RunRecord`.
    """

    base_model: str | None = None
    head_map: dict[str, Marks] = Field(default_factory=dict)
    heads: dict[str, Numbers] = Field(default_factory=dict)
    neurons: dict[str, NeuronCount] = Field(default_factory=dict)
    budget: Annotated[Outcome, Field(discriminator="kind")] | None = None
    metrics: dict[str, Both[float]] = Field(default_factory=dict)
    benchmarks: dict[str, Both[float]] = Field(default_factory=dict)
    uncompensated: Quality | None = None
    compensation: list[LayerFit] = Field(default_factory=list)
    alpha_curve: list[AlphaPoint] = Field(default_factory=list)
    tried: list[Tried] = Field(default_factory=list)
    stability_of: str = "prediction"
    stability_tolerance: float | None = None
    custom_code: bool = False
    family: Family | None = None
    other_work: OtherWork | None = None
    flops_per_layer: FlopsByLayer | None = None
    auto_class: str = "AutoModel"
    onnx: dict[str, Any] | None = None
    gguf: dict[str, Any] | None = None
    forms: list[Form] = Field(default_factory=list)
    deployment: Deployment | None = None
    cascade: CascadeFacts | None = None
    data: DataFacts
    run: dict[str, Any] | None = None

    @field_serializer("budget")
    def _known(self, budget: BudgetOutcome | None) -> dict[str, Any] | None:
        return None if budget is None else budget.details()

    @model_validator(mode="after")
    def _measured(self) -> Details:
        if isinstance(self.budget, CostOutcome) and self.budget.measured is None:
            raise ValueError("budget.measured is missing")
        if isinstance(self.budget, MaxDropOutcome | KeepOutcome) and self.budget.slim is None:
            raise ValueError("budget.slim is missing")
        if isinstance(self.budget, KeepOutcome) and self.budget.slim_end is None:
            raise ValueError("budget.slim_end is missing")
        return self

    @model_validator(mode="after")
    def _forms_fit(self) -> Details:
        steps = {len(form.times) for form in self.forms}
        if len(steps) > 1:
            raise ValueError("every one of forms must have as many times as the first")
        found = self.deployment
        if found is None or found.form is None:
            return self
        if not (0 <= found.form < len(self.forms) and 0 <= found.step < max(steps)):
            raise ValueError("deployment.form and deployment.step must be places in forms and their times")
        return self
