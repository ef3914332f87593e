"""What an error becomes: a line on standard error and an exit code, or a traceback where we are at fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hies_export.cli.main import main
from hies_export.errors import CutMismatchError, PlanError, RecipeError


def raising(error: BaseException) -> Callable[..., None]:
    def run(*_: object) -> None:
        raise error

    return run


def test_success_is_0_and_says_nothing(run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda console, progress: None) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PlanError("the plan has no [dim] heads"), 2),  # brackets stay as they are
        (RecipeError(["alpha must be in [0, 1)", "no such field"]), 2),
        (CutMismatchError("the cut differs by 0.1"), 1),
    ],
)
@pytest.mark.parametrize("verbose", [False, True])
def test_our_errors_are_their_message_and_their_code(
    error: Exception, code: int, verbose: bool, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(raising(error), verbose=verbose) == code
    assert capsys.readouterr() == ("", f"error: {error}\n")


def test_a_full_disk_is_1_and_with_verbose_a_traceback(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    full = raising(OSError(28, "No space left on device"))
    assert run_command(full) == 1
    assert capsys.readouterr().err == (
        "error: [Errno 28] No space left on device; nothing half-written was left behind\n"
    )
    with pytest.raises(OSError, match="No space left"):
        run_command(full, verbose=True)


def test_a_bug_keeps_its_traceback(run_command: Callable[..., int]) -> None:
    with pytest.raises(KeyError, match="missing"):
        run_command(raising(KeyError("missing")))


def test_what_the_parser_refuses_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["unheard-of"], ["run"], ["apply", "plan.json", "model"], ["bench", "a", "--repeats", "two"]):
        with pytest.raises(SystemExit, match="^2$"):
            main(arguments)
        assert "usage: hies-export" in capsys.readouterr().err
