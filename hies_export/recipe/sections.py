"""The sections of a recipe: their fields, defaults, and the rules for their values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from ..errors import check_path, did_you_mean, quoted
from ..kinds import ATTENTION, KINDS

if TYPE_CHECKING:
    from ..forms.exports import ExportOptions
    from ..forms.measure.timing import Timing
    from ..select.constraints import Constraints
    from ..slim.refit import Compensation

# Above every number of rows, heads or seconds that a run gets through, and below what libraries cannot hold.
MOST = 2**31 - 1


def _share_of_dense(value: float, info: ValidationInfo) -> float:
    if not 0 < value < 1:
        raise ValueError(
            f"{info.field_name} must be in (0, 1), a share of the dense model's, got {value:g}; 0.85 takes 15 % of it "
            "away"
        )
    return value


def _known(name: str, known: Iterable[str], *, what: str) -> str:
    known = tuple(known)
    if name not in known:
        raise ValueError(f"{what} must be one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}")
    return name


def _known_runtime(name: str) -> str:
    from ..forms.runtimes.registry import RUNTIMES

    return _known(name, RUNTIMES, what="a runtime")


def _known_metric(name: str) -> str:
    from ..evaluate.metrics import METRICS

    return _known(name, METRICS, what="metric")


def _may_be_shared(metric: Any) -> bool:
    """Return whether a share of a metric may be promised."""
    from ..evaluate.metrics import METRICS

    found = METRICS.get(metric) if isinstance(metric, str) else None
    return found is not None and (found.ranks or found.terms is not None)


ShareOfDense = Annotated[float, AfterValidator(_share_of_dense)]
Runtime = Annotated[str, AfterValidator(_known_runtime)]
PathOrName = Annotated[str, AfterValidator(check_path)]
Allocation = Literal["global", "uniform"]


class Section(BaseModel):
    """A part of the recipe: frozen, and without fields that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _is_in_reach(cls, value: Any) -> Any:
        for leaf in _leaves(value):
            if isinstance(leaf, Path):
                check_path(leaf)
            elif isinstance(leaf, (int, float)) and abs(leaf) > MOST:
                raise ValueError(f"a number must be in [-{MOST}, {MOST}], got {quoted(leaf)}")
        return value


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the values inside tuples and mappings."""
    if isinstance(value, (tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


class DataSection(Section):
    """Where the rows are and which columns matter.

    Attributes:
        name: Hub data set, its configuration last ("nyu-mll/glue/sst2"); or
        files: split -> file (jsonl, csv, tsv, parquet, txt, gzipped or not), image folder, or folder that
            `save_to_disk` wrote.
        text: One or two text columns; one for text-generation.
        image: Image column.
        prompt: What to ask, with the columns it reads in braces: "Question: {question}"; instead of `text` in
            text-generation, and always in image-text-to-text.
        answer: Column of answers; loss and quality are computed on their tokens.
        query: For feature-extraction, in place of `text` and with `document`: column of queries. Rows of the same query
            are one query; those without a query only add documents to search in. Of a limited number of rows, those
            with a query are drawn first.
        document: Column of the documents that each query should find, one or a list.
        group: For a reranker, which scores a query and a candidate: the column that tells the queries apart. What
            counts is then the order of the candidates of a query. The rows of a query are never divided, neither by
            `group` nor by `query`, so that a few more or fewer may be drawn than a section asks for.
        label: Label column; without one, calibration uses the model's own predictions. For a multi-label classifier it
            has lists of the labels that apply, by number or name, or of 0 or 1 for each label. For two columns of
            `text` to embed, it is their similarity; for documents and candidates, how much each is wanted. If `answer`
            holds choices, this column has the number of the right one, from 0: units are scored on the right choices,
            and quality and stability are judged by the likeliest choice, unless `evaluation.metrics` says otherwise.
        max_length: Longest sequence in tokens; the model's own limit by default, and at most 512 for packed text.
        packing: Whether texts to generate are joined and cut into blocks of max_length, or each is one sample.
        bos: Whether each of these blocks begins with the begin-of-text token, which counts as one of its tokens; auto
            for as the tokenizer begins a text.
    """

    name: str | None = None
    files: dict[str, Path] | None = None
    text: tuple[str, ...] = ()
    image: str | None = None
    prompt: str | None = None
    answer: str | None = None
    query: str | None = None
    document: str | None = None
    label: str | None = None
    group: str | None = None
    max_length: int | None = Field(None, ge=2)
    packing: bool = True
    bos: bool | Literal["auto"] = "auto"

    @field_validator("text", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("label", mode="before")
    @classmethod
    def _is_one_column(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            given = ", ".join(map(str, value))
            raise ValueError(f"label must be one column, got {given}; for several labels, give it a list in each row")
        return value

    @model_validator(mode="after")
    def _blocks_begin(self) -> DataSection:
        if self.bos != "auto" and not self.packing:
            raise ValueError("bos is for packed blocks, but packing is false; leave bos out")
        return self

    @model_validator(mode="after")
    def _one_source(self) -> DataSection:
        if (self.name is None) == (self.files is None):
            given = "both" if self.name is not None else "neither"
            raise ValueError(f"exactly one of name (a Hub data set) and files must be given, got {given}")
        return self


class CalibrationSection(Section):
    """Which rows the heads are scored on.

    Attributes:
        split: Split of the data set, or a slice of one such as "train[:60%]".
        samples: How many rows to draw.
        batch_size: Most rows that go through the model at once. It is halved if they do not fit into memory.
        seed: Seed of the draw.
    """

    split: str = "train"
    samples: int = Field(32, ge=1)
    batch_size: int = Field(16, ge=1)
    seed: int = Field(0, ge=0)


class HeldOutSection(Section):
    """Which rows `alpha: auto`, `criterion: auto`, `max_drop` and `keep` are judged on.

    Without this section, a promise (`keep`, `deploy`, `cascade`) is made on two thirds of the evaluated split, or what
    `keep.samples` and `evaluation.samples` leave of these, and the rest judges it. Other choices, and a promise for
    which that split has too few rows, are made on further rows of the calibration split. A model that was trained on
    that split does better there than on new rows, so these choices may not hold for new rows.

    Attributes:
        split: Split of the data set, or a slice of one such as "validation[:50%]". If it is the evaluated split,
            held-out rows are drawn from it and the others are evaluated.
        samples: How many rows to draw; by default 256 for alpha, 512 for a criterion, and 1,024 for `max_drop` and
            `keep`, but at most half of an evaluated split.
    """

    split: str
    samples: int | None = Field(None, ge=1)


class ComparisonSection(Section):
    """How predictions are judged.

    Attributes:
        metrics: Names of metrics, as `evaluate/metrics.py` lists them, or for `evaluate.load`: `owner/name` on the Hub,
            or a local script. The first one leads the report. By default the usual ones for the task.
        stability_tolerance: How far a regression output may move and still count as the same prediction; by default a
            sixth of the standard deviation of the dense model's outputs.
        threshold: Probability above which a label of a multi-label classifier applies.
    """

    metrics: tuple[PathOrName, ...] = ()
    stability_tolerance: float | None = Field(None, gt=0)
    threshold: float = Field(0.5, gt=0, lt=1)


class EvaluationSection(ComparisonSection):
    """Which rows quality is judged on, and how.

    Attributes:
        split: Split of the data set, or a slice of one.
        samples: How many rows to judge on; all of them by default.
        rows: Which rows, if there are more: "drawn" by a seed that is the same for every run, or the "first". Data sets
            are often sorted, by topic or by length.
        batch_size: Most rows that go through the model at once.
        lm_eval: Benchmarks of lm-eval (an extra) for language models, in addition: names of its tasks, or YAML files.
            `samples` documents of each are used.
    """

    split: str = "validation"
    samples: int | None = Field(None, ge=1)
    rows: Literal["drawn", "first"] = "drawn"
    batch_size: int = Field(32, ge=1)
    lm_eval: tuple[PathOrName, ...] = ()


class TimedSection(Section):
    """What a budget times.

    Attributes:
        runtime: Name of the runtime.
        batch: Rows in a batch.
        sequence: Tokens in a row; by default the median of the held-out rows, or without these of the calibration rows,
            rounded up to a multiple of 8 (of an embedding model with queries, of the queries). For image models it
            follows from the image size, and for vision-language models from the prompts: leave it out.
        dtype: Dtype that the runtime computes in, such as "bfloat16" or "int8" on openvino or "q8_0" on llamacpp; by
            default that of the export.
    """

    runtime: Runtime = "onnxruntime-cpu"
    batch: int = Field(8, ge=1)
    sequence: int | None = Field(None, ge=1)
    dtype: Literal["float32", "float16", "bfloat16", "int8", "q8_0", "q4_0"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, sequence), or (batch,)."""
        return (self.batch,) if self.sequence is None else (self.batch, self.sequence)


class LatencyBudget(TimedSection):
    """At most a share of the dense model's time, on a runtime and at a shape.

    Attributes:
        ratio: Time of the slim model divided by that of the dense one, in (0, 1).
        of: Reference of the ratio: "same" is the dense model in the same bits, "float32" the dense model in float32, on
            the same runtime (for onnxruntime-cpu-int8, on onnxruntime-cpu).
    """

    ratio: ShareOfDense
    of: Literal["same", "float32"] = "same"


class KeepBudget(TimedSection):
    """Remove as much as possible while the held-out rows keep a promise with 95 % confidence.

    Attributes:
        predictions: Share of the predictions that must stay the dense model's, in (0, 1). The lower end of the interval
            must reach it, so all predictions of 477 rows must stay for 0.99, or all but 2 of 1,024. Of an embedding
            model or a reranker, it is the share of a metric that must stay: of `metric`, by default the first one.
        metric: In place of a share of predictions, the name of a metric. If it is of rankings, such as ndcg@10, or
            own_entity_f1, a share of it is kept, 0.99 unless `predictions` says otherwise, or it gets worse `by` so
            much.
        by: How much worse the metric may get at most, in its own unit.
        index: What embeddings of queries are compared with: "dense", the documents' vectors of the dense model, which
            is the default, or "slim", all texts embedded again.
        runtime: Save time on this runtime in place of FLOPs, and judge the files that it runs; with `batch`, `sequence`
            and `dtype` as for `latency`.
        samples: How many rows to hold out at most.
    """

    predictions: float | None = Field(None, gt=0, lt=1)
    metric: Annotated[str, AfterValidator(_known_metric)] | None = None
    by: float | None = Field(None, ge=0)
    index: Literal["dense", "slim"] | None = None
    runtime: Runtime | None = None  # type: ignore[assignment]
    samples: int = Field(1024, ge=1)

    @property
    def timed(self) -> TimedSection | None:
        """Where models are judged and timed; None where torch judges them, and FLOPs are saved."""
        return None if self.runtime is None else self

    @model_validator(mode="before")
    @classmethod
    def _may_be_a_number(cls, value: Any) -> Any:
        if isinstance(value, (int, float)):
            return {"predictions": value}
        if isinstance(value, dict) and _may_be_shared(value.get("metric")) and {"by", "predictions"}.isdisjoint(value):
            return {**value, "predictions": 0.99}
        return value

    @model_validator(mode="after")
    def _is_one_promise(self) -> KeepBudget:
        given = [name for name in ("predictions", "metric", "by") if getattr(self, name) is not None]
        shares = given == ["predictions", "metric"] and _may_be_shared(self.metric)
        if not shares and given not in (["predictions"], ["metric", "by"]):
            raise ValueError(f"keep needs predictions, or metric and by, got {' and '.join(given) or 'none'}")
        timed = [name for name in ("batch", "sequence", "dtype") if name in self.model_fields_set]
        if self.runtime is None and timed:
            raise ValueError(f"keep.{timed[0]} says what is timed, and no runtime is named; name one, or leave it out")
        return self


class DropBudget(Section):
    """Remove as many heads as a metric allows on held-out rows.

    Attributes:
        metric: Name of the metric.
        by: How much worse the metric may get, in its own unit: 0.01 allows an accuracy of 0.88 to become 0.87.
    """

    metric: Annotated[str, AfterValidator(_known_metric)]
    by: float

    @field_validator("by")
    @classmethod
    def _is_not_negative(cls, value: float) -> float:
        if value < 0:
            raise ValueError(f"by must be at least 0, got {value:g}; 0.01 allows an accuracy of 0.88 to become 0.87")
        return value


class BudgetSection(Section):
    """How much is removed: exactly one of these.

    Attributes:
        heads: Share of heads to remove, in (0, 1), if only heads are removed. The other budgets cover all kinds of
            units.
        flops: Largest share of the dense model's FLOPs that may be left, at the first measured shape.
        parameters: Largest share of the dense model's parameters that may be left.
        latency: Largest share of the dense model's time that may be left.
        max_drop: Largest loss of a metric.
        keep: See `KeepBudget`. A number is short for its `predictions`.
    """

    heads: float | None = None
    flops: ShareOfDense | None = None
    parameters: ShareOfDense | None = None
    latency: LatencyBudget | None = None
    max_drop: DropBudget | None = None
    keep: KeepBudget | None = None

    @property
    def kind(self) -> str:
        """Name of the field that is given."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def ratio(self) -> float | None:
        """Largest share of the dense model's cost that may be left; None for `heads`, `max_drop` and `keep`."""
        return self.latency.ratio if self.latency is not None else self.flops or self.parameters

    @property
    def timed(self) -> TimedSection | None:
        """What the budget times; None for one that times nothing."""
        return self.latency if self.keep is None else self.keep.timed

    @property
    def metric(self) -> str | None:
        """Name of the metric that the budget limits; None if it limits none."""
        asked = self.max_drop or self.keep
        return None if asked is None else asked.metric

    @field_validator("heads")
    @classmethod
    def _is_a_share(cls, value: float | None) -> float | None:
        if value is not None and not 0 < value < 1:
            raise ValueError(f"sparsity must be in (0, 1), got {value:g}; 0.3 removes 30 % of the heads")
        return value

    @model_validator(mode="after")
    def _is_one(self) -> BudgetSection:
        names = list(type(self).model_fields)
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(names)} must be given, got {' and '.join(given) or 'none'}")
        return self


class MultipleOf(Section):
    """Divisors of the number of units that a layer keeps, if it loses any.

    Attributes:
        heads: For heads: key/value heads, or query heads under `unit: query`.
        neurons: For feed-forward neurons. By default 8 if the model is in half precision on a GPU, or is exported so
            for one, and 8 divides all dense widths; otherwise 1.
    """

    heads: int = Field(1, ge=1)
    neurons: int | None = Field(None, ge=1)


class CompensationSection(Section):
    """How the output projections are refitted after the cut, without training; see `compensate`.

    Attributes:
        method: "least_squares" refits weights and bias. "bias" only adds the removed units' average output to the bias,
            so the projections need one. "scalars" multiplies every unit that stays by its own factor.
        samples: How many rows of the calibration split to use, without their labels.
        ridge: Strength of the ridge, relative to the mean of the diagonal of the inputs' covariance. By default the
            one with the smallest error on held-out tokens is chosen for every layer.
        sequential: Fit layer by layer, with inputs from the layers already cut and refitted, so that later layers make
            up for what earlier ones lack. It pays in deep models. All rows are held in memory at once where they are.
        token_weights: How evenly least squares weighs tokens, in (0, 1]. 1 weighs all alike. Below 1, the rest of the
            weight follows the squared gradient of the prediction at each token, which helps if the prediction reads few
            tokens, as in a ViT with a class token. By default 1, but `criterion: auto` then chooses it on held-out
            rows.
        memory_gb: Largest size of the moments that are held at once, by default 4, or half of what a GPU has free. If
            those of all layers are larger, they are collected in several passes over the rows.
    """

    method: Literal["bias", "least_squares", "scalars"] = "least_squares"
    samples: int = Field(512, ge=5)
    ridge: float | None = Field(None, gt=0)
    sequential: bool = False
    token_weights: float | None = Field(None, gt=0, le=1)
    memory_gb: float | None = Field(None, gt=0)

    @property
    def limit_bytes(self) -> int | None:
        """`memory_gb` in bytes."""
        return None if self.memory_gb is None else round(self.memory_gb * (1 << 30))

    def compensation(self, token_weights: float | None = None) -> Compensation:
        """Return the `Compensation`, with the given weights of tokens if the section leaves them open."""
        from ..slim.refit import Compensation

        weights = self.token_weights or token_weights or 1.0
        return Compensation(self.method, ridge=self.ridge, sequential=self.sequential, token_weights=weights)

    @model_validator(mode="after")
    def _weighs_tokens_in_one_pass(self) -> CompensationSection:
        if self.sequential and self.token_weights not in (None, 1):
            raise ValueError(
                f"sequential refits weigh all tokens alike, got token_weights: {self.token_weights:g}; leave out one"
            )
        return self


class PruneSection(Section):
    """How units are scored, selected and compensated; see `score_units`, `select_units` and `compensate`.

    Attributes:
        modules: Which modules lose units: "attention" (heads), "mlp" (feed-forward neurons), or both under one budget.
        criterion: How units are ranked. HIES and other criteria of attention rank only heads; neurons are then ranked
            by `fisher`. `compensated` assumes `compensation`, and uses neither alpha nor labels. If the calibration
            rows have fewer than 16,384 tokens, it also reads compensation rows; see `score_compensated`. `auto` tries
            several criteria: it cuts, refits and judges the choice of each on held-out rows.
        alpha: Weight of importance against focus in HIES, in [0, 1): score = alpha * importance + (1 - alpha) * focus,
            where focus is one minus the attention's entropy. "auto" tries twelve values on held-out rows.
        normalize: Over which heads the two terms of HIES are scaled to [0, 1] before they are blended. "model": over
            all heads, so a layer of weak heads may lose most of them. "layer": over the heads of each layer, so that
            every layer has a head with 0 and one with 1.
        budget: See `BudgetSection`. A recipe's `deploy` or `cascade` may choose how much is removed in place of it.
        allocation: "uniform" removes the same number of heads from every layer, "global" those that score lowest
            anywhere. Or one for each kind, as in {attention: uniform, mlp: global}: the config's own fields, if it has
            them, then describe the heads beside uneven neurons. Each uniform kind loses its own share; a kind that is
            not named is "global".
        unit: With grouped-query attention, "group" removes whole key/value groups, with their part of the cache, and
            "query" the same number of query heads from each group, so that the cache keeps its size. Without groups the
            two are the same: every head is its own group, and takes its part of the cache along.
        towers: The parts of a composite model that lose heads; by default the language model if there is one, and of an
            encoder-decoder both.
        min_heads: Query heads that every layer keeps, however low they score. With 0, an attention module may lose all
            of them: it then computes nothing, and its output is the same for all tokens.
        min_neurons: Neurons that every feed-forward block keeps; with 0, it may lose all of them.
        keep_layers: Layers that lose neither heads nor neurons, counted from 0; -1 is the last.
        multiple_of: Divisor of the number of units left in a layer: a number, for heads, or see `MultipleOf`.
        steps: Number of rounds in which the heads are removed; the remaining ones are scored anew in between.
        compensation: See `CompensationSection`; None for no compensation.
    """

    modules: tuple[Literal["attention", "mlp"], ...] = (ATTENTION,)
    criterion: str = "hies"
    alpha: float | Literal["auto"] = 0.9
    normalize: Literal["model", "layer"] = "model"
    budget: BudgetSection | None = None
    allocation: Allocation | dict[str, Allocation] = "global"
    unit: Literal["group", "query"] = "group"
    towers: tuple[str, ...] = ()
    min_heads: int = Field(1, ge=0)
    min_neurons: int = Field(1, ge=0)
    keep_layers: tuple[int, ...] = ()
    multiple_of: MultipleOf = MultipleOf()
    steps: int = Field(1, ge=1)
    compensation: CompensationSection | None = None

    @property
    def goal(self) -> BudgetSection:
        """The budget, where it is given; `PruningRecipe.options` always has one."""
        assert self.budget is not None
        return self.budget

    @property
    def constraints(self) -> Constraints:
        """The limits on a selection, whatever the budget."""
        from ..select.constraints import Constraints

        return Constraints(
            allocation=self.allocation,
            unit=self.unit,
            min_heads=self.min_heads,
            min_neurons=self.min_neurons,
            keep_layers=self.keep_layers,
            multiple_of=self.multiple_of.heads,
            neurons_multiple_of=self.multiple_of.neurons or 1,
        )

    @property
    def judged_on_held_out(self) -> str | None:
        """What is chosen on held-out rows, for messages; None if nothing is."""
        from ..score.criteria import AUTO, uses_alpha

        if self.goal.max_drop is not None or self.goal.keep is not None:
            return self.goal.kind
        if self.criterion == AUTO:
            return "criterion: auto"
        return "alpha: auto" if self.alpha == AUTO and uses_alpha(self.criterion) else None

    @field_validator("modules")
    @classmethod
    def _are_kinds(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or len(set(value)) < len(value):
            raise ValueError(f"modules must be attention, mlp or both, each once, got {list(value)}")
        return tuple(kind for kind in KINDS if kind in value)

    @field_validator("allocation", mode="before")
    @classmethod
    def _is_an_allocation(cls, value: Any) -> Any:
        by_kind = value if isinstance(value, dict) else dict.fromkeys(KINDS, value)
        if any(kind not in KINDS or of_kind not in get_args(Allocation) for kind, of_kind in by_kind.items()):
            raise ValueError(
                f"allocation must be global or uniform, or one for each of attention and mlp, as in {{attention: "
                f"uniform, mlp: global}}, got {value!r}"
            )
        return value

    @field_validator("multiple_of", mode="before")
    @classmethod
    def _of_heads(cls, value: Any) -> Any:
        return {"heads": value} if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("criterion")
    @classmethod
    def _is_known(cls, value: str) -> str:
        from ..score.criteria import criterion_names

        return _known(value, criterion_names(), what="criterion")

    @field_validator("alpha", mode="before")
    @classmethod
    def _is_a_weight(cls, value: Any) -> Any:
        if value == "auto":
            return value
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ValueError(f"alpha must be a number in [0, 1) or auto, got {value!r}")
        if not 0 <= value < 1:
            raise ValueError(f"alpha must be in [0, 1), got {value:g}; for importance alone use criterion: his")
        return value

    @model_validator(mode="after")
    def _budget_covers_modules(self) -> PruneSection:
        if self.budget is not None and self.budget.heads is not None and self.modules != (ATTENTION,):
            raise ValueError(
                f"budget.heads is for modules: [attention], got modules: [{', '.join(self.modules)}]; "
                "set budget.flops, parameters, latency, max_drop or keep, which cover neurons too"
            )
        return self

    @model_validator(mode="after")
    def _can_take_steps(self) -> PruneSection:
        kind = None if self.budget is None else self.budget.kind
        given = {
            f"a budget of {kind}": kind in ("max_drop", "keep"),
            f"multiple_of {self.multiple_of.heads}": kind == "heads" and self.multiple_of.heads > 1,
            # With one query head left in each group, the next step would remove whole groups.
            "unit query": self.unit == "query",
            # The next step would not find a module that is skipped.
            "min_heads 0": self.min_heads == 0,
            "min_neurons 0": self.min_neurons == 0,
        }
        if self.steps > 1 and any(given.values()):
            reasons = " and ".join(name for name, is_given in given.items() if is_given)
            raise ValueError(
                f"steps: {self.steps} needs a budget of heads or of cost in units of groups, got {reasons}; "
                "set steps: 1"
            )
        return self


class ExportSection(Section):
    """The model in the format of another runtime.

    Attributes:
        format: "onnx" writes an ONNX folder, "gguf" a GGUF file for llama.cpp (decoders like LLaMA's only). "openvino",
            with `quantize: int8`, writes the ONNX folder and, calibrated on 300 of the rows that refit the model, or
            else score it, OpenVINO's own files to `openvino-int8/` (encoders only).
        provider: Execution provider that an ONNX graph is fused for.
        dtype: Dtype that the weights are stored in: float32 or float16; in a GGUF file also bfloat16, q8_0 or q4_0.
        quantize: "int8" also writes the ONNX graph with its linear layers in 8 bits, to `onnx-int8/`; for decoders
            "int4" writes 4 bits, to `onnx-int4/`, rounded by the rows that refit the model, or else score it. Both
            models are then judged and timed in float32 and in these bits.
    """

    format: Literal["onnx", "openvino", "gguf"] = "onnx"
    provider: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "float16", "bfloat16", "q8_0", "q4_0"] = "float32"
    quantize: Literal["int8", "int4"] | None = None

    @property
    def options(self) -> ExportOptions:
        """The same for an `Exporter`."""
        from ..forms.exports import ExportOptions

        return ExportOptions(self.format, self.provider, self.dtype, self.quantize)

    @model_validator(mode="after")
    def _fits_the_format(self) -> ExportSection:
        if self.format == "openvino" and self.quantize != "int8":
            raise ValueError(
                f"format: openvino needs quantize: int8, got {self.quantize}; set it, or set format: onnx, which "
                "OpenVINO reads as it is"
            )
        if self.quantize and self.format == "gguf":
            raise ValueError(f"quantize belongs to format: onnx, got {self.quantize} for gguf; set dtype: q8_0 or q4_0")
        if self.quantize and (self.provider, self.dtype) != ("cpu", "float32"):
            raise ValueError(
                f"quantize: {self.quantize} needs provider: cpu and dtype: float32, got {self.provider} and "
                f"{self.dtype}; leave them out"
            )
        if self.format != "gguf" and self.dtype not in ("float32", "float16"):
            raise ValueError(f"dtype must be float32 or float16 for format: onnx, got {self.dtype}; set format: gguf")
        if self.format == "gguf" and self.provider != "cpu":
            raise ValueError(f"provider belongs to format: onnx, got {self.provider} for format: gguf; leave it out")
        return self


class CascadeSection(Section):
    """Leave the rows that the slim classifier is unsure of to the dense one, in one ONNX graph in `onnx-cascade/`.

    With `quantize: int8`, its slim part is in 8 bits. The threshold is chosen on held-out rows, see `HeldOutSection`;
    without that section, on part of the evaluated split if that is large enough.

    Attributes:
        disagreement: Largest share of the answers that may differ from the dense model's, with 95 % confidence.
        samples: How many held-out rows to draw.
        flops: Shares of the dense model's FLOPs to try in place of `prune.budget`. The one whose cascade is fastest on
            the held-out rows, in batches of 8, is used. If neither is given, the usual shares are tried.
        runtime: The runtime that serves the file; the threshold is chosen by its answers.
        dtype: What that runtime computes in; "bfloat16" is for openvino.
    """

    disagreement: float = Field(gt=0, lt=1)
    samples: int = Field(4096, ge=1)
    flops: tuple[ShareOfDense, ...] = ()
    runtime: Literal["onnxruntime-cpu", "openvino"] = "onnxruntime-cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _is_computed_there(self) -> CascadeSection:
        if self.dtype == "bfloat16" and self.runtime != "openvino":
            raise ValueError(f"dtype: bfloat16 needs runtime: openvino, got {self.runtime}; set it, or leave dtype out")
        return self


class MeasureSection(Section):
    """What is timed.

    Attributes:
        runtimes: Runtimes to time on, such as "torch" or "onnxruntime-cpu". An empty list times nothing; the ONNX model
            is still written and compared with torch.
        dtypes: Dtypes to time the models in, each on the runtimes that support it; by default torch runs the model as
            it is, and ONNX Runtime the graph as it is exported. The quality of both models is measured in each, too.
        shapes: (batch, sequence) pairs; an image model's sequence follows from its image size, so (batch,) is enough.
            By default a batch of 1 and of 8, of 128 tokens; for `deploy`, and under a budget of time without a
            sequence, as long as the rows, see `TimedSection`.
        repeats: Timed runs of each model, at least.
        min_seconds: Continue beyond `repeats` until the runs of a shape have taken this many seconds together.
    """

    runtimes: tuple[Runtime, ...] = ("torch", "onnxruntime-cpu")
    dtypes: tuple[Literal["float32", "float16", "bfloat16", "int8", "q8_0", "q4_0"], ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    repeats: int = Field(30, ge=2)
    min_seconds: float = Field(0.0, ge=0)

    @property
    def timing(self) -> Timing:
        """How often models run."""
        from ..forms.measure.timing import Timing

        return Timing(repeats=self.repeats, min_seconds=self.min_seconds)

    @field_validator("shapes")
    @classmethod
    def _are_shapes(cls, value: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        for shape in value:
            if len(shape) not in (1, 2) or min(shape) < 1:
                raise ValueError(f"a shape must be [batch, sequence] (or [batch] for images), got {list(shape)}")
        return value


class DeploySection(Section):
    """Search for the fastest form to deploy, in place of a run with a budget; see `hies_export.deploy`.

    Attributes:
        keep: Share of the dense model's predictions on held-out rows that must stay, in (0, 1).
        runtimes: Runtimes that may be deployed on; by default all that are installed.
        minutes: After this many minutes, no further cut is judged.
    """

    keep: float = Field(0.99, gt=0, lt=1)
    runtimes: tuple[Runtime, ...] = ()
    minutes: float | None = Field(None, ge=0)
