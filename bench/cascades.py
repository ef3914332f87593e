"""Draw held-out rows many times, promise on them how many answers a cascade changes, and count how often that holds.

python bench/cascades.py RUN recipes/minilm-sst2.yaml --pool "train[60%:]" [--rows 6000] [--held-out 1024] [--draws 20]
    [--other validation] [--disagreement 0.01 --disagreement 0.005] [--set FIELD=VALUE ...]

RUN is the folder of a run with a cascade, whose two models answer all rows of the pool once. Every draw chooses a
threshold on some of them, and the others check the promise; so do the rows of another split, if one is given.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from hies_export.cli.arguments import read_overrides
from hies_export.errors import RequestError
from hies_export.evaluate.predict import logits_by
from hies_export.forms.cascade.threshold import choose_threshold, margins
from hies_export.forms.onnx.export import export_onnx
from hies_export.forms.runtimes.base import load_runtime
from hies_export.pipeline.load_recipe import load_recipe
from hies_export.pipeline.recipe import PruningRecipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--pool", required=True, help="split to draw from")
    parser.add_argument("--rows", type=int, help="rows of the pool; all by default")
    parser.add_argument("--held-out", type=int, default=1024)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--other", action="append", default=[], help="splits that are not drawn from")
    parser.add_argument("--disagreement", type=float, action="append")
    parser.add_argument("--set", dest="fields", action="append", default=[], help="as of hies-export run")
    options = parser.parse_args()
    slim, dense = answers(options, options.pool, options.rows)
    others = {split: answers(options, split, None) for split in options.other}
    print(f"{options.run.name}: {len(slim):,} rows of {options.pool}, {options.held_out:,} held out in each draw\n")
    print("| promised | kept by the other rows of the pool | answers kept | passed on | " + " | ".join(others) + " |")
    print("| --- " * (4 + len(others)) + "|")
    for promised in options.disagreement or (0.01, 0.005):
        print(row(promised, slim, dense, others, options.held_out, options.draws))


def answers(options: argparse.Namespace, split: str, rows: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the slim file and of the dense model, (rows, classes), for the rows of a split."""
    wanted = {"evaluation.split": split, "evaluation.samples": rows}
    prepared, _ = load_recipe(
        PruningRecipe.from_yaml(options.recipe, overrides=wanted | read_overrides(options.fields))
    )
    folder = options.run / "onnx-int8"
    file = folder if folder.is_dir() else options.run / "onnx"
    with tempfile.TemporaryDirectory() as temporary:
        dense = export_onnx(prepared.model, Path(temporary) / "dense", batch=prepared.sample)
        found = [
            logits_by(load_runtime("onnxruntime-cpu", place).prediction, prepared.rows.evaluation)
            for place in (file, dense.folder)
        ]
    return found[0], found[1]


def row(
    promised: float,
    slim: torch.Tensor,
    dense: torch.Tensor,
    others: dict[str, tuple[torch.Tensor, torch.Tensor]],
    held_out: int,
    draws: int,
) -> str:
    """Return what came of one promise over all draws, as a row of the table."""
    generator = torch.Generator().manual_seed(0)
    kept, passed = [], []
    elsewhere: dict[str, list[float]] = {split: [] for split in others}
    for _ in range(draws):
        order = torch.randperm(len(slim), generator=generator)
        mine, rest = order[:held_out], order[held_out:]
        try:
            promise = choose_threshold(slim[mine], dense[mine], promised)
        except RequestError as error:
            return f"| {100 * promised:g} % | refused: {error} |"
        share, went_on = held(slim[rest], dense[rest], promise.threshold)
        kept.append(share)
        passed.append(went_on)
        for split, both in others.items():
            elsewhere[split].append(held(*both, promise.threshold)[0])
    cells = [f"{100 * promised:g} %", counted(kept, promised), f"{percent(kept)}, at least {100 * min(kept):.2f} %"]
    cells += [percent(passed), *(f"{counted(found, promised)}, {percent(found)}" for found in elsewhere.values())]
    return f"| {' | '.join(cells)} |"


def held(slim: torch.Tensor, dense: torch.Tensor, threshold: float) -> tuple[float, float]:
    """Return the share of rows that get the dense model's answer, and that of rows that go on to it."""
    unsure = margins(slim) <= threshold
    same = unsure | (slim.argmax(-1) == dense.argmax(-1))
    return same.double().mean().item(), unsure.double().mean().item()


def counted(found: list[float], promised: float) -> str:
    return f"{sum(share >= 1 - promised for share in found)} of {len(found)}"


def percent(shares: list[float]) -> str:
    return f"{100 * sum(shares) / len(shares):.2f} %"


if __name__ == "__main__":
    main()
