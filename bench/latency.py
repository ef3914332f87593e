"""Part of the heads, how much of the time? Dense against slim, interleaved, with an A/A control beside every row.

python bench/latency.py [--heads 0.5] [--shapes 1x128 8x128] [--runtimes torch onnxruntime-cpu] [--repeats 30]
                        [--model FOLDER | --width minilm | --width bert-base]

Without --model: random weights, which is enough for time. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel

from hies_export import export_onnx, find_attention, load, prune_heads, score_heads, select_heads
from hies_export.measure.compare import count_both_flops, time_on
from hies_export.measure.counts import synthetic_batch
from hies_export.measure.latency import environment
from hies_export.values import HeadStatistics

WIDTHS = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}


def uniformly_pruned(model: PreTrainedModel, heads: float) -> PreTrainedModel:
    """A random choice of the same number of heads in every layer: which ones does not matter for time."""
    sites = find_attention(model, synthetic_batch(model, batch=2, sequence=8))
    zeros = {site.name: torch.zeros(site.heads) for site in sites}
    statistics = HeadStatistics(his=zeros, entropy=zeros, weight_l2=zeros, samples=0, labels="none", fingerprint="")
    scores = score_heads(statistics, criterion="random")
    return prune_heads(model, select_heads(scores, sites, heads=heads, allocation="uniform"), sites)


def parse_shape(text: str) -> tuple[int, int]:
    batch, _, sequence = text.partition("x")
    return int(batch), int(sequence)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=float, default=0.5, help="share of heads to remove")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--shapes", type=parse_shape, nargs="+", default=[(1, 128), (8, 128)], metavar="BxS")
    parser.add_argument("--runtimes", nargs="+", default=["torch", "onnxruntime-cpu"])
    parser.add_argument("--model", metavar="FOLDER", help="a text classifier")
    parser.add_argument("--width", choices=WIDTHS, default="minilm")
    options = parser.parse_args()

    torch.manual_seed(0)
    if options.model:
        dense = load(options.model, dtype=torch.float32).eval()
    else:
        dense = BertForSequenceClassification(BertConfig(**WIDTHS[options.width])).eval()
    slim = uniformly_pruned(dense, options.heads)
    console, rows = Console(highlight=False), []
    with tempfile.TemporaryDirectory() as folder:
        sources = {"torch": (dense, slim)}
        if "onnxruntime-cpu" in options.runtimes:
            sample = synthetic_batch(dense, batch=2, sequence=16)
            exported = [export_onnx(m, Path(folder) / n, batch=sample) for m, n in ((dense, "dense"), (slim, "slim"))]
            sources["onnxruntime-cpu"] = tuple(e.folder for e in exported)
        console.print(
            "runtime          shape     dense ms  slim ms  slim/dense [95 %]     A/A [95 %]            realised"
        )
        batches = {s: synthetic_batch(dense, batch=s[0], sequence=s[1]) for s in options.shapes}
        flops = count_both_flops(dense, slim, batches)
        for runtime in options.runtimes:
            for row in time_on(runtime, *sources[runtime], batches=batches, flops=flops, repeats=options.repeats):
                rows.append(row)
                shape = f"{row['batch']}x{row['sequence']}"
                console.print(
                    f"{runtime:16} {shape:8} {row['dense_ms']:9.2f} {row['slim_ms']:8.2f}"
                    f"  {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
                    f"  {row['control_ratio']:.3f} [{row['control_low']:.3f}, {row['control_high']:.3f}]"
                    f"  {row['realised']:.2f} of {1 - row['flops_ratio']:.3f}",
                    markup=False,
                    soft_wrap=True,
                )
    print(json.dumps({"heads": options.heads, "latency": rows, "environment": environment()}))


if __name__ == "__main__":
    main()
