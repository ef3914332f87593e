"""Compare the latency of any two checkpoints, ONNX or OpenVINO folders, or GGUF files."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoint.classes import AGAIN, find_model_class, load_config
from ..checkpoint.folders import Contents, contents
from ..checkpoint.load import load
from ..data.batches import image_shape
from ..data.processors import load_processor
from ..errors import RequestError, refusing
from ..forms.form import Form, Forms
from ..forms.formats import FORMATS, Exporter, Given, best_for, export_options, require_exporters, runtime_of
from ..forms.measured import latency_rows
from ..forms.onnx.multimodal import is_vision_language
from ..forms.runtimes.base import RUNTIMES, check_dtypes, check_runtime
from ..forms.runtimes.llamacpp import find_gguf
from ..forms.runtimes.ort import ONNX_FILE, QUANTIZED_FILE, refuse_parts
from ..forms.time import TimedRow, time
from ..model.internals import empty_model, never_asking
from ..model.tokens import synthetic_batch
from ..progress import SILENT, Progress
from ..recipe.sections import ExportSection
from ..tasks import TASKS
from ..units.counts import FlopCount, Shape, count_both_flops
from ..units.shapes import check_shapes, image_shape_at, model_shapes


def bench(
    first: str | Path,
    second: str | Path,
    *,
    runtimes: Sequence[str] = (),
    shapes: Sequence[Sequence[int]] = (),
    dtypes: Sequence[str] = (),
    repeats: int = 30,
    progress: Progress = SILENT,
) -> list[TimedRow]:
    """Compare the latency of two checkpoints, ONNX or OpenVINO folders, or GGUF files; the same one twice shows noise.

    Args:
        first: What the ratios are relative to: a checkpoint, an ONNX or OpenVINO folder, or a GGUF file or its folder.
            A checkpoint is exported on the fly for runtimes that read ONNX or GGUF; torch runs it on a GPU, if any.
        second: What to compare with the first.
        runtimes: Names of runtimes; by default `torch` if both are checkpoints, `llamacpp` with a GGUF file, `openvino`
            with an OpenVINO folder, and else `onnxruntime-cpu`.
        shapes: (batch, sequence) pairs, or (batch,) for images; by default a batch of 1 and of 8.
        dtypes: Dtypes to run checkpoints in, each on the runtimes that support it; float32 by default. A folder or
            file of an export keeps its own dtype.
        repeats: Smallest number of timed runs of each model.
        progress: Shows the loops.

    Returns:
        Rows as in report.json's `latency`; "dense" is the first model, "slim" the second.

    Raises:
        RequestError: An argument is not a model, the two models take different inputs, or a runtime cannot run one.
    """
    folders = Path(first), Path(second)
    runtimes = runtimes or _default_runtimes(folders)
    _check_request(folders, runtimes, dtypes)
    skeletons = [_skeleton(folder) for folder in folders]
    images = [image_shape_at(_config_folder(folder), model) for folder, model in zip(folders, skeletons, strict=True)]
    _check_inputs(skeletons, images)
    batches = _random_batches(skeletons, shapes, images[0])
    flops = _flops(folders, skeletons, batches)
    one_batch_each = {shape: [batch] for shape, batch in batches.items()}
    pairs = [(name, dtype) for name in runtimes for dtype in dtypes or ("float32",) if dtype in RUNTIMES[name].dtypes]
    rows: list[TimedRow] = []
    with tempfile.TemporaryDirectory(prefix="hies-bench-") as temporary:
        # All exports come first, because one may be refused.
        targets = Path(temporary) / "first", Path(temporary) / "second"
        exports = [_exports(folder, target, pairs) for folder, target in zip(folders, targets, strict=True)]
        for pair in pairs:
            forms = [
                exported[pair] if pair in exported else _loaded(folder, *pair)
                for folder, exported in zip(folders, exports, strict=True)
            ]
            times = time(forms, one_batch_each, repeats=repeats, decode=True, progress=progress)
            rows += latency_rows(times, flops)
    return rows


def _random_batches(
    skeletons: Sequence[PreTrainedModel], shapes: Sequence[Sequence[int]], image: Sequence[int] | None
) -> dict[Shape, dict[str, torch.Tensor]]:
    """Return a random batch for each shape, which both models can read; `image` is (channels, height, width)."""
    # Without shapes, those of the models differ at most in the sequence, and the shorter ones suit both.
    common = min(model_shapes(model, shapes, image=image) for model in skeletons)
    # The tokens of the smaller vocabulary are tokens of both.
    smaller = min(skeletons, key=lambda model: getattr(model.config.get_text_config(), "vocab_size", 0))
    return {shape: synthetic_batch(smaller, batch=shape[0], sequence=shape[1], image=image) for shape in common}


def _check_inputs(models: Sequence[PreTrainedModel], images: Sequence[Sequence[int] | None]) -> None:
    """Refuse models that cannot read the same batch: text and images, or images of other (channels, height, width)."""
    inputs = [model.main_input_name for model in models]
    if inputs == ["pixel_values", "pixel_values"]:
        for index, model in enumerate(models):
            shape = images[index] or image_shape(synthetic_batch(model, batch=1)) or ()
            inputs[index] = f"images of {' x '.join(map(str, shape))}"
    if inputs[0] != inputs[1]:
        raise RequestError(f"two models must take the same kind of input to be compared, got {' and '.join(inputs)}")


def _format(folder: Path) -> str | None:
    """Return the export format of a folder or file; None for a checkpoint."""
    if find_gguf(folder) is not None:
        return "gguf"
    if contents(folder) is Contents.OPENVINO:
        return "openvino"
    return "onnx" if any((folder / name).is_file() for name in (ONNX_FILE, QUANTIZED_FILE)) else None


def _default_runtimes(folders: Sequence[Path]) -> tuple[str, ...]:
    """Return a tuple of the one runtime that is used by default, see `bench`."""
    formats = {_format(folder) for folder in folders}
    for format in ("gguf", "openvino", "onnx"):
        if format in formats:
            return (str(runtime_of(export_options(format))),)
    return ("torch",)


def _check_request(folders: Sequence[Path], runtimes: Sequence[str], dtypes: Sequence[str]) -> None:
    """Refuse, before anything is loaded, folders and dtypes that the runtimes cannot run."""
    for folder in folders:
        refuse_parts(folder)  # a vision-language model, which is exported as several graphs
    for runtime in runtimes:
        check_runtime(runtime)
    for folder in folders:
        format = _format(folder)
        if format is None:
            continue
        title, suited = FORMATS[format].title, runtime_of(export_options(format))
        for runtime in runtimes:
            if format not in RUNTIMES[runtime].formats():
                needed = "a checkpoint" if RUNTIMES[runtime].reads_models else FORMATS[RUNTIMES[runtime].format].title
                raise RequestError(f"runtime {runtime} needs {needed}, but {folder} is {title}; use {suited}")
        if dtypes:
            raise RequestError(f"a dtype can be chosen for checkpoints, but {folder} is {title} with its own")
        if format == "gguf" and not (_config_folder(folder) / "config.json").is_file():
            raise RequestError(
                "a GGUF file to time must have the config.json beside it that 'hies-export export --format gguf' "
                f"writes, but {folder} has none; export the checkpoint again"
            )
    check_dtypes(dtypes, runtimes)
    if any(_format(folder) is None for folder in folders):  # checkpoints, which are exported on the fly
        require_exporters({RUNTIMES[name].format for name in runtimes if not RUNTIMES[name].reads_models})


def _config_folder(path: Path) -> Path:
    """Return the folder that has the config of a model: of a file, the one that it lies in."""
    return path.parent if path.is_file() else path


def _loaded(folder: Path, runtime: str, dtype: str) -> Form:
    """Return a checkpoint as a form, loaded in a dtype, on the GPU if there is one."""
    model: Any = load(folder, dtype=getattr(torch, dtype))
    return Form(str(folder), runtime, model.to("cuda" if torch.cuda.is_available() else "cpu"), dtype)


def _exports(folder: Path, target: Path, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Form]:
    """Return a form for each pair of a runtime that reads exports and a dtype; pairs of other runtimes have none.

    It is the folder itself or, of a checkpoint, an export that is written into `target`.
    """
    pairs = [(runtime, dtype) for runtime, dtype in pairs if not RUNTIMES[runtime].reads_models]
    format, name = _format(folder), str(folder)
    if format is not None:
        # OpenVINO's 8-bit format says itself what else is computed in which dtype.
        return {pair: Form(name, pair[0], folder, None if format == "openvino" else pair[1]) for pair in pairs}
    if not pairs:
        return {}
    model = load(folder, dtype=torch.float32)
    needs_tokenizer = any(RUNTIMES[runtime].format == "gguf" for runtime, _ in pairs)
    tokenizer = load_processor(folder, task=TASKS["text-generation"]) if needs_tokenizer else None
    sample = synthetic_batch(model, batch=2, sequence=16, image=image_shape_at(folder, model))
    forms = Forms({name: model}, Exporter(ExportSection(), Given(sample, tokenizer)), target)
    return {pair: forms.form(name, *pair, best_for(*pair)) for pair in pairs}


def _flops(
    folders: Sequence[Path], skeletons: Sequence[PreTrainedModel], batches: Mapping[Shape, Mapping[str, Any]]
) -> dict[Shape, FlopCount]:
    """Count the FLOPs of both models; load them only if the forward pass depends on the values of the inputs."""
    try:
        check_shapes(skeletons[0], batches)
    except RequestError as error:
        # Without weights, torch raises a RuntimeError where a value is read; other errors hold for loaded models too.
        if not isinstance(error.__cause__, RuntimeError):
            raise
        skeletons = [load(_config_folder(folder), dtype=torch.float32) for folder in folders]
        check_shapes(skeletons[0], batches)
    return count_both_flops(skeletons[0], skeletons[1], batches)


@never_asking()
def _skeleton(folder: Path) -> PreTrainedModel:
    """Build a folder's model, without weights, to check inputs and count FLOPs; refuse a vision-language model."""
    source = _config_folder(folder)
    with refusing(f"a model must be built from its config, but that of {source} fails", remedy=AGAIN):
        model = empty_model(find_model_class(source), load_config(source)).eval()
    if is_vision_language(model):
        raise RequestError(f"bench times encoders and decoders, and {folder} is a vision-language model")
    return model
