"""What scores.json of a run, and sweep.json and details.json of a sweep, must hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, FiniteFloat, model_validator

from ..errors import quoted
from ..files import Rule, Schema
from ..forms.measure.counts import Count
from ..report.report import Numbers

RERUN = "run it again"
SCORES = Rule("scores.json must be as a run of this version wrote it", RERUN, megabytes=1024, shown=True)
SWEEP = Rule("sweep.json must be as a sweep of this version wrote it", RERUN, shown=True)
SWEEP_DETAILS = Rule("details.json must be as a sweep of this version wrote it", RERUN, megabytes=1024, shown=True)

# What the rows of a sweep may remove, in words.
REMOVES = {"attention": "heads only", "mlp": "neurons only", "attention+mlp": "heads and neurons"}


class ScoresFile(Schema):
    """scores.json of a run: the statistics behind the scores."""

    samples: int
    labels: str
    fingerprint: str
    parameters: dict[str, Any]
    his: Numbers
    entropy: Numbers
    weight_l2: Numbers


class SweepRow(Schema):
    """A row of sweep.json."""

    criterion: str
    alpha: FiniteFloat | None
    alpha_by: str | None = None
    sparsity: FiniteFloat | None
    seed: int
    calibration_samples: Count
    compensation: Literal["none", "bias", "scalars", "least_squares", "weighted", "sequential"]
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
    """`about` of details.json of a sweep: facts about the rows. `shape`: batch and sequence of the FLOPs."""

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
    """The part of details.json that the page of a sweep needs."""

    about: SweepAbout = Field(default_factory=SweepAbout)


class _SweepPlan(Schema):
    criterion: str
    alpha: FiniteFloat | None
    sparsity: FiniteFloat | None
    flops_target: FiniteFloat | None = None
    modules: str | None = None
    kept: dict[str, Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]]


class SweepFigures(Schema):
    """The part of a sweep's details.json that the figures need."""

    his: Numbers
    entropy: Numbers
    normalize: Literal["model", "layer"]
    plans: Annotated[list[_SweepPlan], Field(min_length=1)]

    @model_validator(mode="after")
    def _of_the_same_heads(self) -> SweepFigures:
        for name, values in self.entropy.items():
            if not values or len(values) != len(self.his.get(name, ())):
                problem = f"but their numbers differ in {quoted(name)}"
                raise ValueError(f"entropy and his must have a value for each head, {problem}")
        return self


class SweepDetails(SweepFigures):
    """details.json of a sweep."""

    seed: int
    calibration_samples: int
    key_value_heads: dict[str, Annotated[Count, Field(ge=1)]]
    kinds: dict[str, Literal["attention", "mlp"]]
    about: SweepAbout

    @model_validator(mode="after")
    def _whole_groups(self) -> SweepDetails:
        for name, values in self.his.items():
            groups = self.key_value_heads.get(name)
            if not values or groups is None or len(values) % groups:
                where = f"got {groups} in {quoted(name)}"
                raise ValueError(f"key_value_heads must divide the units of every module, {where}")
        return self
