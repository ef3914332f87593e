"""Load a slim checkpoint without executing code from its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..errors import RequestError, UnsupportedModelError, listed, refusing
from ..model.internals import never_asking, reads_old_names, use_torch_attention
from ..model.tokens import synthetic_batch
from ..prunable.attention import find_attention
from ..slim.config import is_slim
from ..slim.cut import prune_units
from ..units import PrunableModule
from ..values import PruningPlan, library_versions
from .classes import AGAIN, class_named, config_of_class, find_model_class, hub_options, read_config
from .weights import load_weights, skeleton_of_files, stored_shapes


@never_asking()
def load(path: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Load a checkpoint, slim or not, as the model class it was saved from.

    The folder's own `modeling_hies.py` is not executed, as the same code ships with this package. A checkpoint whose
    heads were pruned by transformers 4 (`pruned_heads` in its config) loads as a slim model.

    Args:
        path: Folder or Hub id.
        **kwargs: Passed to `from_pretrained`, such as `dtype` (default: the checkpoint's own), `revision`, `token`.

    Returns:
        The model, in evaluation mode.

    Raises:
        RequestError: There is no model at `path`, its class is not one of transformers', or its files are damaged,
            incomplete or do not fit each other.

    Examples:
        >>> slim.save_pretrained(folder / "slim")
        >>> type(load(folder / "slim")).__name__, count_parameters(load(folder / "slim")) == count_parameters(slim)
        ('BertForSequenceClassification', True)
    """
    config = read_config(path, **hub_options(kwargs))
    if config.get("pruned_heads"):
        return load_version4(path, **kwargs)[0]
    return load_weights(class_named(config, path), path, **kwargs)


class HIESModel:
    """Load slim checkpoints as an Auto class does: `HIESModel.from_pretrained("user/repo")` is `load("user/repo")`.

    The model is of the class that the checkpoint was saved from, such as `BertForSequenceClassification`.
    """

    def __init__(self) -> None:
        raise TypeError("HIESModel makes models of any class; use HIESModel.from_pretrained(folder or Hub id)")

    @classmethod
    def from_pretrained(cls, path: str | Path, **kwargs: Any) -> PreTrainedModel:
        """Load a checkpoint, slim or not; see `load`."""
        return load(path, **kwargs)


@never_asking()
def load_version4(path: str | Path, **kwargs: Any) -> tuple[PreTrainedModel, PruningPlan]:
    """Load a checkpoint whose heads were pruned by transformers 4, which transformers 5 cannot load.

    `prune_heads` of transformers 4 cut the weights as `hies_export.slim.cut` does, and wrote the removed heads into the
    config, as `pruned_heads`: layer -> original indices. Returns the slim model, and the plan that cuts the original to
    it.
    """
    stock = find_model_class(path, **hub_options(kwargs))
    with refusing(f"the heads that pruned_heads names must be those of the model, but in {path} they are not", AGAIN):
        config = config_of_class(stock, path, **hub_options(kwargs))
        use_torch_attention(config)
        pruned = {int(layer): heads for layer, heads in (getattr(config, "pruned_heads", None) or {}).items() if heads}
        if not pruned:
            raise RequestError(
                f"a checkpoint to upgrade must have pruned_heads in its config, but {path} has none; it loads as it is"
            )
        del config.pruned_heads
        shapes = stored_shapes(path)
        skeleton = skeleton_of_files(stock, config, path, shapes)
        modules = find_attention(skeleton, synthetic_batch(skeleton, batch=2, sequence=3))
        plan = _plan_of_pruned_heads(path, pruned, modules)
        skeleton = prune_units(skeleton, plan, modules, inplace=True)
    slim_class = type(skeleton)
    # These files have older names, which a slim class does not rename by itself.
    reader: Any = reads_old_names(slim_class) if is_slim(skeleton) else stock
    try:
        model = load_weights(reader, path, shapes=shapes, config=skeleton.config, **kwargs)
    except RequestError as error:
        raise RequestError(f"the weights must be those that pruned_heads describes, but {error}") from error
    model.__class__ = slim_class
    return model.eval(), plan


def _plan_of_pruned_heads(
    path: str | Path, pruned: Mapping[int, Sequence[int]], modules: Sequence[PrunableModule]
) -> PruningPlan:
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
