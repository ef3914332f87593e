"""The whole recipe, and the rules between its sections."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, ValidationError, model_validator

from ..errors import RecipeError, quoted
from ..progress import SILENT, Progress
from ..tasks import TASKS
from .reading import overridden, read_fields, sentences
from .sections import (
    BudgetSection,
    CalibrationSection,
    CascadeSection,
    DataSection,
    DeploySection,
    EvaluationSection,
    ExportSection,
    HeldOutSection,
    KeepBudget,
    MeasureSection,
    PathOrName,
    PruneSection,
    Section,
)

if TYPE_CHECKING:
    from ..report.report import Report


# Shares of the FLOPs that `cascade` tries if there is no budget.
FLOPS_TO_TRY = (0.75, 0.55, 0.35)


def _known(task: str) -> str:
    if task not in TASKS:
        raise ValueError(f"must be one of {', '.join(TASKS)}, got {task!r}")
    return task


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
        device_map: Where the layers go, as in `from_pretrained`: "auto" spreads a model over all GPUs. By default the
            GPU if there is one.
        task: What the model predicts: one of the [tasks](tasks.md), such as text-classification.
        pooling: For feature-extraction with a bare encoder: what makes one embedding of those of the tokens. A folder
            of sentence-transformers says so itself.
        normalize: Likewise, whether embeddings are scaled to length 1; by default they are not.
        data: See `DataSection`.
        calibration: See `CalibrationSection`.
        held_out: See `HeldOutSection`.
        evaluation: See `EvaluationSection`.
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
        hies_export.errors.RecipeError: prune.budget.heads: sparsity must be in (0, 1), got 1.5; ...
    """

    model: PathOrName
    revision: str | None = None
    dtype: Literal["float32", "float16", "bfloat16", "auto"] | None = None
    save_dtype: Literal["float32", "float16", "bfloat16", "auto"] | None = None
    device_map: str | None = None
    task: Annotated[str, AfterValidator(_known)]
    pooling: Literal["mean", "cls", "last", "max"] | None = None
    normalize: bool | None = None
    data: DataSection
    calibration: CalibrationSection = CalibrationSection()
    held_out: HeldOutSection | None = None
    evaluation: EvaluationSection = EvaluationSection()
    prune: PruneSection
    export: ExportSection = ExportSection()
    cascade: CascadeSection | None = None
    measure: MeasureSection = MeasureSection()
    deploy: DeploySection | None = None
    output: Path = Path("runs/hies")

    def __init__(self, **fields: Any):
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise RecipeError(list(sentences(error, type(self)))) from None

    @model_validator(mode="after")
    def _columns_fit_the_task(self) -> PruningRecipe:
        task = TASKS[self.task]
        if self.evaluation.lm_eval and not task.decodes_text:
            raise ValueError(f"evaluation.lm_eval judges language models (text-generation), got task: {self.task}")
        if refusal := task.refusal(self.data):
            raise ValueError(refusal)
        return self

    @model_validator(mode="after")
    def _one_field_says_how_much(self) -> PruningRecipe:
        given, cascade = self.prune.budget is not None, self.cascade
        if self.deploy is not None and given:
            raise ValueError("deploy chooses how much to remove, and prune.budget sets it too; leave out one of them")
        if cascade is not None and cascade.flops and given:
            raise ValueError("cascade.flops chooses how much to remove, and prune.budget sets it too; leave out one")
        if self.deploy is None and cascade is None and not given:
            raise ValueError("prune.budget must be given")
        return self

    @model_validator(mode="after")
    def _deploy_chooses_the_form(self) -> PruningRecipe:
        if self.deploy is None:
            return self
        export = self.export
        if self.cascade is not None:
            raise ValueError("deploy tries cascades by itself, got a section cascade; leave it out")
        if TASKS[self.task].in_parts:
            raise ValueError(
                f"deploy compares models that are one graph, got task: {self.task}, which is exported as several; "
                "prune it with hies-export run, and a budget of keep"
            )
        if (export.format, export.provider, export.dtype) != ("onnx", "cpu", "float32"):
            raise ValueError(
                f"deploy exports what each runtime reads, got export: {export.format}, {export.provider}, "
                f"{export.dtype}; leave it out"
            )
        if self.prune.steps > 1:
            raise ValueError(
                f"deploy finds the largest cut in one step, got prune.steps: {self.prune.steps}; set it to 1"
            )
        return self

    @model_validator(mode="after")
    def _a_cascade_is_of_encoders(self) -> PruningRecipe:
        if self.cascade is None:
            return self
        export = self.export
        if not TASKS[self.task].cascades:
            raise ValueError(f"cascade is for classifiers, got task: {self.task}; leave it out")
        if (export.format, export.provider, export.dtype) != ("onnx", "cpu", "float32"):
            raise ValueError(
                f"cascade needs export: onnx for provider cpu in float32, got {export.format}, {export.provider}, "
                f"{export.dtype}; leave them out"
            )
        if export.quantize and self.cascade.runtime == "openvino":
            raise ValueError(
                f"a cascade in 8 bits needs runtime: onnxruntime-cpu, whose operators it has, got "
                f"{self.cascade.runtime}; leave out export.quantize, and set cascade.dtype: bfloat16"
            )
        return self

    @model_validator(mode="after")
    def _a_latency_budget_has_one_dtype(self) -> PruningRecipe:
        if self.goal.timed is not None and self.measure.dtypes:
            raise ValueError(
                "a budget of time is met in the dtype of the model or of the export, so measure.dtypes must not be "
                f"given, got {', '.join(self.measure.dtypes)}; time other dtypes with hies-export bench"
            )
        return self

    @model_validator(mode="after")
    def _gguf_is_of_a_decoder(self) -> PruningRecipe:
        if self.export.format == "gguf" and not TASKS[self.task].decodes_text:
            raise ValueError(f"export.format gguf is for text-generation, got task: {self.task}; set it to onnx")
        return self

    @model_validator(mode="after")
    def _calibrated_is_an_encoder(self) -> PruningRecipe:
        if self.export.format == "openvino" and (TASKS[self.task].generative or TASKS[self.task].in_parts):
            raise ValueError(f"export.format openvino is for encoders, got task: {self.task}; set it to onnx")
        return self

    @model_validator(mode="after")
    def _rows_are_apart(self) -> PruningRecipe:
        held_out, evaluation = self.held_out, self.evaluation
        if held_out is not None and held_out.split == evaluation.split and evaluation.rows == "first":
            raise ValueError(
                f"held_out draws rows of the split that is evaluated, {quoted(evaluation.split)}, so "
                "evaluation.rows must be drawn from the others, got first; leave it out, or hold out another split's"
            )
        return self

    @model_validator(mode="after")
    def _only_texts_are_pooled(self) -> PruningRecipe:
        given = [name for name in ("pooling", "normalize") if getattr(self, name) is not None]
        if given and not TASKS[self.task].embeds:
            raise ValueError(f"{given[0]} is for feature-extraction, got task: {self.task}; leave it out")
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
        return cls(**read_fields(path, overrides or {}))

    def with_overrides(self, overrides: dict[str, Any]) -> PruningRecipe:
        """Return the recipe with other values of some fields: dotted field -> value, as for `from_yaml`."""
        return type(self)(**overridden(self.model_dump(exclude_unset=True), overrides))

    def to_deploy(
        self, *, keep: float | None = None, runtimes: Sequence[str] | None = None, minutes: float | None = None
    ) -> PruningRecipe:
        """Return the recipe with a section `deploy`, some of its fields given, in place of the budget."""
        fields = self.model_dump(exclude_unset=True)
        fields["prune"].pop("budget", None)
        given = {"keep": keep, "runtimes": runtimes, "minutes": minutes}
        asked = {name: value for name, value in given.items() if value is not None}
        return type(self)(**{**fields, "deploy": {**(fields.get("deploy") or {}), **asked}})

    @property
    def goal(self) -> BudgetSection:
        """How much is removed: the budget, the promise of `deploy`, or the smallest cut that a cascade tries."""
        if self.prune.budget is not None:
            return self.prune.budget
        if self.deploy is not None:
            return BudgetSection(keep=KeepBudget(predictions=self.deploy.keep))
        return BudgetSection(flops=max(self.shares))

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares of the dense model's FLOPs to choose the size of a cascade among; empty if that is not asked."""
        if self.cascade is None or self.prune.budget is not None:
            return ()
        return self.cascade.flops or FLOPS_TO_TRY

    @property
    def options(self) -> PruneSection:
        """How to prune: the section `prune`, whose budget is the goal."""
        return self.prune.model_copy(update={"budget": self.goal})

    @property
    def inputs(self) -> dict[str, str | Path]:
        """The inputs of the recipe by field: the model and the data files. A Hub id stays as it is."""
        return {"model": self.model, **{f"data.files.{split}": path for split, path in (self.data.files or {}).items()}}

    def run(self, *, progress: Progress = SILENT) -> Report:
        """Run the whole line and write `output`; see `hies_export.run`."""
        import hies_export

        return hies_export.run(self, progress=progress)
