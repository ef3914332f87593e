"""Remove units from the weights of a model in memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..kinds import ATTENTION, KINDS
from ..model import modeling_hies
from ..model.copies import share_weights
from ..model.linear import features_of, select_features, set_parameter
from ..model.modes import output_alone
from ..model.text_encoder import TextEncoder
from ..model.tokens import sample_batch
from ..select.plan import PruningPlan, selection_of
from ..units.rehearse import feature_cuts, narrow_arguments, parameter_cuts, set_attributes
from ..units.units import PrunableModule, Selection
from .check import check_selection, check_weights, fingerprint
from .config import Shapes, become_slim, per_layer_config, plain_model


def prune_units(
    model: PreTrainedModel,
    plan: PruningPlan | Selection,
    modules: Sequence[PrunableModule],
    *,
    inplace: bool = False,
) -> PreTrainedModel:
    """Remove from a model the units that a plan does not keep.

    Producers lose rows, consumers lose columns, and attributes that count units are updated. If a config alone can
    describe the result (a uniform ViT, LLaMA, ...), the config is updated and the model keeps its stock class. If its
    own config refuses the result and a sibling's accepts it (a LLaMA of 6 heads at width 64, as a Mistral), the model
    becomes the sibling (`as_sibling`). Otherwise the class becomes the slim version of the stock class
    (`modeling_hies`), whose code `save_pretrained` writes next to the weights. If a config can describe the heads but
    not the neurons, the heads are in its plain fields, and the `hies_export` block has only the neurons. A module that
    loses all its units computes nothing (`skip`).

    Args:
        model: The dense model.
        plan: The units that stay. A plan is checked to be of these weights; a bare selection is not.
        modules: From `find_modules` on this model.
        inplace: Cut `model` itself instead of a copy. A sibling is another object that shares its tensors.

    Returns:
        The slim model, an ordinary `PreTrainedModel`.

    Raises:
        PlanError: The plan does not fit this model, or was made for other weights.
        UnsupportedModelError: An attention module loses all heads, and cannot be skipped.

    Examples:
        >>> slim = prune_units(model, plan, modules)
        >>> sum(module.units for module in find_attention(slim, batches[0]))
        9
    """
    selection = selection_of(plan)
    check_selection(selection, modules)
    if isinstance(plan, PruningPlan) and not any(parameter.is_meta for parameter in model.parameters()):
        check_weights(plan.model, fingerprint(model, modules))
    slim = model if inplace else copy.deepcopy(model)
    if isinstance(slim, TextEncoder):
        prefix = slim.base_model_prefix
        below = [module.below(prefix) for module in modules]
        kept = {under.name: selection[module.name] for under, module in zip(below, modules, strict=True)}
        slim.hold(prune_units(slim.auto_model, kept, below, inplace=True))
        return slim
    skipped = how_to_skip(slim, [module for module in modules if not selection[module.name].units])
    shapes = Shapes()
    # Heads first: if their shapes need a block, the neurons' shapes go into it too.
    for kind in KINDS:
        of_kind = [module for module in modules if module.kind == kind]
        earlier = bool(shapes)
        _cut(slim, of_kind, selection, shapes)
        for module in of_kind:
            if module.name in skipped:
                shapes.skipped[module.name] = skipped[module.name]
                modeling_hies.skip(slim.get_submodule(module.name), skipped[module.name])
        if shapes and not earlier and (plain := plain_model(slim, selection, of_kind)) is not None:
            slim, shapes = plain, Shapes()
    if shapes:
        become_slim(slim, shapes, per_layer_config(slim, selection, modules))
    return slim


def _cut(slim: PreTrainedModel, modules: Sequence[PrunableModule], selection: Selection, shapes: Shapes) -> None:
    own = {name for module in modules for name in module.layers}
    for module in modules:
        kept = selection[module.name]
        for name, axis, index in feature_cuts(slim, module, kept):
            whole = slim.get_submodule(name)
            layer = select_features(whole, index, axis)
            # Also where another layer has the same weight, such as one of an auxiliary loss.
            for place, other in list(slim.named_modules(remove_duplicate=False)):
                if place == name or (getattr(other, "weight", None) is whole.weight and place not in own):
                    owner, _, attribute = place.rpartition(".")
                    setattr(slim.get_submodule(owner), attribute, layer)
            shapes.linear[name] = list(features_of(layer))
        for name, axis, index in parameter_cuts(slim, module, kept):
            old = slim.get_parameter(name)
            part = old.detach().index_select(axis, index.to(old.device))
            set_parameter(slim, name, nn.Parameter(part, requires_grad=old.requires_grad))
            shapes.parameters[name] = list(part.shape)
        if not kept.units and module.kind == ATTENTION:
            continue
        holder = slim.get_submodule(module.name)
        if changed := set_attributes(holder, module, kept):
            shapes.attributes[module.name] = changed
        if len(kept.units) < module.units and (narrowed := narrow_arguments(holder, module, kept)):
            shapes.narrowed[module.name] = narrowed


# Attention returns its output, and often its weights beside it, which are None without heads.
_MOST_OUTPUTS = 2


def how_to_skip(model: PreTrainedModel, modules: Sequence[PrunableModule]) -> dict[str, dict[str, Any]]:
    """Return for each attention module what `modeling_hies.skip` needs, from a run on two short random rows.

    Feed-forward blocks need nothing: their layers without features compute nothing.

    Raises:
        UnsupportedModelError: A module does more after its consumer, or returns more than its output and its weights.
    """
    attention = [module for module in modules if module.kind == ATTENTION]
    if not attention:
        return {}
    if isinstance(model, TextEncoder):
        return how_to_skip(model.auto_model, [module.below(model.base_model_prefix) for module in attention])
    if model.config.is_encoder_decoder:
        raise _cannot_skip(attention[0], "is part of an encoder-decoder")
    batch = sample_batch(model, sequence=4)
    try:
        return _inputs_and_outputs(
            share_weights(model, device="meta"), attention, {k: v.to("meta") for k, v in batch.items()}
        )
    except (RuntimeError, NotImplementedError):  # the forward depends on the values of its inputs
        return _inputs_and_outputs(share_weights(model), attention, {k: v.to(model.device) for k, v in batch.items()})


def _inputs_and_outputs(
    model: PreTrainedModel, modules: Sequence[PrunableModule], batch: Mapping[str, Tensor]
) -> dict[str, dict[str, Any]]:
    read: dict[str, tuple[Tensor, Tensor]] = {}  # module -> input and output of its consumer
    found: dict[str, tuple[Tensor, Any]] = {}  # module -> its own input and output

    def record(into: dict[str, Any], name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        into.setdefault(name, (next(iter((*args, *kwargs.values()))), output))

    for module in modules:
        for layer, into in ((module.consumer, read), (module.name, found)):
            hook = partial(record, into, module.name)
            model.get_submodule(layer).register_forward_hook(hook, with_kwargs=True)
    with output_alone(model.eval()), torch.no_grad():
        model(**batch)
    return {module.name: _way_to_skip(module, *found[module.name], *read[module.name]) for module in modules}


def _way_to_skip(
    module: PrunableModule, given: Tensor, returned: Any, read: Tensor, computed: Tensor
) -> dict[str, Any]:
    """Return how one module is skipped, from its input and output, and those of its consumer."""
    inside = module.consumer.startswith(f"{module.name}.")
    outputs = returned if isinstance(returned, tuple) else (returned,)
    if len(outputs) > _MOST_OUTPUTS:
        raise _cannot_skip(module, f"returns {len(outputs)} values")
    if inside and not outputs[0].is_set_to(computed):
        raise _cannot_skip(module, f"computes more after {module.consumer}")
    if given.shape[:-1] != read.shape[:-1]:
        raise _cannot_skip(module, f"gives {module.consumer} other rows than it takes")
    consumer = module.consumer.removeprefix(f"{module.name}.") if inside else ""
    return {"outputs": len(outputs) if isinstance(returned, tuple) else 0, "consumer": consumer}


def _cannot_skip(module: PrunableModule, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"attention can lose all its heads where its output is that of its consumer, but {module.name} {reason}; set "
        "min_heads to at least 1"
    )
