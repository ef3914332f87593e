"""What must hold on one NVIDIA GPU (gpu_checks.py), then latency, memory and scoring cost of models of real shapes.

bench/gpu.sh [--out NAME] [--minutes 10] [--dry] [--only checks|latency]

BERT-base, ViT-large, a LLaMA of 1B width and LLaVA-1.5-7B, with random weights; 0, 30 and 50 % of the heads of every
layer removed (0 % is the dense model against itself). NAME.jsonl has a line for each check, each row and each thing
that was not measured: not installed, too large for the memory, or out of time. A failure stops nothing. NAME.json has
all rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from forms import time_beside
from gpu_checks import CHECKS
from models import (
    BERT_BASE,
    CLIP_LARGE,
    LLAMA_1B,
    LLAMA_7B,
    TINY,
    VIT_LARGE,
    Shape,
    bert,
    llama,
    llava,
    uniformly_pruned,
    vit,
)
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from hies_export import PrunableModule
from hies_export.calibrate.statistics import collect_statistics
from hies_export.checkpoint.folders import replace_file
from hies_export.errors import HiesError, root_cause
from hies_export.forms.form import Form, Forms
from hies_export.forms.formats import Exporter, Given, best_for
from hies_export.forms.machine import machine_facts
from hies_export.forms.measured import latency_rows
from hies_export.forms.runtimes.base import Runtime, check_runtime
from hies_export.forms.time import TimedRow
from hies_export.model.tokens import sequence_length, synthetic_batch
from hies_export.report.tables import Part, Table, latency_table, print_part
from hies_export.report.words import environment_text, latency_text
from hies_export.units.counts import count_both_flops

SHARES = (0.0, 0.3, 0.5)
# Work that began in time may go on for so long.
GRACE_SECONDS = 30


def plain(model: PreTrainedModel, batch: dict[str, Tensor], modules: tuple[PrunableModule, ...]) -> None:
    """Run forward, and backward to the input embeddings: what any gradient criterion pays."""
    embeddings = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_(True)
    inputs = {k: v for k, v in batch.items() if k != "input_ids"}
    options = {"use_cache": False} if model.can_generate() else {}
    torch.autograd.grad(model(inputs_embeds=embeddings, **inputs, **options).loss, embeddings)


def scoring(model: PreTrainedModel, batch: dict[str, Tensor], modules: tuple[PrunableModule, ...]) -> None:
    """Collect HIS and entropy of every head, in one such pass."""
    collect_statistics(model, [batch], modules)


class Training(Runtime):
    """A forward and backward pass, with or without the statistics of heads."""

    dtypes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, way: Callable[..., None], model: PreTrainedModel, modules: Any):
        self.way, self.model, self.modules, self.threads = way, model, modules, torch.get_num_threads()

    @property
    def provider(self) -> str:
        return self.model.device.type

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def prepare(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        return {name: tensor.to(self.model.device) for name, tensor in batch.items()}

    def run(self, feed: dict[str, Tensor]) -> None:
        self.way(self.model, feed, self.modules)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()

    def fetch(self, result: None) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, kw_only=True)
class TrainingForm(Form):
    """A model in memory that is run forward and backward."""

    way: Callable[..., None]
    modules: Any

    def load(self) -> Training:
        return Training(self.way, self.source, self.modules)


@dataclass
class Session:
    """The rows measured so far, written to a file after every piece of work, and the time that is left."""

    out: Path
    seconds: float
    device: str
    repeats: int
    console: Console
    started: float = field(default_factory=time.perf_counter)
    latency: list[dict[str, Any]] = field(default_factory=list)
    scoring: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def line(self, **values: Any) -> None:
        """Append a line to NAME.jsonl."""
        with self.out.with_suffix(".jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**values, "at": round(time.perf_counter() - self.started, 1)}, default=str) + "\n")

    def check(self, check: Callable[[str], dict[str, Any]]) -> None:
        """Run a check, and write down what it found."""

        def work() -> None:
            found = check(self.device)
            self.line(check=check.__name__, ok=not found.get("beyond"), found=found)
            for beyond in found.get("beyond", ()):
                self.console.print(f"        beyond its limit: {beyond}")

        self.attempt(f"check: {check.__name__}", work)

    def row(self, rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
        """Write down a row of a table."""
        rows.append(row)
        self.line(row=row)

    def attempt(self, what: str, work: Callable[[], None]) -> None:
        """Do a piece of work, or write down why it is missing."""
        missing = len(self.missing)
        try:
            self.check_time("before it began")
            self.console.print(f"{time.perf_counter() - self.started:5.0f} s  {what}")
            self.stop_after(GRACE_SECONDS)
            work()
        except (TimeoutError, HiesError) as error:
            self.missing.append(f"{what}: {error}")
        except torch.OutOfMemoryError:
            self.missing.append(f"{what}: it does not fit into the device's memory")
        except Exception as error:  # any, on a machine nobody has tried: the rows so far must not be lost
            self.missing.append(f"{what}: {root_cause(error)}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if len(self.missing) > missing:
            self.line(missing=self.missing[-1])
            self.console.print(f"        {self.missing[-1]}")
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        replace_file(self.out, json.dumps(self.values(), indent=1) + "\n")

    def check_time(self, when: str) -> None:
        """Raise TimeoutError if the time is over."""
        if time.perf_counter() - self.started > self.seconds:
            raise TimeoutError(f"the {self.seconds / 60:.3g} minutes were over {when}")

    def stop_after(self, grace: float) -> None:
        """Raise TimeoutError in whatever runs, `grace` seconds after the time is over."""

        def stop(*_: object) -> None:
            raise TimeoutError(f"it was stopped {grace:g} s after the {self.seconds / 60:.3g} minutes were over")

        signal.signal(signal.SIGALRM, stop)
        left = self.started + self.seconds + grace - time.perf_counter()
        # Again and again: libraries catch what is raised in them.
        signal.setitimer(signal.ITIMER_REAL, max(left, 0.1), 5)

    def values(self) -> dict[str, Any]:
        where = machine_facts()
        return {
            "title": f"Pruned models on {where['gpu'] or where['cpu']}",
            "tables": [
                {"title": "Latency", "names": ["dense", "slim"], "rows": self.latency},
                {
                    "title": "Scoring, beside a forward and backward pass alone",
                    "names": ["plain", "scoring"],
                    "rows": self.scoring,
                },
            ],
            "missing": self.missing,
            "environment": where,
            "seconds": time.perf_counter() - self.started,
        }

    def show(self) -> None:
        """Print all tables, and what was not measured."""
        found = self.values()
        self.console.print(found["title"], style="bold")
        for part in found["tables"]:
            if part["rows"]:
                models = [row["model"] for row in part["rows"]]
                rows = [TimedRow(**{k: v for k, v in row.items() if k != "model"}) for row in part["rows"]]
                names = tuple(part["names"])
                header, lines = latency_table(rows, names)
                table = Table(["", *header], [[model, *line] for model, line in zip(models, lines, strict=True)])
                print_part(Part(part["title"], table, (latency_text(rows, names),)), self.console)
        for sentence in found["missing"]:
            self.console.print(f"not measured: {sentence}", soft_wrap=True)
        self.console.print(environment_text(found["environment"]), style="dim")


def time_models(
    session: Session,
    shape: Shape,
    *,
    runtimes: Sequence[str],
    dtypes: Sequence[str],
    sizes: Sequence[tuple[int, int]],
    shares: Sequence[float] = SHARES,
) -> None:
    """Time every runtime, dtype and share of heads, at every (batch, tokens of text)."""
    for runtime in runtimes:
        for dtype in dtypes:
            work = partial(_time_shares, session, shape, runtime=runtime, dtype=dtype, sizes=sizes, shares=shares)
            session.attempt(f"{shape.name}, {runtime}, {dtype}", work)


def _time_shares(
    session: Session,
    shape: Shape,
    *,
    runtime: str,
    dtype: str,
    sizes: Sequence[tuple[int, int]],
    shares: Sequence[float],
) -> None:
    check_runtime(runtime)
    modules = shape.modules()
    dense = shape.build(device=session.device, dtype=getattr(torch, dtype))
    made = [shape.batch(dense, *size) for size in sizes]
    batches = {(len(next(iter(batch.values()))), sequence_length(dense, batch)): batch for batch in made}
    with tempfile.TemporaryDirectory() as folder:
        exporter = Exporter(best_for(runtime, dtype), Given(synthetic_batch(dense, batch=2, sequence=16)))
        forms = Forms({"dense": dense}, exporter, Path(folder))
        for share in shares:
            session.check_time(f"at {share:.0%} of the heads")
            slim = uniformly_pruned(dense, share, modules) if share else dense
            forms.add(name := f"{share:.0%}" if share else "dense", slim)
            both = [forms.form(one, runtime) for one in ("dense", name)]
            flops = count_both_flops(dense, slim, batches)
            for row in latency_rows(time_beside(both, batches, repeats=session.repeats), flops):
                session.row(session.latency, {"model": f"{shape.name} -{share:.0%}", **asdict(row)})


def time_scoring(session: Session, shape: Shape, *, dtype: str, size: tuple[int, int]) -> None:
    """Time collecting the statistics of the heads beside a forward and backward pass alone."""

    def work() -> None:
        modules = shape.modules()
        model = shape.build(device=session.device, dtype=getattr(torch, dtype))
        batch = shape.batch(model, *size)
        labels = batch["input_ids"] if model.can_generate() else torch.zeros(size[0], dtype=torch.int64)
        batch["attention_mask"][-1, : size[1] // 4] = 0  # a padded row, as real batches have
        forms = [TrainingForm(shape.name, "torch", model, way=way, modules=modules) for way in (plain, scoring)]
        timed = time_beside(forms, {size: {**batch, "labels": labels}}, repeats=session.repeats)
        (row,) = latency_rows(timed, {})
        session.row(session.scoring, {"model": shape.name, **asdict(row)})

    session.attempt(f"scoring {shape.name}, {dtype}", work)


def real(session: Session) -> None:
    """Measure models of real shapes, the cheapest and most wanted first."""
    base, large = bert("BERT-base", **BERT_BASE), vit("ViT-large", 224, **VIT_LARGE)
    billion = llama("LLaMA-1B", **LLAMA_1B)
    assistant = llava("LLaVA-1.5-7B", 336, text=LLAMA_7B, vision=CLIP_LARGE)
    cuda = ["onnxruntime-cuda"]
    text, half = [(1, 128), (8, 128), (8, 512)], ["float16", "bfloat16"]
    time_models(session, base, runtimes=["torch"], dtypes=["float32", *half], sizes=text)
    time_models(session, billion, runtimes=["torch"], dtypes=["bfloat16"], sizes=[(1, 512), (8, 512)])
    time_models(session, large, runtimes=["torch"], dtypes=half, sizes=[(1, 0), (32, 0)])
    time_scoring(session, base, dtype="float32", size=(32, 128))
    time_scoring(session, billion, dtype="bfloat16", size=(2, 2048))
    time_models(session, base, runtimes=cuda, dtypes=["float32", "float16"], sizes=text)
    time_models(session, assistant, runtimes=["torch"], dtypes=["bfloat16"], sizes=[(1, 64)])
    time_models(session, large, runtimes=cuda, dtypes=["float16"], sizes=[(1, 0), (32, 0)], shares=[0.5])
    time_models(session, billion, runtimes=cuda, dtypes=["float16"], sizes=[(1, 512)], shares=[0.5])
    time_models(session, base, runtimes=["torch-compile"], dtypes=["float16"], sizes=[(1, 128)], shares=[0.5])


def dry(session: Session) -> None:
    """Run the same code with tiny models on the CPU."""
    short = {"vocab_size": 100, "max_position_embeddings": 64}
    decoder = {**TINY, **short, "num_key_value_heads": 4}
    base, decodes = bert("tiny BERT", **TINY, **short), llama("tiny LLaMA", **decoder)
    time_models(session, base, runtimes=["torch"], dtypes=["float32", "bfloat16"], sizes=[(2, 12)])
    time_models(session, decodes, runtimes=["torch"], dtypes=["bfloat16"], sizes=[(2, 12)], shares=[0.5])
    image = vit("tiny ViT", 32, **TINY)
    time_models(session, image, runtimes=["torch"], dtypes=["float32"], sizes=[(2, 0)], shares=[0.5])
    assistant = llava("tiny LLaVA", 28, text=decoder, vision=TINY)
    time_models(session, assistant, runtimes=["torch"], dtypes=["float32"], sizes=[(1, 8)], shares=[0.5])
    time_scoring(session, base, dtype="float32", size=(2, 12))
    time_scoring(session, decodes, dtype="float32", size=(2, 12))
    both = ["onnxruntime-cpu", "onnxruntime-cuda"]
    time_models(session, base, runtimes=both, dtypes=["float32"], sizes=[(2, 12)], shares=[0.5])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="NAME", help="where to write, without ending (default: gpu)")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="nothing is begun after that, or goes on for long (default: 10)"
    )
    parser.add_argument("--only", choices=("checks", "latency"), help="only one part")
    parser.add_argument("--repeats", type=int, default=None, help="timed runs of each (default: 30, dry: 3)")
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU, to check the script")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        parser.error("an NVIDIA GPU that torch can use is needed, and there is none; --dry checks the script without")

    torch.manual_seed(0)
    if options.dry:
        torch.set_num_threads(1)  # on a busy machine threads wait for each other
    out = Path(options.out or ("gpu-dry" if options.dry else "gpu")).with_suffix(".json")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".jsonl").write_text("", encoding="utf-8")
    except OSError as error:
        parser.error(f"--out must name files that can be written, got {out}: {error.strerror}")
    session = Session(
        out=out,
        seconds=60 * options.minutes,
        device="cpu" if options.dry else "cuda",
        repeats=options.repeats or (3 if options.dry else 30),
        console=Console(highlight=False, markup=False, width=140),
    )
    for check in CHECKS if options.only != "latency" else ():
        session.check(check)
    if options.only != "checks":
        (dry if options.dry else real)(session)
    session.show()
    print(f"written to {out.with_suffix('.jsonl')} and {out}")


if __name__ == "__main__":
    main()
