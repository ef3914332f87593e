"""Export models to the format that is asked for, or that a runtime reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedModel

from ..gguf.export import GgufExport, check_exportable, export_gguf, require_gguf
from ..onnx.export import DTYPES as ONNX_DTYPES
from ..onnx.export import OnnxExport, export_onnx
from ..runtimes.base import Format
from ..runtimes.ort import require_onnxruntime
from ..runtimes.registry import RUNTIMES
from .options import ExportOptions
from .prepare import Prepared

Exported = OnnxExport | GgufExport


def export(
    prepared: Prepared,
    model: PreTrainedModel,
    options: ExportOptions,
    folder: Path,
    *,
    format: Format | None = None,
    dtype: str | None = None,
) -> Exported:
    """Export a dense or slim model.

    Args:
        prepared: The data to trace and compare on, and the tokenizer.
        model: The model.
        options: The settings.
        folder: Where to write.
        format: What to export to, instead of what the options say.
        dtype: What to store the weights in, instead of what the options say; float32 where `format` does not know it.
    """
    format = format or options.format
    dtype = dtype or options.dtype
    if format == "gguf":
        return export_gguf(model, folder, tokenizer=prepared.processor, dtype=dtype)
    return export_onnx(
        model,
        folder,
        batch=prepared.sample,
        processor=prepared.processor,
        provider=options.provider,
        dtype=dtype if dtype in ONNX_DTYPES else "float32",
    )


def require_exporters(options: ExportOptions, runtimes: Iterable[str]) -> None:
    """Refuse, before anything is loaded, an export whose packages are not installed.

    Raises:
        MissingRuntimeError: One of them is missing.
    """
    formats = _formats(options, runtimes)
    if "onnx" in formats:
        require_onnxruntime()
    if "gguf" in formats:
        require_gguf()


def check_exports(prepared: Prepared, options: ExportOptions, runtimes: Iterable[str], *, uneven: bool) -> None:
    """Refuse, before anything is computed, a model or a tokenizer that no GGUF file can hold, where one is wanted.

    Args:
        prepared: The dense model and its tokenizer.
        options: What the slim model is exported to.
        runtimes: What both models are timed on.
        uneven: Whether layers may keep different numbers of units.

    Raises:
        RequestError: It cannot be written; the message names the layer and the reason.
    """
    if "gguf" in _formats(options, runtimes):
        check_exportable(prepared.model, prepared.processor, uneven=uneven)


def _formats(options: ExportOptions, runtimes: Iterable[str]) -> set[Format]:
    """Return the formats that a run exports to, for itself or for a runtime."""
    return {options.format, *(RUNTIMES[name].format for name in runtimes if not RUNTIMES[name].reads_models)}
