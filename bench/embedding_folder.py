"""Load a folder with a slim embedding model in every way that it promises, and compare the vectors with torch's.

python bench/embedding_folder.py FOLDER [--env onnx=PYTHON] [--env openvino=PYTHON] [--env node=FOLDER]
    [--env torch=PYTHON] [--texts FILE]

The reference is the folder in sentence-transformers with torch, `trust_remote_code=True`. Environments:
  torch     sentence-transformers (default: this one)
  onnx      sentence-transformers 5.1 and optimum-onnx 0.1, which need transformers below 4.58
  openvino  sentence-transformers[openvino], which needs transformers below 5.6
  node      a folder with node_modules/@huggingface/transformers
ONNX Runtime alone and OpenVINO alone, each with `tokenizers`, run in the environment of this script. Prints a line for
each way: the largest cosine distance of the texts' vectors, and whether it is at most what is allowed. This is 1e-5,
and 0.05 for files in 8 bits. The exit code is 0 if all that ran are as near, else 1. What could not run says why.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from embeddings import Unavailable, Worker

TEXTS = [
    "does ethanol take more energy to make than it produces",
    "A man is playing a flute.",
    "The total amount of energy input into the process compared to the energy released by burning the fuel is known as "
    "the energy balance. " * 4,
    "naïve café, 東京, Ωμέγα, 100 %",
    "a",
]
NEAR, NEAR_INT8 = 1e-5, 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--texts", type=Path, help="a JSON list; by default five texts, one longer than the others")
    options = parser.parse_args()
    folder = options.folder.absolute()
    environments = {"torch": sys.executable, "ours": sys.executable} | dict(t.split("=", 1) for t in options.env)
    texts = json.loads(options.texts.read_text()) if options.texts else TEXTS
    all_near = True
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        (work / "texts.json").write_text(json.dumps(texts))
        reference = None
        print("| loaded by | cosine distance at most | allowed | |\n| --- | --- | --- | --- |")
        for name, (environment, load) in ways(folder, work).items():
            try:
                if environment not in environments:
                    raise Unavailable(f"no environment: --env {environment}=...")
                vectors = load(environments[environment])
            except Unavailable as error:
                if reference is None:
                    raise SystemExit(f"{name} must load {folder}, because it is the reference: {error}") from error
                print(f"| {name} | {error} | | not run |", flush=True)
                continue
            reference = vectors if reference is None else reference
            allowed = NEAR_INT8 if "8 bits" in name else NEAR
            distance = float((1 - cosine(reference, vectors)).max())
            all_near &= distance <= allowed
            print(f"| {name} | {distance:.1e} | {allowed:g} | {'as' if distance <= allowed else 'NOT as'} near |")
    return 0 if all_near else 1


def cosine(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the cosines of rows, in float64."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    found: np.ndarray = (one * other).sum(1) / lengths
    return found


Way = tuple[str, Callable[[str], np.ndarray]]


def ways(folder: Path, work: Path) -> dict[str, Way]:
    """Return the ways to load the folder: the environment of each, and what returns the vectors in it."""
    settings = folder / "sentence_bert_config.json"
    longest = json.loads(settings.read_text())["max_seq_length"] if settings.exists() else 256
    common = {"folder": str(folder), "model": str(folder), "max_length": longest}

    def python(environment: str, kind: str, **more: Any) -> Way:
        request = common | {"kind": kind, **more}
        return environment, partial(worker_vectors, request=request, work=work, ours=environment == "ours")

    def node(dtype: str) -> Way:
        return "node", partial(node_vectors, folder=folder, dtype=dtype, work=work)

    st = "sentence-transformers"
    graph, small = folder / "onnx" / "model.onnx", folder / "onnx" / "model_quantized.onnx"
    found = {
        "sentence-transformers, torch": python("torch", st, trust=True),
        "sentence-transformers, ONNX": python("onnx", st, backend="onnx", file="onnx/model.onnx", trust=True),
        "sentence-transformers, ONNX, 8 bits": python(
            "onnx", st, backend="onnx", file="onnx/model_quantized.onnx", trust=True
        ),
        "transformers.js, fp32": node("fp32"),
        "transformers.js, q8, 8 bits": node("q8"),
        "ONNX Runtime and tokenizers": python("ours", "onnxruntime", folder=str(graph)),
        "ONNX Runtime and tokenizers, 8 bits": python("ours", "onnxruntime", folder=str(small)),
        "OpenVINO, onnx/model.onnx": python("ours", "openvino", folder=str(graph), precision="f32"),
    }
    own = folder / "openvino" / "openvino_model.xml"
    if own.exists():
        file = "openvino/openvino_model.xml"
        found["sentence-transformers, OpenVINO"] = python(
            "openvino", st, backend="openvino", file=file, precision="f32", trust=True
        )
        found["OpenVINO, openvino/openvino_model.xml"] = python("ours", "openvino", folder=str(own), precision="f32")
    return found


def worker_vectors(python: str, *, request: dict[str, Any], work: Path, ours: bool) -> np.ndarray:
    """Return the vectors that a worker finds."""
    worker = Worker(python, request, work / "worker.log", ours=ours)
    try:
        worker.ask(do="encode", texts=str(work / "texts.json"), to=str(work / "vectors.npy"))
    finally:
        worker.stop()
    found: np.ndarray = np.load(work / "vectors.npy")
    return found


def node_vectors(packages: str, *, folder: Path, dtype: str, work: Path) -> np.ndarray:
    """Return the vectors that transformers.js finds in Node."""
    script = Path(__file__).with_name("embedding_worker.mjs")
    command = ["node", str(script), str(folder), dtype, str(work / "texts.json")]
    try:
        done = subprocess.run(command, cwd=packages, env=os.environ, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise Unavailable("node is not installed") from None
    except subprocess.CalledProcessError as error:
        said = [line for line in error.stderr.splitlines() if "Error" in line] or [error.stderr.strip()]
        raise Unavailable(said[0][:200]) from error
    return np.array(json.loads(done.stdout.splitlines()[-1]), dtype=np.float32)


if __name__ == "__main__":
    sys.exit(main())
