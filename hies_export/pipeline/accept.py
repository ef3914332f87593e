"""Refuse a model that does not run on its calibration rows, or that no checkpoint gives back."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from types import FunctionType

import torch
from transformers import PreTrainedModel

from ..data.batches import Batch
from ..errors import RequestError, listed, quoted, refusing
from ..model.internals import empty_model, lacks_pooler
from ..model.modes import evaluating, output_alone
from ..model.text_encoder import TextEncoder
from ..model.tokens import finds_end_by_padding, first_samples, is_token
from ..tasks import Task
from ..tasks.labels import ClassNames

logger = logging.getLogger(__name__)


def check_model(model: PreTrainedModel, batches: Sequence[Batch], task: Task) -> None:
    """Refuse, by a RequestError, a model that cannot be run on its calibration rows, judged or saved."""
    _check_padding_token(model, batches)
    name, output = type(model).__name__, _predicted(model, first_samples(batches[0]), task)
    if task.predicts in ("classes", "labels"):
        classes, outputs = ClassNames(model.config), output.shape[-1]
        if len(classes.names) != outputs:
            raise RequestError(
                f"id2label must name every class of the model, but its config names {len(classes.names)} ({classes}), "
                f"and the head of {name} gives {outputs}; name as many"
            )
    if model.can_generate():  # some generation configs are read with a warning, but cannot be saved
        must = f"a generation config must be one that transformers saves, but that of this {name} is not"
        remedy = "correct model.generation_config, or generation_config.json beside the weights"
        with tempfile.TemporaryDirectory() as folder, refusing(must, remedy):
            model.generation_config.save_pretrained(folder)


def warn_of_one_class(batches: Sequence[Batch], use: str, consequence: str) -> None:
    """Warn if all labels are of one class; the warning names the use of the rows, and what follows."""
    classes = torch.cat([batch["labels"] for batch in batches if "labels" in batch] or [torch.empty(0)])
    if len(classes) > 1 and len(classes.unique()) == 1:
        logger.warning(
            "all %s %s rows are of class %d, so %s by that class alone; give rows of all classes: shuffle the data, "
            "take more rows, or set data.shuffled if they are a slice",
            *(f"{len(classes):,}", use, classes[0].item(), consequence),
        )


def _check_padding_token(model: PreTrainedModel, batches: Sequence[Batch]) -> None:
    """Refuse a model that finds the end of a text by its padding token, if that is missing or none of its tokens."""
    if not finds_end_by_padding(model):
        return
    pad = model.config.get_text_config().pad_token_id
    # Without a padding token, it reads the last token, which is right where each text is alone in its batch.
    unneeded = pad is None and all(len(batch["input_ids"]) == 1 for batch in batches)
    if not unneeded and not is_token(pad, model.config):
        raise RequestError(
            f"{type(model).__name__} finds the end of a text by its config's pad_token_id, which must be one of its "
            f"tokens, got {quoted(pad)}; set it to the token that texts are padded with"
        )


def _predicted(model: PreTrainedModel, batch: Batch, task: Task) -> torch.Tensor:
    """Return the output for a part of a batch; refuse a model that fails on one, or has weights of NaN."""
    must, finite = f"a model must run on the calibration rows, but {type(model).__name__} does not", True
    with refusing(must), evaluating(model), output_alone(model), torch.inference_mode():
        for part in task.parts(batch):
            output = task.output(model, part)
            finite = bool(output.isfinite().all())
            if not finite:
                break
    wrong = [] if finite else [name for name, weights in model.named_parameters() if not weights.isfinite().all()]
    if wrong:  # finite weights may give outputs that are not finite, which is no error
        raise RequestError(
            f"the weights must be finite, but {listed(wrong, most=3)} of this {type(model).__name__} have NaN or "
            "infinity; take an earlier checkpoint"
        )
    return output


def check_in_memory(model: PreTrainedModel) -> None:
    """Refuse, by a RequestError, a model changed in ways that neither its copies nor its checkpoints would keep.

    A forward that was put on a module, as by `model.forward = torch.compile(model.forward)`, computes with that module
    even in a copy. A checkpoint gives back only the parameters that the class makes of the config; their sizes may
    differ.
    """
    inner = model.auto_model if isinstance(model, TextEncoder) else model
    for name, module in inner.named_modules():
        if isinstance(vars(module).get("forward"), FunctionType):
            raise RequestError(
                f"every module must compute by the forward of its class, but {name or 'the model'} has one of its own, "
                "such as torch.compile or a patch puts there; prune the model first, or load it again without"
            )
    parameters = dict(inner.named_parameters(remove_duplicate=False))
    if empty := [name for name, parameter in parameters.items() if parameter.is_meta]:
        raise RequestError(
            f"the weights must be in memory, but {listed(empty, most=3)} of this {type(inner).__name__} have no data; "
            "load it without offloading its weights"
        )
    built = dict(empty_model(type(inner), inner.config).named_parameters(remove_duplicate=False))
    surplus, lost = sorted(parameters.keys() - built.keys()), sorted(built.keys() - parameters.keys())
    if surplus or (lost and not lacks_pooler(inner, lost)):
        differs = [f"{verb} {listed(names, most=3)}" for verb, names in (("has", surplus), ("lacks", lost)) if names]
        raise RequestError(
            "a model must have the parameters that its class and config give it, because no others come back from a "
            f"checkpoint, but this {type(inner).__name__} {' and '.join(differs)}; change the config or the model back "
            "(torch.nn.utils.prune.remove and remove_parametrizations make plain weights)"
        )
    first_names: dict[int, str] = {}  # id of a parameter -> the first of the names that share it
    for name, parameter in parameters.items():
        other = first_names.setdefault(id(parameter), name)
        if built[name] is not built[other]:
            raise RequestError(
                f"parameters may be shared only as the config says, as a checkpoint holds them once, but {name} of "
                f"this {type(inner).__name__} is {other}; set tie_word_embeddings in its config if they are embeddings"
            )
