"""Export a checkpoint, slim or not, to an ONNX folder."""

from __future__ import annotations

import logging
from argparse import ArgumentParser, Namespace
from typing import Any

from rich.console import Console

from ..progress import Progress
from .arguments import a_path_or_id, add_json, add_output


def add_arguments(parser: ArgumentParser, *, output: str | None = None) -> None:
    """Add the checkpoint and how to export it.

    Args:
        parser: Of the command.
        output: Take the folder as an argument of this name, as Optimum's exporters do, and not as `-o DIR`.
    """
    parser.add_argument("model", metavar="MODEL", type=a_path_or_id, help="checkpoint folder, run or Hub id")
    if output is None:
        add_output(parser, required=True)
    else:
        add_output(parser, output)
    parser.add_argument("--provider", default="cpu", help="what to fuse for: cpu (the default), cuda or tensorrt")
    parser.add_argument("--dtype", default="float32", help="float32 (the default) or float16")
    add_json(parser)


def run(options: Namespace, console: Console, progress: Progress) -> dict[str, Any]:
    """Write the folder, and return its size, its files and how far the graph differs from torch."""
    import torch

    from ..checkpoint.contents import checkpoint_in
    from ..checkpoint.folders import refuse_existing
    from ..checkpoint.loading import load
    from ..model.tokens import synthetic_batch
    from ..onnx.export import export_onnx
    from ..onnx.multimodal import image_text_batch, is_vision_language

    options.model = checkpoint_in(options.model, progress=progress)
    refuse_existing(options.output, overwrite=options.overwrite, inputs={"model": options.model})
    progress.stage("load")
    model = load(options.model, dtype=torch.float32)
    images = is_vision_language(model)
    progress.stage("export")
    exported = export_onnx(
        model,
        options.output,
        batch=image_text_batch(model) if images else synthetic_batch(model, batch=2, sequence=16),
        processor=load_processor_if_any(options.model, model),
        provider=options.provider,
        dtype=options.dtype,
        overwrite=options.overwrite,
    )
    console.print(
        f"written to {options.output}: {exported.bytes / 1e6:.1f} MB, differs from torch by {exported.max_abs:.2g}"
    )
    return {
        "folder": str(options.output),
        "bytes": exported.bytes,
        "onnx_max_abs": exported.max_abs,
        "files": exported.files,
        "inputs": exported.inputs,
        "outputs": exported.outputs,
    }


def load_processor_if_any(path: str, model: Any) -> Any:
    """Return the checkpoint's tokenizer or processor, or None, with a warning, where it has none."""
    from ..data.processors import load_processor
    from ..errors import DataError
    from ..onnx.multimodal import is_vision_language

    both = is_vision_language(model)
    one = "image-classification" if model.main_input_name == "pixel_values" else "text-classification"
    try:
        return load_processor(path, task="image-text-to-text" if both else one, for_prompts=both)
    except DataError as error:
        logging.getLogger(__name__).warning("the folder gets no tokenizer or image processor: %s", error)
        return None
