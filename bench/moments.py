"""Measure what moments of feed-forward blocks cost: seconds to add up tokens, memory of a layer, seconds to refit.

python bench/moments.py [--widths 384 1024 4096] [--tokens 512] [--kept 384 1536 4096] [--repeats 2]

Four ways to run one batch through a BERT of one layer (random weights), whose consumer has 4 x width inputs:
  plain     forward only
  float64   and add up all products of inputs and outputs in float64
  stream    `MomentStream`: products of inputs only, in float32 above the diagonal, their sum in float64
  weighted  the same twice, after a backward pass; left out where it takes more than 4 GiB
`layer MB` is what the sums of a layer take, and `peak MB` the most that torch allocates meanwhile, from a profile.
Below, the seconds that a refit takes for each ridge it tries, by `torch.linalg.solve` and by `Moments.fits`.
Times are medians of interleaved rounds on one thread, so only ratios within a row are meant to be read. Ends in one
JSON line.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from scoring import peak_megabytes
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel

from hies_export.calibrate.moments import Moments, MomentStream, bytes_of
from hies_export.calibrate.passes import LIMIT_BYTES
from hies_export.forms.measure.machine import machine_facts
from hies_export.kinds import MLP
from hies_export.model.modes import watch
from hies_export.units.units import PrunableModule

RIDGES = (1e-3, 1e-1)
SAMPLE_TOKENS = 16


def block(width: int) -> tuple[PreTrainedModel, PrunableModule]:
    """Return a BERT of one layer, and its feed-forward block of 4 x width neurons."""
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 64}
    config = BertConfig(num_hidden_layers=1, vocab_size=100, max_position_embeddings=64, num_labels=2, **sizes)
    layer = "bert.encoder.layer.0"
    module = PrunableModule(name=layer, units=4 * width, kind=MLP, unit_width=1, consumer=f"{layer}.output.dense")
    return BertForSequenceClassification(config).eval(), module


def plain(model: PreTrainedModel, batch: dict[str, Tensor]) -> None:
    with torch.no_grad():
        model(**batch)


def in_float64(model: PreTrainedModel, module: PrunableModule, batch: dict[str, Tensor]) -> None:
    with watch(model, {"": module.consumer}, outputs=True) as seen:
        plain(model, batch)
    held = torch.arange(len(batch["input_ids"])) % 5 == 4
    kept = []
    for rows in (~held, held):
        kept.append(Moments.of(*(t[""][0][rows].flatten(0, 1) for t in (seen.inputs, seen.outputs))))


def streamed(model: PreTrainedModel, module: PrunableModule, batch: dict[str, Tensor], *, weighted: bool) -> None:
    list(MomentStream(model, [module], [batch], weighted=weighted))


def solved(moments: Moments, weight: Tensor) -> None:
    """Fit as `Moments.fits` does, but each ridge on its own."""
    mean_x, mean_y = moments.x / moments.tokens, moments.y / moments.tokens
    for ridge in RIDGES:
        xx = moments.xx / moments.tokens - torch.outer(mean_x, mean_x)
        yx = moments.yx / moments.tokens - torch.outer(mean_y, mean_x)
        damped = xx + ridge * xx.diagonal().mean() * torch.eye(len(xx), dtype=xx.dtype)
        torch.linalg.solve(damped, (yx - weight @ xx).T)


def fitted(moments: Moments, weight: Tensor) -> None:
    list(moments.fits(weight, ridges=RIDGES, centred=True))


def interleaved(ways: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each way in every round."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, run in ways.items():
            started = time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - started)
    return seconds


def measure_pass(width: int, tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Print and return a row for each way to run one batch of a width."""
    model, module = block(width)
    batch = {"input_ids": torch.randint(0, 100, (tokens // SAMPLE_TOKENS, SAMPLE_TOKENS))}
    ways: dict[str, Callable[[], None]] = {
        "plain": functools.partial(plain, model, batch),
        "float64": functools.partial(in_float64, model, module, batch),
        "stream": functools.partial(streamed, model, module, batch, weighted=False),
    }
    bytes_by_way = {
        "plain": 0,
        "float64": 2 * 8 * 4 * width * (4 * width + width),
        "stream": bytes_of(model, module),
        "weighted": bytes_of(model, module, weighted=True),
    }
    if bytes_by_way["weighted"] <= LIMIT_BYTES:
        ways["weighted"] = functools.partial(streamed, model, module, batch, weighted=True)
    peaks = {way: peak_megabytes(run) for way, run in ways.items()}
    seconds = interleaved(ways, repeats)
    rows = []
    for way in ways:
        row = {
            "width": width,
            "inputs": 4 * width,
            "tokens": tokens,
            "way": way,
            "seconds": statistics.median(seconds[way]),
            "time_ratio": statistics.median(a / b for a, b in zip(seconds[way], seconds["float64"], strict=True)),
            "layer_mb": bytes_by_way[way] / 1e6,
            "peak_mb": peaks[way],
        }
        rows.append(row)
        print(
            f"{width:5} {4 * width:7}  {way:9} {row['seconds']:8.2f} {row['time_ratio']:13.2f} {row['layer_mb']:9.0f} "
            f"{row['peak_mb']:8.0f}",
            flush=True,
        )
    return rows


def measure_fit(kept: int, repeats: int) -> dict[str, Any]:
    """Print and return the row of a refit with this number of kept inputs, and a quarter as many outputs."""
    inputs = torch.randn(kept, kept, dtype=torch.float64)
    x, outputs = torch.randn(kept, dtype=torch.float64), kept // 4
    weight = torch.randn(outputs, kept, dtype=torch.float64)
    yx, y = torch.randn(outputs, kept, dtype=torch.float64), torch.randn(outputs, dtype=torch.float64)
    moments = Moments(float(kept), x, y, inputs.T @ inputs, yx, yx.square().sum(), kept)
    del inputs
    ways = {"solve": functools.partial(solved, moments, weight), "fits": functools.partial(fitted, moments, weight)}
    seconds = interleaved(ways, repeats)
    solve, fits = (statistics.median(seconds[way]) / len(RIDGES) for way in ways)
    ratio = statistics.median(a / b for a, b in zip(seconds["fits"], seconds["solve"], strict=True))
    print(f"{kept:11} {solve:8.2f} {fits:8.2f} {ratio:11.2f}", flush=True)
    return {"kept": kept, "solve_seconds": solve, "fits_seconds": fits, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", type=int, default=[384, 1024, 4096])
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the batch, in samples of 16")
    parser.add_argument("--kept", nargs="+", type=int, default=[384, 1536, 4096])
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    print("width  inputs  way        seconds  time/float64  layer MB  peak MB")
    rows = [row for width in options.widths for row in measure_pass(width, options.tokens, options.repeats)]
    print("\nkept inputs  solve s   fits s  fits/solve   for each ridge")
    fits = [measure_fit(kept, options.repeats) for kept in options.kept]
    print(json.dumps({"repeats": options.repeats, "rows": rows, "fits": fits, "environment": machine_facts()}))


if __name__ == "__main__":
    main()
