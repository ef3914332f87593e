"""What each command does. Heavy imports are inside: the command line must answer `--help` at once."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from ..errors import RecipeError, RequestError

if TYPE_CHECKING:
    from ..progress import Progress
    from ..recipe import PruningRecipe


def run_command(options: argparse.Namespace, out: Console, progress: Progress) -> None:
    """The whole line of a recipe."""
    from ..pipeline.run import run
    from ..report.terminal import print_report

    recipe = _recipe(options)
    report = run(recipe, overwrite=options.overwrite, progress=progress)
    print_report(report, out)
    out.print(
        f"\nwritten to {recipe.output}: slim/ (checkpoint), onnx/, report.html, report.md, report.json, plan.json",
        markup=False,
    )
    _print_json(options, report.summary())


def quickstart_command(options: argparse.Namespace, out: Console, progress: Progress) -> None:
    """Train a small model on bundled data, then the whole line."""
    from ..checkpoint.folders import new_folder
    from ..pipeline.quickstart import prepare_quickstart
    from ..pipeline.run import run
    from ..recipe import PruningRecipe
    from ..report.terminal import print_report

    with new_folder(options.output, overwrite=options.overwrite) as folder:
        recipe = PruningRecipe.from_yaml(prepare_quickstart(folder, progress=progress))
        report = run(recipe, progress=progress)
    print_report(report, out)
    where = options.output
    out.print(
        f"\nA ViT was trained on handwritten digits, and half of its heads were removed. In {where}:\n"
        f"  {where}/run/slim    the slim checkpoint: hies_export.load({str(where / 'run' / 'slim')!r})\n"
        f"  {where}/run/onnx    the same for ONNX Runtime\n"
        f"  {where}/run/report.html\n"
        "Try next:\n"
        f"  hies-export run {where}/recipe.yaml --set prune.budget.heads=0.25 -o {where}/quarter\n"
        f"  hies-export inspect {where}/run/slim\n"
        f"  hies-export bench {where}/model {where}/run/slim --runtime onnxruntime-cpu --shape 64\n"
        "and then a recipe for your own model: see recipes/bert-sst2.yaml",
        markup=False,
        soft_wrap=True,
    )
    _print_json(options, report.summary())


def score_command(options: argparse.Namespace, out: Console, progress: Progress) -> None:
    """Write scores.json and plan.json."""
    from ..checkpoint.folders import new_folder
    from ..pipeline.choose import choose, write_choice
    from ..pipeline.prepare import prepare

    recipe = _recipe(options)
    with new_folder(recipe.output, overwrite=options.overwrite) as folder:
        progress.stage("load")
        choice = choose(prepare(recipe), recipe, progress=progress)
        write_choice(folder, choice)
    _print_plan(choice.plan, out)
    out.print(f"\nwritten to {recipe.output}: scores.json, plan.json", markup=False)


def prune_command(options: argparse.Namespace, out: Console, progress: Progress) -> None:
    """Write a slim checkpoint."""
    from ..checkpoint.folders import refuse_existing
    from ..pipeline.choose import choose
    from ..pipeline.prepare import prepare
    from ..pipeline.run import prune
    from ..slim.check import check_plan, check_weights, weight_norms
    from ..values import PruningPlan

    recipe = _recipe(options)
    refuse_existing(recipe.output, overwrite=options.overwrite)
    given = None if options.plan is None else PruningPlan.from_file(options.plan)
    progress.stage("load")
    prepared = prepare(recipe)
    if given is not None:
        check_plan(given, prepared.sites)
        check_weights(given, weight_norms(prepared.model, prepared.sites))
        plan, refit = given, None
    else:
        choice = choose(prepared, recipe, progress=progress)
        plan, refit = choice.plan, choice.refit
    _, _, cut_max_abs, reload_max_abs = prune(
        prepared, plan, recipe, recipe.output, overwrite=options.overwrite, refit=refit, progress=progress
    )
    _print_plan(plan, out)
    out.print(
        f"\nwritten to {recipe.output}; cut against masked {cut_max_abs:.2g}, reloaded against saved "
        f"{reload_max_abs:.2g}",
        markup=False,
    )


def apply_command(options: argparse.Namespace, out: Console, progress: Progress) -> None:
    """Cut a checkpoint on disk."""
    from ..stream.apply import apply_plan
    from ..values import PruningPlan

    plan = PruningPlan.from_file(options.plan)
    applied = apply_plan(plan, options.model, options.output, overwrite=options.overwrite, progress=progress)
    rate = applied.dense_bytes / 1e6 / applied.seconds
    out.print(
        f"written to {options.output}: {plan.removed} of {plan.heads} heads removed, "
        f"{applied.dense_bytes / 1e6:.1f} MB before, "
        f"{applied.slim_bytes / 1e6:.1f} MB after, in {applied.seconds:.1f} s ({rate:.0f} MB/s of the dense "
        "checkpoint)",
        markup=False,
        soft_wrap=True,
    )
    _print_json(
        options,
        {
            "folder": str(options.output),
            "heads": {"total": plan.heads, "removed": plan.removed},
            "bytes": {"dense": applied.dense_bytes, "slim": applied.slim_bytes},
            "seconds": applied.seconds,
            "megabytes_per_second": rate,
        },
    )


def export_command(options: argparse.Namespace, out: Console, progress: Progress) -> None:
    """Write an ONNX folder."""
    import torch

    from ..checkpoint.folders import refuse_existing
    from ..checkpoint.loading import load
    from ..model.tokens import synthetic_batch
    from ..onnx.export import export_onnx
    from ..onnx.multimodal import image_text_batch, is_vision_language

    refuse_existing(options.output, overwrite=options.overwrite)
    progress.stage("load")
    model = load(options.model, dtype=torch.float32)
    images = is_vision_language(model)
    progress.stage("export")
    exported = export_onnx(
        model,
        options.output,
        batch=image_text_batch(model) if images else synthetic_batch(model, batch=2, sequence=16),
        processor=_processor(options.model, model),
        provider=options.provider,
        dtype=options.dtype,
        overwrite=options.overwrite,
    )
    out.print(
        f"written to {options.output}: {exported.bytes / 1e6:.1f} MB, differs from torch by {exported.max_abs:.2g}"
    )
    _print_json(
        options,
        {
            "folder": str(options.output),
            "bytes": exported.bytes,
            "onnx_max_abs": exported.max_abs,
            "files": exported.files,
            "inputs": exported.inputs,
            "outputs": exported.outputs,
        },
    )


def _processor(path: str, model: Any) -> Any:
    from ..data.batches import load_processor
    from ..errors import DataError
    from ..generate.text import load_prompt_processor
    from ..onnx.multimodal import is_vision_language

    task = "image-classification" if model.main_input_name == "pixel_values" else "text-classification"
    try:
        if is_vision_language(model):
            return load_prompt_processor(path, images=True)
        return load_processor(path, task=task)
    except DataError as error:
        logging.getLogger(__name__).warning("the folder gets no tokenizer or image processor: %s", error)
        return None


def bench_command(options: argparse.Namespace, out: Console, progress: Progress) -> None:
    """Time two models side by side."""
    from ..measure.environment import environment
    from ..pipeline.bench import bench
    from ..report.bench import Bench, print_bench

    second = options.second or options.first
    rows = bench(
        options.first,
        second,
        runtimes=options.runtimes,
        shapes=[_shape(text) for text in options.shapes],
        dtypes=options.dtypes,
        repeats=options.repeats,
        min_seconds=options.min_seconds,
        track=progress.track,
    )
    result = {"a": str(options.first), "b": str(second), "latency": rows, "environment": environment()}
    print_bench(Bench.from_values(result), out)
    _print_json(options, result)


def sweep_command(options: argparse.Namespace, out: Console, progress: Progress) -> None:
    """Judge many ways to prune."""
    from ..sweep.grid import SweepGrid
    from ..sweep.sweep import sweep
    from ..sweep.tables import sweep_tables, terminal_table

    if not options.no_figures:
        from ..report.style import require_matplotlib

        require_matplotlib()
    recipe = _recipe(options)
    given = {
        "criteria": _list("criteria", options.criteria, str),
        "alphas": _list("alphas", options.alphas, _number_or_word),
        "sparsities": _list("sparsities", options.sparsities, float),
        "seeds": _list("seeds", options.seeds, int),
        "calibration_sizes": _list("calibration-sizes", options.calibration_sizes, int)
        or (recipe.calibration.samples,),
        "compensations": _list("compensations", options.compensations, str),
    }
    grid = SweepGrid(**{name: values for name, values in given.items() if values is not None})
    result = sweep(recipe, grid, recipe.output, overwrite=options.overwrite, progress=progress)
    if not options.no_figures:
        from ..sweep.curves import draw_figures

        progress.stage("draw")
        draw_figures(recipe.output)
    for table in sweep_tables(result.rows):
        out.print(f"\n{table.title}", markup=False)
        out.print(terminal_table(table))
    for name, how in table.differences.items():
        out.print(f"{name} differs from the original: {how}", markup=False, soft_wrap=True)
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.seconds.items())
    out.print(f"\n{result.evaluations} models judged; {spent}", markup=False, soft_wrap=True)
    out.print(f"written to {recipe.output}: sweep.json, sweep.csv, tables.md, tables.tex", markup=False)
    _print_json(options, {"rows": result.rows, "seconds": result.seconds, "evaluations": result.evaluations})


def generate_command(options: argparse.Namespace, out: Console, progress: Progress) -> None:
    """Continue prompts, or answer a file of questions."""
    if options.questions is not None:
        _answer_command(options, out, progress)
        return
    from ..generate.text import generate_text

    progress.stage("generate")
    texts = generate_text(options.folder, options.prompts, images=options.images, max_new_tokens=options.max_new_tokens)
    for prompt, text in zip(options.prompts, texts, strict=True):
        out.print(f"> {prompt}\n{text}\n", markup=False, soft_wrap=True)
    results = [{"prompt": prompt, "text": text} for prompt, text in zip(options.prompts, texts, strict=True)]
    _print_json(options, {"folder": str(options.folder), "results": results})


def push_command(options: argparse.Namespace, out: Console, progress: Progress) -> None:
    """Push a run to the Hub."""
    from ..hub.push import Commit, push_to_hub

    pushed = push_to_hub(
        options.folder,
        options.repository,
        private=options.private,
        license=options.license,
        base_model=options.base_model,
        commit=Commit(options.revision, options.message),
        overwrite=options.overwrite,
        progress=progress,
    )
    out.print(
        f"{len(pushed.files)} files, {pushed.bytes / 1e6:.1f} MB, are now in {pushed.repository}: {pushed.url}\n"
        f'load it with: hies_export.load("{pushed.repository}")',
        markup=False,
        soft_wrap=True,
    )
    _print_json(options, asdict(pushed))


def upgrade_command(options: argparse.Namespace, out: Console, progress: Progress) -> None:
    """Make a slim checkpoint of one whose heads transformers 4 pruned."""
    from ..checkpoint.folders import refuse_existing
    from ..checkpoint.save import save_slim
    from ..checkpoint.version4 import load_version4
    from ..model.tokens import synthetic_batch

    refuse_existing(options.output, overwrite=options.overwrite)
    progress.stage("load")
    model, plan = load_version4(options.model)
    progress.stage("save")
    reload_max_abs = save_slim(
        model,
        options.output,
        plan=plan,
        batch=synthetic_batch(model, batch=2, sequence=16),
        processor=_processor(options.model, model),
        overwrite=options.overwrite,
    )
    _print_plan(plan, out)
    out.print(f"\nwritten to {options.output}; reloaded against saved {reload_max_abs:.2g}", markup=False)
    heads = {"total": plan.heads, "removed": plan.removed}
    _print_json(options, {"folder": str(options.output), "heads": heads, "reload_max_abs": reload_max_abs})


def _answer_command(options: argparse.Namespace, out: Console, progress: Progress) -> None:
    from ..checkpoint.folders import replace_file
    from ..generate.questions import VqaAccuracy, answer_questions, read_questions
    from ..values import dump_json

    if options.output is None or len(options.images) != 1:
        raise RecipeError(["--questions needs -o FILE for the answers and one --image, the folder of the images"])
    questions = read_questions(options.questions)
    progress.stage("generate")
    answers = answer_questions(
        options.folder,
        questions,
        images=options.images[0],
        max_new_tokens=options.max_new_tokens,
        progress=lambda batches: progress.track(batches, "generate"),
    )
    replace_file(options.output, dump_json(answers))
    result: dict[str, Any] = {"folder": str(options.folder), "answers": len(answers)}
    out.print(f"written to {options.output}: {len(answers)} answers", markup=False)
    if all(question.answers for question in questions):
        references = [list(question.answers) for question in questions]
        result |= VqaAccuracy().compute(predictions=[answers[q.id] for q in questions], references=references)
        out.print(f"VQA accuracy {result['vqa_accuracy']:.4f}")
    _print_json(options, result)


def inspect_command(options: argparse.Namespace, out: Console, progress: Progress) -> None:
    """Show the heads of a checkpoint."""
    if options.theory:
        _inspect_theory(options, out, progress)
        return
    import torch

    from ..checkpoint.loading import load
    from ..errors import UnsupportedModelError
    from ..measure.counts import count_parameters, flops_per_layer
    from ..model.tokens import synthetic_batch
    from ..pipeline.bench import model_shapes
    from ..prunable.attention import find_attention
    from ..report.rows import layer_table
    from ..report.terminal import plain_table
    from ..slim.config import is_slim

    model = load(options.model, dtype=torch.float32)
    result: dict[str, Any] = {
        "model": str(options.model),
        "class": type(model).__name__,
        "slim": is_slim(model),
        "parameters": count_parameters(model),
    }
    out.print(f"{result['class']}, {result['parameters'] / 1e6:.2f} M parameters" + ", slim" * result["slim"])
    try:
        sites = find_attention(model, synthetic_batch(model, batch=2, sequence=8))
    except UnsupportedModelError as error:
        _print_json(options, result | {"can_be_cut": False, "reason": str(error)})
        raise
    lines = [(s.name, str(s.heads), str(s.key_value_heads), str(s.query_dim)) for s in sites]
    out.print(plain_table(("attention module", "heads", "key/value", "head width"), lines))
    out.print(f"{sum(s.heads for s in sites)} heads; all of them can be scored and cut")
    size, sequence = model_shapes(model, ())[0]
    layers = flops_per_layer(model, synthetic_batch(model, batch=size, sequence=sequence), sites)
    out.print(f"\nfloating-point operations at {size} x {sequence}")
    out.print(plain_table(*layer_table(layers)))
    modules = [{"name": s.name, "heads": s.heads, "key_value_heads": s.key_value_heads} for s in sites]
    _print_json(options, result | {"can_be_cut": True, "attention": modules, "flops_per_layer": layers})


def _inspect_theory(options: argparse.Namespace, out: Console, progress: Progress) -> None:
    """Show what the theory says of the model of a recipe."""
    from dataclasses import asdict

    from ..pipeline.prepare import prepare
    from ..recipe import PruningRecipe
    from ..report.terminal import plain_table
    from ..studies.theory import theory
    from ..values import dump_json

    if not options.model.endswith((".yaml", ".yml")):
        raise RecipeError([f"--theory needs a recipe, for its model and calibration rows, got {options.model!r}"])
    recipe = PruningRecipe.from_yaml(options.model)
    progress.stage("load")
    prepared = prepare(recipe)
    progress.stage("theory")
    alpha = 0.9 if recipe.prune.alpha == "auto" else recipe.prune.alpha
    found = theory(prepared.model, prepared.calibration, prepared.scored, alpha=alpha)
    lines = [
        (name, f"{n.output:.3g}", f"{n.blocks.max():.3g}", f"{n.activation.mean():.3g}", _range(n.deficit.tolist()))
        for name, n in found.modules.items()
    ]
    head = ("attention module", "|W_O|", "largest |W_O,h|", "mean |A_h|^2", "entropy deficit of heads")
    out.print(plain_table(head, lines))
    o = found.orthogonality
    out.print(
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
    out.print(plain_table(("heads removed by", "sum of HIS", "+ quadratic", "(by blocks)", "measured increase"), rows))
    out.print(f"of the {found.loss}; the bound takes W_O for the model's last layer", markup=False)
    _print_json(options, {"model": recipe.model, **json.loads(dump_json(asdict(found)))})


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def architectures_command(options: argparse.Namespace, out: Console, progress: Progress) -> None:
    """Show what every model type earned in the contract."""
    from rich.table import Table

    from ..prunable.architectures import STEPS, counts, read_table, why_not

    table = read_table(options.model_types)
    # Not terminal.plain_table: this command answers at once, without torch.
    lines = Table("model type", "class", *STEPS, box=None, pad_edge=False, header_style="bold")
    for name, entry in table["types"].items():
        without = "not run" if entry["kind"] == "tried" else entry["kind"]
        results = [entry.get("steps", {}).get(step, without) for step in STEPS]
        lines.add_row(name, entry.get("class", ""), *(_mark(result) for result in results))
    out.print(lines)
    for name in options.model_types:
        out.print(f"{name}: {why_not(table['types'][name]) or 'everything holds'}", markup=False, soft_wrap=True)
    if not options.model_types:
        number = counts(table)
        held = ", ".join(f"{step} {number[step]}" for step in STEPS)
        out.print(f"{number['types']} model types, {number['tried']} tried: {held}. Why not: name the model type.")
    _print_json(options, table)


def _mark(result: str) -> str:
    """One word for the result of a step."""
    if result in ("yes", "refused", "failed", "not tried", "not run"):
        return result
    return "n/a" if result.startswith("n/a") else "no"


def ui_command(options: argparse.Namespace, out: Console, progress: Progress) -> None:
    """Serve a page to explore other plans."""
    from ..ui.page import show

    page = show(options.folder, port=options.port, open_browser=not options.no_browser)
    out.print(f"{page.local_url} shows {options.folder}; Ctrl-C ends it", markup=False)
    page.block_thread()


def report_command(options: argparse.Namespace, out: Console, progress: Progress) -> None:
    """Show a finished run, or what a bench found, again."""
    from ..checkpoint.folders import replace_file
    from ..report.bench import Bench, print_bench, read_report, render_bench
    from ..report.html import render_html
    from ..report.plots import draw_report
    from ..report.report import Report
    from ..report.terminal import print_report

    found = read_report(options.folder)
    if isinstance(found, Bench):
        if options.figures is not None:
            raise RequestError(f"figures are drawn of a run, but {options.folder} is what a bench found; use --html")
        page, values = render_bench(found), asdict(found)
        print_bench(found, out)
    else:
        page, values = render_html(found), found.summary()
        print_report(found, out)
    if options.html is not None:
        replace_file(options.html, page)
        progress.stage(f"written: {options.html}")
    if options.figures is not None and isinstance(found, Report):
        files = draw_report(found, options.figures)
        progress.stage(f"drawn in {options.figures}: {', '.join(file.name for file in files)}")
    _print_json(options, values)


def _recipe(options: argparse.Namespace) -> PruningRecipe:
    from ..recipe import PruningRecipe

    overrides = {}
    for text in options.overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise RecipeError([f"--set takes KEY=VALUE, got {text!r}"])
        overrides[key] = yaml.safe_load(value)
    if options.output is not None:
        overrides["output"] = options.output
    return PruningRecipe.from_yaml(options.recipe, overrides)


def _list(name: str, text: str | None, convert: Callable[[str], Any]) -> tuple[Any, ...] | None:
    """The values of a comma-separated option."""
    if text is None:
        return None
    try:
        return tuple(convert(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        kind = {int: "whole numbers", float: "numbers"}.get(convert, "values")  # type: ignore[call-overload]
        raise RecipeError([f"--{name} takes {kind}, separated by commas, got {text!r}"]) from None


def _number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
        if len(shape) not in (1, 2) or min(shape) < 1:
            raise ValueError
        return shape
    except ValueError:
        raise RecipeError([f"--shape must be BATCHxSEQUENCE, or BATCH for images, got {text!r}"]) from None


def _print_plan(plan: Any, out: Console) -> None:
    from ..report.rows import head_map
    from ..report.terminal import head_map_text

    out.print(head_map_text(head_map(plan)))


def _print_json(options: argparse.Namespace, value: dict[str, Any]) -> None:
    if options.json:
        sys.stdout.flush()
        print(json.dumps(value))
