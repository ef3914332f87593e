"""Export and quantise by Optimum for ONNX Runtime, as its documentation does.

Source: https://huggingface.co/docs/optimum-onnx/onnxruntime/usage_guides/quantization, dynamic quantisation. Its
example sets per_channel=False; the default of the configuration for this processor is True.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from optimum.onnxruntime import ORTModelForSequenceClassification, ORTQuantizer
from optimum.onnxruntime.configuration import AutoQuantizationConfig
from peers.program import Given, Way, main


def exported(given: Given, out: Path) -> None:
    """Export in float32."""
    ORTModelForSequenceClassification.from_pretrained(given.checkpoint, export=True).save_pretrained(out)


def dynamic(given: Given, out: Path, configuration: Any) -> None:
    """Quantise the export, with scales of activations that are found as it runs."""
    with tempfile.TemporaryDirectory() as folder:
        exported(given, Path(folder))
        ORTQuantizer.from_pretrained(folder).quantize(save_dir=out, quantization_config=configuration)


_VNNI = partial(AutoQuantizationConfig.avx512_vnni, is_static=False)
WAYS = {
    "exported": Way("Optimum, export", "float32", exported),
    "vnni": Way(
        "Optimum, avx512_vnni per tensor, its example",
        "int8",
        partial(dynamic, configuration=_VNNI(per_channel=False)),
    ),
    "vnni-default": Way(
        "Optimum, avx512_vnni, its default per channel", "int8", partial(dynamic, configuration=_VNNI())
    ),
    "avx2": Way("Optimum, avx2", "int8", partial(dynamic, configuration=AutoQuantizationConfig.avx2(is_static=False))),
}

if __name__ == "__main__":
    main(WAYS)
