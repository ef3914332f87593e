"""Export a checkpoint, slim or not, to an ONNX folder, to OpenVINO's own format, or to a GGUF file."""

from __future__ import annotations

import logging
from argparse import ArgumentParser
from typing import TYPE_CHECKING, Any, cast

from .arguments import Options, add_data, add_model, add_output, read_data
from .paths import checkpoint_in

if TYPE_CHECKING:
    from ..forms.onnx.export import OnnxExport
    from ..forms.openvino.export import OpenVinoExport


def add_arguments(parser: ArgumentParser, *, output: str | None = None) -> None:
    """Add the checkpoint and how to export it."""
    add = parser.add_argument
    add_model(parser)
    if output is None:
        add_output(parser, required=True)
    else:
        add_output(parser, output)
    formats = "onnx (the default), openvino (encoders in 8 bits), or gguf for llama.cpp (decoders)"
    add("--format", choices=("onnx", "openvino", "gguf"), default="onnx", help=formats)
    add("--provider", help="execution provider to fuse the ONNX graph for: cpu (the default) or cuda")
    add("--dtype", default="float32", help="float32 (the default) or float16; gguf also bfloat16, q8_0, q4_0")
    add("--quantize", choices=("int8", "int4"), help="write the model with its linear layers in 8 or 4 bits")
    rows = "rows to round 4 bits by (default: to nearest), or to calibrate openvino on"
    add_data(parser, f"{rows}: SPLIT=FILE, or the name of a Hub data set")


def run(options: Options) -> dict[str, Any]:
    """Write the folder, and return its size, its files and how far the export differs from torch."""
    from ..checkpoint.classes import load_config, refuse_quantised
    from ..checkpoint.folders import refuse_existing
    from ..errors import RequestError

    options.model = checkpoint_in(options.model, progress=options.progress)
    refuse_existing(options.output, overwrite=options.overwrite, inputs={"model": options.model})
    if options.quantize and options.format == "gguf":
        raise RequestError(f"--quantize is for --format onnx, got {options.quantize}; give gguf --dtype q8_0 or q4_0")
    if options.format == "openvino":
        _check_openvino(options)
    elif options.data and not in_4_bits(options):
        raise RequestError(
            "--data is for --quantize int4, for gguf --dtype q4_0 and for openvino; leave it out, or give one of them"
        )
    config = load_config(options.model)
    if options.quantize:
        refuse_quantised(config, options.model)
    options.progress.stage("load the model")
    return _export_gguf(options) if options.format == "gguf" else _export_graph(options)


def _check_openvino(options: Options) -> None:
    """Refuse what has no form in OpenVINO's own format."""
    from ..errors import RequestError
    from ..forms.openvino.export import require_nncf

    require_nncf()
    if options.quantize != "int8":
        raise RequestError(
            f"--format openvino needs --quantize int8, got {options.quantize}; give it, or leave --format out: "
            "OpenVINO reads the ONNX folder in float32 and bfloat16"
        )
    if not options.data:
        raise RequestError("--format openvino needs rows to calibrate on; give --data train=FILE")


def _export_graph(options: Options) -> dict[str, Any]:
    """Write a folder with a graph for ONNX Runtime or OpenVINO, and for sentence-transformers if the model embeds."""
    import torch

    from ..checkpoint.load import load
    from ..checkpoint.sentence import is_sentence_transformer, load_sentence
    from ..data.batches import image_shape
    from ..data.processors import image_shape_of
    from ..forms.exports import Exporter, export_options
    from ..forms.onnx.multimodal import image_text_batch, is_vision_language
    from ..forms.openvino.export import check_calibrated
    from ..forms.served_export import export_served
    from ..model.tokens import synthetic_batch

    asked = export_options(options.format, options.provider or "cpu", options.dtype, options.quantize)
    embeds = is_sentence_transformer(options.model)
    model: Any = (load_sentence if embeds else load)(options.model, dtype=torch.float32)
    if asked.format == "openvino":
        check_calibrated(asked.provider, asked.dtype, decodes=model.can_generate())
    rows = calibration_rows(options)
    options.progress.stage("export, and compare with torch")
    processor = load_processor_if_any(str(model.settings.encoder) if embeds else options.model, model)
    if embeds:
        exported = export_served(
            model, options.output, asked, processor=processor, rows=rows, overwrite=options.overwrite
        )
    else:
        # ONNX Runtime takes images of the size that is traced.
        image = image_shape(rows[0]) if rows else image_shape_of(processor, model)
        sample = (
            image_text_batch(model, image=image)
            if is_vision_language(model)
            else synthetic_batch(model, batch=2, sequence=16, image=image)
        )
        made = Exporter(asked, sample, processor, rows).export(model, options.output, overwrite=options.overwrite)
        exported = cast("OnnxExport | OpenVinoExport", made)  # options.format is no gguf
    found = _report(options, exported)
    if embeds:
        call = f'SentenceTransformer("{options.output}", trust_remote_code=True).encode(texts)'
        options.console.print(f"run it: {call}", markup=False, soft_wrap=True)
    return found


def in_4_bits(options: Options) -> bool:
    """Return whether the export has weights in 4 bits."""
    return options.quantize == "int4" or (options.format == "gguf" and options.dtype == "q4_0")


def calibration_rows(options: Options) -> list[Any]:
    """Return batches of the rows that weights in 4 bits are rounded by; say so if there are none."""
    from ..pipeline.load_job import refit_rows
    from ..pipeline.propose import propose_recipe

    if options.data:
        options.progress.stage("read the rows")
        proposed = propose_recipe(options.model, **read_data(options.data), text=options.text, output=options.output)
        return refit_rows(proposed)
    if in_4_bits(options):
        options.console.print("4 bits are rounded to nearest; give --data train=FILE to lose less")
    return []


def _report(options: Options, exported: OnnxExport | OpenVinoExport) -> dict[str, Any]:
    """Print and return the size and the files of an export, and how far it differs from torch."""
    size, reference = f"{exported.bytes / 1e6:.1f} MB", "the float32 graph" if exported.quantize else "torch"
    options.console.print(f"written to {options.output}: {size}, differs from {reference} by {exported.max_abs:.2g}")
    if exported.quantize:
        options.console.print(
            f"linear layers: {', '.join(f'{count} in {name}' for name, count in exported.layers.items())}"
        )
    return {
        "folder": str(options.output),
        "bytes": exported.bytes,
        "onnx_max_abs": exported.max_abs,
        "files": exported.files,
        "inputs": exported.inputs,
        "outputs": exported.outputs,
        **({"quantize": exported.quantize, "layers": exported.layers} if exported.quantize else {}),
    }


def _export_gguf(options: Options) -> dict[str, Any]:
    """Write a folder with a GGUF file."""
    import torch

    from ..checkpoint.load import load
    from ..data.processors import load_processor
    from ..errors import RequestError
    from ..forms.gguf.export import check_dtype, export_gguf, require_gguf
    from ..forms.gguf.parity import PROMPTS
    from ..tasks import TASKS

    if options.provider is not None:
        raise RequestError(f"--provider belongs to --format onnx, got {options.provider} with gguf; leave it out")
    require_gguf()
    check_dtype(options.dtype)
    tokenizer = load_processor(options.model, task=TASKS["text-generation"])
    model = load(options.model, dtype=torch.float32)
    options.progress.stage("export to GGUF, and compare with torch")
    exported = export_gguf(
        model,
        options.output,
        tokenizer=tokenizer,
        dtype=options.dtype,
        rows=calibration_rows(options),
        overwrite=options.overwrite,
    )
    parity = exported.parity
    compared = "not compared with llama.cpp, which is not installed"
    if parity is not None:
        compared = f"next-token probabilities in llama.cpp differ from torch by {parity.max_abs:.2g}"
    options.console.print(
        f"written to {options.output}: {exported.bytes / 1e6:.1f} MB, architecture {exported.architecture}, {compared}"
    )
    return {
        "folder": str(options.output),
        "bytes": exported.bytes,
        "architecture": exported.architecture,
        "types": exported.types,
        "gguf_max_abs": None if parity is None else parity.max_abs,
        "greedy_tokens_equal": None if parity is None else parity.equal,
        "greedy_tokens": None if parity is None else PROMPTS * parity.tokens,
    }


def load_processor_if_any(path: str, model: Any) -> Any:
    """Return the checkpoint's tokenizer or processor, or None, with a warning, if it has none."""
    from ..data.processors import load_processor
    from ..errors import DataError
    from ..forms.onnx.multimodal import is_vision_language
    from ..tasks import TASKS

    both = is_vision_language(model)
    one = "image-classification" if model.main_input_name == "pixel_values" else "text-classification"
    try:
        return load_processor(path, task=TASKS["image-text-to-text" if both else one])
    except DataError as error:
        logging.getLogger(__name__).warning("the folder gets no tokenizer or image processor: %s", error)
        return None
