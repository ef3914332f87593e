"""Measure what choosing heads and neurons costs, stage by stage, beside a plain forward and backward pass.

python bench/choosing.py [--width minilm | bert-base] [--rows 576] [--refit-rows 1024] [--tokens 28] [--flops 0.5]

A BERT of random weights goes through the stages of `criterion: compensated` in one process: statistics, inputs and
gradients of consumers, their moments, the order of removal, the table of FLOPs, the knapsack, the cut with its refit,
and the prediction of 512 rows. `x plain` divides the seconds by those of a plain forward and backward pass over the
rows that are scored. Only these ratios are meant to be read. The defaults are what fine-tuned text classifiers need.
Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json

import torch
from models import WIDTHS
from scoring import plain
from torch import Tensor

from hies_export.calibrate.moments import MomentStream
from hies_export.calibrate.readings import EffectStream
from hies_export.calibrate.statistics import DEFAULT_NEEDS, collect_statistics
from hies_export.evaluate.predict import predict
from hies_export.forms.cost.bundles import flops_table
from hies_export.forms.measure.machine import machine_facts
from hies_export.kinds import KINDS
from hies_export.model.copies import share_weights
from hies_export.model.tokens import synthetic_batch
from hies_export.progress import Clock
from hies_export.score.compensated import RemovalOptions, removal_chain, scores_of_chains
from hies_export.select.select import select_units
from hies_export.slim.cut import prune_units
from hies_export.slim.refit import refit
from hies_export.units.find import find_modules

BATCH = 32
HELD_OUT = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", choices=WIDTHS, default="minilm")
    parser.add_argument("--rows", type=int, default=576, help="rows to score on")
    parser.add_argument("--refit-rows", type=int, default=1024, help="rows to refit on")
    parser.add_argument("--tokens", type=int, default=28, help="tokens of a row")
    parser.add_argument("--flops", type=float, default=0.5, help="share of the FLOPs to keep")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = WIDTHS[options.width].build(device="cpu", dtype=torch.float32)

    def rows(count: int) -> list[dict[str, Tensor]]:
        made = [synthetic_batch(model, batch=BATCH, sequence=options.tokens) for _ in range(count // BATCH)]
        return [{**batch, "labels": torch.randint(0, 2, (BATCH,))} for batch in made]

    scored, clock, options_of_removal = rows(options.rows), Clock(), RemovalOptions()
    unlabelled = [{k: v for k, v in batch.items() if k != "labels"} for batch in rows(options.refit_rows)]
    with clock("find modules"):
        modules = find_modules(model, scored[0], kinds=KINDS)
    plain(model, scored[0], modules)  # warm up
    with clock("plain"):
        for batch in scored:
            plain(model, batch, modules)
    with clock("statistics"):
        collect_statistics(model, scored, modules, needs=(*DEFAULT_NEEDS, "fisher"))
    with clock("inputs and gradients"):
        effects = EffectStream(model, scored, modules)
        found = list(effects)
    with clock("moments"):
        moments = MomentStream(model, modules, unlabelled)
        known = list(moments)
    with clock("order of removal"):
        chains = []
        for (module, layer), (_, known_layer) in zip(found, known, strict=True):
            spread = known_layer.spread(centred=layer.centred)
            chains.append(removal_chain(layer, module, effects.samples, spread=spread, options=options_of_removal))
        scores = scores_of_chains(modules, chains, options_of_removal)
    with clock("table of FLOPs"):
        table = flops_table(model, modules, batch=synthetic_batch(model, batch=1, sequence=128))
    with clock("knapsack"):
        selection = select_units(scores, modules, table=table, ratio=options.flops)
    with clock("cut and refit"):
        slim = prune_units(share_weights(model), selection, modules, inplace=True)
        refit(slim, selection, modules, moments)
    with clock("predict"):
        predict(slim, rows(HELD_OUT))

    baseline = clock.seconds["plain"]
    for stage, seconds in clock.seconds.items():
        print(f"{stage:22} {seconds:8.1f} s   {seconds / baseline:6.2f} x plain")
    sizes = {"rows": options.rows, "refit_rows": options.refit_rows, "tokens": options.tokens}
    row = {"width": options.width, **sizes, "flops": options.flops, "seconds": clock.seconds}
    print(json.dumps({**row, "environment": machine_facts()}))


if __name__ == "__main__":
    main()
