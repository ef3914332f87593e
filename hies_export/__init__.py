"""hies_export: find the attention heads a Transformer can lose, remove them for real, ship and measure the rest.

    from hies_export import PruningRecipe
    report = PruningRecipe.from_yaml("recipe.yaml").run()

or stage by stage: `find_attention`, `collect_statistics`, `score_heads`, `select_heads`, `prune_heads`,
`compensate_heads`, `save_slim`, `export_onnx`; measured by `bench`, `compare_latency`, `count_flops` and
`count_parameters`. `apply_plan` does the cut on the files of a checkpoint. A saved slim model comes back with `load`,
and an exported decoder generates with `OnnxGenerator`. `push_to_hub` publishes a run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calibrate import collect_statistics
    from .checkpoint.apply import apply_plan
    from .checkpoint.loading import HIESModel, load
    from .checkpoint.push import push_to_hub
    from .checkpoint.save import save_slim
    from .compensate import compensate_heads
    from .compensated import collect_effects, score_compensated
    from .cut import check_cut, masked_heads, prune_heads
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
    from .generate import generate_text
    from .heads.layout import find_attention
    from .measure.compare import bench
    from .measure.counts import count_flops, count_parameters
    from .measure.latency import compare_latency
    from .measure.runtimes import load_runtime
    from .onnx.export import export_onnx
    from .onnx.generator import OnnxGenerator
    from .pipeline import run
    from .recipe import PruningRecipe
    from .report.report import Report
    from .score import CRITERIA, criterion, score_heads
    from .select import select_heads
    from .values import AttentionSite, HeadScores, HeadStatistics, KeptHeads, PruningPlan

__version__ = "0.1.0"

# Where each public name lives. Resolved on first use: importing this package imports neither torch nor transformers.
_HOMES = {
    "checkpoint.apply": ["apply_plan"],
    "calibrate": ["collect_statistics"],
    "measure.compare": ["bench"],
    "compensate": ["compensate_heads"],
    "compensated": ["collect_effects", "score_compensated"],
    "cut": ["check_cut", "masked_heads", "prune_heads"],
    "errors": [
        "CutMismatchError",
        "DataError",
        "DropError",
        "ExportError",
        "HiesError",
        "MissingRuntimeError",
        "NonFiniteError",
        "OutputExistsError",
        "ParityError",
        "PlanError",
        "PushError",
        "RecipeError",
        "ReloadMismatchError",
        "RequestError",
        "StepError",
        "UnsupportedModelError",
    ],
    "onnx.export": ["export_onnx"],
    "heads.layout": ["find_attention"],
    "checkpoint.loading": ["HIESModel", "load"],
    "checkpoint.push": ["push_to_hub"],
    "measure.counts": ["count_flops", "count_parameters"],
    "measure.latency": ["compare_latency"],
    "measure.runtimes": ["load_runtime"],
    "onnx.generator": ["OnnxGenerator"],
    "pipeline": ["run"],
    "generate": ["generate_text"],
    "recipe": ["PruningRecipe"],
    "report.report": ["Report"],
    "checkpoint.save": ["save_slim"],
    "score": ["CRITERIA", "criterion", "score_heads"],
    "select": ["select_heads"],
    "values": ["AttentionSite", "HeadScores", "HeadStatistics", "KeptHeads", "PruningPlan"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CRITERIA",
    "AttentionSite",
    "CutMismatchError",
    "DataError",
    "DropError",
    "ExportError",
    "HIESModel",
    "HeadScores",
    "HeadStatistics",
    "HiesError",
    "KeptHeads",
    "MissingRuntimeError",
    "NonFiniteError",
    "OnnxGenerator",
    "OutputExistsError",
    "ParityError",
    "PlanError",
    "PruningPlan",
    "PruningRecipe",
    "PushError",
    "RecipeError",
    "ReloadMismatchError",
    "Report",
    "RequestError",
    "StepError",
    "UnsupportedModelError",
    "apply_plan",
    "bench",
    "check_cut",
    "collect_effects",
    "collect_statistics",
    "compare_latency",
    "compensate_heads",
    "count_flops",
    "count_parameters",
    "criterion",
    "export_onnx",
    "find_attention",
    "generate_text",
    "load",
    "load_runtime",
    "masked_heads",
    "prune_heads",
    "push_to_hub",
    "run",
    "save_slim",
    "score_compensated",
    "score_heads",
    "select_heads",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
