"""hies_export: find the heads and neurons a Transformer can lose, remove them for real, ship and measure the rest.

    from hies_export import prune
    result = prune(model, batches, modules=["attention", "mlp"], budget={"flops": 0.6})
    result.save_pretrained("slim")

prunes a model in memory, `PruningRecipe.from_yaml("bert.yaml").run()` runs a whole recipe, and `deploy` finds the
fastest form that keeps the answers. Or stage by stage: `find_modules`, `collect_statistics`, `score_units`,
`select_units`, `prune_units`, `compensate`, `save_slim`, `export_onnx`, `quantize_onnx`, `quantize_openvino`; measured
by `bench`, `compare_latency`, `count_flops` and `count_parameters`. `trim_vocabulary` removes the tokens that texts do
not use. `apply_plan` cuts a saved checkpoint by a plan. A saved slim model comes back with `load`, and an exported
decoder generates with `OnnxGenerator`. `push_to_hub` publishes a run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .calibrate.statistics import Statistics, collect_statistics
    from .checkpoint.apply import apply_plan
    from .checkpoint.load import HIESModel, load
    from .checkpoint.save import save_slim
    from .errors import (
        CutMismatchError,
        DataError,
        DropError,
        ExportError,
        HiesError,
        MissingRuntimeError,
        NonFiniteError,
        OutputExistsError,
        ParityError,
        PlanError,
        PushError,
        RecipeError,
        ReloadMismatchError,
        RequestError,
        StepError,
        UnsupportedModelError,
    )
    from .forms.cascade.cascade import Cascade
    from .forms.gguf.export import export_gguf
    from .forms.onnx.export import export_onnx
    from .forms.onnx.generator import OnnxGenerator, generate_text
    from .forms.onnx.quantize import quantize_onnx
    from .forms.openvino.export import quantize_openvino
    from .forms.runtimes.base import load_runtime
    from .forms.time import compare_latency
    from .pipeline.bench import bench
    from .pipeline.prune import PruneResult, prune
    from .pipeline.push import push_to_hub
    from .pipeline.recipe import PruningRecipe
    from .pipeline.run import deploy, run
    from .report.report import Report
    from .score.compensated import score_compensated
    from .score.criteria import CRITERIA, Scores, criterion, score_units
    from .select.constraints import Constraints
    from .select.plan import PruningPlan
    from .select.select import select_units
    from .slim.bundles import flops_table, parameters_table
    from .slim.check import compare_cut, masked_units
    from .slim.cut import prune_units
    from .slim.refit import Compensation, compensate
    from .tasks.registry import register_task
    from .units.counts import count_flops, count_parameters
    from .units.find import find_modules
    from .units.heads import find_attention
    from .units.units import Kept, PrunableModule, Selection
    from .vocabulary.trim import trim_vocabulary


# Where each public name lives. Names are resolved on first use: importing this package imports no torch.
_HOMES = {
    "CRITERIA": "score.criteria",
    "Cascade": "forms.cascade.cascade",
    "Compensation": "slim.refit",
    "Constraints": "select.constraints",
    "CutMismatchError": "errors",
    "DataError": "errors",
    "DropError": "errors",
    "ExportError": "errors",
    "HIESModel": "checkpoint.load",
    "HiesError": "errors",
    "Kept": "units.units",
    "MissingRuntimeError": "errors",
    "NonFiniteError": "errors",
    "OnnxGenerator": "forms.onnx.generator",
    "OutputExistsError": "errors",
    "ParityError": "errors",
    "PlanError": "errors",
    "PrunableModule": "units.units",
    "PruneResult": "pipeline.prune",
    "PruningPlan": "select.plan",
    "PruningRecipe": "pipeline.recipe",
    "PushError": "errors",
    "RecipeError": "errors",
    "ReloadMismatchError": "errors",
    "Report": "report.report",
    "RequestError": "errors",
    "Scores": "score.criteria",
    "Selection": "units.units",
    "Statistics": "calibrate.statistics",
    "StepError": "errors",
    "UnsupportedModelError": "errors",
    "apply_plan": "checkpoint.apply",
    "bench": "pipeline.bench",
    "collect_statistics": "calibrate.statistics",
    "compare_cut": "slim.check",
    "compare_latency": "forms.time",
    "compensate": "slim.refit",
    "count_flops": "units.counts",
    "count_parameters": "units.counts",
    "criterion": "score.criteria",
    "deploy": "pipeline.run",
    "export_gguf": "forms.gguf.export",
    "export_onnx": "forms.onnx.export",
    "find_attention": "units.heads",
    "find_modules": "units.find",
    "flops_table": "slim.bundles",
    "generate_text": "forms.onnx.generator",
    "load": "checkpoint.load",
    "load_runtime": "forms.runtimes.base",
    "masked_units": "slim.check",
    "parameters_table": "slim.bundles",
    "prune": "pipeline.prune",
    "prune_units": "slim.cut",
    "push_to_hub": "pipeline.push",
    "register_task": "tasks.registry",
    "quantize_onnx": "forms.onnx.quantize",
    "quantize_openvino": "forms.openvino.export",
    "run": "pipeline.run",
    "save_slim": "checkpoint.save",
    "score_compensated": "score.compensated",
    "score_units": "score.criteria",
    "select_units": "select.select",
    "trim_vocabulary": "vocabulary.trim",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
