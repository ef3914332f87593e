"""The files of a run: how the exported one predicts, and which one a form is."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..evaluate.judge import Judge
from .exports import Exported
from .form import Form, Forms
from .gguf.export import GgufExport
from .judge import Judged
from .measure.counts import Count, Size
from .measure.record import Record
from .onnx.export import OnnxExport
from .openvino.export import OpenVinoExport
from .runtimes.base import RUNTIMES, Format
from .runtimes.ort import ONNX_FILE, OnnxRuntime

# The folder of a cascade in that of a run.
CASCADE = "onnx-cascade"


@dataclass(frozen=True, eq=False)
class Metric(Record):
    """A metric by name, and its value."""

    metric: str
    value: float


@dataclass(frozen=True, eq=False)
class ExportedFile(Record):
    """The slim model's export, run on the evaluation rows as it will be deployed.

    Attributes:
        file: Where it is in the folder of the run.
        format: "onnx", "openvino" or "gguf".
        quantize: "int8" if its linear layers are in 8 bits.
        bytes: Size of graph and weights.
        quality: The first metric; None if no runtime here gives the file's logits (GGUF, models in several graphs).
        stability: Share of predictions that equal the dense model's; None with `quality`.
        layers: Number of linear layers by dtype, if some are in 8 bits.
        float_neurons: Number of neurons that are computed in float32 inside quantised layers. It is 0: with a scale
            for each token, an outlier takes no range from other tokens.
    """

    file: str
    format: str
    quantize: str | None
    bytes: Size
    quality: Metric | None
    stability: float | None
    layers: Mapping[str, Count] | None
    float_neurons: Count | None


def judge_exported(exported: Exported, folder: Path, judge: Judge, forms: Sequence[Judged]) -> ExportedFile:
    """Return the exported file of a run with its quality on the evaluation rows; it is not run again if a form was."""
    quantize = None if isinstance(exported, GgufExport) else exported.quantize
    metric, known = judge.metrics[0], []
    if quantize is not None:
        # If nothing was cut, the last form in these bits is the dense one's.
        runs = [form for form in forms if form.bits == quantize]
        own = [form for form in runs if (form.runtime == "openvino") == isinstance(exported, OpenVinoExport)]
        known = [(form.quality, form.stability) for form in own][-1:]
    elif (runtime := _runtime_of(exported)) is not None:
        found = judge.of(Form("slim", runtime, exported.folder).predict(judge.batches, judge.task))
        known = [(found.metrics[metric], found.stability)]
    quality, stability = known[0] if known else (None, None)
    return ExportedFile(
        file=exported.file.relative_to(folder).as_posix(),
        format=_format(exported),
        quantize=quantize,
        bytes=exported.bytes,
        quality=None if quality is None else Metric(metric, quality),
        stability=stability,
        layers=None if isinstance(exported, GgufExport) or not quantize else exported.layers,
        float_neurons=0 if quantize else None,
    )


# The file of a graph in fewer bits -> its names on the Hub: those of transformers.js, and of sentence-transformers.
_HUB_NAMES = {"int8": ("model_quantized.onnx", "model_qint8_avx512_vnni.onnx"), "int4": ("model_q4.onnx",)}


def add_graphs(exports: Iterable[Exported], folder: Path) -> None:
    """Put the graphs of a model into `onnx/` and `openvino/` of its checkpoint's folder, where tools look for them.

    Files on the same disk are linked, and take no space again.
    """
    for exported in exports:
        if isinstance(exported, OnnxExport):
            (folder / "onnx").mkdir(exist_ok=True)
            for part in sorted(exported.folder.glob("*.onnx*")):
                # A graph finds weights in a file beside it by that file's own name.
                renamed = exported.quantize is not None and part.suffix == ".onnx"
                for name in _HUB_NAMES[str(exported.quantize)] if renamed else (part.name,):
                    _link(part, folder / "onnx" / name)
        elif isinstance(exported, OpenVinoExport):
            (folder / "openvino").mkdir(exist_ok=True)
            for part in sorted(exported.folder.glob(f"{exported.file.stem}.*")):
                _link(part, folder / "openvino" / part.name)


def link_files(source: Path, target: Path) -> None:
    """Make a folder with the files of another one, as links where that is possible."""
    target.mkdir()
    for part in sorted(path for path in source.iterdir() if path.is_file()):
        _link(part, target / part.name)


def _format(exported: Exported) -> Format:
    """Return the format of an export."""
    return "gguf" if isinstance(exported, GgufExport) else "onnx" if isinstance(exported, OnnxExport) else "openvino"


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)


def _runtime_of(exported: Exported) -> str | None:
    """Return the runtime on which an export was compared with torch; None if it was not, or has several graphs."""
    if isinstance(exported, GgufExport):
        return None if exported.parity is None else "llamacpp"
    if isinstance(exported, OpenVinoExport):
        return exported.runtime
    if len(exported.files) > 1:
        return None
    known = {name: runtime.requested for name, runtime in RUNTIMES.items() if issubclass(runtime, OnnxRuntime)}
    return next((name for name, provider in known.items() if provider == exported.checked_on), None)


def keep_file(forms: Forms, form: Judged, folder: Path, *, same: bool) -> str:
    """Return the file of a form in the folder of a run, after moving its export there if it lies elsewhere.

    If both models are the `same`, the slim one's file is that of the dense one too.
    """
    if form.model == "cascade":
        return f"{CASCADE}/{ONNX_FILE}"
    export = forms.export("slim" if same else form.model, forms.read_by(form.runtime, form.bits))
    place = export.folder
    if place.parent != folder:
        place = place.rename(folder / f"{form.model}-{_format(export)}-{form.bits}")
    return (place.relative_to(folder) / export.file.relative_to(export.folder)).as_posix()
