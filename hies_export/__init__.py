"""hies_export: find the heads and neurons a Transformer can lose, remove them for real, ship and measure the rest.

    from hies_export import prune
    result = prune(model, batches, modules=["attention", "mlp"], budget={"flops": 0.6})
    result.save_pretrained("slim")

prunes a model in memory, `PruningRecipe.from_yaml("bert.yaml").run()` runs a whole recipe, and `deploy` finds the
fastest form that keeps the answers. Or stage by stage: `find_modules`, `collect_statistics`, `score_units`,
`select_units`, `prune_units`, `compensate`, `save_slim`, `export_onnx`, `quantize_onnx`, `quantize_openvino`; measured
by `bench`, `count_flops` and `count_parameters`. `trim_vocabulary` removes the tokens that texts do not use.
`apply_plan` cuts a saved checkpoint by a plan. A saved slim model comes back with `load`, and an exported decoder
generates with `generate_text`. `push_to_hub` publishes a run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .calibrate.statistics import Statistics, collect_statistics
    from .checkpoint.apply import apply_plan
    from .checkpoint.load import load
    from .checkpoint.save import save_slim
    from .forms.gguf.export import export_gguf
    from .forms.onnx.export import export_onnx
    from .forms.onnx.generator import generate_text
    from .forms.onnx.quantize import quantize_onnx
    from .forms.openvino.export import quantize_openvino
    from .forms.runtimes.base import load_runtime
    from .pipeline.bench import bench
    from .pipeline.prune import PruneResult, prune
    from .pipeline.push import push_to_hub
    from .pipeline.recipe import PruningRecipe
    from .pipeline.run import deploy, run
    from .recipe.sections import CompensationSection, Constraints
    from .report.report import Report
    from .score.compensated import score_compensated
    from .score.criteria import CRITERIA, Scores, criterion, score_units
    from .select.plan import PruningPlan
    from .select.select import select_units
    from .slim.bundles import flops_table, parameters_table
    from .slim.check import compare_cut, masked_units
    from .slim.cut import prune_units
    from .slim.refit import compensate
    from .tasks.registry import register_task
    from .units.counts import count_flops, count_parameters
    from .units.find import find_modules
    from .units.heads import find_attention
    from .units.units import Kept, PrunableModule, Selection
    from .vocabulary.trim import trim_vocabulary


# Names that are imported on first use, by module, so that importing this package imports no torch.
_MODULES = {
    "calibrate.statistics": ("Statistics", "collect_statistics"),
    "checkpoint.apply": ("apply_plan",),
    "checkpoint.load": ("load",),
    "checkpoint.save": ("save_slim",),
    "forms.gguf.export": ("export_gguf",),
    "forms.onnx.export": ("export_onnx",),
    "forms.onnx.generator": ("generate_text",),
    "forms.onnx.quantize": ("quantize_onnx",),
    "forms.openvino.export": ("quantize_openvino",),
    "forms.runtimes.base": ("load_runtime",),
    "pipeline.bench": ("bench",),
    "pipeline.prune": ("PruneResult", "prune"),
    "pipeline.push": ("push_to_hub",),
    "pipeline.recipe": ("PruningRecipe",),
    "pipeline.run": ("deploy", "run"),
    "recipe.sections": ("CompensationSection", "Constraints"),
    "report.report": ("Report",),
    "score.compensated": ("score_compensated",),
    "score.criteria": ("CRITERIA", "Scores", "criterion", "score_units"),
    "select.plan": ("PruningPlan",),
    "select.select": ("select_units",),
    "slim.bundles": ("flops_table", "parameters_table"),
    "slim.check": ("compare_cut", "masked_units"),
    "slim.cut": ("prune_units",),
    "slim.refit": ("compensate",),
    "tasks.registry": ("register_task",),
    "units.counts": ("count_flops", "count_parameters"),
    "units.find": ("find_modules",),
    "units.heads": ("find_attention",),
    "units.units": ("Kept", "PrunableModule", "Selection"),
    "vocabulary.trim": ("trim_vocabulary",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted([*_HOMES, *(name for name in globals() if name.endswith("Error"))])


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
