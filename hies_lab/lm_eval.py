"""Run benchmarks of EleutherAI's lm-evaluation-harness in memory: HellaSwag, PIQA, MMLU, GSM8K and others."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hies_export.errors import RecipeError, did_you_mean, refusing, require_package
from hies_export.progress import quiet


def check_benchmarks(tasks: Sequence[str]) -> None:
    """Refuse, before any work, benchmarks that cannot be run, and load the data of the others.

    Tasks are names of lm-eval's tasks and groups, or YAML files of tasks
    (https://github.com/EleutherAI/lm-evaluation-harness/tree/main/lm_eval/tasks).
    """
    require_package("lm_eval", who=f"judging by {', '.join(tasks)} needs", package="lm-eval", extra="lm-eval")
    manager = _task_manager(tuple(tasks))
    problems = []
    for task in tasks:
        if _is_file(task):
            if not Path(task).is_file():
                problems.append(f"a task of lm-eval must be a file that exists, got {task}")
        elif task not in manager.task_index:
            near = did_you_mean(task, manager.all_tasks)
            problems.append(f"a task must be one of lm-eval's or a YAML file, got {task!r}{near}")
    if problems:
        raise RecipeError(problems)
    must = f"the data of {', '.join(tasks)} must be loadable, but lm-eval says"
    with refusing(must, "check the names and the connection"), quiet():
        manager.load(list(tasks))


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


@cache
def _task_manager(tasks: tuple[str, ...]) -> Any:
    with quiet():
        from lm_eval.tasks import TaskManager

        # Reading the names of lm-eval's own tasks takes seconds, so only if one is asked for.
        return TaskManager(include_defaults=not all(map(_is_file, tasks)))


def run_benchmarks(
    model: PreTrainedModel, tokenizer: Any, tasks: Sequence[str], *, samples: int | None = None, batch_size: int = 8
) -> dict[str, float]:
    """Return "task metric" -> value, on the first `samples` documents of each task.

    A group has the metrics of the group itself; those of its tasks are left out.
    """
    with quiet():
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        wrapped = HFLM(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=batch_size)
        found = simple_evaluate(
            model=wrapped,
            tasks=list(tasks),
            task_manager=_task_manager(tuple(tasks)),
            limit=samples,
            batch_size=batch_size,
            bootstrap_iters=0,
            log_samples=False,
        )
    parts = {task for subtasks in found.get("group_subtasks", {}).values() for task in subtasks}
    values = {}
    for task, results in found["results"].items():
        for key, value in results.items():
            # A key is the metric and the filter of the answers, as in "exact_match,strict-match".
            metric, comma, filtered = key.partition(",")
            if task not in parts and comma and not metric.endswith("_stderr"):
                name = f"{task} {metric}" + ("" if filtered == "none" else f" ({filtered})")
                values[name] = float(value)
    return values
