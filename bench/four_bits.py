"""Print perplexity, sizes and times of a decoder in 4 bits: rounded to nearest, and by calibration rows.

python bench/four_bits.py [recipes/stories-llama.yaml] [--set KEY=VALUE ...] [--rounds 30]

Rows of the recipe's evaluation split are predicted in ONNX Runtime by the float32 graph, and by graphs with the layers
of 16,384 weights or more in 4 bits, and with all of them. KL is the mean divergence of the next token's probabilities
from float32's, which chance moves less than perplexity. `rows n` is one quarter of the calibration rows alone. Q4_0 is
computed in torch on the weights as a file stores them. Times are ratios of decoding and prefill of a LLaMA of 56 M
parameters with random weights, to float32, from one interleaved run with a control.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from forms import print_times, time_beside
from models import LLAMA_SMALL, llama
from torch import Tensor

from hies_export.cli.arguments import read_overrides
from hies_export.forms.form import Form
from hies_export.forms.formats import Export
from hies_export.forms.gguf.parity import as_stored
from hies_export.forms.gguf.tensors import rounded_by_rows
from hies_export.forms.machine import machine_facts
from hies_export.forms.onnx.export import export_onnx
from hies_export.forms.onnx.quantize import quantize_onnx
from hies_export.forms.runtimes.bits import SMALLEST
from hies_export.forms.runtimes.ort import OnnxRuntime
from hies_export.pipeline.load_recipe import load_recipe
from hies_export.pipeline.recipe import PruningRecipe

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "stories-llama.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", default=RECIPE)
    parser.add_argument("--set", dest="fields", action="append", default=[], help="as of hies-export run")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    fields = {"evaluation.samples": None} | read_overrides(options.fields)
    prepared, delivery = load_recipe(PruningRecipe.from_yaml(options.recipe, overrides=fields))
    batches, rows = prepared.rows.evaluation, delivery.exporter.given.rows
    with tempfile.TemporaryDirectory() as temporary:
        exported = export_onnx(prepared.model, Path(temporary) / "float32", batch=prepared.sample)
        table = Table(batches, in_onnx(exported, batches))
        quarters = {f"rows {n}": rows[n * len(rows) // 4 : (n + 1) * len(rows) // 4] for n in range(4)}
        for smallest, layers in ((SMALLEST, "layers of 16,384 weights"), (1, "all layers")):
            by_rows = {"nearest": (), "rows": rows} | (quarters if smallest == 1 else {})
            for how, chosen in by_rows.items():
                sizes: dict[str, Any] = {"batch": prepared.sample, "quantize": "int4", "smallest": smallest}
                fewer = quantize_onnx(exported, Path(temporary) / "int4", rows=chosen, overwrite=True, **sizes)
                table.add(f"int4, {layers}, {how}", in_onnx(fewer, batches), fewer.bytes)
        for how, model in (("nearest", prepared.model), ("rows", rounded_by_rows(prepared.model, rows))):
            table.add(f"Q4_0, {how}", in_torch(as_stored(model, "q4_0"), batches))
    print_times_of_llama(options.rounds)
    facts = machine_facts()
    print(", ".join(f"{key} {facts[key]}" for key in ("cpu", "threads", "torch", "onnxruntime") if facts.get(key)))


class Table:
    """Prints a row for each form: perplexity, and the divergence from the first one's predictions."""

    def __init__(self, batches: Sequence[Any], float32: Iterable[Tensor]):
        self._tokens, self._float32 = [batch["input_ids"] for batch in batches], list(float32)
        print("| form | file | perplexity | more | KL | same next token |\n| --- | --- | --- | --- | --- | --- |")
        self._base = self._perplexity(self._float32)
        print(f"| float32 | | {self._base:.3f} | | | |")

    def add(self, name: str, found: Iterable[Tensor], size: int | None = None) -> None:
        """Print the row of a form, from its log probabilities."""
        found = list(found)
        pairs = list(zip(self._float32, found, strict=True))
        places = sum(wanted[..., 0].numel() for wanted in self._float32)
        divergence = sum(float((wanted.exp() * (wanted - other)).sum().double()) for wanted, other in pairs) / places
        same = sum(int((wanted.argmax(-1) == other.argmax(-1)).sum()) for wanted, other in pairs) / places
        perplexity, file = self._perplexity(found), "" if size is None else f"{size / 1e3:.0f} kB"
        more = perplexity / self._base - 1
        print(f"| {name} | {file} | {perplexity:.3f} | {more:+.1%} | {divergence:.4f} | {same:.1%} |", flush=True)

    def _perplexity(self, found: Iterable[Tensor]) -> float:
        pairs = list(zip(self._tokens, found, strict=True))
        lost = -sum(float(logs.gather(-1, ids[:, 1:, None]).double().sum()) for ids, logs in pairs)
        return math.exp(lost / sum(ids[:, 1:].numel() for ids, _ in pairs))


def in_onnx(exported: Export, batches: Sequence[Any]) -> Iterator[Tensor]:
    """Yield log probabilities of next tokens, (rows, tokens - 1, vocabulary), by ONNX Runtime."""
    runtime = OnnxRuntime(exported.folder, threads=torch.get_num_threads())
    for batch in batches:
        yield torch.from_numpy(runtime.compute(batch)["logits"])[:, :-1].log_softmax(-1)


def in_torch(model: Any, batches: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the same by torch."""
    for batch in batches:
        with torch.no_grad():
            yield model(input_ids=batch["input_ids"]).logits[:, :-1].log_softmax(-1)


def print_times_of_llama(rounds: int) -> None:
    """Print times of 4 bits, without and with the bias that keeps means, to float32."""
    shape = llama("LLaMA", **LLAMA_SMALL)
    model = shape.build(device="cpu", dtype=torch.float32)
    batches = {(1, 128): shape.batch(model, 1, 128)}
    with tempfile.TemporaryDirectory() as temporary:
        exported = export_onnx(model, Path(temporary) / "float32", batch=shape.batch(model, 1, 16))
        forms = {"float32": Form("dense", "onnxruntime-cpu", exported.folder)}
        for how, rows in (("nearest", ()), ("rows", [shape.batch(model, 2, 128)])):
            fewer = quantize_onnx(
                *(exported, Path(temporary) / how), batch=shape.batch(model, 1, 16), quantize="int4", rows=rows
            )
            forms[f"int4, {how}, {fewer.bytes / 1e6:.1f} MB"] = Form("dense", "onnxruntime-cpu", fewer.folder)
        timed = time_beside([*forms.values()], batches, repeats=rounds)
    print()
    print_times("LLaMA of 56 M", forms, timed)


if __name__ == "__main__":
    main()
