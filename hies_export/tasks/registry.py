"""The tasks that there are by their names, and the task of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..entry_points import Registry
from ..errors import RequestError
from .late import data
from .task import COLUMNS, Task

if TYPE_CHECKING:
    from torch import Tensor

# Name -> the file that registers it, in the order of help and messages, and the class that loads its models.
_OWN = {
    "text-classification": ("classification", "AutoModelForSequenceClassification"),
    "token-classification": ("token_classification", "AutoModelForTokenClassification"),
    "question-answering": ("question_answering", "AutoModelForQuestionAnswering"),
    "fill-mask": ("fill_mask", "AutoModelForMaskedLM"),
    "feature-extraction": ("feature_extraction", "AutoModel"),
    "image-classification": ("classification", "AutoModelForImageClassification"),
    "text-generation": ("text_generation", "AutoModelForCausalLM"),
    "image-text-to-text": ("image_text_to_text", "AutoModelForImageTextToText"),
}
TASKS: Registry[type[Task]] = Registry("tasks", {name: f"tasks.{file}" for name, (file, _) in _OWN.items()})


def register_task(task: type[Task]) -> type[Task]:
    """Register a class as a task, so that recipes may name it and models are found by its Auto class.

    One of the same name is replaced.

    Args:
        task: A subclass of `tasks.Task`.

    Returns:
        The class itself, so that this decorates it.

    Raises:
        RequestError: It names columns that a recipe has no field for.

    Examples:
        >>> from hies_export.tasks import TextClassification
        >>> @register_task
        ... class NextSentencePrediction(TextClassification):
        ...     name = "next-sentence-prediction"
        ...     auto_class = "AutoModelForNextSentencePrediction"
        >>> NextSentencePrediction.name
        'next-sentence-prediction'
    """
    if unknown := sorted({name for names in task.reads for name in names.split()}.difference(COLUMNS)):
        raise RequestError(f"the columns of a task must be among {', '.join(COLUMNS)}, got {', '.join(unknown)}")
    TASKS[task.name] = task
    return task


def task_of(model: Any, batch: Mapping[str, Tensor] | None = None, **options: Any) -> Task:
    """Return the task of a model by its class, bound to its configuration; `options` are those of the task.

    A model of a class that none loads predicts tokens, if these are the labels of a batch or it generates text, and
    else what a classifier of its configuration does.
    """
    from transformers import PreTrainedModel

    from ..model.text_encoder import TextEncoder

    if isinstance(model, TextEncoder):
        return TASKS["feature-extraction"](model.config, **{"reader": model.reader, **options})
    task = _known_task(model)
    if task is None:
        if batch is not None and "labels" in batch:
            tokens = data.are_tokens(batch["labels"])
        else:
            tokens = isinstance(model, PreTrainedModel) and model.can_generate()
        task = TASKS["text-generation" if tokens else "text-classification"]
    return task(model.config, **options)


def _known_task(model: Any) -> type[Task] | None:
    from transformers import PreTrainedModel

    return task_by_class(type(model).__name__, model.config) if isinstance(model, PreTrainedModel) else None


def task_by_class(name: str, config: Any) -> type[Task] | None:
    """Return the task whose Auto class loads a model class, which is given by its name; None if there is none."""
    from ..model.internals import auto_classes

    classes = auto_classes(name, config.model_type)
    for known in TASKS:
        # `AutoModel` loads base models, which have no task of their own.
        if _auto_class(known) in classes and not TASKS[known].embeds:
            return TASKS[known]
    return None


def _auto_class(name: str) -> str:
    """Return the class that loads a task's models; that of a task in a file of this package without importing it."""
    return TASKS[name].auto_class if name in TASKS.data or name not in _OWN else _OWN[name][1]


def embedding_task(name: str, config: Any) -> type[Task] | None:
    """Return the task of base models if a class, given by its name, is one without a head; None if it is not."""
    from ..model.internals import auto_classes

    task, classes = TASKS["feature-extraction"], auto_classes(name, config.model_type)
    return task if task_by_class(name, config) is None and task.auto_class in classes else None


def refuse_unknown(model: Any) -> None:
    """Refuse a model in memory that has no task, is an encoder-decoder or none of transformers, or cannot be cut."""
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
    if not isinstance(model, TextEncoder) and _known_task(model) is None:
        raise RequestError(
            f"the model must be one that {', '.join(task.auto_class for task in TASKS.values())} loads, got "
            f"{type(model).__name__}; load it with the head that it was fine-tuned with"
        )


def refuse_adapters(model: Any) -> None:
    """Refuse a model with layers of PEFT in it: what is saved of it would be the adapter alone."""
    for name, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            raise RequestError(
                f"the model must be a plain one of transformers, but {name or 'it'} has an adapter "
                f"({type(module).__name__} of peft); give what merge_and_unload() of the PeftModel returns"
            )
