"""Score, select, cut and save, without export and measurement."""

from __future__ import annotations

from argparse import ArgumentParser

from .arguments import Options, add_recipe, read_recipe, refuse_output


def add_arguments(parser: ArgumentParser) -> None:
    """Add the recipe."""
    add_recipe(parser)


def run(options: Options) -> None:
    """Write a slim checkpoint."""
    from ..pipeline.prune import prune_prepared
    from ..pipeline.resolve import resolve
    from ..pipeline.stages import save, warn_if_larger
    from ..slim.config import families
    from .terminal import plan_text, print_plan

    recipe = read_recipe(options)
    refuse_output(options, recipe)
    options.progress.stage("load the model and the data")
    resolved = resolve(recipe)
    prepared, source = resolved.prepared, resolved.source
    result = prune_prepared(
        prepared,
        resolved.options,
        compensation=resolved.options.compensation,
        dtype=source.dtype,
        progress=options.progress,
    )
    options.progress.stage("save, load again and compare")
    saved = save(
        result.slim,
        prepared,
        recipe.output,
        processor=prepared.processor,
        dense=source.folder,
        dtype=source.dtype,
        overwrite=options.overwrite,
    )
    warn_if_larger(saved, source)
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
