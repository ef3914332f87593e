"""Score, select, cut and save, without export and measurement."""

from __future__ import annotations

from .arguments import Options, add_budgeted, read_recipe, refuse_output

add_arguments = add_budgeted


def run(options: Options) -> None:
    """Cut the model of the recipe, save the slim checkpoint, and print its sizes and checks."""
    recipe = read_recipe(options)
    refuse_output(options, recipe)
    from ..pipeline.choose import choose  # after the refusals, because it takes seconds
    from ..pipeline.delivery import save
    from ..pipeline.load_recipe import load_recipe
    from ..pipeline.stages import calibrate, cut
    from .terminal import plan_text, print_plan

    pruning, delivery = load_recipe(recipe, progress=options.progress)
    slim = cut(pruning, choose(pruning, calibrate(pruning, reported=False)))
    saved = save(pruning, delivery, slim, recipe.output, overwrite=options.overwrite)
    print_plan(slim.plan, options.console)
    assert delivery.source is not None
    options.console.print(
        f"\nwritten to {recipe.output}: {plan_text(slim.plan)}, {delivery.source.bytes / 1e6:.1f} MB before, "
        f"{saved.bytes / 1e6:.1f} MB after; cut against masked {slim.cut_max_abs:.2g}, reloaded against saved "
        f"{saved.reload_max_abs:.2g}",
        soft_wrap=True,
    )
