"""How much a model may lose, a `Budget`, and how a run met it, an `Outcome`, which is written to report.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from .sections import Section, ShareOfDense


class TimedSection(Section):
    """How a budget times models: on which runtime, at which shape, in which dtype.

    Attributes:
        runtime: Name of the runtime.
        batch: Rows in a batch.
        sequence: Tokens in a row; by default the median of the held-out rows, or without these of the calibration rows,
            rounded up to a multiple of 8 (of an embedding model with queries, of the queries). For image models it
            follows from the image size, and for vision-language models from the prompts: leave it out.
        dtype: Dtype that the runtime computes in, such as "bfloat16" or "int8" on openvino or "q8_0" on llamacpp; by
            default that of the export.
    """

    runtime: str = "onnxruntime-cpu"
    batch: int = Field(8, ge=1)
    sequence: int | None = Field(None, ge=1)
    dtype: Literal["float32", "float16", "bfloat16", "int8", "q8_0", "q4_0"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that is timed: (batch, sequence), or (batch,) if no sequence is given."""
        return (self.batch,) if self.sequence is None else (self.batch, self.sequence)


class LatencyBudget(TimedSection):
    """At most a share of the dense model's time, on a runtime and at a shape.

    Attributes:
        ratio: Time of the slim model divided by that of the dense one, in (0, 1).
    """

    ratio: ShareOfDense


class KeepBudget(TimedSection):
    """Remove as much as possible while the held-out rows keep a promise with 95 % confidence.

    Attributes:
        predictions: Share of the predictions that must stay the dense model's, in (0, 1). The lower end of the interval
            must reach it, so all predictions of 477 rows must stay for 0.99, or all but 2 of 1,024. Of an embedding
            model or a reranker, it is the share of a metric that must stay: of `metric`, by default the first one.
        metric: Name of the metric that is promised, in place of a share of predictions: at most a loss of `by`. Of a
            metric of rankings, such as ndcg@10, or of own_entity_f1, a share may be promised: `predictions`, by
            default 0.99.
        by: How much worse the metric may get at most, in its own unit.
        index: What embeddings of queries are compared with: "dense", the documents' vectors of the dense model, which
            is the default, or "slim", all texts embedded again.
        runtime: Save time on this runtime in place of FLOPs, and judge the files that it runs; with `batch`, `sequence`
            and `dtype` as for `latency`.
        samples: How many rows to hold out at most.
    """

    predictions: float | None = Field(None, gt=0, lt=1)
    metric: str | None = None
    by: float | None = Field(None, ge=0)
    index: Literal["dense", "slim"] | None = None
    runtime: str | None = None  # type: ignore[assignment]
    samples: int = Field(1024, ge=1)

    @property
    def timed(self) -> TimedSection | None:
        """Where models are judged and timed; None where torch judges them, and FLOPs are saved."""
        return None if self.runtime is None else self

    @model_validator(mode="before")
    @classmethod
    def _number_is_of_predictions(cls, value: Any) -> Any:
        return {"predictions": value} if isinstance(value, (int, float)) else value

    @model_validator(mode="after")
    def _is_one_promise(self) -> KeepBudget:
        given = [name for name in ("predictions", "metric", "by") if getattr(self, name) is not None]
        if given not in (["predictions"], ["metric"], ["predictions", "metric"], ["metric", "by"]):
            raise ValueError(f"keep needs predictions, or metric and by, got {' and '.join(given) or 'none'}")
        timed = [name for name in ("batch", "sequence", "dtype") if name in self.model_fields_set]
        if self.runtime is None and timed:
            raise ValueError(f"keep.{timed[0]} says what is timed, and no runtime is named; name one, or leave it out")
        return self


@dataclass(frozen=True)
class Found:
    """What a model costs, keeps or loses, as its budget counts it."""

    value: float  # share of the dense model's cost, share that stays of its predictions or of a metric, or loss of one
    bound: float | None = None  # of the interval of `value`, the end that decides; None for a count or a time

    @property
    def decides(self) -> float:
        """The number that a budget is held against."""
        return self.value if self.bound is None else self.bound


class Budget(Section):
    """How much is removed: exactly one of these.

    Attributes:
        heads: Share of heads to remove, in (0, 1), if only heads are removed. The other budgets cover all kinds of
            units.
        flops: Largest share of the dense model's FLOPs that may be left, at the first measured shape.
        parameters: Largest share of the dense model's parameters that may be left.
        latency: Largest share of the dense model's time that may be left.
        keep: See `KeepBudget`. A number is short for its `predictions`.
    """

    heads: float | None = Field(None, gt=0, lt=1)
    flops: ShareOfDense | None = None
    parameters: ShareOfDense | None = None
    latency: LatencyBudget | None = None
    keep: KeepBudget | None = None

    @property
    def kind(self) -> str:
        """Name of the field that is given."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def searched(self) -> bool:
        """Whether the size of the cut is searched for on held-out rows, as for `keep`."""
        return self.keep is not None

    @property
    def ratio(self) -> float | None:
        """Largest share of the dense model's cost that may be left; None for `heads` and `keep`."""
        return self.latency.ratio if self.latency is not None else self.flops or self.parameters

    @property
    def timed(self) -> TimedSection | None:
        """What the budget times; None for one that times nothing."""
        return self.latency if self.keep is None else self.keep.timed

    @property
    def metric(self) -> str | None:
        """Name of the metric that the budget limits; None if it limits none."""
        return None if self.keep is None else self.keep.metric

    @property
    def share(self) -> float | None:
        """Share of the predictions, or of a metric, that must stay; None for budgets that promise no share."""
        return None if self.keep is None else self.keep.predictions

    @property
    def by(self) -> float | None:
        """How much worse the metric may get; None for budgets that limit no loss."""
        return None if self.keep is None else self.keep.by

    def met(self, found: Found) -> bool:
        """Return whether a result meets the budget; any result meets a budget of heads."""
        if self.share is not None:
            return found.decides >= self.share
        most = self.by if self.searched else self.ratio  # loss of a metric, or share of the cost
        return most is None or found.decides <= most

    @model_validator(mode="before")
    @classmethod
    def _is_no_number(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ValueError(
                f"budget must say what {value:g} is about: {{flops: {value:g}}} leaves that share of the FLOPs, "
                f"{{heads: {value:g}}} removes that share of the heads, {{keep: {value:g}}} keeps it of the answers"
            )
        return value

    @model_validator(mode="after")
    def _limits_one_thing(self) -> Budget:
        names = list(type(self).model_fields)
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(names)} must be given, got {' and '.join(given) or 'none'}")
        return self


@dataclass(frozen=True)
class Outcome:
    """A budget, and how a run met it."""

    budget: Budget  # what it left open is filled in: the metric of a promise, and the shape that was timed
    predicted: float | None = None  # share of the cost that is left, by the table of cost; None without a table
    found: Found | None = None  # what the slim model has, counted, timed or on held-out rows; None until it is known
    noisy: bool | None = None  # whether the control shows that a measured time is unreliable
    samples: int = 0  # held-out rows that decided; 0 if none did
    confidence: float | None = None  # of the interval of every cut that was judged on them
    word: str = "prediction"  # what one prediction is called
    table: tuple[Mapping[str, Any], ...] = ()  # the timed cuts behind a prediction of time
    judged: tuple[Mapping[str, Any], ...] = ()  # the cuts that were judged on held-out rows, see `Cuts.report_rows`

    @property
    def met(self) -> bool:
        """Whether the slim model meets the budget; `found` must be known."""
        assert self.found is not None
        return self.budget.met(self.found)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are neither None nor empty, for report.json."""
        fields = {**vars(self), "budget": self.budget.model_dump(exclude_unset=True, exclude_none=True)}
        if self.found is not None:
            fields["found"] = {name: value for name, value in vars(self.found).items() if value is not None}
        return {name: value for name, value in fields.items() if value not in (None, ())}
