"""Run a recipe, or find what to deploy: calibrate -> score -> select -> cut -> save -> export -> measure -> report."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from .. import processes
from ..checkpoint.folders import new_folder, refuse_existing
from ..checkpoint.save import REFIT
from ..data.batches import batches_fingerprint
from ..forms.form import Forms
from ..forms.formats import check_exports, export_formats, require_exporters
from ..progress import SILENT, Progress
from ..report.report import Report
from ..score.criteria import COMPENSATED
from ..select.fingerprint import digest_tensors
from ..select.plan import library_versions
from .choose import choose
from .delivery import save
from .fastest import Decision, find_fastest
from .journal import journal
from .load_recipe import as_drawn, load_recipe, runtimes_of
from .measure import Measuring
from .price import Priced, size_of_pruning
from .pruning import Pruning
from .recipe import PruningRecipe
from .reporting import build_report, write_choice, write_report
from .stages import calibrate, compare, cut, try_metrics


def run(
    recipe: PruningRecipe, *, overwrite: bool = False, command: str | None = None, progress: Progress = SILENT
) -> Report:
    """Run a recipe and write `recipe.output`: scores.json, plan.json, slim/, onnx/ (or gguf/), report.json, .md, .html.

    The recipe itself is there as `recipe.yaml`, with what follows from its budget, and the held-out rows. If it
    compensates, the refitted layers are in `refit.safetensors` beside the plan. The cut of a recipe with a section
    `deploy` is searched for, see `hies_export.deploy`.

    The folder appears only when all stages have succeeded. A run that is killed while it ranks units or refits layers
    leaves `NAME.resume` beside it, with which the same recipe goes on. If the environment names several processes, as
    under accelerate, they share the work; the first one writes, and all return its report.

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
        processes.refuse_several("deploy")
    with processes.together():
        refuse_existing(recipe.output, overwrite=overwrite, inputs=recipe.inputs)
        timed = recipe.goal.timed
        formats = export_formats(recipe.export, runtimes_of(recipe), () if timed is None else (timed.dtype,))
        require_exporters(formats)
        priced = Priced(progress)  # also says how long the rest takes
        pruning, delivery = load_recipe(recipe, progress=priced)
        uneven = pruning.options.may_be_uneven(pruning.scored)
        check_exports(formats, pruning.model, delivery.exporter, uneven=uneven)
        with (
            _journal(pruning, recipe.output) as pruning,
            output_folder(recipe.output, overwrite=overwrite) as folder,
            # Exports that are not kept are written into the output, so that all use the same disk.
            tempfile.TemporaryDirectory(prefix=".forms-", dir=folder if processes.is_first() else None) as scratch,
        ):
            forms = Forms({"dense": pruning.model}, delivery.exporter, Path(scratch), priced)
            try_metrics(pruning)
            priced.expect(size_of_pruning(pruning))
            with pruning.clock("score"):
                if delivery.deploy is None:
                    decision = Decision(choose(pruning, calibrate(pruning)), delivery.cascade)
                else:
                    decision = find_fastest(pruning, delivery, calibrate(pruning, reported=False), forms)
            with pruning.clock("cut"):
                slim = cut(pruning, decision.choice)
                decision = replace(decision, choice=decision.choice.after_cut(slim))
                saved = save(pruning, delivery, slim, folder / "slim", refit_file=folder / REFIT)
            priced.stage("evaluate both models")
            evaluation = compare(pruning, slim.model)
            choice, count = decision.choice, processes.world()  # not in `finish`, where the first process is alone

            def finish() -> Report:
                (folder / "recipe.yaml").write_text(as_drawn(recipe, delivery.splits).to_yaml(), encoding="utf-8")
                write_choice(choice, folder)
                measured = Measuring(pruning, delivery, forms, decision, folder).run(slim, saved)
                report = build_report(pruning, delivery, choice, slim, evaluation, measured, command, count)
                write_report(folder, report)
                return report

            report = processes.on_main(finish)
        processes.on_main(lambda: None)  # the others wait until the folder is in its place
        return report


def deploy(
    recipe: PruningRecipe,
    *,
    keep: float | None = None,
    runtimes: Sequence[str] | None = None,
    overwrite: bool = False,
    command: str | None = None,
    progress: Progress = SILENT,
) -> Report:
    """Find the fastest form of a model that keeps its answers, and write it with its report to `recipe.output`.

    The dense model is judged on the held-out rows and timed on every runtime of this machine, in all bits that the
    runtime computes in. In the fastest forms, the search finds the largest cut whose file keeps the promise, by the
    lower end of a 95 % interval. For a classifier, deeper cuts are tried too, joined with the dense model, which
    answers the rows that the slim one is unsure of. The fastest of all these is then judged and timed in all forms
    beside the dense model; joined ones are timed on the evaluation rows. If no cut keeps the promise, nothing is cut,
    and the answer is the fastest dense form that keeps it.

    Args:
        recipe: Model, data, and how units are scored and refitted; its budget is ignored. If it holds out no rows, the
            promise is made on part of the evaluated split, see `HeldOutSection`.
        keep: Share of the dense model's predictions on held-out rows that must stay, in (0, 1); by default that of the
            recipe's section `deploy`, or 0.99.
        runtimes: Runtimes that may be deployed on; by default the section's, or all that are installed.
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
    recipe = recipe.to_deploy(keep=keep, runtimes=runtimes)
    return run(recipe, overwrite=overwrite, command=command, progress=progress)


@contextmanager
def _journal(pruning: Pruning, output: Path) -> Iterator[Pruning]:
    """Yield the pruning, with a journal beside the output if it ranks and refits only once, by `compensated`."""
    if not pruning.cuts_once or pruning.options.criterion != COMPENSATED:
        yield pruning
        return
    fingerprint = processes.on_main(lambda: _fingerprint(pruning))
    with journal(output, fingerprint, pruning.progress) as (chains, fits):
        yield replace(pruning, chains=chains, fits=fits)


def _fingerprint(pruning: Pruning) -> str:
    """Return a digest of everything that determines the orders of removal and the refits."""
    model, options = pruning.model, pruning.options.model_dump_json()
    weights = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    rows = [batches_fingerprint(batches) for batches in (pruning.rows.score, pruning.rows.refit)]
    settings = [options, pruning.seed, [*pruning.shapes], model.device.type, library_versions()]
    return hashlib.sha256(json.dumps([digest_tensors(weights), rows, settings]).encode()).hexdigest()


def output_folder(output: Path, *, overwrite: bool) -> AbstractContextManager[Path]:
    """Return a `new_folder` for the output of a run; of several processes only the first makes it, and writes."""
    return new_folder(output, overwrite=overwrite) if processes.is_first() else nullcontext(output)
