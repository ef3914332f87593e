"""Prune a LLaMA without training by several methods to the same FLOPs, over several seeds, and print a table.

python bench/real_llama.py MODEL TEXT_FOLDER [--shares 0.9 0.8 0.7 0.6] [--seeds 0 1 2] --out real-llama.jsonl
python bench/real_llama.py MODEL TEXT_FOLDER --seeds 0 --tasks arc_easy piqa --task-folder DATA --out tasks.jsonl
python bench/real_llama.py --small

TEXT_FOLDER has validation.txt.gz, on whose blocks units are scored and layers refitted, and test.txt.gz, whose blocks
judge. A seed draws the blocks of the first; those of the second are the same for all. A method is named
CRITERION+COMPENSATION:MODULES, as a sweep names these; `slicegpt` is one by itself. Criteria that weigh two terms by
alpha take 0.9. Shares are of the FLOPs of one row of --length tokens, the language-model head counted. A method whose
modules cannot reach a share has no cell there.

A seed's statistics, orders of removal and moments are computed once for all shares. Every cell is a line of --out as
soon as it is done: how many units went, what is left of the backbone's parameters, perplexity, the share of next tokens
that are the dense model's, seconds by kind of work, of which the first cell of a method has those of scoring, and the
most memory that was resident so far. A second run goes on where the first ended. As papers count, a row of 2,048
tokens: --length 2048 --rows 16 --refit 60 --judged 12.

--other-texts adds the perplexity of the test.txt.gz of other folders. To calibrate on several sources, give a
TEXT_FOLDER whose validation.txt.gz holds an equal part of each.

--tasks adds zero-shot accuracy on --documents of each task, drawn from TASK_FOLDER/TASK*/*.jsonl.gz. Choices are judged
by the sum of their log-likelihoods, as lm-eval's `acc`, and the last word of LAMBADA by whether it is the likeliest.
--small tries all of it on a tiny random model, in seconds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import resource
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import datasets
import tokenizers
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hies_export import PruningRecipe
from hies_export.data.batches import CHOICE_KEYS, by_length
from hies_export.evaluate.judge import Judge
from hies_export.evaluate.predict import predict
from hies_export.forms.machine import machine_facts
from hies_export.kinds import ATTENTION, MLP
from hies_export.pipeline.stages import cut_beside
from hies_export.recipe.sections import Columns
from hies_export.tasks import Predictions, TextGeneration
from hies_export.units.counts import count_both_parameters, flops_by_module
from hies_export.units.units import PrunableModule
from hies_lab.baselines.names import SLICED
from hies_lab.baselines.slicing import Bases, collect_bases, sliced
from hies_lab.sweep.cells import alpha_of, flops_ratio, load_shared, reachable_cells, refit_for, selection_of
from hies_lab.sweep.grid import Cell, SweepGrid

METHODS = (
    "compensated+least_squares:both",
    "compensated+sequential:both",
    "fisher+least_squares:both",
    "flap+bias:both",
    "wanda-sp+none:mlp",
    "martra+none:mlp",
    "hies+none:attention",
    "his+none:attention",
    "ad+none:attention",
    "llm-pruner-block+none:attention",
    "random+none:attention",
    SLICED,
)
# Criterion, compensation and modules.
NAME = re.compile(r"(.+)\+(.+):(.+)")
ALPHA = 0.9
# Task -> prompt, column of its answers, column of the right one. Without the last, the answer is one word.
TASKS = {
    "arc_easy": ("Question: {question}\nAnswer:", "choices", "label"),
    "piqa": ("Question: {goal}\nAnswer:", "choices", "label"),
    "hellaswag": ("{activity_label}: {ctx}", "endings", "label"),
    "lambada": ("{context}", "continuation", None),
}
CHOICES_AT_ONCE = 16
DENSE = "dense"
TEXT = "text"


class Bench:
    """The dense model of a seed, and what the cells of that seed share."""

    def __init__(self, options: argparse.Namespace, seed: int, methods: Sequence[str]):
        self._options, self._seed = options, seed
        parts = [part for method in methods if (part := NAME.fullmatch(method))]
        criteria, compensations, modules = (tuple(dict.fromkeys(part[i] for part in parts)) for i in (1, 2, 3))
        # Neither SliceGPT nor the dense model has a cell in a grid; SliceGPT reads the rows of a refit.
        if SLICED in methods or not parts:
            compensations = tuple(dict.fromkeys((*compensations, "bias")))
        grid = SweepGrid(
            criteria=criteria or ("random",),
            alphas=(ALPHA,),
            seeds=(seed,),
            calibration_sizes=(options.rows,),
            compensations=compensations,
            flops=tuple(options.shares),
            modules=modules or (ATTENTION,),
        )
        self._shared = load_shared(recipe_of(options), grid)
        self._clock = self._shared.base.clock
        self._cells = {(name_of(cell), cell.flops): cell for cell in reachable_cells(self._shared)}
        with self._clock("judge dense"):  # now, because SliceGPT changes the dense model while it is judged
            text = self._shared.base.judge(self._shared.base.rows.evaluation)
            self._judges = {TEXT: text, **self._of_other_texts(), **self._of_tasks()}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by kind of work since this was asked for last."""
        found, self._clock.seconds = self._clock.seconds, {}
        return {name: round(value, 2) for name, value in found.items()}

    def dense(self) -> dict[str, Any]:
        """Return the numbers of the dense model."""
        return self._numbers({name: judge.dense for name, judge in self._judges.items()})

    def cell(self, method: str, share: float) -> dict[str, Any] | None:
        """Return the numbers of a method at a share of the FLOPs; None if it does not reach that."""
        if method == SLICED:
            return self._slice(share)
        cell = self._cells.get((method, share))
        return None if cell is None else self._prune(cell)

    def _prune(self, cell: Cell) -> dict[str, Any]:
        base, shared = self._shared.base, self._shared
        with self._clock("choose"):
            selection = selection_of(shared, cell, alpha_of(shared, cell))
        with self._clock("cut"):
            slim = cut_beside(base, selection, refit_for(shared, cell))
        removed = {
            what: sum(len(kept.removed) for kept in selection.values() if kept.kind == kind)
            for what, kind in (("heads_removed", ATTENTION), ("neurons_removed", MLP))
        }
        backbone = count_both_parameters(base.model, slim).backbone
        sizes = {"flops": flops_ratio(shared, selection), "backbone": None if backbone is None else backbone.ratio}
        return {**sizes, **removed, **self._judged(slim)}

    def _slice(self, share: float) -> dict[str, Any] | None:
        """Return the numbers of SliceGPT's projections of attention, whose rotations are not counted."""
        base, modules = self._shared.base, self._attention
        counts = flops_by_module(base.model, next(iter(base.shapes.values())))
        projections = sum(counts[name] for module in modules for name in module.layers) / counts[""]
        if 1 - share >= projections:
            return None
        with self._clock("principal components"):
            bases = self._bases
        with sliced(base.model, modules, bases, share=(1 - share) / projections):
            return {"flops": share, "heads_removed": 0, "neurons_removed": 0, **self._judged(base.model)}

    @property
    def _attention(self) -> list[PrunableModule]:
        return [module for module in self._shared.base.modules if module.kind == ATTENTION]

    @cached_property
    def _bases(self) -> Bases:
        rows = self._shared.calibrated(self._seed).pruning.rows.refit
        return collect_bases(self._shared.base.model, rows, self._attention)

    def _judged(self, model: PreTrainedModel) -> dict[str, Any]:
        found = {}
        for name, judge in self._judges.items():
            with self._clock(f"judge {name}"):
                found[name] = predict(model, judge.batches)
        return self._numbers(found)

    def _numbers(self, predictions: dict[str, Predictions]) -> dict[str, Any]:
        qualities = {name: judge.of(predictions[name]) for name, judge in self._judges.items()}
        of_text = qualities.pop(TEXT)
        others = {name: next(iter(quality.metrics.values())) for name, quality in qualities.items()}
        return {"perplexity": of_text.metrics["perplexity"], "same": of_text.stability, **others}

    def _of_other_texts(self) -> dict[str, Judge]:
        """Return the judge of every other text."""
        base, options = self._shared.base, self._options
        columns = Columns(text="text", max_length=options.length)
        reading = TextGeneration(base.model.config).to_read(columns, base.processor)
        judges = {}
        for folder in options.other_texts:
            rows = reading.load(files={"test": folder / "test.txt.gz"}, split="test", samples=options.judged)
            batches = reading.read(rows, size=options.batch, use="judge")
            judges[folder.name] = base.judge(batches, metrics=("perplexity",))
        return judges

    def _of_tasks(self) -> dict[str, Judge]:
        """Return the judge of every task."""
        base, options = self._shared.base, self._options
        judges = {}
        for task in options.tasks:
            prompt, answer, label = TASKS[task]
            (file,) = sorted(options.task_folder.glob(f"{task}*/*.jsonl.gz"))
            rows = datasets.load_dataset("json", data_files=str(file), split="train").shuffle(seed=0)
            rows = rows.select(range(min(options.documents, len(rows))))
            if label is None:  # a single choice, because the reader ends other answers with the end of the text
                rows = rows.map(lambda row, answer=answer: {answer: [row[answer]], "label": 0})
            columns = Columns(prompt=prompt, answer=answer, label=label or "label")
            reading = TextGeneration(base.model.config).to_read(columns, base.processor)
            reading.check_rows(rows)
            found = reading.read(rows, size=CHOICES_AT_ONCE, use="judge")
            batches = by_length(found, config=base.model.config)
            metric = "choice_accuracy"
            if label is None:
                batches = [{key: x for key, x in batch.items() if key not in CHOICE_KEYS} for batch in batches]
                metric = "exact_match"
            judges[task] = base.judge(batches, metrics=(metric,))
        return judges


def name_of(cell: Cell) -> str:
    return f"{cell.criterion}+{cell.compensation}:{cell.modules}"


def recipe_of(options: argparse.Namespace) -> PruningRecipe:
    files = {split: str(options.text / f"{split}.txt.gz") for split in ("validation", "test")}
    return PruningRecipe.model_validate(
        {
            "model": str(options.model),
            "dtype": "float32",
            "task": "text-generation",
            "data": {"files": files, "text": "text", "max_length": options.length},
            "calibration": {"split": "validation", "samples": options.rows, "batch_size": options.batch},
            "evaluation": {"split": "test", "samples": options.judged, "batch_size": options.batch},
            "prune": {
                "modules": [ATTENTION, MLP],
                "criterion": "fisher",
                "budget": {"flops": min(options.shares)},
                "compensation": {"samples": options.refit},
            },
            "measure": {"runtimes": ["torch"], "shapes": [[1, options.length]]},
            "output": str(options.out.with_suffix(".run")),  # required, and not written
        }
    )


def a_method(text: str) -> str:
    if text != SLICED and not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be CRITERION+COMPENSATION:MODULES or {SLICED}, got {text!r}")
    return text


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what decides the numbers of a cell besides its method, share and seed."""
    found = {name: getattr(options, name) for name in ("rows", "refit", "judged", "length", "tasks")}
    texts = {"text": options.text.name, "other_texts": [folder.name for folder in options.other_texts]}
    return {"model": options.model.name, **texts, **found, "documents": options.documents if options.tasks else 0}


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the cells that the journal lacks, and return all that were asked for."""
    settings = settings_of(options)
    known = {key_of(line): line for line in read(options.out)}
    asked: list[str] = []
    for seed in options.seeds:
        wanted = [(DENSE, 1.0), *((method, share) for method in options.methods for share in options.shares)]
        lines = [{"method": method, "share": share, "seed": seed, "settings": settings} for method, share in wanted]
        asked += map(key_of, lines)
        missing = [line for line in lines if key_of(line) not in known]
        if not missing:
            continue
        bench = None  # frees what the last seed's holds
        bench = Bench(options, seed, [line["method"] for line in missing])
        for line in missing:
            found = bench.dense() if line["method"] == DENSE else bench.cell(line["method"], line["share"])
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
            done = {**line, "result": found, "seconds": bench.seconds, "peak_gb": round(peak, 2)}
            done["environment"] = machine_facts()
            known[key_of(line)] = done
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(done) + "\n")
            print(line["method"], line["share"], seed, found, done["seconds"], flush=True)
    return [known[key] for key in asked]


def read(journal: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a journal; one that was being written when its writer ended is left out."""
    if not journal.is_file():
        return
    text = journal.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    if complete != text:
        journal.write_text(complete, encoding="utf-8")
    yield from map(json.loads, complete.splitlines())


def key_of(line: dict[str, Any]) -> str:
    return json.dumps([line[name] for name in ("method", "share", "seed", "settings")])


def print_tables(lines: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print a Markdown table for each number: its mean over the seeds, and its range."""
    print(f"\nseeds {options.seeds}, {settings_of(options)}")
    texts = {folder.name: f"perplexity of {folder.name}" for folder in options.other_texts}
    shares = {"same": "same next token, %", **{task: f"{task}, %" for task in options.tasks}}
    for what, title in {"perplexity": "perplexity", **texts, **shares}.items():
        scale = 100 if what in shares else 1
        dense = cell_text([line for line in lines if line["method"] == DENSE], what, scale)
        print(f"\n{title}, dense {dense}\n")
        print(f"| method | {' | '.join(f'{share:g} of FLOPs' for share in options.shares)} |")
        print("| --- |" + " --- |" * len(options.shares))
        for method in options.methods:
            of_method = [line for line in lines if line["method"] == method]
            cells = [
                cell_text([line for line in of_method if line["share"] == share], what, scale)
                for share in options.shares
            ]
            print(f"| {method} | {' | '.join(cells)} |")


def cell_text(lines: Sequence[dict[str, Any]], what: str, scale: int) -> str:
    values = [scale * line["result"][what] for line in lines if line["result"] is not None]
    if not values:
        return ""
    found, low, high = (f"{value:,.1f}" for value in (mean(values), min(values), max(values)))
    return found if low == high else f"{found} ({low} to {high})"


def save_small(folder: Path) -> None:
    """Save a tiny random LLaMA with a tokenizer of made-up words, text of these, and a question for every task."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        vocab_size=99,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    numbers = {f"w{number}": number for number in range(99)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w2", eos_token="w2").save_pretrained(folder / "model")
    (folder / "other").mkdir()
    for split in ("validation", "test", "other/test"):
        drawn = torch.randint(3, 99, (40, 16)).tolist()
        with gzip.open(folder / f"{split}.txt.gz", "wt", encoding="utf-8") as file:
            file.writelines(" ".join(f"w{word}" for word in row) + "\n" for row in drawn)
    fields = ("question", "goal", "ctx", "activity_label", "context", "continuation")
    for task in TASKS:
        (folder / task).mkdir()
        with gzip.open(folder / task / "test.jsonl.gz", "wt", encoding="utf-8") as file:
            for drawn in torch.randint(3, 99, (10, 4)).tolist():
                words = [f"w{word}" for word in drawn]
                row = dict.fromkeys(fields, words[0]) | {"choices": words, "endings": words, "label": drawn[0] % 4}
                file.write(json.dumps(row) + "\n")


def try_small(options: argparse.Namespace) -> None:
    """Run everything on a tiny model, twice, and check what must hold."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_small(folder)
        small = {"rows": 6, "refit": 10, "judged": 4, "length": 16, "batch": 4, "documents": 8, "seeds": [0, 1]}
        small |= {"model": folder / "model", "text": folder, "other_texts": [folder / "other"]}
        small |= {"task_folder": folder, "tasks": [*TASKS]}
        vars(options).update(small, shares=[0.95, 0.8], out=folder / "cells.jsonl")
        lines = run(options)
        assert len(lines) == 2 * (1 + 2 * len(options.methods))
        for line in lines:
            found = line["result"]
            assert found is None or line["method"] == DENSE or found["flops"] <= line["share"] + 1e-9
        # What was done is not done again, and what a kill left of a line is.
        text = options.out.read_text()
        options.out.write_text(text[:-20])
        again = run(options)
        assert again[:-1] == lines[:-1]
        assert again[-1]["result"] == lines[-1]["result"]  # SliceGPT alone
        print_tables(lines, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="folder of the dense model")
    parser.add_argument("text", type=Path, nargs="?", help="folder with validation.txt.gz and test.txt.gz")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.9, 0.8, 0.7, 0.6], help="of the dense FLOPs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", type=a_method, nargs="+", default=[*METHODS], metavar="METHOD")
    parser.add_argument("--rows", type=int, default=64, help="blocks to score on")
    parser.add_argument("--refit", type=int, default=240, help="blocks to refit on")
    parser.add_argument("--judged", type=int, default=48, help="blocks to judge on")
    parser.add_argument("--length", type=int, default=512, help="tokens of a block")
    parser.add_argument("--batch", type=int, default=4, help="blocks at once")
    parser.add_argument("--other-texts", type=Path, nargs="+", default=[], help="folders whose test.txt.gz judges too")
    parser.add_argument("--tasks", nargs="+", default=[], choices=TASKS, help="zero-shot tasks")
    parser.add_argument("--task-folder", type=Path, help="folder with a folder for each task")
    parser.add_argument("--documents", type=int, default=200, help="of each task")
    parser.add_argument("--out", type=Path, default=Path("real-llama.jsonl"))
    parser.add_argument("--small", action="store_true", help="try everything on a tiny random model")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if options.small:
        try_small(options)
        return
    if options.text is None or (options.tasks and options.task_folder is None):
        parser.error("give MODEL and TEXT_FOLDER, and with --tasks also --task-folder")
    print_tables(run(options), options)


if __name__ == "__main__":
    main()
