"""Prune a model in memory: score, choose, cut, compensate, check and judge."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from pydantic import ValidationError
from rich.console import Console
from transformers import PreTrainedModel

from ..data.batches import has_references, samples_of
from ..errors import RecipeError, RequestError
from ..kinds import KindName
from ..model.internals import buffers_as_loaded, uncompiled, without_compiler
from ..model.modes import evaluating
from ..model.text_encoder import TextEncoder, Unwrapped
from ..progress import SILENT, Progress, without_reports
from ..recipe.budget import Budget
from ..recipe.sections import Allocation, ComparisonSection, CompensationSection, MultipleOf
from ..score.criteria import Scores
from ..select.plan import PruningPlan
from ..tasks import task_of
from ..units.counts import Counted, FlopCount, count_both_flops, count_both_parameters, si
from .choose import choose
from .in_memory import accept_model, delivery_of, make_pruning_in_memory, read_rows
from .options import PruneSection, sentences
from .price import Priced, size_of_pruning
from .pruning import Pruning
from .stages import Choice, Evaluation, Slim, calibrate, compare, cut, try_metrics

if TYPE_CHECKING:  # what delivers a slim model is imported when it is first asked for
    from ..forms.formats import Export
    from ..forms.onnx.quantize import Quantize
    from ..forms.runtimes.base import Provider
    from .delivery import Delivery

logger = logging.getLogger(__name__)

AnySection = TypeVar("AnySection", PruneSection, ComparisonSection)


@dataclass(frozen=True, repr=False)
class PruneResult:
    """A slim model, the scores it was chosen by, and how it compares with its dense model.

    `str(result)` is a table of what was cut, of both models' sizes, and of the agreement on the held-out batches.

    Attributes:
        pruning: The dense model, its modules, and the batches.
        given: What the model was taken from, such as a SentenceTransformer.
        choice: The plan, and what it was chosen from; if a plan was given, the plan alone.
        slim: The slim model, its plan and its checks.
        parameters: Number of parameters of both models.
        flops: Floating-point operations of one forward pass of both models at `flops.shape`.
        held_out: Metrics of both models and the share of equal predictions on the held-out batches; None without.
    """

    pruning: Pruning
    given: Unwrapped
    choice: Choice
    slim: Slim
    parameters: Counted
    flops: FlopCount
    held_out: Evaluation | None

    @cached_property
    def model(self) -> Any:
        """The slim model, in evaluation mode, of the class that was given: mostly an ordinary `PreTrainedModel`."""
        return self.given.wrap(self.slim.model, self.pruning.processor)

    @cached_property
    def delivery(self) -> Delivery:
        """How the slim model is saved and exported."""
        return delivery_of(self.pruning.rows, self.given)

    @property
    def plan(self) -> PruningPlan:
        """The units that stay, with their provenance."""
        return self.slim.plan

    @property
    def scores(self) -> Scores | None:
        """One score per unit, higher means keep; None for a given plan."""
        return self.choice.scores

    def save_pretrained(self, folder: str | Path, *, processor: Any = None, overwrite: bool = False) -> None:
        """Save the slim checkpoint with its plan, load it again in every way that users do, and compare the outputs.

        Args:
            folder: Where to write; appears only when everything is written and checked.
            processor: Tokenizer or image processor to save with the model; by default the one given to `prune`.
            overwrite: Replace an existing folder.

        Raises:
            OutputExistsError: The folder exists and `overwrite` is off.
            ReloadMismatchError: The loaded model differs from the saved one by 1e-4 or more.
        """
        if processor is None and self.pruning.processor is None:
            logger.warning(
                "%s has no tokenizer or image processor, as prune was given none; pass processor= to save_pretrained",
                folder,
            )
        from .delivery import save

        with without_reports():
            save(self.pruning, self.delivery, self.slim, folder, processor=processor, overwrite=overwrite)

    def export_onnx(
        self,
        folder: str | Path,
        *,
        processor: Any = None,
        provider: Provider = "cpu",
        dtype: str = "float32",
        quantize: Quantize | None = None,
        overwrite: bool = False,
    ) -> Export:
        """Export the slim model to an ONNX folder, run it in ONNX Runtime, and compare with torch.

        Of an embedding model, `SentenceTransformer(folder, trust_remote_code=True)` runs the graph.

        Args:
            folder: Where to write; appears only when everything is written and checked.
            processor: Tokenizer or image processor to save with the graph; by default the one given to `prune`.
            provider: Execution provider that the graph is fused for: cpu or cuda.
            dtype: float32 or float16.
            quantize: "int8" writes the linear layers in 8 bits, as `model_quantized.onnx`, "int4" those of a decoder in
                4 bits, rounded by the rows that it was refitted or scored on; for the CPU.
            overwrite: Replace an existing folder.

        Returns:
            The folder's files, their size in bytes, and the largest difference to torch, or if quantised to the float32
            graph.

        Raises:
            MissingRuntimeError: onnx or onnxruntime is not installed.
            ParityError: ONNX Runtime and torch disagree; nothing is kept.
            RequestError: The model has no such form here.
        """
        from ..forms.formats import FORMATS, Given, export_options, export_served

        options, processor = export_options("onnx", provider, dtype, quantize), processor or self.pruning.processor
        if isinstance(self.slim.model, TextEncoder):
            return export_served(self.slim.model, folder, options, processor=processor, overwrite=overwrite)
        # Of two rows at least: a trace of one would fix their number.
        sample = {key: torch.cat([x, x]) if len(x) == 1 else x for key, x in self.pruning.sample.items()}
        given = Given(sample, processor, self.delivery.exporter.given.rows)
        return FORMATS["onnx"].write(self.slim.model, Path(folder), options, given, overwrite=overwrite)

    def __str__(self) -> str:
        from ..report.report import plan_counts
        from ..report.tables import change, plain_table, plan_maps, print_maps, quality_rows, unit_rows, with_backbone
        from ..report.words import named_units

        batch, sequence = self.flops.shape
        rows = unit_rows(named_units(plan_counts(self.plan)))
        counted = ("parameters", self.parameters), (f"FLOPs at {batch} x {sequence}", self.flops)
        for name, size in with_backbone(counted, generative=self.pruning.task.generative):
            rows.append((name, si(size.dense), si(size.slim), change(size.dense, size.slim)))
        if self.held_out is not None:
            samples, labelled = samples_of(self.pruning.rows.held_out), has_references(self.pruning.rows.held_out[0])
            same = f"same prediction, {samples:,} held-out {'row' if samples == 1 else 'rows'}", self.held_out.stability
            rows += quality_rows(self.held_out.metrics, self.held_out.ranking, labelled=labelled, same=same)
        file = io.StringIO()
        console = Console(file=file, width=100, color_system=None)  # 100 characters
        print_maps(plan_maps(self.plan), console)
        console.print()
        console.print(plain_table(("", "dense", "slim", "change"), rows))
        return "\n".join(line.rstrip() for line in file.getvalue().strip("\n").split("\n"))


def prune(
    model: Any,
    batches: Any,
    *,
    budget: Budget | Mapping[str, Any] | None = None,
    modules: Sequence[KindName] | None = None,
    criterion: str | None = None,
    alpha: float | Literal["auto"] = 0.9,
    normalize: Literal["model", "layer"] = "model",
    allocation: Allocation | Mapping[str, Allocation] = "global",
    unit: Literal["group", "query"] = "group",
    towers: Sequence[str] = (),
    min_heads: int = 1,
    keep_layers: Sequence[int] = (),
    multiple_of: MultipleOf | Mapping[str, int] = MultipleOf(),  # noqa: B008 (it is frozen)
    compensation: CompensationSection | Mapping[str, Any] | Literal["usual"] | None = "usual",
    plan: PruningPlan | None = None,
    held_out: Any = None,
    compensation_batches: Any = None,
    processor: Any = None,
    columns: Mapping[str, Any] | None = None,
    evaluation: ComparisonSection | Mapping[str, Any] | None = None,
    shape: tuple[int, ...] | None = None,
    seed: int = 0,
    progress: Progress = SILENT,
) -> PruneResult:
    """Prune a copy of a model in memory.

    Units are scored on the batches, chosen within the budget, and cut out of a copy of the weights. The copy is
    compared with the masked model, refitted, and judged on the held-out batches. A budget of heads removes heads by
    HIES, as the paper does, without a refit. Any other budget removes heads and neurons, or heads alone where neurons
    cannot go, by `compensated`, and refits by least squares.

    Batches are a DataLoader, a list, or a `datasets.Dataset` with `processor`. A batch maps the names of the model's
    inputs to tensors. Labels are used if there are any. Otherwise the model's own predictions replace classes, and
    plain text is its own label. All rows of a data set are read; a few hundred are enough.

    Objects of sentence-transformers are taken too: a SentenceTransformer with a list of texts, or a CrossEncoder with a
    list of pairs. The model of the result is then a new object of the same class. That of a compiled model is not
    compiled.

    Args:
        model: A model that classifies or regresses texts or images, or generates text, also from images; a
            SentenceTransformer or a CrossEncoder.
        batches: Batches that units are scored on.
        budget: How much is removed; required without `plan`. Exactly one of `{"heads": share removed}`, `{"flops":
            share left}`, `{"parameters": share left}`, `{"latency": {...}}` and `{"keep": ...}`; see
            `Budget`. The arguments from here to `compensation` are the fields of a recipe's `prune` section.
        modules: Kinds of units: heads ("attention"), feed-forward neurons ("mlp"), or both; by default as above.
        criterion: How units are ranked; by default as the budget asks. "auto" judges several on the held-out batches.
        alpha: Weight of importance against focus in HIES, in [0, 1); "auto" judges twelve values.
        normalize: Whether the terms of HIES are scaled over all heads or over each layer's.
        allocation: "uniform" removes the same number of heads from every layer; or one for each kind.
        unit: Under grouped-query attention, whether key/value groups or query heads of each group go.
        towers: Parts of a composite model that lose units; by default the language model.
        min_heads: Query heads that every layer keeps, at least 1.
        keep_layers: Layers that lose nothing, counted from 0; -1 is the last.
        multiple_of: Divisors of the numbers of units left in a layer, as in `{"heads": 2, "neurons": 64}`.
        compensation: How layers are refitted, see `CompensationSection`; None for no refit, "usual" as above.
        plan: Cut by this plan instead of choosing. Of the options, only `compensation` applies then; "usual" is None.
        held_out: Batches that alpha, the criterion or the size of the cut is chosen on, and that the agreement in the
            result is measured on; an empty list for none. By default a quarter of `batches`, not used for scoring:
            drawn, the same way every time, of the rows of a data set, in whole queries if these are named, or of the
            batches.
        compensation_batches: Batches that the cut model is refitted on; by default those that units are scored on.
        processor: The model's tokenizer, image processor, or both in one: reads a data set, saved with the result.
        columns: Columns to read of a data set that has texts or images, by the fields of a recipe's `data`: text,
            image, label, prompt, answer, max_length, bos. By default the only columns that fit.
        evaluation: How predictions are judged, by the fields of a recipe's `evaluation`: metrics, and
            stability_tolerance of a regression.
        shape: (batch, sequence) for which FLOPs are counted, or (batch,) for images; by default one row of 128 tokens,
            or fewer if the model takes no more, and under a budget of time without a sequence, one row as long as the
            batches' rows are at the median. Models of images and text are counted on copies of the longest row of
            the first batch.
        seed: Seed of the criterion `random`; the plan records it.
        progress: Shows stages and loops.

    Returns:
        The slim model with its plan and scores, which saves and exports itself.

    Raises:
        RecipeError: An option is missing or out of range; all problems at once.
        RequestError: The model or the batches do not allow what is asked; raised before anything is computed.
        DataError: There are no batches, or they are not what the model takes.
        UnsupportedModelError: Units of the model cannot be removed; the message says why.
        PlanError: No selection meets the budget, or the plan is of another model.
        CutMismatchError: The cut model differs from the masked one by 1e-4 or more.

    Examples:
        >>> result = prune(model, batches, criterion="his", budget={"heads": 0.5})
        >>> result.plan.removed, type(result.model).__name__
        (9, 'BertForSequenceClassification')
    """
    # First of all, while the only locals are the arguments: those that a recipe's `prune` section has too.
    options = {name: value for name, value in locals().items() if name in PruneSection.model_fields}
    section = _prune_section(options, plan)
    comparison = _section(ComparisonSection, evaluation or {}, "evaluation.")
    model = without_compiler(model)
    if isinstance(model, PreTrainedModel):
        given = Unwrapped(model)
    else:
        from ..checkpoint.sentence import unwrap

        given = unwrap(model)
    priced = Priced(progress)
    with evaluating(given.model), uncompiled(given.model), buffers_as_loaded(given.model):
        given = accept_model(given, processor)
        task = task_of(given.model, tolerance=comparison.stability_tolerance)
        more = {"held_out": held_out, "compensation_batches": compensation_batches}
        rows = read_rows(given, section, batches, **more, task=task, columns=columns)
        pruning = make_pruning_in_memory(
            given, section, rows, task=task, evaluation=comparison, shape=shape, seed=seed, progress=priced
        )
        try_metrics(pruning)
        if plan is None:
            priced.expect(size_of_pruning(pruning))
        choice = choose(pruning, calibrate(pruning, reported=False)) if plan is None else Choice(plan)
        slim = cut(pruning, choice)
        first_shape, batch = next(iter(pruning.shapes.items()))
        flops = count_both_flops(pruning.dense, slim.model, {first_shape: batch})[first_shape]
        parameters = count_both_parameters(pruning.dense, slim.model)
        quality = compare(pruning, slim.model) if pruning.rows.held_out else None
        return PruneResult(pruning, given, choice.after_cut(slim), slim, parameters, flops, quality)


def _prune_section(options: Mapping[str, Any], plan: PruningPlan | None) -> PruneSection:
    """Return the options of `prune` as a checked `prune` section of a recipe; with a plan, it has no budget."""
    if plan is not None and plan.vocabulary:
        raise RequestError("plan= cuts heads and neurons, and tokens are to go too; use apply_plan, which cuts all")
    changed = {name: value for name, value in options.items() if value != signature(prune).parameters[name].default}
    if plan is not None:
        if others := [name for name in changed if name != "compensation"]:
            raise RequestError(f"with plan=, of the options only compensation applies, got {', '.join(others)}")
        changed["modules"] = tuple(dict.fromkeys(kept.kind for kept in plan.kept.values()))
        changed.setdefault("compensation", None)
    elif "budget" not in changed:
        raise RecipeError("budget must be given")
    section = _section(PruneSection, changed)
    keep = None if section.budget is None else section.budget.keep
    if keep is not None and "samples" in keep.model_fields_set:
        raise RequestError("keep.samples says how many rows a recipe draws; pass that many as held_out= instead")
    return section


def _section(section: type[AnySection], fields: Any, where: str = "") -> AnySection:
    """Return the fields as a section; a RecipeError names them with the prefix `where`."""
    try:
        return section.model_validate(fields)
    except ValidationError as error:
        raise RecipeError([f"{where}{problem}" for problem in sentences(error, section)]) from None
