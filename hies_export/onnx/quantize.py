"""Write the 8-bit form of an exported graph, with the file names of Optimum, and run it beside the float32 graph."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..checkpoint.folders import new_folder, refuse_existing
from ..errors import ParityError, RequestError
from ..runtimes.base import Provider
from ..runtimes.int8 import SMALLEST, quantize_graph
from ..runtimes.ort import QUANTIZED_FILE, OnnxRuntime
from .export import OnnxExport, export_onnx

# How far the 8-bit graph may be from the float32 graph, as a share of its outputs: both are root mean squares. Errors
# of rounding are at most 0.05 on the models tried; a kernel that overflows, or a wrong scale, gives 1 and more.
TOLERANCE = 0.3


def quantize_onnx(
    exported: OnnxExport, folder: str | Path, *, batch: Mapping[str, Any], overwrite: bool = False
) -> OnnxExport:
    """Quantise an exported model to 8 bits: `model_quantized.onnx`, and `ort_config.json`, as Optimum writes them.

    Every linear layer of 16,384 weights or more is quantised: its weights with a scale per output channel, what it
    reads with a scale per token. Embeddings have a scale per row. All else stays in float32, and small layers too.

    Args:
        exported: What `export_onnx` wrote for provider cpu in float32; its folder stays as it is.
        folder: Where to write; appears only when everything is written and checked.
        batch: Inputs on which both graphs are run and compared.
        overwrite: Replace an existing folder.

    Returns:
        The 8-bit graph; `max_abs` is its largest difference from the float32 graph.

    Raises:
        OutputExistsError: The folder exists and `overwrite` is off.
        RequestError: The export is of a model that generates, for another provider, or not in float32; or
            all its layers are small.
        ParityError: The outputs of both graphs are more than 30 % apart (root mean square); nothing is kept.
    """
    import onnx_ir

    cached = any(name.startswith("past_key_values.") for name in exported.inputs)
    _check(cached or len(exported.files) > 1, exported.provider, exported.dtype)
    folder = Path(folder)
    refuse_existing(folder, overwrite=overwrite)
    program = onnx_ir.load(exported.file)
    layers = quantize_graph(program.graph)
    if not layers["int8"]:
        raise RequestError(
            f"quantize: int8 needs a linear layer of {SMALLEST:,} weights or more, and all {layers['float32']} are "
            "smaller, where 8 bits take longer; leave it out"
        )
    with new_folder(folder, overwrite=overwrite) as staging:
        for file in exported.folder.iterdir():
            if not file.name.startswith(exported.file.name):
                shutil.copy(file, staging)
        onnx_ir.save(program, staging / QUANTIZED_FILE)
        (staging / "ort_config.json").write_text(json.dumps(_ORT_CONFIG, indent=2) + "\n", encoding="utf-8")
        max_abs = _compared(exported.file, staging / QUANTIZED_FILE, batch)
        size = (staging / QUANTIZED_FILE).stat().st_size
    return replace(
        exported,
        folder=folder,
        file=folder / QUANTIZED_FILE,
        files=(QUANTIZED_FILE,),
        bytes=size,
        max_abs=max_abs,
        quantize="int8",
        layers=layers,
    )


def export_quantized(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    batch: Mapping[str, Any],
    processor: Any = None,
    provider: Provider = "cpu",
    dtype: str = "float32",
    overwrite: bool = False,
) -> OnnxExport:
    """Export a model to ONNX, and quantise the graph; see `export_onnx` and `quantize_onnx`."""
    _check(model.can_generate(), provider, dtype)
    refuse_existing(Path(folder), overwrite=overwrite)
    with TemporaryDirectory(prefix="hies-float32-") as temporary:
        exported = export_onnx(model, Path(temporary) / "onnx", batch=batch, processor=processor)
        return quantize_onnx(exported, folder, batch=batch, overwrite=overwrite)


def _check(generates: bool, provider: str, dtype: str) -> None:
    """Refuse what has no 8-bit form here."""
    if generates:
        raise RequestError("quantize: int8 is for encoders, got a model that generates text; leave it out")
    if provider != "cpu" or dtype != "float32":
        raise RequestError(
            f"quantize: int8 needs provider cpu and dtype float32, got {provider} and {dtype}; leave them out"
        )


def _compared(dense: Path, quantised: Path, batch: Mapping[str, Any]) -> float:
    """Return the largest absolute difference between the outputs of two graphs, if that is tolerable."""
    outputs = []
    for file in (dense, quantised):
        runtime = OnnxRuntime(file, threads=torch.get_num_threads())
        outputs.append(runtime.fetch(runtime.run(runtime.prepare(batch))))
    one, other = outputs
    for name, wanted in one.items():
        apart = float(np.sqrt(np.mean((wanted - other[name]) ** 2)))
        size = float(np.sqrt(np.mean(wanted**2)))
        if not apart <= TOLERANCE * size:
            raise ParityError(
                f"the 8-bit graph must give what the float32 graph gives, to {TOLERANCE:.0%} of it, but its {name} are "
                f"{apart:.2g} away from {size:.2g} (root mean square); nothing was kept: export without quantize"
            )
    return max(float(np.abs(wanted - other[name]).max(initial=0.0)) for name, wanted in one.items())


# What Optimum's ORTQuantizer writes for dynamic quantisation with a scale per channel.
_ORT_CONFIG = {
    "one_external_file": True,
    "opset": None,
    "optimization": {},
    "quantization": {
        "activations_dtype": "QUInt8",
        "activations_symmetric": True,
        "format": "QOperator",
        "is_static": False,
        "mode": "IntegerOps",
        "nodes_to_exclude": [],
        "nodes_to_quantize": [],
        "operators_to_quantize": ["Gather", "Gemm", "MatMul"],
        "per_channel": True,
        "qdq_add_pair_to_weight": False,
        "qdq_dedicated_pair": False,
        "qdq_op_type_per_channel_support_to_axis": {"MatMul": 1},
        "reduce_range": False,
        "weights_dtype": "QInt8",
        "weights_symmetric": True,
    },
    "use_external_data_format": False,
}
