"""Collect the moments of the inputs and outputs of consumers: all that least squares needs, without activations.

Moments and SplitMoments   what a fit is computed from
LayerMoments               sums of one consumer, from which they follow for any weight of the tokens
MomentStream               these sums for all modules, under a memory limit
collect_moments            the moments of all modules at once
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.targets import size_of
from ..errors import DataError, RequestError
from ..model.linear import features_of, weight_of
from ..progress import SILENT, Progress
from ..units import PrunableModule, Selection
from .readings import Reading, reading
from .stream import LIMIT_BYTES, Stream

# Every fifth sample is held out: enough to judge a fit, and most tokens are left to fit it.
HELD_OUT_EVERY = 5
# From this number of inputs on, products of tokens are the main cost of a pass. They are then computed in float32 for
# every batch, in blocks above the diagonal, and only their sum is float64.
WIDE = 1024
BLOCK = 256


@dataclass
class Moments:
    """Weighted sums over tokens of inputs x (tokens, inputs) and targets y (tokens, outputs), float64.

    Attributes:
        tokens: Sum of the weights; the number of tokens where all weigh one.
        x: (inputs,) sum of x.
        y: (outputs,) sum of y.
        xx: (inputs, inputs) sum of x x^T.
        yx: (outputs, inputs) sum of y x^T.
        yy: Sum of |y|^2.
        counted: Number of tokens.
    """

    tokens: float
    x: Tensor
    y: Tensor
    xx: Tensor
    yx: Tensor
    yy: Tensor
    counted: int

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> Moments:
        """Return the moments of x (tokens, inputs) and y (tokens, outputs)."""
        x, y = x.double(), y.double()
        return cls(float(len(x)), x.sum(0), y.sum(0), x.T @ x, y.T @ x, y.pow(2).sum(), len(x))

    def part(self, columns: Tensor) -> Moments:
        """Return the moments of the inputs with the given indices, (columns,) int64, and of all targets."""
        return replace(self, x=self.x[columns], xx=self.xx[columns][:, columns], yx=self.yx[:, columns])

    def __add__(self, other: Moments) -> Moments:
        return Moments(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def fit(self, weight: Tensor, *, ridge: float, centred: bool) -> tuple[Tensor, Tensor | None]:
        """Return the ridge regression of y on x, which shrinks towards `weight` instead of zero.

        Args:
            weight: (outputs, inputs)
            ridge: Relative to the mean of the diagonal of the moments of x.
            centred: Whether to fit a bias as well, from centred moments.

        Returns:
            The weight (outputs, inputs), and the bias (outputs,), or None if not `centred`.

        Raises:
            torch.linalg.LinAlgError: The moments of x are singular.
        """
        return next(self.fits(weight, ridges=[ridge], centred=centred))

    def fits(self, weight: Tensor, *, ridges: Sequence[float], centred: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield what `fit` returns, for each of several ridges."""
        mean_x, xx, yx = self.x / self.tokens, self.xx / self.tokens, self.yx / self.tokens
        if centred:
            xx = xx - torch.outer(mean_x, mean_x)
            yx = yx - torch.outer(self.y / self.tokens, mean_x)
        left = (yx - weight @ xx).T  # what the weight does not explain
        scale = xx.diagonal().mean()
        for ridge in ridges:
            damped = xx + ridge * scale * torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
            if len(xx) < WIDE:
                change = torch.linalg.solve(damped, left)
            else:
                change = torch.cholesky_solve(left, torch.linalg.cholesky(damped))
            fitted = weight + change.T
            yield fitted, self.fit_bias(fitted) if centred else None

    def fit_bias(self, weight: Tensor) -> Tensor:
        """Return the least-squares bias (outputs,) for a weight (outputs, inputs)."""
        return (self.y - weight @ self.x) / self.tokens

    def error(self, weight: Tensor, bias: Tensor | None) -> float:
        """Return the weighted mean over tokens of |weight x + bias - y|^2."""
        total = ((weight @ self.xx) * weight).sum() - 2 * (weight * self.yx).sum() + self.yy
        if bias is not None:
            total = total + 2 * bias @ (weight @ self.x - self.y) + self.tokens * bias @ bias
        return total.clamp(min=0).item() / self.tokens


@dataclass(frozen=True)
class Spread:
    """Mean and second moments of the inputs of a consumer, float64.

    Attributes:
        mean: (inputs,)
        moments: (inputs, inputs) mean of x x^T over tokens; if centred, that of the distances to the mean.
    """

    mean: Tensor
    moments: Tensor

    @classmethod
    def of(cls, x: Tensor, *, centred: bool) -> Spread:
        """Return the spread of x (tokens, inputs)."""
        x = x.double()
        mean = x.mean(0)
        distance = x - mean if centred else x
        return cls(mean, distance.T @ distance / len(x))


@dataclass(frozen=True)
class SplitMoments:
    """Moments of one consumer, split by sample.

    Attributes:
        fitting: Moments of the samples that a fit uses.
        held_out: Moments of every fifth sample, on which the fit is judged.
    """

    fitting: Moments
    held_out: Moments

    def part(self, columns: Tensor) -> SplitMoments:
        """Return the moments of the inputs with the given indices, (columns,) int64, and of all targets."""
        columns = columns.to(self.fitting.xx.device)
        return SplitMoments(self.fitting.part(columns), self.held_out.part(columns))

    def __add__(self, other: SplitMoments) -> SplitMoments:
        return SplitMoments(self.fitting + other.fitting, self.held_out + other.held_out)


class _Sums:
    """Sums over the weighted tokens of one part of the samples, added up in place.

    Attributes:
        tokens, x, xx, counted: As in `Moments`.
    """

    def __init__(self, inputs: int, device: torch.device):
        self.tokens, self.counted = 0.0, 0
        self.x, self.xx = (torch.zeros(shape, dtype=torch.float64, device=device) for shape in (inputs, (inputs,) * 2))
        self._dtype = torch.float64 if inputs < WIDE else torch.float32

    def add(self, x: Tensor, y: Tensor, weights: Tensor | None) -> None:
        """Add tokens x (tokens, inputs) and y (tokens, outputs), each times its weight, (tokens,); None for ones."""
        x, y = x.to(self._dtype), y.to(self._dtype)
        self.counted += len(x)
        if weights is None:
            self.tokens += len(x)
            self._add(x, y, x, y)
        else:
            self.tokens += weights.sum(dtype=torch.float64).item()
            weights = weights.to(self._dtype)[:, None]
            root = weights.sqrt()
            self._add(x * weights, y * weights, x * root, y * root)

    def _add(self, x: Tensor, y: Tensor, root_x: Tensor, root_y: Tensor) -> None:
        """Add tokens times their weights to the plain sums, and those times the roots of the weights to products."""
        self.x += x.sum(0, dtype=torch.float64)
        _add_products(self.xx, root_x)

    def finish(self) -> None:
        """Complete the sums after the last token."""
        if len(self.xx) >= WIDE:
            _mirror(self.xx)


class _TargetSums(_Sums):
    """Sums with the targets y.

    Attributes:
        y, yx, yy: As in `Moments`.
    """

    def __init__(self, inputs: int, outputs: int, device: torch.device):
        super().__init__(inputs, device)
        shapes: tuple[tuple[int, ...], ...] = ((outputs,), (outputs, inputs), ())
        self.y, self.yx, self.yy = (torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes)

    def _add(self, x: Tensor, y: Tensor, root_x: Tensor, root_y: Tensor) -> None:
        super()._add(x, y, root_x, root_y)
        self.y += y.sum(0, dtype=torch.float64)
        self.yx += root_y.T @ root_x
        self.yy += root_y.pow(2).sum(dtype=torch.float64)


class _LayerSums(_Sums):
    """Sums whose targets are the outputs W x + b of a layer, so that those over targets follow from xx.

    Args:
        layer: The layer.
        device: Where the sums are.
    """

    def __init__(self, layer: nn.Module, device: torch.device):
        super().__init__(features_of(layer)[1], device)
        self._weight, self._bias = weight_of(layer).detach(), layer.bias

    def target(self) -> tuple[Tensor, Tensor]:
        """Return W (outputs, inputs) and b (outputs,), float64."""
        weight = self._weight.double()
        bias = self._bias
        return weight, bias.detach().double() if isinstance(bias, Tensor) else weight.new_zeros(len(weight))

    @cached_property
    def y(self) -> Tensor:
        """(outputs,), as in `Moments`."""
        weight, bias = self.target()
        return weight @ self.x + self.tokens * bias

    @cached_property
    def yy(self) -> Tensor:
        """Sum of |y|^2. It takes outputs x inputs^2 multiplications."""
        weight, bias = self.target()
        return ((weight @ self.xx) * weight).sum() + bias @ (2 * self.y - self.tokens * bias)


@dataclass(frozen=True)
class LayerMoments:
    """Sums of one consumer, from which `mixed` takes moments.

    Attributes:
        uniform: Sums in which all tokens weigh one, of fitting and of held-out samples.
        weighted: Sums in which a token weighs the squared norm of the gradient of the sample's prediction with respect
            to the consumer's input there; None if they were not collected.
    """

    uniform: tuple[_Sums, _Sums]
    weighted: tuple[_Sums, _Sums] | None = None

    @property
    def counted(self) -> int:
        """Number of tokens."""
        return sum(part.counted for part in self.uniform)

    def spread(self, *, centred: bool) -> Spread:
        """Return the mean and the second moments of the inputs over all tokens, each weighing one."""
        fitting, held_out = self.uniform
        mean = (fitting.x + held_out.x) / self.counted
        found = (fitting.xx + held_out.xx).div_(self.counted)
        return Spread(mean, found.sub_(torch.outer(mean, mean)) if centred else found)

    def mixed(self, mix: float = 1.0, columns: Tensor | None = None) -> SplitMoments:
        """Return the moments in which a token weighs mix + (1 - mix) q / mean(q), which is one on average.

        Here q is the squared norm of the gradient. If nothing reads the consumer, so that q is zero, all weigh one.
        Orders of removal need the inputs alone: `spread` leaves out the sums over targets, which take longer.

        Args:
            mix: In (0, 1]; 1 for uniform weights.
            columns: (columns,) int64, the inputs to return the moments of; None for all.

        Raises:
            RequestError: The mix is out of range, or needs weighted sums that were not collected.
        """
        check_mix(mix, weighted=self.weighted is not None)
        if self.weighted is None or mix == 1:
            return SplitMoments(*(_moments([(1.0, part)], columns) for part in self.uniform))
        mean = sum(part.tokens for part in self.weighted) / self.counted
        if mean == 0:
            return self.mixed(columns=columns)
        shares = (mix, (1 - mix) / mean)
        parts = zip(self.uniform, self.weighted, strict=True)
        return SplitMoments(*(_moments(list(zip(shares, part, strict=True)), columns) for part in parts))


def check_mix(mix: float, *, weighted: bool) -> None:
    """Refuse a mix of token weights that moments cannot give.

    Raises:
        RequestError: The mix is not in (0, 1], or below 1 without weighted sums.
    """
    if not 0 < mix <= 1:
        raise RequestError(f"token weights must be in (0, 1], got {mix}")
    if mix < 1 and not weighted:
        raise RequestError(f"token weights of {mix:g} need moments of weighted tokens; collect them with weighted=True")


def _moments(parts: Sequence[tuple[float, _Sums]], columns: Tensor | None) -> Moments:
    """Return the moments of one or two sums, each times its factor, for some of the inputs."""
    sums = parts[0][1]
    columns = None if columns is None else columns.to(sums.xx.device)

    def total(name: str, columns: Tensor | None = None) -> Tensor:
        values = [getattr(part, name) for _, part in parts]
        if columns is not None:
            values = [value[..., columns] for value in values]
        if len(parts) == 1:
            return values[0]
        (one, _), (other, _) = parts
        return (values[0] * one).add_(values[1], alpha=other)

    rows, x = total("xx", columns), total("x", columns)  # (inputs, columns), (columns,)
    if isinstance(sums, _LayerSums):
        weight, bias = sums.target()
        yx = weight @ rows + torch.outer(bias, x)
    else:
        yx = total("yx", columns)
    return Moments(
        tokens=sum(factor * part.tokens for factor, part in parts),
        x=x,
        y=total("y"),
        xx=rows if columns is None else rows[columns],
        yx=yx,
        yy=total("yy"),
        counted=sums.counted,
    )


def _sum(x: Tensor, weights: Tensor | None) -> Tensor:
    """Return the float64 sum over tokens of x (tokens, features), each times its weight, (tokens, 1)."""
    return (x if weights is None else x * weights).sum(0, dtype=torch.float64)


def _add_products(total: Tensor, x: Tensor) -> None:
    """Add x^T x, of x (tokens, inputs), to a total (inputs, inputs); to a wide one only from the diagonal on."""
    if len(total) < WIDE:
        total += x.T @ x
        return
    for start in range(0, len(total), BLOCK):
        total[start : start + BLOCK, start:] += x[:, start : start + BLOCK].T @ x[:, start:]


def _mirror(total: Tensor) -> None:
    """Copy what is above the blocks on the diagonal to below them."""
    for start in range(0, len(total), BLOCK):
        end = start + BLOCK
        total[end:, start:end] = total[start:end, end:].T


class MomentStream(Stream[LayerMoments]):
    """The moments of every consumer, module by module, under a memory limit; see `Stream`.

    A module takes 16 bytes for each pair of inputs, and as many for each pair of an input and an output if it has no
    more inputs than outputs (with more, those products follow from the others); twice that if `weighted`.

    Args:
        dense: The dense model.
        modules: The modules whose consumers to watch, in the order in which the model runs them.
        batches: Inputs of the model; padding is excluded by the `attention_mask`. Labels are read only from batches of
            a language model, if `weighted`.
        selection: Cover the inputs of the kept units only.
        limit_bytes: Bytes that the moments of a group of modules may take.
        weighted: Also add up tokens weighted by the gradient of the prediction; it takes a backward pass as well.
        progress: Shows the loops over the batches.

    Raises:
        DataError: Fewer than five samples.

    Examples:
        >>> for module, moments in MomentStream(model, modules, batches, weighted=True):
        ...     half = moments.mixed(0.5)
    """

    def __init__(
        self,
        dense: PreTrainedModel,
        modules: Sequence[PrunableModule],
        batches: Sequence[dict[str, Tensor]],
        *,
        selection: Selection | None = None,
        limit_bytes: float = LIMIT_BYTES,
        weighted: bool = False,
        progress: Progress = SILENT,
    ):
        check_samples(batches)
        self.selection, self.weighted = selection, weighted
        self._dense, self._batches, self._progress = dense, batches, progress
        sizes = [bytes_of(dense, module, selection=selection, weighted=weighted) for module in modules]
        super().__init__(modules, sizes, limit_bytes, what="the moments")

    def _collect(self, group: Sequence[PrunableModule]) -> dict[str, LayerMoments]:
        return _collect(
            self._dense,
            group,
            self._batches,
            selection=self.selection,
            weighted=self.weighted,
            progress=self._progress,
        )


def bytes_of(
    dense: PreTrainedModel, module: PrunableModule, *, selection: Selection | None = None, weighted: bool = False
) -> int:
    """Return the bytes that the moments of one module take in a `MomentStream`."""
    outputs, inputs = features_of(dense.get_submodule(module.consumer))
    derived = selection is None and inputs > outputs
    inputs = inputs if selection is None else len(selection[module.name].units) * module.unit_width
    return 2 * (1 + weighted) * 8 * inputs * (inputs + (0 if derived else outputs))


def collect_moments(
    dense: PreTrainedModel,
    modules: Sequence[PrunableModule],
    batches: Sequence[dict[str, Tensor]],
    *,
    selection: Selection | None = None,
    slim: PreTrainedModel | None = None,
    progress: Progress = SILENT,
) -> dict[str, SplitMoments]:
    """Collect the moments of every consumer's inputs and dense outputs, in one pass over the batches.

    Without a selection, the moments cover all inputs. Those of any selection are sub-blocks of them, so one pass serves
    any number of plans. Memory is then 16 bytes for each pair of inputs, and of an input and an output, of each
    consumer, e.g. 28 MB for the heads of 6 layers of width 384, and 17 GB for those of 32 layers of width 4096.
    `MomentStream` takes as many passes as a limit makes necessary.

    Args:
        dense: The dense model.
        modules: The modules whose consumers to watch.
        batches: Inputs of the model; labels are not used, and padding is excluded by the `attention_mask`.
        selection: Cover the inputs of the kept units only.
        slim: Take the inputs from this model, cut by `selection`, and only the outputs from the dense one.
        progress: Shows the loop over the batches.

    Returns:
        Module -> moments of its consumer.

    Raises:
        DataError: Fewer than five samples.
    """
    check_samples(batches)
    found = _collect(dense, modules, batches, selection=selection, slim=slim, progress=progress)
    return {name: moments.mixed() for name, moments in found.items()}


def _collect(
    dense: PreTrainedModel,
    modules: Sequence[PrunableModule],
    batches: Sequence[dict[str, Tensor]],
    *,
    selection: Selection | None = None,
    slim: PreTrainedModel | None = None,
    weighted: bool = False,
    progress: Progress = SILENT,
) -> dict[str, LayerMoments]:
    """Return the sums of every consumer, from one pass over the batches; see `collect_moments`."""
    by_name = {module.name: module for module in modules}
    sums: dict[str, LayerMoments] = {}
    seen = 0
    with ExitStack() as stack:
        read = stack.enter_context(reading(dense, modules, gradients=weighted))
        read_slim = None if slim is None else stack.enter_context(reading(slim, modules))
        for index, batch in enumerate(progress.track(batches, "moments")):
            held = torch.arange(seen, seen + size_of(batch)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
            seen += size_of(batch)
            readings = read(batch, index)
            slim_readings = readings if read_slim is None else read_slim(batch, index)
            for one, other in zip(readings, slim_readings, strict=True):
                module, x = by_name[one.name], other.inputs
                if selection is not None and slim is None:
                    x = x.index_select(-1, module.columns(selection[one.name].units).to(x.device))
                if one.name not in sums:
                    layer = dense.get_submodule(module.consumer)
                    whole = selection is None and slim is None
                    sums[one.name] = _new_sums(layer, x, derived=whole, weighted=weighted)
                _add(sums[one.name], one, x, held.to(x.device))
    for layer_moments in sums.values():
        for part in (*layer_moments.uniform, *(layer_moments.weighted or ())):
            part.finish()
    return sums


def _new_sums(layer: nn.Module, x: Tensor, *, derived: bool, weighted: bool) -> LayerMoments:
    """Return sums of zero for a consumer that reads x (..., inputs).

    Args:
        layer: The dense consumer.
        x: What the sums will cover of its inputs.
        derived: Whether these are all its inputs in the dense model, so that the targets follow from them.
        weighted: Whether to add up weighted tokens too.
    """
    outputs, inputs = features_of(layer)

    def new() -> _Sums:
        # For square consumers, such as attention's, the products with the outputs are cheap to add up.
        if derived and inputs > outputs:
            return _LayerSums(layer, x.device)
        return _TargetSums(x.shape[-1], outputs, x.device)

    return LayerMoments((new(), new()), (new(), new()) if weighted else None)


def _add(sums: LayerMoments, read: Reading, x: Tensor, held: Tensor) -> None:
    """Add what a consumer read in one batch.

    Args:
        sums: Where to add it.
        read: The reading of the dense model.
        x: (batch, tokens, inputs), the inputs to add up.
        held: (batch,) bool, the held-out samples.
    """
    for part, samples in enumerate((~held, held)):
        rows = (read.real & samples[:, None]).flatten().nonzero()[:, 0]
        x_part, y_part = (t.flatten(0, 1).index_select(0, rows) for t in (x, read.outputs))
        sums.uniform[part].add(x_part, y_part, None)
        if sums.weighted is not None and read.gradients is not None:
            weights = read.gradients.float().square().sum(-1).flatten().index_select(0, rows)
            sums.weighted[part].add(x_part, y_part, weights)


def moment_bytes(modules: Sequence[PrunableModule]) -> int:
    """Return the bytes of memory that `collect_moments` needs without a selection.

    It assumes square consumers, which the output projections of most models are. Each has two float64 matrices for
    fitting and two held out.
    """
    return sum(2 * 2 * 8 * (module.units * module.unit_width) ** 2 for module in modules)


def check_samples(batches: Sequence[Mapping[str, Tensor]]) -> None:
    """Refuse batches with too few samples to hold one out.

    Raises:
        DataError: Fewer than five samples.
    """
    samples = sum(map(size_of, batches))
    if samples < HELD_OUT_EVERY:
        raise DataError(
            f"compensation needs at least {HELD_OUT_EVERY} samples, one of them to hold out, got {samples}; "
            "raise compensation.samples"
        )
