"""Cut a checkpoint by a plan."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from ..checkpoint.folders import refuse_existing
from .arguments import Options, add_model, add_output, checkpoint_in, plan_in


def add_arguments(parser: ArgumentParser) -> None:
    """Add the plan, the checkpoint and the folder."""
    parser.add_argument("plan", metavar="PLAN", type=Path, help="a plan.json, or the folder of a run")
    add_model(parser)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--refit", metavar="FILE", type=Path, help="the plan's refitted layers (default: refit.safetensors beside it)"
    )
    choice.add_argument("--no-refit", action="store_true", help="cut without the plan's refitted layers")
    parser.add_argument("--force", action="store_true", help="allow a plan that was made for other weights")
    add_output(parser, required=True)


def run(options: Options) -> dict[str, Any]:
    """Write the slim checkpoint, and return its sizes in bytes and the time it took."""
    options.plan = plan_in(options.plan, progress=options.progress)
    options.model = checkpoint_in(options.model, progress=options.progress)
    refuse_existing(options.output, overwrite=options.overwrite, inputs={"plan": options.plan, "model": options.model})
    from ..checkpoint.apply import apply_plan  # after the refusals, because it takes seconds
    from ..checkpoint.save import refit_beside
    from ..select.plan import PruningPlan
    from .terminal import plan_text, plan_totals

    plan = PruningPlan.from_file(options.plan)
    refit = options.refit
    # Layers beside the plan belong to the weights that it was made for.
    if refit is None and not options.no_refit and not options.force:
        refit = refit_beside(plan, options.plan)
    applied = apply_plan(
        plan,
        options.model,
        options.output,
        overwrite=options.overwrite,
        force=options.force,
        refit=refit,
        progress=options.progress,
    )
    layers = "" if refit is None else f"with the refitted layers of {refit}, "
    options.console.print(
        f"written to {options.output}: {plan_text(plan)}, {applied.dense_bytes / 1e6:.1f} MB before, "
        f"{applied.slim_bytes / 1e6:.1f} MB after, {layers}in {applied.seconds:.1f} s",
        soft_wrap=True,
    )
    return {
        "folder": str(options.output),
        **plan_totals(plan),
        "refit": None if refit is None else str(refit),
        "bytes": {"dense": applied.dense_bytes, "slim": applied.slim_bytes},
        "seconds": applied.seconds,
    }
