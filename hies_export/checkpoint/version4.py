"""Load a checkpoint whose heads were pruned by transformers 4, which transformers 5 cannot load.

`prune_heads` of transformers 4 cut the weights as `hies_export.slim.cut` does. It wrote the removed heads into the
config, as `pruned_heads`: layer -> original indices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..errors import RequestError, UnsupportedModelError, listed, refusing
from ..model import internals
from ..model.tokens import synthetic_batch
from ..prunable.attention import find_attention
from ..slim.config import is_slim
from ..slim.cut import prune_units
from ..units import PrunableModule
from ..values import PruningPlan, library_versions
from .classes import AGAIN, find_model_class, hub_options
from .weights import load_weights, skeleton_of_files, stored_shapes


@internals.never_asking()
def load_version4(path: str | Path, **kwargs: Any) -> tuple[PreTrainedModel, PruningPlan]:
    """Load a checkpoint with `pruned_heads`; return the slim model, and the plan that cuts the original to it."""
    stock = find_model_class(path, **hub_options(kwargs))
    with refusing(f"the heads that pruned_heads names must be those of the model, but in {path} they are not", AGAIN):
        config: Any = stock.config_class.from_pretrained(path, **hub_options(kwargs))  # type: ignore[union-attr]
        pruned = {int(layer): heads for layer, heads in (getattr(config, "pruned_heads", None) or {}).items() if heads}
        if not pruned:
            raise RequestError(
                f"a checkpoint to upgrade must have pruned_heads in its config, but {path} has none; it loads as it is"
            )
        del config.pruned_heads
        shapes = stored_shapes(path)
        skeleton = skeleton_of_files(stock, config, path, shapes)
        modules = find_attention(skeleton, synthetic_batch(skeleton, batch=2, sequence=3))
        plan = _plan(path, pruned, modules)
        skeleton = prune_units(skeleton, plan, modules, inplace=True)
    slim_class = type(skeleton)
    # These files have older names, which a slim class does not rename by itself.
    reader: Any = internals.reads_old_names(slim_class) if is_slim(skeleton) else stock
    try:
        model = load_weights(reader, path, shapes=shapes, config=skeleton.config, **kwargs)
    except RequestError as error:
        raise RequestError(f"the weights must be those that pruned_heads describes, but {error}") from error
    model.__class__ = slim_class
    return model.eval(), plan


def _plan(path: str | Path, pruned: Mapping[int, Sequence[int]], modules: Sequence[PrunableModule]) -> PruningPlan:
    """Return what transformers 4 kept; its layers are the modules in the model's order."""
    kept = {}
    for layer, module in enumerate(modules):
        strange = [head for head in pruned.get(layer, ()) if head >= module.units]
        if strange:
            raise RequestError(
                f"pruned_heads must be heads of their layer, but {path} names head {strange[0]} of layer {layer}, "
                f"which had {module.units}"
            )
        stay = [head for head in range(module.units) if head not in pruned.get(layer, ())]
        if not stay:
            raise UnsupportedModelError(f"every layer must keep a head, but layer {layer} of {path} has none left")
        kept[module.name] = module.kept(stay)
    beyond = sorted(layer for layer in pruned if layer >= len(modules))
    if beyond or any(module.units != module.groups for module in modules):
        raise UnsupportedModelError(
            f"pruned_heads must name layers of the model, in which each query head has its own key/value head, but "
            f"{path} has {len(modules)} such layers and names {listed(sorted(pruned))}"
        )
    return PruningPlan(kept=kept, criterion="pruned_heads", versions=library_versions())
