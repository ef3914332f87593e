"""Score and select only, and write scores.json and plan.json."""

from __future__ import annotations

from .. import processes
from .arguments import Options, add_budgeted, read_recipe, refuse_output

add_arguments = add_budgeted


def run(options: Options) -> None:
    """Score, select, and write scores.json and plan.json."""
    recipe = read_recipe(options)
    refuse_output(options, recipe)
    from ..pipeline.choose import choose  # after the refusals, because it takes seconds
    from ..pipeline.load_recipe import as_drawn, load_recipe
    from ..pipeline.reporting import write_choice
    from ..pipeline.run import output_folder
    from ..pipeline.stages import calibrate
    from .terminal import plan_text, print_plan

    with output_folder(recipe.output, overwrite=options.overwrite) as folder:
        pruning, delivery = load_recipe(recipe, progress=options.progress)
        choice = choose(pruning, calibrate(pruning))
        if processes.is_first():
            (folder / "recipe.yaml").write_text(as_drawn(recipe, delivery.splits).to_yaml(), encoding="utf-8")
            write_choice(choice, folder)
    print_plan(choice.plan, options.console)
    options.console.print(
        f"\n{plan_text(choice.plan)} by this plan; written to {recipe.output}: scores.json, plan.json"
    )
