"""Compare the latency of any two checkpoints or ONNX folders."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoint.classes import find_model_class, load_config
from ..checkpoint.loading import load
from ..errors import RequestError
from ..measure.compare import count_both_flops, time_on
from ..model.tokens import longest_sequence, sequence_length, synthetic_batch
from ..onnx.export import export_onnx
from ..onnx.multimodal import is_vision_language
from ..runtimes.base import RUNTIMES
from ..runtimes.ort import ONNX_FILE, refuse_parts
from ..runtimes.registry import check_runtime


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
        shape: synthetic_batch(skeletons[0], batch=shape[0], sequence=shape[1])
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
        batch=synthetic_batch(model, batch=2, sequence=16),
        provider=RUNTIMES[runtime].fused_for,
        dtype=dtype,
    ).folder


def model_shapes(model: PreTrainedModel, shapes: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(batch, sequence) pairs to measure; an image model's sequence is what its image size makes it.

    Raises:
        RequestError: A text model's shape has no sequence, or one beyond the model's positions.
    """
    if model.main_input_name == "pixel_values":
        tokens = sequence_length(model, synthetic_batch(model, batch=1))
        return [(batch, tokens) for batch in dict.fromkeys(shape[0] for shape in shapes or ((1,), (8,)))]
    for shape in shapes:
        if len(shape) != 2:
            raise RequestError(f"a text model's shape must be batch and sequence, got {list(shape)}")
        synthetic_batch(model, batch=1, sequence=shape[1])
    if shapes:
        return [(shape[0], shape[1]) for shape in shapes]
    sequence = min(128, longest_sequence(model.config) or 128)
    return [(1, sequence), (8, sequence)]


def _skeleton(folder: Path) -> PreTrainedModel:
    """The model of a folder without its weights: enough for shapes, inputs and FLOPs."""
    with torch.device("meta"):
        return find_model_class(folder)(load_config(folder)).eval()
