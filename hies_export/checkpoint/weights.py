"""Find the files of a checkpoint's weights and their dtype, and load them by `from_pretrained`.

Checkpoints that transformers would load wrongly without an error, or that would fill the memory, are refused.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from ..errors import RequestError, listed, refusing
from ..model.internals import empty_model, lacks_pooler, layers_unwarned, use_torch_attention
from .classes import AGAIN, FLOATING, check_text_config, config_of_class, is_quantised, refuse_adapter

_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
# A config that describes more than this many times the parameters in the files is damaged.
TIMES = 10
# Constants that older releases saved, and parameters that only training reads.
_UNUSED = re.compile(
    r"(^|\.)(\w*inv_freq|(cos|sin)_cached|freqs_cis|rope\.freqs|masked_bias|causal_mask|attn_mask|_float_tensor|version|"
    r"mask_token|masked_spec_embed)$"
)

logger = logging.getLogger(__name__)


def weight_files(folder: str | Path) -> list[Path]:
    """Return the files of a folder that `from_pretrained` reads weights from, or []; refuse a damaged index."""
    for name, index_name in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        file, index = Path(folder, name), Path(folder, index_name)
        if file.is_file():
            return [file]
        if index.is_file():
            with refusing(f"the index of a sharded checkpoint must name its files, but {index} does not", AGAIN):
                shards = {Path(shard).name for shard in json.loads(index.read_bytes())["weight_map"].values()}
            return [Path(folder, shard) for shard in sorted(shards) if Path(folder, shard).is_file()]
    return []


def describe_tensors(file: Path) -> Iterator[tuple[str, str, list[int]]]:
    """Yield name, dtype as safetensors names it, and shape of every tensor in a file."""
    with refusing(f"weights must be a safetensors file, but {file} is none", AGAIN), safe_open(file, "pt") as tensors:
        for name in list(tensors.keys()):
            tensor = tensors.get_slice(name)  # reads no numbers
            yield name, tensor.get_dtype(), tensor.get_shape()


def stored_dtype(files: Iterable[Path], config: Any) -> torch.dtype | None:
    """Return the dtype that a checkpoint is stored in, and its slim version is saved in; None if it is unknown.

    It is the one that its config names, as in transformers, unless all floating tensors have one narrower dtype: in the
    wider one a slim checkpoint could be larger than its source. If the config has no dtype, that of the first tensor
    counts.
    """
    safetensors = [file for file in files if file.suffix == ".safetensors"]
    floats = [_FLOATS[dtype] for file in safetensors for _, dtype, _ in describe_tensors(file) if dtype in _FLOATS]
    named = getattr(config, "dtype", None)
    named = getattr(torch, named, None) if isinstance(named, str) else named
    if not isinstance(named, torch.dtype):
        return floats[0] if floats else None
    all_narrower = len(set(floats)) == 1 and floats[0].itemsize < named.itemsize
    return floats[0] if all_narrower else named


def weight_bytes(path: str | Path) -> int:
    """Return the size of the files of a checkpoint's weights."""
    return sum(file.stat().st_size for file in weight_files(path))


def skeleton_of_files(model_class: Any, config: Any, path: str | Path) -> PreTrainedModel:
    """Return the model of a config without weights; refuse one that is far larger than a folder's safetensors."""
    model = empty_model(model_class, config)
    stored = sum(prod(shape) for file in Path(path).glob("model*.safetensors") for *_, shape in describe_tensors(file))
    # transformers would fill the memory with random numbers for missing tensors before it reports them.
    if stored and model.num_parameters() > TIMES * stored:
        raise RequestError(
            f"weights must be those that the config describes, but {path} describes {model.num_parameters():,} "
            f"parameters, and its files hold {stored:,}; {AGAIN}"
        )
    return model


def load_weights(model_class: Any, path: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Return the model of a folder, in evaluation mode; `kwargs` are passed to `from_pretrained`."""
    refuse_adapter(path)  # first: transformers would read the config that the adapter names
    config = kwargs.get("config") or config_of_class(model_class, path)
    kwargs = {**use_torch_attention(config), **kwargs}
    quantised = is_quantised(config)
    remedy = FLOATING if quantised else AGAIN
    with refusing(f"the model at {path} must load, but does not", remedy), layers_unwarned():
        check_text_config(config)
        if not quantised and not kwargs.get("ignore_mismatched_sizes"):
            skeleton_of_files(model_class, config, path)
        if Path(path, "generation_config.json").is_file():
            GenerationConfig.from_pretrained(path)  # raises on a damaged one, which transformers silently replaces
        options = {**kwargs, "ignore_mismatched_sizes": True}  # so that `info` has their names and shapes
        model, info = model_class.from_pretrained(path, output_loading_info=True, **options)
    if info["mismatched_keys"] and not kwargs.get("ignore_mismatched_sizes"):
        differing = [f"{name} {[*stored]}, not {[*built]}" for name, stored, built in sorted(info["mismatched_keys"])]
        raise RequestError(
            f"weights must have the shapes that the config describes, but {path} holds {listed(differing, most=3)}; "
            f"{remedy}"
        )
    if lacks_pooler(model, info["missing_keys"]) and "add_pooling_layer" not in kwargs:
        return load_weights(model_class, path, add_pooling_layer=False, **kwargs)
    if info["missing_keys"]:
        raise RequestError(
            f"every parameter must be in the files, but {path} has no {listed(sorted(info['missing_keys']), most=3)}; "
            f"they would be random: if the model was trained as another class than {model_class.__name__}, write that "
            "one into 'architectures' in its config.json; otherwise save the checkpoint again from that model"
        )
    if not quantised:  # the scales and zero points of quantised layers are read by their quantisers
        _check_surplus(model, path, info["unexpected_keys"])
    return model.eval()


def _check_surplus(model: PreTrainedModel, path: str | Path, unread: Iterable[str]) -> None:
    """Refuse unread tensors inside of modules that the class builds, and warn of whole modules that it does not build.

    A tensor of a built module, such as a layer or an embedding, would change the outputs. A separate module, such as a
    pooler or a vision tower, may be left out.
    """
    surplus = dict(filter(None, (_surplus(model, name) for name in sorted(unread))))
    if needed := [lacking for lacking, is_needed in surplus.items() if is_needed]:
        raise RequestError(
            f"a layer must compute with all of its tensors, but the files of {path} hold "
            f"{listed(needed, most=3)}, which {type(model).__name__} does not read, so its "
            "answers are not the saved model's; write the values that it was trained with into its config.json, such "
            "as num_hidden_layers or attention_bias; if they are there, this release of transformers lacks the layer: "
            "should its answers be right all the same, load and save the model with transformers first"
        )
    if surplus:
        names = listed(surplus, most=3)
        logger.warning("the files of %s also hold %s, which %s does not read", path, names, type(model).__name__)


def _surplus(model: PreTrainedModel, name: str) -> tuple[str, bool] | None:
    """Return what the model lacks to read a tensor, and whether what the model computes depends on that.

    The former is the tensor's name, up to the first part that the model does not have. None if the tensor may be left
    out without a warning: constants, buffers, and modules beside the base model, such as heads.
    """
    keys, base = name.split("."), model.base_model
    if keys[0] == model.base_model_prefix and base is model:  # saved with a head, and loaded without
        keys = keys[1:]
    # The base model is named in front, unless it was saved alone.
    module: nn.Module = model if hasattr(model, keys[0]) or not hasattr(base, keys[0]) else base
    in_base = in_layer = False
    path: list[str] = []
    for key in keys:  # down to the innermost `module` that the model has; it lacks `key`
        path.append(key)
        in_base, in_layer = in_base or module is base, in_layer or isinstance(module, nn.ModuleList)
        child = getattr(module, key, None)
        if not isinstance(child, nn.Module) or isinstance(child, nn.Identity):
            break
        module = child
    lacking = ".".join(path)
    if _UNUSED.search(name) or isinstance(getattr(module, key, None), Tensor):  # the latter is a buffer
        return None
    of_leaf = path == keys and not any(module.children())  # a layer that the model has lacks a tensor, such as its bias
    if in_layer or of_leaf or (in_base and not isinstance(module, PreTrainedModel)):
        return lacking, True
    return (lacking, False) if in_base else None  # of the base model, such as a pooler
