"""Make the promise of `budget: {keep: 0.99}` with many seeds, and count how often other rows keep it.

python bench/promises.py sst2 stsb-neurons [--keep 0.99] [--seeds 10] [--divisions 1] [--further] [--one-source]
    [--set FIELD=VALUE ...]

Each seed draws other rows to score and to refit on. The evaluated split is divided anew, one or more times for each
seed, into rows to promise on and rows that judge. With `--further`, the promise is also made on further rows of the
training split, and judged on the same rows. With `--one-source` the evaluated rows are of the training split as well,
of the 40 % that nothing else is drawn from.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hies_export.calibrate.statistics import Statistics
from hies_export.cli.arguments import read_overrides
from hies_export.data.batches import Batch
from hies_export.evaluate import judge as judging
from hies_export.evaluate.interval import lower_share
from hies_export.evaluate.judge import Judge
from hies_export.evaluate.predict import predict
from hies_export.pipeline import draw as draws
from hies_export.pipeline import search
from hies_export.pipeline.choose import sizes_of
from hies_export.pipeline.job import Job
from hies_export.pipeline.load_job import load_job
from hies_export.pipeline.recipe import PruningRecipe
from hies_export.pipeline.stages import calibrate, cut_beside, refit_of, score
from hies_export.score.criteria import Scores
from hies_export.tasks import Predictions, task_of

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SPLITS = {"calibration.split": "train[:60%]", "evaluation.split": "train[60%:]"}
COLUMNS = (
    "promised on",
    "seed",
    "division",
    "FLOPs left",
    "rows",
    "kept",
    "at least",
    "other rows",
    "kept",
    "at least",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="such as sst2, for recipes/minilm-sst2.yaml")
    parser.add_argument("--keep", type=float, default=0.99)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--divisions", type=int, default=1, help="of the evaluated split, for each seed")
    parser.add_argument("--first", type=int, default=0, help="the first seed, to go on after some")
    parser.add_argument("--rows", type=int, help="evaluation rows; all by default")
    parser.add_argument("--one-source", action="store_true")
    parser.add_argument("--further", action="store_true")
    parser.add_argument("--set", dest="fields", action="append", default=[], help="as of hies-export run")
    options = parser.parse_args()
    for name in options.recipes:
        print(f"\n## {name}, {100 * options.keep:g} % promised{', one source' if options.one_source else ''}\n")
        print(f"| {' | '.join(COLUMNS)} |\n{'| --- ' * len(COLUMNS)}|", flush=True)
        found: dict[str, list[float]] = {}
        for seed in range(options.first, options.seeds):
            for way, kept in rows_of(name, seed, options):
                found.setdefault(way, []).append(kept)
        for way, shares in found.items():
            held = sum(share >= options.keep for share in shares)
            mean, least = (f"{100 * share:.2f} %" for share in (sum(shares) / len(shares), min(shares)))
            print(f"\n{way}: kept by {held} of {len(shares)}; mean {mean}, least {least}", flush=True)


def rows_of(name: str, seed: int, options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Print a row of the table for each way to promise, and yield the share that the judging rows keep."""
    fields: dict[str, Any] = {
        "prune.criterion": "compensated",
        "prune.budget": {"keep": {"predictions": options.keep}},
        "calibration.seed": seed,
        "evaluation.samples": options.rows,
        **(SPLITS if options.one_source else {}),
        **read_overrides(options.fields),
    }
    recipe = PruningRecipe.from_yaml(RECIPES / f"minilm-{name}.yaml", overrides=fields)
    known: tuple[Statistics, list[Scores]] | None = None
    for division in range(options.divisions):
        draws.EVALUATION_SEED = options.divisions * seed + division
        resolved = load_job(recipe)
        if known is None:
            predict_once()
            statistics = calibrate(resolved)
            known = statistics, score(resolved, statistics)
        judge = resolved.judge(resolved.rows.evaluation)
        ways = {"evaluated split": resolved.rows.held_out}
        if options.further and division == 0:
            # As if no evaluated row could be held out. The rows to score and to refit on, and so all scores, stay.
            further = recipe.with_overrides({"evaluation.rows": "first"})
            of_training = load_job(further, like=resolved).rows.held_out
        if options.further:
            ways["further training rows"] = of_training
        for way, rows in ways.items():
            job = replace(resolved, rows=replace(resolved.rows, held_out=rows))
            yield way, row_of(f"{way} | {seed} | {division}", job, *known, judge)


def row_of(name: str, job: Job, statistics: Statistics, scored: list[Scores], judge: Judge) -> float:
    """Make a promise, print its row of the table after a name, and return the share that the judging rows keep."""
    keep = job.budget.keep
    assert keep is not None
    choice = search.search(job, statistics, scored, sizes_of(job, None))
    refit = refit_of(job, statistics, choice.token_weights)
    found = search.predict_pruned(job.model, choice.plan.kept, job.modules, judge.batches, refit=refit)
    same, outcome = judge.agreement(found), choice.outcome
    kept = same.double().mean().item()
    # A search ends at the last cut that passed.
    *_, chosen = (row for row in outcome.judged if "guess" not in row and row["at_least"] >= keep.predictions)
    flops_left = job.flops_left(choice.plan.kept)
    shares = [flops_left, chosen["kept"], chosen["at_least"], kept, lower_share(same)]
    flops, *shown = (f"{100 * share:.2f} %" for share in shares)
    cells = [name, flops, f"{outcome.samples:,}", *shown[:2], f"{len(same):,}", *shown[2:]]
    print(f"| {' | '.join(cells)} |", flush=True)
    return kept


def predict_once() -> None:
    """Let all searches of a seed share cuts and predictions: the same units are refitted in the same way in all."""
    cuts: dict[Any, Any] = {}
    known: dict[Any, Any] = {}

    def predict_rows(model: Any, batches: list[Batch], name: Any) -> Predictions:
        found = []
        for batch in batches:
            rows = [
                ids[mask.bool()].numpy().tobytes()
                for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
            ]
            new = [place for place, row in enumerate(rows) if (name, row) not in known]
            if new:
                predicted = predict(model, [{key: value[new] for key, value in batch.items()}])
                known.update({(name, rows[place]): one for place, one in zip(new, predicted.values, strict=True)})
            found += [known[name, row] for row in rows]
        return Predictions(task_of(model).predicts, torch.stack(found))

    def predict_pruned(model: Any, selection: Any, modules: Any, batches: Any, *, refit: Any, **_: Any) -> Predictions:
        units = tuple(kept.units for kept in selection.values())
        if units not in cuts:
            cuts[units] = cut_beside(model, selection, modules, refit)
        return predict_rows(cuts[units], batches, units)

    search.predict_pruned = predict_pruned
    judging.predict = lambda model, batches, **_: predict_rows(model, batches, "dense")


if __name__ == "__main__":
    main()
