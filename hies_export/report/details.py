"""`details` of report.json: the content of the renderings beyond the summary, built by a run or read from a file."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, FailFast, Field, FiniteFloat, field_serializer, model_validator

from ..data.splits import DataFacts
from ..evaluate.judge import AlphaPoint, Quality, Tried
from ..forms.cascade.export import CascadeFacts
from ..forms.deployment import Deployment
from ..forms.judge import Judged
from ..forms.measure.counts import Both, FlopsByLayer
from ..forms.measure.shapes import RowLength
from ..recipe.budget import Outcome
from ..slim.config import Family
from ..slim.refit import LayerFit
from .maps import NeuronCount

Marks = Annotated[str, Field(pattern="^[■·]{1,16384}$")]
Numbers = dict[str, Annotated[list[FiniteFloat], FailFast()]]
"""Module -> one number per unit."""


class Details(BaseModel):
    """The content of the renderings beyond the summary, in the order of report.json.

    Attributes:
        base_model: Hub id of the dense model; None if it was read from a folder.
        head_map: Attention module -> a mark per head, ■ kept, · cut.
        heads: Attention module -> "his", "entropy" or "score" -> one number per head.
        uncompensated: Quality of the cut alone; None if nothing was compensated.
        alpha_curve, tried: Candidates of `alpha: auto` and `criterion: auto`.
        stability_of: Word for one prediction: "choice", "answer", "label set", "next token", "first hit" or
            "prediction".
        stability_tolerance: Largest difference of equal predictions of a regression.
        custom_code: Whether transformers needs `modeling_hies.py` to load the slim model, as its `auto_class`.
        deployment: Which form to deploy; None if that was not asked.
        cascade: The parts of the cascade; None if none was asked for.
        forms: Both models in float32 and in fewer bits; the dense one in float32 comes first.
        row_length: The length of the rows at which was timed; None where the request gave all shapes.
        run: The recipe and what it read, a `RunRecord`.
    """

    base_model: str | None = None
    head_map: dict[str, Marks] = Field(default_factory=dict)
    heads: dict[str, Numbers] = Field(default_factory=dict)
    neurons: dict[str, NeuronCount] = Field(default_factory=dict)
    outcome: Outcome | None = None
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
    flops_per_layer: FlopsByLayer | None = None
    auto_class: str = "AutoModel"
    onnx: dict[str, Any] | None = None
    gguf: dict[str, Any] | None = None
    forms: list[Judged] = Field(default_factory=list)
    deployment: Deployment | None = None
    cascade: CascadeFacts | None = None
    row_length: RowLength | None = None
    data: DataFacts
    run: dict[str, Any] | None = None

    @field_serializer("outcome")
    def _known(self, outcome: Outcome | None) -> dict[str, Any] | None:
        return None if outcome is None else outcome.to_json()

    @model_validator(mode="after")
    def _measured(self) -> Details:
        if self.outcome is not None and self.outcome.found is None:
            raise ValueError("outcome.found is missing")
        return self

    @model_validator(mode="after")
    def _forms_fit(self) -> Details:
        steps = [len(form.times) for form in self.forms]
        if steps and (min(steps) < 1 or max(steps) > steps[0]):
            raise ValueError("every one of forms must have a time, and at most as many as the first")
        found = self.deployment
        if found is None or found.form is None:
            return self
        if not (0 <= found.form < len(self.forms) and 0 <= found.step < len(self.forms[found.form].times)):
            raise ValueError("deployment.form and deployment.step must be places in forms and their times")
        return self
