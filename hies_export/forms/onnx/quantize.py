"""Write an exported graph in 8 or 4 bits, with the file names of Optimum, and run it beside the float32 graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...checkpoint.beside import write_json
from ...checkpoint.folders import Contents, new_folder, refuse_existing
from ...equal import FEWER_BITS
from ...errors import ExportError, ParityError, RequestError
from ...recipe.sections import ExportSection
from ..formats import FORMATS, Export, Format, Given, export_options
from ..rounding import OpenReader, spreads
from ..runtimes.bits import BLOCK, SMALLEST, quantize_graph
from ..runtimes.ort import ONNX_FILE, QUANTIZED_FILE, OnnxRuntime, require_onnxruntime
from .export import check_traceable, copy_beside, export_onnx, save_program
from .multimodal import is_vision_language
from .parity import without_padding

Quantize = Literal["int8", "int4"]


def read_values(file: Path) -> OpenReader:
    """Return an opener that reads values of a graph by name, in ONNX Runtime."""
    import onnx_ir

    @contextmanager
    def open_values(names: Sequence[str]) -> Iterator[Callable[[Mapping[str, Any]], Mapping[str, Tensor]]]:
        program = onnx_ir.load(file)
        values = onnx_ir.convenience.create_value_mapping(program.graph)
        program.graph.outputs[:] = [values[name] for name in names]
        with TemporaryDirectory(prefix="hies-inputs-") as folder:
            save_program(program, Path(folder) / ONNX_FILE)
            runtime = OnnxRuntime(folder, threads=torch.get_num_threads())
            yield lambda batch: {name: torch.from_numpy(states) for name, states in runtime.compute(batch).items()}

    return open_values


def quantize_onnx(
    exported: Export,
    folder: str | Path,
    *,
    batch: Mapping[str, Any],
    quantize: Quantize = "int8",
    rows: Sequence[Mapping[str, Any]] = (),
    smallest: int = SMALLEST,
    overwrite: bool = False,
) -> Export:
    """Quantise an exported model to `model_quantized.onnx`, with an `ort_config.json`, as Optimum writes them.

    Every linear layer of `smallest` weights or more, 16,384 by default, is quantised. In `int8`, its weights have a
    scale per output channel, and its inputs a scale per token.
    In `int4`, every 32 weights have a scale and a zero point; this is only for decoders, whose time per token is spent
    on reading the weights. With `rows`, they are rounded so that the outputs of layers on these change least, and a
    bias keeps the mean of each output; without, to nearest. Embeddings are in 8 bits, with a scale per row. Small
    layers and everything else stay in float32. The graphs need ONNX Runtime 1.24 or newer, and so Python 3.11.

    Args:
        exported: An export by `export_onnx` for provider cpu in float32; its folder stays as it is.
        folder: Where to write; appears only when everything is written and checked.
        batch: Inputs on which both graphs are run and compared.
        quantize: "int8" or "int4".
        rows: Batches of calibration rows, for `int4`; some 10,000 tokens are enough.
        smallest: Layers and embeddings of fewer weights stay in float32.
        overwrite: Replace an existing folder.

    Returns:
        The quantised graph; `max_abs` is its largest difference from the float32 graph.

    Raises:
        OutputExistsError: The folder exists and `overwrite` is off, or it is that of the export.
        RequestError: The export has several graphs, is for another provider, or is not in float32; all its layers are
            small; or `int4` is asked for an encoder.
        ParityError: The outputs of both graphs are more than 30 % apart (root mean square); nothing is kept.

    Examples:
        >>> exported = export_onnx(slim, folder / "onnx", batch=batches[0])
        >>> quantize_onnx(exported, folder / "onnx-int8", batch=batches[0], smallest=1).files
        ('model_quantized.onnx',)
    """
    import onnx_ir

    _check_request(quantize, decodes=exported.decodes, graphs=len(exported.files))
    options = export_options(exported.how.format, exported.how.provider, exported.how.dtype, quantize)
    folder = Path(folder)
    refuse_existing(folder, overwrite=overwrite, inputs={"export": exported.folder})
    program = onnx_ir.load(exported.file)
    bits = int(quantize.removeprefix("int"))
    # The mean and covariance of what layers read, by which weights are rounded.
    reader = read_values(exported.file)
    input_spreads = partial(spreads, open_reader=reader, batches=rows, centred=True) if rows else None
    layer_counts = quantize_graph(program.graph, bits=bits, smallest=smallest, spreads=input_spreads)
    if not layer_counts.get(quantize):
        raise _too_small(quantize)
    with new_folder(folder, overwrite=overwrite) as staging:
        copy_beside(exported, staging)
        size = save_program(program, staging / QUANTIZED_FILE)
        write_json(staging / "ort_config.json", _ort_config(bits))
        threads = torch.get_num_threads()
        # Each graph is out of memory before the next one is loaded.
        dense = OnnxRuntime(exported.file, threads=threads).compute(batch)
        quantised = OnnxRuntime(staging / QUANTIZED_FILE, threads=threads).compute(batch)
        max_abs = largest_difference(dense, quantised, batch)
    file, facts = folder / QUANTIZED_FILE, {**exported.facts, "layers": layer_counts}
    return replace(
        exported, folder=folder, file=file, files=(file.name,), bytes=size, how=options, max_abs=max_abs, facts=facts
    )


def export_in_bits(
    model: PreTrainedModel, folder: Path, how: ExportSection, given: Given, *, overwrite: bool = False
) -> Export:
    """Export a model to ONNX, and quantise the graph if asked; see `export_onnx` and `quantize_onnx`."""
    with_run: dict[str, Any] = {"batch": given.sample, "processor": given.processor, "traces": given.traces}
    if how.quantize is None:
        return export_onnx(model, folder, provider=how.provider, dtype=how.dtype, overwrite=overwrite, **with_run)
    check_quantizable(model, how.quantize)
    refuse_existing(folder, overwrite=overwrite)
    with TemporaryDirectory(prefix="hies-float32-") as temporary:
        exported = export_onnx(model, Path(temporary) / "onnx", **with_run)
        bits, rows = how.quantize, given.rows
        return quantize_onnx(exported, folder, batch=given.sample, quantize=bits, rows=rows, overwrite=overwrite)


def _quantize_slim(exported: Export, folder: Path, how: ExportSection, given: Given) -> Export:
    """Quantise the export of a slim model; raises ExportError if the cut has left only small layers."""
    assert how.quantize is not None
    try:
        return quantize_onnx(exported, folder, batch=given.sample, quantize=how.quantize, rows=given.rows)
    except RequestError as error:  # not a wrong request: it was checked on the dense model
        raise ExportError(f"the slim model has no form in fewer bits: {error}") from error


def _check(model: PreTrainedModel, how: ExportSection, given: Given, *, uneven: bool) -> None:
    """Refuse a model that the options cannot export; a graph takes layers of any size, `uneven` or not."""
    check_traceable(model, given.sample)
    if how.quantize is not None:
        check_quantizable(model, how.quantize)


def check_quantizable(model: PreTrainedModel, quantize: Quantize) -> None:
    """Refuse, by a RequestError, what `quantize_onnx` would refuse once the model is exported."""
    _check_request(quantize, decodes=model.can_generate(), graphs=3 if is_vision_language(model) else 1)
    layers = (module for module in model.modules() if not isinstance(module, torch.nn.Embedding))
    weights = (weight for layer in layers for weight in layer.parameters(recurse=False) if weight.dim() == 2)
    if max((weight.numel() for weight in weights), default=0) < SMALLEST:
        raise _too_small(quantize)


def _too_small(quantize: str) -> RequestError:
    """Return the error for a model whose linear layers are all too small to quantise."""
    return RequestError(
        f"{quantize} needs a linear layer of {SMALLEST:,} weights or more, but all are smaller, and small "
        "layers take longer in fewer bits; leave it out"
    )


def _check_request(quantize: str, *, decodes: bool, graphs: int) -> None:
    """Refuse, by a RequestError, bits that a model does not take, by whether it generates and its number of graphs."""
    if graphs > 1:
        raise RequestError(f"quantize: {quantize} needs a single graph, got a vision-language model; leave it out")
    if quantize == "int4" and not decodes:
        raise RequestError(
            "quantize: int4 is for models that generate, which spend their time on reading weights, got an encoder; "
            "use int8"
        )


def largest_difference(
    dense: Mapping[str, np.ndarray], quantised: Mapping[str, np.ndarray], batch: Mapping[str, Any]
) -> float:
    """Return the largest absolute difference between the outputs of two graphs on a batch, but for padding.

    In 8 bits, padding in front of a text is rounded apart from all tokens. Raises ParityError beyond the tolerance.
    """
    dense, quantised = without_padding(dense, batch), without_padding(quantised, batch)
    for name, wanted in dense.items():
        error = float(np.sqrt(np.mean((wanted - quantised[name]) ** 2)))
        size = float(np.sqrt(np.mean(wanted**2)))
        if not error <= FEWER_BITS * size:  # NaN is refused too
            raise ParityError(
                f"the quantised graph must agree with the float32 graph to {FEWER_BITS:.0%}, but its {name} are "
                f"{error:.2g} away from {size:.2g} (root mean square); nothing was kept: export without quantize"
            )
    return max(float(np.abs(wanted - quantised[name]).max(initial=0.0)) for name, wanted in dense.items())


def _ort_config(bits: int) -> dict[str, Any]:
    """Return what differs from the defaults of Optimum's ORTConfig; it has no format for blocks of 4 bits."""
    dynamic = {"format": "QOperator", "is_static": False, "mode": "IntegerOps", "activations_symmetric": True}
    layers = {"operators_to_quantize": ["Gather", "Gemm", "MatMul"], "per_channel": True}
    stored = {"weights_dtype": "QInt8"} if bits == 8 else {"bits": bits, "block_size": BLOCK}
    return {"quantization": dynamic | layers | stored}


FORMATS["onnx"] = Format(
    title=Contents.ONNX.value,
    require=require_onnxruntime,
    check=_check,
    write=export_in_bits,
    quantize=_quantize_slim,
    dtypes=("float32", "float16"),
    hub_folder="onnx",
    # Those of transformers.js, and of sentence-transformers.
    hub_names={"int8": ("model_quantized.onnx", "model_qint8_avx512_vnni.onnx"), "int4": ("model_q4.onnx",)},
)
