"""The sections of a recipe, each also the options of its stage: fields, defaults, and the rules for their values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

from ..kinds import KINDS

if TYPE_CHECKING:
    from ..units.units import Units

ShareOfDense = Annotated[float, Field(gt=0, lt=1)]
Allocation = Literal["global", "uniform"]


class Section(BaseModel):
    """A part of the recipe: frozen, and without fields that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Columns(Section):
    """Which columns of rows are read, and how.

    Attributes:
        text: One or two text columns; one for text-generation.
        image: Image column.
        messages: For text-generation, in place of `text`: column of conversations, rendered by the model's chat
            template, of which the assistant's tokens are judged. A message has `role` and `content`, or `from` and
            `value`. Or two columns, what is asked and what follows, both of messages or both of text, which is then
            joined as it is.
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
            and quality and stability are judged by the likeliest choice.
        max_length: Longest sequence in tokens; the model's own limit by default, and at most 512 for packed text.
        bos: Whether each packed block of text begins with the begin-of-text token, which counts as one of its tokens;
            auto for as the tokenizer begins a text.
    """

    text: tuple[str, ...] = ()
    image: str | None = None
    messages: tuple[str, ...] = Field((), max_length=2)
    prompt: str | None = None
    answer: str | None = None
    query: str | None = None
    document: str | None = None
    label: str | None = None
    group: str | None = None
    max_length: int | None = Field(None, ge=2)
    bos: bool | Literal["auto"] = "auto"

    @field_validator("text", "messages", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @property
    def together(self) -> str | None:
        """The column whose equal values keep rows together when rows are drawn: `query` or `group`; None without."""
        return self.query or self.group


class DataSection(Columns):
    """Where the rows are and which columns matter.

    Attributes:
        name: Hub data set, its configuration last ("nyu-mll/glue/sst2"); or
        files: split -> file (jsonl, csv, tsv, parquet, txt, gzipped or not), image folder (a sub-folder per class, or
            a metadata.csv), or folder that `save_to_disk` wrote.
        shuffled: Whether a slice of a split, such as "train[:80%]", is of its rows in a random order, which is the same
            for every run, rather than in their own. The last rows of a file that is sorted, such as by its label, are
            unlike the first. Rows of one `query` or `group` stay together.
    """

    name: str | None = None
    files: dict[str, Path] | None = None
    shuffled: bool = False

    @model_validator(mode="after")
    def _has_one_source(self) -> DataSection:
        if (self.name is None) == (self.files is None):
            given = "both" if self.name is not None else "neither"
            raise ValueError(f"exactly one of name (a Hub data set) and files must be given, got {given}")
        return self

    @property
    def source(self) -> dict[str, Any]:
        """Where the rows are, as keyword arguments of `load_rows`."""
        return {"name": self.name, "files": self.files, "shuffled": self.shuffled}


class CalibrationSection(Section):
    """Which rows the heads are scored on.

    Attributes:
        split: Split of the data set, or a slice of one such as "train[:60%]".
        samples: How many rows to draw.
        batch_size: Most rows that go through the model at once.
        seed: Seed of the draw.
    """

    split: str = "train"
    samples: int = Field(32, ge=1)
    batch_size: int = Field(16, ge=1)
    seed: int = Field(0, ge=0)


class HeldOutSection(Section):
    """Which rows `alpha: auto`, `criterion: auto` and `keep` are judged on.

    Without this section, a promise (`keep`, `deploy`, `cascade`) is made on two thirds of the evaluated split, at most
    `keep.samples` rows, and the rest judges it, at least `evaluation.samples` rows where there are enough. Blocks of
    text have many predictions each, so it is made on as few of them as it takes. Other choices, and a promise for which
    that split has too few rows, are made on further rows of the calibration split. A model that was trained on that
    split does better there than on new rows, so these choices may not hold for new rows.

    Attributes:
        split: Split of the data set, or a slice of one such as "validation[:50%]". If it is the evaluated split,
            held-out rows are drawn from it and the others are evaluated.
        samples: How many rows to draw; by default 256 for alpha, 512 for a criterion, and 1,024 for `keep`, but
            at most half of an evaluated split.
    """

    split: str
    samples: int | None = Field(None, ge=1)


class ComparisonSection(Section):
    """How predictions are judged.

    Attributes:
        metrics: Names of metrics, as `evaluate/metrics.py` lists them. The first one leads the report. By default the
            usual ones for the task.
        stability_tolerance: How far a regression output may move and still count as the same prediction; by default a
            sixth of the standard deviation of the dense model's outputs.
    """

    metrics: tuple[str, ...] = ()
    stability_tolerance: float | None = Field(None, gt=0)


class EvaluationSection(ComparisonSection):
    """Which rows quality is judged on, and how.

    Attributes:
        split: Split of the data set, or a slice of one.
        samples: How many rows to judge on, drawn by a seed that is the same for every run; all of them by default.
        batch_size: Most rows that go through the model at once.
    """

    split: str = "validation"
    samples: int | None = Field(None, ge=1)
    batch_size: int = Field(32, ge=1)


class MultipleOf(Section):
    """Divisors of the number of units that a layer keeps, if it loses any.

    Attributes:
        heads: For heads: key/value heads, or query heads under `unit: query`.
        neurons: For feed-forward neurons. By default 8 if the model is in half precision on a GPU, or is exported so
            for one, and 8 divides all dense widths; otherwise 1.
    """

    heads: int = Field(1, ge=1)
    neurons: int | None = Field(None, ge=1)


class Constraints(Section):
    """Limits on which units go, whatever the budget.

    Attributes:
        allocation: "uniform" removes the same share of the units of every layer, "global" those that score lowest
            anywhere. Or one for each kind, as in {attention: uniform, mlp: global}: the config's own fields, if it has
            them, then describe the heads beside uneven neurons. Each uniform kind loses its own share; a kind that is
            not named is "global".
        unit: With grouped-query attention, "group" removes whole key/value groups, with their part of the cache, and
            "query" the same number of query heads from each group, so that the cache keeps its size. Without groups the
            two are the same: every head is its own group, and takes its part of the cache along.
        min_heads: Query heads that every layer keeps, however low they score.
        keep_layers: Layers that lose neither heads nor neurons, counted from 0; -1 is the last.
        multiple_of: Divisors of the number of units left in a layer, see `MultipleOf`.
    """

    allocation: Allocation | dict[str, Allocation] = "global"
    unit: Literal["group", "query"] = "group"
    min_heads: int = Field(1, ge=1)
    keep_layers: tuple[int, ...] = ()
    multiple_of: MultipleOf = MultipleOf()

    @field_validator("allocation", mode="before")
    @classmethod
    def _is_an_allocation(cls, value: Any) -> Any:
        by_kind = value if isinstance(value, dict) else dict.fromkeys(KINDS, value)
        if not (set(by_kind) <= set(KINDS) and all(name in get_args(Allocation) for name in by_kind.values())):
            raise ValueError(
                f"allocation must be global or uniform, or one for each of {' and '.join(KINDS)}, as in {{attention: "
                f"uniform, mlp: global}}, got {value!r}"
            )
        return value

    def parts(self, modules: Sequence[Units]) -> list[list[Units]]:
        """Return the modules that share an allocation: all, or those of each kind if each has its own."""
        if isinstance(self.allocation, str):
            return [list(modules)] if modules else []
        kinds = dict.fromkeys(module.kind for module in modules)
        return [[module for module in modules if module.kind == kind] for kind in kinds]

    def uniform(self, part: Sequence[Units]) -> bool:
        """Return whether all modules of a part, one of `parts`, lose the same share."""
        allocation = self.allocation if isinstance(self.allocation, str) else self.allocation.get(part[0].kind)
        return allocation == "uniform"

    def may_be_uneven(self, modules: Sequence[Units]) -> bool:
        """Return whether layers of one kind may keep different numbers of units."""
        return bool(self.keep_layers) or not all(map(self.uniform, self.parts(modules)))

    def least(self, module: Units) -> int:
        """Return the least number of units that a module keeps: 1, unless there is a field `min_...` for its kind."""
        return int(getattr(self, f"min_{KINDS[module.kind].units}", 1))

    def multiple(self, module: Units) -> int:
        """Return the divisor of the units that a module keeps, if it loses any; of whole groups with `unit: group`."""
        multiple: int = getattr(self.multiple_of, KINDS[module.kind].units, None) or 1
        return multiple * module.group_size if self.unit == "group" else multiple

    def protected(self, modules: Sequence[Units]) -> set[int]:
        """Return the positions in `modules` of those that lose nothing, by `keep_layers`."""
        protected: set[int] = set()
        for kind in {module.kind for module in modules}:
            layers = [position for position, module in enumerate(modules) if module.kind == kind]
            protected.update(layers[layer] for layer in self.keep_layers if -len(layers) <= layer < len(layers))
        return protected


class CompensationSection(Section):
    """How the output projections are refitted after the cut, without training; see `compensate`.

    The logits of a language model are then scaled to be as certain as the dense model's, see `fit_logit_scale`.

    Attributes:
        method: "least_squares" refits weights and bias. "bias" only adds the removed units' average output to the bias,
            so the projections need one.
        samples: How many rows of the calibration split to use, without their labels.
        ridge: Strength of the ridge, relative to the mean of the diagonal of the inputs' covariance. By default the
            one with the smallest error on held-out tokens is chosen for every layer.
        sequential: Fit layer by layer, with inputs from the layers already cut and refitted, so that later layers make
            up for what earlier ones lack. It pays in deep models, and takes about half as long again. By default true
            for a model that generates and calls every layer once, unless `token_weights` are given.
        token_weights: How evenly least squares weighs tokens, in (0, 1]. 1 weighs all alike. Below 1, the rest of the
            weight follows the squared gradient of the prediction at each token, which helps if the prediction reads few
            tokens, as in a ViT with a class token. By default 1; `criterion: auto` and `deploy` choose it on other
            rows.
    """

    method: Literal["bias", "least_squares"] = "least_squares"
    samples: int = Field(512, ge=5)
    ridge: float | None = Field(None, gt=0)
    sequential: bool | None = None
    token_weights: float | None = Field(None, gt=0, le=1)

    @model_validator(mode="after")
    def _weighs_tokens_in_one_pass(self) -> CompensationSection:
        if self.sequential and self.token_weights not in (None, 1):
            raise ValueError(
                f"sequential refits weigh all tokens alike, got token_weights: {self.token_weights}; leave out one"
            )
        return self


class ExportSection(Section):
    """The model in the format of another runtime.

    Attributes:
        format: "onnx" writes an ONNX folder, "gguf" a GGUF file for llama.cpp (decoders like LLaMA's only). "openvino",
            with `quantize: int8`, writes the ONNX folder and, calibrated on 300 of the rows that refit the model, or
            else score it, OpenVINO's own files to `openvino-int8/` (encoders only). A package may bring others.
        provider: Execution provider that an ONNX graph is fused for.
        dtype: Dtype that the weights are stored in: float32 or float16; in a GGUF file also bfloat16, q8_0 or q4_0.
        quantize: "int8" also writes the ONNX graph with its linear layers in 8 bits, to `onnx-int8/`; for decoders
            "int4" writes 4 bits, to `onnx-int4/`, rounded by the rows that refit the model, or else score it. Both
            models are then judged and timed in float32 and in these bits.
    """

    format: str = "onnx"
    provider: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "float16", "bfloat16", "q8_0", "q4_0"] = "float32"
    quantize: Literal["int8", "int4"] | None = None

    @property
    def shown(self) -> str:
        """Format, provider and dtype for messages, "onnx, cpu, float32" by default."""
        return f"{self.format}, {self.provider}, {self.dtype}"

    @property
    def unquantized(self) -> ExportSection:
        """The options of the export that is then quantised; OpenVINO's own format is made from ONNX."""
        format = "onnx" if self.format == "openvino" else self.format
        return self.model_copy(update={"format": format, "quantize": None})

    @property
    def bits_refusal(self) -> str | None:
        """Why the export cannot be quantised: it is for a GPU, or not in float32; None if it can be, or is not to be.

        Public for `export_options`, whose sections are not validated.
        """
        if self.quantize is None or (self.provider, self.dtype) == ("cpu", "float32"):
            return None
        got = f"{self.provider} and {self.dtype}"
        return f"quantize: {self.quantize} needs provider: cpu and dtype: float32, got {got}; leave them out"

    @model_validator(mode="after")
    def _fits_the_format(self) -> ExportSection:
        quantize, gguf = self.quantize, self.format == "gguf"
        if self.format == "openvino" and quantize != "int8":
            raise ValueError(
                f"format: openvino needs quantize: int8, got {quantize}; set it, or set format: onnx, which OpenVINO "
                "reads as it is"
            )
        if quantize and gguf:
            raise ValueError(f"quantize belongs to format: onnx, got {quantize} for gguf; set dtype: q8_0 or q4_0")
        if self.bits_refusal:
            raise ValueError(self.bits_refusal)
        if self.format in ("onnx", "openvino") and self.dtype not in ("float32", "float16"):
            raise ValueError(f"dtype must be float32 or float16 for format: onnx, got {self.dtype}; set format: gguf")
        if gguf and self.provider != "cpu":
            raise ValueError(f"provider belongs to format: onnx, got {self.provider} for format: gguf; leave it out")
        return self


class CascadeSection(Section):
    """Leave the rows that the slim classifier is unsure of to the dense one, in one ONNX graph in `onnx-cascade/`.

    With `quantize: int8`, its slim part is in 8 bits. The threshold is chosen on held-out rows, see `HeldOutSection`;
    without that section, on part of the evaluated split if that is large enough.

    Attributes:
        disagreement: Largest share of the answers that may differ from the dense model's, with 95 % confidence.
        samples: How many held-out rows to draw.
    """

    disagreement: float = Field(gt=0, lt=1)
    samples: int = Field(4096, ge=1)


class MeasureSection(Section):
    """How both models are timed: on which runtimes, at which shapes, and how often.

    Attributes:
        runtimes: Runtimes to time on, such as "torch" or "onnxruntime-cpu". An empty list times nothing; the ONNX model
            is still written and compared with torch.
        shapes: (batch, sequence) pairs; an image model's sequence follows from its image size, so (batch,) is enough.
            By default a batch of 1 and of 8, of 128 tokens; for `deploy`, and under a budget of time without a
            sequence, as long as the rows, see `TimedSection`.
        repeats: Timed runs of each model, at least.
    """

    runtimes: tuple[str, ...] = ("torch", "onnxruntime-cpu")
    shapes: tuple[Annotated[tuple[PositiveInt, ...], Field(min_length=1, max_length=2)], ...] = ()
    repeats: int = Field(30, ge=2)


class VocabularySection(Section):
    """Remove the tokens that texts do not use, with their rows of the embeddings and of a language model's head.

    Heads and neurons are scored, cut and refitted on the model that is left. Held-out rows are read with the smaller
    vocabulary and compared with the predictions of the model as it was; a language model is judged by
    `nats_per_character`. A budget counts what the tokens save, but a budget of time is relative to the model without
    them.

    Attributes:
        files: Files of texts like those that will be read, as for `data.files`: all columns of text count, by
            themselves and in place of the columns that `data` names. By default all rows of the split that units are
            scored on, as they are read.
    """

    files: tuple[Path, ...] = ()


class DeploySection(Section):
    """Search for the fastest form to deploy, in place of a run with a budget; see `hies_export.deploy`.

    Attributes:
        keep: Share of the dense model's predictions on held-out rows that must stay, in (0, 1).
        runtimes: Runtimes that may be deployed on; by default all that are installed.
    """

    keep: float = Field(0.99, gt=0, lt=1)
    runtimes: tuple[str, ...] = ()
