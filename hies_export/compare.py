"""Time two models side by side: the measure stage of a run, and `hies-export bench` for any two folders."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import measure
from .errors import RequestError
from .export import export_onnx
from .loading import find_model_class, load, load_config
from .runtimes import ONNX_FILE, load_runtime


def latency_row(
    runtime: str,
    dense: PreTrainedModel | Path,
    slim: PreTrainedModel | Path,
    *,
    batch: Mapping[str, Tensor],
    sequence: int,
    flops_ratio: float,
    repeats: int,
) -> dict[str, Any]:
    """Time two models on one runtime and shape, interleaved, with the first one against itself as control.

    Args:
        runtime: A name in `hies_export.runtimes`.
        dense: What the ratio is relative to: a model for `torch`, an ONNX folder for ONNX Runtime.
        slim: What is compared with it.
        batch: What both run.
        sequence: Tokens per row of that batch, for the row.
        flops_ratio: FLOPs of slim / FLOPs of dense, for the realised share of the saving.
        repeats: Timed runs of each.

    Returns:
        A row of report.json's `latency`: the median times in ms, the paired ratio slim / dense with its 95 % bootstrap
        interval, and the control's.
    """
    control = load_runtime(runtime, dense)
    found = measure.compare_latency(
        load_runtime(runtime, dense),
        load_runtime(runtime, slim),
        batch=batch,
        repeats=repeats,
        control=control,
    )
    return {
        "runtime": runtime,
        "provider": found.provider,
        "batch": next(iter(batch.values())).shape[0],
        "sequence": sequence,
        "dense_ms": found.dense.p50_ms,
        "slim_ms": found.slim.p50_ms,
        "ratio": found.ratio,
        "ratio_low": found.ratio_low,
        "ratio_high": found.ratio_high,
        "realised": measure.realised_share(found.ratio, flops_ratio),
        "flops_ratio": flops_ratio,
        "dense_p90_ms": found.dense.p90_ms,
        "dense_p99_ms": found.dense.p99_ms,
        "slim_p90_ms": found.slim.p90_ms,
        "slim_p99_ms": found.slim.p99_ms,
        "control_ratio": found.control.ratio,
        "control_low": found.control.low,
        "control_high": found.control.high,
        "repeats": found.repeats,
        "threads": found.threads,
    }


def bench(
    first: str | Path,
    second: str | Path,
    *,
    runtimes: Sequence[str] = (),
    shapes: Sequence[Sequence[int]] = (),
    repeats: int = 30,
    track: Callable[[Sequence[Any], str], Iterable[Any]] | None = None,
) -> list[dict[str, Any]]:
    """Compare the latency of two checkpoints or ONNX folders; the same one twice measures the noise.

    Args:
        first: What the ratios are relative to. A checkpoint is exported on the fly for ONNX Runtime.
        second: What is compared with it.
        runtimes: By default `torch` where both are checkpoints, else `onnxruntime-cpu`.
        shapes: (batch, sequence) pairs, or (batch,) for images; by default a batch of 1 and of 8.
        repeats: Timed runs of each.
        track: Wraps the loop, e.g. in a progress bar.

    Returns:
        Rows as in report.json's `latency`; "dense" is the first model, "slim" the second.

    Raises:
        RequestError: A folder is neither, the two take different inputs, or a runtime cannot run what it was given.
    """
    folders = (Path(first), Path(second))
    skeletons = [_skeleton(folder) for folder in folders]
    if skeletons[0].main_input_name != skeletons[1].main_input_name:
        names = " and ".join(model.main_input_name for model in skeletons)
        raise RequestError(f"two models must take the same kind of input to be compared, got {names}")
    exported = [(folder / ONNX_FILE).is_file() for folder in folders]
    runtimes = runtimes or (("onnxruntime-cpu",) if any(exported) else ("torch",))
    for folder, is_onnx in zip(folders, exported, strict=True):
        if is_onnx and "torch" in runtimes:
            raise RequestError(f"runtime torch needs a checkpoint, but {folder} is an ONNX folder; use onnxruntime-cpu")
    batches = {
        shape: measure.synthetic_batch(skeletons[0], batch=shape[0], sequence=shape[1])
        for shape in model_shapes(skeletons[0], shapes)
    }
    rows = []
    with contextlib.ExitStack() as stack:
        for runtime in runtimes:
            if runtime == "torch":
                sources: list[Any] = [load(folder, dtype=torch.float32).eval() for folder in folders]
            else:
                sources = []
                for folder, is_onnx in zip(folders, exported, strict=True):
                    if is_onnx:
                        sources.append(folder)
                        continue
                    temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hies-bench-")))
                    model = load(folder, dtype=torch.float32)
                    sample = measure.synthetic_batch(model, batch=2, sequence=16)
                    sources.append(export_onnx(model, temporary / "onnx", batch=sample).folder)
            items = list(batches.items())
            for (_, sequence), batch in track(items, f"bench {runtime}") if track else items:
                dense_flops, slim_flops = (measure.count_flops(model, batch) for model in skeletons)
                rows.append(
                    latency_row(
                        runtime,
                        *sources,
                        batch=batch,
                        sequence=sequence,
                        flops_ratio=slim_flops / dense_flops,
                        repeats=repeats,
                    )
                )
    return rows


def model_shapes(model: PreTrainedModel, shapes: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(batch, sequence) pairs to measure; an image model's sequence is what its image size makes it.

    Raises:
        RequestError: A text model's shape has no sequence, or one beyond the model's positions.
    """
    if model.main_input_name == "pixel_values":
        tokens = measure.sequence_length(model, measure.synthetic_batch(model, batch=1))
        return [(batch, tokens) for batch in dict.fromkeys(shape[0] for shape in shapes or ((1,), (8,)))]
    for shape in shapes:
        if len(shape) != 2:
            raise RequestError(f"a text model's shape must be batch and sequence, got {list(shape)}")
        measure.synthetic_batch(model, batch=1, sequence=shape[1])
    if shapes:
        return [(shape[0], shape[1]) for shape in shapes]
    positions = getattr(model.config, "max_position_embeddings", 128)
    return [(1, min(128, positions)), (8, min(128, positions))]


def _skeleton(folder: Path) -> PreTrainedModel:
    """The model of a folder without its weights: enough for shapes, inputs and FLOPs."""
    with torch.device("meta"):
        return find_model_class(folder)(load_config(folder)).eval()
