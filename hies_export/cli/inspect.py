"""Show the attention heads of a checkpoint and whether they can be cut."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..errors import RequestError
from ..progress import Progress
from .arguments import add_json

if TYPE_CHECKING:
    from ..studies.theory import Theory


def add_arguments(parser: ArgumentParser) -> None:
    """Add the checkpoint and `--theory`."""
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder or Hub id; a recipe with --theory")
    parser.add_argument(
        "--theory",
        action="store_true",
        help="evaluate HIES's theory on a recipe's calibration rows: orthogonality, bound and increase of the loss, "
        "entropy deficits",
    )
    add_json(parser)


def run(options: Namespace, console: Console, progress: Progress) -> dict[str, Any]:
    """Show heads and FLOPs of every layer, or the theory, and return them."""
    return _inspect_theory(options, console, progress) if options.theory else _inspect_heads(options, console)


def _inspect_heads(options: Namespace, console: Console) -> dict[str, Any]:
    import torch

    from ..checkpoint.loading import load
    from ..errors import UnsupportedModelError
    from ..measure.counts import count_parameters, flops_per_layer
    from ..model.tokens import synthetic_batch
    from ..pipeline.bench import model_shapes
    from ..prunable.find import find_modules
    from ..report.rows import layer_table
    from ..report.terminal import plain_table
    from ..slim.config import is_slim
    from .terminal import print_json

    model = load(options.model, dtype=torch.float32)
    result: dict[str, Any] = {
        "model": str(options.model),
        "class": type(model).__name__,
        "slim": is_slim(model),
        "parameters": count_parameters(model),
    }
    console.print(f"{result['class']}, {result['parameters'] / 1e6:.2f} M parameters" + ", slim" * result["slim"])
    try:
        found = find_modules(model, synthetic_batch(model, batch=2, sequence=8))
    except UnsupportedModelError as error:
        # The reason is a result, and the exit code is still that of the error.
        if options.json:
            print_json(result | {"can_be_cut": False, "reason": str(error)})
        raise
    lines = [(m.name, str(m.units), str(m.groups), str(m.key_width)) for m in found]
    console.print(plain_table(("attention module", "heads", "key/value", "head width"), lines))
    console.print(f"{sum(m.units for m in found)} heads; all of them can be scored and cut")
    size, sequence = model_shapes(model, ())[0]
    layers = [
        asdict(layer) for layer in flops_per_layer(model, synthetic_batch(model, batch=size, sequence=sequence), found)
    ]
    console.print(f"\nfloating-point operations at {size} x {sequence}")
    console.print(plain_table(*layer_table(layers)))
    modules = [{"name": m.name, "heads": m.units, "key_value_heads": m.groups} for m in found]
    return result | {"can_be_cut": True, "attention": modules, "flops_per_layer": layers}


def _inspect_theory(options: Namespace, console: Console, progress: Progress) -> dict[str, Any]:
    from ..pipeline.prepare import prepare
    from ..recipe import PruningRecipe
    from ..studies.theory import theory
    from ..values import dump_json

    if not options.model.endswith((".yaml", ".yml")):
        raise RequestError(f"--theory needs a recipe, for its model and calibration rows, got {options.model!r}")
    recipe = PruningRecipe.from_yaml(options.model)
    progress.stage("load")
    prepared = prepare(recipe)
    progress.stage("theory")
    alpha = 0.9 if recipe.prune.alpha == "auto" else recipe.prune.alpha
    found = theory(prepared.model, prepared.calibration, prepared.scored, alpha=alpha)
    _print_theory(found, console)
    return {"model": recipe.model, **json.loads(dump_json(asdict(found)))}


def _print_theory(found: Theory, console: Console) -> None:
    from ..report.terminal import plain_table

    lines = [
        (name, f"{n.output:.3g}", f"{n.blocks.max():.3g}", f"{n.activation.mean():.3g}", _range(n.deficit.tolist()))
        for name, n in found.modules.items()
    ]
    head = ("attention module", "|W_O|", "largest |W_O,h|", "mean |A_h|^2", "entropy deficit of heads")
    console.print(plain_table(head, lines))
    o = found.orthogonality
    console.print(
        f"\nHIS (u, sum 1) and entropy (v): mean u {o.mean_u:.3g}, mean v {o.mean_v:.3g}, covariance "
        f"{o.covariance:.3g}, mean u v {o.mean_product:.3g}, correlation {o.correlation:.3f}\n",
        soft_wrap=True,
    )
    rows = [
        (
            f"{i.criterion}, {i.share:.0%}",
            f"{i.first_order:.4g}",
            f"{i.quadratic:.4g}",
            f"{i.quadratic_blocks:.4g}",
            f"{i.measured:.4g}",
        )
        for i in found.increases
    ]
    head = ("heads removed by", "sum of HIS", "+ quadratic", "(by blocks)", "measured increase")
    console.print(plain_table(head, rows))
    console.print(f"of the {found.loss}; the bound takes W_O for the model's last layer", markup=False)


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"
