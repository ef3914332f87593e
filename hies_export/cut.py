"""Remove heads for real, and prove that the result computes what the masked model computes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from . import modeling_hies
from .attention import AttentionCall, VisibleKeys, attend, use_attention
from .errors import CutMismatchError, PlanError
from .modes import evaluating
from .values import AttentionSite, KeptHeads, PruningPlan

TOLERANCE = 1e-4


def prune_heads(
    model: PreTrainedModel, plan: PruningPlan, sites: tuple[AttentionSite, ...], *, inplace: bool = False
) -> PreTrainedModel:
    """Cut the heads a plan does not keep out of the weights.

    q/k/v lose rows, o loses columns, head-count attributes follow. Where the config alone can describe the result
    (uniform ViT, LLaMA, ...), the config is updated and the model stays of its stock class; otherwise its class becomes
    the slim twin of the stock class (`modeling_hies`), which `save_pretrained` writes next to the weights.

    Args:
        model: The dense model.
        plan: The heads that stay.
        sites: From `find_attention` on this model.
        inplace: Cut `model` itself instead of a copy.

    Returns:
        The slim model, an ordinary `PreTrainedModel`.

    Raises:
        PlanError: The plan is not for this model.
    """
    check_plan(plan, sites)
    slim = model if inplace else copy.deepcopy(model)
    resized: dict[str, list[int]] = {}
    attributes: dict[str, dict[str, Any]] = {}
    for site in sites:
        kept = plan.kept[site.name]
        if len(kept.query) == site.heads:
            continue
        query_rows = head_rows(kept.query, site.query_dim)
        key_rows = head_rows(kept.key_value, site.query_dim)
        value_rows = head_rows(kept.key_value, site.value_dim)
        output_columns = head_rows(kept.query, site.value_dim)
        for name, index, axis in (
            (site.query, query_rows, 0),
            (site.key, key_rows, 0),
            (site.value, value_rows, 0),
            (site.output, output_columns, 1),
        ):
            layer = _sliced(slim.get_submodule(name), index, axis)
            owner, _, attribute = name.rpartition(".")
            setattr(slim.get_submodule(owner), attribute, layer)
            resized[name] = [layer.out_features, layer.in_features]
        changed = _update_attributes(slim.get_submodule(site.name), site, kept)
        if changed:
            attributes[site.name] = changed
    if not _config_can_say_it(slim, plan, sites):
        _make_slim_class(slim, resized, attributes)
    return slim


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
        if list(kept.query) != [g * site.group_size + j for g in kept.key_value for j in range(site.group_size)]:
            raise PlanError(
                f"a key/value head and its {site.group_size} query heads go together, but in {site.name} the plan "
                f"keeps query heads {list(kept.query)} with key/value heads {list(kept.key_value)}"
            )


@contextmanager
def masked_heads(model: PreTrainedModel, plan: PruningPlan) -> Iterator[None]:
    """Inside the block, the outputs of the heads that `plan` removes are multiplied by zero; nothing is cut."""
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
    """The slim twin of a model class of transformers."""
    return getattr(modeling_hies, stock.__name__)


def is_slim(model: PreTrainedModel) -> bool:
    """Whether the model carries a `hies_export` block, so that its shapes are not what its config alone says."""
    return getattr(model.config, "hies_export", None) is not None


def head_rows(heads: tuple[int, ...], width: int) -> Tensor:
    """Indices of the rows (or columns) of a projection that belong to some heads of a width."""
    return (torch.tensor(heads)[:, None] * width + torch.arange(width)).flatten()


def _sliced(layer: nn.Module, index: Tensor, axis: int) -> nn.Linear:
    assert isinstance(layer, nn.Linear)  # find_attention lets nothing else through
    index = index.to(layer.weight.device)
    weight = layer.weight.detach().index_select(axis, index)
    bias = layer.bias
    new = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    new.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
    if bias is not None:
        rows = bias.detach().index_select(0, index) if axis == 0 else bias.detach().clone()
        new.bias = nn.Parameter(rows, requires_grad=bias.requires_grad)
    return new.train(layer.training)


def _update_attributes(module: nn.Module, site: AttentionSite, kept: KeptHeads) -> dict[str, Any]:
    heads, key_value_heads = len(kept.query), len(kept.key_value)
    new_values = {
        "num_heads": (site.heads, heads),
        "num_attention_heads": (site.heads, heads),
        "n_heads": (site.heads, heads),
        "num_key_value_heads": (site.key_value_heads, key_value_heads),
        "num_key_value_groups": (site.group_size, heads // key_value_heads),
        "all_head_size": (site.heads * site.query_dim, heads * site.query_dim),
    }
    changed = {}
    for attribute, (old, new) in new_values.items():
        if old != new and getattr(module, attribute, None) == old:
            setattr(module, attribute, new)
            changed[attribute] = new
    return changed


def _config_can_say_it(model: PreTrainedModel, plan: PruningPlan, sites: tuple[AttentionSite, ...]) -> bool:
    """Try the uniform config on meta tensors; keep it if the stock class then has the slim model's shapes."""
    counts = {(len(k.query), len(k.key_value)) for k in plan.kept.values()}
    widths = {(s.query_dim, s.value_dim) for s in sites}
    if is_slim(model) or len(counts) != 1 or len(widths) != 1:
        return False
    heads, key_value_heads = counts.pop()
    settings = {"num_attention_heads": heads, "head_dim": widths.pop()[0]}
    if hasattr(model.config, "num_key_value_heads"):
        settings["num_key_value_heads"] = key_value_heads
    candidate = copy.deepcopy(model.config)
    try:
        for key, value in settings.items():
            setattr(candidate, key, value)
        with torch.device("meta"):
            stock = type(model)(candidate)
    except (ValueError, AttributeError, TypeError, RuntimeError):
        return False
    if {k: v.shape for k, v in stock.state_dict().items()} != {k: v.shape for k, v in model.state_dict().items()}:
        return False
    for key, value in settings.items():
        setattr(model.config, key, value)
    return True


def _make_slim_class(
    model: PreTrainedModel, resized: dict[str, list[int]], attributes: dict[str, dict[str, Any]]
) -> None:
    prefix = model.base_model_prefix + "."
    under_base = (lambda name: name.removeprefix(prefix)) if model.base_model is not model else (lambda name: name)
    block = copy.deepcopy(getattr(model.config, "hies_export", None)) or {
        "format": 1,
        "linear": {},
        "attributes": {},
    }
    block["linear"].update({under_base(name): shape for name, shape in resized.items()})
    for name, changed in attributes.items():
        block["attributes"].setdefault(under_base(name), {}).update(changed)
    stock = next(c for c in type(model).__mro__ if c.__module__.startswith("transformers."))
    model.config.hies_export = block
    model.config.auto_map = _auto_map(stock, type(model.base_model), model.config.model_type)
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


def _auto_map(stock: type, base: type, model_type: str) -> dict[str, str]:
    """Every AutoModel class of the task class, and AutoModel for its base class."""
    module = modeling_hies.__name__.rpartition(".")[2]
    auto_map = {name: f"{module}.{stock.__name__}" for name in auto_classes(stock.__name__, model_type)}
    return auto_map | {"AutoModel": f"{module}.{base.__name__}"}
