"""Load checkpoints: the dense model to prune, one in memory, and a slim one from a folder or the Hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import RequestError, refusing
from ..model.copies import parameter_bytes
from ..model.internals import auto_classes, commit_of, never_asking, reads_old_names, use_torch_attention
from ..model.tokens import refuse_encoder_decoder, synthetic_batch
from ..select.plan import PruningPlan, library_versions
from ..slim.config import is_slim
from ..slim.cut import prune_units
from ..tasks import TASKS
from ..units.heads import find_attention
from .beside import fetch, fetch_whole
from .classes import AGAIN, class_named, config_of_class, find_model_class, read_config
from .weights import load_weights, skeleton_of_files, stored_dtype, weight_files


@dataclass(frozen=True)
class Source:
    """How a dense model is stored."""

    folder: Path  # where its files are; for a Hub id, those that were fetched
    dtype: torch.dtype  # in which its slim version is saved
    bytes: int  # size of its weight files
    commit: str | None  # for a Hub id, the commit of its files


def source_of(model: PreTrainedModel, folder: Path, config: Any, *, asked: str | None = None) -> Source:
    """Return how a model is stored in a folder.

    The dtype is that of the files, whatever the model computes in, or `asked` if that names one.
    """
    files = weight_files(folder)
    dtype = None if asked in (None, "auto") else getattr(torch, str(asked))
    dtype = dtype or stored_dtype(files, config) or model.dtype
    size = sum(file.stat().st_size for file in files) or parameter_bytes(model)
    return Source(folder, dtype, size, commit_of(folder))


def class_for_task(path: str | Path, config: Any, *, task: str) -> type[PreTrainedModel]:
    """Return the model class of a checkpoint; refuse one that the task's Auto class does not load."""
    model_class = find_model_class(path)
    refuse_encoder_decoder(config, model_class.__name__)
    auto_class = TASKS[task].auto_class
    if auto_class not in auto_classes(model_class.__name__, config.model_type):
        raise RequestError(
            f"{task} needs a model fine-tuned for it (one that {auto_class} loads, of its model_type), but {path} is a "
            f"{model_class.__name__} of type {config.model_type!r}; fine-tune it for the task, or change the task"
        )
    return model_class


# Options of `load` that say where and how to look on the Hub.
_HUB = ("revision", "token", "cache_dir", "local_files_only")
# Share of a GPU's free memory that a model's weights may take; the rest is for activations.
SHARE_OF_GPU = 0.5


def device_to_prune_on() -> str:
    """Return the GPU if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@never_asking()
def load_dense(folder: Path, model_class: Any, *, dtype: str | None = None, **kwargs: Any) -> PreTrainedModel:
    """Load the model to prune, on the GPU if its weights leave half of the free memory there to activations.

    Else it stays on the CPU, and a `Walk` moves one block at a time to the GPU and back. Every process loads a copy.
    `dtype` is torch's name, or "auto" for the checkpoint's own: by default float32 without a GPU, and "auto" with one.
    """
    device = device_to_prune_on()
    name = dtype or ("float32" if device == "cpu" else "auto")
    model: Any = load_weights(model_class, folder, dtype=name if name == "auto" else getattr(torch, name), **kwargs)
    if device == "cpu":
        return model.to(device)  # torch's default device may be another
    free, _ = torch.cuda.mem_get_info()  # and the total, in bytes
    return model.to(device) if parameter_bytes(model) < SHARE_OF_GPU * free else model


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
    hub = {key: kwargs.pop(key) for key in _HUB if key in kwargs}
    config = read_config(fetch(path, **hub))
    model_class = class_named(config, path)  # may refuse it, before the weights are fetched
    folder = fetch_whole(path, **hub)
    was_cut = any((config.get("pruned_heads") or {}).values())
    model = load_version4(folder, **kwargs)[0] if was_cut else load_weights(model_class, folder, **kwargs)
    model.name_or_path = model.config.name_or_path = str(path)  # what PEFT writes into an adapter
    return model


def load_version4(folder: Path, **kwargs: Any) -> tuple[PreTrainedModel, PruningPlan]:
    """Return the slim model of a checkpoint whose heads were pruned by transformers 4, and the plan that cuts to it.

    transformers 5 cannot load it. `prune_heads` of transformers 4 cut the weights as `hies_export.slim.cut` does, and
    wrote the removed heads into the config, as `pruned_heads`: layer -> original indices.
    """
    stock_class = find_model_class(folder)
    with refusing(f"the heads that pruned_heads names must be those of the model, but in {folder} they are not", AGAIN):
        config = config_of_class(stock_class, folder)
        use_torch_attention(config)
        pruned_heads = getattr(config, "pruned_heads", None) or {}
        removed = {int(layer): heads for layer, heads in pruned_heads.items() if heads}
        if not removed:
            raise RequestError(
                f"a checkpoint to upgrade must have pruned_heads in its config, but {folder} has none; load it as is"
            )
        del config.pruned_heads
        skeleton = skeleton_of_files(stock_class, config, folder)
        modules = find_attention(skeleton, synthetic_batch(skeleton, batch=2, sequence=3))
        kept = {
            module.name: module.kept(head for head in range(module.units) if head not in removed.get(layer, ()))
            for layer, module in enumerate(modules)
        }
        plan = PruningPlan(kept=kept, criterion="pruned_heads", versions=library_versions())
        skeleton = prune_units(skeleton, plan, modules, inplace=True)
    slim_class = type(skeleton)
    # These files have older names of tensors, which a slim class does not rename by itself.
    renaming_class: Any = reads_old_names(slim_class) if is_slim(skeleton) else stock_class
    model = load_weights(renaming_class, folder, config=skeleton.config, **kwargs)
    model.__class__ = slim_class  # the other one is for loading only
    return model.eval(), plan
