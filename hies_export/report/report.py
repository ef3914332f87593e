"""The report of a run: typed parts that are written as report.json, which every rendering is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, FailFast, Field, FiniteFloat, field_serializer, model_validator
from pydantic.dataclasses import dataclass

from ..data.rows import DataFacts
from ..evaluate.judge import Tried
from ..files import Rule, check, read_json
from ..forms.cascade.export import CascadeFacts, CascadeSummary
from ..forms.deployment import Deployment
from ..forms.judged import ExportedFile, Judged
from ..forms.time import TimedRow
from ..kinds import ATTENTION, KINDS, MLP
from ..recipe.budget import Outcome
from ..select.plan import PruningPlan, dump_json
from ..slim.refit import LayerFit
from ..units.counts import Both, Count, Counted, FlopCount, Record, Size, StoredBytes
from ..units.units import Selection
from ..vocabulary.trim import VocabularyFacts

REPORT = Rule("a report must be a report.json or a run's folder", "give the folder a run wrote", shown=True)
# Marks of a head.
KEPT, CUT = "■", "·"
Marks = Annotated[str, Field(pattern=f"^[{KEPT}{CUT}]{{1,16384}}$")]
Numbers = dict[str, Annotated[list[FiniteFloat], FailFast()]]
"""Module -> one number per unit."""


@dataclass(frozen=True, eq=False)
class UnitCounts(Record):
    """How many units of a kind the dense model has, how many were removed, and how many each module keeps.

    Heads are query heads. `kept_per_layer` is empty if the run left this kind of unit alone.
    """

    total: Count
    removed: Count
    kept_per_layer: Sequence[int]

    @property
    def kept(self) -> int:
        """Units of the slim model."""
        return self.total - self.removed

    @classmethod
    def of(cls, selection: Selection) -> UnitCounts:
        """Return the counts of a selection."""
        kept = [len(module.units) for module in selection.values()]
        total = sum(module.total for module in selection.values())
        return cls(total, total - sum(kept), kept)


def plan_counts(plan: PruningPlan) -> dict[str, UnitCounts]:
    """Return the unit counts of a plan: always of "heads", and of "neurons" if the plan covers them."""
    selections = {kind.units: plan.of_kind(name) for name, kind in KINDS.items()}
    return {units: UnitCounts.of(modules) for units, modules in selections.items() if modules or units == "heads"}


def head_map(plan: PruningPlan) -> dict[str, str]:
    """Return one mark per head of every attention module: ■ kept, · cut."""
    return {
        name: "".join(KEPT if head in kept.units else CUT for head in range(kept.total))
        for name, kept in plan.of_kind(ATTENTION).items()
    }


def neuron_counts(plan: PruningPlan) -> dict[str, NeuronCount]:
    """Return how many neurons of every feed-forward block stay."""
    return {name: NeuronCount(len(kept.units), kept.total) for name, kept in plan.of_kind(MLP).items()}


@dataclass(frozen=True)
class NeuronCount:
    """How many neurons of a feed-forward block stay, and how many it had."""

    kept: Count
    total: Annotated[Count, Field(ge=1)]

    def __post_init__(self) -> None:
        if self.kept > self.total:
            raise ValueError(f"kept must be at most total, got {self.kept} of {self.total}")


@dataclass(frozen=True, eq=False)
class FirstMetric(Record):
    """The first metric of the recipe, by name, and its value for both models."""

    metric: str
    dense: float
    slim: float


class Details(BaseModel):
    """The content of the renderings beyond the summary, in the order of report.json.

    Attributes:
        base_model: Hub id of the dense model; None if it was read from a folder.
        head_map: Attention module -> a mark per head, ■ kept, · cut.
        heads: Attention module -> "his", "entropy" or "score" -> one number per head.
        logit_scale: By what the logits of a compensated language model were multiplied, see `fit_logit_scale`.
        tried: Candidates of `alpha: auto` or `criterion: auto`.
        stability_of: Word for one prediction: "choice", "answer", "first hit", or the `word` of the task, such as
            "next token", "sentence" or "prediction".
        stability_tolerance: Largest difference of equal predictions of a regression.
        kept_low, kept_high: Ends of the 95 % interval of what is kept, as in `Judge.kept`: of the stability, or of the
            share of the first metric. None in reports of older versions, and where the interval has no upper end.
        custom_code: Whether transformers needs `modeling_hies.py` to load the slim model, as its `auto_class`.
        deployment: Which form to deploy; None if that was not asked.
        cascade: The parts of the cascade; None if none was asked for.
        forms: Both models in float32 and in fewer bits; the dense one in float32 comes first.
        run: The command line, and the commit of the dense model: a `RunRecord`.
    """

    base_model: str | None = None
    head_map: dict[str, Marks] = Field(default_factory=dict)
    heads: dict[str, Numbers] = Field(default_factory=dict)
    neurons: dict[str, NeuronCount] = Field(default_factory=dict)
    outcome: Outcome | None = None
    metrics: dict[str, Both[float]] = Field(default_factory=dict)
    compensation: list[LayerFit] = Field(default_factory=list)
    logit_scale: float = 1.0
    tried: list[Tried] = Field(default_factory=list)
    stability_of: str = "prediction"
    stability_tolerance: float | None = None
    kept_low: float | None = None
    kept_high: float | None = None
    custom_code: bool = False
    auto_class: str = "AutoModel"
    onnx: dict[str, Any] | None = None
    gguf: dict[str, Any] | None = None
    forms: list[Judged] = Field(default_factory=list)
    deployment: Deployment | None = None
    cascade: CascadeFacts | None = None
    data: DataFacts
    run: dict[str, Any] | None = None

    @field_serializer("outcome")
    def _serialize_outcome(self, outcome: Outcome | None) -> dict[str, Any] | None:
        return None if outcome is None else outcome.to_json()

    @model_validator(mode="after")
    def _is_complete(self) -> Details:
        if self.outcome is not None and self.outcome.found is None:
            raise ValueError("outcome.found is missing")
        counts, deployment = [len(form.times) for form in self.forms], self.deployment
        if counts and (min(counts) < 1 or max(counts) > counts[0]):
            raise ValueError("every one of forms must have a time, and at most as many as the first")
        if deployment is None or deployment.form is None:
            return self
        if not (0 <= deployment.form < len(counts) and 0 <= deployment.step < counts[deployment.form]):
            raise ValueError("deployment.form and deployment.step must be places in forms and their times")
        return self


@dataclass(frozen=True)
class Report:
    """What a run removed, and the quality, size and time of both models.

    A part may be given as the mapping that report.json holds. All fields but `details` are the summary.

    Attributes:
        model: Absolute path or Hub id of the dense model.
        task: Task of the recipe.
        criterion: Criterion that the units were chosen by.
        alpha: Weight of the importance in that criterion; None if it has none.
        seed: Seed of the run.
        heads: Query heads; none if the run left them alone.
        neurons: Feed-forward neurons; None if the run left them alone.
        vocabulary: Tokens, and how other texts are cut without those that went; None if the run left them alone.
        parameters: Number of parameters.
        bytes: Size of the weights.
        flops: Floating-point operations of one forward pass.
        quality: First metric.
        stability: Share of evaluated samples whose prediction equals the dense model's.
        cut_max_abs: Largest difference between the outputs of the cut and the masked model.
        reload_max_abs: Largest difference between the outputs of the saved and the reloaded model.
        onnx_max_abs: Largest difference between the outputs of the ONNX and the torch model; None without an ONNX
            model.
        gguf_max_abs: Largest difference between next-token probabilities of the GGUF file in llama.cpp and the torch
            model; None without a GGUF file, or if llama.cpp is not installed.
        seconds: Time spent by stage: score, cut, export, measure. The search of a deployment counts as score.
        latency: One row per runtime, precision, phase and shape.
        environment: Hardware and library versions that the numbers were measured with.
        cache_bytes_per_token: Bytes that a token adds to the key/value cache; None for a model without a cache.
        exported: The exported file, judged as it is deployed; None in reports of older versions.
        cascade: The cascade of both models; None if none was asked for.
        ranking: For an embedding model, index -> name of a number -> mean over the queries, as in `Judge.ranking`:
            `slim_index` with everything re-embedded, `dense_index` with queries on the dense model's vectors. For a
            reranker, `candidates`. None for other models.
        details: The content of the renderings beyond the summary.
    """

    model: str
    task: str
    criterion: str
    alpha: float | None
    seed: int
    heads: UnitCounts
    neurons: UnitCounts | None = field(default=None, kw_only=True)
    vocabulary: VocabularyFacts | None = field(default=None, kw_only=True)
    parameters: Counted
    bytes: StoredBytes
    flops: FlopCount
    quality: FirstMetric
    stability: float
    cut_max_abs: float
    reload_max_abs: float
    onnx_max_abs: float | None
    gguf_max_abs: float | None = field(default=None, kw_only=True)
    seconds: Mapping[str, float]
    latency: Sequence[TimedRow]
    environment: Mapping[str, Any]
    cache_bytes_per_token: Both[Size] | None = None
    exported: ExportedFile | None = None
    cascade: CascadeSummary | None = None
    ranking: Mapping[str, Mapping[str, FiniteFloat]] | None = None
    details: Details = field(kw_only=True)

    @model_validator(mode="after")
    def _fits_its_details(self) -> Report:
        if self.cascade is not None and (self.details.cascade is None or not self.details.forms):
            raise ValueError("a report with cascade must have details.cascade and details.forms")
        return self

    @property
    def units(self) -> dict[str, UnitCounts | None]:
        """The counts of every kind of units, as in `plan_counts`."""
        return {kind.units: getattr(self, kind.units) for kind in KINDS.values()}

    @property
    def metrics(self) -> Mapping[str, Both[float] | FirstMetric]:
        """All metrics of both models by name; the first one alone if `details` has none."""
        return self.details.metrics or {self.quality.metric: self.quality}

    def summary(self) -> dict[str, Any]:
        """Return everything but `details`, as plain values.

        `neurons`, `vocabulary`, `cascade`, `ranking` and the keys of a GGUF file are left out if there is none.
        """
        values = asdict(self)
        del values["details"]
        for name in (*self.units, "vocabulary", "cascade", "ranking"):
            if not values[name]:
                del values[name]
        if self.bytes.gguf is None:
            del values["gguf_max_abs"], values["bytes"]["gguf"]
        return values

    def to_json(self) -> str:
        """Return the whole report as JSON text."""
        return dump_json({**self.summary(), "details": self.details.model_dump(exclude_unset=True)})

    @classmethod
    def from_file(cls, path: str | Path) -> Report:
        """Read a report.json, given itself or by its run's folder; a RequestError says if it is missing or none."""
        path = Path(path)
        file = path / "report.json" if path.is_dir() else path
        return cls.from_values(read_json(file, dict[str, Any], REPORT), where=file)

    @classmethod
    def from_values(cls, values: Mapping[str, Any], *, where: str | Path) -> Report:
        """Return the report with the fields of a report.json; a RequestError, which names `where`, refuses others."""
        return check(values, cls, REPORT, where=str(where))
