"""The formats that a model is exported to, what an export is, and which export a runtime reads."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..checkpoint.folders import new_folder
from ..checkpoint.save import check_in_sentence_transformers
from ..checkpoint.sentence import write_served
from ..entry_points import FORMATS as KNOWN
from ..entry_points import Registry
from ..equal import OTHER_PROGRAM
from ..errors import RequestError
from ..model.text_encoder import TextEncoder
from ..model.tokens import synthetic_batch
from ..recipe.sections import ExportSection
from .runtimes.base import RUNTIMES
from .traces import Traces


@dataclass(frozen=True)
class Export:
    """A model in files, whose outputs were compared with the model's.

    Attributes:
        format: A name in `FORMATS`.
        folder: The folder, with the model, its config.json and the processor's files.
        file: What a runtime loads, such as `model.onnx`; of a vision-language model `decoder_model_merged.onnx`.
        files: Names of all files of the model but those of weights beside a graph; a vision-language model in ONNX also
            has `vision_encoder.onnx` and `embed_tokens.onnx`.
        bytes: Size of the model in bytes, weights included.
        how: The options that it was made by.
        max_abs: Largest absolute difference from what it was made of: the outputs of torch, or of the float32 graph for
            fewer bits, or next-token probabilities in llama.cpp. None if it could not be run here.
        checked_on: The runtime that it was compared on and that loads it; None if there is none.
        inputs, outputs: Names of the inputs and outputs of `file`; empty if it has none.
        facts: What else the format says. ONNX: `fused`, how often each of ONNX Runtime's own operators occurs. In fewer
            bits: `layers`, the number of linear layers by dtype, and on OpenVINO `float_neurons`. GGUF: `architecture`,
            `types` (number of tensors by the type that they are stored in) and `parity`. A cascade: its promise.
    """

    format: str
    folder: Path
    file: Path
    files: tuple[str, ...]
    bytes: int
    how: ExportSection
    max_abs: float | None = None
    checked_on: str | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def decodes(self) -> bool:
        """Whether it takes a key/value cache."""
        return any(name.startswith("past_key_values.") for name in self.inputs)


@dataclass(frozen=True)
class Given:
    """What every export of a run is made with.

    Attributes:
        sample: The batch that graphs are traced and compared on.
        processor: The tokenizer or image processor that is saved beside the model, or in its file.
        rows: Batches to round weights in 4 bits by (without any, to nearest), and to calibrate 8 bits on OpenVINO on.
        traces: The graphs that were traced so far, from which those of further cuts of a model are made.
    """

    sample: Mapping[str, Tensor]
    processor: Any = None
    rows: Sequence[Mapping[str, Tensor]] = ()
    traces: Traces = field(default_factory=Traces, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of files, under its name in `FORMATS`.

    Attributes:
        title: What messages call an export, with its article.
        require: Raises MissingRuntimeError, which says what to install, if a package is missing.
        check: Takes (model, how, given), and whether layers may keep different numbers of units (`uneven`); raises
            RequestError, before any work, if the model cannot be exported so.
        write: Takes (model, folder, how, given) and `overwrite`; keeps only what it has compared with the model.
        quantize: Takes (unquantised export, folder, how, given), and writes it in fewer bits; None if there are none.
        dtypes: The dtypes that weights can be stored in.
        hub_folder: The folder of a checkpoint in which tools look for it; None if they do not.
        hub_names: Bits -> the names under which tools look for a file in these bits, if not its own.
    """

    title: str
    require: Callable[[], Any]
    check: Callable[..., None]
    write: Callable[..., Export]
    quantize: Callable[[Export, Path, ExportSection, Given], Export] | None = None
    dtypes: tuple[str, ...] = ("float32",)
    hub_folder: str | None = None
    hub_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


FORMATS: Registry[Format] = KNOWN
"""Name -> format."""


@dataclass(frozen=True)
class Exporter:
    """Exports models with the same rows and processor, by the options of a run or by others."""

    options: ExportSection
    given: Given

    def export(self, model: PreTrainedModel, folder: Path, options: ExportSection) -> Export:
        """Export a model into a new folder, by options that may be others than those of the run."""
        return FORMATS[options.format].write(model, folder, options, self.given)

    def quantize(self, exported: Export, folder: Path, options: ExportSection) -> Export:
        """Quantise an export into a new folder; raises ExportError if no layer is large enough to gain."""
        quantize = FORMATS[options.format].quantize
        assert quantize is not None, f"{options.format} has no fewer bits, which recipes refuse"
        return quantize(exported, folder, options, self.given)


def export_options(
    format: str = "onnx", provider: str = "cpu", dtype: str = "float32", quantize: str | None = None
) -> ExportSection:
    """Return the options of an export without validating them as a recipe's; the format refuses those it cannot write.

    Raises RequestError for fewer bits on another provider than the CPU, or of another dtype than float32.
    """
    fields: dict[str, Any] = {"format": format, "provider": provider, "dtype": dtype, "quantize": quantize}
    options = ExportSection.model_construct(**fields)
    if refusal := options.bits_refusal:
        raise RequestError(refusal)
    return options


def best_for(runtime: str, dtype: str) -> ExportSection:
    """Return the options of the export that a runtime computes fastest in a dtype."""
    return options_for_runtime(export_options(provider=RUNTIMES[runtime].fused_for), runtime, dtype)


def options_for_runtime(options: ExportSection, runtime: str, dtype: str | None = None) -> ExportSection:
    """Return the options of the export that a runtime reads to compute in `dtype`, by default that of `options`.

    Weights are stored in float32 if the runtime or its format cannot hold the dtype, or if the runtime converts them.
    """
    cls = RUNTIMES[runtime]
    if dtype is not None and dtype in cls.calibrated:
        return export_options(cls.calibrated[dtype], quantize=dtype)
    stored = dtype or options.dtype
    if dtype in cls.hints or stored not in cls.dtypes or stored not in FORMATS[cls.format].dtypes:
        stored = "float32"
    return export_options(cls.format, options.provider, stored)


def runtime_of(how: ExportSection, bits: str | None = None) -> str | None:
    """Return the first runtime that reads an export, preferring those that compute in `bits`; None without one."""
    readers = [name for name, cls in RUNTIMES.items() if how.format in cls.formats() and cls.fused_for == how.provider]
    readers.sort(key=lambda name: bits not in RUNTIMES[name].bits)  # stable: those with the bits come first
    return readers[0] if readers else None


def export_formats(options: ExportSection, runtimes: Iterable[str], dtypes: Collection[str | None] = ()) -> list[str]:
    """Return the formats of all exports of a run: by its options, and for its runtimes, which compute in `dtypes`."""
    formats = [options.unquantized.format, options.format]
    for cls in (RUNTIMES[name] for name in runtimes if not RUNTIMES[name].reads_models):
        formats += [cls.format, *(format for dtype, format in cls.calibrated.items() if dtype in dtypes)]
    return list(dict.fromkeys(formats))


def require_exporters(formats: Iterable[str]) -> None:
    """Refuse, by a MissingRuntimeError, formats whose packages are not installed."""
    for name in formats:
        FORMATS[name].require()


def check_exports(formats: Iterable[str], model: PreTrainedModel, exporter: Exporter, *, uneven: bool) -> None:
    """Refuse, before anything is computed, a dense model or tokenizer that cannot be exported to one of the formats.

    `uneven` says whether layers may keep different numbers of units. Raises RequestError.
    """
    for name in formats:
        how = exporter.options if name == exporter.options.format else export_options(name)
        FORMATS[name].check(model, how, exporter.given, uneven=uneven)


def export_served(
    model: TextEncoder,
    folder: str | Path,
    how: ExportSection,
    *,
    processor: Any = None,
    rows: Sequence[Mapping[str, Tensor]] = (),
    overwrite: bool = False,
) -> Export:
    """Export an embedding model into a folder that `SentenceTransformer(folder, trust_remote_code=True)` loads.

    The graph gives `sentence_embedding`, (texts, dimension), and `last_hidden_state`, (texts, tokens, width). `rows`
    are those of `Given`. Raises RequestError for a format that no runtime reads.
    """
    if (runtime := runtime_of(how)) is None:
        raise RequestError(f"an embedding model needs a format that a runtime reads, got {how.format}; give another")
    longest = model.reader.max_length
    sample = synthetic_batch(model, batch=2, sequence=16 if longest is None else min(16, longest))
    with new_folder(folder, overwrite=overwrite) as staging:
        # An export writes a new folder of its own; sentence-transformers wants its files in the outer one.
        exported = FORMATS[how.format].write(model, staging / "graph", how, Given(sample, processor, rows))
        for file in exported.folder.iterdir():
            file.rename(staging / file.name)
        exported.folder.rmdir()
        write_served(staging, model, file=exported.file.name, runtime=runtime)
        if (how.provider, how.dtype, how.quantize) == ("cpu", "float32", None):
            check_in_sentence_transformers(model.wrapped(processor), staging, limit=OTHER_PROGRAM["float32"])
    folder = Path(folder)
    return replace(exported, folder=folder, file=folder / exported.file.name)


def add_graphs(exports: Iterable[Export], folder: Path) -> None:
    """Link the graphs of a model into `onnx/` and `openvino/` of its checkpoint's folder, where tools look for them."""
    for exported in exports:
        format = FORMATS[exported.format]
        if format.hub_folder is None:
            continue
        hub_folder = folder / format.hub_folder
        hub_folder.mkdir(exist_ok=True)
        stems = {Path(name).stem for name in exported.files}
        for file in exported.folder.iterdir():
            if file.stem not in stems:
                continue
            names: tuple[str, ...] = (file.name,)  # weights beside a graph keep theirs, by which the graph finds them
            if file.name == exported.file.name:
                names = format.hub_names.get(str(exported.how.quantize), names)
            for name in names:
                _link(file, hub_folder / name)


def link_files(source: Path, target: Path) -> None:
    """Create a folder with links to the files of another one, or copies where links are not possible."""
    target.mkdir()
    for file in source.iterdir():
        if file.is_file():
            _link(file, target / file.name)


def _link(source: Path, target: Path) -> None:
    """Link a file, or copy it where links are not possible."""
    try:
        target.hardlink_to(source)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)
