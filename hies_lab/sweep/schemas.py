"""What sweep.json and details.json of a sweep must hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, model_validator

from hies_export.files import Rule, Schema
from hies_export.units.counts import Count

RERUN = "run it again"
SWEEP = Rule("sweep.json must be as a sweep of this version wrote it", RERUN, shown=True)
SWEEP_DETAILS = Rule("details.json must be as a sweep of this version wrote it", RERUN, megabytes=1024, shown=True)

# What the rows of a sweep may remove, in words.
REMOVES = {"attention": "heads only", "mlp": "neurons only", "attention+mlp": "heads and neurons"}


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
    shape: list[Count] = Field(default_factory=list)
    environment: dict[str, Any] = Field(default_factory=dict)


class SweepPage(Schema):
    """The part of details.json that the page of a sweep needs."""

    about: SweepAbout = Field(default_factory=SweepAbout)
