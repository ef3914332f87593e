"""Prune models by their recipes, and print both models in float32 and in fewer bits side by side, and what others make.

python bench/bits.py OUT stsb:0.7 stsb:0.6 [--seeds 3] [--other SPLIT=FILE] [--shapes bert-base llama]

Each run is `hies-export run recipes/minilm-NAME.yaml` with a budget of FLOPs and `export.quantize: int8`; one that OUT
has is not repeated. Every form runs all evaluation rows: in float32 and in 8 bits in ONNX Runtime, in bfloat16 in
OpenVINO where that is installed, and of other tools by their defaults ONNX Runtime's optimiser and quantiser and, where
it is installed, NNCF. Agreement is with the dense float32 model. Times are ratios to the dense float32 graph in ONNX
Runtime, all from one interleaved run of the first seed's models, with a control. `--other` also predicts the rows of
another source, of which neither calibration nor refit saw any, and says how many predictions stay. `--shapes` also
times models with random weights, cut like the first seed's model.
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
from models import LLAMA_SMALL, WIDTHS, Shape, cut_like, llama

from hies_export import PruningPlan
from hies_export.evaluate.judge import Judge
from hies_export.measure.compare import Served, Step, compare_forms
from hies_export.measure.counts import count_both_flops, count_parameters
from hies_export.measure.latency import LatencyComparison
from hies_export.measure.machine import machine_facts
from hies_export.measure.timing import Timing
from hies_export.onnx.export import export_onnx
from hies_export.onnx.quantize import quantize_onnx
from hies_export.pipeline.resolve import resolve
from hies_export.pipeline.run import run
from hies_export.pipeline.serving import predict_served
from hies_export.recipe import PruningRecipe
from hies_export.runtimes.base import register_runtime
from hies_export.runtimes.openvino import OpenVinoRuntime

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SHAPES = ((1, 128), (8, 128))
SHAPED = {"bert-base": WIDTHS["bert-base"], "llama": llama("LLaMA", **LLAMA_SMALL)}
CALIBRATION = 300  # rows, NNCF's default


@register_runtime("openvino-ir")
class OpenVinoFile(OpenVinoRuntime):
    """A model in OpenVINO's own format, which NNCF writes."""

    def __init__(self, source: str | Path, *, threads: int):
        import openvino

        self._model = openvino.Core().compile_model(
            str(Path(source) / "model.xml"),
            "CPU",
            {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"},
        )
        self.threads = int(self._model.get_property("INFERENCE_NUM_THREADS"))
        self.inputs = tuple(value.any_name for value in self._model.inputs)
        self.outputs, self._cache_sizes = ("logits",), {}


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
    asked = dict(field.split("=", 1) for field in options.fields)
    return PruningRecipe.from_yaml(RECIPES / f"minilm-{name}.yaml", overrides=fields | asked)


def print_forms(recipes: Sequence[PruningRecipe], other: str | None, *, title: str) -> None:
    """Print agreement (mean over seeds, with the lowest and highest) and time of every form."""
    resolved = resolve(recipes[0])
    prepared = resolved.prepared
    judges = {"evaluation rows": Judge.on(prepared.model, resolved.evaluation, **vars(prepared.judged))}
    if other:
        judges["other rows"] = judge_of_other(recipes[0], other)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        exported = export_onnx(prepared.model, folder / "dense", batch=prepared.sample)
        quantize_onnx(exported, folder / "dense-int8", batch=prepared.sample)
        dense = exported.folder
        # One form for each seed's model; of the dense model one.
        served: dict[str, list[Served]] = {}
        for what, sources in (("dense", [dense]), ("slim", [recipe.output / "onnx" for recipe in recipes])):
            served[f"{what} float32"] = [Served("onnxruntime-cpu", source) for source in sources]
            served[f"{what} int8"] = [Served("onnxruntime-cpu-int8", source) for source in sources]
            if find_spec("openvino") is not None:
                served[f"{what} bfloat16, OpenVINO"] = [Served("openvino", source, "bfloat16") for source in sources]
        for make in (fused_by_ort, dynamic_by_ort, static_by_nncf):
            try:
                name, form = make(prepared.model, dense, prepared.rows.calibration, folder)
                served[name] = [form]
            except Exception as error:  # another tool's, of any class
                print(f"{make.__name__}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
        timed = compare_forms([forms[0] for forms in served.values()], prepared.measured, timing=Timing(repeats=30))
        times = time_cells(timed, len(served))
        metric = prepared.judged.metrics[0]
        print(f"\n## {title}\n")
        print(
            f"| | file | {' | '.join(judges)} | {metric} | " + " | ".join(f"time {b} x {s}" for b, s in SHAPES) + " |"
        )
        print("| --- |" + " --- |" * (2 + len(judges) + len(SHAPES)))
        for number, (name, forms) in enumerate(served.items()):
            found = {
                what: [judge.of(predict_served(form, judge.batches)) for form in forms]
                for what, judge in judges.items()
            }
            cells = [name, size_of(forms[0]), *(spread([one.stability for one in of]) for of in found.values())]
            cells.append(f"{np.mean([one.metrics[metric] for one in found['evaluation rows']]):.4f}")
            print(f"| {' | '.join([*cells, *times[number]])} |", flush=True)
    print_base(timed)


def print_shape(shape: Shape, plan: Path) -> None:
    """Print times of a shape with random weights, dense and cut as a plan does, stretched over its layers."""
    model = shape.build(device="cpu", dtype=torch.float32)
    batches = {(batch, length): shape.batch(model, batch, length) for batch, length in SHAPES}
    slim = cut_like(model, PruningPlan.from_file(plan), batches[SHAPES[0]])
    flops = count_both_flops(model, slim, batches)[SHAPES[0]]
    with tempfile.TemporaryDirectory() as temporary:
        served: dict[str, Served] = {}
        for what, source in (("dense", model), ("slim", slim)):
            exported = export_onnx(source, Path(temporary) / what, batch=batches[SHAPES[1]])
            served[f"{what} float32"] = Served("onnxruntime-cpu", exported.folder)
            served[f"{what} int8"] = Served("onnxruntime-cpu-int8", exported.folder)
            if model.can_generate():
                place = Path(temporary) / f"{what}-int4"
                fewer = quantize_onnx(exported, place, batch=batches[SHAPES[0]], quantize="int4")
                served[f"{what} int4"] = Served("onnxruntime-cpu", fewer.folder)
            if find_spec("openvino") is not None:
                served[f"{what} bfloat16, OpenVINO"] = Served("openvino", exported.folder, "bfloat16")
        timed = compare_forms([*served.values()], batches, timing=Timing(repeats=30))
    count = count_parameters(model) / 1e6
    print(f"\n## {shape.name}, {count:.1f} M parameters, random weights, {flops.ratio:.2f} of the FLOPs\n")
    steps = [f"{phase} {b} x {s}" for (b, s), phase in timed]
    print(f"| | {' | '.join(steps)} |\n| --- |" + " --- |" * len(steps))
    for name, times in zip(served, time_cells(timed, len(served)), strict=True):
        print(f"| {' | '.join([name, *times])} |")
    print_base(timed)


def time_cells(timed: dict[Step, list[LatencyComparison]], count: int) -> list[list[str]]:
    """Return the times of every form by shape, as ratios to the first form; of that one the control's."""
    rows: list[list[str]] = []
    for number in range(count):
        rows.append([])
        for comparisons in timed.values():
            one = comparisons[max(0, number - 1)]
            ratio = one.ratio if number else one.control
            rows[-1].append(f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]{'*' * one.noisy}")
    return rows


def print_base(timed: dict[Step, list[LatencyComparison]]) -> None:
    """Print the time of the dense float32 form."""
    for ((batch, sequence), phase), (first, *_) in timed.items():
        print(f"dense float32, {phase} {batch} x {sequence}: {first.dense.p50_ms:.2f} ms, {first.threads} threads")
    print("The first row's times are those of a second copy, the control; * is a noisy one.")


def size_of(form: Served) -> str:
    """Return the size of the largest file that is loaded, in MB; in 8 bits that of the written form beside it."""
    folder = Path(str(form.source))
    if form.runtime.endswith("int8"):
        folder = folder.with_name(f"{folder.name}-int8")
    return f"{max(file.stat().st_size for file in folder.iterdir() if file.is_file()) / 1e6:.1f} MB"


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
    resolved = resolve(other)
    return Judge.on(resolved.prepared.model, resolved.evaluation, **vars(resolved.prepared.judged))


def fused_by_ort(model: Any, dense: Path, rows: Sequence[Any], folder: Path) -> tuple[str, Served]:
    """Export by torch.onnx, and fuse by ONNX Runtime's own optimiser for BERT, by its defaults."""
    from onnxruntime.transformers.optimizer import optimize_model

    (folder / "fused").mkdir()
    names = ("input_ids", "attention_mask", "token_type_ids")
    given = {name: torch.ones(2, 16, dtype=torch.int64) for name in names}
    dynamic = {name: {0: "batch", 1: "sequence"} for name in names}
    plain = str(folder / "fused" / "plain.onnx")
    model.set_attn_implementation("eager")
    torch.onnx.export(
        model,
        (),
        plain,
        kwargs=given,
        input_names=list(names),
        output_names=["logits"],
        dynamic_axes=dynamic,
        dynamo=False,
    )
    heads, width = model.config.num_attention_heads, model.config.hidden_size
    made = optimize_model(plain, model_type="bert", num_heads=heads, hidden_size=width)
    made.save_model_to_file(str(folder / "fused" / "model.onnx"))
    kinds = made.get_fused_operator_statistics()
    print({name: count for name, count in kinds.items() if count})
    return "dense float32, torch.onnx and onnxruntime.transformers", Served("onnxruntime-cpu", folder / "fused")


def dynamic_by_ort(model: Any, dense: Path, rows: Sequence[Any], folder: Path) -> tuple[str, Served]:
    """Quantise by onnxruntime.quantization's dynamic mode, by its defaults."""
    from onnxruntime.quantization import quantize_dynamic

    (folder / "ort").mkdir()
    quantize_dynamic(dense / "model.onnx", folder / "ort" / "model.onnx")
    return "dense int8, onnxruntime.quantization, dynamic", Served("onnxruntime-cpu", folder / "ort")


def static_by_nncf(model: Any, dense: Path, rows: Sequence[Any], folder: Path) -> tuple[str, Served]:
    """Quantise by NNCF's post-training mode for Transformers, by its defaults, for OpenVINO."""
    import nncf
    import openvino

    graph = openvino.Core().read_model(str(dense / "model.onnx"))
    names = [value.any_name for value in graph.inputs]

    def inputs(row: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        filled = {**row, "token_type_ids": row.get("token_type_ids", torch.zeros_like(row["input_ids"]))}
        return {name: filled[name].numpy() for name in names}

    single = [
        {key: value[i : i + 1] for key, value in batch.items()}
        for batch in rows
        for i in range(len(batch["input_ids"]))
    ]
    made = nncf.quantize(graph, nncf.Dataset(single[:CALIBRATION], inputs), model_type=nncf.ModelType.TRANSFORMER)
    (folder / "nncf").mkdir()
    openvino.save_model(made, str(folder / "nncf" / "model.xml"))
    return "dense int8, NNCF on OpenVINO", Served("openvino-ir", folder / "nncf")


if __name__ == "__main__":
    main()
