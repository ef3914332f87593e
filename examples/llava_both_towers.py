"""Remove heads from both towers of a LLaVA: the image encoder and the language model.

    python examples/llava_both_towers.py
    hies-export run recipes/llava-1.5-7b-vizwiz.yaml     # the same for a real LLaVA, from the command line

It makes a tiny LLaVA with random weights, and images of one colour each. Nothing is downloaded.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import tiny

from hies_export import PruningRecipe, load


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        report = PruningRecipe(
            model=str(tiny.colours(folder)),
            task="image-text-to-text",
            data={
                "files": {"train": folder / "rows.parquet"},
                "image": "image",
                "prompt": "<image>\n{question}",
                "answer": "answer",
            },
            calibration={"split": "train[:50%]", "samples": 8, "batch_size": 4},
            evaluation={"split": "train[50%:]", "samples": 8, "metrics": ["perplexity"]},
            prune={"alpha": 0.5, "towers": ["language", "vision"], "budget": {"heads": 0.4}},
            measure={"runtimes": ["torch"], "shapes": [[1]], "repeats": 6},
            output=folder / "run",
        ).run()
        for name, line in report.details.head_map.items():
            print(f"{line}  {name}")
        print(f"FLOPs: {report.flops['slim'] / report.flops['dense']:.3f} of dense")
        print("graphs:", ", ".join(sorted(file.name for file in (folder / "run" / "onnx").glob("*.onnx"))))
        print(type(load(folder / "run" / "slim")).__name__)


if __name__ == "__main__":
    main()
