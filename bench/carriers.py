"""Time every way to ship and use a decoder, dense or slim: seconds, processor seconds, peak memory and size of files.

python bench/carriers.py MODEL OUT [--rows 4] [--tokens 64] [--only NAME...]

MODEL is a checkpoint with its tokenizer, OUT a new folder for the exports. A row is a process of its own, so that its
peak memory is its own; loading the model and the packages counts too, as the row `load` shows. `cpu s` is the processor
time of all threads and child processes, such as llama.cpp's. Exports compare themselves with torch as always, and what
they found is in the last column. The graphs in 8 and 4 bits are made from the one in float32; the rows are one random
batch, which is traced, compared, calibrated on and trained on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

PROMPT, NEW_TOKENS = "The capital of France is", 20


@dataclass
class Row:
    """What a way took, and what it found."""

    seconds: float
    cpu_seconds: float
    peak_gb: float
    file_mb: float | None
    found: str
    made: Any = None  # the export, which others are made from


@dataclass(frozen=True)
class Task:
    """The model, the folder of exports, the size of the batch, and the float32 graph once it is there."""

    model: Path
    out: Path
    rows: int
    tokens: int
    graph: Any = None

    def load(self) -> Any:
        """Load the model in float32."""
        from hies_export import load

        return load(self.model, dtype=torch.float32)

    def batch(self, model: Any) -> dict[str, torch.Tensor]:
        """Make the random batch."""
        from hies_export.model.tokens import synthetic_batch

        return synthetic_batch(model, batch=self.rows, sequence=self.tokens)

    def processor(self) -> Any:
        """Load the tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model)


def load_alone(task: Task) -> str:
    """Load the model and the packages."""
    return f"{task.load().num_parameters() / 1e6:.0f} M parameters"


def onnx(task: Task) -> Any:
    """Export to ONNX in float32."""
    from hies_export import export_onnx

    model = task.load()
    return export_onnx(model, task.out / "onnx", batch=task.batch(model), processor=task.processor())


def quantized(task: Task, bits: str) -> Any:
    """Quantise the float32 graph."""
    from hies_export import quantize_onnx

    batch = task.batch(task.load())
    rows = [batch] if bits == "int4" else []
    return quantize_onnx(task.graph, task.out / f"onnx-{bits}", batch=batch, quantize=bits, rows=rows)


def gguf(task: Task) -> Any:
    """Write a GGUF file in float32, and compare it with llama.cpp if that is installed."""
    from hies_export import export_gguf

    return export_gguf(task.load(), task.out / "gguf", tokenizer=task.processor())


def generated(folder: Path) -> str:
    """Continue a prompt, as `hies-export generate` does."""
    from hies_export import generate_text

    return repr(generate_text(folder, [PROMPT], max_new_tokens=NEW_TOKENS)[0])


def lora(task: Task) -> str:
    """Take one training step with LoRA on the attention's projections, by PEFT."""
    from peft import LoraConfig, get_peft_model

    model = task.load()
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    tuned, batch = get_peft_model(model, config), task.batch(model)
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(2):
        loss = tuned(**batch, labels=batch["input_ids"]).loss
        losses.append(loss.item())
        if len(losses) == 1:
            loss.backward()
            optimizer.step()
    return f"loss {losses[0]:.3f} -> {losses[1]:.3f}"


WAYS: dict[str, Callable[[Task], Any]] = {
    "load": load_alone,
    "onnx float32": onnx,
    "onnx int8": lambda task: quantized(task, "int8"),
    "onnx int4": lambda task: quantized(task, "int4"),
    "gguf float32": gguf,
    "text, torch": lambda task: generated(task.model),
    "text, onnx float32": lambda task: generated(task.out / "onnx"),
    "text, onnx int8": lambda task: generated(task.out / "onnx-int8"),
    "text, onnx int4": lambda task: generated(task.out / "onnx-int4"),
    "lora step": lora,
}


def measure(name: str, task: Task) -> Row:
    """Go one way in this process, and return what it took since the process began."""
    from hies_export import HiesError

    started = time.perf_counter()
    try:
        made = WAYS[name](task)
    except HiesError as error:
        made = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - started
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in used)
    peak = max(usage.ru_maxrss for usage in used) * 1024 / 1e9  # Linux counts in KiB
    if isinstance(made, str):
        return Row(seconds, cpu, peak, None, made)
    facts = made.facts
    found = f"{facts['architecture']}, {facts['parity']}" if "parity" in facts else f"max_abs {made.max_abs:.1e}"
    return Row(seconds, cpu, peak, made.bytes / 1e6, found, made)


def main() -> None:
    """Go every way, print the table, then the same as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=[*WAYS])
    options = parser.parse_args()
    task = Task(options.model, options.out, options.rows, options.tokens)
    rows: dict[str, dict[str, Any]] = {}
    print(f"{'way':20}{'s':>8}{'cpu s':>8}{'peak GB':>9}{'file MB':>9}  found")
    for name in options.only:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
            row = pool.submit(measure, name, task).result()
        if name == "onnx float32":
            task = Task(options.model, options.out, options.rows, options.tokens, row.made)
        size = "-" if row.file_mb is None else f"{row.file_mb:.0f}"
        print(f"{name:20}{row.seconds:8.1f}{row.cpu_seconds:8.1f}{row.peak_gb:9.2f}{size:>9}  {row.found}", flush=True)
        rows[name] = {key: value for key, value in asdict(row).items() if key != "made"}
    print(json.dumps({"model": options.model.name, "rows": options.rows, "tokens": options.tokens, "ways": rows}))


if __name__ == "__main__":
    main()
