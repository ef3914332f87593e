"""Write and read the settings of an export that sentence-transformers runs, see `hies_export.served`."""

from __future__ import annotations

from pathlib import Path

from ..files import Rule, Schema, read_json
from ..model.internals import sentence_options
from ..model.text_encoder import TextEncoder
from .beside import write_json
from .sentence import MODULES_FILE, OPTIONS_FILE

SERVED_FILE = "hies_served.json"
_CLASS = "hies_export.served.OnnxEncoder"
_RULE = Rule("the settings of a served model must be what hies_export wrote", "export the model again")


class Served(Schema):
    """The content of hies_served.json.

    Attributes:
        file: Name of the graph's file.
        dimension: Width of the embeddings.
        runtime: Name of the runtime, as for `load_runtime`.
        dtype: Dtype to compute in, if the runtime offers other ones than the graph's.
        threads: Threads of the CPU; None for as many as torch has.
    """

    file: str
    dimension: int
    runtime: str = "onnxruntime-cpu"
    dtype: str | None = None
    threads: int | None = None


def write_served(folder: Path, model: TextEncoder, *, file: str, runtime: str, dtype: str | None = None) -> None:
    """Make an export's folder, which has the graph and the tokenizer, a folder of sentence-transformers.

    Args:
        folder: The folder, to which modules.json, the module's settings, and the prompts are added.
        model: The model that was exported: how it reads texts and its dimension are written.
        file: Name of the graph's file in the folder.
        runtime: Name of the runtime that it is to run on, as for `load_runtime`.
        dtype: Dtype to compute in, if the runtime offers other ones than the graph's.
    """
    write_json(folder / MODULES_FILE, [{"idx": 0, "name": "0", "path": "", "type": _CLASS}])
    served = Served(file=file, dimension=model.dimension, runtime=runtime, dtype=dtype)
    write_json(folder / SERVED_FILE, served.model_dump())
    write_json(folder / OPTIONS_FILE, sentence_options(model.reader.given))
    model.reader.given[0].save_config(str(folder))


def read_served(folder: Path) -> Served:
    """Return the settings of a folder that `write_served` wrote."""
    found = Served.model_validate(read_json(folder / SERVED_FILE, Served, _RULE))
    # The file may come from elsewhere, and must name a file beside it.
    if found.file in ("", "..") or Path(found.file).name != found.file:
        raise _RULE.refused(f"{folder / SERVED_FILE} names {found.file}, which is not in its folder")
    return found
