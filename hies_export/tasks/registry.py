"""All tasks by their names, and the task of a model."""

from __future__ import annotations

from typing import Any

from ..entry_points import Registry
from ..errors import RequestError
from .task import Task

# The tasks of this package, in the order of help and messages: the file of each, and the class that loads its models.
BUILT_IN = {
    "text-classification": ("classification", "AutoModelForSequenceClassification"),
    "token-classification": ("token_classification", "AutoModelForTokenClassification"),
    "question-answering": ("question_answering", "AutoModelForQuestionAnswering"),
    "fill-mask": ("fill_mask", "AutoModelForMaskedLM"),
    "feature-extraction": ("feature_extraction", "AutoModel"),
    "image-classification": ("classification", "AutoModelForImageClassification"),
    "text-generation": ("text_generation", "AutoModelForCausalLM"),
    "image-text-to-text": ("image_text_to_text", "AutoModelForImageTextToText"),
}
TASKS: Registry[type[Task]] = Registry("tasks", {name: f"tasks.{file}" for name, (file, _) in BUILT_IN.items()})


def register_task(task: type[Task]) -> type[Task]:
    """Register a class as a task, so that recipes may name it and models are found by its Auto class.

    Args:
        task: A subclass of `tasks.Task`; it replaces one of the same name.

    Returns:
        The class itself, so that this decorates it.

    Examples:
        >>> from hies_export.tasks import TextClassification
        >>> @register_task
        ... class NextSentencePrediction(TextClassification):
        ...     name = "next-sentence-prediction"
        ...     auto_class = "AutoModelForNextSentencePrediction"
        >>> NextSentencePrediction.name
        'next-sentence-prediction'
    """
    TASKS[task.name] = task
    return task


def task_of(model: Any, **options: Any) -> Task:
    """Return the task of a model by its class, bound to its configuration, or refuse it as `refuse_unknown` does."""
    from transformers import PreTrainedModel

    from ..model.text_encoder import TextEncoder

    if isinstance(model, TextEncoder):
        return TASKS["feature-extraction"](model.config, **{"reader": model.reader, **options})
    task = task_by_class(type(model).__name__, model.config) if isinstance(model, PreTrainedModel) else None
    if task is None:
        refuse_unknown(model)
    assert task is not None  # `refuse_unknown` raised otherwise
    return task(model.config, **options)


def task_by_class(name: str, config: Any, *, embeds: bool = False) -> type[Task] | None:
    """Return the task whose Auto class loads a class of this name, or None; feature-extraction only if `embeds`."""
    from ..model.internals import auto_classes

    classes = auto_classes(name, config.model_type)
    for task_name in TASKS:
        # The Auto class of a built-in task is known without its import, if no other is registered under the name.
        is_registered = task_name in TASKS.data or task_name not in BUILT_IN
        auto_class = TASKS[task_name].auto_class if is_registered else BUILT_IN[task_name][1]
        if auto_class in classes and not TASKS[task_name].embeds:
            return TASKS[task_name]
    # `AutoModel` loads any class without a head.
    has_embedding = embeds and TASKS["feature-extraction"].auto_class in classes
    return TASKS["feature-extraction"] if has_embedding else None


def refuse_unknown(model: Any) -> None:
    """Refuse a model without a task, with adapters, quantised, none of transformers, or an encoder-decoder."""
    from transformers import PreTrainedModel

    from ..model.text_encoder import TextEncoder
    from ..model.tokens import refuse_encoder_decoder

    if callable(getattr(model, "named_modules", None)):
        refuse_adapters(model)
    if not isinstance(model, PreTrainedModel):
        raise RequestError(
            f"the model must be a PreTrainedModel of transformers, got {type(model).__name__}; pass the one "
            "inside it, or load one with from_pretrained"
        )
    refuse_encoder_decoder(model.config, type(model).__name__)
    by_torch = any(type(module).__module__.startswith("torch.ao.nn.") for module in model.modules())
    if by_torch or getattr(model, "hf_quantizer", None) or getattr(model.config, "quantization_config", None):
        raise RequestError(
            f"the weights must be floating-point numbers to be cut, but this {type(model).__name__} is quantised; load "
            "it without quantization_config, prune it, and quantise what is left"
        )
    if not isinstance(model, TextEncoder) and task_by_class(type(model).__name__, model.config) is None:
        raise RequestError(
            f"the model must be one that {', '.join(task.auto_class for task in TASKS.values())} loads, got "
            f"{type(model).__name__}; load it with the head that it was fine-tuned with"
        )


def refuse_adapters(model: Any) -> None:
    """Refuse, by a RequestError, a model with layers of PEFT in it: what is saved of it would be the adapter alone."""
    for name, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            raise RequestError(
                f"the model must be a plain one of transformers, but {name or 'it'} has an adapter "
                f"({type(module).__name__} of peft); give what merge_and_unload() of the PeftModel returns"
            )
