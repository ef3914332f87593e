"""Every file that the tool reads: a small valid one, and what the tool does with it.

`tests/test_properties.py` and `scripts/quality/fuzz` damage the files and read them again.
"""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file
from transformers import ViTImageProcessorPil

from hies_export import PruningPlan, Report, apply_plan, load, prune_units
from hies_export.checkpoint.beside import read_card
from hies_export.checkpoint.load import load_version4
from hies_export.checkpoint.save import REFIT, read_refit
from hies_export.cli.arguments import read_recipe
from hies_export.data.processors import load_processor
from hies_export.forms.onnx.generator import _special_tokens
from hies_export.report.card import render_card
from hies_export.report.comparison import print_bench, read_report, render_bench
from hies_export.report.figures import draw_report
from hies_export.report.html import render_html, render_markdown
from hies_export.report.tables import plan_maps, print_maps, print_report
from hies_export.select.fingerprint import check_selection, digest_tensors
from hies_export.tasks import TASKS
from support.cuts import random_cut
from support.fields import used_checkpoints
from support.models import bert, causal_lm, cut_bert, generative_tokenizer, save_text_model, text_batch, vit, write_rows
from support.reads import Read
from support.reports import CASCADE, DATA, SERVED, TRIED, make_report


def console() -> Console:
    """Return a console that prints to nobody."""
    return Console(file=io.StringIO(), width=100)


def all_reads(folder: Path) -> list[Read]:
    """Write every valid file into a folder, and return what reads them."""
    torch.manual_seed(0)
    return [read for make in MAKERS for read in make(folder)]


def _tiny(**options: Any) -> Any:
    return bert(hidden_size=24, num_hidden_layers=2, intermediate_size=8, max_position_embeddings=16, **options)


def _plans(folder: Path) -> list[Read]:
    model = _tiny()
    _, plan, modules = random_cut(model, text_batch())
    plan = replace(plan, compensation={"method": "least_squares"})
    files = {name: folder / name for name in ("plan.json", "applied.json")}
    files["plan.json"].write_text(plan.to_json())
    files["applied.json"].write_text(plan.to_json())
    model.save_pretrained(folder / "dense")

    def cut(file: Path) -> None:
        read = PruningPlan.from_file(file)
        print_maps(plan_maps(read), console())
        assert PruningPlan.from_json(read.to_json()) == read or "nan" in read.to_json().lower()
        check_selection(read.kept, modules)
        prune_units(model, read, modules)

    def apply() -> None:
        apply_plan(PruningPlan.from_file(files["applied.json"]), folder / "dense", folder / "cut", overwrite=True)

    layers = {"a.weight": torch.randn(4, 6), "a.bias": torch.randn(4).half()}
    of_plan = replace(plan, compensation={"method": "bias", "refit": digest_tensors(layers)})
    save_file(layers, folder / REFIT)
    return [
        Read("refitted layers", "safetensors", folder / REFIT, lambda: read_refit(of_plan, folder / REFIT), 12),
        Read("plan, shown and cut", "json", files["plan.json"], lambda: cut(files["plan.json"]), 30),
        Read("plan, apply", "json", files["applied.json"], apply, 2),
    ]


def _checkpoints(folder: Path) -> list[Read]:
    dense, slim, sharded = folder / "checkpoint", folder / "slim", folder / "sharded"
    _tiny().save_pretrained(dense)
    random_cut(_tiny(), text_batch())[0].save_pretrained(slim)
    _tiny().save_pretrained(sharded, max_shard_size="20KB")
    index = sharded / "model.safetensors.index.json"
    assert index.is_file()
    assert "hies_export" in json.loads((slim / "config.json").read_text())

    return [
        Read("config, load", "json", dense / "config.json", lambda: load(dense), 6),
        Read("slim config, load", "json", slim / "config.json", lambda: load(slim), 8),
        Read("safetensors, load", "safetensors", dense / "model.safetensors", lambda: load(dense), 6),
        Read("index of shards, load", "json", index, lambda: load(sharded), 4),
    ]


def _older(folder: Path) -> list[Read]:
    """A checkpoint that transformers 4 pruned."""
    older = folder / "older"
    model = cut_bert(_tiny(), (4, 6))
    model.save_pretrained(older)
    config = json.loads((older / "config.json").read_text())
    (older / "config.json").write_text(json.dumps(config | {"pruned_heads": {"0": [4, 5]}}))
    return [Read("pruned_heads, upgrade", "json", older / "config.json", lambda: load_version4(older), 4)]


def _generation(folder: Path) -> list[Read]:
    decoder = folder / "decoder"
    causal_lm(num_hidden_layers=1, hidden_size=8).save_pretrained(decoder)
    model = load(decoder)
    tokens = torch.ones(1, 2, dtype=torch.int64)

    def generate() -> None:
        load(decoder).generate(tokens, max_new_tokens=1, do_sample=False)

    file = decoder / "generation_config.json"
    return [
        Read("generation config, load", "json", file, lambda: load(decoder), 4),
        Read("generation config, ONNX", "json", file, lambda: _special_tokens(decoder, model.config), 10),
    ]


def _processors(folder: Path) -> list[Read]:
    texts, images = folder / "tokenizer", folder / "images"
    generative_tokenizer().save_pretrained(texts)
    vit(hidden_size=24, num_hidden_layers=1).save_pretrained(images)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(images)

    def tokenizer() -> None:
        load_processor(texts, task=TASKS["text-generation"], for_prompts=True)

    return [
        Read("tokenizer_config.json", "json", texts / "tokenizer_config.json", tokenizer, 4),
        Read("tokenizer.json", "json", texts / "tokenizer.json", tokenizer, 4),
        Read(
            "preprocessor_config.json",
            "json",
            images / "preprocessor_config.json",
            lambda: load_processor(images, task=TASKS["image-classification"]),
            6,
        ),
    ]


def _runs(folder: Path) -> list[Read]:
    alone, drawn = folder / "report.json", folder / "drawn.json"
    report = make_report(
        neurons=16,
        outcome={"budget": {"flops": 0.8}, "predicted": 0.79, "found": {"value": 0.8}},
        data=DATA | {"name": "some/data"},
        tried=[TRIED | {"criterion": "his", "quality": 0.8, "stability": 0.9, "chosen": True}],
    )
    for file in (alone, drawn):
        file.write_text(report.to_json())
    served = folder / "served.json"
    served.write_text(json.dumps(json.loads(make_report(**SERVED).to_json()) | {"cascade": CASCADE}))
    bench = {"a": "one", "b": "other", "environment": {"cpu": "c"}}
    bench |= {"latency": [asdict(row) for row in report.latency[:2]]}
    (folder / "bench.json").write_text(json.dumps(bench))

    def show(file: Path) -> None:
        found = read_report(file)
        if isinstance(found, Report):
            print_report(found, console())
            for render in (render_html, render_markdown, render_card):
                render(found)
        else:
            print_bench(found, console())
            render_bench(found)

    def draw() -> None:
        found = read_report(drawn)
        if isinstance(found, Report):
            draw_report(found)

    return [
        Read("report.json, shown", "json", alone, lambda: show(alone), 20),
        Read("report.json of a deployment", "json", served, lambda: show(served), 15),
        Read("report.json, figures", "json", drawn, draw, 1),
        Read("bench --json", "json", folder / "bench.json", lambda: show(folder / "bench.json"), 12),
    ]


def _small(folder: Path) -> list[Read]:
    card = folder / "card"
    card.mkdir()
    (card / "README.md").write_text("---\nlicense: mit\nbase_model: some/model\n---\n# Title\n")
    return [Read("card of a model", "bytes", card / "README.md", lambda: read_card(card).get("license"), 5)]


def _recipes(folder: Path) -> list[Read]:
    project = folder / "project"
    project.mkdir()
    save_text_model(project / "model", hidden_size=24)
    write_rows(project / "train.jsonl", 4)
    recipe, setting = project / "recipe.yaml", project / "setting"
    recipe.write_text(
        "model: model\ntask: text-classification\ndata:\n  files: {train: train.jsonl, validation: train.jsonl}\n"
        "  text: [sentence, other]\n  label: label\n  max_length: 16\ncalibration: {split: train, samples: 4}\n"
        "prune:\n  criterion: hies\n  alpha: 0.5\n  budget: {heads: 0.5}\n  compensation: {method: least_squares}\n"
        "measure: {runtimes: [torch], shapes: [[1, 8]]}\noutput: out\n"
    )
    setting.write_text("prune.alpha=0.5")
    served = project / "served.yaml"
    served.write_text(
        recipe.read_text().replace("out\n", "served\n")
        + "held_out: {split: validation, samples: 4}\nexport: {quantize: int8}\n"
        "cascade: {disagreement: 0.9, samples: 4}\n"
    )

    def read(file: Path, *overrides: str) -> None:
        read_recipe(argparse.Namespace(recipe=str(file), overrides=overrides, output=None))

    def override() -> None:
        read(recipe, setting.read_bytes().decode(errors="replace"))

    return [
        Read("recipe", "yaml", recipe, lambda: read(recipe), 25),
        Read("recipe of a cascade", "yaml", served, lambda: read(served), 10),
        Read("--set", "setting", setting, override, 20),
    ]


MAKERS = (*(_plans, _checkpoints, _older, _generation, _processors, used_checkpoints), *(_runs, _small, _recipes))
