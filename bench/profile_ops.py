"""Print which operators of ONNX files take the time at a shape, by the profiler of ONNX Runtime, or of OpenVINO.

python bench/profile_ops.py NAME=FILE [NAME=FILE ...] [--shape 1x16] [--runs 400] [--threads 2] [--openvino]
python bench/profile_ops.py NAME=FILE NAME=FILE [...] --interleaved

A cell has the microseconds of a run, and the calls, of all nodes of an operator. The profilers add some microseconds to
a call: `whole run` is the median without them, while no other model runs and idle threads spin, as is usual. With
`--interleaved`, the whole files are timed as `bench` does it, in turns, relative to the first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

Costs = dict[str, tuple[float, float]]
WARMUP = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", metavar="NAME=FILE", nargs="+")
    parser.add_argument("--shape", default="1x16", type=lambda text: tuple(map(int, text.split("x"))))
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--openvino", action="store_true")
    parser.add_argument("--interleaved", action="store_true")
    options = parser.parse_args()
    files = dict(given.split("=", 1) for given in options.files)
    if options.interleaved:
        interleave(files, options)
    else:
        print_costs(files, options)


def print_costs(files: dict[str, str], options: argparse.Namespace) -> None:
    profile = in_openvino if options.openvino else in_onnxruntime
    costs = {name: profile(file, options) for name, file in files.items()}
    names = {name for found in costs.values() for name in found}
    shape = " x ".join(map(str, options.shape))
    print(
        f"| µs (calls) at {shape}, threads: {options.threads} | {' | '.join(costs)} |\n|{' --- |' * (len(costs) + 1)}"
    )
    for name in sorted(names, key=lambda name: -max(found.get(name, (0,))[0] for found in costs.values())):
        cells = [f"{found[name][0]:.0f} ({found[name][1]:g})" if name in found else "" for found in costs.values()]
        print(f"| {name} | {' | '.join(cells)} |")


def interleave(files: dict[str, str], options: argparse.Namespace) -> None:
    import torch
    from forms import print_base, time_beside, time_cells

    from hies_export.forms.form import Form

    torch.set_num_threads(options.threads)
    batch = {name: torch.from_numpy(tokens(name, options.shape)) for name in ("input_ids", "attention_mask")}
    forms = [Form(name, "onnxruntime-cpu", Path(file)) for name, file in files.items()]
    timed = time_beside(forms, {options.shape: batch}, repeats=options.runs)
    for name, cells in zip(files, time_cells(timed, len(files)), strict=True):
        print(f"| {name} | {' | '.join(cells)} |")
    print_base(timed, len(files))


def in_onnxruntime(file: str, options: argparse.Namespace) -> Costs:
    import onnxruntime as ort

    def opened(folder: str = "") -> Any:
        how = ort.SessionOptions()
        how.intra_op_num_threads, how.enable_profiling = options.threads, bool(folder)
        how.profile_file_prefix = f"{folder}/profile"
        return ort.InferenceSession(file, how, providers=["CPUExecutionProvider"])

    plain = opened()
    feed = {node.name: tokens(node.name, options.shape) for node in plain.get_inputs()}
    whole = median(partial(plain.run, None, feed), options.runs)
    del plain  # its threads would spin on
    with TemporaryDirectory() as folder:
        profiled = opened(folder)
        for _ in range(options.runs):
            profiled.run(None, feed)
        events = json.loads(Path(profiled.end_profiling()).read_text())
    nodes = [(e["args"]["op_name"], e["dur"]) for e in events if e["name"].endswith("_kernel_time")]
    return by_operator(nodes, options.runs, whole)


def in_openvino(file: str, options: argparse.Namespace) -> Costs:
    import openvino

    def opened(counts: bool) -> Any:
        how = {"INFERENCE_NUM_THREADS": options.threads, "NUM_STREAMS": 1, "PERF_COUNT": counts}
        return openvino.Core().compile_model(file, "CPU", how).create_infer_request()

    plain, profiled, nodes = opened(False), opened(True), []
    feed = {value.any_name: tokens(value.any_name, options.shape) for value in plain.model_inputs}
    whole = median(partial(plain.infer, feed), options.runs)
    for _ in range(options.runs):
        profiled.infer(feed)
        nodes += [(i.node_type, i.real_time / timedelta(microseconds=1)) for i in profiled.get_profiling_info()]
    return by_operator([node for node in nodes if node[1]], options.runs, whole)


def tokens(name: str, shape: tuple[int, ...]) -> np.ndarray:
    ids = np.random.default_rng(0).integers(1000, 2000, shape)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}.get(name, np.zeros_like(ids))


def median(run: Callable[[], Any], runs: int) -> float:
    times = [time.perf_counter_ns()]
    for _ in range(runs + WARMUP):
        run()
        times.append(time.perf_counter_ns())
    return float(np.median(np.diff(times)[WARMUP:])) / 1e3


def by_operator(nodes: list[tuple[str, float]], runs: int, whole: float) -> Costs:
    costs = {"whole run": (whole, 1.0)}
    for name, calls in Counter(name for name, _ in nodes).items():
        costs[name] = (sum(took for other, took in nodes if other == name) / runs, round(calls / runs, 1))
    return costs


if __name__ == "__main__":
    main()
