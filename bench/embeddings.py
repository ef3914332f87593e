"""Compare ways to run an embedding model, each in its own environment, on the same rows and in one interleaved run.

python bench/embeddings.py --model FOLDER --data DIR [--env onnx=PYTHON] [--env openvino=PYTHON]
    [--env model2vec=PYTHON] [--env torch=PYTHON] [--ours "slim int8=runs/x/onnx-int8" ...] [--work DIR] [--json FILE]

FOLDER is the dense model, a sentence-transformers folder. DIR has `boolq/validation.jsonl.gz` and `stsb/test.jsonl.gz`,
and for OpenVINO's own way to quantise `sst2/train.jsonl.gz`. Environments, each with what its rows need:
  torch      sentence-transformers; also the reference of all rows (default: this one)
  onnx       sentence-transformers and optimum-onnx, which need transformers below 4.58
  openvino   sentence-transformers[openvino], nncf and datasets, which need transformers below 5.6
  model2vec  model2vec[distill,quantization]
Rows of ours are NAME=PATH or NAME=PATH@HOW: a folder with an ONNX or OpenVINO file, or such a file, whose output is
`sentence_embedding`; or a sentence-transformers folder. HOW is onnxruntime, openvino, openvino-f32, openvino-bf16 or
sentence-transformers; by default what the file is for. They run in the environment of this script, which has
hies_export, and writes the dense model's own files first: float32 (all times are ratios to it) and int8.

The questions of one half of BoolQ are queries, its passages the documents; the other half is for calibration. Columns:
  old index   nDCG@10 with queries by the row's model and documents by the dense model in torch, and its share of dense
  top 1       queries whose nearest document is the dense model's, on that index
  re-embedded nDCG@10 with queries and documents by the row's model
  STS-B       Spearman's rho times 100 of the test pairs
  time        the median ratio of rounds to dense float32 on ONNX Runtime: forward passes at a shape (batch x tokens),
              and questions of BoolQ one at a time, tokenizer included
A row that cannot be had says why. The control is a second process of the base.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from embedding_data import Split, boolq_halves, read, stsb_pairs
from embedding_worker import QUIET, graph_file
from scipy.stats import spearmanr

WORKER = Path(__file__).with_name("embedding_worker.py")
SHAPES = ((1, 16), (1, 128), (8, 128))
RUNS = {(1, 16): 20, (1, 128): 5, (8, 128): 1}  # forward passes of a row in a round
QUERIES = 20  # of a row in a round
CALIBRATION = 300
REFERENCE, BASE, CONTROL = "sentence-transformers, torch", "dense float32, ours", "control"
Vectors = dict[str, np.ndarray]


class Worker:
    """A process that has a model loaded, and answers lines of JSON."""

    def __init__(self, python: str, request: dict[str, Any], log: Path, *, ours: bool):
        environment = os.environ | QUIET
        if not ours:
            environment.pop("PYTHONPATH", None)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, str(WORKER), json.dumps(request)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.about = self._answer().get("about", {})

    def ask(self, **asked: Any) -> dict[str, Any]:
        """Return the answer; raises Unavailable with the reason if there is none."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {"problem": f"ended with {self._process.wait()}"}
        if "problem" in found:
            raise Unavailable(found["problem"])
        return found


class Unavailable(Exception):
    """Why a row cannot be had."""


@dataclass
class Row:
    """A way to run a model, with what was found for it, or the reason why there is nothing."""

    name: str
    environment: str
    request: dict[str, Any]
    shares_space: bool = True  # whether its vectors are comparable with the dense model's
    worker: Worker | None = None
    problem: str | None = None
    found: dict[str, Any] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)  # seconds of every round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--ours", action="append", default=[], metavar="NAME=PATH[@HOW]")
    parser.add_argument("--only", nargs="+", default=[], help="other rows whose names contain one of these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=30, help="0 leaves the times out")
    parser.add_argument("--queries", type=int, help="the first so many queries, and their documents; default all")
    parser.add_argument("--work", type=Path, help="folder for what tools make of this model and seed; used again")
    parser.add_argument("--json", type=Path, help="also write what was found here")
    options = parser.parse_args()
    environments = {"torch": sys.executable, "ours": sys.executable}
    environments |= dict(text.split("=", 1) for text in options.env)
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        calibration, judged = boolq_halves(options.data, options.seed)
        judged = first_queries(judged, options.queries)
        rows = [row for row in all_rows(options, work, calibration) if wanted(row, options.only)]
        try:
            start(rows, environments, work)
            judge(rows, judged, stsb_pairs(options.data), work)
            time_rows([row for row in rows if row.problem is None], judged, options.rounds)
        finally:
            for row in rows:
                if row.worker:
                    row.worker.stop()
    print_rows(rows, judged)
    if options.json:
        options.json.write_text(json.dumps([as_json(row) for row in rows], indent=1) + "\n")


def wanted(row: Row, only: list[str]) -> bool:
    """Return whether a row is asked for; the reference, the base, its control and rows of ours always are."""
    return not only or row.environment == "ours" or row.name == REFERENCE or any(text in row.name for text in only)


def all_rows(options: argparse.Namespace, work: Path, calibration: Split) -> list[Row]:
    """Return the rows of the table; what is exported by us or calibrated on is written here."""
    model = str(options.model.absolute())
    settings = json.loads((options.model / "sentence_bert_config.json").read_text())
    common = {"folder": model, "model": model, "max_length": settings["max_seq_length"]}
    transformer = common | {"kind": "sentence-transformers"}

    def theirs(backend: str, part: str, **more: Any) -> dict[str, Any]:
        return transformer | {"backend": backend, "work": str(work / part), **more}

    own = calibration.queries[: CALIBRATION // 2] + calibration.documents[: CALIBRATION // 2]
    texts = {"own": own}
    if (options.data / "sst2" / "train.jsonl.gz").exists():
        texts["sst2"] = [row["sentence"] for row in read(options.data / "sst2" / "train.jsonl.gz")[:5000]]
    for name, sentences in texts.items():
        (work / "rows" / name).mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"sentence": sentence}) + "\n" for sentence in sentences]
        (work / "rows" / name / "train.jsonl").write_text("".join(lines))
    export_dense(options.model, work, calibration)
    rows = [
        Row(BASE, "ours", common | {"kind": "onnxruntime", "folder": str(work / "dense")}),
        Row(CONTROL, "ours", common | {"kind": "onnxruntime", "folder": str(work / "dense")}),
        Row("dense int8, ours", "ours", common | {"kind": "onnxruntime", "folder": str(work / "dense-int8")}),
        Row(REFERENCE, "torch", transformer),
        Row("sentence-transformers, ONNX", "onnx", theirs("onnx", "st-onnx")),
        Row("sentence-transformers, ONNX qint8", "onnx", theirs("onnx", "st-onnx", quantise=True)),
        Row("sentence-transformers, OpenVINO", "openvino", theirs("openvino", "st-openvino")),
    ]
    # Each makes a folder of its own, because the name of the quantised file is fixed.
    for name in ("sst2", "own"):
        request = theirs("openvino", f"st-openvino-{name}", quantise=True, rows=str(work / "rows" / name))
        said = "SST-2, its default" if name == "sst2" else "rows of the user's own"
        row = Row(f"sentence-transformers, OpenVINO qint8 ({said})", "openvino", request)
        row.problem = None if name in texts else "sst2/train.jsonl.gz is not in the data folder"
        rows.append(row)
    rows.append(Row("model2vec", "model2vec", common | {"kind": "model2vec", "work": str(work / "model2vec")}, False))
    return rows + [our_row(text, common) for text in options.ours]


def our_row(text: str, common: dict[str, Any]) -> Row:
    """Return the row of NAME=PATH[@HOW]."""
    name, _, path = text.partition("=")
    path, _, how = path.partition("@")
    folder = Path(path).absolute()
    if not how and (folder / "modules.json").exists():
        how = "sentence-transformers"
    if not how:
        how = "openvino" if folder.exists() and graph_file(folder).suffix == ".xml" else "onnxruntime"
    kind, _, precision = how.partition("-") if how.startswith("openvino") else (how, "", "")
    request = common | {"kind": kind, "folder": str(folder), "precision": precision or None, "trust": True}
    return Row(name, "ours", request)


def export_dense(model: Path, work: Path, calibration: Split) -> None:
    """Write the dense model in float32 and int8 for ONNX Runtime."""
    if (work / "dense-int8").exists():
        return
    from transformers import AutoTokenizer

    from hies_export import export_onnx, quantize_onnx
    from hies_export.checkpoint.sentence import load_sentence

    tokenizer = AutoTokenizer.from_pretrained(model)
    batch = tokenizer([calibration.documents[0], calibration.queries[0]], padding=True, return_tensors="pt")
    encoder = load_sentence(model).model.float().eval()
    exported = export_onnx(encoder, work / "dense", batch=batch, processor=tokenizer, overwrite=True)
    quantize_onnx(exported, work / "dense-int8", batch=batch)


def first_queries(judged: Split, count: int | None) -> Split:
    """Return the first queries alone, with the documents that answer them."""
    if count is None:
        return judged
    places = sorted(set(judged.right[:count]))
    right = [places.index(place) for place in judged.right[:count]]
    return Split(judged.queries[:count], [judged.documents[place] for place in places], right)


def start(rows: list[Row], environments: dict[str, str], work: Path) -> None:
    """Start the workers one after another, and have each load its model."""
    for number, row in enumerate(rows):
        if row.problem is not None:
            continue
        if row.environment not in environments:
            row.problem = f"no environment: --env {row.environment}=PYTHON"
            continue
        try:
            log = work / f"worker-{number}.log"
            row.worker = Worker(environments[row.environment], row.request, log, ours=row.environment == "ours")
            row.found |= row.worker.about
        except Unavailable as error:
            row.problem = str(error)
        print(f"{row.name}: {row.problem or 'loaded'}", file=sys.stderr, flush=True)
    needed = [row for row in rows if row.name in (REFERENCE, BASE, CONTROL) and row.problem]
    if needed:
        raise SystemExit("\n".join(f"{row.name} is what others are compared with: {row.problem}" for row in needed))


def judge(rows: list[Row], judged: Split, pairs: tuple[list[str], list[str], list[float]], work: Path) -> None:
    """Embed all texts by every row's model, and write what follows into its `found`."""
    texts = {"queries": judged.queries, "documents": judged.documents, "first": pairs[0], "second": pairs[1]}
    for name, some in texts.items():
        (work / f"{name}.json").write_text(json.dumps(some))
    dense: Vectors = {}
    # The reference first, because the others are compared with it.
    for row in sorted(rows, key=lambda row: row.name != REFERENCE):
        if row.worker is None or row.name == CONTROL:
            continue
        try:
            found = vectors_of(row.worker, list(texts), work)
        except Unavailable as error:
            row.problem = str(error)
            continue
        dense = dense or found
        row.found["reembedded"] = ndcg(found["queries"], found["documents"], judged.right)
        row.found["spearman"] = 100 * float(spearmanr((found["first"] * found["second"]).sum(1), pairs[2])[0])
        if row.shares_space:
            row.found["old_index"] = ndcg(found["queries"], dense["documents"], judged.right)
            nearest = (found["queries"] @ dense["documents"].T).argmax(1)
            row.found["top1"] = float((nearest == (dense["queries"] @ dense["documents"].T).argmax(1)).mean())
            row.found["cosine"] = float((found["queries"] * dense["queries"]).sum(1).mean())
        said = ", ".join(f"{key} {value:.4f}" for key, value in row.found.items() if isinstance(value, float))
        print(f"{row.name}: {said}", file=sys.stderr, flush=True)


def vectors_of(worker: Worker, names: list[str], work: Path) -> Vectors:
    """Return the vectors of the named texts."""
    for name in names:
        worker.ask(do="encode", texts=str(work / f"{name}.json"), to=str(work / f"{name}.npy"))
    return {name: np.load(work / f"{name}.npy") for name in names}


def ndcg(queries: np.ndarray, documents: np.ndarray, right: list[int]) -> float:
    """Return nDCG@10 with one relevant document for each query."""
    similar = queries @ documents.T
    rank = (similar > similar[np.arange(len(right)), right][:, None]).sum(1)
    return float(np.where(rank < 10, 1 / np.log2(rank + 2), 0).mean())


def time_rows(rows: list[Row], judged: Split, rounds: int) -> None:
    """Time all rows in turns; every second round goes backwards, so that a drift cancels."""
    for number in range(rounds):
        asked: dict[str, dict[str, Any]] = {
            f"{batch} x {sequence}": {"do": "time", "shape": [batch, sequence], "runs": RUNS[batch, sequence]}
            for batch, sequence in SHAPES
        }
        begin = number * QUERIES % max(1, len(judged.queries) - QUERIES)
        asked["queries"] = {"do": "queries", "texts": judged.queries[begin : begin + QUERIES]}
        for case, request in asked.items():
            for row in rows if number % 2 == 0 else reversed(rows):
                assert row.worker is not None
                seconds = row.worker.ask(**request)["seconds"]
                row.times.setdefault(case, []).append(statistics.median(np.atleast_1d(seconds).tolist()))


def ratio(row: Row, base: Row, case: str) -> float:
    """Return the median over rounds of a row's time to the base's."""
    return statistics.median(one / other for one, other in zip(row.times[case], base.times[case], strict=True))


def print_rows(rows: list[Row], judged: Split) -> None:
    """Print the table, and what the base's times and the versions are."""
    base = next(row for row in rows if row.name == BASE)
    dense = next(row for row in rows if row.name == REFERENCE).found["old_index"]
    cases = list(base.times)
    print(f"\n{len(judged.queries)} queries, {len(judged.documents)} documents\n")
    head = ["", "dtype", "MB", "old index", "top 1", "re-embedded", "STS-B", *(f"time {case}" for case in cases)]
    print(f"| {' | '.join(head)} |\n|" + " --- |" * len(head))
    for row in rows:
        found = row.found
        if row.problem is not None:
            print(f"| {row.name} | {row.problem} |" + " |" * (len(head) - 2))
            continue
        cells = [row.name, found["dtype"], f"{found['bytes'] / 1e6:.1f}"]
        old = f"{found['old_index']:.4f} ({100 * found['old_index'] / dense:.1f} %)" if "old_index" in found else ""
        top1 = f"{100 * found['top1']:.1f} %" if "top1" in found else ""
        judged_as = [old, top1, f"{found['reembedded']:.4f}", f"{found['spearman']:.2f}"] if "spearman" in found else []
        cells += judged_as or [""] * 4
        print(f"| {' | '.join([*cells, *(f'{ratio(row, base, case):.3f}' for case in cases)])} |")
    medians = (f"{case} {1000 * statistics.median(base.times[case]):.2f}" for case in cases)
    print(
        f"\ntime 1 in ms (queries: of {QUERIES}): {', '.join(medians)}; two threads, {len(base.times[cases[0]])} rounds"
    )
    for environment in dict.fromkeys(row.environment for row in rows):
        packages: dict[str, str] = {}
        for row in rows:
            packages |= row.found.get("packages", {}) if row.environment == environment else {}
        if packages:
            print(f"{environment}: {', '.join(f'{name} {number}' for name, number in packages.items())}")


def as_json(row: Row) -> dict[str, Any]:
    """Return a row's record."""
    return {"name": row.name, "problem": row.problem, **row.found, "seconds": row.times}


if __name__ == "__main__":
    main()
