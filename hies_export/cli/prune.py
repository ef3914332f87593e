"""Score, select, cut and save, without export and measurement."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from .arguments import Options, a_path, add_plan_options, add_recipe, find_refit, read_recipe, refuse_output
from .paths import plan_in

if TYPE_CHECKING:
    from ..recipe import PruningRecipe


def add_arguments(parser: ArgumentParser) -> None:
    """Add the recipe, `--plan`, and the options about that plan."""
    add_recipe(parser)
    plan = "plan.json, or folder of a run, to cut by instead of scoring"
    parser.add_argument("--plan", metavar="FILE", type=a_path, help=plan)
    add_plan_options(parser)


def run(options: Options) -> None:
    """Write a slim checkpoint, cut by a given plan or by one made now.

    A recipe that compensates refits the layers, also for a given plan. Otherwise the layers written with the plan are
    used.
    """
    from ..checkpoint.refits import read_refit, warn_uncompensated
    from ..pipeline.cut import save, warn_if_larger
    from ..pipeline.prune import prune_prepared
    from ..pipeline.resolve import resolve
    from ..slim.fingerprint import fingerprint
    from ..slim.siblings import families
    from ..values import PruningPlan
    from .terminal import plan_text, print_plan

    recipe = read_recipe(options)
    plan_file = None if options.plan is None else plan_in(options.plan, progress=options.progress)
    refuse_output(options, recipe, plan=plan_file, refit=options.refit)
    given = None if plan_file is None else PruningPlan.from_file(plan_file)
    _check_refit(options, recipe)
    refitted = None
    if given is not None and plan_file is not None and recipe.prune.compensation is None:
        file = find_refit(options, given, plan_file)
        refitted = None if file is None else read_refit(given, file)
    options.progress.stage("load the model and the data")
    resolved = resolve(recipe)
    prepared, source = resolved.prepared, resolved.source
    if given is not None and options.force:
        given = replace(given, model=fingerprint(prepared.model, prepared.modules))
    result = prune_prepared(
        prepared,
        given or resolved.options,
        compensation=resolved.options.compensation,
        refit=refitted,
        dtype=source.dtype,
        progress=options.progress,
    )
    options.progress.stage("save, load again and compare")
    written: dict[str, Any] = {"processor": prepared.processor, "dense": source.folder, "dtype": source.dtype}
    saved = save(result.slim, prepared, recipe.output, overwrite=options.overwrite, **written)
    warn_if_larger(saved, source)
    if given is not None and given.compensation and not result.plan.compensation:
        warn_uncompensated(given)
    print_plan(result.plan, options.console)
    options.console.print(
        f"\nwritten to {recipe.output}: {plan_text(result.plan)}, {source.bytes / 1e6:.1f} MB before, "
        f"{saved.bytes / 1e6:.1f} MB after; cut against masked {result.slim.cut_max_abs:.2g}, reloaded against saved "
        f"{saved.reload_max_abs:.2g}",
        soft_wrap=True,
    )
    note = families(prepared.model.config, result.model.config).note
    if note:
        options.console.print(note)


def _check_refit(options: Options, recipe: PruningRecipe) -> None:
    """Refuse options about refitted layers that have no effect."""
    if (options.refit is None and not options.no_refit) or (
        options.plan is not None and recipe.prune.compensation is None
    ):
        return
    why = "there is no --plan" if options.plan is None else "this recipe compensates, which refits anew"
    raise RequestError(
        f"--refit and --no-refit need a --plan, and a recipe that does not compensate, but {why}; leave them out, or "
        "add --set prune.compensation=null"
    )
