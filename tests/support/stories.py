"""The small real LLaMA of ../shared, dense and cut."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hies_export import find_modules, prune_units
from hies_export.kinds import MLP
from support.models import SHARED

# Of every layer: key/value groups of 4, a quarter of them removed in all, and neurons of 172.
KEPT = {
    "uniform": ((3, 129), (3, 129), (3, 129), (3, 129), (3, 129)),
    "uneven": ((3, 100), (4, 172), (2, 150), (4, 96), (2, 127)),
}


def stories(how: str = "dense") -> tuple[PreTrainedModel, Any]:
    """Return the model with its first groups and neurons, as `how` of `KEPT` or all, and its tokenizer."""
    folder = SHARED / "data" / "checkpoints" / "stories260K"
    if not folder.is_dir():
        pytest.skip("no ../shared: the small real LLaMA is not here")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model if how == "dense" else _first(model, KEPT[how]), AutoTokenizer.from_pretrained(folder)


def _first(model: PreTrainedModel, kept: tuple[tuple[int, int], ...]) -> PreTrainedModel:
    modules = find_modules(model, {"input_ids": torch.randint(3, 100, (2, 9))}, kinds=("attention", "mlp"))
    selection = {}
    for module in modules:
        groups, neurons = kept[int(module.name.split(".")[2])]
        count = neurons if module.kind == MLP else groups * module.group_size
        selection[module.name] = module.kept(range(count))
    return prune_units(model, selection, modules)
