"""Find the task of a model by its class, and how a model of any class behaves."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..errors import MERGE, RequestError
from ..model.internals import auto_classes
from ..model.sentence import TextEncoder
from .behaviour import Behaviour
from .by_shape import BY_SHAPE
from .feature_extraction import Embeddings
from .registry import TASKS
from .task import Task


def task_of(model: Any) -> Task:
    """Return what a model in memory predicts."""
    if not isinstance(model, PreTrainedModel):
        raise RequestError(
            f"the model must be a PreTrainedModel of transformers, got {type(model).__name__}; {_remedy(model)}"
        )
    refuse_adapters(model)
    by_torch = any(type(module).__module__.startswith("torch.ao.nn.") for module in model.modules())
    if by_torch or getattr(model, "hf_quantizer", None) or getattr(model.config, "quantization_config", None):
        raise RequestError(
            f"the weights must be floating-point numbers to be cut, but this {type(model).__name__} is quantised; load "
            "it without quantization_config, prune it, and quantise what is left"
        )
    task = _task_of(model)
    if task is None:
        raise RequestError(
            f"the model must be one that {', '.join(task.auto_class for task in TASKS.values())} loads, got "
            f"{type(model).__name__}; load it with the head that it was fine-tuned with"
        )
    return task


def _remedy(model: Any) -> str:
    """Return what to pass instead of an object that is not a PreTrainedModel."""
    if isinstance(getattr(model, "module", None), PreTrainedModel):  # DataParallel, and others for several GPUs
        return "pass the model inside it, model.module"
    if type(model).__module__.partition(".")[0] == "peft":
        return "pass what merge_and_unload() returns"
    return "load one with from_pretrained"


def refuse_adapters(model: PreTrainedModel) -> None:
    """Refuse a model with layers of PEFT in it: what is saved of it would be the adapter alone."""
    for name, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            raise RequestError(
                f"the model must be a plain one of transformers, but {name} has an adapter ({type(module).__name__} of "
                f"peft); {MERGE}"
            )


def behaviour_of(model: Any) -> Behaviour:
    """Return how a model behaves: as those of its task and problem type, or as its shapes tell if it has none."""
    if isinstance(model, TextEncoder):
        return Embeddings(model.settings.similarity)
    task = _task_of(model)
    return BY_SHAPE if task is None else task.behaviour(model.config)


def _task_of(model: Any) -> Task | None:
    if isinstance(model, TextEncoder):
        return TASKS["feature-extraction"]
    return task_by_class(type(model).__name__, model.config) if isinstance(model, PreTrainedModel) else None


def embedding_task(name: str, config: Any) -> Task | None:
    """Return the task of base models if a class, given by its name, is one without a head; None if it is not."""
    task, classes = TASKS["feature-extraction"], auto_classes(name, config.model_type)
    return task if task_by_class(name, config) is None and task.auto_class in classes else None


def task_by_class(name: str, config: Any) -> Task | None:
    """Return the task whose Auto class loads a model class, which is given by its name; None if there is none."""
    classes = auto_classes(name, config.model_type)
    for task in TASKS.values():
        # `AutoModel` loads base models, which have no task of their own.
        fits = task.encoder_decoders if config.is_encoder_decoder else not task.only_encoder_decoders
        if task.auto_class in classes and not task.embeds and fits:
            return task
    return None
