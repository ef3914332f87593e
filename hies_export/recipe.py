"""The recipe: everything a run is told, checked before any work starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .errors import RecipeError, did_you_mean

if TYPE_CHECKING:
    from .progress import Progress
    from .report.report import Report

Task = Literal["text-classification", "image-classification", "text-generation", "image-text-to-text"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataSection(_Section):
    """Where the rows are and which columns matter.

    Attributes:
        name: Hub data set, its configuration last ("nyu-mll/glue/sst2"); or
        files: split -> file (jsonl, csv, tsv, parquet, txt, gzipped or not) or image folder.
        text: One or two text columns; one for text-generation.
        image: Image column.
        prompt: What to ask, with the columns it reads in braces: "Question: {question}"; instead of `text` in
            text-generation, and always in image-text-to-text.
        answer: Column of answers; the loss and the quality are those of its tokens.
        label: Label column; without one, the model's own predictions stand in for calibration. Where `answer` holds
            choices, the column with the number of the right one.
        max_length: Longest sequence in tokens; the model's own limit by default, and at most 512 for packed text.
        packing: Whether texts to generate are joined and cut into blocks of max_length, or are a sample each.
    """

    name: str | None = None
    files: dict[str, Path] | None = None
    text: tuple[str, ...] = ()
    image: str | None = None
    prompt: str | None = None
    answer: str | None = None
    label: str | None = None
    max_length: int | None = Field(None, ge=2)
    packing: bool = True

    @field_validator("text", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_source(self) -> DataSection:
        if (self.name is None) == (self.files is None):
            given = "both" if self.name is not None else "neither"
            raise ValueError(f"exactly one of name (a Hub data set) and files must be given, got {given}")
        if len(self.text) > 2:
            raise ValueError(f"text must be one or two columns, got {len(self.text)}")
        if (self.prompt is None) != (self.answer is None):
            given, missing = ("prompt", "answer") if self.answer is None else ("answer", "prompt")
            raise ValueError(f"prompt and answer go together, got {given} without {missing}")
        return self


class CalibrationSection(_Section):
    """Which rows the heads are scored on: `samples` rows of `split`, drawn with `seed`."""

    split: str = "train"
    samples: int = Field(32, ge=1)
    batch_size: int = Field(16, ge=1)
    seed: int = Field(0, ge=0)


class EvaluationSection(_Section):
    """Which rows quality is judged on: the first `samples` of `split`; all of them by default.

    Attributes:
        metrics: Names in `hies_export.evaluate.metrics`, or what `evaluate.load` finds: its own, `owner/name` on the
            Hub, or a local script. The first one is the report's. By default those usual for the task.
        stability_tolerance: How far a regression output may move and still count as the same prediction.
        lm_eval: Benchmarks of the extra lm-eval that language models are judged on besides, names of its tasks or YAML
            files; `samples` documents of each.
    """

    split: str = "validation"
    samples: int | None = Field(None, ge=1)
    batch_size: int = Field(32, ge=1)
    metrics: tuple[str, ...] = ()
    stability_tolerance: float = Field(0.25, gt=0)
    lm_eval: tuple[str, ...] = ()


class LatencyBudget(_Section):
    """At most this share of the dense model's time, on a runtime and at a shape.

    An image model's sequence follows from its image size, and so does a vision-language model's from its prompts.
    """

    ratio: float
    runtime: str = "onnxruntime-cpu"
    batch: int = Field(8, ge=1)
    sequence: int | None = Field(None, ge=1)

    @field_validator("ratio")
    @classmethod
    def _is_below_dense(cls, value: float) -> float:
        return _share_of_dense("ratio", value)

    @field_validator("runtime")
    @classmethod
    def _is_known(cls, value: str) -> str:
        return _known_runtime(value)

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, sequence), or (batch,)."""
        return (self.batch,) if self.sequence is None else (self.batch, self.sequence)


class DropBudget(_Section):
    """As many heads as can go while the metric, on held-out rows, gets worse by at most `by`."""

    metric: str
    by: float

    @field_validator("metric")
    @classmethod
    def _is_known(cls, value: str) -> str:
        from .evaluate.metrics import METRICS

        if value not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {value!r}{did_you_mean(value, METRICS)}")
        return value

    @field_validator("by")
    @classmethod
    def _is_a_drop(cls, value: float) -> float:
        if value < 0:
            raise ValueError(f"by must be at least 0, got {value:g}; 0.01 allows an accuracy of 0.88 to become 0.87")
        return value


class BudgetSection(_Section):
    """How much goes: exactly one of these; see `hies_export.budget`.

    Attributes:
        heads: Share of heads to remove, in (0, 1).
        flops: At most this share of the dense model's FLOPs, at the first measured shape.
        latency: At most this share of the dense model's time.
        max_drop: As much as a metric allows.
    """

    heads: float | None = None
    flops: float | None = None
    latency: LatencyBudget | None = None
    max_drop: DropBudget | None = None

    @field_validator("heads")
    @classmethod
    def _is_a_share(cls, value: float | None) -> float | None:
        if value is not None and not 0 < value < 1:
            raise ValueError(f"sparsity must be in (0, 1), got {value:g}; 0.3 removes 30 % of the heads")
        return value

    @field_validator("flops")
    @classmethod
    def _is_below_dense(cls, value: float | None) -> float | None:
        return value if value is None else _share_of_dense("flops", value)

    @model_validator(mode="after")
    def _is_one(self) -> BudgetSection:
        names = list(type(self).model_fields)
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(names)} must be given, got {' and '.join(given) or 'none'}")
        return self


def _share_of_dense(name: str, value: float) -> float:
    if not 0 < value < 1:
        raise ValueError(
            f"{name} must be in (0, 1), a share of the dense model's, got {value:g}; 0.85 takes 15 % of it away"
        )
    return value


def _known_runtime(name: str) -> str:
    from .runtimes.registry import RUNTIMES

    if name not in RUNTIMES:
        raise ValueError(f"a runtime must be one of {', '.join(RUNTIMES)}, got {name!r}{did_you_mean(name, RUNTIMES)}")
    return name


class CompensationSection(_Section):
    """How the output projections are refitted after the cut; see `compensate_heads`.

    `samples` rows of the calibration split are used, without their labels.
    """

    method: Literal["bias", "least_squares"] = "least_squares"
    samples: int = Field(512, ge=5)
    ridge: float | None = Field(None, gt=0)
    sequential: bool = False


class PruneSection(_Section):
    """How heads are scored, chosen and made up for; see `score_heads`, `select_heads` and `compensate_heads`.

    `criterion: hies-compensated` (see `score_compensated`) presumes `compensation`, uses neither alpha nor labels, and
    wants `calibration.samples: 256`. Of a model of several towers those named in `towers` lose heads, by default the
    language model; of others, all of it. In `steps`, a share of the heads goes at a time, and what the others mean is
    found out anew; see `choice.choose`.
    """

    criterion: str = "hies"
    alpha: float | Literal["auto"] = 0.9
    normalize: Literal["model", "layer"] = "model"
    budget: BudgetSection
    allocation: Literal["global", "uniform"] = "global"
    unit: Literal["group", "query"] = "group"
    towers: tuple[str, ...] = ()
    min_heads: int = Field(1, ge=1)
    keep_layers: tuple[int, ...] = ()
    multiple_of: int = Field(1, ge=1)
    steps: int = Field(1, ge=1)
    compensation: CompensationSection | None = None

    @field_validator("criterion")
    @classmethod
    def _is_known(cls, value: str) -> str:
        from .baselines.names import JUDGED_ONLY
        from .score.criteria import criterion_names

        if value in JUDGED_ONLY:
            raise ValueError(
                f"criterion must remove whole heads to be cut and saved, got {value!r}, which removes parts of all of "
                f"them; compare with it in hies-export sweep --criteria hies,{value}"
            )
        known = criterion_names()
        if value not in known:
            raise ValueError(f"criterion must be one of {', '.join(known)}, got {value!r}{did_you_mean(value, known)}")
        return value

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
    def _can_take_steps(self) -> PruneSection:
        budget = next(name for name in type(self.budget).model_fields if getattr(self.budget, name) is not None)
        given = {
            f"a budget of {budget}": budget != "heads",
            f"multiple_of {self.multiple_of}": self.multiple_of > 1,
            # With one query head left in a group it would turn to the groups.
            "unit query": self.unit == "query",
        }
        if self.steps > 1 and any(given.values()):
            said = " and ".join(name for name, is_given in given.items() if is_given)
            raise ValueError(
                f"steps: {self.steps} needs a budget of heads in units of groups, got {said}; set steps: 1"
            )
        return self


class ExportSection(_Section):
    """The ONNX model: the execution provider its graph is fused for, and its dtype."""

    provider: Literal["cpu", "cuda", "tensorrt"] = "cpu"
    dtype: Literal["float32", "float16"] = "float32"


class MeasureSection(_Section):
    """What is timed.

    Attributes:
        runtimes: Names in `hies_export.measure.runtimes`.
        dtypes: What the models are timed in, each on the runtimes that can run it; by default torch runs the model
            as it is, and ONNX Runtime the graph as it is exported. Only time is measured in the others.
        shapes: (batch, sequence) pairs; an image model's sequence follows from its image size, so (batch,) is enough.
        repeats: Timed runs of each model, at least.
        min_seconds: Go on beyond `repeats` until the timed runs of a shape took this long together.
    """

    runtimes: tuple[str, ...] = ("torch", "onnxruntime-cpu")
    dtypes: tuple[Literal["float32", "float16", "bfloat16"], ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    repeats: int = Field(30, ge=2)
    min_seconds: float = Field(0.0, ge=0)

    @field_validator("shapes")
    @classmethod
    def _are_shapes(cls, value: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        for shape in value:
            if len(shape) not in (1, 2) or min(shape) < 1:
                raise ValueError(f"a shape must be [batch, sequence] (or [batch] for images), got {list(shape)}")
        return value

    @field_validator("runtimes")
    @classmethod
    def _are_known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_known_runtime(name) for name in value)


class PruningRecipe(_Section):
    """A whole run: model, data, how to prune, what to measure. The fields are those of the YAML recipe.

    Attributes:
        model: Folder or Hub id of a fine-tuned model.
        revision: Revision of a Hub model.
        dtype: What the model is loaded, scored and saved in: float32 (default on CPU), float16, bfloat16, or "auto"
            for the checkpoint's own (default on GPU).
        device_map: Where the layers go, as in `from_pretrained`: "auto" spreads a model over all GPUs. By default the
            GPU if there is one.
        task: text-classification (regression is text-classification with one label), image-classification,
            text-generation or image-text-to-text.
        data: See `DataSection`.
        calibration: See `CalibrationSection`.
        evaluation: See `EvaluationSection`.
        prune: See `PruneSection`.
        export: See `ExportSection`.
        measure: See `MeasureSection`.
        output: Folder to write; must not exist.

    Raises:
        RecipeError: Fields are unknown, missing or impossible; all problems at once.

    Examples:
        >>> PruningRecipe(model="m", task="text-classification", data={"name": "glue/sst2", "text": "sentence"},
        ...               prune={"budget": {"heads": 1.5}})
        Traceback (most recent call last):
        hies_export.errors.RecipeError: prune.budget.heads: sparsity must be in (0, 1), got 1.5; ...
    """

    model: str
    revision: str | None = None
    dtype: Literal["float32", "float16", "bfloat16", "auto"] | None = None
    device_map: str | None = None
    task: Task
    data: DataSection
    calibration: CalibrationSection = CalibrationSection()
    evaluation: EvaluationSection = EvaluationSection()
    prune: PruneSection
    export: ExportSection = ExportSection()
    measure: MeasureSection = MeasureSection()
    output: Path = Path("runs/hies")

    def __init__(self, **fields: Any):
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise RecipeError(list(_sentences(error, type(self)))) from None

    @model_validator(mode="after")
    def _a_latency_budget_has_one_dtype(self) -> PruningRecipe:
        if self.prune.budget.latency is not None and self.measure.dtypes:
            raise ValueError(
                "a latency budget is met in the dtype of the model or of the export, so measure.dtypes must not be "
                f"given, got {', '.join(self.measure.dtypes)}; time other dtypes with hies-export bench"
            )
        return self

    @model_validator(mode="after")
    def _columns_fit_the_task(self) -> PruningRecipe:
        data = self.data
        if self.evaluation.lm_eval and self.task != "text-generation":
            raise ValueError(f"evaluation.lm_eval judges language models (text-generation), got task: {self.task}")
        given = {name for name in ("text", "image", "prompt", "label") if getattr(data, name)}
        wanted: dict[str, tuple[set[str], set[str], str]] = {
            "text-classification": ({"text"}, {"label"}, "data.text (one or two columns)"),
            "image-classification": ({"image"}, {"label"}, "data.image (a column of images)"),
            "image-text-to-text": ({"image", "prompt"}, {"label"}, "data.image, data.prompt and data.answer"),
        }
        if self.task == "text-generation":
            if given not in ({"text"}, {"prompt"}, {"prompt", "label"}) or len(data.text) > 1:
                raise ValueError("text-generation needs data.text (one column), or data.prompt and data.answer")
            return self
        needed, allowed, said = wanted[self.task]
        if not needed <= given or given - needed - allowed:
            others = ", ".join(f"data.{name}" for name in sorted(given - needed - allowed))
            raise ValueError(f"{self.task} needs {said}" + (f" and no {others}" if others else ""))
        return self

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: dict[str, Any] | None = None) -> PruningRecipe:
        """Read a recipe file; relative paths in it are relative to the file.

        Args:
            path: The YAML file.
            overrides: Dotted field -> value, e.g. {"prune.alpha": 0.5}; their relative paths are relative to the
                working folder.

        Raises:
            RecipeError: No such file, no valid YAML, or fields that are unknown, missing or impossible.
        """
        path = Path(path)
        if not path.is_file():
            raise RecipeError([f"a recipe must be a YAML file, but there is no file {path}"])
        try:
            fields = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise RecipeError(
                [f"a recipe must be valid YAML, but {path} is not: {' '.join(str(error).split())}"]
            ) from None
        if not isinstance(fields, dict):
            raise RecipeError([f"a recipe must be a mapping of fields, but {path} holds {type(fields).__name__}"])
        _resolve_paths(fields, path.parent)
        for key, value in (overrides or {}).items():
            _override(fields, key, value)
        return cls(**fields)

    def run(self, *, progress: Progress | None = None) -> Report:
        """Run the whole line and write `output`; see `hies_export.run`."""
        import hies_export

        return hies_export.run(self, progress=progress)


def _resolve_paths(fields: dict[str, Any], folder: Path) -> None:
    """Make what a file says relative to that file; a model that is no folder there is a Hub id."""
    if isinstance(fields.get("model"), str) and (folder / fields["model"]).exists():
        fields["model"] = os.path.normpath(folder / fields["model"])
    if isinstance(fields.get("output"), str):
        fields["output"] = folder / fields["output"]
    evaluation = fields.get("evaluation")
    if isinstance(evaluation, dict) and isinstance(evaluation.get("metrics"), list):
        evaluation["metrics"] = [
            str(folder / name) if "/" in str(name) and (folder / str(name)).exists() else name
            for name in evaluation["metrics"]
        ]
    if isinstance(evaluation, dict) and isinstance(evaluation.get("lm_eval"), list):
        files = [folder / str(task) for task in evaluation["lm_eval"]]
        named = zip(evaluation["lm_eval"], files, strict=True)
        evaluation["lm_eval"] = [str(file) if file.suffix in (".yaml", ".yml") else task for task, file in named]
    data = fields.get("data")
    if isinstance(data, dict) and isinstance(data.get("files"), dict):
        data["files"] = {k: folder / v if isinstance(v, str) else v for k, v in data["files"].items()}


def _override(fields: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        child = fields.setdefault(section, {})
        if not isinstance(child, dict):
            raise RecipeError([f"{dotted} cannot be set: {section} is a plain value in this recipe"])
        fields = child
    fields[last] = value


def _sentences(error: ValidationError, recipe: type[BaseModel]) -> Iterator[str]:
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"])
        given = problem["input"]
        if problem["type"] == "extra_forbidden":
            known = list(_section_at(recipe, problem["loc"][:-1]).model_fields)
            nearest = did_you_mean(str(problem["loc"][-1]), known) or f"; the fields here are {', '.join(known)}"
            yield f"{where} is not a field of the recipe{nearest}"
        elif problem["type"] == "missing":
            yield f"{where} must be given"
        elif problem["type"] == "value_error":
            reason = str(problem["ctx"]["error"])
            yield f"{where}: {reason}" if where else reason
        else:
            message = problem["msg"].removeprefix("Input should be ")
            yield f"{where} must be {message}, got {given!r}"


def _section_at(section: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel]:
    for part in location:
        annotation = section.model_fields[str(part)].annotation
        candidates = get_args(annotation) if get_origin(annotation) else (annotation,)
        section = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return section
