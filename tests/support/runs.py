"""Run the command line and scripts in this process, because a new process takes seconds to import torch."""

import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from filelock import FileLock
from transformers import PreTrainedModel

import hies_export
import hies_export.pipeline.bench
import hies_export.pipeline.run
from hies_export.checkpoint.folders import new_folder
from hies_export.cli.main import main
from hies_export.evaluate.metrics import METRICS
from hies_export.forms.formats import Export, export_options
from hies_export.forms.onnx import export as export_module
from hies_export.forms.onnx.export import export_onnx
from hies_export.forms.runtimes.base import RUNTIMES
from hies_export.pipeline.pruning import Pruning
from hies_export.tasks import TASKS
from support.models import save_project, save_text_model


def hies(*arguments: object) -> int:
    """Run a command as a user types it, and return its exit code."""
    return main([str(a) for a in arguments])


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder of this name, which the first of all processes of the tests makes."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    made = Path(f"{folder}.made")
    with FileLock(f"{folder}.lock"):
        if not made.exists():
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


def small_project(folder: Path) -> Path:
    """Write a model of two layers, each of which takes seconds in a trace, data and a recipe.yaml."""
    save_project(
        folder,
        train=12,
        validation=20,
        calibration={"samples": 8, "batch_size": 3},
        prune={"alpha": 0.5, "budget": {"heads": 0.4}},
        measure={"shapes": [[2, 16]], "repeats": 2},
    )
    save_text_model(folder / "model", num_hidden_layers=2)
    return folder


def run_small_project(folder: Path) -> None:
    """Run a `small_project` with its graphs into out/, and keep what the command prints."""
    with (folder / "printed.txt").open("w") as printed, redirect_stdout(printed):
        assert hies("run", small_project(folder) / "recipe.yaml", "--json") == 0


def run_script(path: Path, *arguments: object) -> None:
    """Do what `python PATH ARGUMENTS` does. What the script imports from its own folder or registers is forgotten."""
    modules = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), registries_restored():
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", [str(path), *(str(a) for a in arguments)])
        patch.syspath_prepend(path.parent)
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            for name in set(sys.modules) - modules:
                if Path(getattr(sys.modules[name], "__file__", None) or "").parent == path.parent:
                    del sys.modules[name]


@contextmanager
def registries_restored() -> Iterator[None]:
    """Forget afterwards which criteria, metrics, tasks and runtimes were registered inside the block."""
    with ExitStack() as stack:
        for known in (hies_export.CRITERIA, METRICS, TASKS, RUNTIMES):
            assert len([*known.values()]) == len(known)  # looked up now, as a module registers itself only once
            stack.enter_context(mock.patch.dict(known.data))
        yield


def deploy_on(patch: pytest.MonkeyPatch, *runtimes: str) -> None:
    """Let `deploy` try these runtimes only, by default ONNX Runtime in float32."""
    for name, runtime in RUNTIMES.items():
        patch.setattr(runtime, "bits", runtime.bits if name in (runtimes or ("onnxruntime-cpu",)) else ())


@contextmanager
def without_tracing() -> Iterator[None]:
    """Let a run that is timed in torch write an ONNX file that is no graph, because tracing takes most of its time.

    Whether a model of an unusual type can be traced is not tried either.
    """

    def write(model: PreTrainedModel, folder: str | Path, *, provider: str = "cpu", **options: Any) -> Export:
        with new_folder(Path(folder), overwrite=options.get("overwrite", False)) as staging:
            (staging / "model.onnx").write_bytes(b"no graph")
            model.config.save_pretrained(staging)
            if options.get("processor") is not None:
                options["processor"].save_pretrained(staging)
        file = Path(folder) / "model.onnx"
        return Export("onnx", Path(folder), file, (file.name,), 8, export_options("onnx", provider), 0.0)

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            # Not where it is defined: what is imported in this block for the first time keeps the real one.
            defined_here = name == export_onnx.__module__
            if name.startswith("hies_export.") and not defined_here and vars(module).get("export_onnx") is export_onnx:
                patch.setattr(module, "export_onnx", write)
        patch.setattr(export_module, "_is_known", lambda model: True)
        yield


def held_out_and_evaluated(found: Pruning) -> list[list[tuple[int, ...]]]:
    """Return the token ids of the rows that are held out, and of those that are evaluated, each in sorted order."""
    return [
        sorted(
            tuple(ids[mask.bool()].tolist())
            for batch in batches
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        )
        for batches in (found.rows.held_out, found.rows.evaluation)
    ]
