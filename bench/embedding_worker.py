"""Embed texts by one model in one environment, and time it, as another process asks.

python bench/embedding_worker.py '{"kind": "onnxruntime", "folder": "runs/x/onnx", "model": "all-MiniLM-L6-v2", ...}'

`bench/embeddings.py` and `bench/embedding_folder.py` start workers, each in the environment that its kind needs, and
speak with them in lines of JSON. The first line of a worker's output is {"about": ...}, or {"problem": "why not"}. Then
it answers, one line to a line:
  {"do": "encode", "texts": FILE, "to": FILE}   reads a JSON list, writes float32 vectors, (texts, width), as .npy
  {"do": "time", "shape": [8, 128], "runs": 5}  {"seconds": [...]} of forward passes, after an untimed one
  {"do": "queries", "texts": [...]}             {"seconds": total} of all texts, one at a time, tokenizer included
What is imported is numpy and what the kind needs. Every model has two threads, which do not spin while it waits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

THREADS = 2
BATCH = 16
# Set before any library starts its threads; embeddings.py does so too.
QUIET = {"OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
os.environ.update(QUIET | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"})

import numpy as np  # noqa: E402


class Encoder(ABC):
    """A model that is loaded."""

    files: list[Path]  # its weights
    packages: tuple[str, ...]
    dtype: str = "float32"

    @abstractmethod
    def encode(self, texts: list[str]) -> np.ndarray:
        """Return vectors, (texts, width)."""

    @abstractmethod
    def step(self, ids: np.ndarray) -> Callable[[], Any]:
        """Return a function that runs the model on token ids, (batch, sequence)."""

    def about(self) -> dict[str, Any]:
        """Return what the table says about it."""
        packages = {name: version(name) for name in self.packages}
        return {"bytes": sum(file.stat().st_size for file in self.files), "dtype": self.dtype, "packages": packages}


class SentenceTransformers(Encoder):
    """A folder in sentence-transformers, on one of its backends; `quantise` makes its own 8-bit file first.

    `precision` is that of OpenVINO; its own choice is bfloat16 where the processor has instructions for it.
    `work` is a folder for what it makes; without it, the model's own folder is loaded. `rows` is a folder with
    `train.jsonl`, a line {"sentence": ...} for each text that it may calibrate on.
    """

    def __init__(self, request: dict[str, Any]):
        import sentence_transformers
        import torch

        torch.set_num_threads(THREADS)
        self._backend = request.get("backend", "torch")
        folder, file = Path(request["folder"]), request.get("file")
        if request.get("work"):
            folder = Path(request["work"])
            file = self._made(request["folder"], folder, request.get("quantise", False), request.get("rows"))
        settings: dict[str, Any] = {"file_name": file} if file else {}
        if self._backend == "onnx":
            settings |= {"provider": "CPUExecutionProvider", "session_options": _session_options()}
        if self._backend == "openvino":
            settings["ov_config"] = {"INFERENCE_NUM_THREADS": THREADS, "PERFORMANCE_HINT": "LATENCY"}
            if request.get("precision"):
                settings["ov_config"]["INFERENCE_PRECISION_HINT"] = request["precision"]
        self._torch = torch
        self._model = sentence_transformers.SentenceTransformer(
            str(folder),
            device="cpu",
            trust_remote_code=bool(request.get("trust")),
            **({} if self._backend == "torch" else {"backend": self._backend, "model_kwargs": settings}),
        )
        # A module of another package, such as ours of `served/`, need not have it.
        loaded = getattr(self._model[0], "auto_model", None)
        if self._backend == "openvino":
            compiled = (
                loaded.request if hasattr(loaded.request, "get_property") else loaded.request.get_compiled_model()
            )
            self.dtype = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        elif self._backend == "torch" and hasattr(loaded, "dtype"):
            self.dtype = str(loaded.dtype).removeprefix("torch.")
        if (folder / "hies_served.json").exists():
            self.dtype = json.loads((folder / "hies_served.json").read_text())["dtype"] or "float32"
        self.files = [folder / file] if file else _weights(folder)
        self.files += [path.with_suffix(".bin") for path in self.files if path.suffix == ".xml"]
        quantised = any("quantized" in path.name or "qint8" in path.name for path in self.files)
        self.dtype = _bits(self.dtype, quantised=quantised)
        more = {"onnx": ("optimum-onnx", "onnxruntime"), "openvino": ("optimum-intel", "openvino")}
        self.packages = ("sentence-transformers", "transformers", "torch", *more.get(self._backend, ()))

    def _made(self, model: str, work: Path, quantise: bool, rows: str | None) -> str:
        """Export, and quantise if asked, as sentence-transformers' documentation says; return the file's name."""
        import sentence_transformers

        plain = {"onnx": "onnx/model.onnx", "openvino": "openvino/openvino_model.xml"}[self._backend]
        if not (work / plain).exists():
            loaded = sentence_transformers.SentenceTransformer(model, backend=self._backend, device="cpu")
            loaded.save_pretrained(str(work))
        if not quantise:
            return plain
        loaded = sentence_transformers.SentenceTransformer(str(work), backend=self._backend, device="cpu")
        if self._backend == "onnx":
            flags = Path("/proc/cpuinfo").read_text()
            instructions = "avx512_vnni" if "avx512_vnni" in flags else "avx2"
            file = f"onnx/model_qint8_{instructions}.onnx"
            if not (work / file).exists():
                sentence_transformers.export_dynamic_quantized_onnx_model(loaded, instructions, str(work))
            return next(path.relative_to(work).as_posix() for path in (work / "onnx").glob(f"*{instructions}.onnx"))
        file = "openvino/openvino_model_qint8_quantized.xml"
        if not (work / file).exists():
            given = {} if rows is None else {"dataset_name": rows, "dataset_config_name": "default"}
            given |= {} if rows is None else {"dataset_split": "train", "column_name": "sentence"}
            # By its defaults: 128 rows, padded to 384 tokens.
            sentence_transformers.export_static_quantized_openvino_model(loaded, None, str(work), **given)
        return file

    def encode(self, texts: list[str]) -> np.ndarray:
        found = self._model.encode(texts, batch_size=BATCH, show_progress_bar=False, convert_to_numpy=True)
        return np.asarray(found, dtype=np.float32)

    def step(self, ids: np.ndarray) -> Callable[[], Any]:
        batch = {name: self._torch.from_numpy(array) for name, array in _feed(ids).items()}
        if "token_type_ids" not in getattr(getattr(self._model, "tokenizer", None), "model_input_names", batch):
            del batch["token_type_ids"]

        def run() -> Any:
            with self._torch.inference_mode():
                return self._model(dict(batch))["sentence_embedding"]

        return run


class Graph(Encoder):
    """A file whose output is the embedding, with `tokenizers` alone."""

    inputs: list[str]

    def __init__(self, request: dict[str, Any]):
        import tokenizers

        self.file = graph_file(Path(request["folder"]))
        self.files = [path for path in (self.file, Path(f"{self.file}_data")) if path.exists()]
        self.files += [path for path in [self.file.with_suffix(".bin")] if path.exists()]
        folders = [self.file.parent, self.file.parent.parent, Path(request["model"])]
        folder = next(path for path in folders if (path / "tokenizer.json").exists())
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(int(request["max_length"]))
        names = json.loads((folder / "tokenizer_config.json").read_text())
        pad = names["pad_token"]
        pad = pad if isinstance(pad, str) else pad["content"]
        self._tokenizer.enable_padding(pad_id=self._tokenizer.token_to_id(pad), pad_token=pad)

    @abstractmethod
    def run(self, feed: dict[str, np.ndarray]) -> np.ndarray:
        """Return the embeddings of texts."""

    def encode(self, texts: list[str]) -> np.ndarray:
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=True) if len(texts) <= BATCH else None
        if encoded is not None:
            feed = {
                "input_ids": np.array([row.ids for row in encoded], dtype=np.int64),
                "attention_mask": np.array([row.attention_mask for row in encoded], dtype=np.int64),
                "token_type_ids": np.array([row.type_ids for row in encoded], dtype=np.int64),
            }
            return self.run({name: feed[name] for name in self.inputs})
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        parts = [
            self.encode([texts[number] for number in order[start : start + BATCH]])
            for start in range(0, len(order), BATCH)
        ]
        found = np.concatenate(parts)
        return found[np.argsort(order)]

    def step(self, ids: np.ndarray) -> Callable[[], Any]:
        feed = {name: array for name, array in _feed(ids).items() if name in self.inputs}
        return lambda: self.run(feed)


class OnnxRuntime(Graph):
    """An ONNX file in ONNX Runtime on the CPU."""

    def __init__(self, request: dict[str, Any]):
        import onnxruntime

        super().__init__(request)
        self._session = onnxruntime.InferenceSession(
            str(self.file), _session_options(), providers=["CPUExecutionProvider"]
        )
        self.inputs = [value.name for value in self._session.get_inputs()]
        self.dtype = _bits("float32", quantised="quantized" in self.file.name)
        self.packages = ("onnxruntime", "tokenizers")
        _check_outputs([value.name for value in self._session.get_outputs()], self.file)

    def run(self, feed: dict[str, np.ndarray]) -> np.ndarray:
        found: np.ndarray = self._session.run(["sentence_embedding"], feed)[0]
        return found


class OpenVino(Graph):
    """An ONNX file or OpenVINO's own in OpenVINO on the CPU; `precision` is f32, bf16, or None for its choice."""

    def __init__(self, request: dict[str, Any]):
        import openvino

        super().__init__(request)
        graph = openvino.Core().read_model(str(self.file))
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": THREADS, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
        if request.get("precision"):
            options["INFERENCE_PRECISION_HINT"] = request["precision"]
        compiled = openvino.compile_model(graph, "CPU", options)
        names = [name for value in compiled.outputs for name in value.get_names()]
        _check_outputs(names, self.file)
        self._request = compiled.create_infer_request()
        self.inputs = [value.get_any_name() for value in compiled.inputs]
        constants = (node for node in graph.get_ops() if node.get_type_name() == "Constant")
        small = any(node.get_element_type().get_type_name() in ("i8", "u8") for node in constants)
        self.dtype = _bits(compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name(), quantised=small)
        self.packages = ("openvino", "tokenizers")

    def run(self, feed: dict[str, np.ndarray]) -> np.ndarray:
        self._request.infer(feed)
        return np.array(self._request.get_tensor("sentence_embedding").data, dtype=np.float32)


class Model2Vec(Encoder):
    """Static embeddings that model2vec distils from the model by its defaults."""

    def __init__(self, request: dict[str, Any]):
        from model2vec import StaticModel
        from model2vec.distill import distill

        work = Path(request["work"])
        if not work.exists():
            distill(model_name=request["folder"]).save_pretrained(str(work))
        self._model = StaticModel.from_pretrained(str(work))
        self.files, self.packages = [work / "model.safetensors"], ("model2vec",)
        self.dtype = str(self._model.embedding.dtype)

    def encode(self, texts: list[str]) -> np.ndarray:
        found = self._model.encode(texts, max_length=None).astype(np.float32)
        return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)

    def step(self, ids: np.ndarray) -> Callable[[], Any]:
        # It takes texts only, so its tokenizer is timed too.
        texts = [self._model.tokenizer.decode(row.tolist()) for row in ids]
        return lambda: self._model.encode(texts)


KINDS = {
    "sentence-transformers": SentenceTransformers,
    "onnxruntime": OnnxRuntime,
    "openvino": OpenVino,
    "model2vec": Model2Vec,
}


def graph_file(folder: Path) -> Path:
    """Return the file itself, or a folder's OpenVINO or ONNX file."""
    if folder.is_file():
        return folder
    names = ("openvino_model.xml", "model.xml", "model_quantized.onnx", "model.onnx")
    found = [folder / name for name in names if (folder / name).exists()]
    if not found:
        raise FileNotFoundError(f"{folder} must have one of {', '.join(names)}")
    return found[0]


def _weights(folder: Path) -> list[Path]:
    graphs = [*folder.glob("**/*.onnx"), *folder.glob("**/*.onnx_data"), *folder.glob("**/*.xml")]
    return sorted(folder.glob("*.safetensors")) or sorted(graphs)


def _bits(precision: str, *, quantised: bool) -> str:
    """Return what a model computes in; of a quantised one, with what it computes the rest in."""
    name = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(precision, precision)
    return name if not quantised else "int8" if name == "float32" else f"int8, {name}"


def _check_outputs(names: list[str], file: Path) -> None:
    if "sentence_embedding" not in names:
        raise ValueError(f"{file} must have the output sentence_embedding, got {', '.join(names)}")


def _session_options() -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _feed(ids: np.ndarray) -> dict[str, np.ndarray]:
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def token_ids(shape: list[int]) -> np.ndarray:
    """Return random token ids, (batch, sequence), the same for every worker; every vocabulary must have 20,000."""
    return np.random.default_rng(0).integers(1000, 20_000, shape).astype(np.int64)


def answer(encoder: Encoder, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a line."""
    if asked["do"] == "encode":
        np.save(asked["to"], encoder.encode(json.loads(Path(asked["texts"]).read_text())))
        return {}
    if asked["do"] == "queries":
        encoder.encode(asked["texts"][:1])
        began = time.perf_counter()
        for text in asked["texts"]:
            encoder.encode([text])
        return {"seconds": time.perf_counter() - began}
    run = encoder.step(token_ids(asked["shape"]))
    run()
    seconds = []
    for _ in range(asked["runs"]):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds}


def main() -> None:
    """Answer lines until there are no more."""
    # What libraries print goes to standard error.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    request = json.loads(sys.argv[1])
    try:
        encoder = KINDS[request["kind"]](request)
        out.write(json.dumps({"about": encoder.about()}) + "\n")
    except Exception as error:  # of any library, of any class
        sys.stderr.write(f"{error!r}\n")
        lines = str(error).strip().splitlines() or [""]
        out.write(json.dumps({"problem": f"{type(error).__name__}: {lines[0]}"[:300]}) + "\n")
        return
    for line in sys.stdin:
        try:
            out.write(json.dumps(answer(encoder, json.loads(line))) + "\n")
        except Exception as error:
            sys.stderr.write(f"{error!r}\n")
            out.write(json.dumps({"problem": f"{type(error).__name__}: {error}"[:300]}) + "\n")


if __name__ == "__main__":
    main()
