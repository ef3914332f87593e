"""Fill one of the paper's tables beside its own numbers: python recipes/paper/table.py glue [--smoke] [-o DIR]

Every task has a recipe here; the numbers are in published.json, and a cell the paper does not give as a number stays
empty. Nothing is cut: heads are masked, as `hies-export sweep` does. `--smoke` runs the same on tiny random models and
a few rows, offline, to show that it works; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from smoke import smoke_overrides

from hies_export.pipeline.choose import choose
from hies_export.pipeline.load_recipe import load_recipe
from hies_export.pipeline.recipe import PruningRecipe
from hies_export.pipeline.stages import calibrate
from hies_export.slim.check import masked_units
from hies_lab.lm_eval import run_benchmarks
from hies_lab.sweep.grid import SweepGrid
from hies_lab.sweep.sweep import sweep

HERE = Path(__file__).parent
CRITERIA = {
    "glue": (
        "random",
        "ad",
        "his",
        "l2",
        "llm-pruner-channel",
        "llm-pruner-block",
        "slicegpt",
        "slicegpt-tuned",
        "hies",
    ),
    "llama": ("his", "hies"),
    "vit": ("his", "hies"),
    "llava": ("his", "hies"),
}
SPARSITIES = {
    "glue": (0.1, 0.3, 0.5),
    "llama": (0.1, 0.2, 0.3, 0.4, 0.5),
    "vit": (0.1, 0.2, 0.3),
    "llava": (0.1, 0.3, 0.5),
}
SEEDS = (0, 1, 2, 3, 4)


def by_sweep(recipe: PruningRecipe, table: str, folder: Path, *, seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    """Rows of criterion, sparsity, quality and stability in percent, by the recipe's own metric."""
    grid = SweepGrid(
        criteria=CRITERIA[table],
        sparsities=SPARSITIES[table],
        seeds=seeds,
        calibration_sizes=(recipe.calibration.samples,),
        alphas=(recipe.prune.alpha,),
    )
    return [
        {**row, "quality": 100 * row["quality"] if row["metric"] != "perplexity" else row["quality"]}
        | {"stability": 100 * row["stability"]}
        for row in sweep(recipe, grid, folder).rows
    ]


def by_benchmark(recipe: PruningRecipe, table: str, task: str, *, seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    """The same by lm-eval, on the masked model; of several metrics of a task the first."""
    rows = []
    for seed in seeds:
        for criterion in CRITERIA[table]:
            for sparsity in SPARSITIES[table]:
                fields = recipe.model_dump()
                fields["calibration"]["seed"] = seed
                fields["prune"] |= {"criterion": criterion, "budget": {"heads": sparsity}}
                asked = PruningRecipe(**fields)
                pruning, _ = load_recipe(asked)
                plan = choose(pruning, calibrate(pruning)).plan
                judged = {"samples": asked.evaluation.samples, "batch_size": asked.evaluation.batch_size}
                with masked_units(pruning.model, plan, pruning.modules):
                    found = run_benchmarks(pruning.model, pruning.processor, [task], **judged)
                metric, value = next(iter(found.items()))
                rows.append({"criterion": criterion, "sparsity": sparsity, "metric": metric, "quality": 100 * value})
    return rows


def rendered(what: str, table: str, found: dict[str, list[dict[str, Any]]], published: dict[str, Any]) -> str:
    """A Markdown table: per task and criterion, the paper's number beside the mean over seeds found here."""
    sparsities = SPARSITIES[table]
    lines = [
        "| task | metric here | criterion |" + "".join(f" {s:.0%} paper | {s:.0%} here |" for s in sparsities),
        "| --- | --- | --- |" + " ---: | ---: |" * len(sparsities),
    ]
    for task, rows in found.items():
        # Table 2 has one row for LLM-Pruner, whose mode is not said.
        paper = published[what].get(task, {})
        for criterion in dict.fromkeys([*CRITERIA[table], *paper]):
            cells = []
            for sparsity in sparsities:
                values = [
                    r[what] for r in rows if (r["criterion"], r["sparsity"]) == (criterion, sparsity) and what in r
                ]
                given = paper.get(criterion, {}).get(str(sparsity))
                cells.append("" if given is None else f"{given:.2f}")
                cells.append(f"{sum(values) / len(values):.2f}" if values else "")
            lines.append(f"| {task} | {rows[0]['metric']} | {criterion} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run every recipe of a table and write TABLE.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=CRITERIA)
    parser.add_argument("--smoke", action="store_true", help="tiny random models and a few rows")
    parser.add_argument("--tasks", help="some of the tasks, separated by commas; default: all")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/paper"))
    options = parser.parse_args()
    tasks = [path.stem.removeprefix(f"{options.table}-") for path in sorted(HERE.glob(f"{options.table}-*.yaml"))]
    asked = options.tasks.split(",") if options.tasks else tasks
    if unknown := [task for task in asked if task not in tasks]:
        parser.error(f"tasks must be among {', '.join(tasks)}, got {', '.join(unknown)}")
    published = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
    seeds = SEEDS[:1] if options.smoke else SEEDS
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        for task in asked:
            path = HERE / f"{options.table}-{task}.yaml"
            overrides = smoke_overrides(PruningRecipe.from_yaml(path), Path(temporary)) if options.smoke else {}
            recipe = PruningRecipe.from_yaml(path, overrides)
            if options.table == "llama" and not options.smoke:
                found[task] = by_benchmark(recipe, options.table, task, seeds=seeds)
            else:
                found[task] = by_sweep(recipe, options.table, options.output / f"{options.table}-{task}", seeds=seeds)
    given = published[options.table]
    parts = [f"# {options.table}" + (", smoke: tiny random models, no meaning" * options.smoke), ""]
    parts += [f"Paper: {published['source']}; {given['from']}. Means over {len(seeds)} seeds here.", ""]
    for what in ("quality", "stability"):
        parts += [f"## {what.capitalize()}, %", "", rendered(what, options.table, found, given), ""]
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / f"{options.table}.md"
    file.write_text("\n".join(parts), encoding="utf-8")
    print("\n".join(parts))
    print(f"written to {file}")


if __name__ == "__main__":
    main()
