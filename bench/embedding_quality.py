"""Prune an embedding model to several shares of its FLOPs, and judge it with the old index, and with all re-embedded.

Units are scored and refitted on one half of BoolQ's validation rows, or on other text, and judged on the other half:
questions search passages. STS-B's test pairs are rows of another kind. Everything but the cut is computed once a seed.

    python bench/embedding_quality.py --model sentence-transformers/all-MiniLM-L6-v2 --data DIR --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from embedding_data import boolq_halves, stsb_pairs
from rich.console import Console

from hies_export import PruningRecipe
from hies_export.cli.terminal import TerminalProgress
from hies_export.evaluate.judge import Judge
from hies_export.evaluate.predict import predict
from hies_export.pipeline.choose import choose
from hies_export.pipeline.load_recipe import load_recipe
from hies_export.pipeline.stages import calibrate, cut_beside, refit_of, score
from hies_export.recipe.budget import Budget


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    print(
        "| text | seed | share | index as it is: nDCG@10 | kept | own | top 1 | cosine | re-embedded: nDCG@10 | own |",
        end="",
    )
    print(" top 1 | STS-B Spearman | heads | neurons |\n|" + " --- |" * 14)
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            _judge_seed(options, seed, Path(folder))


def _judge_seed(options: argparse.Namespace, seed: int, folder: Path) -> None:
    scored, judged = boolq_halves(options.data, seed)
    write(folder / "train.jsonl", rows(scored))
    write(folder / "validation.jsonl", rows(judged))
    first, second, scores = stsb_pairs(options.data)
    pairs = zip(first, second, scores, strict=True)
    write(folder / "pairs.jsonl", [{"a": a, "b": b, "score": score} for a, b, score in pairs])
    columns: dict[str, Any] = {"query": "question", "document": "passage"}
    files = {"train": folder / "train.jsonl", "validation": folder / "validation.jsonl"}
    resolved, _ = load_recipe(recipe(options, seed, columns, files, folder))
    prepared = resolved
    of_pairs, _ = load_recipe(
        recipe(
            options, seed, {"text": ["a", "b"], "label": "score"}, dict.fromkeys(files, folder / "pairs.jsonl"), folder
        )
    )
    judges = [replace(of, model=resolved.model).judge(of.rows.evaluation, index=None) for of in (resolved, of_pairs)]
    if options.text is not None:
        files = dict.fromkeys(files, options.text)
        prepared, _ = load_recipe(recipe(options, seed, {"text": options.column}, files, folder))
    prepared = replace(prepared, options=resolved.options, progress=TerminalProgress(Console(stderr=True)))
    statistics = calibrate(prepared)
    scored, refit = score(prepared, statistics), refit_of(prepared, statistics)
    _show(options, seed, 1.0, prepared.model, judges, None)
    for share in options.shares:
        asked = prepared.options.model_copy(update={"budget": Budget(flops=share)})
        choice = choose(replace(prepared, options=asked), statistics, scored)
        slim = cut_beside(prepared, choice.plan.kept, refit)
        _show(options, seed, share, slim, judges, choice.plan)


def _show(options: argparse.Namespace, seed: int, share: float, model: Any, judges: list[Judge], plan: Any) -> None:
    judge, of_pairs = judges
    predictions = predict(model, judge.batches)
    kept, low = judge.kept(predictions)
    ranking = judge.ranking(predictions)
    old, new = ranking["dense_index"], ranking["slim_index"]
    correlation = of_pairs.of(predict(model, of_pairs.batches)).metrics["spearman"]
    units = {"attention": "", "mlp": ""}
    if plan is not None:
        for kind in units:
            of_kind = plan.of_kind(kind).values()
            units[kind] = f"{sum(len(k.units) for k in of_kind) / sum(k.total for k in of_kind):.2f}"
    text = "BoolQ" if options.text is None else options.text.name
    cells = (
        *(text, str(seed), f"{share:.2f}", f"{old['ndcg']:.4f}", f"{100 * kept:.1f} % (at least {100 * low:.1f})"),
        *(f"{old['own_ndcg']:.4f}", f"{100 * old['top1']:.1f} %", f"{old['cosine']:.4f}", f"{new['ndcg']:.4f}"),
        *(f"{new['own_ndcg']:.4f}", f"{100 * new['top1']:.1f} %", f"{100 * correlation:.2f}", *units.values()),
    )
    print(f"| {' | '.join(cells)} |", flush=True)


def recipe(
    options: argparse.Namespace, seed: int, columns: dict[str, Any], files: dict[str, Path], folder: Path
) -> PruningRecipe:
    return PruningRecipe(
        model=options.model,
        task="feature-extraction",
        data={"files": files, **columns},
        calibration={"samples": options.scored, "seed": seed},
        prune={
            "modules": ["attention", "mlp"],
            "criterion": "compensated",
            "budget": {"flops": 0.5},
            "compensation": {"method": "least_squares", "samples": options.refitted},
        },
        measure={"shapes": [[1, 128]]},
        output=folder / "run",
    )


def rows(split: Any) -> list[dict[str, Any]]:
    places = zip(split.queries, split.right, strict=True)
    return [{"question": query, "passage": split.documents[place]} for query, place in places]


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder or Hub id of an embedding model")
    parser.add_argument("--data", type=Path, required=True, help="folder with boolq/ and stsb/, gzipped JSON lines")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.8, 0.7, 0.6, 0.5])
    parser.add_argument("--scored", type=int, default=128, help="rows to score on")
    parser.add_argument("--refitted", type=int, default=1024, help="rows to refit on")
    parser.add_argument("--text", type=Path, help="a file of other text to score and refit on")
    parser.add_argument("--column", default="text", help="its column")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
