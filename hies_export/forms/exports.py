"""Export a model to the requested format, or to the one that a runtime reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..errors import ExportError, RequestError
from ..model.internals import require_onnx_exporter
from ..recipe.sections import ExportSection
from .gguf.export import GgufExport, check_exportable, export_gguf, require_gguf
from .onnx.export import DTYPES as ONNX_DTYPES
from .onnx.export import OnnxExport, check_traceable
from .onnx.quantize import Quantize, check_quantizable, export_in_bits, quantize_onnx
from .onnx.resize import Traces
from .openvino.export import OpenVinoExport, check_calibrated, export_openvino, quantize_openvino, require_nncf
from .runtimes.base import RUNTIMES, Format
from .runtimes.ort import require_onnxruntime

Exported = OnnxExport | GgufExport | OpenVinoExport


_CALIBRATED = ExportSection(format="openvino", quantize="int8")


def export_options(
    format: str = "onnx", provider: str = "cpu", dtype: str = "float32", quantize: str | None = None
) -> ExportSection:
    """Return the options of an export that no recipe asks for; what writes it refuses those that it does not know."""
    fields: dict[str, Any] = {"format": format, "provider": provider, "dtype": dtype, "quantize": quantize}
    return ExportSection.model_construct(**fields)


def best_for(runtime: str, dtype: str) -> ExportSection:
    """Return the options of the export that a runtime computes fastest in a dtype."""
    known = RUNTIMES[runtime]
    if dtype in known.calibrated:
        return _CALIBRATED
    return export_options(known.format, known.fused_for, known.exported_in(dtype))


def read_by(options: ExportSection, runtime: str, dtype: str | None = None) -> ExportSection:
    """Return the options of the export that a runtime reads to compute in `dtype`, by default the export's own.

    It is stored in float32 if the runtime's format does not know the dtype.
    """
    if dtype in RUNTIMES[runtime].calibrated:
        return _CALIBRATED
    format = RUNTIMES[runtime].format
    stored = options.dtype if dtype is None else RUNTIMES[runtime].exported_in(dtype)
    known = format != "onnx" or stored in ONNX_DTYPES
    return export_options(format, options.provider, stored if known else "float32")


@dataclass(frozen=True)
class Exporter:
    """Exports models by the same options.

    Attributes:
        options: Options of the exports.
        sample: The batch that ONNX graphs are traced and compared on.
        processor: The tokenizer or image processor that is saved beside a graph, or in a GGUF file.
        rows: Batches that weights in 4 bits are rounded by (without any, to nearest), and that 8 bits on OpenVINO are
            calibrated on.
        traces: The graphs that were traced; those of further cuts of a model are made of them.
    """

    options: ExportSection
    sample: Mapping[str, Tensor]
    processor: Any = None
    rows: Sequence[Mapping[str, Tensor]] = ()
    traces: Traces = field(default_factory=Traces, repr=False, compare=False)

    def export(
        self, model: PreTrainedModel, folder: Path, options: ExportSection | None = None, *, overwrite: bool = False
    ) -> Exported:
        """Export a model into a folder, by other options if they are given."""
        options = options or self.options
        given: dict[str, Any] = {"rows": self.rows, "overwrite": overwrite}
        if options.format == "gguf":
            return export_gguf(model, folder, tokenizer=self.processor, dtype=options.dtype, **given)
        given |= {"batch": self.sample, "processor": self.processor, "traces": self.traces}
        if options.format == "openvino":
            return export_openvino(model, folder, **given)
        return export_in_bits(
            model, folder, provider=options.provider, dtype=options.dtype, quantize=options.quantize, **given
        )

    def quantize(self, exported: Exported, folder: Path, options: ExportSection) -> OnnxExport | OpenVinoExport:
        """Quantise an ONNX export into a new folder; an ExportError where the cut has left only small layers."""
        assert isinstance(exported, OnnxExport)
        assert options.quantize is not None
        if options.format == "openvino":
            return quantize_openvino(exported, folder, rows=self.rows)
        try:
            return quantize_onnx(exported, folder, batch=self.sample, quantize=options.quantize, rows=self.rows)
        except RequestError as error:  # the request was checked on the dense model
            raise ExportError(f"the slim model has no form in fewer bits: {error}") from error


def export_formats(options: ExportSection, runtimes: Iterable[str], dtypes: Iterable[str | None] = ()) -> set[Format]:
    """Return the formats that a run exports to, for itself or for a runtime that computes in some dtypes."""
    found: set[Format] = {options.format, options.unquantized.format}
    for runtime in (RUNTIMES[name] for name in runtimes if not RUNTIMES[name].reads_models):
        found.add(runtime.format)
        if {*dtypes} & {*runtime.calibrated}:
            found.add("openvino")
    return found


def require_exporters(formats: Iterable[Format]) -> None:
    """Refuse, by a MissingRuntimeError, formats whose packages are not installed."""
    if "onnx" in formats:
        require_onnx_exporter()
        require_onnxruntime()
    if "gguf" in formats:
        require_gguf()
    if "openvino" in formats:
        require_nncf()


def check_exports(
    formats: Iterable[Format],
    model: PreTrainedModel,
    processor: Any,
    sample: Mapping[str, Tensor],
    *,
    uneven: bool,
    skips: bool = False,
    quantize: Quantize | None = None,
) -> None:
    """Refuse, before anything is computed, a dense model or tokenizer that cannot be exported as requested.

    `sample` is the batch that ONNX graphs are traced on. `uneven` says whether layers may keep different numbers of
    units, and `skips` whether they may keep none. Raises RequestError.
    """
    if "onnx" in formats:
        check_traceable(model, sample)
    if "gguf" in formats:
        check_exportable(model, processor, uneven=uneven, skips=skips)
    if "openvino" in formats:
        check_calibrated("cpu", "float32", decodes=model.can_generate())
    if quantize is not None:
        check_quantizable(model, quantize)
