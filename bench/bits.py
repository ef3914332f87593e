"""Prune models by their recipes, and print both models in float32 and in fewer bits side by side, and what others make.

python bench/bits.py OUT stsb:0.7 stsb:0.6 [--seeds 3] [--other SPLIT=FILE]

Each run is `hies-export run recipes/minilm-NAME.yaml` with a budget of FLOPs and `export.quantize: int8`; one that OUT
has is not repeated. Every form runs all evaluation rows: in float32 and in 8 bits in ONNX Runtime, in bfloat16 in
OpenVINO where that is installed, and of other tools by their defaults ONNX Runtime's optimiser and quantiser and, where
it is installed, NNCF. Agreement is with the dense float32 model. Times are ratios to the dense float32 graph in ONNX
Runtime, all from one interleaved run of the first seed's models, with a control. `--other` also predicts the rows of
another source, of which neither calibration nor refit saw any, and says how many predictions stay.
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

from hies_export.evaluate.judge import Judge
from hies_export.measure.compare import Served, compare_forms
from hies_export.measure.machine import machine_facts
from hies_export.measure.timing import Timing
from hies_export.onnx.export import export_onnx
from hies_export.pipeline.deployed import predict_served
from hies_export.pipeline.resolve import resolve
from hies_export.pipeline.run import run
from hies_export.recipe import PruningRecipe
from hies_export.runtimes.base import register_runtime
from hies_export.runtimes.openvino import OpenVinoRuntime

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SHAPES = ((1, 128), (8, 128))
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
    options = parser.parse_args()
    for budget in options.budgets:
        name, _, flops = budget.partition(":")
        recipes = [recipe_of(options, name, float(flops), seed) for seed in range(options.seeds)]
        for recipe in recipes:
            if not (recipe.output / "report.json").is_file():
                print(recipe.output, flush=True)
                run(recipe, progress=Spoken())
        print_forms(recipes, options.other, title=f"{name}, {flops} of the FLOPs, {len(recipes)} seeds")
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
        dense = export_onnx(prepared.model, folder / "dense", batch=prepared.sample).folder
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
            for comparisons in timed.values():
                one = comparisons[max(0, number - 1)]
                ratio = one.ratio if number else one.control
                cells.append(f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]{'*' * one.noisy}")
            print(f"| {' | '.join(cells)} |", flush=True)
    for (_, _), comparisons in timed.items():
        print(f"dense float32: {comparisons[0].dense.p50_ms:.2f} ms, {comparisons[0].threads} threads")
    print("The first row's times are those of a second copy, the control; * is a noisy one.")


def size_of(form: Served) -> str:
    """Return the size of the largest file that is loaded, in MB; in 8 bits that of the written form."""
    folder = Path(str(form.source))
    if form.runtime.endswith("int8") and (folder.parent / "onnx-int8").is_dir():
        folder = folder.parent / "onnx-int8"
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
