"""What went, and what to use instead: one sentence for each command and option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# A command, or a command and an option.
COMMANDS: Mapping[str, str] = {
    "ui": "hies-export ui is gone; use 'hies-export report RUN --html FILE' to see a run, and 'hies-export sweep' to "
    "compare other plans",
    "report SWEEP": "a sweep is shown by 'hies-export sweep SWEEP --show'",
    "inspect --theory": "the theory is checked by 'hies-export sweep RECIPE --theory'",
    "sweep --executor": "a sweep runs in one process, got --executor; leave it out",
    "sweep --no-figures": "a sweep draws nothing but its page, got --no-figures; leave it out",
}


def gone_command(arguments: Sequence[str]) -> str | None:
    """Return what to use instead of a command line, if its command or one of its options is gone."""
    asked = [arguments[0], *(f"{arguments[0]} {argument.partition('=')[0]}" for argument in arguments[1:])]
    return next((COMMANDS[name] for name in asked if name in COMMANDS), None)
