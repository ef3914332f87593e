"""Make the promise of `budget: {keep: 0.99}` with many seeds, and count how often the evaluation rows keep it.

python bench/promises.py sst2 stsb [--keep 0.99] [--seeds 10] [--one-source] [--set FIELD=VALUE ...]

Each seed draws other rows to score, to refit and to choose on. With `--one-source` the evaluation rows are of the
training split as well, of the 40 % that nothing else is drawn from.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hies_export.evaluate.interval import lower_share
from hies_export.evaluate.judge import Judge
from hies_export.evaluate.predict import predict
from hies_export.pipeline.prune import prune_prepared
from hies_export.pipeline.resolve import resolve
from hies_export.recipe import PruningRecipe
from hies_export.report.outcomes import KeepOutcome

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SPLITS = {"calibration.split": "train[:60%]", "evaluation.split": "train[60%:]"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="such as sst2, for recipes/minilm-sst2.yaml")
    parser.add_argument("--keep", type=float, default=0.99)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed, to go on after some")
    parser.add_argument("--rows", type=int, help="evaluation rows; all by default")
    parser.add_argument("--one-source", action="store_true")
    parser.add_argument("--set", dest="fields", action="append", default=[], help="as of hies-export run")
    options = parser.parse_args()
    for name in options.recipes:
        print(f"\n## {name}, {100 * options.keep:g} % promised{', one source' if options.one_source else ''}\n")
        print("| seed | FLOPs left | kept of held-out rows | at least | kept of evaluation rows | rows | at least |")
        print("| --- " * 7 + "|", flush=True)
        found = [row_of(name, seed, options) for seed in range(options.first, options.seeds)]
        held = sum(kept >= options.keep for kept in found)
        print(f"\nkept by {held} of {len(found)} seeds; mean {100 * sum(found) / len(found):.2f} %", flush=True)


def row_of(name: str, seed: int, options: argparse.Namespace) -> float:
    """Print a row of the table, and return the share of predictions that the evaluation rows keep."""
    fields: dict[str, Any] = {
        "prune": {
            "modules": ["attention", "mlp"],
            "criterion": "compensated",
            "budget": {"keep": options.keep},
            "compensation": {"method": "least_squares", "samples": 1024},
        },
        "calibration.samples": 256,
        "calibration.seed": seed,
        "evaluation.samples": options.rows,
    }
    asked = dict(field.split("=", 1) for field in options.fields)
    splits = SPLITS if options.one_source else {}
    recipe = PruningRecipe.from_yaml(RECIPES / f"minilm-{name}.yaml", overrides=fields | splits | asked)
    resolved = resolve(recipe)
    prepared, how = resolved.prepared, resolved.options
    result = prune_prepared(prepared, how, compensation=how.compensation, dtype=resolved.source.dtype)
    judge = Judge.on(prepared.model, resolved.evaluation, **vars(prepared.judged))
    same = judge.agreement(predict(result.model, resolved.evaluation))
    assert isinstance(result.budget, KeepOutcome)
    shares = [result.flops.ratio, result.budget.slim, result.budget.slim_end, same.double().mean().item()]
    cells = [f"{seed}", *(f"{100 * share:.2f} %" for share in shares if share is not None)]
    print("| " + " | ".join([*cells, str(len(same)), f"{100 * lower_share(same):.2f} %"]) + " |", flush=True)
    return shares[-1] or 0.0


if __name__ == "__main__":
    main()
