"""Remove units from the weights of a model in memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from ..kinds import KINDS
from ..model.linear import features_of, select_features, set_by_name
from ..model.text_encoder import TextEncoder
from ..select.fingerprint import check_selection, check_weights, fingerprint
from ..select.plan import PruningPlan, selection_of
from ..units.rehearse import feature_cuts, narrow_arguments, parameter_cuts, set_attributes
from ..units.units import PrunableModule, Selection
from .config import Shapes, become_slim, per_layer_config, plain_model


def prune_units(
    model: PreTrainedModel, plan: PruningPlan | Selection, modules: Sequence[PrunableModule], *, inplace: bool = False
) -> PreTrainedModel:
    """Remove from a model the units that a plan does not keep.

    Producers lose rows, consumers lose columns, and attributes that count units are updated. If a config alone can
    describe the result (a uniform ViT, LLaMA, ...), the config is updated and the model keeps its stock class. If its
    own config refuses the result and a Mistral's accepts it (a LLaMA of 6 heads at width 64), the model becomes a
    Mistral (`as_mistral`). Otherwise the class becomes the slim version of the stock class (`modeling_hies`), whose
    code `save_pretrained` writes next to the weights. A config that can describe the heads but not the neurons does so,
    and the `hies_export` block has only the neurons.

    Args:
        model: The dense model.
        plan: The units that stay. A plan is checked to be of these weights; a bare selection is not.
        modules: From `find_modules` on this model.
        inplace: Cut `model` itself instead of a copy. A Mistral of it is another object that shares its tensors.

    Returns:
        The slim model, an ordinary `PreTrainedModel`.

    Raises:
        PlanError: The plan does not fit this model, or was made for other weights.

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
        below = [module.below(slim.base_model_prefix) for module in modules]
        kept = {under.name: selection[module.name] for under, module in zip(below, modules, strict=True)}
        slim.hold(prune_units(slim.auto_model, kept, below, inplace=True))
        return slim
    shapes = Shapes()
    # Heads first: if their shapes need a block, the neurons' shapes go into it too.
    for kind in KINDS:
        of_kind = [module for module in modules if module.kind == kind]
        needs_block = bool(shapes)  # of an earlier kind
        _cut(slim, of_kind, selection, shapes)
        if shapes and not needs_block and (plain := plain_model(slim, selection, of_kind)) is not None:
            slim, shapes = plain, Shapes()
    if shapes:
        become_slim(slim, shapes, per_layer_config(slim, selection, modules))
    return slim


def _cut(slim: PreTrainedModel, modules: Sequence[PrunableModule], selection: Selection, shapes: Shapes) -> None:
    """Cut modules in place, and record in `shapes` what that changed."""
    layers_to_cut = {name for module in modules for name in module.layers}
    for module in modules:
        kept = selection[module.name]
        for name, axis, index in feature_cuts(module, kept):
            whole = slim.get_submodule(name)
            layer = select_features(whole, index, axis)
            # Layers that are not to be cut may share its weight, such as those of an auxiliary loss.
            named = slim.named_modules(remove_duplicate=False)
            tied = [n for n, m in named if getattr(m, "weight", None) is whole.weight and n not in layers_to_cut]
            for replaced in (name, *tied):
                set_by_name(slim, replaced, layer)
            shapes.linear[name] = list(features_of(layer))
        for name, axis, index in parameter_cuts(module, kept):
            old = slim.get_parameter(name)
            left = old.detach().index_select(axis, index.to(old.device))
            set_by_name(slim, name, nn.Parameter(left, requires_grad=old.requires_grad))
            shapes.parameters[name] = list(left.shape)
        holder = slim.get_submodule(module.name)
        if changed := set_attributes(holder, module, kept):
            shapes.attributes[module.name] = changed
        if len(kept.units) < module.units and (narrowed := narrow_arguments(holder, module, kept)):
            shapes.narrowed[module.name] = narrowed
