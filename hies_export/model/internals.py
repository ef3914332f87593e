"""Load and save as transformers does, through parts of transformers that are not public. Tried with 5.24.0.

Everything that this package borrows from the private parts of loading and saving is here. To try another version, run
`tests/stream` and `tests/checkpoint`, which compare with `from_pretrained` and `save_pretrained`, byte for byte.

A model without weights      `PreTrainedModel._from_config`
Loading without data         `core_model_loading.convert_and_load_state_dict_in_model`,
                             `modeling_utils.LoadStateDictConfig`, `PreTrainedModel._get_dtype_plan`
Dtypes of parameters         `PreTrainedModel._get_dtype_plan`, `core_model_loading.build_glob_alternation`
Names and merged tensors     `conversion_mapping.get_model_conversion_mapping`, `PreTrainedModel._weight_conversions`,
                             `core_model_loading`: `WeightRenaming`, `WeightConverter`, `rename_source_key`,
                             `apply_converters`, `apply_renamings`, `dot_natural_key`
Older names, slim classes    `PreTrainedModel.is_custom_code`
Tied and optional tensors    `PreTrainedModel.all_tied_weights_keys`, `tie_weights(recompute_mapping=)`,
                             `_adjust_missing_and_unexpected_keys`
Generation configs           `PreTrainedModel.adjust_generation_fn`
Questions about code         `dynamic_module_utils.TIME_OUT_REMOTE_CODE`
What is saved, and as what   `PreTrainedModel._keys_to_ignore_on_save`, `core_model_loading.revert_weight_conversion`,
                             `modeling_utils.remove_tied_weights_from_state_dict`

Other modules use private parts for other purposes: `attention` reads `_supports_sdpa` and restores
`_attn_implementation_internal`, `modes` replaces `GradientCheckpointingLayer._gradient_checkpointing_func`, `auto` and
`data.tokens` read the Auto classes' `_model_mapping`, `onnx.export` reads `_supports_sdpa`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, dynamic_module_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    build_glob_alternation,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import LoadStateDictConfig, remove_tied_weights_from_state_dict

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


def load_shapes(model: PreTrainedModel, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """Load tensors without data into a model on the meta device, as `from_pretrained` loads tensors with data.

    Returns the `LoadStateDictInfo` of transformers: `missing_keys`, `mismatched_keys`, `conversion_errors`.
    """
    options = LoadStateDictConfig(
        device_map={"": "meta"},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=get_model_conversion_mapping(model),  # type: ignore[arg-type]
    )
    return convert_and_load_state_dict_in_model(model, dict(stored), options)[0]


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


def finish_loading(model: PreTrainedModel, info: Any, agree: Callable[[str, str], bool]) -> None:
    """Tie the parameters that `from_pretrained` would tie, and remove from `info` of `load_shapes` what may be missing.

    `agree` says whether two parameters, both in the checkpoint, have the same values: only then are they tied.
    """
    missing = info.missing_keys
    for target, source in list(model.all_tied_weights_keys.items()):
        if target in missing or source in missing:
            continue
        if agree(target, source):
            missing.add(target)
        else:
            del model.all_tied_weights_keys[target]
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)


def load_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Give a model the generation config of a folder, or the one that its config implies."""
    if not model.can_generate():
        return
    adjust: Any = model.adjust_generation_fn
    adjust(
        generation_config=None,
        from_auto_class=False,
        from_pipeline=False,
        pretrained_model_name_or_path=folder,
        cache_dir=None,
        force_download=False,
        proxies=None,
        local_files_only=True,
        token=None,
        revision="main",
        subfolder="",
        trust_remote_code=False,
    )


def saved_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return what `save_pretrained` saves, by the names of the modules, with tied parameters twice."""
    ignored = set(model._keys_to_ignore_on_save or ())
    return {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}


def without_tied(state: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Return a state in which every tied parameter has only the name that `save_pretrained` gives it."""
    return remove_tied_weights_from_state_dict(dict(state), model)


def names_on_disk(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state as `save_pretrained` writes it: renamed, merged and split for the files."""
    return revert_weight_conversion(model, dict(state))


def save_as_loaded(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Let a model save its tensors under the names from which another one of its class was loaded."""
    if hasattr(other, "_weight_conversions"):
        model._weight_conversions = other._weight_conversions


def reads_old_names(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass that loads tensors under their older names too.

    transformers renames them only for the classes that it takes to be its own.
    """
    return type(model_class.__name__, (model_class,), {"is_custom_code": classmethod(lambda cls: False)})


def in_loading_order(names: Iterable[str]) -> list[str]:
    """Return names in the order in which transformers reads tensors; experts are merged in it."""
    return sorted(names, key=dot_natural_key)


@dataclass(frozen=True)
class Conversions:
    """The rules by which transformers renames, merges and splits tensors, in one direction.

    Attributes:
        rename: Returns the new name of a tensor, and the pattern of the converter that also merges or splits it, or
            None if it is only renamed.
        finish: Returns the name of a converter's result.
        converters: Pattern -> converter.
    """

    model: PreTrainedModel
    rename: Callable[[str], tuple[str, str | None]]
    finish: Callable[[str], str]
    converters: Mapping[str, WeightConverter]

    def convert(self, name: str, patterns: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Merge or split tensors into new ones, by name.

        Args:
            patterns: Old name -> pattern, both of `rename`, in loading order.
            tensors: Old name -> tensor.
        """
        converter: Any = copy.deepcopy(self.converters[next(iter(patterns.values()))])
        for key, pattern in patterns.items():
            converter.add_tensor(name, key, pattern, tensors[key])
        values = converter.convert(name, model=self.model, config=self.model.config)
        return {self.finish(n): v[0] if isinstance(v, list) else v for n, v in values.items()}


def loading_conversions(model: PreTrainedModel) -> Conversions:
    """Return the rules by which a model was loaded, by `load_shapes` or `from_pretrained`."""
    renamings, converters = _split(getattr(model, "_weight_conversions", None) or [])
    expected = model.state_dict()

    def rename(key: str) -> tuple[str, str | None]:
        prefix = model.base_model_prefix
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            return rename_source_key(key, [], [], prefix, expected)
        return name, pattern

    return Conversions(model, rename, lambda name: name, _by_pattern(converters))


def saving_conversions(model: PreTrainedModel) -> Conversions:
    """Return the rules by which `save_pretrained` saves a model: those of its loading, backwards."""
    transforms: Sequence[Any] = getattr(model, "_weight_conversions", None) or []
    renamings, converters = _split([transform.reverse_transform() for transform in transforms[::-1]])

    def rename(key: str) -> tuple[str, str | None]:
        name, pattern = apply_converters(key, converters)
        return (name, pattern) if pattern is not None else (apply_renamings(key, renamings), None)

    return Conversions(model, rename, lambda name: apply_renamings(name, renamings), _by_pattern(converters))


def _split(transforms: Sequence[Any]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    return renamings, [t for t in transforms if isinstance(t, WeightConverter)]


def _by_pattern(converters: Iterable[WeightConverter]) -> dict[str, WeightConverter]:
    return {pattern: converter for converter in converters for pattern in converter.source_patterns}
