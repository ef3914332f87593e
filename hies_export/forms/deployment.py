"""Try the dense model in all forms, and record how these did, and cascades (slim and dense model in one file)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import HiesError, MissingRuntimeError, PlanError, RecipeError
from ..evaluate.judge import Judge
from ..tasks import Task
from ..units.counts import Count, Share
from .form import Form, Forms
from .onnx.quantize import check_quantizable
from .runtimes.base import RUNTIMES, check_runtime, runs_task
from .time import TimedRow, ratios

logger = logging.getLogger(__name__)

Way = tuple[str, str]  # a runtime, and the bits that it computes in
# A cut is searched for in at most this many forms, the fastest of the dense model; the cut model is then tried in all.
SEARCHED = 2


@dataclass(frozen=True)
class DeployWay:
    """A runtime and bits that were tried, and the result.

    Attributes:
        kept, at_least: Share of the dense model's held-out predictions that stay, and its 95 % interval's lower end.
        dense_ratio: Time of the dense model, relative to the first way's.
        flops: Share of the FLOPs left by the largest cut that keeps the promise; None if no cut was searched for.
        judged: The cuts that were tried, as in `Outcome`.
        problem: Why the runtime does not serve the model.
        search: Why no cut was found.
    """

    runtime: str
    bits: str
    kept: float | None = None
    at_least: float | None = None
    dense_ratio: float | None = None
    flops: float | None = None
    judged: tuple[Mapping[str, Any], ...] = ()
    problem: str | None = None
    search: str | None = None


@dataclass(frozen=True)
class Deployment:
    """Which form to deploy: the fastest that keeps a share of `promise` on held-out rows, by its lower end.

    `form` is its index among the forms, None if none keeps the promise; `step` is the index of the compared times, the
    first that are not noisy; `seconds` is the time of the search; `file` is the form's file in the run's folder, as
    `keep_file` returns it.
    """

    promise: Share
    form: int | None
    step: int
    ways: list[DeployWay]
    seconds: float
    file: str | None = None


def find_ways(task: type[Task], runtimes: Sequence[str]) -> list[Way]:
    """Return the (runtime, bits) pairs to try: on `runtimes`, or if empty, on all that are installed and run the task.

    Torch is tried on a GPU only. Raises RequestError if one of `runtimes` does not run the task, or not here.
    """
    on_gpu = torch.cuda.is_available()
    deployable = [name for name, runtime in RUNTIMES.items() if runtime.bits and (on_gpu or not runtime.reads_models)]
    # Torch goes last, because it is tried in half precision only, and times are relative to the first pair's.
    deployable.sort(key=lambda name: RUNTIMES[name].reads_models)
    refused = [name for name in runtimes if name in RUNTIMES and name not in deployable]
    if refused:
        raise RecipeError([f"runtimes to deploy on must be among {', '.join(deployable)}, got {', '.join(refused)}"])
    pairs = []
    for name in runtimes or deployable:
        try:
            check_runtime(name, task=task)
        except (MissingRuntimeError, RecipeError):
            if runtimes:
                raise
            continue
        pairs += [(name, bits) for bits in RUNTIMES[name].bits]
    return pairs


def count_reduced_precision(task: type[Task], runtimes: Sequence[str]) -> int:
    """Count the (runtime, bits) pairs with fewer bits than float32, on `runtimes` or all, installed or not."""
    names = (name for name in runtimes or RUNTIMES if runs_task(name, task))
    return len([bits for name in names for bits in RUNTIMES[name].bits if bits != "float32"])


def try_dense(
    forms: Forms, judge: Judge, ways: Iterable[Way], timed: Callable[[Sequence[Form]], list[list[TimedRow]]]
) -> list[DeployWay]:
    """Judge and time the dense model in every form; one that fails keeps its `problem`. Raises PlanError if all do."""
    tried: list[DeployWay] = []
    served: dict[int, Form] = {}  # index in `tried` -> form that did not fail
    for runtime, bits in ways:
        forms.progress.stage(f"try the dense model on {runtime} in {bits}")
        try:
            if bits == "int8" and bits not in RUNTIMES[runtime].calibrated:  # ONNX Runtime's int8
                check_quantizable(forms.model("dense"), "int8")
            form = forms.form("dense", runtime, bits)
            kept, low = judge.kept(form.predict(judge.batches, judge.task, forms.progress))
        except HiesError as error:
            logger.warning("%s in %s is left out: %s", runtime, bits, error)
            tried.append(DeployWay(runtime, bits, problem=str(error)))
            continue
        served[len(tried)] = form
        tried.append(DeployWay(runtime, bits, kept=kept, at_least=low))
    if not served:
        reasons = "; ".join(str(way.problem) for way in tried)
        raise PlanError(f"no runtime here serves the dense model: {reasons or 'none is installed, see the extra cpu'}")
    times = [1.0]
    if len(served) > 1:
        forms.progress.stage("time all forms of the dense model")
        times = ratios(timed([*served.values()]))
    for index, time in zip(served, times, strict=True):
        tried[index] = replace(tried[index], dense_ratio=time)
    return tried


@dataclass(frozen=True, kw_only=True)
class SizeTried:
    """A share of the FLOPs that was tried for a cascade, and the result.

    Attributes:
        flops: Share of the dense model's FLOPs that the cut leaves.
        passed_on: Share of the held-out rows that go on to the dense part.
        differ: Number of held-out rows whose answer differs from the dense model's.
        problem: Why there is no such cascade.
    """

    flops: Share
    passed_on: Share | None = None
    differ: Count | None = None
    problem: str | None = None
