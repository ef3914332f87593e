"""Continue prompts greedily with an ONNX folder, a checkpoint or a run."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from ..checkpoint.folders import Contents
from .arguments import REPEATED, Options, a_number, checkpoint_in


def add_arguments(parser: ArgumentParser) -> None:
    """Add the model, the prompts and the images."""
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="ONNX folder; or a checkpoint or run, for PyTorch")
    text: dict[str, Any] = {"dest": "prompts", "metavar": "TEXT", "action": "append", "required": True}
    add("--prompt", help="text to continue; may be repeated", **text)
    image = {"dest": "images", "metavar": "FILE", "type": Path, **REPEATED}
    add("--image", help="image for all prompts, or one for each", **image)
    add("--max-new-tokens", metavar="N", type=a_number(int, 1), default=20, help="most tokens to write (default: 20)")


def run(options: Options) -> dict[str, Any]:
    """Continue prompts, and return the texts."""
    options.folder = checkpoint_in(options.folder, Contents.ONNX, progress=options.progress)
    from ..forms.onnx.generator import generate_text  # after the refusal, because it takes seconds

    options.progress.stage("generate")
    texts = generate_text(options.folder, options.prompts, images=options.images, max_new_tokens=options.max_new_tokens)
    results = [{"prompt": prompt, "text": text} for prompt, text in zip(options.prompts, texts, strict=True)]
    for result in results:
        options.console.print(f"> {result['prompt']}\n{result['text']}\n", soft_wrap=True)
    return {"folder": str(options.folder), "results": results}
