"""Compare a run of `hies-export deploy` with what other tools make of the same dense model, on the same rows.

python bench/other_tools.py give RUN RECIPE GIVEN       writes what the other tools start from
python bench/other_tools.py judge RUN RECIPE GIVEN MADE  predicts, times and prints what they made

The recipe names model, rows and metric; of the run it reads the exports and the share of FLOPs. `scripts/try peers`
calls both, and the tools in between, each in an environment of its own (`bench/peers`). Every file predicts all
evaluation rows in this process. Agreement is with the dense float32 model in torch, with the lower end of its 95 %
interval. Times are ratios to the dense float32 graph in ONNX Runtime, all from one interleaved run with a control.
Needs OpenVINO.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forms import SHAPES, bytes_of, print_base, time_beside, time_cell, times_of

from hies_export.cli.arguments import read_overrides
from hies_export.evaluate.judge import Judge
from hies_export.forms.form import Form
from hies_export.forms.machine import machine_facts
from hies_export.forms.onnx.export import export_onnx
from hies_export.forms.onnx.quantize import quantize_onnx
from hies_export.forms.runtimes.base import load_runtime
from hies_export.pipeline.load_recipe import load_recipe
from hies_export.pipeline.pruning import Pruning
from hies_export.pipeline.recipe import PruningRecipe

ROWS = 100_000  # of the calibration split at most; each tool takes as many from the start as it does by default


@dataclass
class Row:
    """A file with what was found for it, or the reason why there is none."""

    name: str
    bits: str
    form: Form | None = None
    problem: str | None = None
    found: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("give", "judge"))
    parser.add_argument("run", type=Path, help="folder of a finished hies-export deploy")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("given", type=Path)
    parser.add_argument("made", type=Path, nargs="?", help="folder with a folder for every file of another tool")
    parser.add_argument("--set", dest="fields", action="append", default=[], help="as of hies-export run")
    parser.add_argument("--json", type=Path, help="also write what was found here")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    fields: dict[str, Any] = {
        "evaluation.samples": None,
        "calibration.samples": ROWS,
        "prune": {"budget": {"heads": 0.5}, "alpha": 0.5},  # nothing is pruned: no rows are held out or refitted on
        "measure": {"runtimes": [], "shapes": [list(shape) for shape in SHAPES]},
        **read_overrides(options.fields),
    }
    recipe = PruningRecipe.from_yaml(options.recipe, overrides=fields)
    resolved, _ = load_recipe(recipe)
    if options.step == "give":
        give(resolved, options.run, options.given)
        return
    judge = resolved.judge(resolved.rows.evaluation)
    rows = [*our_rows(options.run, options.given), *their_rows(options.made)]
    for row in rows:
        judge_row(row, judge)
    forms = [row.form for row in rows if row.form]
    timed = time_beside(forms, resolved.shapes, repeats=options.repeats)
    running = [row for row in rows if row.form]
    for row, times in zip(running, times_of(timed), strict=True):
        row.found["times"] = times
    print_rows(rows, judge)
    print_base(timed[0])
    facts = machine_facts()
    print(", ".join(f"{key} {facts[key]}" for key in ("cpu", "threads", "torch", "onnxruntime", "openvino")))
    if options.json:
        options.json.write_text(json.dumps([as_json(row) for row in rows], indent=1) + "\n")


def give(prepared: Pruning, run: Path, given: Path) -> None:
    """Write the dense checkpoint in float32, its exports, the training rows and the run's share of FLOPs."""
    given.mkdir(parents=True, exist_ok=True)
    prepared.model.save_pretrained(given / "checkpoint")
    prepared.processor.save_pretrained(given / "checkpoint")
    exported = export_onnx(prepared.model, given / "dense", batch=prepared.sample, overwrite=True)
    quantize_onnx(exported, given / "dense-int8", batch=prepared.sample, overwrite=True)
    batches = prepared.rows.score
    longest = max(batch["input_ids"].shape[1] for batch in batches)
    arrays = {"labels": torch.cat([batch["labels"] for batch in batches]).numpy()}
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        parts = [batch.get(name, torch.zeros_like(batch["input_ids"])) for batch in batches]
        padded = [torch.nn.functional.pad(part, (0, longest - part.shape[1])) for part in parts]
        arrays[name] = torch.cat(padded).numpy()
    np.savez(given / "rows.npz", **arrays)
    flops = json.loads((run / "report.json").read_text())["flops"]
    (given / "given.json").write_text(
        json.dumps({"flops": flops["slim"] / flops["dense"], "rows": len(arrays["labels"])})
    )


def our_rows(run: Path, given: Path) -> list[Row]:
    """Return the dense model's files and the run's, in every number of bits, and OpenVINO as it comes."""
    rows = []
    for what, folder in (("dense", given / "dense"), ("slim", run / "onnx")):
        fewer = folder.with_name(f"{folder.name}-int8")
        rows += [
            Row(what, "float32", Form(what, "onnxruntime-cpu", folder)),
            Row(what, "int8", Form(what, "onnxruntime-cpu", fewer)),
            Row(f"{what}, OpenVINO", "float32", Form(what, "openvino", folder, "float32")),
            Row(f"{what}, OpenVINO", "bfloat16", Form(what, "openvino", folder, "bfloat16")),
        ]
    chosen = load_runtime("openvino-default", given / "dense").dtype
    return [*rows, Row("dense, OpenVINO as it comes", chosen, Form("dense", "openvino-default", given / "dense"))]


def their_rows(made: Path) -> list[Row]:
    """Return what other tools made, or the reasons why they made nothing."""
    rows = []
    for path in sorted(made.glob("*/form.json")):
        folder, said = path.parent, json.loads(path.read_text())
        runtime = "openvino-default" if (folder / "model.xml").is_file() else "onnxruntime-cpu"
        form = None if "problem" in said else Form(said["title"], runtime, folder)
        rows.append(Row(said["title"], said["bits"], form, said.get("problem")))
    return rows


def judge_row(row: Row, judge: Judge) -> None:
    """Predict the evaluation rows by a file; one that cannot keeps the reason."""
    if row.form is None:
        return
    try:
        predictions = row.form.predict(judge.batches, judge.task)
        stability, low = judge.kept(predictions)
        quality = judge.of(predictions).metrics[judge.metrics[0]]
        row.found = {"bytes": bytes_of(row.form), "stability": stability, "low": low, "quality": quality}
    except Exception as error:  # of a runtime, of any class
        row.form, row.problem = None, f"{type(error).__name__}: {error}".splitlines()[0][:200]


def as_json(row: Row) -> dict[str, Any]:
    """Return a row's record; what was not found is null."""
    keys = ("bytes", "stability", "low", "quality", "times")
    found = {key: row.found.get(key) for key in keys}
    return {"name": row.name, "bits": row.bits, **found, "problem": row.problem}


def print_rows(rows: list[Row], judge: Judge) -> None:
    """Print the table."""
    metric = judge.metrics[0]
    shapes = " | ".join(f"time {batch} x {sequence}" for batch, sequence in SHAPES)
    print(f"\n| | bits | file | agreement, at least | {metric} | {shapes} |\n| --- |" + " --- |" * (4 + len(SHAPES)))
    for row in rows:
        if row.form is None:
            print(f"| {row.name} | {row.bits} | {row.problem} |" + " |" * (2 + len(SHAPES)))
            continue
        found = row.found
        kept = f"{100 * found['stability']:.1f} %, {100 * found['low']:.1f} %"
        cells = [
            row.name,
            row.bits,
            f"{found['bytes'] / 1e6:.1f} MB",
            kept,
            f"{found['quality']:.4f}",
            *map(time_cell, found["times"]),
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
