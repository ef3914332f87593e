"""Time two models side by side: the measure stage of a run, and `hies-export bench` for any two folders."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..checkpoint.loading import find_model_class, load, load_config
from ..errors import RequestError
from ..onnx.export import export_onnx
from ..onnx.multimodal import is_vision_language
from . import counts, latency
from .onnx_runtimes import ONNX_FILE, refuse_parts
from .runtime import RUNTIMES, Runtime
from .runtimes import check_runtime, load_runtime

Shape = tuple[int, int]  # (batch, sequence)


def time_on(
    runtime: str,
    dense: PreTrainedModel | Path,
    slim: PreTrainedModel | Path,
    *,
    batches: Mapping[Shape, Mapping[str, Tensor]],
    flops: Mapping[Shape, tuple[int, int]],
    repeats: int,
    min_seconds: float = 0.0,
    track: Callable[[Sequence[Any], str], Iterable[Any]] | None = None,
) -> list[dict[str, Any]]:
    """Time two models on one runtime, interleaved, with the first one against itself as control.

    They are loaded as many times as the runtime's `loads` says, and the runs are shared out between the loads.

    Args:
        runtime: A name in `hies_export.measure.runtimes`.
        dense: What the ratios are relative to: a model for torch, an ONNX folder for ONNX Runtime.
        slim: What is compared with it.
        batches: What both run, by (batch, sequence).
        flops: Of both, from `count_both_flops`, for the realised share of the saving.
        repeats, min_seconds: As in `compare_latency`, over all loads; at least one run of every load.
        track: Wraps the loop over loads and shapes, e.g. in a progress bar.

    Returns:
        A row of report.json's `latency` per shape: the median times in ms, the paired ratio slim / dense with its 95 %
        bootstrap interval, and the control's. `noisy` where the control shows that nothing can be concluded. What
        generates has two rows per shape, the `phase` "prefill" and "decode": the step of the last token, with the
        others in the cache.
    """
    found = compare_loads(runtime, dense, slim, batches, repeats=repeats, min_seconds=min_seconds, track=track)
    rows = []
    for (shape, phase), comparison in found.items():
        # A step reads all weights to compute a token: its time is that of the memory, and no share of FLOPs.
        counted = None if phase == "decode" else flops[shape]
        rows.append(latency_row(comparison, runtime=runtime, shape=shape, phase=phase, flops=counted))
    return rows


def compare_loads(
    runtime: str,
    dense: PreTrainedModel | Path,
    slim: PreTrainedModel | Path,
    batches: Mapping[Shape, Mapping[str, Tensor]],
    *,
    repeats: int,
    min_seconds: float = 0.0,
    decode: bool = True,
    track: Callable[[Sequence[Any], str], Iterable[Any]] | None = None,
) -> dict[tuple[Shape, latency.Phase], latency.LatencyComparison]:
    """The comparisons behind `time_on`, by shape and phase; without `decode`, the prefill is all that is timed."""
    loads, shapes = max(1, min(RUNTIMES[runtime].loads, repeats)), list(batches)
    sources = (dense, slim, dense)
    runners: dict[int, Runtime] = {}
    timed: dict[tuple[Shape, latency.Phase], list[latency.Rounds]] = {}
    steps = [(number, shape) for number in range(loads) for shape in shapes]
    for number, shape in track(steps, f"measure {runtime}") if track else steps:
        if shape == shapes[0]:
            runners.clear()
            # What is loaded first tends to run fastest: each of the three is that in turn.
            for index in ((0, 1, 2), (1, 2, 0), (2, 0, 1))[number % 3]:
                runners[index] = load_runtime(runtime, sources[index])
        decodes = all(runner.decodes for runner in runners.values())
        phases: tuple[latency.Phase, ...] = ("prefill",) if decodes else ("forward",)
        for phase in (*phases, "decode") if decode and decodes and shape[1] > 1 else phases:
            rounds = latency.time_rounds(
                [runners[index] for index in range(3)],
                batch=batches[shape],
                phase=phase,
                repeats=math.ceil(repeats / loads),
                warmup=2 if number else 5,
                min_seconds=min_seconds / loads,
            )
            timed.setdefault((shape, phase), []).append(rounds)
    return {step: latency.compare_rounds(rounds) for step, rounds in timed.items()}


def latency_row(
    found: latency.LatencyComparison,
    *,
    runtime: str,
    shape: Shape,
    phase: latency.Phase = "forward",
    flops: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """A comparison as a row of report.json's `latency`; without FLOPs there is no realised share of their saving."""
    flops_ratio = None if flops is None else flops[1] / flops[0]
    per_second = {"dense": 1000 * shape[0] / found.dense.p50_ms, "slim": 1000 * shape[0] / found.slim.p50_ms}
    return {
        "runtime": runtime,
        "provider": found.provider,
        "dtype": " / ".join(dict.fromkeys(found.dtypes)),
        "phase": phase,
        "batch": shape[0],
        "sequence": shape[1],
        "dense_ms": found.dense.p50_ms,
        "slim_ms": found.slim.p50_ms,
        "ratio": found.ratio.median,
        "ratio_low": found.ratio.low,
        "ratio_high": found.ratio.high,
        "realised": None if flops_ratio is None else latency.realised_share(found.ratio.median, flops_ratio),
        "flops_ratio": flops_ratio,
        "tokens_per_second": per_second if phase == "decode" else None,
        "dense_p90_ms": found.dense.p90_ms,
        "dense_p99_ms": found.dense.p99_ms,
        "slim_p90_ms": found.slim.p90_ms,
        "slim_p99_ms": found.slim.p99_ms,
        "control_ratio": found.control.median,
        "control_low": found.control.low,
        "control_high": found.control.high,
        "noisy": found.noisy,
        "repeats": found.repeats,
        "loads": found.loads,
        "threads": found.threads,
        "cuda_graph": found.cuda_graph,
        "peak_bytes": None if found.peak_bytes is None else dict(zip(("dense", "slim"), found.peak_bytes, strict=True)),
        "gpu_clock_mhz": found.clock_mhz,
    }


def count_both_flops(
    dense: PreTrainedModel, slim: PreTrainedModel, batches: Mapping[Shape, Mapping[str, Tensor]]
) -> dict[Shape, tuple[int, int]]:
    """FLOPs of one forward pass of the two models, by (batch, sequence)."""
    return {s: (counts.count_flops(dense, b), counts.count_flops(slim, b)) for s, b in batches.items()}


def bench(
    first: str | Path,
    second: str | Path,
    *,
    runtimes: Sequence[str] = (),
    shapes: Sequence[Sequence[int]] = (),
    dtypes: Sequence[str] = (),
    repeats: int = 30,
    min_seconds: float = 0.0,
    track: Callable[[Sequence[Any], str], Iterable[Any]] | None = None,
) -> list[dict[str, Any]]:
    """Compare the latency of two checkpoints or ONNX folders; the same one twice measures the noise.

    Args:
        first: What the ratios are relative to. A checkpoint is exported on the fly for ONNX Runtime, and runs in torch
            on the GPU if there is one.
        second: What is compared with it.
        runtimes: By default `torch` where both are checkpoints, else `onnxruntime-cpu`.
        shapes: (batch, sequence) pairs, or (batch,) for images; by default a batch of 1 and of 8.
        dtypes: What checkpoints are run in, each on the runtimes that can; float32 by default. An ONNX folder runs in
            its own.
        repeats, min_seconds: As in `time_on`.
        track: Wraps the loops, e.g. in a progress bar.

    Returns:
        Rows as in report.json's `latency`; "dense" is the first model, "slim" the second.

    Raises:
        RequestError: A folder is neither, the two take different inputs, or a runtime cannot run what it was given.
    """
    folders = (Path(first), Path(second))
    for folder in folders:
        refuse_parts(folder)
    exported = [(folder / ONNX_FILE).is_file() for folder in folders]
    runtimes = runtimes or (("onnxruntime-cpu",) if any(exported) else ("torch",))
    for runtime in runtimes:
        check_runtime(runtime)
    for folder, is_onnx in zip(folders, exported, strict=True):
        for runtime in runtimes if is_onnx else ():
            if RUNTIMES[runtime].reads_models:
                raise RequestError(
                    f"runtime {runtime} needs a checkpoint, but {folder} is an ONNX folder; use onnxruntime-cpu"
                )
        if is_onnx and dtypes:
            raise RequestError(f"a dtype can be chosen for checkpoints, but {folder} is an ONNX folder with its own")
    check_dtypes(dtypes, runtimes)
    skeletons = [_skeleton(folder) for folder in folders]
    for folder, skeleton in zip(folders, skeletons, strict=True):
        if is_vision_language(skeleton):
            raise RequestError(f"bench times encoders and decoders, and {folder} is a vision-language model")
    if skeletons[0].main_input_name != skeletons[1].main_input_name:
        names = " and ".join(model.main_input_name for model in skeletons)
        raise RequestError(f"two models must take the same kind of input to be compared, got {names}")
    model_shapes(skeletons[1], shapes)
    batches = {
        shape: counts.synthetic_batch(skeletons[0], batch=shape[0], sequence=shape[1])
        for shape in model_shapes(skeletons[0], shapes)
    }
    flops = count_both_flops(skeletons[0], skeletons[1], batches)
    timing: dict[str, Any] = {"repeats": repeats, "min_seconds": min_seconds}
    rows = []
    for runtime in runtimes:
        for dtype in dtypes or ("float32",):
            if dtype not in RUNTIMES[runtime].dtypes:
                continue
            with contextlib.ExitStack() as stack:
                sources: list[Any] = []
                for folder, is_onnx in zip(folders, exported, strict=True):
                    if is_onnx:
                        sources.append(folder)
                    elif RUNTIMES[runtime].reads_models:
                        device = "cuda" if torch.cuda.is_available() else "cpu"
                        model: Any = load(folder, dtype=getattr(torch, dtype))
                        sources.append(model.to(device))
                    else:
                        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="hies-bench-"))
                        sources.append(export_for(runtime, load(folder, dtype=torch.float32), Path(temporary), dtype))
                rows += time_on(runtime, *sources, batches=batches, flops=flops, **timing, track=track)
    return rows


def check_dtypes(dtypes: Sequence[str], runtimes: Sequence[str]) -> None:
    """Refuse a dtype that none of the runtimes can run a model in.

    Raises:
        RequestError: There is one.
    """
    known = list(dict.fromkeys(dtype for runtime in runtimes for dtype in RUNTIMES[runtime].dtypes))
    for dtype in dtypes:
        if dtype not in known:
            raise RequestError(f"a dtype must be one of {', '.join(known)} on {', '.join(runtimes)}, got {dtype!r}")


def export_for(runtime: str, model: PreTrainedModel, temporary: Path, dtype: str) -> Path:
    """The model as an ONNX folder that suits a runtime."""
    return export_onnx(
        model,
        temporary / "onnx",
        batch=counts.synthetic_batch(model, batch=2, sequence=16),
        provider=RUNTIMES[runtime].fused_for,
        dtype=dtype,
    ).folder


def model_shapes(model: PreTrainedModel, shapes: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(batch, sequence) pairs to measure; an image model's sequence is what its image size makes it.

    Raises:
        RequestError: A text model's shape has no sequence, or one beyond the model's positions.
    """
    if model.main_input_name == "pixel_values":
        tokens = counts.sequence_length(model, counts.synthetic_batch(model, batch=1))
        return [(batch, tokens) for batch in dict.fromkeys(shape[0] for shape in shapes or ((1,), (8,)))]
    for shape in shapes:
        if len(shape) != 2:
            raise RequestError(f"a text model's shape must be batch and sequence, got {list(shape)}")
        counts.synthetic_batch(model, batch=1, sequence=shape[1])
    if shapes:
        return [(shape[0], shape[1]) for shape in shapes]
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 128
    return [(1, min(128, positions)), (8, min(128, positions))]


def _skeleton(folder: Path) -> PreTrainedModel:
    """The model of a folder without its weights: enough for shapes, inputs and FLOPs."""
    with torch.device("meta"):
        return find_model_class(folder)(load_config(folder)).eval()
