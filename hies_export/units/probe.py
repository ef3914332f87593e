"""Run a model's own forward without its weights, to see how it wires its linear layers to its attention.

Every linear layer of the copy returns random features that do not depend on its input. So the inputs of the attention
function depend only on the layers right in front of it, through the model's own code: views, splits, norms, rotations,
gates. Derivatives then show which feature reaches which head. The model may be of any size, and on the meta device.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.batches import inputs_of
from ..model.copies import copy_with
from ..model.internals import ask_for_output_alone, configs_of, forget_hooks, forwards_set
from ..model.linear import features_of, is_linear

K = TypeVar("K")
Call = tuple[str, int]  # a linear layer, and the number of its call in a run, from 0 on

# Larger parameters are embeddings or experts, whose values do not matter: one number replaces all of them.
_LARGEST_REAL_PARAMETER = 2**20


class Probe:
    """A weightless copy of a model, in evaluation mode, on the CPU.

    Attributes:
        model: The copy.
        kept: Linear layer -> indices of the output features it returns; a layer not named returns all. A feature has
            the same values in every run, whichever others are left out.
        kept_of_parameters: Parameter -> an axis, and the indices of it that the parameter has in a run; a parameter not
            named has all.
        positive: Whether features are uniform, not normal: in (0, 1) at every other token, where no common activation
            is flat, and in (-1, 1) at the others. A ReLU has no derivative at half of all normal features.
        config_reads: Module -> the names that it read from its own config in the last run.
    """

    def __init__(self, model: PreTrainedModel, *, positive: bool = False):
        self.model = _weightless(model).eval()
        self.positive = positive
        self.kept: dict[str, Tensor] = {}
        self.kept_of_parameters: dict[str, tuple[int, Tensor]] = {}
        self.config_reads: dict[nn.Module, set[str]] = {}
        for module in self.model.modules():
            config = vars(module).get("config")
            # Some modules call a number their config.
            if hasattr(config, "__dict__") and not isinstance(module, PreTrainedModel):
                self.config_reads[module] = set()
                module.config = _RecordingConfig(config, self.config_reads[module])

    def other_parameters(self) -> list[nn.Parameter]:
        """Return the parameters outside of linear layers."""
        linear = _linear_parameters(self.model)
        return [p for p in self.model.parameters() if id(p) not in linear]

    def small_parameters(self) -> list[nn.Parameter]:
        """Return those of `other_parameters` that have random values; larger ones hold a single number."""
        return [p for p in self.other_parameters() if p.numel() <= _LARGEST_REAL_PARAMETER]

    def run(
        self,
        batch: Mapping[str, Tensor],
        *,
        before: Callable[[Call, Tensor], None],
        after: Callable[[Call, Tensor], None] = lambda call, features: None,
    ) -> Any:
        """Run one forward pass, without labels, and return what the model returns.

        In every call of a linear layer, `before` gets its input, and `after` its features, (..., out_features), which
        are leaves that require a gradient. Random draws of the model are the same in every run.
        """
        call_numbers: defaultdict[str, Iterator[int]] = defaultdict(count)

        def forward(name: str, out_features: int, x: Tensor) -> Tensor:
            call = name, next(call_numbers[name])
            before(call, x)
            features = self._features(call, (*x.shape[:-1], out_features))
            after(call, features)
            return features.clone()  # a model may write into what a layer returns, but not into a leaf

        for reads in self.config_reads.values():
            reads.clear()
        cut_parameters = {
            name: self.model.get_parameter(name).detach().index_select(axis, kept)
            for name, (axis, kept) in self.kept_of_parameters.items()
        }
        layers = [(name, module) for name, module in self.model.named_modules() if is_linear(module)]
        forwards = {layer: partial(forward, name, features_of(layer)[0]) for name, layer in layers}
        inputs = {name: tensor.cpu() for name, tensor in inputs_of(batch).items()}
        with forwards_set(forwards), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # the CPU's alone: torch.manual_seed would reseed GPUs too
            return torch.func.functional_call(self.model, cut_parameters, kwargs=inputs, tie_weights=False)

    def _features(self, call: Call, shape: tuple[int, ...]) -> Tensor:
        """Return what a call of a linear layer returns: random numbers of a shape, less the features not in `kept`."""
        name, number = call
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {number}".encode()))
        draw = torch.rand if self.positive else torch.randn
        features = draw(shape, generator=generator, dtype=torch.float32)
        if self.positive:
            features.view(-1, shape[-1])[1::2].mul_(2).sub_(1)
        if name in self.kept:
            features = features[..., self.kept[name]]
        return features.requires_grad_()


class ReachedHeads(NamedTuple):
    """The heads that the features of a layer, or the elements of a parameter, reach."""

    head: Tensor  # (features,) int64: the only head that each reaches, -1 for none or several
    any: Tensor  # (features,) bool: whether it reaches any head


def head_of_features(tensor: Tensor, leaves: Mapping[K, Tensor]) -> dict[K, ReachedHeads]:
    """Return leaf that reaches a tensor -> the heads that its features reach.

    With c_h = h + 1 and random weights r, take the gradients of sum_h c_h <r_h, x_h> and of sum_h <r_h, x_h> to a
    feature. Their ratio is c_h at every token if the feature reaches head h alone. If it reaches several heads, the
    ratio varies from token to token.

    `tensor` has queries, keys or values, (batch, heads, tokens, head_dim). `leaves` is layer or call -> features, (...,
    features); or name -> a parameter, whose every element is a feature.
    """
    labels = torch.arange(1, tensor.shape[1] + 1, dtype=tensor.dtype).view(1, -1, 1, 1)
    return _reached_heads(tensor, labels, leaves)


def head_of_columns(x: Tensor, width: int, leaves: Mapping[K, Tensor]) -> dict[K, ReachedHeads]:
    """Return `head_of_features` of x, the input of an output projection, (..., heads * width)."""
    return _reached_heads(x, _head_labels(x, width), leaves)


def head_of_axes(x: Tensor, width: int, leaves: Mapping[K, Tensor]) -> dict[K, list[Tensor]]:
    """Return leaf that reaches x, as in `head_of_columns` -> by axis of the leaf the head that each index reaches.

    The heads are (size of the axis,) int64, -1 for none or several.
    """

    def by_index(gradient: Tensor, axis: int) -> Tensor:
        return gradient.movedim(axis, -1).reshape(-1, gradient.shape[axis])

    return {
        name: [_by_ratio(by_index(plain, axis), by_index(labelled, axis)).head for axis in range(plain.dim())]
        for name, (plain, labelled) in _gradients(x, _head_labels(x, width), leaves).items()
    }


def _head_labels(x: Tensor, width: int) -> Tensor:
    """Return for every column of x, (..., heads * width), its head's label, 1 for the first."""
    return (torch.arange(x.shape[-1]) // width + 1).to(x.dtype)


def _reached_heads(tensor: Tensor, labels: Tensor, leaves: Mapping[K, Tensor]) -> dict[K, ReachedHeads]:
    """Return the heads that leaves reach; `labels` has h + 1 at the elements of head h, and broadcasts to `tensor`."""
    reached = {}
    for name, (plain, labelled) in _gradients(tensor, labels, leaves).items():
        features = features_in(leaves[name])
        reached[name] = _by_ratio(plain.reshape(-1, features), labelled.reshape(-1, features))
    return reached


def features_in(leaf: Tensor) -> int:
    """Return the number of features of a leaf: of a parameter, all elements; of a layer's output, the last axis."""
    return leaf.numel() if isinstance(leaf, nn.Parameter) else leaf.shape[-1]


def _gradients(tensor: Tensor, labels: Tensor, leaves: Mapping[K, Tensor]) -> dict[K, tuple[Tensor, Tensor]]:
    """Return for every leaf that reaches a tensor the gradients of its weighted sum: without and with the labels."""
    if not tensor.requires_grad or not leaves:
        return {}
    weights = positive_weights(tensor.shape)
    plain, labelled = gradients_of(tensor, (weights, weights * labels), [*leaves.values()])
    by_name = zip(leaves, plain, labelled, strict=True)
    return {name: (first, second) for name, first, second in by_name if first is not None and second is not None}


def positive_weights(shape: Sequence[int]) -> Tensor:
    """Return random weights in [0.5, 1.5), the same in every call."""
    return 0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(0))


def gradients_of(x: Tensor, weights: Iterable[Tensor], leaves: Sequence[Tensor]) -> list[tuple[Tensor | None, ...]]:
    """Return, for each set of weights, the gradients of the weighted sum of x to the leaves; None without a path."""
    return [torch.autograd.grad((x * w).sum(), leaves, retain_graph=True, allow_unused=True) for w in weights]


def ratios_of(labelled: Tensor, plain: Tensor) -> Tensor:
    """Return the ratios of gradients, (tokens, features); NaN where both are small, so mostly rounding error."""
    is_clear = plain.abs() > 1e-3 * plain.abs().amax(0, keepdim=True)
    return torch.where(is_clear, labelled / plain.where(is_clear, 1.0), torch.nan)


def _by_ratio(plain: Tensor, labelled: Tensor) -> ReachedHeads:
    """Return the heads that features reach, from their gradients without and with labels, (tokens, features)."""
    ratio = ratios_of(labelled, plain)
    label = ratio.nanmean(0).round()
    is_single = ((ratio - label).abs().nan_to_num(0.0) < 1e-2).all(0) & ~ratio.isnan().all(0)
    return ReachedHeads(torch.where(is_single, label - 1, -1).long(), ((plain != 0) | (labelled != 0)).any(0))


class _RecordingConfig:
    """A config that records the names read from it."""

    def __init__(self, config: Any, reads: set[str]):
        self.__dict__.update(_config=config, _reads=reads)

    def __getattr__(self, name: str) -> Any:
        self._reads.add(name)
        return getattr(self._config, name)


def _weightless(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model on the CPU, with stand-ins for parameters and buffers that take almost no memory."""
    generator = torch.Generator().manual_seed(0)
    linear = _linear_parameters(model)
    parameters = {id(p) for p in model.parameters()}

    def buffer_stand_in(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.detach().cpu().float() if tensor.is_floating_point() else tensor.cpu()
        if tensor.is_floating_point():
            return torch.rand(tensor.shape, generator=generator)
        return torch.full(tensor.shape, 1 if tensor.dtype == torch.bool else 0, dtype=tensor.dtype)

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) not in parameters:
            return buffer_stand_in(tensor)
        if id(tensor) in linear:  # never read, as the probe computes in place of the layers
            values = torch.zeros([1] * tensor.dim()).expand(tensor.shape)
        elif tensor.numel() > _LARGEST_REAL_PARAMETER:
            values = torch.full([1] * tensor.dim(), 0.01).expand(tensor.shape)
        elif tensor.dim() < 2:
            values = 0.5 + torch.rand(tensor.shape, generator=generator)
        else:
            values = torch.randn(tensor.shape, generator=generator) * 0.1
        return nn.Parameter(values, requires_grad=False)

    copied = copy_with(model, stand_in)
    ask_for_output_alone(configs_of(copied))
    for module in copied.modules():
        forget_hooks(module)
    return copied


def _linear_parameters(model: nn.Module) -> set[int]:
    return {id(p) for module in model.modules() if is_linear(module) for p in module.parameters(recurse=False)}
