"""Cut masks chosen as Kwon et al. do (https://arxiv.org/abs/2204.09656), for real, and export by this project.

Our version of it, on as many rows as theirs; `hies_lab.baselines.kwon` says what differs. Their masks stay
masks.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from peers.program import Given, Way, main
from transformers import AutoModelForSequenceClassification

from hies_export import prune
from hies_export.calibrate.moments import MomentStore
from hies_lab.baselines.kwon import mask_gradients, rearranged, scale_units

SAMPLES = 2048  # theirs
BATCH = 32


def tuned(given: Given, out: Path) -> None:
    """Choose heads and neurons by Fisher information, rearrange them, and tune a scalar for each that stays."""
    model = AutoModelForSequenceClassification.from_pretrained(given.checkpoint).eval()
    rows = [
        {name: torch.from_numpy(array) for name, array in batch.items()} for batch in given.batches(SAMPLES, size=BATCH)
    ]
    budget = {"flops": given.flops}
    found = prune(model, rows, held_out=[], modules=["attention", "mlp"], criterion="fisher", budget=budget)
    modules = found.pruning.scored
    kept = rearranged(found.plan.kept, modules, mask_gradients(model, rows, modules))
    made = prune(model, rows, held_out=[], plan=replace(found.plan, kept=kept))
    scale_units(made.model, kept, modules, MomentStore(model, modules, rows))
    print(
        f"{made.flops.ratio:.4f} of the FLOPs, {made.plan.removed} heads and {made.plan.removed_neurons} neurons gone"
    )
    with tempfile.TemporaryDirectory() as folder:
        made.export_onnx(Path(folder) / "made")
        shutil.copytree(Path(folder) / "made", out, dirs_exist_ok=True)


WAYS = {"scalars": Way("Kwon et al. 2022, cut", "float32", tuned)}

if __name__ == "__main__":
    main(WAYS)
