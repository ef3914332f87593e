"""Remove heads for real, and prove that the result computes what the masked model computes."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from .checkpoint import modeling_hies
from .errors import CutMismatchError, PlanError, UnsupportedModelError
from .heads.attention import AttentionCall, VisibleKeys, attend, use_attention
from .model.linear import features_of, select_features, set_parameter, weight_of
from .model.modes import evaluating
from .values import AttentionSite, KeptHeads, Projection, PruningPlan

TOLERANCE = 1e-4


def prune_heads(
    model: PreTrainedModel, plan: PruningPlan, sites: tuple[AttentionSite, ...], *, inplace: bool = False
) -> PreTrainedModel:
    """Cut the heads a plan does not keep out of the weights.

    The layers in front of the attention lose rows, the one behind it columns, head-count attributes follow. Where the
    config alone can describe the result (uniform ViT, LLaMA, ...), the config is updated and the model stays of its
    stock class; otherwise its class becomes the slim twin of the stock class (`modeling_hies`), which `save_pretrained`
    writes next to the weights.

    Args:
        model: The dense model.
        plan: The heads that stay.
        sites: From `find_attention` on this model.
        inplace: Cut `model` itself instead of a copy.

    Returns:
        The slim model, an ordinary `PreTrainedModel`.

    Raises:
        PlanError: The plan is not for this model, or for other weights.

    Examples:
        >>> slim = prune_heads(model, plan, sites)
        >>> sum(site.heads for site in find_attention(slim, batches[0]))
        9
    """
    check_plan(plan, sites)
    if not any(parameter.is_meta for parameter in model.parameters()):
        check_weights(plan, weight_norms(model, sites))
    slim = model if inplace else copy.deepcopy(model)
    resized: dict[str, list[int]] = {}
    parameters: dict[str, list[int]] = {}
    attributes: dict[str, dict[str, Any]] = {}
    for site in sites:
        kept = plan.kept[site.name]
        for name, axis, index in feature_cuts(slim, site, kept):
            layer = select_features(slim.get_submodule(name), index, axis)
            owner, _, attribute = name.rpartition(".")
            setattr(slim.get_submodule(owner), attribute, layer)
            resized[name] = list(features_of(layer))
        for name, index in row_cuts(slim, site, kept):
            old = slim.get_parameter(name)
            rows = old.detach().index_select(0, index.to(old.device))
            set_parameter(slim, name, nn.Parameter(rows, requires_grad=old.requires_grad))
            parameters[name] = list(rows.shape)
        changed = set_attributes(slim.get_submodule(site.name), site, kept)
        if changed:
            attributes[site.name] = changed
    if not _config_can_say_it(slim, plan, sites):
        _make_slim_class(slim, resized, parameters, attributes)
    return slim


def feature_cuts(model: nn.Module, site: AttentionSite, kept: KeptHeads) -> list[tuple[str, int, Tensor]]:
    """What a plan leaves of the linear layers of an attention module.

    Returns:
        (name of the layer, 0 for output or 1 for input features, indices of those that stay) per layer that is cut.
    """
    cuts = []
    for projection in site.projections:
        features = features_of(model.get_submodule(projection.name))[0]
        index = kept_features(projection, kept, features)
        if len(index) < features:
            cuts.append((projection.name, 0, index))
    if len(kept.query) < site.heads:
        cuts.append((site.output, 1, head_rows(kept.query, site.value_dim)))
    return cuts


def row_cuts(model: nn.Module, site: AttentionSite, kept: KeptHeads) -> list[tuple[str, Tensor]]:
    """What a plan leaves of the parameters of an attention module outside of its linear layers.

    Returns:
        (name of the parameter, indices of the rows that stay) per parameter that is cut.
    """
    cuts = []
    for parameter in site.parameters:
        rows = len(model.get_parameter(parameter.name))
        index = kept_features(parameter, kept, rows)
        if len(index) < rows:
            cuts.append((parameter.name, index))
    return cuts


def kept_features(projection: Projection, kept: KeptHeads, features: int) -> Tensor:
    """Indices, ascending, of the output features of a layer that belong to no head that goes."""
    stay = torch.ones(features, dtype=torch.bool)
    for per_head, heads in ((projection.query, kept.query), (projection.key_value, kept.key_value)):
        gone = [f for head, own in enumerate(per_head) if head not in heads for f in own]
        stay[gone] = False
    return stay.nonzero().flatten()


def set_attributes(module: nn.Module, site: AttentionSite, kept: KeptHeads) -> dict[str, Any]:
    """Make the attributes of an attention module that count heads follow.

    Returns:
        The new values of those that changed.
    """
    changed = {}
    for name, what in site.attributes.items():
        value = site.head_count(what, heads=len(kept.query), key_value_heads=len(kept.key_value))
        if modeling_hies.get_attribute(module, name) != value:
            modeling_hies.set_attribute(module, name, value)
            changed[name] = value
    return changed


def check_plan(plan: PruningPlan, sites: tuple[AttentionSite, ...]) -> None:
    """Refuse a plan that is not for this model.

    Raises:
        PlanError: Names or head counts differ, or an index is out of range, repeated or out of order.
    """
    if list(plan.kept) != [s.name for s in sites]:
        missing = [s.name for s in sites if s.name not in plan.kept]
        extra = [name for name in plan.kept if name not in {s.name for s in sites}]
        raise PlanError(
            f"a plan must name the attention modules of its model, but {len(missing)} are missing from it "
            f"{missing[:2]} and {len(extra)} are not in the model {extra[:2]}; make a plan for this model"
        )
    for site in sites:
        kept = plan.kept[site.name]
        if (kept.heads, kept.key_value_heads) != (site.heads, site.key_value_heads):
            raise PlanError(
                f"the plan is for {kept.heads} query and {kept.key_value_heads} key/value heads in {site.name}, but "
                f"the model has {site.heads} and {site.key_value_heads}; make a plan for this model"
            )
        for indices, count in ((kept.query, site.heads), (kept.key_value, site.key_value_heads)):
            if not indices or list(indices) != sorted(set(indices)) or not 0 <= indices[0] <= indices[-1] < count:
                raise PlanError(
                    f"kept heads must be ascending indices in [0, {count}), at least one, got {list(indices)} for "
                    f"{site.name}"
                )
        per_group = [[q for q in kept.query if q // site.group_size == g] for g in range(site.key_value_heads)]
        if tuple(g for g, heads in enumerate(per_group) if heads) != kept.key_value:
            raise PlanError(
                f"a key/value head goes when, and only when, its {site.group_size} query heads go, but in {site.name} "
                f"the plan keeps query heads {list(kept.query)} with key/value heads {list(kept.key_value)}"
            )
        if len({len(heads) for heads in per_group if heads}) > 1:
            raise PlanError(
                f"every key/value head that stays must keep as many query heads as the others, but in {site.name} the "
                f"plan keeps query heads {list(kept.query)}, {[len(h) for h in per_group]} per key/value head; cut "
                "whole groups (unit: group) or the same number in every group (unit: query)"
            )


def weight_norms(model: nn.Module, sites: tuple[AttentionSite, ...]) -> dict[str, float]:
    """What a plan remembers of its model: L2 norms of the first and the last output projection."""
    names = dict.fromkeys(site.output for site in (sites[0], sites[-1]))
    return {name: weight_of(model.get_submodule(name)).detach().double().norm().item() for name in names}


def check_weights(plan: PruningPlan, norms: Mapping[str, float]) -> None:
    """Refuse a plan made for other weights: where heads have learnt other things, what it keeps is arbitrary.

    Args:
        plan: The plan.
        norms: From `weight_norms` of the model it is to be applied to.

    Raises:
        PlanError: A norm differs by more than rounding to another dtype could make it.
    """
    for name, norm in plan.model.items():
        here = norms.get(name, math.nan)
        if not math.isclose(norm, here, rel_tol=1e-3):
            raise PlanError(
                f"a plan must be for the weights it is applied to, but {name} had an L2 norm of {norm:.6g} where "
                f"the plan was made and has {here:.6g} here; make a plan for this model"
            )


@contextmanager
def masked_heads(model: PreTrainedModel, plan: PruningPlan) -> Iterator[None]:
    """Inside the block, the outputs of the heads that `plan` removes are multiplied by zero; nothing is cut.

    Args:
        model: The dense model; as it was, after the block.
        plan: Which heads stay.

    Examples:
        >>> with masked_heads(model, plan):
        ...     logits = model(**batches[0]).logits
    """
    masks = {}
    for name, kept in plan.kept.items():
        mask = torch.zeros(1, kept.heads, 1, 1)
        mask[:, list(kept.query)] = 1
        masks[model.get_submodule(name)] = mask
    visible = VisibleKeys()

    def function(call: AttentionCall) -> Tensor:
        output = attend(call, visible)
        mask = masks.get(call.module)
        return output if mask is None else output * mask.to(output)

    with use_attention(model, function):
        yield


def check_cut(dense: PreTrainedModel, slim: PreTrainedModel, plan: PruningPlan, batch: Mapping[str, Tensor]) -> float:
    """Compare the cut model with the dense model whose removed heads are masked, in float32.

    Args:
        dense: The model before the cut.
        slim: The model after it.
        plan: The plan that was applied.
        batch: Inputs of the model.

    Returns:
        The largest absolute difference of any element of the output.

    Raises:
        CutMismatchError: The difference is not below 1e-4.

    Examples:
        >>> check_cut(model, slim, plan, batches[0]) < 1e-4
        True
    """
    if dense.dtype != torch.float32:
        dense, slim = copy.deepcopy(dense).float(), copy.deepcopy(slim).float()
    with masked_heads(dense, plan):
        expected = first_output(dense, batch)
    difference = max_abs(first_output(slim, batch), expected)
    if not difference < TOLERANCE:
        raise CutMismatchError(
            f"the cut model must equal the masked model to {TOLERANCE:g}, but differs by {difference:.3g}; nothing was "
            f"saved. Please report this architecture ({dense.config.model_type})"
        )
    return difference


def first_output(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The model's first output (logits, or the last hidden state), in evaluation mode, without labels; on CPU."""
    device = next(model.parameters()).device
    with evaluating(model), torch.inference_mode():
        outputs = model(**{k: v.to(device) for k, v in batch.items() if k != "labels"})
    return outputs[0].float().cpu()


def max_abs(one: Tensor, other: Tensor) -> float:
    """Largest absolute difference; infinite when shapes differ or either has a NaN."""
    if one.shape != other.shape:
        return float("inf")
    difference = (one - other).abs().max().item() if one.numel() else 0.0
    return difference if difference == difference else float("inf")


def slim_class(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The slim twin of a model class of transformers.

    Raises:
        UnsupportedModelError: transformers does not export the class, so that no checkpoint can name it.
    """
    if not hasattr(modeling_hies, stock.__name__):
        raise UnsupportedModelError(
            f"a slim checkpoint names its model class, which transformers must export, but it does not export "
            f"{stock.__name__}; cut a model of another class, or uniformly where its config can say it"
        )
    return getattr(modeling_hies, stock.__name__)


def is_slim(model: PreTrainedModel) -> bool:
    """Whether the model carries a `hies_export` block, so that its shapes are not what its config alone says."""
    return getattr(model.config, "hies_export", None) is not None


def head_rows(heads: tuple[int, ...], width: int) -> Tensor:
    """Indices of the rows (or columns) of a projection that belong to some heads of a width."""
    return (torch.tensor(heads)[:, None] * width + torch.arange(width)).flatten()


def _config_can_say_it(model: PreTrainedModel, plan: PruningPlan, sites: tuple[AttentionSite, ...]) -> bool:
    """Try the uniform config on meta tensors; keep it if the stock class then has the slim model's shapes.

    Every (sub-)config speaks for the modules that hold it, so that the towers of a model may differ.
    """
    if is_slim(model):
        return False
    configs = {id(config): config for config in _configs(model.config)}
    owned: dict[int, list[AttentionSite]] = {}
    for site in sites:
        config = getattr(model.get_submodule(site.name), "config", model.config)
        owned.setdefault(id(config) if id(config) in configs else id(model.config), []).append(site)
    settings: dict[int, dict[str, int]] = {}
    for key, group in owned.items():
        counts = {(len(plan.kept[s.name].query), len(plan.kept[s.name].key_value)) for s in group}
        widths = {(s.query_dim, s.value_dim) for s in group}
        if len(counts) != 1 or len(widths) != 1:
            return False
        heads, key_value_heads = counts.pop()
        if heads == group[0].heads:
            continue
        settings[key] = {"num_attention_heads": heads, "head_dim": widths.pop()[0]}
        if hasattr(configs[key], "num_key_value_heads"):
            settings[key]["num_key_value_heads"] = key_value_heads
    candidate = copy.deepcopy(model.config)
    try:
        for config, twin in zip(_configs(model.config), _configs(candidate), strict=True):
            for name, value in settings.get(id(config), {}).items():
                setattr(twin, name, value)
            twin.validate()  # what a config refuses (LLaMA: hidden size not a multiple of heads) cannot be saved
        with torch.device("meta"):
            stock = type(model)(candidate)
    except (StrictDataclassError, ValueError, AttributeError, TypeError, RuntimeError):
        return False
    if _shapes(stock) != _shapes(model):
        return False
    for key, values in settings.items():
        for name, value in values.items():
            setattr(configs[key], name, value)
    return True


def _configs(config: Any) -> list[Any]:
    """A config and those it is composed of."""
    children = [getattr(config, key, None) for key in config.sub_configs]
    return [config, *(c for child in children if child is not None for c in _configs(child))]


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    # Buffers as well: what is worked out from the number of heads, such as rotary frequencies, must be the same.
    return {n: t.shape for n, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}


def _make_slim_class(
    model: PreTrainedModel,
    resized: dict[str, list[int]],
    parameters: dict[str, list[int]],
    attributes: dict[str, dict[str, Any]],
) -> None:
    prefix = model.base_model_prefix + "."
    under_base = (lambda name: name.removeprefix(prefix)) if model.base_model is not model else (lambda name: name)
    block = copy.deepcopy(getattr(model.config, "hies_export", None)) or {
        "format": 1,
        "linear": {},
        "attributes": {},
    }
    block["linear"].update({under_base(name): shape for name, shape in resized.items()})
    if parameters:
        block.setdefault("parameters", {}).update({under_base(name): shape for name, shape in parameters.items()})
    for name, changed in attributes.items():
        block["attributes"].setdefault(under_base(name), {}).update(changed)
    stock = next(c for c in type(model).__mro__ if c.__module__.startswith("transformers."))
    model.config.hies_export = block
    model.config.auto_map = _auto_map(stock, model)
    model.__class__ = slim_class(stock)


def auto_classes(name: str, model_type: str) -> list[str]:
    """Names of the AutoModel classes under which transformers knows a model class."""
    found = []
    for constant, auto_class in modeling_auto.__dict__.items():
        if constant.startswith("AutoModel") and hasattr(auto_class, "_model_mapping"):
            # Plain dictionaries of class names behind a lazy mapping: nothing has to be imported to read them.
            names = auto_class._model_mapping._model_mapping.get(model_type, ())
            if name in ((names,) if isinstance(names, str) else names):
                found.append(constant)
    return found


def has_auto_base(model: PreTrainedModel) -> bool:
    """Whether `AutoModel` is the way to a model's base model: some have another class inside under that name."""
    return "AutoModel" in auto_classes(type(model.base_model).__name__, model.config.model_type)


def _auto_map(stock: type, model: PreTrainedModel) -> dict[str, str]:
    """Every AutoModel class of the task class, and AutoModel for its base class."""
    module = modeling_hies.__name__.rpartition(".")[2]
    names = dict.fromkeys(auto_classes(stock.__name__, model.config.model_type), stock.__name__)
    if has_auto_base(model):
        names["AutoModel"] = type(model.base_model).__name__
    return {auto_class: f"{module}.{name}" for auto_class, name in names.items()}
