"""Load and save as transformers does, through parts of transformers that are not public. Tried with 5.24.0.

Everything that this package borrows from the private parts of loading and saving is here. To try another version, run
`tests/checkpoint`.

A model without weights      `PreTrainedModel._from_config`
Dtypes of parameters         `PreTrainedModel._get_dtype_plan`, `core_model_loading.build_glob_alternation`
Names and merged tensors     `PreTrainedModel._weight_conversions`
Older names, slim classes    `PreTrainedModel.is_custom_code`
Questions about code         `dynamic_module_utils.TIME_OUT_REMOTE_CODE`
What is saved                `PreTrainedModel._keys_to_ignore_on_save`

Other modules use private parts for other purposes: `attention` reads `_supports_sdpa` and restores
`_attn_implementation_internal`, `modes` replaces `GradientCheckpointingLayer._gradient_checkpointing_func`, `auto` and
`data.tokens` read the Auto classes' `_model_mapping`, `onnx.export` reads `_supports_sdpa`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, dynamic_module_utils
from transformers.core_model_loading import build_glob_alternation

from ..errors import RequestError


@contextmanager
def never_asking() -> Iterator[None]:
    """Refuse the code of a checkpoint, inside the block, instead of letting transformers ask on standard input.

    `trust_remote_code=False` does not reach all loaders: `AutoProcessor` does not pass it to the image processor, nor a
    model to the models of its sub-configs. For these, a timeout of zero means no.
    """
    before = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    except ValueError as error:
        if not _is_about_code(error):
            raise
        raise RequestError(
            "a checkpoint must load with the classes of transformers, as code in it is never run, but a part of this "
            "one needs code of its own (auto_map); save it as a class of transformers"
        ) from error
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = before


def _is_about_code(error: BaseException) -> bool:
    within = error.__cause__ or error.__context__
    return "trust_remote_code=True" in str(error) or (within is not None and _is_about_code(within))


@never_asking()
def empty_model(model_class: type[PreTrainedModel], config: Any, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return a model of a config, which is copied, on the meta device; its dtype is the config's by default."""
    options = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):
        return model_class._from_config(copy.deepcopy(config), **options)


def dtypes_in(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes that parameters and buffers have, by name, when a model's checkpoint is loaded in a dtype.

    Some parameters stay in float32 in some models.
    """
    skeleton = empty_model(type(model), model.config, dtype)
    found = {name: tensor.dtype for name, tensor in (*skeleton.named_parameters(), *skeleton.named_buffers())}
    plan = skeleton._get_dtype_plan(dtype)
    if plan:
        any_of, pattern_of, _ = build_glob_alternation(list(plan))
        for name in skeleton.state_dict():
            match = any_of.search(name)
            if match is not None and name in found and match.lastgroup is not None:
                found[name] = plan[pattern_of[match.lastgroup]]
    return found


def saved_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return what `save_pretrained` saves, by the names of the modules, with tied parameters twice."""
    ignored = set(model._keys_to_ignore_on_save or ())
    return {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}


def save_as_loaded(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Let a model save its tensors under the names from which another one of its class was loaded."""
    if hasattr(other, "_weight_conversions"):
        model._weight_conversions = other._weight_conversions


def reads_old_names(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass that loads tensors under their older names too.

    transformers renames them only for the classes that it takes to be its own.
    """
    return type(model_class.__name__, (model_class,), {"is_custom_code": classmethod(lambda cls: False)})
