"""Show how often a promise about rankings holds on new queries: `keep: 0.99` of nDCG@10, made on draws of queries.

Cuts of several sizes are made once, on one half of BoolQ's validation rows. Each draw divides the questions of the
other half in two: on one part, the search of `keep` finds the largest cut that keeps 99 % of nDCG@10, and on the other
that cut is measured. Both use the dense model's index.

    python bench/embedding_promise.py --model sentence-transformers/all-MiniLM-L6-v2 --data DIR --draws 10
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from embedding_data import boolq_halves
from embedding_quality import recipe, rows, write

from hies_export.evaluate.interval import FAILURES, confidence_of_each, ratio_ends
from hies_export.evaluate.predict import predict
from hies_export.pipeline.choose import choose
from hies_export.pipeline.load_recipe import load_recipe
from hies_export.pipeline.search import largest
from hies_export.pipeline.stages import calibrate, cut_beside, refit_of, score
from hies_export.recipe.budget import Budget


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        dense, cuts = _ndcg(options, Path(folder))
    print("| share of the FLOPs | nDCG@10 of all questions |\n| --- | --- |")
    for share, found in zip((1.0, *options.shares), (dense, *cuts), strict=True):
        print(f"| {share:.2f} | {found.mean():.4f} |")
    print("\n| draw | found | promised on its questions | kept on the others |\n| --- | --- | --- | --- |")
    held = 0
    for draw in range(options.draws):
        order = torch.randperm(len(dense), generator=torch.Generator().manual_seed(draw))
        promised, others = order[: len(order) // 2], order[len(order) // 2 :]
        ends = [_low_end(cut[promised], dense[promised]) for cut in cuts]
        size = largest(len(cuts), partial(_holds, ends, options.keep), near=len(cuts) // 2, failures=FAILURES)
        kept = (cuts[size - 1][others].mean() / dense[others].mean()).item() if size else 1.0
        held += kept >= options.keep
        found = f"{options.shares[size - 1]:.2f} | at least {100 * ends[size - 1]:.2f} %" if size else "no cut |"
        print(f"| {draw} | {found} | {100 * kept:.2f} % |")
    print(f"\nkept in {held} of {options.draws} draws")


def _low_end(slim: torch.Tensor, dense: torch.Tensor) -> float:
    return ratio_ends(slim, dense, confidence_of_each(FAILURES))[0]


def _holds(ends: list[float], keep: float, size: int) -> bool:
    return ends[size - 1] >= keep


def _ndcg(options: argparse.Namespace, folder: Path) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return nDCG@10 of every question with the dense model's index, (questions,), by the dense model and by cuts."""
    scored, judged = boolq_halves(options.data, options.seed)
    files = {"train": folder / "train.jsonl", "validation": folder / "validation.jsonl"}
    for file, split in zip(files.values(), (scored, judged), strict=True):
        write(file, rows(split))
    columns: dict[str, Any] = {"query": "question", "document": "passage"}
    prepared, _ = load_recipe(recipe(options, options.seed, columns, files, folder))
    judge = prepared.judge(prepared.rows.evaluation, metrics=("ndcg@10",))
    statistics = calibrate(prepared)
    scored, refit = score(prepared, statistics), refit_of(prepared, statistics)

    def ndcg(model: Any) -> torch.Tensor:
        found = judge.rankings(predict(model, judge.batches)).ndcg
        assert found is not None
        return found

    cuts = []
    for share in options.shares:
        asked = prepared.options.model_copy(update={"budget": Budget(flops=share)})
        choice = choose(replace(prepared, options=asked), statistics, scored)
        cuts.append(ndcg(cut_beside(prepared, choice.plan.kept, refit)))
    return ndcg(prepared.model), cuts


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder or Hub id of an embedding model")
    parser.add_argument("--data", type=Path, required=True, help="folder with boolq/, gzipped JSON lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--keep", type=float, default=0.99)
    shares = [0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4]
    parser.add_argument("--shares", type=float, nargs="+", default=shares, help="sizes, from the largest share left")
    parser.add_argument("--scored", type=int, default=128, help="rows to score on")
    parser.add_argument("--refitted", type=int, default=1024, help="rows to refit on")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
