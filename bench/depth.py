"""Cut a model in width, in depth (whole modules), and in both, to equal FLOPs and equal time, and print what is kept.

python bench/depth.py OUT minilm-stsb minilm-sst2 [--ratios 0.7 0.5] [--shape 1x16] [--steps costs models times]

Units are scored once, by `compensated`, and refitted by least squares. "width" keeps a head and a neuron in every
module, "depth" removes whole attention and feed-forward modules only, and "both" may do either (`min_heads: 0`,
`min_neurons: 0`). FLOPs are counted at 1 x 128; time is that of ONNX Runtime in float32 at `--shape`, predicted by cuts
that are timed first. The table has the times of one interleaved run, as ratios to the dense graph, with a control.
What a step has found is in OUT, so that the steps can be run one by one, those that time on an idle machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bits import RECIPES, Spoken
from forms import print_base, step_names, time_beside, time_cells

from hies_export.calibrate.moments import MomentStream
from hies_export.cli.arguments import read_overrides
from hies_export.errors import PlanError
from hies_export.evaluate.judge import Judge
from hies_export.forms.cost.bundles import flops_table
from hies_export.forms.cost.latency import latency_table
from hies_export.forms.form import Form
from hies_export.forms.measure.counts import count_flops
from hies_export.forms.onnx.export import export_onnx
from hies_export.kinds import ATTENTION, KINDS
from hies_export.model.copies import share_weights
from hies_export.pipeline.job import Job
from hies_export.pipeline.load_job import load_job
from hies_export.pipeline.recipe import PruningRecipe
from hies_export.score.compensated import score_compensated
from hies_export.select.constraints import Constraints
from hies_export.select.cost import CostTable
from hies_export.select.select import select_units
from hies_export.slim.cut import prune_units
from hies_export.slim.refit import refit
from hies_export.units.units import Selection

STEPS = ("costs", "models", "times")
SHAPES = ((1, 128), (8, 128))
SHAPE = "1x16"  # at which a budget of time is met
RUNTIME = "onnxruntime-cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("recipes", nargs="+", help="such as minilm-stsb, for recipes/minilm-stsb.yaml")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.7, 0.5], help="of the dense model's cost")
    parser.add_argument("--shape", default=SHAPE, help="at which a budget of time is met")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--set", dest="fields", action="append", default=[], help="as of hies-export run")
    options = parser.parse_args()
    for name in options.recipes:
        folder = options.out / name
        folder.mkdir(parents=True, exist_ok=True)
        recipe = recipe_of(name, options.fields, options.shape)
        resolved = load_job(recipe)
        if "costs" in options.steps:
            write_costs(recipe, resolved, folder)
        if "models" in options.steps:
            write_models(resolved, folder, options.ratios)
        if "times" in options.steps:
            print_times(resolved, folder, title=f"{name}, time at {options.shape}")


def recipe_of(name: str, overrides: Sequence[str], shape: str = SHAPE) -> PruningRecipe:
    """Return the recipe that gives model and rows; its budget says that cuts are timed at a shape."""
    batch, sequence = map(int, shape.split("x"))
    timed = {"ratio": 0.5, "runtime": RUNTIME, "batch": batch, "sequence": sequence}
    fields: dict[str, Any] = {
        "measure": {"runtimes": [RUNTIME], "shapes": [*map(list, SHAPES), [batch, sequence]], "repeats": 30},
        "prune": {
            "modules": list(KINDS),
            "criterion": "compensated",
            "budget": {"latency": timed},
            # The rows of SST-2 are phrases of few tokens.
            "compensation": {"method": "least_squares", "samples": 4096 if name == "minilm-sst2" else 1024},
        },
        "calibration.samples": 256,
        "evaluation.samples": None,
    }
    return PruningRecipe.from_yaml(RECIPES / f"{name}.yaml", overrides=fields | read_overrides(overrides))


def write_costs(recipe: PruningRecipe, resolved: Job, folder: Path) -> None:
    """Write what removals save of the FLOPs and of the time."""
    prepared = resolved
    flops = flops_table(prepared.model, prepared.modules, batch=prepared.shapes[SHAPES[0]])
    where = prepared.timed_on
    time = latency_table(prepared.model, prepared.modules, where, skippable=KINDS, progress=Spoken())
    for row in time.measured:
        print(f"{row['kind']}, {row['kept']:.4f} kept: {row['ratio']:.3f} of the time")
    (folder / "costs.json").write_text(json.dumps({"FLOPs": flops.saved, "time": time.saved}))


def write_models(resolved: Job, folder: Path, ratios: list[float]) -> None:
    """Choose, cut, refit and export a model for each budget and each way to cut; write what each keeps."""
    prepared = resolved
    model, modules, rows = prepared.model, prepared.modules, prepared.rows
    moments = MomentStream(model, modules, rows.compensation, progress=Spoken())
    scores = score_compensated(model, rows.calibration, modules, moments=moments, progress=Spoken())
    judge = resolved.judge(resolved.rows.evaluation)
    file = folder / "models.json"
    found = json.loads(file.read_text()) if file.is_file() else []
    if not found:
        dense = export_onnx(model, folder / "dense", batch=prepared.sample, overwrite=True).folder
        found = [{"name": "dense", "cells": [*cells_of(judge, dense), "", "1.000"]}]
    batch = prepared.shapes[SHAPES[0]]
    for what, saved in json.loads((folder / "costs.json").read_text()).items():
        table = CostTable(what, {name: tuple(row) for name, row in saved.items()})
        for ratio in ratios:
            for way, constraints in ways(resolved).items():
                name = f"{what} {ratio:g}, {way}"
                if name in [one["name"] for one in found]:
                    continue
                try:
                    kept = select_units(scores, modules, table=table, ratio=ratio, constraints=constraints)
                except PlanError as error:  # one way may reach what another does not
                    print(f"{name}: {error}", flush=True)
                    continue
                slim = prune_units(share_weights(model), kept, modules, inplace=True)
                refit(slim, kept, modules, moments)
                exported = export_onnx(slim, folder / name, batch=prepared.sample, overwrite=True).folder
                share = count_flops(slim, batch) / count_flops(model, batch)
                found.append({"name": name, "cells": [*cells_of(judge, exported), kept_cell(kept), f"{share:.3f}"]})
                file.write_text(json.dumps(found))
                print(found[-1], flush=True)


def ways(resolved: Job) -> dict[str, Constraints]:
    """Return the constraints of each way to cut a model; modules of a kind have the same size."""
    # `multiple_of` counts key/value heads where query heads share them.
    sizes = {module.kind: module.units // module.group_size for module in resolved.modules}
    free: dict[str, Any] = {"min_heads": 0, "min_neurons": 0}
    whole: dict[str, Any] = {"multiple_of": sizes[ATTENTION], "neurons_multiple_of": sizes["mlp"]}
    return {"width": Constraints(), "depth": Constraints(**free, **whole), "both": Constraints(**free)}


def cells_of(judge: Judge, source: Path) -> list[str]:
    """Return agreement with the dense model, and the metric, of an exported model."""
    judged = judge.of(Form("", RUNTIME, source).predict(judge.batches, judge.task))
    return [f"{100 * judged.stability:.1f} %", *(f"{value:.4f}" for value in judged.metrics.values())]


def kept_cell(kept: Selection) -> str:
    """Return how many units each module keeps, heads first."""
    of_kind = [[len(one.units) for one in kept.values() if one.kind == kind] for kind in KINDS]
    return "; ".join(" ".join(map(str, counts)) for counts in of_kind)


def print_times(resolved: Job, folder: Path, *, title: str) -> None:
    """Time all models in one interleaved run, and print the table."""
    prepared = resolved
    found = json.loads((folder / "models.json").read_text())
    forms = [Form(one["name"], RUNTIME, folder / one["name"]) for one in found]
    timed = time_beside(forms, prepared.shapes)
    print(f"\n## {title}\n")
    heads = ["", "same answers", *prepared.metrics, "heads; neurons kept", "FLOPs", *step_names(timed)]
    print(f"| {' | '.join(heads)} |\n|" + " --- |" * len(heads))
    for one, times in zip(found, time_cells(timed, len(found)), strict=True):
        print(f"| {' | '.join([one['name'], *one['cells'], *times])} |")
    print_base(timed, len(found))


if __name__ == "__main__":
    main()
