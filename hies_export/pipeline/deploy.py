"""Answer what to deploy: the fastest form of a model that keeps a promise about its answers."""

from __future__ import annotations

from collections.abc import Sequence

from ..progress import SILENT, Progress
from ..recipe import PruningRecipe
from ..report.report import Report
from .run import run


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

    After an interruption, the same call judges no cut again: see `CutJournal`.

    Args:
        recipe: Model, data, and how units are scored and refitted; its budget is ignored. If it holds out no rows, the
            promise is made on part of the evaluated split, see `Splits.promising`.
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
