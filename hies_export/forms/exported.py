"""The files of a run: how the exported one predicts, and which one a form is."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..evaluate.judge import Judge
from .form import Form, Forms
from .formats import FORMATS, Export, runtime_of
from .judge import Judged
from .measure.counts import Count, Record, Size
from .runtimes.base import RUNTIMES
from .runtimes.ort import ONNX_FILE

# The folders of a cascade and of the slim checkpoint in that of a run.
CASCADE, SLIM = "onnx-cascade", "slim"


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
        format: A name in `FORMATS`, such as "onnx", "openvino" or "gguf".
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


def judge_exported(exported: Export, folder: Path, judge: Judge, forms: Sequence[Judged]) -> ExportedFile:
    """Return the exported file of a run with its quality on the evaluation rows; it is not run again if a form was."""
    metric, known, quantize = judge.metrics[0], [], exported.how.quantize
    if quantize is not None:
        # If nothing was cut, the last form in these bits is the dense one's.
        own = runtime_of(exported.how, quantize), quantize
        known = [(form.quality, form.stability) for form in forms if (form.runtime, form.bits) == own][-1:]
    elif exported.checked_on is not None:
        found = judge.of(Form("slim", exported.checked_on, exported.folder).predict(judge.batches, judge.task))
        known = [(found.metrics[metric], found.stability)]
    quality, stability = known[0] if known else (None, None)
    return ExportedFile(
        file=exported.file.relative_to(folder).as_posix(),
        format=exported.format,
        quantize=quantize,
        bytes=exported.bytes,
        quality=None if quality is None else Metric(metric, quality),
        stability=stability,
        layers=exported.facts.get("layers"),
        float_neurons=0 if quantize else None,
    )


def add_graphs(exports: Iterable[Export], folder: Path) -> None:
    """Put the graphs of a model into `onnx/` and `openvino/` of its checkpoint's folder, where tools look for them.

    Files on the same disk are linked, and take no space again.
    """
    for exported in exports:
        known, stems = FORMATS[exported.format], {Path(name).stem for name in exported.files}
        if known.hub_folder is None:
            continue
        (place := folder / known.hub_folder).mkdir(exist_ok=True)
        for part in sorted(path for path in exported.folder.iterdir() if path.stem in stems):
            # A graph finds weights in a file beside it by that file's own name.
            renamed = known.hub_names.get(str(exported.how.quantize)) if part.name == exported.file.name else None
            for name in renamed or (part.name,):
                _link(part, place / name)


def link_files(source: Path, target: Path) -> None:
    """Make a folder with the files of another one, as links where that is possible."""
    target.mkdir()
    for part in sorted(path for path in source.iterdir() if path.is_file()):
        _link(part, target / part.name)


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)


def keep_file(forms: Forms, form: Judged, folder: Path, *, same: bool) -> str | None:
    """Return the file of a form in the folder of a run, after moving its export there if it lies elsewhere.

    If both models are the `same`, the slim one's file is that of the dense one too. In torch, the file of the slim
    model is its checkpoint, and the dense one has none there.
    """
    if form.model == "cascade":
        return f"{CASCADE}/{ONNX_FILE}"
    if RUNTIMES[form.runtime].reads_models:
        return SLIM if same or form.model == "slim" else None
    export = forms.export("slim" if same else form.model, forms.read_by(form.runtime, form.bits))
    place = export.folder
    if place.parent != folder:
        place = place.rename(folder / f"{form.model}-{export.format}-{form.bits}")
    return (place.relative_to(folder) / export.file.relative_to(export.folder)).as_posix()
