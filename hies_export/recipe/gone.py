"""What went, and what to use instead: one sentence for each field, keyword of `prune`, command and option."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

from ..errors import RecipeError

P = ParamSpec("P")
T = TypeVar("T")

# A field of a recipe, or a field and a value -> what follows it in a sentence.
FIELDS: Mapping[str, str] = {
    "device_map": "is gone: blocks of a model that does not fit a GPU go there one at a time; leave it out",
    "evaluation.lm_eval": "is gone; give the slim folder to lm-eval's own command: lm_eval --model hf --model_args "
    "pretrained=RUN/slim,trust_remote_code=True --tasks TASK",
    **dict.fromkeys(
        ("task: text2text-generation", "task: automatic-speech-recognition"),
        "is for encoder-decoders, which cannot be pruned; give a model that is an encoder or a decoder, and its task",
    ),
    **dict.fromkeys(
        ("prune.min_heads: 0", "prune.min_neurons: 0"), "must be at least 1; for less time lower the budget"
    ),
    "prune.steps": "is gone: units are scored once; leave it out, and for deep cuts set criterion: auto",
    "prune.compensation.memory_gb": "is gone: what is held is one block's; leave it out",
    "prune.budget.latency.of": "is gone: the ratio is to the dense model in the same bits; leave it out",
    "prune.budget.max_drop": "is gone; set keep: {metric: NAME, by: LOSS}, which holds with 95 % confidence",
    "prune.criterion: hies-compensated": "is called compensated; set criterion: compensated",
    "prune.criterion: activation-l2": "is called activation; set criterion: activation",
}
# A command, or a command and an option.
COMMANDS: Mapping[str, str] = {
    "ui": "hies-export ui is gone; use 'hies-export report RUN --html FILE' to see a run, and 'hies-export sweep' to "
    "compare other plans",
    "report SWEEP": "a sweep is shown by 'hies-export sweep SWEEP --show'",
    "inspect --theory": "the theory is checked by 'hies-export sweep RECIPE --theory'",
    "sweep --executor": "a sweep runs in one process, got --executor; leave it out",
    "sweep --no-figures": "a sweep draws nothing but its page, got --no-figures; leave it out",
}


def gone_field(name: str, value: object = None, *, within: str = "") -> str | None:
    """Return a sentence if a field, or its value, is gone; else None. `within` is its section, such as "prune."."""
    for shown in (name, f"{name}: {value}" if isinstance(value, str | int) else ""):
        if within + shown in FIELDS:
            return f"{shown} {FIELDS[within + shown]}"
    return None


def refusing_gone(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that raises a RecipeError for keywords that are gone from a recipe's section `prune`."""

    @wraps(function)
    def refused(*values: P.args, **named: P.kwargs) -> T:
        if problems := [gone for name in named if (gone := gone_field(name, within="prune."))]:
            raise RecipeError(problems)
        return function(*values, **named)

    return refused


def gone_command(arguments: Sequence[str]) -> str | None:
    """Return a sentence if the command of a command line, or one of its options, is gone; else None."""
    asked = [arguments[0], *(f"{arguments[0]} {argument.partition('=')[0]}" for argument in arguments[1:])]
    return next((COMMANDS[name] for name in asked if name in COMMANDS), None)
