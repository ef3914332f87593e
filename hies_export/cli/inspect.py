"""Show which heads and neurons of a checkpoint can be cut, or what a plan or run cut."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.folders import Contents, contents
from ..errors import UnsupportedModelError
from ..kinds import ATTENTION, KINDS
from .arguments import Options, checkpoint_in, plan_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..units.units import PrunableModule

# Further keys in --json, and columns, of a kind of module -> attribute of the module.
_COLUMNS = {ATTENTION: {"key_value_heads": "groups", "head_width": "key_width"}}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the checkpoint."""
    model = "checkpoint folder, run or Hub id; or a plan.json"
    parser.add_argument("model", metavar="MODEL", help=model)


def run(options: Options) -> dict[str, Any]:
    """Print the heads and neurons of a checkpoint, or what a plan keeps, and return the same for --json."""
    path = Path(options.model)
    if contents(path) is Contents.SCORED or path.suffix == ".json":
        return _inspect_plan(plan_in(path, progress=options.progress), options)
    options.model = checkpoint_in(options.model, progress=options.progress)
    return _inspect_model(options)


def _inspect_plan(file: Path, options: Options) -> dict[str, Any]:
    """Print what a plan keeps and removes; return it for --json."""
    from ..select.plan import PruningPlan
    from .terminal import plan_text, plan_totals, print_plan

    plan = PruningPlan.from_file(file)
    alpha = "" if plan.alpha is None else f", alpha {plan.alpha:g}"
    options.console.print(f"{plan_text(plan)} by {plan.criterion}{alpha}, seed {plan.seed}", soft_wrap=True)
    print_plan(plan, options.console)
    kept = {name: {"kind": module.kind, "kept": len(module.units)} for name, module in plan.kept.items()}
    return {"plan": str(file), "criterion": plan.criterion, "alpha": plan.alpha, **plan_totals(plan), "modules": kept}


def _inspect_model(options: Options) -> dict[str, Any]:
    """Print what of a checkpoint can be cut; return it for --json. Raise the error if nothing can."""
    import torch

    from ..checkpoint.classes import refuse_quantised
    from ..checkpoint.load import load
    from ..checkpoint.sentence import is_sentence_transformer, load_sentence
    from ..slim.config import is_slim
    from ..units.counts import count_parameters

    embeds = is_sentence_transformer(options.model)
    float32: dict[str, Any] = {"dtype": torch.float32}
    model = load_sentence(options.model, **float32).model.auto_model if embeds else load(options.model, **float32)
    refuse_quantised(model.config, options.model)
    name, parameters, slim = type(model).__name__, count_parameters(model), is_slim(model)
    result: dict[str, Any] = {"model": str(options.model), "class": name, "slim": slim, "parameters": parameters}
    options.console.print(f"{name}, {parameters / 1e6:.2f} M parameters" + (", slim" if slim else ""))
    modules, refused = _find_units(model)
    if refused and not modules:
        raise next(iter(refused.values()))  # the error of the first kind
    if refused:
        result["refused"] = {kind: str(error) for kind, error in refused.items()}
    result |= _print_units(modules, refused, options)
    plan = Path(options.model) / "hies_plan.json"
    if plan.is_file():
        options.console.print("\nwhat was cut from the dense model:")
        result["cut"] = _inspect_plan(plan, options)
    return result


def _find_units(model: PreTrainedModel) -> tuple[list[PrunableModule], dict[str, UnsupportedModelError]]:
    """Return the modules whose units can be cut, and for each kind that cannot be cut the error that says why."""
    from ..model.tokens import sample_batch
    from ..units.find import FINDERS, find_modules
    from ..units.shapes import check_runs

    batch = sample_batch(model, sequence=8)
    check_runs(model, batch, "random inputs")
    modules: list[PrunableModule] = []
    refused: dict[str, UnsupportedModelError] = {}
    for kind in FINDERS:
        try:
            modules += find_modules(model, batch, kinds=(kind,))
        except UnsupportedModelError as error:
            refused[kind] = error
    return modules, refused


def _print_units(
    modules: Sequence[PrunableModule], refused: Mapping[str, UnsupportedModelError], options: Options
) -> dict[str, Any]:
    """Print a table for each kind of module, or why it cannot be cut; return the modules by kind for --json."""
    from ..report.tables import plain_table

    by_kind: dict[str, Any] = {}
    for name, kind in KINDS.items():
        of_kind = [module for module in modules if module.kind == name]
        if not of_kind:
            continue
        if by_kind:
            options.console.print()
        columns = {kind.units: "units", **_COLUMNS.get(name, {})}
        rows = [{"name": m.name, **{key: getattr(m, attribute) for key, attribute in columns.items()}} for m in of_kind]
        lines = [(row["name"], *(f"{row[key]:,}" for key in columns)) for row in rows]
        options.console.print(plain_table((kind.module, *(key.replace("_", " ") for key in columns)), lines))
        total = sum(module.units for module in of_kind)
        options.console.print(f"{total:,} {kind.units}; all of them can be scored and cut")
        by_kind[name] = rows
    for name, error in refused.items():
        options.console.print(f"\n{KINDS[name].units} cannot be cut: {error}", soft_wrap=True)
    return by_kind
