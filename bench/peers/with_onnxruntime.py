"""Optimise and quantise by ONNX Runtime's own tools, by their defaults.

Source: https://onnxruntime.ai/docs/performance/transformers-optimization.html and
https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html, which has transformers optimised first.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from onnx import TensorProto
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.transformers.optimizer import optimize_model
from peers.plain import export, load
from peers.program import Given, Way, main


def exported(given: Given, folder: Path) -> Path:
    """Export by torch.onnx."""
    return export(load(given.checkpoint), folder / "plain.onnx")


def optimised(given: Given, out: Path) -> None:
    """Export, and fuse by the optimiser for BERT."""
    config = load(given.checkpoint).config
    heads, width = config.num_attention_heads, config.hidden_size
    with tempfile.TemporaryDirectory() as folder:
        plain = exported(given, Path(folder))
        made = optimize_model(str(plain), model_type="bert", num_heads=heads, hidden_size=width)
    print({name: count for name, count in made.get_fused_operator_statistics().items() if count})
    made.save_model_to_file(str(out / "model.onnx"))


def dynamic(given: Given, out: Path) -> None:
    """Quantise the export, with scales of activations that are found as it runs."""
    with tempfile.TemporaryDirectory() as folder:
        quantize_dynamic(exported(given, Path(folder)), out / "model.onnx")


def both(given: Given, out: Path, **options: Any) -> None:
    """Quantise the optimised graph."""
    with tempfile.TemporaryDirectory() as folder:
        optimised(given, Path(folder))
        quantize_dynamic(Path(folder) / "model.onnx", out / "model.onnx", **options)


# What types the outputs of fused operators have, which shape inference does not know.
_TYPE = {"DefaultTensorType": TensorProto.FLOAT}
WAYS = {
    "1-optimised": Way("ONNX Runtime's optimizer", "float32", optimised),
    "2-dynamic": Way("ONNX Runtime quantize_dynamic", "int8", dynamic),
    "3-both": Way("ONNX Runtime's optimizer, then quantize_dynamic", "int8", both),
    "4-both-typed": Way(
        "ONNX Runtime's optimizer, then quantize_dynamic per channel",
        "int8",
        partial(both, per_channel=True, extra_options=_TYPE),
    ),
}

if __name__ == "__main__":
    main(WAYS)
