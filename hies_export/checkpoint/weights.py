"""Load a checkpoint by `from_pretrained`, and refuse what it would load without a word, or only with all the memory."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ..errors import RequestError, listed, refusing
from ..model.internals import empty_model, load_report
from ..model.online import hub_or_cache
from .classes import AGAIN, hub_options
from .stored import describe_tensors

Shapes = dict[str, list[int]]
"""Name of a tensor in the files -> its shape."""

# A config that describes this many times the parameters in the files is damaged.
TIMES = 10


def stored_shapes(path: str | Path) -> Shapes:
    """Return the shapes of the tensors in a folder's safetensors; none for a Hub id or other files."""
    files = sorted(Path(path).glob("model*.safetensors"))
    return {name: shape for file in files for name, _, shape in describe_tensors(file)}


def skeleton_of_files(model_class: Any, config: Any, path: str | Path, shapes: Shapes) -> PreTrainedModel:
    """Return the model of a config without weights; refuse one that is far larger than the tensors in the files.

    transformers would fill the memory with random numbers for what the files lack, before it says so.
    """
    model = empty_model(model_class, config)
    stored = sum(map(prod, shapes.values()))
    if stored and model.num_parameters() > TIMES * stored:
        raise RequestError(
            f"weights must be those that the config describes, but {path} describes {model.num_parameters():,} "
            f"parameters, and its files hold {stored:,}; {AGAIN}"
        )
    return model


def _check_sizes(model: PreTrainedModel, path: str | Path, shapes: Shapes) -> None:
    """Refuse tensors of other sizes than the model's; transposed ones fit, and names that it lacks do not matter.

    transformers would refuse them too, but after filling others of their size, which may take all memory.
    """
    expected = model.state_dict()
    known = sorted(expected.keys() & shapes.keys())
    wrong = [
        f"{name} is {shapes[name]} for {list(expected[name].shape)}"
        for name in known
        if prod(shapes[name]) != expected[name].numel()
    ]
    if wrong:
        raise RequestError(
            f"weights must have the shapes that the config describes, but in {path} {listed(wrong, most=3)}; {AGAIN}"
        )


def load_weights(model_class: Any, path: str | Path, *, shapes: Shapes | None = None, **kwargs: Any) -> PreTrainedModel:
    """Return the model of a checkpoint, in evaluation mode; `kwargs` are passed to `from_pretrained`."""
    offline = kwargs.get("local_files_only", False)
    with (
        load_report() as report,
        refusing(f"the model at {path} must load, but does not", AGAIN, report=report),
        hub_or_cache(path, "model", local_files_only=offline),
    ):
        config = kwargs.get("config") or model_class.config_class.from_pretrained(path, **hub_options(kwargs))
        shapes = stored_shapes(path) if shapes is None else shapes
        as_stored = getattr(config, "quantization_config", None) is None and not kwargs.get("ignore_mismatched_sizes")
        if shapes and as_stored:
            _check_sizes(skeleton_of_files(model_class, config, path, shapes), path, shapes)
        if Path(path, "generation_config.json").is_file():
            GenerationConfig.from_pretrained(path)  # transformers replaces a damaged one by another without a word
        model, info = model_class.from_pretrained(path, output_loading_info=True, **kwargs)
    if info["missing_keys"]:
        raise RequestError(
            f"every parameter must be in the files, but {path} has no {listed(sorted(info['missing_keys']), most=3)}; "
            "they would be random: save the checkpoint again from the model that was trained"
        )
    return model.eval()
