"""Export the models of a run, to the format that the recipe names or that a runtime reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedModel

from ..gguf.export import GgufExport, check_exportable, export_gguf, require_gguf
from ..model.tokens import first_samples
from ..onnx.export import DTYPES as ONNX_DTYPES
from ..onnx.export import OnnxExport, export_onnx
from ..recipe import PruningRecipe
from ..runtimes.base import Format
from ..runtimes.ort import require_onnxruntime
from ..runtimes.registry import RUNTIMES
from .prepare import Prepared

Exported = OnnxExport | GgufExport


def export(
    prepared: Prepared,
    model: PreTrainedModel,
    recipe: PruningRecipe,
    folder: Path,
    *,
    format: Format | None = None,
    dtype: str | None = None,
) -> Exported:
    """Export a dense or slim model with the recipe's settings.

    Args:
        prepared: The data to trace and compare on, and the tokenizer.
        model: The model.
        recipe: Its `export` section holds the settings.
        folder: Where to write.
        format: What to export to; by default what the recipe says.
        dtype: What to store the weights in; by default what the recipe says, or float32 where that is unknown to
            `format`.
    """
    format = format or recipe.export.format
    dtype = dtype or recipe.export.dtype
    if format == "gguf":
        return export_gguf(model, folder, tokenizer=prepared.processor, dtype=dtype)
    return export_onnx(
        model,
        folder,
        batch=first_samples(prepared.calibration[0]),
        processor=prepared.processor,
        provider=recipe.export.provider,
        dtype=dtype if dtype in ONNX_DTYPES else "float32",
    )


def require_exporters(recipe: PruningRecipe) -> None:
    """Refuse, before anything is loaded, an export whose packages are not installed.

    Raises:
        MissingRuntimeError: One of them is missing.
    """
    latency = recipe.prune.budget.latency
    formats = _formats(recipe, (*recipe.measure.runtimes, *([] if latency is None else [latency.runtime])))
    if "onnx" in formats:
        require_onnxruntime()
    if "gguf" in formats:
        require_gguf()


def check_exports(prepared: Prepared, recipe: PruningRecipe) -> None:
    """Refuse, before anything is computed, a model or a tokenizer that no GGUF file can hold, where one is wanted.

    Raises:
        RequestError: It cannot be written; the message names the layer and the reason.
    """
    if "gguf" in _formats(recipe, prepared.runtimes):
        uneven = recipe.prune.allocation == "global" or bool(recipe.prune.keep_layers)
        check_exportable(prepared.model, prepared.processor, uneven=uneven)


def _formats(recipe: PruningRecipe, runtimes: Iterable[str]) -> set[Format]:
    """Return the formats that a run exports to, for itself or for a runtime."""
    return {recipe.export.format, *(RUNTIMES[name].format for name in runtimes if not RUNTIMES[name].reads_models)}
