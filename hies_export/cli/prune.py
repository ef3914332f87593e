"""Score, select, cut and save, without export and measurement."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace

from rich.console import Console

from ..progress import Progress
from .arguments import a_path, add_force, add_recipe, read_recipe, refuse_output


def add_arguments(parser: ArgumentParser) -> None:
    """Add the recipe, `--plan` and `--force`."""
    add_recipe(parser)
    parser.add_argument(
        "--plan", metavar="FILE", type=a_path, help="cut by this plan, or this run's, instead of scoring"
    )
    add_force(parser)


def run(options: Namespace, console: Console, progress: Progress) -> None:
    """Write a slim checkpoint, cut by a given plan or by one made now."""
    from ..checkpoint.contents import plan_in
    from ..pipeline.choose import choose
    from ..pipeline.prepare import prepare
    from ..pipeline.run import prune
    from ..slim.fingerprint import fingerprint
    from ..values import PruningPlan
    from .terminal import plan_text, print_plan

    recipe = read_recipe(options)
    if options.plan is not None:
        options.plan = plan_in(options.plan, progress=progress)
    refuse_output(options, recipe, **({} if options.plan is None else {"plan": options.plan}))
    given = None if options.plan is None else PruningPlan.from_file(options.plan)
    progress.stage("load")
    prepared = prepare(recipe)
    if given is not None:
        if options.force:
            given = replace(given, model=fingerprint(prepared.model, prepared.sites))
        plan, refit = given, None
    else:
        choice = choose(prepared, recipe, progress=progress)
        plan, refit = choice.plan, choice.refit
    pruned = prune(prepared, plan, recipe, recipe.output, overwrite=options.overwrite, refit=refit, progress=progress)
    print_plan(plan, console)
    console.print(
        f"\nwritten to {recipe.output}: {plan_text(plan)}; cut against masked {pruned.cut_max_abs:.2g}, "
        f"reloaded against saved {pruned.reload_max_abs:.2g}",
        markup=False,
    )
