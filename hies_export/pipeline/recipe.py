"""The whole recipe: the rules between its sections, and how it is read from YAML.

Fields of a YAML file, or keyword arguments, become a `PruningRecipe`, frozen and consistent, or one `RecipeError` that
names all problems at once. Nothing is loaded: `load_recipe` finds out whether model, data and recipe fit together.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, ValidationError, field_validator, model_validator
from ruamel.yaml import YAML

from ..entry_points import FORMATS, RUNTIMES
from ..errors import RecipeError, refusing
from ..progress import SILENT, Progress
from ..recipe.budget import Budget, KeepBudget
from ..recipe.sections import (
    CalibrationSection,
    CascadeSection,
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
from .options import PruneSection, known_name, sentences

if TYPE_CHECKING:
    from ..report.report import Report

# The budget of a recipe that removes no units, made without checks because a budget is above 0; what else it prunes by.
NOTHING = Budget.model_construct(heads=0.0)
_OPTIONS_OF_NOTHING: dict[str, Any] = {"modules": ("attention",), "criterion": "his", "compensation": None}


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
    task: Annotated[str, AfterValidator(lambda name: known_name(name, TASKS, what="task"))]
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

    @field_validator("export", "measure", "deploy")
    @classmethod
    def _knows_formats_and_runtimes(cls, value: ExportSection | MeasureSection | DeploySection | None) -> Any:
        if isinstance(value, ExportSection):
            known_name(value.format, FORMATS, what="format")
        elif value is not None:
            for name in value.runtimes:
                known_name(name, RUNTIMES, what="a runtime")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> PruningRecipe:
        """Refuse sections that contradict each other or the task."""
        task, deploy, budget = TASKS[self.task], self.deploy, self.prune.budget
        export, shown, name = self.export, self.export.shown, self.task
        if refusal := task.refusal(self.data):
            raise ValueError(refusal)
        if deploy and budget:
            raise ValueError("deploy chooses how much to remove, and prune.budget sets it too; leave out one of them")
        if not (deploy or budget or self.vocabulary):
            raise ValueError("prune.budget must be given")
        if self.vocabulary and not task.text:
            raise ValueError(f"vocabulary is for models that read text, got task: {name}; leave it out")
        if self.cascade and self.vocabulary:
            raise ValueError(
                "a cascade promises the answers of a dense model that reads the same tokens, and vocabulary takes some "
                "away; leave out one of them"
            )
        if self.cascade and deploy:
            raise ValueError("deploy tries cascades by itself, got a section cascade; leave it out")
        if self.cascade and not task.classifies:
            raise ValueError(f"cascade is for classifiers, got task: {name}; leave it out")
        if self.cascade and shown != ExportSection().shown:
            raise ValueError(f"cascade needs export: onnx for provider cpu in float32, got {shown}; leave them out")
        if deploy and task.in_parts:
            raise ValueError(
                f"deploy compares models that are one graph, got task: {name}, which is exported as several; prune it "
                "with hies-export run, and a budget of keep"
            )
        if deploy and shown != ExportSection().shown:
            raise ValueError(f"deploy exports what each runtime reads, got export: {shown}; leave it out")
        if export.format == "gguf" and not task.decodes_text:
            raise ValueError(f"export.format gguf is for text-generation, got task: {name}; set it to onnx")
        if export.format == "openvino" and (task.generative or task.in_parts):
            raise ValueError(f"export.format openvino is for encoders, got task: {name}; set it to onnx")
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
        if not os.path.isfile(path):
            raise RecipeError(f"a recipe must be a YAML file, but there is no file {path}")
        with refusing(f"{path} must be a file that can be read", kind=RecipeError):
            text = path.read_text(encoding="utf-8")
        fields = parse_yaml(text, source=str(path))
        if not isinstance(fields, dict):
            raise RecipeError(f"a recipe must be a mapping of fields, but {path} holds {type(fields).__name__}")
        fields = {str(name): value for name, value in fields.items()}
        _resolve_paths(fields, path.parent)
        return cls(**overridden(fields, overrides or {}))

    def to_yaml(self) -> str:
        """Return the recipe as YAML that means the same in any folder: paths are absolute, and the method is spelt out.

        Fields that were not given are left out, except those of `prune` that follow from the budget.
        """
        fields = self.model_dump(mode="json", exclude_unset=True)
        method = self.prune.model_dump(mode="json", include={"modules", "criterion", "compensation"}, exclude_none=True)
        fields["prune"] = method | fields.get("prune", {})
        _resolve_paths(fields, Path.cwd())
        file = io.StringIO()
        writer: Any = YAML(typ="safe", pure=True)
        writer.default_flow_style = writer.sort_base_mapping_type_on_output = False
        writer.dump(json.loads(json.dumps(fields, default=str)), file)  # with paths as text
        return file.getvalue()

    def with_overrides(self, overrides: dict[str, Any]) -> PruningRecipe:
        """Return the recipe with other values of some fields: dotted field -> value, as for `from_yaml`."""
        return type(self)(**overridden(self.model_dump(exclude_unset=True), overrides))

    def to_deploy(self, *, keep: float | None = None, runtimes: Sequence[str] | None = None) -> PruningRecipe:
        """Return the recipe with a section `deploy` in place of the budget; what is given here replaces its fields."""
        fields = self.model_dump(exclude_unset=True)
        fields.get("prune", {}).pop("budget", None)
        given = {name: value for name, value in (("keep", keep), ("runtimes", runtimes)) if value is not None}
        fields["deploy"] = (fields.get("deploy") or {}) | given
        return type(self)(**fields)

    @property
    def goal(self) -> Budget:
        """How much is removed: the budget, the promise of `deploy`, or nothing if only the vocabulary is trimmed."""
        if self.prune.budget is not None:
            return self.prune.budget
        if self.deploy is not None:
            return Budget(keep=KeepBudget(predictions=self.deploy.keep))
        return NOTHING

    @property
    def options(self) -> PruneSection:
        """How to prune: the section `prune`, whose budget is the goal."""
        goal = self.goal
        changes = _OPTIONS_OF_NOTHING if goal is NOTHING else {}
        return self.prune.model_copy(update={"budget": goal, **changes})

    @property
    def inputs(self) -> dict[str, str | Path]:
        """The inputs of the recipe by field: the model and the data files. A Hub id stays as it is."""
        texts = () if self.vocabulary is None else self.vocabulary.files
        inputs: dict[str, str | Path] = {"model": self.model}
        inputs |= {f"data.files.{split}": path for split, path in (self.data.files or {}).items()}
        inputs |= {f"vocabulary.files.{number}": path for number, path in enumerate(texts)}
        return inputs

    def run(self, *, progress: Progress = SILENT) -> Report:
        """Run all stages, write `output` and return the report; see `hies_export.run`."""
        # By its name, because `pipeline.run` imports this file.
        report: Report = import_module("hies_export").run(self, progress=progress)
        return report


_FIELDS_WITH_PATHS = ("output", "data.files", "vocabulary.files", "model", "evaluation.metrics")


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
    """Put the recipe's folder before the relative paths of `_FIELDS_WITH_PATHS`, in place.

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

    for dotted in _FIELDS_WITH_PATHS:
        section, _, field = dotted.rpartition(".")
        inner = fields.get(section) if section else fields
        if isinstance(inner, dict) and field in inner:
            inner[field] = resolved(inner[field], field)
