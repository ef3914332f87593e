"""Prune models by their recipes, and print both models in float32 and in fewer bits side by side.

python bench/bits.py OUT stsb:0.7 stsb:0.6 [--seeds 3] [--other SPLIT=FILE] [--shapes bert-base llama]

Each run is `hies-export run recipes/minilm-NAME.yaml` with a budget of FLOPs and `export.quantize: int8`; one that OUT
has is not repeated. Every form runs all evaluation rows: in float32 and in 8 bits in ONNX Runtime, and in bfloat16 and
in 8 bits in OpenVINO, where that and NNCF are installed. Agreement is with the dense float32 model. Times are ratios to
the dense float32 graph in ONNX Runtime, all from one interleaved run of the first seed's models, with a control.
`--other` also predicts the rows of another source, of which neither calibration nor refit saw any, and says how many
predictions stay. `--shapes` also times models with random weights, cut like the first seed's model.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forms import SHAPES, bytes_of, print_base, print_times, time_beside, time_cells
from models import BERT_BASE, DEBERTA, LLAMA_SMALL, MPNET, Shape, bert, cut_like, llama
from transformers import PreTrainedModel

from hies_export import PruningPlan, load
from hies_export.checkpoint.sentence import is_sentence_transformer, load_sentence
from hies_export.cli.arguments import read_overrides
from hies_export.evaluate.judge import Judge
from hies_export.forms.form import Form
from hies_export.forms.formats import Given
from hies_export.forms.machine import machine_facts
from hies_export.forms.onnx.export import export_onnx
from hies_export.forms.onnx.quantize import quantize_onnx
from hies_export.forms.openvino.export import export_openvino, quantize_openvino
from hies_export.pipeline.delivery import Delivery
from hies_export.pipeline.load_recipe import load_recipe
from hies_export.pipeline.pruning import Pruning
from hies_export.pipeline.recipe import PruningRecipe
from hies_export.pipeline.run import run
from hies_export.recipe.sections import ExportSection
from hies_export.units.counts import count_both_flops, count_parameters

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SHAPED = {
    **{"bert-base": bert("BERT-base", **BERT_BASE), "llama": llama("LLaMA", **LLAMA_SMALL)},
    **{"deberta-v3": DEBERTA, "mpnet": MPNET},
}


class Spoken:
    """Says which stage a run is in."""

    def stage(self, name: str) -> None:
        print(f"  {name}", flush=True)

    def track(self, items: Sequence[Any], name: str) -> Sequence[Any]:
        return items


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("budgets", metavar="RECIPE:FLOPS", nargs="+", help="such as stsb:0.7")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", dest="fields", action="append", default=[], help="as of hies-export run")
    parser.add_argument("--other", metavar="SPLIT=FILE", help="rows of another source, with the recipe's columns")
    parser.add_argument("--shapes", nargs="*", choices=SHAPED, default=[], help="random weights to time as well")
    options = parser.parse_args()
    for budget in options.budgets:
        name, _, flops = budget.partition(":")
        recipes = [recipe_of(options, name, float(flops), seed) for seed in range(options.seeds)]
        for recipe in recipes:
            if not (recipe.output / "report.json").is_file():
                print(recipe.output, flush=True)
                run(recipe, progress=Spoken())
        print_forms(recipes, options.other, title=f"{name}, {flops} of the FLOPs, {len(recipes)} seeds")
        for shape in options.shapes:
            print_shape(SHAPED[shape], recipes[0].output / "plan.json")
    facts = machine_facts()
    print(", ".join(f"{key} {facts[key]}" for key in ("cpu", "threads", "torch", "onnxruntime") if facts.get(key)))


def recipe_of(options: argparse.Namespace, name: str, flops: float, seed: int) -> PruningRecipe:
    """Return the recipe of one run."""
    fields: dict[str, Any] = {
        # Timed below, all in one run.
        "measure": {"runtimes": [], "shapes": [list(shape) for shape in SHAPES], "repeats": 2},
        "export.quantize": "int8",
        "prune": {
            "modules": ["attention", "mlp"],
            "criterion": "auto",
            "budget": {"flops": flops},
            # The rows of SST-2 are phrases of few tokens.
            "compensation": {"method": "least_squares", "samples": 4096 if name == "sst2" else 1024},
        },
        "calibration.samples": 256,
        "evaluation.samples": None,
        "calibration.seed": seed,
        "output": str(options.out.resolve() / f"{name}-{flops:g}-{seed}"),
    }
    return PruningRecipe.from_yaml(RECIPES / f"minilm-{name}.yaml", overrides=fields | read_overrides(options.fields))


def print_forms(recipes: Sequence[PruningRecipe], other: str | None, *, title: str) -> None:
    """Print agreement (mean over seeds, with the lowest and highest) and time of every form."""
    prepared, delivery = load_recipe(recipes[0])
    judges = {"evaluation rows": prepared.judge(prepared.rows.evaluation)}
    if other:
        judges["other rows"] = judge_of_other(recipes[0], other)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        exported = export_onnx(prepared.model, folder / "dense", batch=prepared.sample)
        quantize_onnx(exported, folder / "dense-int8", batch=prepared.sample)
        dense = exported.folder
        # One form for each seed's model; of the dense model one.
        served: dict[str, list[Form]] = {}
        for what, sources in (("dense", [dense]), ("slim", [recipe.output / "onnx" for recipe in recipes])):
            served[f"{what} float32"] = [Form(what, "onnxruntime-cpu", source) for source in sources]
            served[f"{what} int8"] = [Form(what, "onnxruntime-cpu-int8", source) for source in sources]
            if find_spec("openvino") is not None:
                served[f"{what} bfloat16, OpenVINO"] = [
                    Form(what, "openvino", source, "bfloat16") for source in sources
                ]
            if find_spec("nncf") is not None:
                served[f"{what} int8, OpenVINO"] = [
                    Form(
                        what,
                        "openvino",
                        calibrated(prepared, delivery, model, folder / f"{what}-{number}-openvino"),
                        "int8",
                    )
                    for number, model in enumerate(
                        [prepared.model] if what == "dense" else [slim_of(recipe) for recipe in recipes]
                    )
                ]
        timed = time_beside([forms[0] for forms in served.values()], prepared.shapes)
        times = time_cells(timed)
        metrics = prepared.metrics
        print(f"\n## {title}\n")
        print(
            f"| | file | {' | '.join([*judges, *metrics])} | " + " | ".join(f"time {b} x {s}" for b, s in SHAPES) + " |"
        )
        print("| --- |" + " --- |" * (1 + len(judges) + len(metrics) + len(SHAPES)))
        for number, (name, forms) in enumerate(served.items()):
            found = {
                what: [judge.of(form.predict(judge.batches, judge.task)) for form in forms]
                for what, judge in judges.items()
            }
            cells = [
                name,
                f"{bytes_of(forms[0]) / 1e6:.1f} MB",
                *(spread([one.stability for one in of]) for of in found.values()),
            ]
            cells += [f"{np.mean([one.metrics[of] for one in found['evaluation rows']]):.4f}" for of in metrics]
            print(f"| {' | '.join([*cells, *times[number]])} |", flush=True)
    print_base(timed[0])


def slim_of(recipe: PruningRecipe) -> PreTrainedModel:
    """Load the slim model of a run, an embedding model with its pooling."""
    folder = recipe.output / "slim"
    return load_sentence(folder).model if is_sentence_transformer(folder) else load(folder)


def calibrated(prepared: Pruning, delivery: Delivery, model: PreTrainedModel, folder: Path) -> Path:
    """Export a model in 8 bits for OpenVINO, calibrated on the rows that the first seed's was refitted on."""
    rows = delivery.exporter.given.rows
    return export_openvino(model, folder, ExportSection(), Given(prepared.sample, rows=rows)).folder


def print_shape(shape: Shape, plan: Path) -> None:
    """Print times of a shape with random weights, dense and cut as a plan does, stretched over its layers."""
    model = shape.build(device="cpu", dtype=torch.float32)
    batches = {(batch, length): shape.batch(model, batch, length) for batch, length in SHAPES}
    slim = cut_like(model, PruningPlan.from_file(plan), batches[SHAPES[0]])
    flops = count_both_flops(model, slim, batches)[SHAPES[0]]
    with tempfile.TemporaryDirectory() as temporary:
        served: dict[str, Form] = {}
        for what, source in (("dense", model), ("slim", slim)):
            exported = export_onnx(source, Path(temporary) / what, batch=batches[SHAPES[1]])
            served[f"{what} float32"] = Form(what, "onnxruntime-cpu", exported.folder)
            served[f"{what} int8"] = Form(what, "onnxruntime-cpu-int8", exported.folder)
            if model.can_generate():
                place = Path(temporary) / f"{what}-int4"
                rows = [batches[SHAPES[1]]]  # to nearest, random weights differ too much
                fewer = quantize_onnx(exported, place, batch=batches[SHAPES[0]], quantize="int4", rows=rows)
                served[f"{what} int4"] = Form(what, "onnxruntime-cpu", fewer.folder)
            if find_spec("openvino") is not None:
                served[f"{what} bfloat16, OpenVINO"] = Form(what, "openvino", exported.folder, "bfloat16")
            if find_spec("nncf") is not None and not model.can_generate():
                fewer = quantize_openvino(exported, Path(temporary) / f"{what}-openvino", rows=[batches[SHAPES[1]]])
                served[f"{what} int8, OpenVINO"] = Form(what, "openvino", fewer.folder, "int8")
        timed = time_beside([*served.values()], batches)
    count = count_parameters(model) / 1e6
    print(f"\n## {shape.name}, {count:.1f} M parameters, random weights, {flops.ratio:.2f} of the FLOPs\n")
    print_times("", served, timed)


def spread(shares: Sequence[float]) -> str:
    """Return the mean of shares in percent, with the lowest and the highest."""
    low, high = min(shares), max(shares)
    between = f" ({100 * low:.1f} to {100 * high:.1f})" if high > low else ""
    return f"{100 * float(np.mean(shares)):.1f} %{between}"


def judge_of_other(recipe: PruningRecipe, rows: str) -> Judge:
    """Return the dense model's judge on rows of another source."""
    split, _, file = rows.partition("=")
    files = {**recipe.data.files, split: Path(file).resolve()}
    other = recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update={"files": files, "label": None}),
            "evaluation": recipe.evaluation.model_copy(update={"split": split, "metrics": ()}),
        }
    )
    resolved, _ = load_recipe(other)
    return resolved.judge(resolved.rows.evaluation)


if __name__ == "__main__":
    main()
