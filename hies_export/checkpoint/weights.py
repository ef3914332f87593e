"""Load a checkpoint by `from_pretrained`, and turn its failures into one-sentence refusals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from ..errors import RequestError, listed, root_cause
from ..model.internals import load_report
from ..model.online import hub_or_cache
from ..slim.config import stock_class
from .classes import class_config, hub_options
from .schema import check_side_files, check_slim_names, empty_model
from .stored import describe_tensors

Shapes = dict[str, list[int]]
"""Name of a tensor in the files -> its shape."""

# A config that describes this many times the size of the files is damaged.
TIMES = 10


def check_files(model_class: Any, config: Any, path: str | Path) -> None:
    """Refuse damaged JSON files, and names in the `hies_export` block of a config that its model does not have."""
    check_side_files(path)
    block = getattr(config, "hies_export", None)
    if block is not None:
        check_slim_names(block, empty_model(stock_class(model_class), config, path), path)


def _check_sizes(model_class: Any, config: Any, path: str | Path, shapes: Shapes) -> None:
    """Refuse tensors of other sizes than the config describes, before transformers allocates memory for these.

    Only tensors with names of the model are checked, and transposed ones fit. transformers checks all of them, but
    first fills missing and misfitting ones with random numbers, which may take all memory if the config is damaged.
    """
    if not shapes or getattr(config, "quantization_config", None) is not None:
        return
    expected = skeleton_of_files(model_class, config, path, shapes).state_dict()
    known = expected.keys() & shapes.keys()
    wrong = [(n, shapes[n], expected[n].shape) for n in known if prod(shapes[n]) != expected[n].numel()]
    if wrong:
        raise _misfit(path, wrong)


def skeleton_of_files(model_class: Any, config: Any, path: str | Path, shapes: Shapes) -> PreTrainedModel:
    """Return the model of a config without weights, unless it is far larger than the tensors of the checkpoint."""
    # First, as thousands of layers take long to build, even without weights.
    _check_amount("layers", getattr(config.get_text_config(), "num_hidden_layers", 0), "tensors", len(shapes), path)
    model = empty_model(model_class, config, path)
    stored = sum(map(prod, shapes.values()))
    _check_amount("parameters", model.num_parameters(), "parameters", stored, path)
    return model


def _check_amount(what: str, described: Any, of: str, stored: int, path: str | Path) -> None:
    if stored and isinstance(described, int) and described > TIMES * stored:
        raise RequestError(
            f"weights must be those that the config describes, but {path} describes {described:,} {what}, and its "
            f"files hold {stored:,} {of}; save or fetch it again"
        )


def stored_shapes(path: str | Path) -> Shapes:
    """Return the shapes of the tensors in a folder's safetensors; none for a Hub id or other files."""
    shapes: Shapes = {}
    for file in sorted(Path(path).glob("model*.safetensors")):
        try:
            shapes |= {name: shape for name, _, shape in describe_tensors(file)}
        except SafetensorError as error:
            raise RequestError(
                f"the model at {path} cannot be loaded: {root_cause(error)} ({file.name}); save or fetch it again"
            ) from error
    return shapes


def _misfit(path: str | Path, wrong: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> RequestError:
    shapes = [f"{name} is {list(found)} for {list(need)}" for name, found, need in sorted(wrong)]
    return RequestError(
        f"weights must have the shapes that the config describes, but in {path} {listed(shapes, most=3)}; save or "
        "fetch it again"
    )


def load_weights(model_class: Any, path: str | Path, *, shapes: Shapes | None = None, **kwargs: Any) -> PreTrainedModel:
    """Return the model of a checkpoint, in evaluation mode; `kwargs` are passed to `from_pretrained`."""
    config = kwargs.get("config") or class_config(path, model_class, **hub_options(kwargs))
    check_files(model_class, config, path)
    if not kwargs.get("ignore_mismatched_sizes"):
        _check_sizes(model_class, config, path, stored_shapes(path) if shapes is None else shapes)
    try:
        with (
            load_report() as report,
            hub_or_cache(path, "model", local_files_only=kwargs.get("local_files_only", False)),
        ):
            model, info = model_class.from_pretrained(
                path, output_loading_info=True, **{"ignore_mismatched_sizes": True, **kwargs}
            )
    except (RequestError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers, safetensors, json and the Hub: each raises its own kind
        raise RequestError(
            f"the model at {path} cannot be loaded: {' '.join([root_cause(error), *report])}; save or fetch it again"
        ) from error
    if info["mismatched_keys"] and not kwargs.get("ignore_mismatched_sizes"):
        raise _misfit(path, info["mismatched_keys"])
    if info["missing_keys"]:
        raise RequestError(
            f"every parameter must be in the files, but {path} has no {listed(sorted(info['missing_keys']), most=3)}; "
            "they would be random: save the checkpoint again from the model that was trained"
        )
    return model.eval()
