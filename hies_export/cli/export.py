"""Export a checkpoint to an ONNX folder, to OpenVINO's own format, or to a GGUF file."""

from __future__ import annotations

import logging
from argparse import ArgumentParser
from typing import TYPE_CHECKING, Any

from ..checkpoint.folders import refuse_existing
from ..entry_points import FORMATS
from ..errors import DataError, RequestError
from .arguments import Options, add_data, add_model, add_output, checkpoint_in, read_data

if TYPE_CHECKING:
    from ..forms.formats import Export
    from ..recipe.sections import ExportSection


def add_arguments(parser: ArgumentParser) -> None:
    """Add the checkpoint and how to export it."""
    add = parser.add_argument
    add_model(parser)
    add_output(parser, required=True)
    formats = "onnx (the default), openvino (encoders in 8 bits), or gguf for llama.cpp (decoders)"
    add("--format", default="onnx", help=formats)
    add("--provider", default="cpu", help="execution provider to fuse the ONNX graph for: cpu (the default) or cuda")
    add("--dtype", default="float32", help="float32 (the default) or float16; gguf also bfloat16, q8_0, q4_0")
    add("--quantize", choices=("int8", "int4"), help="write the model with its linear layers in 8 or 4 bits")
    rows = "rows to round 4 bits by (default: to nearest), or to calibrate openvino on"
    add_data(parser, f"{rows}: SPLIT=FILE, or the name of a Hub data set")


def run(options: Options) -> dict[str, Any]:
    """Export the checkpoint, and return the folder's size, its files and how far the export differs from torch."""
    options.model = checkpoint_in(options.model, progress=options.progress)
    refuse_existing(options.output, overwrite=options.overwrite, inputs={"model": options.model})
    FORMATS.check(options.format, what="--format")
    import torch  # after the refusals, because it takes seconds

    from ..checkpoint.classes import load_config, refuse_quantised
    from ..checkpoint.load import load
    from ..checkpoint.sentence import is_sentence_transformer, load_sentence
    from ..data.batches import image_shape
    from ..data.processors import image_shape_of
    from ..forms.formats import Given, export_served
    from ..forms.onnx.multimodal import image_text_batch, is_vision_language
    from ..model.tokens import synthetic_batch

    section = _export_section(options)
    config = load_config(options.model)
    if options.quantize:
        refuse_quantised(config, options.model)
    options.progress.stage("load the model")
    embeds = is_sentence_transformer(options.model)
    if embeds:
        embedder = load_sentence(options.model, dtype=torch.float32)
        model, processor = embedder.model, embedder.processor
    else:
        model = load(options.model, dtype=torch.float32)
        processor = load_processor_if_any(options.model, model)
    rows = _calibration_rows(options, section)
    options.progress.stage("export, and compare with torch")
    if embeds:
        exported = export_served(
            model, options.output, section, processor=processor, rows=rows, overwrite=options.overwrite
        )
    else:
        # ONNX Runtime takes images of the size that is traced.
        image = image_shape(rows[0]) if rows else image_shape_of(processor, model)
        if is_vision_language(model):
            sample = image_text_batch(model, image=image)
        else:
            # Of two rows of noise, all logits may be close to 0, beside which 8 bits would look wrong.
            sample = synthetic_batch(model, batch=8, sequence=16, image=image)
        given = Given(sample, processor, rows)
        exported = FORMATS[section.format].write(model, options.output, section, given, overwrite=options.overwrite)
    result = _report(options, exported)
    if embeds:
        call = f'SentenceTransformer("{options.output}", trust_remote_code=True).encode(texts)'
        options.console.print(f"run it: {call}", markup=False, soft_wrap=True)
    return result


def _export_section(options: Options) -> ExportSection:
    """Return how to export; refuse options that do not fit the format, and a format whose packages are missing."""
    from pydantic import ValidationError

    from ..pipeline.options import sentences
    from ..recipe.sections import ExportSection

    fields: dict[str, Any] = {name: getattr(options, name) for name in ExportSection.model_fields}
    try:
        section = ExportSection(**fields)
    except ValidationError as error:
        raise RequestError("; ".join(sentences(error, ExportSection))) from None
    calibrated = section.format == "openvino"
    if calibrated and not options.data:
        raise RequestError("--format openvino needs rows to calibrate on; give --data train=FILE")
    if options.data and not (calibrated or _in_4_bits(section)):
        raise RequestError(
            "--data is for --quantize int4, for gguf --dtype q4_0 and for openvino; leave it out, or give one of them"
        )
    if options.text and not options.data:
        raise RequestError("--text names columns of --data, which is missing; give --data train=FILE, or leave it out")
    FORMATS[section.format].require()
    return section


def _in_4_bits(section: ExportSection) -> bool:
    """Return whether an export has weights in 4 bits."""
    return section.quantize == "int4" or section.dtype == "q4_0"


def _calibration_rows(options: Options, section: ExportSection) -> list[Any]:
    """Return batches of the rows of --data; if there are none, print that 4 bits are rounded to nearest."""
    from ..pipeline.load_recipe import refit_rows
    from ..pipeline.propose import propose_recipe

    if options.data:
        options.progress.stage("read the rows")
        proposed = propose_recipe(options.model, **read_data(options.data), text=options.text, output=options.output)
        return refit_rows(proposed)
    if _in_4_bits(section):
        options.console.print("4 bits are rounded to nearest; give --data train=FILE to lose less")
    return []


def _report(options: Options, exported: Export) -> dict[str, Any]:
    """Print and return the size and the files of an export, and how far it differs from torch."""
    facts, quantize, is_gguf = exported.facts, exported.how.quantize, exported.format == "gguf"
    comparison = "not compared with llama.cpp, which is not installed"
    if exported.max_abs is not None:
        differs = "next-token probabilities in llama.cpp differ" if is_gguf else "differs"
        comparison = f"{differs} from {'the float32 graph' if quantize else 'torch'} by {exported.max_abs:.2g}"
    if "architecture" in facts:
        comparison = f"architecture {facts['architecture']}, {comparison}"
    options.console.print(f"written to {options.output}: {exported.bytes / 1e6:.1f} MB, {comparison}")
    if quantize:
        layers = ", ".join(f"{count} in {name}" for name, count in facts["layers"].items())
        options.console.print(f"linear layers: {layers}")
    return {
        "folder": str(options.output),
        "bytes": exported.bytes,
        ("gguf_max_abs" if is_gguf else "onnx_max_abs"): exported.max_abs,
        "files": exported.files,
        "inputs": exported.inputs,
        "outputs": exported.outputs,
        **facts,
    }


def load_processor_if_any(path: str, model: Any) -> Any:
    """Return the checkpoint's tokenizer or processor, or None, with a warning, if it has none."""
    from ..checkpoint.beside import fetch
    from ..data.processors import load_processor
    from ..tasks import TASKS
    from ..tasks.registry import task_by_class

    task = task_by_class(type(model).__name__, model.config)
    if task is None:  # an encoder without a head
        task = TASKS["image-classification" if model.main_input_name == "pixel_values" else "text-classification"]
    try:
        return load_processor(fetch(path), task=task)
    except DataError as error:
        logging.getLogger(__name__).warning("the folder gets no tokenizer or image processor: %s", error)
        return None
