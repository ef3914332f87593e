"""Read what the layers of an exported graph are given, by running the graph up to there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ..rounding import Opens
from ..runtimes.ort import ONNX_FILE, OnnxRuntime
from .export import save_program


def read_values(file: Path) -> Opens:
    """Return what reads values of a graph by name, in ONNX Runtime."""
    import onnx_ir

    @contextmanager
    def opens(names: Sequence[str]) -> Iterator[Callable[[Mapping[str, Any]], Mapping[str, Tensor]]]:
        program = onnx_ir.load(file)
        values = onnx_ir.convenience.create_value_mapping(program.graph)
        program.graph.outputs[:] = [values[name] for name in names]
        with TemporaryDirectory(prefix="hies-inputs-") as folder:
            save_program(program, Path(folder) / ONNX_FILE)
            runtime = OnnxRuntime(folder, threads=torch.get_num_threads())
            yield lambda batch: {name: torch.from_numpy(states) for name, states in runtime.compute(batch).items()}

    return opens
