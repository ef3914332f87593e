"""The whole recipe: how to prune, the rules between sections, and how a recipe is read from YAML.

Fields of a YAML file, or keyword arguments, become a `PruningRecipe`, frozen and consistent, or one `RecipeError` that
names all problems at once. Nothing is loaded: `pipeline.load_recipe` finds out whether model, data and recipe fit
together.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ValidationError, field_validator, model_validator
from ruamel.yaml import YAML

from ..entry_points import AUTO, FORMATS, RUNTIMES, criterion_names
from ..errors import RecipeError, did_you_mean, one_of, quoted, refusing
from ..kinds import ATTENTION, BOTH, KINDS, KindName
from ..progress import SILENT, Progress
from ..recipe.budget import Budget, KeepBudget
from ..recipe.sections import (
    CalibrationSection,
    CascadeSection,
    CompensationSection,
    CompoundSection,
    Constraints,
    DataSection,
    DeploySection,
    EvaluationSection,
    ExportSection,
    HeldOutSection,
    MeasureSection,
    Section,
    VocabularySection,
)
from ..tasks import TASKS

if TYPE_CHECKING:
    from ..report.report import Report

# Shares of the FLOPs that `deploy` tries in compounds.
FLOPS_TO_TRY = (0.75, 0.55, 0.35)
# The budget of a recipe that removes neither heads nor neurons.
NOTHING = Budget.model_construct(heads=0.0)


def _known(name: str, known: Iterable[str], *, what: str) -> str:
    """Return a name that is among the known ones; a ValueError refuses others."""
    if name not in (names := tuple(known)):
        raise ValueError(one_of(what, names, name))
    return name


def _with_known_metric(budget: Budget) -> Budget:
    """Return a budget whose metric is known; where a share of the metric may be kept, it is 0.99 by default."""
    from ..evaluate.metrics import METRICS

    keep, metric = budget.keep, METRICS[_known(str(budget.metric), METRICS, what="metric")]
    if keep is None or keep.by is not None:
        return budget
    if not (metric.ranks or metric.terms is not None):
        given = "metric" if keep.predictions is None else "predictions and metric"
        raise ValueError(f"keep needs predictions, or metric and by, got {given}")
    share = 0.99 if keep.predictions is None else keep.predictions
    return budget.model_copy(update={"keep": keep.model_copy(update={"predictions": share})})


class PruneSection(Constraints):
    """How units are scored, selected and compensated; see `score_units`, `select_units` and `compensate`.

    The budget decides what is not given. A budget of heads asks the paper's question: `modules` are attention,
    `criterion` is HIES, and nothing is refitted. Every other budget asks for a smaller model with the same answers:
    heads and neurons (heads alone, where neurons cannot go), `compensated`, least squares.

    The first fields are constraints on which units go, whatever the budget; see `Constraints`.

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
        budget: See `Budget`. A recipe's `deploy` chooses how much is removed in place of it. With `vocabulary` and no
            budget, only tokens go.
        towers: The parts of a composite model that lose heads; by default the language model if there is one.
        compensation: See `CompensationSection`; None for no compensation, also where the default is least squares.
    """

    modules: tuple[KindName, ...] = (ATTENTION,)
    criterion: Annotated[str, AfterValidator(lambda name: _known(name, criterion_names(), what="criterion"))] = "hies"
    alpha: float | Literal["auto"] = 0.9
    normalize: Literal["model", "layer"] = "model"
    budget: Budget | None = None
    towers: tuple[str, ...] = ()
    compensation: CompensationSection | None = None

    @property
    def goal(self) -> Budget:
        """The budget, which must be given; the section `PruningRecipe.options` always has one."""
        assert self.budget is not None
        return self.budget

    @property
    def judged_on_held_out(self) -> str | None:
        """What is chosen on held-out rows, for messages; None if nothing is, as by a plan in place of a budget."""
        if self.budget is None:
            return None
        if self.budget.searched:
            return self.budget.kind
        if self.criterion == AUTO:
            return "criterion: auto"
        if self.alpha != AUTO:
            return None
        from ..score.criteria import uses_alpha

        return "alpha: auto" if uses_alpha(self.criterion) else None

    @field_validator("modules")
    @classmethod
    def _are_kinds(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or len(set(value)) < len(value):
            raise ValueError(f"modules must be among {' and '.join(KINDS)}, each once, got {list(value)}")
        return tuple(kind for kind in KINDS if kind in value)

    @field_validator("alpha", mode="before")
    @classmethod
    def _is_a_weight(cls, value: Any) -> Any:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value != "auto" and not (number and 0 <= value < 1):
            raise ValueError(
                f"alpha must be auto or a number in [0, 1), got {value!r}; for importance alone use criterion: his"
            )
        return value

    @field_validator("budget")
    @classmethod
    def _names_a_known_runtime_and_metric(cls, value: Budget | None) -> Budget | None:
        if value is None:
            return value
        if value.timed is not None:
            _known(value.timed.runtime, RUNTIMES, what="a runtime")
        return value if value.metric is None else _with_known_metric(value)

    @model_validator(mode="after")
    def _defaults_follow_the_budget(self) -> PruneSection:
        if self.budget is None or self.budget.heads is None:
            usual = {"modules": BOTH, "criterion": "compensated", "compensation": CompensationSection()}
            # Not added to `model_fields_set`, because a copy with another budget has other defaults.
            vars(self).update({name: value for name, value in usual.items() if name not in self.model_fields_set})
        return self

    @model_validator(mode="after")
    def _budget_covers_modules(self) -> PruneSection:
        if self.budget is not None and self.budget.heads is not None and self.modules != (ATTENTION,):
            raise ValueError(
                f"budget.heads is for modules: [attention], got modules: [{', '.join(self.modules)}]; "
                "set budget.flops, parameters, latency or keep, which cover neurons too"
            )
        return self


def losing_nothing(prune: PruneSection) -> PruneSection:
    """Return the section of a model that loses neither heads nor neurons."""
    usual = {"modules": (ATTENTION,), "criterion": "his", "compensation": None}
    return prune.model_copy(update={"budget": NOTHING, **usual})


class PruningRecipe(Section):
    """A whole run: model, data, how to prune, what to measure. The fields are those of the YAML recipe.

    Attributes:
        model: Folder or Hub id of a fine-tuned model.
        revision: Revision of a Hub model.
        dtype: Dtype for loading, scoring and, unless `save_dtype` is given, saving: float32 (default on CPU), float16,
            bfloat16, or "auto" for the checkpoint's own (default on GPU).
        save_dtype: Dtype of the slim checkpoint, as for `dtype`. By default `dtype` if it is given, and else the
            checkpoint's own, so that the slim one is not larger. Evaluation, export and timing use weights rounded to
            it.
        task: What the model predicts: one of the [tasks](tasks.md), such as text-classification.
        data: See `DataSection`.
        calibration: See `CalibrationSection`.
        held_out: See `HeldOutSection`.
        evaluation: See `EvaluationSection`.
        vocabulary: See `VocabularySection`.
        prune: See `PruneSection`.
        export: See `ExportSection`.
        cascade: See `CascadeSection`.
        measure: See `MeasureSection`.
        deploy: See `DeploySection`. With it, `prune` has no budget.
        output: Folder to write; must not exist.

    Raises:
        RecipeError: Fields are unknown, missing or impossible; all problems at once.

    Examples:
        >>> PruningRecipe(model="m", task="text-classification", data={"name": "glue/sst2", "text": "sentence"},
        ...               prune={"budget": {"heads": 1.5}})
        Traceback (most recent call last):
        hies_export.errors.RecipeError: prune.budget.heads must be less than 1, got 1.5
    """

    model: str
    revision: str | None = None
    dtype: Literal["float32", "float16", "bfloat16", "auto"] | None = None
    save_dtype: Literal["float32", "float16", "bfloat16", "auto"] | None = None
    task: Annotated[str, AfterValidator(lambda name: _known(name, TASKS, what="task"))]
    data: DataSection
    calibration: CalibrationSection = CalibrationSection()
    held_out: HeldOutSection | None = None
    evaluation: EvaluationSection = EvaluationSection()
    vocabulary: VocabularySection | None = None
    prune: PruneSection = PruneSection()
    export: ExportSection = ExportSection()
    cascade: CascadeSection | None = None
    measure: MeasureSection = MeasureSection()
    deploy: DeploySection | None = None
    output: Path = Path("runs/hies")

    def __init__(self, /, **fields: Any):
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise RecipeError([*sentences(error, type(self))]) from None

    @field_validator("measure", "deploy")
    @classmethod
    def _names_known_runtimes(cls, value: MeasureSection | DeploySection | None) -> Any:
        for name in () if value is None else value.runtimes:
            _known(name, RUNTIMES, what="a runtime")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> PruningRecipe:
        task, deploy, compound, given = TASKS[self.task], self.deploy, self.compound, self.prune.budget
        export, name = self.export, self.task
        if refusal := task.refusal(self.data):
            raise ValueError(refusal)
        if deploy and given:
            raise ValueError("deploy chooses how much to remove, and prune.budget sets it too; leave out one of them")
        if not (deploy or given or self.vocabulary):
            raise ValueError("prune.budget must be given")
        if self.vocabulary and not task.text:
            raise ValueError(f"vocabulary is for models that read text, got task: {name}; leave it out")
        if compound is not None:
            compound.check(self, classifies=task.classifies)
        if deploy and task.in_parts:
            raise ValueError(
                f"deploy compares models that are one graph, got task: {name}, which is exported as several; prune it "
                "with hies-export run, and a budget of keep"
            )
        if deploy and export.shown != ExportSection().shown:
            raise ValueError(f"deploy exports what each runtime reads, got export: {export.shown}; leave it out")
        if self.goal.timed and self.measure.dtypes:
            raise ValueError(
                "a budget of time is met in the dtype of the model or of the export, so measure.dtypes must not "
                f"be given, got {', '.join(self.measure.dtypes)}; time other dtypes with hies-export bench"
            )
        if export.format == "gguf" and not task.decodes_text:
            raise ValueError(f"export.format gguf is for text-generation, got task: {name}; set it to onnx")
        if export.format == "openvino" and (task.generative or task.in_parts):
            raise ValueError(f"export.format openvino is for encoders, got task: {name}; set it to onnx")
        return self

    @field_validator("export")
    @classmethod
    def _has_a_known_format(cls, export: ExportSection) -> ExportSection:
        _known(export.format, FORMATS, what="format")
        return export

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
        return cls(**read_fields(path, overrides or {}))

    def to_yaml(self) -> str:
        """Return the recipe as YAML that means the same in any folder: paths are absolute, and the method is spelt out.

        Fields that were not given are left out, except those of `prune` that follow from the budget.
        """
        fields = self.model_dump(mode="json", exclude_unset=True)
        chosen = self.prune.model_dump(mode="json", include={"modules", "criterion", "compensation"}, exclude_none=True)
        fields["prune"] = {**chosen, **fields.get("prune", {})}
        _resolve_paths(fields, Path.cwd())
        file = io.StringIO()
        writer: Any = YAML(typ="safe", pure=True)
        writer.default_flow_style = writer.sort_base_mapping_type_on_output = False
        writer.dump(json.loads(json.dumps(fields, default=str)), file)
        return file.getvalue()

    def with_overrides(self, overrides: dict[str, Any]) -> PruningRecipe:
        """Return the recipe with other values of some fields: dotted field -> value, as for `from_yaml`."""
        return type(self)(**overridden(self.model_dump(exclude_unset=True), overrides))

    def to_deploy(self, *, keep: float | None = None, runtimes: Sequence[str] | None = None) -> PruningRecipe:
        """Return the recipe with a section `deploy`, some of its fields given, in place of the budget."""
        fields = self.model_dump(exclude_unset=True)
        fields["prune"] = {name: value for name, value in fields.get("prune", {}).items() if name != "budget"}
        given = {"keep": keep, "runtimes": runtimes}
        asked = {name: value for name, value in given.items() if value is not None}
        return type(self)(**{**fields, "deploy": {**(fields.get("deploy") or {}), **asked}})

    @property
    def compound(self) -> CompoundSection | None:
        """The section of a form of both models; None if none is asked for."""
        return self.cascade

    @property
    def goal(self) -> Budget:
        """How much is removed: the budget, or the promise of `deploy`.

        Without either, as where only the vocabulary is trimmed, it is a budget of no heads.
        """
        if self.prune.budget is not None:
            return self.prune.budget
        if self.deploy is not None:
            return Budget(keep=KeepBudget(predictions=self.deploy.keep))
        return NOTHING

    @property
    def options(self) -> PruneSection:
        """How to prune: the section `prune`, whose budget is the goal."""
        goal = self.goal
        return losing_nothing(self.prune) if goal is NOTHING else self.prune.model_copy(update={"budget": goal})

    @property
    def inputs(self) -> dict[str, str | Path]:
        """The inputs of the recipe by field: the model and the data files. A Hub id stays as it is."""
        texts = () if self.vocabulary is None else self.vocabulary.files
        return {
            "model": self.model,
            **{f"data.files.{split}": path for split, path in (self.data.files or {}).items()},
            **{f"vocabulary.files.{number}": path for number, path in enumerate(texts)},
        }

    def run(self, *, progress: Progress = SILENT) -> Report:
        """Run all stages, write `output` and return the report; see `hies_export.run`."""
        # By its name, because `pipeline.run` imports this file.
        report: Report = import_module("hies_export").run(self, progress=progress)
        return report


# Fields with paths.
_PATHS = ("output", "data.files", "vocabulary.files", "model", "evaluation.metrics")
# pydantic's kinds of errors that name Python's types -> what a recipe calls them.
_KINDS = {"model_type": "a mapping of fields", "dict_type": "a mapping", "tuple_type": "a list", "path_type": "a path"}


def read_fields(path: str | Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a recipe file, its relative paths made relative to the file, with dotted overrides."""
    path = Path(path)
    if not os.path.isfile(path):
        raise RecipeError(f"a recipe must be a YAML file, but there is no file {path}")
    with refusing(f"{path} must be a file that can be read", kind=RecipeError):
        text = path.read_text(encoding="utf-8")
    fields = parse_yaml(text, source=str(path))
    if not isinstance(fields, dict):
        raise RecipeError(f"a recipe must be a mapping of fields, but {path} holds {type(fields).__name__}")
    fields = {str(name): value for name, value in fields.items()}
    _resolve_paths(fields, path.parent)
    return overridden(fields, overrides)


def parse_yaml(text: str, *, source: str) -> Any:
    """Return the value of a text in YAML 1.2; a RecipeError names its `source`, and the line."""
    with refusing(f"{source} must be plain YAML", kind=RecipeError):
        return YAML(typ="safe", pure=True).load(text)


def overridden(fields: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Set dotted fields, such as "prune.budget.flops", in place, and return all fields."""
    for dotted, value in overrides.items():
        *sections, last = dotted.split(".")
        inner = fields
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise RecipeError(f"{dotted} cannot be set: {section} is a plain value in this recipe")
        inner[last] = value
    return fields


def _resolve_paths(fields: dict[str, Any], folder: Path) -> None:
    """Make the relative paths of `_PATHS`, in place, relative to the recipe's folder.

    A model that is no folder there is a Hub id, and a metric without a slash, or that is no file there, a name.
    """

    def resolved(value: Any, field: str) -> Any:
        if isinstance(value, dict):
            return {key: resolved(inner, field) for key, inner in value.items()}
        if isinstance(value, list):
            return [resolved(inner, field) for inner in value]
        if not isinstance(value, str) or (field == "metrics" and "/" not in value):
            return value
        path = os.path.normpath(folder / os.path.expanduser(value))
        # os.path.exists, unlike Path.exists, is false for names that no file system takes.
        return value if field in ("model", "metrics") and not os.path.exists(path) else path

    for dotted in _PATHS:
        section, _, field = dotted.rpartition(".")
        inner = fields.get(section) if section else fields
        if isinstance(inner, dict) and field in inner:
            inner[field] = resolved(inner[field], field)


def sentences(error: ValidationError, recipe: type[BaseModel]) -> Iterator[str]:
    """Yield a sentence for each problem that pydantic found with the fields of a recipe, or of a section."""
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            schema = recipe.model_json_schema()
            known = [name for part in (schema, *schema.get("$defs", {}).values()) for name in part["properties"]]
            nearest = did_you_mean(str(problem["loc"][-1]), known) or "; leave it out"
            yield f"{where} is not a field of the recipe{nearest}"
        elif problem["type"] == "missing":
            yield f"{where} must be given"
        elif problem["type"] == "value_error":
            reason = str(problem["ctx"]["error"])
            yield f"{where}: {reason}" if where else reason
        else:
            message = _KINDS.get(problem["type"], problem["msg"].removeprefix("Input should be "))
            yield f"{where} must be {message}, got {quoted(problem['input'])}"
