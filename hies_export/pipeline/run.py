"""Run a recipe, or find what to deploy: calibrate -> score -> select -> cut -> save -> export -> measure -> report."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import processes
from ..checkpoint.folders import new_folder, refuse_existing
from ..checkpoint.save import REFIT
from ..checkpoint.served_settings import write_served
from ..evaluate.judge import Judge
from ..evaluate.lm_eval import run_benchmarks
from ..forms.cascade.export import export_cascade
from ..forms.cascade.facts import cascade_facts
from ..forms.cost.latency import compare_with_full
from ..forms.deployment import Deployment
from ..forms.exported import CASCADE, add_graphs, judge_exported, keep_file, link_files
from ..forms.exports import Exported, Exporter, check_exports, export_formats, require_exporters
from ..forms.form import Form, Forms
from ..forms.gguf.export import GgufExport
from ..forms.judge import judge as judge_forms
from ..forms.judge import with_times
from ..forms.measure.counts import Both
from ..forms.measured import Measurements, measure_both
from ..forms.runtimes.base import RUNTIMES, Format
from ..forms.time import Timed, fastest, rows_by_shape
from ..forms.time import time as time_forms
from ..model.text_encoder import TextEncoder
from ..progress import SILENT, Clock, Progress
from ..recipe.budget import Found
from ..recipe.sections import DeploySection, ExportSection
from ..report.report import Report
from ..units.units import Selection
from .fastest import Answer, Decided, answers_of, choose_size, find_answer
from .prepare import Prepared
from .prune import PruneResult, prune_prepared
from .recipe import PruneSection, PruningRecipe
from .reporting import Deployed, Finished, build_report, write_report
from .resolve import Resolved, resolve, runtimes_of
from .search import Evaluation, evaluate
from .stages import Saved, save, warn_if_larger
from .targets import timed_on

logger = logging.getLogger(__name__)

# Sizes of the batches in which a cascade is timed on the rows.
BATCHES = (1, 8, 32)


def run(
    recipe: PruningRecipe, *, overwrite: bool = False, command: str | None = None, progress: Progress = SILENT
) -> Report:
    """Run a recipe and write `recipe.output`: scores.json, plan.json, slim/, onnx/ (or gguf/), report.json, .md, .html.

    If the recipe compensates, the refitted layers are in `refit.safetensors` beside the plan. The cut of a recipe with
    a section `deploy` is searched for, see `hies_export.deploy`.

    The folder appears only when all stages have succeeded. If the environment names several processes, as under
    accelerate, they share the work; the first one writes, and all return its report.

    Args:
        recipe: The recipe.
        overwrite: Replace an existing output folder, unless it is, holds or lies inside the model or the data.
        command: The command line, which the report records.
        progress: Shows stages and loops.

    Returns:
        The report that was written.

    Raises:
        RequestError: The recipe, the data or the model does not allow the run; raised before anything is computed.
        StepError: A stage failed; no output folder is left behind.
    """
    if recipe.deploy is not None:
        return _run_found(recipe, recipe.deploy, overwrite, command, progress)
    with processes.together():
        refuse_existing(recipe.output, overwrite=overwrite, inputs=recipe.inputs)
        timed = recipe.goal.timed
        dtypes = (*recipe.measure.dtypes, None if timed is None else timed.dtype)
        formats = export_formats(recipe.export, runtimes_of(recipe), dtypes)
        require_exporters(formats)
        progress.stage("load the model and the data")
        resolved = resolve(recipe)
        _check_exports(resolved, recipe, formats)
        with output_folder(recipe.output, overwrite=overwrite) as folder:
            return run_stages(resolved, folder, command, progress)


def deploy(
    recipe: PruningRecipe,
    *,
    keep: float | None = None,
    runtimes: Sequence[str] | None = None,
    minutes: float | None = None,
    overwrite: bool = False,
    command: str | None = None,
    progress: Progress = SILENT,
) -> Report:
    """Find the fastest form of a model that keeps its answers, and write it with its report to `recipe.output`.

    The dense model is tried on every runtime of this machine, in all bits that the runtime computes in: it is judged on
    the held-out rows, and timed. In the fastest forms, the search finds the largest cut whose file keeps the promise,
    by the lower end of a 95 % interval. For a classifier, cascades of deeper cuts are tried too: the dense model
    answers the rows that the slim one is unsure of. The fastest of all these is then judged and timed in all forms
    beside the dense model; a cascade is timed on the evaluation rows. Statistics, moments and orders are computed once.
    If no cut keeps the promise, nothing is cut, and the answer is the fastest dense form that keeps it.

    Args:
        recipe: Model, data, and how units are scored and refitted; its budget is ignored. If it holds out no rows, the
            promise is made on part of the evaluated split, see `recipe.promise`.
        keep: Share of the dense model's predictions on held-out rows that must stay, in (0, 1); by default that of the
            recipe's section `deploy`, or 0.99.
        runtimes: Runtimes that may be deployed on; by default the section's, or all that are installed.
        minutes: After this many minutes, no further cut is judged; by default the section's, or no limit. Timing and
            writing the result take extra time.
        overwrite: Replace an existing output folder.
        command: The command line, which the report records.
        progress: Shows stages and loops.

    Returns:
        The report, whose `details.deployment` names the form to deploy and its file.

    Raises:
        RequestError: The recipe, the data or the model does not allow it; raised before anything is computed.
        PlanError: Not even the dense model keeps the promise, in any form.
        StepError: A stage failed; no output folder is left behind.
    """
    recipe = recipe.to_deploy(keep=keep, runtimes=runtimes, minutes=minutes)
    return run(recipe, overwrite=overwrite, command=command, progress=progress)


def _check_exports(resolved: Resolved, recipe: PruningRecipe, formats: Iterable[Format]) -> None:
    """Refuse a model that has no form in some formats, by the layers that a cut may leave; see `check_exports`."""
    prepared, constraints = resolved.prepared, resolved.options.constraints
    parts = constraints.parts(prepared.scored)
    check_exports(
        formats,
        prepared.model,
        prepared.processor,
        prepared.exporter.sample,
        uneven=bool(constraints.keep_layers) or not all(constraints.uniform(part) for part in parts),
        skips=bool(constraints.skippable),
        quantize=recipe.export.quantize if recipe.export.format == "onnx" else None,
    )


def _run_found(
    recipe: PruningRecipe, asked: DeploySection, overwrite: bool, command: str | None, progress: Progress
) -> Report:
    """Search for the fastest form that keeps a promise, and run the stages on what was found."""
    began = time.monotonic()
    processes.refuse_several("deploy")
    refuse_existing(recipe.output, overwrite=overwrite, inputs=recipe.inputs)
    progress.stage("load the model and the data")
    resolved = resolve(recipe)
    _check_exports(resolved, recipe, export_formats(recipe.export, ()))
    with (
        output_folder(recipe.output, overwrite=overwrite) as folder,
        tempfile.TemporaryDirectory(dir=folder) as temporary,
    ):
        answer = find_answer(resolved, asked, Path(temporary), began, progress)
        prepared = replace(resolved.prepared, exporter=answer.exporter)
        resolved = replace(resolved, prepared=prepared, options=answer.options)
        return run_stages(resolved, folder, command, progress, answer=answer)


def output_folder(output: Path, *, overwrite: bool) -> AbstractContextManager[Path]:
    """Return a `new_folder` for the output of a run; of several processes only the first makes it, and writes."""
    return new_folder(output, overwrite=overwrite) if processes.is_first() else nullcontext(output)


def run_stages(
    resolved: Resolved,
    folder: Path,
    command: str | None,
    progress: Progress,
    *,
    answer: Answer | None = None,
) -> Report:
    """Run all stages, and write their results into the folder; an `answer` is a choice that was already made."""
    clock = Clock()
    if answer is not None:
        clock.seconds["score"] = time.monotonic() - answer.began  # its search has scored the units
    prepared, options, dtype = resolved.prepared, resolved.options, resolved.source.dtype
    decided: Decided = answer or _decide(resolved, clock, progress)
    result = prune_prepared(
        prepared,
        options,
        choice=decided.choice,
        compensation=options.compensation,
        served=decided.served,
        dtype=dtype,
        clock=clock,
        progress=progress,
    )
    with clock("cut"):
        progress.stage("save, load again and compare")
        saved = _save(result, resolved, folder)
    uncompensated = result.plan.kept if options.compensation else None
    progress.stage("evaluate both models")
    judge = Judge.on(prepared.model, resolved.evaluation, **vars(prepared.judged), index=None, progress=progress)
    evaluation = evaluate_run(resolved, judge, result.model, uncompensated=uncompensated, progress=progress)
    answers = None if decided.cascade is None else answers_of(prepared)
    count = processes.world()

    def finish() -> Report:
        assert result.choice is not None
        result.choice.write(folder)
        exporter = prepared.exporter
        exports = _export(exporter, result.model, folder, clock, progress)
        # In the folder of the run, so that all exports are read from the same disk.
        with clock("measure"), tempfile.TemporaryDirectory(prefix=".dense-", dir=folder) as temporary:
            forms = Forms({}, exporter, Path(temporary), progress)
            forms.add("dense", prepared.model, None if answer is None else answer.dense.forms.exports_of("dense"))
            forms.add("slim", result.model, exports)
            stored = Both(resolved.source.bytes, saved.bytes)
            measured = measure_both(
                forms, resolved.measure, modules=prepared.modules, batches=prepared.measured, stored=stored
            )
            same = not any(kept.removed for kept in result.plan.kept.values())
            deployed = _judge_deployed(resolved, forms, judge, decided, answers, folder, same=same)
        add_graphs(exports.values(), folder / "slim")
        if isinstance(result.model, TextEncoder):
            _serve(result.model, exports, deployed, folder)
        done = Finished(
            resolved=resolved,
            result=_with_cost(result, prepared, options, measured, progress),
            saved=saved,
            evaluation=evaluation,
            exported=exports[exporter.options.unquantized],
            deployed=deployed,
            measured=measured,
            processes=count,
        )
        report = build_report(done, clock.seconds, command)
        write_report(folder, report)
        return report

    return processes.on_main(finish)


def _save(result: PruneResult, resolved: Resolved, folder: Path) -> Saved:
    """Write the slim checkpoint of a run, and what `apply` makes it from; warn if it is larger than its source."""
    source = resolved.source
    written: dict[str, Any] = {"processor": resolved.prepared.processor, "dense": source.folder, "dtype": source.dtype}
    saved = save(result.slim, resolved.prepared, folder / "slim", refit_file=folder / REFIT, **written)
    warn_if_larger(saved, source)
    return saved


def _decide(resolved: Resolved, clock: Clock, progress: Progress) -> Decided:
    """Choose the cut by the time of its cascade, if that was asked for; else leave it to the stages."""
    asked = resolved.cascade
    if asked is None or not resolved.shares:
        return Decided(cascade=asked)
    with clock("score"):
        return choose_size(resolved.prepared, resolved.options, asked, resolved.shares, resolved.source.dtype, progress)


def _export(
    exporter: Exporter, model: PreTrainedModel, folder: Path, clock: Clock, progress: Progress
) -> dict[ExportSection, Exported]:
    """Export the slim model into the folder of a run, and quantise the export if asked."""
    options = exporter.options
    plain = options.unquantized
    with clock("export"):
        progress.stage(f"export to {plain.format.upper()}, and compare with torch")
        found = {plain: exporter.export(model, folder / plain.format, plain)}
        if options.quantize:
            progress.stage(f"quantise to {options.quantize}, and compare with float32")
            place = folder / f"{options.format}-{options.quantize}"
            found[options] = exporter.quantize(found[plain], place, options)
    return found


def _judge_deployed(
    resolved: Resolved,
    forms: Forms,
    judge: Judge,
    decided: Decided,
    answers: torch.Tensor | None,
    folder: Path,
    *,
    same: bool,
) -> Deployed:
    """Judge and time all exports of a run beside each other, and write the cascade of both models if one is asked for.

    Args:
        resolved: The dense model, the rows to time a cascade on, and what to measure.
        forms: Both models, "dense" and "slim", and their exports.
        judge: The judge on the evaluation rows.
        decided: The cascade, and the promise that a deployment keeps.
        answers: The dense model's logits of the rows that a cascade promises on.
        folder: The folder of the run.
        same: Whether nothing was cut, so that only the dense model is judged.
    """
    prepared, options, asked, progress = resolved.prepared, forms.exporter.options, decided.cascade, forms.progress
    answer = decided if isinstance(decided, Answer) else None
    joined = None
    if asked is not None and answers is not None:
        progress.stage("join both models in a cascade, and compare it with them")
        slim, dense = (forms.plain_onnx(name) for name in ("slim", "dense"))
        rows = prepared.rows.promised
        joined = export_cascade(slim, dense, folder / CASCADE, batches=rows, answers=answers, options=asked)
    running: list[Form] = []
    whole, judge = judge, judge.on_dense_index()
    if not prepared.task.in_parts:  # models in several graphs have no forms
        ways = answer.ways if answer else resolved.measure.ways_to_judge(options, asked)
        running = [forms.form(name, *way) for way in ways for name in (("dense",) if same else ("dense", "slim"))]
        if asked is not None and joined is not None:
            running.append(Form.of_cascade(joined, asked))
    judged = judge_forms(running, judge, answer.dense.judge if answer else None, progress=progress)
    timed: list[Timed] = []
    if running:
        progress.stage("time all forms of both models")
        if joined is None and not (answer is not None and prepared.on_rows):
            how: dict[str, Any] = {"repeats": resolved.measure.repeats, "min_seconds": resolved.measure.min_seconds}
            once = {shape: [batch] for shape, batch in prepared.measured.items()}
            timed = time_forms(running, once, decode=True, progress=progress, **how)
        else:
            in_order = rows_by_shape({size: resolved.in_order(size) for size in BATCHES})
            timed = time_forms(running, in_order, progress=progress)
        judged = with_times(judged, timed)
    deployment = cascade = None
    if answer is not None:
        kept = [n for n, form in enumerate(judged) if form.at_least is not None and form.at_least >= answer.promise]
        best, step = fastest(timed, kept)
        seconds = time.monotonic() - answer.began
        ranking = None
        if best is not None and prepared.task.embeds:
            ranking = whole.ranking(running[best].predict(whole.batches, whole.task))
        # Last, as it moves what the form reads.
        file = None if best is None else keep_file(forms, judged[best], folder, same=same)
        deployment = Deployment(answer.promise, best, step, answer.dense.ways, seconds, file, ranking)
    if asked is not None and joined is not None:
        part = forms.export("slim", options.unquantized.model_copy(update={"quantize": asked.quantize}))
        cascade = cascade_facts(
            asked,
            joined,
            judge.batches,
            parts=Both(forms.plain_onnx("dense").bytes, part.bytes),
            stability=judged[-1].stability,
            tried=decided.sizes,
        )
    exported = judge_exported(forms.export("slim", options), folder, judge, judged)
    return Deployed(exported, judged, deployment, cascade)


def _serve(model: TextEncoder, exports: Mapping[ExportSection, Exported], deployed: Deployed, folder: Path) -> None:
    """Write `served/`, which sentence-transformers runs: the form to deploy, or else the last of the exports."""
    found = deployed.deployment
    if found is None:
        exported = [*exports.values()][-1]
        assert not isinstance(exported, GgufExport)
        file, runtime, dtype = exported.file, exported.runtime, None
    elif found.form is not None and found.file is not None:
        form = deployed.forms[found.form]
        bits = form.bits if form.bits in RUNTIMES[form.runtime].hints else None
        file, runtime, dtype = folder / found.file, form.runtime, bits
    else:
        return
    link_files(file.parent, folder / "served")
    write_served(folder / "served", model, file=file.name, runtime=runtime, dtype=dtype)


def _with_cost(
    result: PruneResult, prepared: Prepared, options: PruneSection, measured: Measurements, progress: Progress
) -> PruneResult:
    """Fill in the measured result of a budget of cost; other budgets stay as they are."""
    outcome = result.outcome
    if outcome is None or outcome.budget.ratio is None:
        return result
    asked = outcome.budget.latency
    if asked is None:
        counted = measured.flops.ratio if outcome.budget.flops is not None else measured.parameters.ratio
        found, noisy = Found(counted), None
    elif asked.of == "float32":
        timed = compare_with_full(result.model, prepared.model, timed_on(prepared, options), progress=progress)
        found, noisy = Found(timed.ratio), timed.noisy
    else:
        where = (asked.runtime, asked.batch, asked.sequence)
        rows = (row for row in measured.latency if row.phase != "decode" and asked.dtype in (None, row.dtype))
        row = next(row for row in rows if (row.runtime, row.batch, row.sequence) == where)
        found, noisy = Found(row.ratio), row.noisy
    return replace(result, outcome=replace(outcome, found=found, noisy=noisy))


def evaluate_run(
    resolved: Resolved,
    judge: Judge,
    slim: PreTrainedModel,
    *,
    uncompensated: Selection | None = None,
    progress: Progress,
) -> Evaluation:
    """Evaluate a slim model on the evaluation batches and the benchmarks, and a selection that is only cut."""
    prepared, asked = resolved.prepared, resolved.benchmarks

    def benchmark(model: PreTrainedModel) -> dict[str, float]:
        how: dict[str, Any] = {"samples": asked.samples, "batch_size": asked.batch_size}
        return processes.on_main(lambda: run_benchmarks(model, prepared.processor, asked.tasks, **how))

    return evaluate(
        judge,
        prepared.model,
        slim,
        modules=prepared.modules,
        uncompensated=uncompensated,
        benchmark=benchmark if asked.tasks else None,
        progress=progress,
    )
