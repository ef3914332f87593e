"""Refuse a model in memory that could not be copied, or whose checkpoint would be another model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType

from torch.nn import Parameter
from transformers import PreTrainedModel

from ..errors import RequestError, listed
from ..model.internals import empty_model
from ..model.sentence import TextEncoder
from .weights import lacks_pooler


def check_in_memory(model: PreTrainedModel) -> None:
    """Refuse a model that was changed in ways that neither its copies nor its files would keep.

    A forward that is a function put on a module computes with that module even in a copy, as after
    `model.forward = torch.compile(model.forward)`. A checkpoint gives back the parameters of the class and the config,
    and no others. Layers may have been resized.

    Raises:
        RequestError: A module has such a forward, a parameter holds no data, or names of parameters, or which of them
            are shared, differ from what the class makes of the config.
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
        differs = [f"has {listed(surplus, most=3)}"] * bool(surplus) + [f"lacks {listed(lost, most=3)}"] * bool(lost)
        raise RequestError(
            "a model must have the parameters that its class and config give it, because no others come back from a "
            f"checkpoint, but this {type(inner).__name__} {' and '.join(differs)}; change the config or the model back "
            "(torch.nn.utils.prune.remove and remove_parametrizations make plain weights)"
        )
    for name, other in _shared(parameters):
        if built[name] is not built[other]:
            raise RequestError(
                f"parameters may be shared only as the config says, as a checkpoint holds them once, but {name} of "
                f"this {type(inner).__name__} is {other}; set tie_word_embeddings in its config if they are embeddings"
            )


def _shared(parameters: Mapping[str, Parameter]) -> Iterator[tuple[str, str]]:
    """Yield the names of each parameter that has two, the later one first."""
    first: dict[int, str] = {}
    for name, parameter in parameters.items():
        if first.setdefault(id(parameter), name) != name:
            yield name, first[id(parameter)]
