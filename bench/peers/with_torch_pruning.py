"""Prune heads and neurons by Torch-Pruning with Taylor importance, and export by torch.onnx.

Source: https://github.com/VainF/Torch-Pruning, examples/transformers/prune_hf_bert.py, which also narrows the residual
stream, and prune_hf_vit.py, which takes gradients for Taylor importance from ten batches of 64 rows, and whose option
`--bottleneck` leaves the stream as wide as it is. A ratio is given and no budget, so the ratio is searched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch_pruning as tp
from peers.plain import export, load
from peers.program import Given, Way, main
from torch.utils.flop_counter import FlopCounterMode

BATCH, BATCHES = 64, 10
HALVINGS = 10


def pruned(given: Given, out: Path, *, bottleneck: bool) -> None:
    """Prune to the share of FLOPs that is given, and export."""
    model = load(given.checkpoint)
    gradients = loss_gradients(model, given)
    model = at_share(lambda ratio: cut(model, gradients, ratio, bottleneck=bottleneck), flops_of(model), given.flops)
    export(model, out / "model.onnx")


def loss_gradients(model: Any, given: Given) -> dict[str, torch.Tensor]:
    """Return the gradients of the loss on the calibration rows, added up over batches."""
    for batch in given.batches(BATCH * BATCHES, size=BATCH):
        model(**{name: torch.from_numpy(array) for name, array in batch.items()}).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def cut(dense: Any, gradients: dict[str, torch.Tensor], ratio: float, *, bottleneck: bool) -> Any:
    """Return a pruned copy; the steps are those of the example for BERT, with a classifier in place of the pooler."""
    model = copy.deepcopy(dense)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients.get(name)
    attentions = [module for module in model.modules() if type(module).__name__ == "BertSelfAttention"]
    heads = {
        projection: attention.num_attention_heads
        for attention in attentions
        for projection in (attention.query, attention.key, attention.value)
    }
    ignored = [model.classifier, model.bert.pooler]
    if bottleneck:
        ignored += [
            module.dense for module in model.modules() if type(module).__name__ in ("BertSelfOutput", "BertOutput")
        ]
    pruner = tp.pruner.BasePruner(
        model,
        example(),
        importance=tp.importance.TaylorImportance(),
        global_pruning=True,
        pruning_ratio=ratio,
        head_pruning_ratio=ratio,
        num_heads=heads,
        prune_num_heads=True,
        prune_head_dims=False,
        output_transform=lambda found: found.logits.sum(),
        ignored_layers=ignored,
    )
    for group in pruner.step(interactive=True):
        group.prune()
    for attention in attentions:
        attention.num_attention_heads = pruner.num_heads[attention.query]
        attention.attention_head_size = attention.query.out_features // attention.num_attention_heads
        attention.all_head_size = attention.query.out_features
    return model


def at_share(cut: Callable[[float], Any], dense: int, share: float) -> Any:
    """Return the model of the smallest ratio that leaves no more than a share of the FLOPs."""
    low, high, found = 0.0, 1.0, None
    for _ in range(HALVINGS):
        ratio = (low + high) / 2
        model = cut(ratio)
        left = flops_of(model) / dense
        print(f"ratio {ratio:.4f}: {left:.4f} of the FLOPs")
        if left > share:
            low = ratio
        else:
            high, found = ratio, model
    if found is None:
        raise RuntimeError(f"no ratio leaves {share:g} of the FLOPs, the last left {left:.3f}")
    return found


def example() -> dict[str, torch.Tensor]:
    """Return a row of 128 tokens."""
    ids = torch.ones(1, 128, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}


def flops_of(model: Any) -> int:
    """Return the FLOPs of a row of 128 tokens, products of attention included."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**example())
    return int(counter.get_total_flops())


WAYS = {
    "taylor": Way("Torch-Pruning, Taylor", "float32", partial(pruned, bottleneck=False)),
    "bottleneck": Way("Torch-Pruning, Taylor, heads and neurons alone", "float32", partial(pruned, bottleneck=True)),
}

if __name__ == "__main__":
    main(WAYS)
