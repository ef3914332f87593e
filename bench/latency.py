"""Time a dense model against slim ones with fewer heads, interleaved, with an A/A control beside every row.

python bench/latency.py [--width minilm | --width bert-base | --model FOLDER] [--heads 0.3 0.5 | --plans PLAN.json ...]
                        [--shapes 1x128 8x128 8x512] [--runtimes torch onnxruntime-cpu] [--repeats 30]

--heads removes the same share of the heads of every layer. --plans removes the shares of heads and neurons that a plan
of any model removes from its layers, stretched over the layers of this one.

Without --model: random weights, which is enough for time. Writes bench/results/latency-WIDTH.json, which
`hies-export report` shows again, and latency-WIDTH.txt. The machine should be idle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from forms import time_beside
from models import WIDTHS, cut_like, uniformly_pruned
from rich.console import Console

from hies_export import PruningPlan, find_attention, load
from hies_export.checkpoint.folders import replace_file
from hies_export.forms.form import Forms
from hies_export.forms.formats import Exporter, Given, best_for
from hies_export.forms.measure.counts import count_both_flops
from hies_export.forms.measure.machine import machine_facts
from hies_export.forms.measured import latency_rows
from hies_export.forms.runtimes.base import Runtime, check_runtime
from hies_export.forms.time import compare_latency
from hies_export.model.tokens import synthetic_batch
from hies_export.recipe.sections import ExportSection
from hies_export.report.comparison import Bench, print_bench

RESULTS = Path(__file__).with_name("results")


class Nothing(Runtime):
    """A runtime that only writes down when it is run, so that the measuring itself is measured."""

    provider, dtype, threads = "nothing", "float32", 1

    def __init__(self) -> None:
        self.runs_ns: list[int] = []

    def prepare(self, batch: Any) -> Any:
        return batch

    def run(self, feed: Any) -> None:
        self.runs_ns.append(perf_counter_ns())

    def fetch(self, result: None) -> dict[str, Any]:
        return {}


def overhead_us(repeats: int = 6000) -> float:
    """Return what the loop of `compare_latency` adds to a timed call: the median over rounds, in microseconds."""
    nothing = [Nothing() for _ in range(3)]
    bare = []
    for _ in range(repeats):
        start_ns = perf_counter_ns()
        for runner in nothing:
            runner.run({})
        bare.append(perf_counter_ns() - start_ns)
    first, second, control = nothing
    compare_latency(first, second, control=control, batch={"input_ids": torch.zeros(1, 1)}, repeats=repeats)
    rounds = [after - before for before, after in pairwise(first.runs_ns[-repeats:])]
    return (statistics.median(rounds) - statistics.median(bare)) / 3 / 1000


def parse_shape(text: str) -> tuple[int, int]:
    batch, _, sequence = text.partition("x")
    return int(batch), int(sequence)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=float, nargs="+", default=[0.3, 0.5], help="shares of heads to remove")
    parser.add_argument("--plans", type=Path, nargs="+", metavar="FILE", help="plans to follow instead")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--shapes", type=parse_shape, nargs="+", default=[(1, 128), (8, 128), (8, 512)], metavar="BxS")
    parser.add_argument("--runtimes", nargs="+", default=["torch", "onnxruntime-cpu"])
    parser.add_argument("--model", metavar="FOLDER", help="a text classifier")
    parser.add_argument("--width", choices=WIDTHS, default="minilm")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: bench/results/latency-WIDTH.json")
    options = parser.parse_args()

    for runtime in options.runtimes:
        check_runtime(runtime)
    torch.manual_seed(0)
    if options.model:
        dense = load(options.model, dtype=torch.float32)
        name = Path(options.model).name
    else:
        dense, name = WIDTHS[options.width].build(device="cpu", dtype=torch.float32), options.width
    small = synthetic_batch(dense, batch=2, sequence=8)
    if options.plans:
        title = "heads and neurons removed as in a plan"
        cuts = {path.stem: partial(cut_like, dense, PruningPlan.from_file(path), small) for path in options.plans}
    else:
        title = "the same share of the heads of every layer removed"
        modules = find_attention(dense, small)
        cuts = {f"-{share:.0%}": partial(uniformly_pruned, dense, share, modules) for share in options.heads}
    batches = {shape: synthetic_batch(dense, batch=shape[0], sequence=shape[1]) for shape in options.shapes}
    console, rows = Console(highlight=False, markup=False, width=140), []
    cost_us = overhead_us()
    with tempfile.TemporaryDirectory() as folder:
        exporter = Exporter(ExportSection(), Given(synthetic_batch(dense, batch=2, sequence=16)))
        forms = Forms({"dense": dense}, exporter, Path(folder))
        for what, cut in cuts.items():
            forms.add(what, slim := cut())
            flops = count_both_flops(dense, slim, batches)
            for runtime in options.runtimes:
                console.print(f"{name}, {what}, {runtime}")
                best = best_for(runtime, "float32")
                both = [forms.form(one, runtime, options=best) for one in ("dense", what)]
                found = latency_rows(time_beside(both, batches, repeats=options.repeats), flops)
                rows += [{"model": f"{name} {what}", **asdict(row)} for row in found]
    values = {
        "title": f"{name}: {title}",
        "tables": [{"title": "Latency", "names": ["dense", "slim"], "rows": rows}],
        "missing": [],
        "environment": machine_facts(),
        "overhead_us": cost_us,
    }
    out = options.out or RESULTS / f"latency-{name}{'-neurons' if options.plans else ''}.json"
    replace_file(out, json.dumps(values, indent=1) + "\n")
    with out.with_suffix(".txt").open("w", encoding="utf-8") as file:
        for target in (console, Console(file=file, highlight=False, markup=False, width=140)):
            print_bench(Bench.from_values(values), target)
            target.print(f"Measuring costs {cost_us:.2f} us per timed call (median).")
    print(f"written to {out} and {out.with_suffix('.txt')}")


if __name__ == "__main__":
    main()
