"""What an error becomes: a line on standard error and an exit code, and with `--verbose` a traceback."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir
import pyarrow.parquet
import pytest
import torch
from datasets.exceptions import DatasetGenerationError
from safetensors.torch import save_file
from support.models import generative_tokenizer

from hies_export.errors import CutMismatchError, PlanError, RecipeError


def raising(error: BaseException) -> Callable[..., None]:
    def run(*_: object) -> None:
        raise error

    return run


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
    error: Exception, code: int, verbose: bool, run_command: Callable[..., Any]
) -> None:
    assert run_command(raising(error), verbose=verbose) == (code, "", f"error: {error}\n")


@contextmanager
def small_files() -> Iterator[None]:
    """Let the operating system refuse files of more than 100 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def by_datasets(file: Path) -> None:
    try:
        WRITERS["Python"](file)
    except OSError as error:
        raise DatasetGenerationError("An error occurred while generating the dataset") from error


GRAPH = onnx_ir.Graph([], [], nodes=[], opset_imports={"": 20}, name="x" * 1000)
WRITERS: dict[str, Callable[[Path], object]] = {
    "Python": lambda file: file.write_bytes(bytes(1000)),
    "safetensors": lambda file: save_file({"weight": torch.zeros(1000)}, file),
    "tokenizers": lambda file: generative_tokenizer().backend_tokenizer.save(str(file)),
    "onnx": lambda file: onnx_ir.save(onnx_ir.Model(GRAPH, ir_version=10), file),
    "arrow": lambda file: pyarrow.parquet.write_table(pyarrow.table({"a": range(1000)}), file),
    "datasets": by_datasets,
}


@pytest.mark.parametrize("library", WRITERS)
def test_what_the_system_refuses_is_1_and_a_sentence_whichever_library_writes(
    library: str, run_command: Callable[..., Any], tmp_path: Path
) -> None:
    def run(*_: object) -> None:
        with small_files():
            WRITERS[library](tmp_path / "file")

    code, _, err = run_command(run)
    assert code == 1
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert "File too large" in line
    assert line.endswith("; nothing half-written was left behind")
    with pytest.raises(Exception, match=r"File too large|An error occurred"):
        run_command(run, verbose=True)


def test_any_other_error_is_1_and_a_sentence_and_its_traceback_with_verbose(run_command: Callable[..., Any]) -> None:
    def run(*_: object) -> None:
        {}["missing"]

    said = "error: KeyError: 'missing' (--verbose shows where); nothing half-written was left behind\n"
    assert run_command(run) == (1, "", said)
    with pytest.raises(KeyError, match="missing"):
        run_command(run, verbose=True)
