"""Run GGUF files in a stock llama.cpp on the CPU, through node-llama-cpp, which contains a prebuilt one.

llama.cpp runs in a process of its own, `llamacpp.mjs`, which also measures the times.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import torch

from ...errors import DataError, ExportError, MissingRuntimeError
from .base import Runtime, register_runtime

GGUF_FILE = "model.gguf"
# Environment variable: the folder whose node_modules has node-llama-cpp, by default the working directory or a parent.
FOLDER_VARIABLE = "HIES_NODE_LLAMA_CPP"
VERSION = "3.22"
_SCRIPT = Path(__file__).with_name("llamacpp.mjs")
# Numbers of file types in llama.cpp. Source: https://github.com/ggml-org/llama.cpp, include/llama.h, llama_ftype
_DTYPES = {0: "float32", 1: "float16", 2: "q4_0", 7: "q8_0", 32: "bfloat16"}


def is_installed() -> bool:
    """Return whether this machine has Node and node-llama-cpp."""
    return shutil.which("node") is not None and _package_folder() is not None


def installed_version() -> str | None:
    """Return the version of node-llama-cpp; None if it is not installed."""
    folder = _package_folder()
    return None if folder is None else str(json.loads((folder / "package.json").read_text("utf-8"))["version"])


def _package_folder() -> Path | None:
    """Return the folder of node-llama-cpp, looked for in parent folders too, as Node does; None if there is none."""
    start = Path(os.environ.get(FOLDER_VARIABLE) or Path.cwd()).resolve()
    places = (folder / "node_modules" / "node-llama-cpp" for folder in (start, *start.parents))
    return next((place for place in places if (place / "package.json").is_file()), None)


def find_gguf(source: str | Path) -> Path | None:
    """Return the GGUF file that a path names, itself or as the folder that has it; None if it names none."""
    path = Path(source)
    file = path / GGUF_FILE if path.is_dir() else path
    return file if file.suffix == ".gguf" and file.is_file() else None


@register_runtime("llamacpp")
class LlamaCppRuntime(Runtime):
    """A GGUF file in llama.cpp on the CPU, which computes the texts of a batch together.

    A timed pass over a prompt gives only the probabilities of the next token. `exact` computes attention in float32;
    llama.cpp's default is flash attention on a cache in float16. `release` is llama.cpp's repository and release.
    """

    format: ClassVar[str] = "gguf"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16", "q8_0", "q4_0")
    bits: ClassVar[tuple[str, ...]] = ("q8_0", "q4_0")
    loads: ClassVar[int] = 3
    decodes = True

    def __init__(self, source: str | Path, *, threads: int, exact: bool = False):
        self.require()
        file = find_gguf(source)
        if file is None:
            raise DataError(f"runtime {self.name!r} needs a GGUF file or a folder with {GGUF_FILE}, got {source}")
        _check_header(file)
        self.threads = threads
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        folder = os.environ.get(FOLDER_VARIABLE) or str(Path.cwd())
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process: Any = subprocess.Popen(["node", str(_SCRIPT), folder], text=True, encoding="utf-8", **pipes)
        self._finalizer = weakref.finalize(self, _stop, self._process, self._errors)
        model = self._ask("open", file=str(file.resolve()), threads=threads, exact=exact)
        self.release, self.architecture = str(model["release"]), str(model["architecture"])
        self._device, self._file_type = str(model["device"]), model.get("fileType")

    def close(self) -> None:
        """End the process, which otherwise ends when the object is garbage-collected."""
        self._finalizer()

    @classmethod
    def require(cls) -> None:
        """Raise MissingRuntimeError if Node or node-llama-cpp is not installed."""
        if is_installed():
            return
        if shutil.which("node") is None:
            problem, remedy = "Node (20 or newer) is not installed", "install it, and then run"
        else:
            folder = os.environ.get(FOLDER_VARIABLE) or "this folder"
            problem, remedy = f"there is no node_modules/node-llama-cpp in {folder}", "install it with"
        raise MissingRuntimeError(
            f"runtime {cls.name!r} runs llama.cpp by node-llama-cpp, and {problem}; {remedy}: npm i "
            f"--omit=optional --ignore-scripts node-llama-cpp@{VERSION} @node-llama-cpp/PLATFORM@{VERSION}, with a "
            f"PLATFORM such as linux-x64 or mac-arm64-metal, and start in that folder or name it in {FOLDER_VARIABLE}"
        )

    @property
    def provider(self) -> str:
        """The device that llama.cpp runs on."""
        return self._device

    @property
    def dtype(self) -> str:
        """The dtype that the file's matrices are stored in."""
        return _DTYPES.get(self._file_type, f"llama.cpp's file type {self._file_type}")

    def prepare_step(self, batch: Mapping[str, Any]) -> int:
        """Send the tokens of a batch, to run the last one of each text with the others in the cache."""
        return self.prepare(batch, step=True)

    def prepare(self, batch: Mapping[str, Any], *, step: bool = False) -> int:
        """Send the tokens of a batch, without padding, and return the number by which `run` names them."""
        rows = [row[mask].tolist() for row, mask in zip(batch["input_ids"], _real_tokens(batch), strict=True)]
        return int(self._ask("prepare", texts=rows, step=step))

    def run(self, feed: int) -> int:
        """Run the model once, and return the feed; `fetch` runs it again for the probabilities."""
        self._ask("run", feed=feed)
        return feed

    def time_ns(self, feed: int) -> int:
        """Run the model once, and return its time in nanoseconds, measured in its own process."""
        return int(self._ask("run", feed=feed)["nanoseconds"])

    def fetch(self, result: int) -> dict[str, np.ndarray]:
        """Return `probabilities` of the next token of each text, (batch, vocabulary)."""
        rows = self._ask("run", feed=result, probabilities=True)["probabilities"]
        return {"probabilities": np.stack([np.frombuffer(base64.b64decode(row), dtype="<f4") for row in rows])}

    def prediction(self, batch: Mapping[str, Any], names: Sequence[str] = ("logits",)) -> torch.Tensor:
        """Return the log-probabilities of the token after each one, (batch, tokens, vocabulary); zeros at padding."""
        # Node passes on every probability separately, so 500 tokens of a vocabulary of 32,000 take seconds.
        rows: list[torch.Tensor] = []
        for row, mask in zip(batch["input_ids"], _real_tokens(batch), strict=True):
            floats = bytearray(base64.b64decode(self._ask("follow", text=row[mask].tolist())))
            probabilities = torch.frombuffer(floats, dtype=torch.float32).reshape(int(mask.sum()), -1)
            rows.append(probabilities.new_zeros(len(row), probabilities.shape[-1]))
            # A probability that float32 rounds to 0 must not become an infinite loss.
            rows[-1][mask] = probabilities.clamp(min=torch.finfo(torch.float32).tiny).log()
        return torch.stack(rows)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text by llama.cpp's tokenizer, without special tokens around them."""
        return self._ask("tokenize", texts=list(texts))["tokens"]

    def _ask(self, method: str, **arguments: Any) -> Any:
        """Call a method of `llamacpp.mjs`, and return its result; an ExportError if llama.cpp refused or stopped."""
        try:
            self._process.stdin.write(json.dumps({"method": method, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise ExportError(f"llama.cpp must run the file, and stopped: {self._end_of_stderr()}; report the model")
        reply = json.loads(line)
        if "error" in reply:
            reason = " ".join([*str(reply["error"]).split(), self._end_of_stderr()])[:400]
            raise ExportError(f"llama.cpp must run the file, and refused: {reason}")
        return reply["result"]

    def _end_of_stderr(self) -> str:
        """Return the last 300 characters that the process printed as errors, on one line."""
        self._errors.seek(0)
        return " ".join(self._errors.read().decode(errors="replace").split())[-300:]


def _real_tokens(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return where a batch has tokens and no padding, (batch, tokens) bool on the CPU."""
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool().cpu()


def _check_header(file: Path) -> None:
    """Refuse, by a DataError, a file that is not GGUF of version 2 or 3: node-llama-cpp would hang on it."""
    with file.open("rb") as stream:
        if stream.read(8) not in (b"GGUF\2\0\0\0", b"GGUF\3\0\0\0"):
            raise DataError(f"a GGUF file must begin with its magic number and version 2 or 3, and {file} does not")


def _stop(process: Any, errors: IO[bytes]) -> None:
    """End the process by closing its input, or kill it if it has not ended after 5 seconds."""
    try:
        process.stdin.close()
        process.wait(timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        process.kill()
        process.wait()
    process.stdout.close()
    errors.close()
