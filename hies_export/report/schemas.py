"""What the JSON files of a run and of a sweep must hold for the renderings and the page to show them.

`Report`, `LatencyRow` and so on give the types of report.json; what is here are the bounds within which these can be
drawn, the `details`, and the files beside it: scores.json of a run, sweep.json and details.json of a sweep.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, FailFast, Field, FiniteFloat, model_validator

from ..errors import quoted
from ..files import Rule, Schema

# A larger integer is no count of anything, and cannot be made a float.
Count = Annotated[int, Field(ge=0, le=10**18)]
Amount = Annotated[float, Field(ge=0, le=1e18)]
Numbers = dict[str, Annotated[list[FiniteFloat], FailFast()]]
"""Module -> one number per unit."""

RERUN = "run it again"
REPORT = Rule("a report must be a report.json or a run's folder", "give the folder a run wrote", shown=True)
SCORES = Rule("scores.json must be as a run of this version wrote it", RERUN, megabytes=1024, shown=True)
SWEEP = Rule("sweep.json must be as a sweep of this version wrote it", RERUN, shown=True)
SWEEP_DETAILS = Rule("details.json must be as a sweep of this version wrote it", RERUN, megabytes=1024, shown=True)


class _Units(Schema):
    total: Count
    removed: Count


class _Sizes(Schema):
    dense: Annotated[Amount, Field(gt=0)]
    slim: Amount


class _Row(Schema):
    tokens_per_second: _Sizes | None = None
    peak_bytes: _Sizes | None = None


class _Pair(Schema):
    dense: float
    slim: float


class _Uncompensated(Schema):
    metrics: dict[str, float | None]
    stability: float


class _Tried(Schema):
    criterion: str
    quality: float | None = None
    stability: float | None = None


class _AlphaPoint(Schema):
    alpha: FiniteFloat
    quality: float | None
    stability: FiniteFloat
    standard_error: float | None = None


class _Neurons(Schema):
    kept: Count
    total: Annotated[Count, Field(ge=1)]

    @model_validator(mode="after")
    def _part(self) -> _Neurons:
        if self.kept > self.total:
            raise ValueError(f"kept must be at most total, got {self.kept} of {self.total}")
        return self


# What the sentence about a budget says; "heads" has none.
_SAID: dict[str, tuple[str, ...]] = {
    "max_drop": ("metric", "by", "samples", "dense", "slim", "judged"),
    **dict.fromkeys(("flops", "parameters"), ("target", "predicted", "measured")),
    "latency": ("target", "predicted", "measured", "runtime", "batch", "sequence"),
}


class _Budget(Schema):
    kind: str = ""
    target: float | None = None
    predicted: float | None = None
    measured: float | None = None
    runtime: str | None = None
    batch: int | None = None
    sequence: int | None = None
    noisy: bool | None = None
    metric: str | None = None
    by: float | None = None
    samples: int | None = None
    dense: float | None = None
    slim: float | None = None
    refitted: float | None = None
    masked: float | None = None
    judged: list[Any] | None = None

    @model_validator(mode="after")
    def _complete(self) -> _Budget:
        wanted = _SAID.get(self.kind, ())
        if self.kind == "max_drop":
            wanted += ("refitted" if "refitted" in self.model_fields_set else "masked",)
        lacking = [name for name in wanted if getattr(self, name) is None]
        if lacking:
            raise ValueError(f"{lacking[0]} is missing")
        return self


class _OtherWork(Schema):
    used: FiniteFloat
    cores: Count


class _Layer(Schema):
    layer: str
    projections: Count = 0
    products: Count = 0
    feed_forward: Count = 0
    other: Count = 0


class _Layers(Schema):
    dense: list[_Layer]
    slim: list[_Layer]
    shape: list[int]

    @model_validator(mode="after")
    def _same_layers(self) -> _Layers:
        if len(self.dense) != len(self.slim):
            raise ValueError(f"dense and slim must have as many layers, got {len(self.dense)} and {len(self.slim)}")
        return self


class _Data(Schema):
    """Where scores and metrics come from: nothing, or all that the sentence about it says."""

    model_config = ConfigDict(extra="allow")

    labels: str | None = None
    calibration_samples: int | None = None
    evaluation_samples: int | None = None
    evaluation_of: int | None = None
    evaluation_rows: Literal["drawn", "first"] = "first"
    evaluation_split: str | None = None
    compensation_samples: int = 0
    held_out_samples: int = 0
    held_out_split: str = ""
    held_out_further: bool = True
    calibration_batch: int = 0
    calibration_batch_asked: int = 0
    name: str | None = None
    file: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> _Data:
        wanted = ("labels", "calibration_samples", "evaluation_samples", "evaluation_split")
        lacking = [name for name in wanted if getattr(self, name) is None]
        if lacking and (self.model_fields_set or self.model_extra):
            raise ValueError(f"{lacking[0]} is missing")
        return self


class _Family(Schema):
    dense: str
    slim: str


class Details(Schema):
    """`details` of report.json, of which the summary needs nothing and older reports lack much."""

    head_map: dict[str, Annotated[str, Field(pattern="^[■·]{1,16384}$")]] = Field(default_factory=dict)
    heads: dict[str, Numbers] = Field(default_factory=dict)
    neurons: dict[str, _Neurons] = Field(default_factory=dict)
    budget: _Budget = Field(default_factory=_Budget)
    metrics: dict[str, _Pair] | None = None
    benchmarks: dict[str, _Pair] = Field(default_factory=dict)
    uncompensated: _Uncompensated | None = None
    alpha_curve: list[_AlphaPoint] = Field(default_factory=list)
    tried: list[_Tried] | None = None
    stability_of: str = ""
    stability_tolerance: float | None = None
    custom_code: bool = False
    family: _Family | None = None
    other_work: _OtherWork | None = None
    flops_per_layer: _Layers | None = None
    auto_class: str = ""
    data: _Data = Field(default_factory=_Data)
    base_model: str | None = None


class ReportFile(Schema):
    """The bounds of report.json."""

    heads: _Units
    neurons: _Units | None = None
    parameters: _Sizes
    bytes: _Sizes
    flops: _Sizes
    cache_bytes_per_token: _Sizes | None = None
    latency: list[_Row]
    quality: dict[str, Any]
    details: Details = Field(default_factory=Details)

    @model_validator(mode="after")
    def _first_metric(self) -> ReportFile:
        before, metric = self.details.uncompensated, self.quality.get("metric")
        if before is not None and before.metrics.get(str(metric)) is None:
            raise ValueError(f"details.uncompensated.metrics must have the first metric, {metric!r}")
        return self


class BenchPart(Schema):
    """A table of a bench."""

    title: str
    names: Annotated[list[str], Field(min_length=2, max_length=2)]
    rows: list[_Row]


class BenchOfTwo(Schema):
    """What `hies-export bench --json` prints."""

    a: str
    b: str
    latency: list[_Row]
    environment: dict[str, Any]


class BenchOfMany(Schema):
    """What bench/gpu.py writes."""

    title: str
    tables: list[BenchPart]
    missing: list[str]
    environment: dict[str, Any]


class ScoresFile(Schema):
    """scores.json of a run: the statistics behind the scores."""

    samples: int
    labels: str
    fingerprint: str
    parameters: dict[str, Any]
    his: Numbers
    entropy: Numbers
    weight_l2: Numbers
    alpha_curve: list[_AlphaPoint]


class SweepRow(Schema):
    """A row of sweep.json."""

    criterion: str
    alpha: FiniteFloat | None
    alpha_by: str | None = None
    sparsity: FiniteFloat | None
    seed: int
    calibration_samples: Count
    compensation: Literal["none", "bias", "scalars", "least_squares", "weighted"]
    metric: str
    quality: float
    quality_dense: float
    stability: FiniteFloat
    flops_ratio: FiniteFloat | None
    heads_removed: Count | None
    neurons_removed: Count | None = None
    flops_target: FiniteFloat | None = None
    modules: Literal["attention", "mlp", "attention+mlp"] | None = None
    latency_ratio: FiniteFloat | None = None
    latency_low: FiniteFloat | None = None
    latency_high: FiniteFloat | None = None

    @model_validator(mode="after")
    def _complete(self) -> SweepRow:
        if self.sparsity is None and self.flops_target is None:
            raise ValueError("sparsity or flops_target must be given")
        if self.alpha_by == "given" and self.alpha is None:
            raise ValueError("alpha must be given")
        return self


SweepFile = Annotated[list[SweepRow], Field(min_length=1)]
"""Schema of sweep.json."""


class SweepAbout(Schema):
    """`about` of details.json of a sweep: what the rows are of. `shape`: batch and sequence of the FLOPs."""

    model: str = ""
    task: str = ""
    calibration_split: str = ""
    evaluation_split: str = ""
    evaluation_samples: Count = 0
    evaluation_of: Count = 0
    evaluation_rows: str = ""
    shape: list[Count] = Field(default_factory=list)
    environment: dict[str, Any] = Field(default_factory=dict)


class SweepPage(Schema):
    """What the page of a sweep needs of details.json."""

    about: SweepAbout = Field(default_factory=SweepAbout)


class _SweepPlan(Schema):
    criterion: str
    alpha: FiniteFloat | None
    sparsity: FiniteFloat | None
    flops_target: FiniteFloat | None = None
    modules: str | None = None
    kept: dict[str, Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]]


class SweepFigures(Schema):
    """What the figures need of details.json of a sweep."""

    his: Numbers
    entropy: Numbers
    plans: Annotated[list[_SweepPlan], Field(min_length=1)]

    @model_validator(mode="after")
    def _of_the_same_heads(self) -> SweepFigures:
        for name, values in self.entropy.items():
            if not values or len(values) != len(self.his.get(name, ())):
                raise ValueError(
                    f"entropy and his must have a value for each head, but their numbers differ in {quoted(name)}"
                )
        return self


class SweepDetails(SweepFigures):
    """details.json of a sweep."""

    seed: int
    calibration_samples: int
    key_value_heads: dict[str, Annotated[Count, Field(ge=1)]]
    kinds: dict[str, Literal["attention", "mlp"]] = Field(default_factory=dict)
    about: SweepAbout = Field(default_factory=SweepAbout)

    @model_validator(mode="after")
    def _whole_groups(self) -> SweepDetails:
        for name, values in self.his.items():
            groups = self.key_value_heads.get(name)
            if not values or groups is None or len(values) % groups:
                raise ValueError(
                    f"key_value_heads must divide the units of every module, got {groups} in {quoted(name)}"
                )
        return self
