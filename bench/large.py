"""Take a LLaMA of a billion random weights through the whole choice on a CPU: seconds and peak memory by stage.

python bench/large.py [--flops 0.6] [--samples 4] [--rows 16] [--memory-gb 6] [--folder DIR]

The model has the shape of TinyLlama-1.1B: 22 layers of width 2,048, 32 heads in 4 groups, 5,632 neurons. Heads and
neurons go by `compensated`, and least squares refits both consumers. Random weights say nothing about quality. Memory
does not depend on the weights, and hardly on how few rows there are; seconds grow with the rows. It takes the steps of
`hies-export prune`: load, score, cut, check against the masked model, refit, save, reload, compare. Ends in one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hies_export.forms.measure.counts import count_parameters
from hies_export.forms.measure.machine import machine_facts
from hies_export.pipeline.choose import choose
from hies_export.pipeline.load_job import load_job
from hies_export.pipeline.recipe import PruningRecipe
from hies_export.pipeline.stages import calibrate, cut, save

T = TypeVar("T")

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
TOKENS_PER_ROW = 128
GIGABYTE = 1 << 30


class Stages:
    """Progress that prints what each stage or loop took, and the most memory the process has used by its end.

    Attributes:
        seconds: Seconds by stage; those of a stage that a loop interrupts are added up.
        peak_gb: Most memory used by the end of a stage.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak_gb: dict[str, float] = {}
        self._name, self._start = "load", time.perf_counter()

    def stage(self, name: str) -> None:
        """Close the stage before, and begin another."""
        now = time.perf_counter()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIGABYTE
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._start
        self.peak_gb[self._name] = peak
        print(f"{self._name:24} {now - self._start:8.1f} s   {peak:6.2f} GB", flush=True)
        self._name, self._start = name, now

    def track(self, items: Sequence[T], name: str) -> Iterator[T]:
        """Yield the items of a loop, as a stage of its own."""
        before = self._name
        self.stage(name)
        yield from items
        self.stage(before)


def save_model(folder: Path) -> None:
    """Save the model, and a tokenizer of made-up words."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.save_pretrained(folder)
    numbers = {f"w{i}": i for i in range(SHAPE["vocab_size"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w2", eos_token="w2").save_pretrained(folder)


def save_text(file: Path, rows: int) -> None:
    """Write rows of random words, each as long as a sample."""
    drawn = torch.randint(3, SHAPE["vocab_size"], (rows, TOKENS_PER_ROW), generator=torch.Generator().manual_seed(0))
    lines = (json.dumps({"text": " ".join(f"w{word}" for word in row)}) for row in drawn.tolist())
    file.write_text("\n".join(lines), encoding="utf-8")


def recipe_of(folder: Path, options: argparse.Namespace) -> PruningRecipe:
    return PruningRecipe(
        model=str(folder / "model"),
        dtype="float32",
        task="text-generation",
        data={
            "files": {"train": str(folder / "train.jsonl"), "validation": str(folder / "validation.jsonl")},
            "text": "text",
            "max_length": TOKENS_PER_ROW,
        },
        calibration={"samples": options.samples, "batch_size": 4},
        evaluation={"split": "validation", "samples": 4, "batch_size": 4},
        prune={
            "modules": ["attention", "mlp"],
            "criterion": "compensated",
            "budget": {"flops": options.flops},
            "compensation": {"samples": options.rows, "memory_gb": options.memory_gb},
        },
        measure={"runtimes": ["torch"], "shapes": [[1, TOKENS_PER_ROW]], "repeats": 2},
        output=str(folder / "run"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flops", type=float, default=0.6)
    parser.add_argument("--samples", type=int, default=4, help="rows to score on")
    parser.add_argument("--rows", type=int, default=16, help="rows to refit on")
    parser.add_argument("--memory-gb", type=float, default=6.0, help="limit of the moments, and of the effects")
    parser.add_argument("--folder", type=Path, help="where to put the temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        # In a child, so that the peak of making the model is not this process's.
        if (child := os.fork()) == 0:
            save_model(folder / "model")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        save_text(folder / "train.jsonl", max(options.samples, options.rows))
        save_text(folder / "validation.jsonl", 4)
        stages = Stages()
        recipe = recipe_of(folder, options)
        prepared = load_job(recipe, progress=stages)
        choice = choose(prepared, calibrate(prepared))
        done = cut(prepared, choice)
        saved = save(prepared, done, recipe.output)
        stages.stage("end")
    plan = done.plan
    row = {
        "parameters": {"dense": count_parameters(prepared.model), "slim": count_parameters(done.model)},
        "heads": [plan.heads, plan.heads - plan.removed],
        "neurons": [plan.neurons, plan.neurons - plan.removed_neurons],
        "flops": choice.outcome.predicted,
        "refitted": len(done.fits),
        "cut_max_abs": done.cut_max_abs,
        "reload_max_abs": saved.reload_max_abs,
        "tokens": {"score": options.samples * TOKENS_PER_ROW, "refit": options.rows * TOKENS_PER_ROW},
        "memory_gb": options.memory_gb,
        "seconds": stages.seconds,
        "peak_gb": stages.peak_gb,
        "environment": machine_facts(),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
