"""Time how long the tables of FLOPs and parameters take to build, for heads and neurons, on models without weights.

python bench/cost_tables.py [--models bert-base llama-7b] [--one-by-one]

--one-by-one cuts and counts every module by itself as well, which gives the same table. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from unittest import mock

import torch
from models import BERT_BASE, LLAMA_7B, Shape, bert, llama

from hies_export.forms.cost import bundles
from hies_export.forms.cost.bundles import flops_table, parameters_table
from hies_export.kinds import MLP
from hies_export.units.units import PrunableModule, Slice, Span

MODELS = {
    "bert-base": (bert("BERT-base", **BERT_BASE), (8, 128)),
    "llama-7b": (llama("LLaMA 7B", **LLAMA_7B), (1, 512)),
}
# Layer, producers and consumer of a feed-forward block, by model type.
BLOCKS = {
    "bert": ("bert.encoder.layer.{}", ("intermediate.dense",), "output.dense"),
    "llama": ("model.layers.{}.mlp", ("gate_proj", "up_proj"), "down_proj"),
}


def blocks(shape: Shape) -> tuple[PrunableModule, ...]:
    """Describe the feed-forward blocks: to find them takes derivatives, and these models have no weights."""
    config = shape.config(0)
    layer, producers, consumer = BLOCKS[config.model_type]
    found = []
    for name in map(layer.format, range(config.num_hidden_layers)):
        rows = (Span(0, config.intermediate_size, 0, 1, 1),)
        slices = tuple(Slice(f"{name}.{producer}", 0, rows) for producer in producers)
        units = {"units": config.intermediate_size, "unit_width": 1, "kind": MLP}
        found.append(PrunableModule(name=name, consumer=f"{name}.{consumer}", slices=slices, **units))
    return tuple(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--one-by-one", action="store_true")
    options = parser.parse_args()
    seconds: dict[str, dict[str, float]] = {}
    for name in options.models:
        shape, (rows, tokens) = MODELS[name]
        model = shape.build(device="meta", dtype=torch.float32)
        modules, batch = (*shape.modules(), *blocks(shape)), shape.batch(model, rows, tokens)
        row = seconds[name] = {}
        start = time.perf_counter()
        table = flops_table(model, modules, batch=batch)
        row["flops"] = time.perf_counter() - start
        start = time.perf_counter()
        parameters_table(model, modules)
        row["parameters"] = time.perf_counter() - start
        if options.one_by_one:
            start = time.perf_counter()
            with mock.patch.object(bundles, "_attributed", lambda of_kind, *_: {m.name: -1 for m in of_kind}):
                assert flops_table(model, modules, batch=batch) == table
            row["flops_one_by_one"] = time.perf_counter() - start
        units = sum(module.units for module in modules)
        print(f"{name}: {len(modules)} modules, {units} units, {rows} x {tokens} tokens")
        for what, took in row.items():
            print(f"  {what:<18} {took:7.2f} s")
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        json.dumps(
            {
                "seconds": {n: {k: round(v, 2) for k, v in r.items()} for n, r in seconds.items()},
                "peak_mb": round(peak_mb),
            }
        )
    )


if __name__ == "__main__":
    main()
