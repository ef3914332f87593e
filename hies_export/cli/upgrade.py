"""Convert a checkpoint whose heads transformers 4 pruned, which transformers 5 cannot load."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from ..checkpoint.folders import refuse_existing, refuse_other
from .arguments import Options, add_output


def add_arguments(parser: ArgumentParser) -> None:
    """Add the checkpoint and the folder."""
    model = "checkpoint folder or Hub id, with pruned_heads in its config"
    parser.add_argument("model", metavar="MODEL", help=model)
    add_output(parser, required=True)


def run(options: Options) -> dict[str, Any]:
    """Write the slim checkpoint, and return its heads and how far it differs when it is loaded again."""
    refuse_other(options.model)
    refuse_existing(options.output, overwrite=options.overwrite, inputs={"model": options.model})
    from ..checkpoint.beside import fetch_whole  # after the refusals, because it takes seconds
    from ..checkpoint.load import load_version4
    from ..checkpoint.save import save_slim
    from ..model.tokens import synthetic_batch
    from .export import load_processor_if_any
    from .terminal import plan_totals, print_plan

    options.progress.stage("load the model")
    model, plan = load_version4(fetch_whole(options.model))
    options.progress.stage("save")
    reload_max_abs = save_slim(
        model,
        options.output,
        plan=plan,
        batch=synthetic_batch(model, batch=2, sequence=16),
        processor=load_processor_if_any(options.model, model),
        overwrite=options.overwrite,
    )
    print_plan(plan, options.console)
    options.console.print(f"\nwritten to {options.output}; reloaded against saved {reload_max_abs:.2g}")
    return {"folder": str(options.output), **plan_totals(plan), "reload_max_abs": reload_max_abs}
