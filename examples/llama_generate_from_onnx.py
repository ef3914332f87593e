"""Prune the key/value groups of a LLaMA, export it, and generate with ONNX Runtime.

    python examples/llama_generate_from_onnx.py
    hies-export run recipes/llama-3.2-1b-wikitext.yaml     # the same for a real LLaMA, from the command line

It trains a tiny LLaMA on one sentence. Nothing is downloaded.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import tiny

from hies_export import PruningRecipe, generate_text


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        report = PruningRecipe(
            model=str(tiny.story(folder)),
            task="text-generation",
            data={"files": {"train": folder / "text.txt"}, "text": "text", "max_length": 24},
            calibration={"split": "train[:60%]", "samples": 16, "batch_size": 8},
            evaluation={"split": "train[60%:]"},
            prune={"alpha": 0.5, "budget": {"heads": 0.25}},
            measure={"runtimes": ["torch"], "shapes": [[2, 16]], "repeats": 6},
            output=folder / "run",
        ).run()
        cache = report.cache_bytes_per_token or {}
        print(f"perplexity: {report.quality['dense']:.2f} -> {report.quality['slim']:.2f}")
        print(f"cache: {cache['dense']} -> {cache['slim']} bytes per token")
        prompts = ["the cat sat", "the dog"]
        by_onnx = generate_text(folder / "run" / "onnx", prompts, max_new_tokens=8)
        by_torch = generate_text(folder / "run" / "slim", prompts, max_new_tokens=8)
        for prompt, text in zip(prompts, by_onnx, strict=True):
            print(f"{prompt} ... {text}")
        print(f"torch writes the same: {by_onnx == by_torch}")


if __name__ == "__main__":
    main()
