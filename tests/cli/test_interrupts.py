"""Ctrl-C and SIGTERM: exit code 130 wherever they come, and the caller's handlers afterwards.

That nothing half-written stays is tested with a whole run, in tests/pipeline.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

# Seconds in which a signal surely comes, even on a busy machine; what it interrupts waits no longer.
PATIENCE = 300
INTERRUPTED = (130, "", "interrupted; nothing half-written was left behind\n")


def interrupt(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)
    time.sleep(PATIENCE)


@pytest.fixture(autouse=True)
def _same_handlers_afterwards():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_are_130(number: int, run_command: Callable[..., Any]) -> None:
    assert run_command(lambda console, progress: interrupt(number)) == INTERRUPTED


def test_a_library_that_raises_something_else_does_not_hide_it(run_command: Callable[..., Any]) -> None:
    def run(*_: object) -> None:
        try:
            interrupt()
        except KeyboardInterrupt:
            raise RuntimeError("the export failed") from None

    assert run_command(run) == INTERRUPTED


def test_it_comes_through_when_python_is_in_a_finaliser(run_command: Callable[..., Any]) -> None:
    class Interrupting:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    def run(*_: object) -> None:
        Interrupting()
        time.sleep(PATIENCE)

    assert run_command(run) == INTERRUPTED


def test_outside_the_main_thread_the_host_program_decides(run_command: Callable[..., Any]) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run_command(lambda console, progress: None).code))
    thread.start()
    thread.join()
    assert codes == [0]
