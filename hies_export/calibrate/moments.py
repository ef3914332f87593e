"""Collect the moments of the inputs and outputs of consumers: all that least squares needs, without activations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate

import psutil
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.batches import size_of
from ..errors import DataError, NonFiniteError, RequestError
from ..model.internals import bfloat16_products, exact_products
from ..model.linear import features_of, weight_of
from ..processes import added_up, on_main
from ..progress import SILENT, Progress
from ..units.units import PrunableModule
from .readings import Gradients, Read, Reading, own_batches, read_forward
from .walk import device_of_blocks

HELD_OUT_EVERY = 5  # every fifth sample is held out: enough to judge a fit, and most tokens are left to fit it
WIDE = 512  # from this number of inputs on, sums and fits use a faster algorithm, which rounds differently
BLOCK = 256  # rows of the products of a wide layer that are computed at once
SHARE_OF_FREE = 0.5  # most of the free memory that moments of all modules may take


@dataclass
class Moments:
    """Weighted sums over tokens of inputs x (tokens, inputs) and targets y (tokens, outputs), float64.

    Tokens are added in place. After the last one, call `complete`.
    """

    tokens: Tensor  # (), on the CPU: sum of the weights; the number of tokens if all weigh one
    x: Tensor  # (inputs,) sum of x
    xx: Tensor  # (inputs, inputs) sum of x x^T
    y: Tensor  # (outputs,) sum of y
    yx: Tensor  # (outputs, inputs) sum of y x^T
    yy: Tensor  # () sum of |y|^2

    @classmethod
    def zeros(cls, inputs: int, device: torch.device, outputs: int = 0) -> Moments:
        """Return sums over no tokens; without outputs if `of_outputs` shall give the targets."""
        shapes: tuple[tuple[int, ...], ...] = ((inputs,), (inputs, inputs), (outputs,), (outputs, inputs), ())
        sums = (torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes)
        return cls(torch.zeros((), dtype=torch.float64), *sums)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the sums, in the order of the fields."""
        return tuple(vars(self).values())

    def __add__(self, other: Moments) -> Moments:
        return Moments(*(mine + its for mine, its in zip(self.tensors(), other.tensors(), strict=True)))

    def __mul__(self, factor: float) -> Moments:
        return Moments(*(factor * mine for mine in self.tensors()))

    @exact_products()
    def add(self, x: Tensor, y: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Add tokens x (tokens, inputs): with targets y (tokens, outputs), or each times its weight, (tokens,)."""
        in_bfloat16 = x.dtype == torch.bfloat16 and weights is None
        x = x.to(torch.float64 if len(self.xx) < WIDE else torch.float32)
        self.tokens += len(x) if weights is None else weights.sum(dtype=torch.float64).item()
        if y is not None:
            assert weights is None
            y = y.to(x)
            self.y += y.sum(0)
            self.yx += y.T @ x
            self.yy += y.pow(2).sum(dtype=torch.float64)
        root_x = x  # x times the root of its weight, which a product then has once
        if weights is not None:
            weights = weights.to(x)[:, None]
            x, root_x = x * weights, x * weights.sqrt()
        self.x += x.sum(0)
        # For a wide layer the products are the main cost of a pass, so sums over a batch are float32, and over batches
        # float64; only blocks from the diagonal on are computed. On MiniLM's neurons no entry (i, j) is off by more
        # than 1e-6 of the root of (i, i) times (j, j), and the held-out error of a fit changes by 1e-6 of itself.
        rows = BLOCK if len(self.xx) >= WIDE else len(self.xx)
        with bfloat16_products() if in_bfloat16 else nullcontext():
            for start in range(0, len(self.xx), rows):
                self.xx[start : start + rows, start:] += root_x[:, start : start + rows].T @ root_x[:, start:]

    def complete(self) -> None:
        """Fill the blocks of xx that `add` leaves out."""
        if len(self.xx) >= WIDE:
            for start in range(0, len(self.xx), BLOCK):
                end = start + BLOCK
                self.xx[end:, start:end] = self.xx[start:end, end:].T

    def of_outputs(self, layer: nn.Module, columns: Tensor | None = None) -> Moments:
        """Return the moments of the inputs `columns`, (columns,) int64, with the outputs W x + b of a layer as targets.

        Sums over targets follow from those over x; those that take all inputs are kept for later calls.
        """
        weight = weight_of(layer).detach().to(self.x)
        bias = layer.bias.detach().to(weight) if isinstance(layer.bias, Tensor) else weight.new_zeros(len(weight))
        if not len(self.y):  # not computed yet: it takes outputs x inputs^2 multiplications
            self.y = weight @ self.x + self.tokens * bias
            self.yy = ((weight @ self.xx) * weight).sum() + bias @ (2 * self.y - self.tokens * bias)
        chosen = slice(None) if columns is None else columns.to(self.x.device)
        x, of_all = self.x[chosen], self.xx[:, chosen]  # (columns,), and (inputs, columns) for targets from all inputs
        return Moments(self.tokens, x, of_all[chosen], self.y, weight @ of_all + torch.outer(bias, x), self.yy)

    def ridge_fits(
        self, weight: Tensor, ridges: Iterable[float], *, centred: bool, quick: bool = False
    ) -> Iterator[tuple[float, Tensor, Tensor | None]]:
        """Yield each ridge with the weight (outputs, inputs) and bias (outputs,) of its ridge regression of y on x.

        The regression shrinks towards `weight`, (outputs, inputs), instead of zero. Ridges are relative to the mean of
        the diagonal of the moments of x; those too small for these are left out. If `centred`, a bias is fitted as
        well, from centred moments; else it is None. With `quick`, the system of a wide layer is solved in float32.
        """
        mean_x, xx, yx = self.x / self.tokens, self.xx / self.tokens, self.yx / self.tokens
        if centred:
            xx = xx - torch.outer(mean_x, mean_x)
            yx = yx - torch.outer(self.y / self.tokens, mean_x)
        scale, dtype = xx.diagonal().mean(), torch.float32 if quick and len(xx) >= WIDE else xx.dtype
        unexplained = (yx - weight @ xx).T.to(dtype)  # (inputs, outputs)

        def solve(ridge: float) -> Tensor | None:  # in a function, which frees the matrix and its factor
            damped = xx.to(dtype, copy=True)
            damped.diagonal().add_(ridge * scale)
            factor, failed = torch.linalg.cholesky_ex(damped)
            return None if failed else weight + torch.cholesky_solve(unexplained, factor).T

        for ridge in ridges:
            if (fitted := solve(ridge)) is not None:
                yield ridge, fitted, self.fit_bias(fitted) if centred else None

    def fit_bias(self, weight: Tensor) -> Tensor:
        """Return the least-squares bias (outputs,) for a weight (outputs, inputs)."""
        return (self.y - weight @ self.x) / self.tokens

    def error(self, weight: Tensor, bias: Tensor | None) -> float:
        """Return the weighted mean over tokens of |weight x + bias - y|^2."""
        total = ((weight @ self.xx) * weight).sum() - 2 * (weight * self.yx).sum() + self.yy
        if bias is not None:
            total = total + 2 * bias @ (weight @ self.x - self.y) + self.tokens * bias @ bias
        return (total.clamp(min=0) / self.tokens).item()


@dataclass(frozen=True)
class Spread:
    """Mean and second moments of the inputs of a consumer over tokens, float64."""

    mean: Tensor  # (inputs,)
    moments: Tensor  # (inputs, inputs), the mean of x x^T or, if centred, the covariance

    @classmethod
    def of(cls, x: Tensor, *, centred: bool) -> Spread:
        """Return the spread of x (tokens, inputs)."""
        x = x.double()
        mean = x.mean(0)
        x = x - mean if centred else x
        return cls(mean, x.T @ x / len(x))


@dataclass(frozen=True)
class LayerMoments:
    """Moments of one consumer: over the samples that a fit uses, and over every fifth sample, on which it is judged.

    In `uniform` moments all tokens weigh one. In `weighted` ones, if they were collected, a token weighs the squared
    norm of the gradient of the sample's prediction with respect to the consumer's input there. Targets are the outputs
    of `layer`; without one, they were added with the inputs.
    """

    uniform: tuple[Moments, Moments]  # of the samples to fit on, and of those held out
    weighted: tuple[Moments, Moments] | None = None
    layer: nn.Module | None = None

    @classmethod
    def zeros(cls, layer: nn.Module, *, weighted: bool = False, targets: bool = False) -> LayerMoments:
        """Return sums over no tokens for a consumer; with `targets`, these are added instead of its own outputs."""
        (outputs, inputs), device = features_of(layer), weight_of(layer).device
        zeros = [Moments.zeros(inputs, device, outputs if targets else 0) for _ in range(4 if weighted else 2)]
        return cls((zeros[0], zeros[1]), (zeros[2], zeros[3]) if weighted else None, None if targets else layer)

    def parts(self) -> tuple[Moments, ...]:
        """Return the uniform moments, then the weighted ones if there are any."""
        return *self.uniform, *(self.weighted or ())

    def add_up(self, name: str) -> None:
        """Add up over all processes, after the last token.

        A DataError says that the module `name` read no tokens, a NonFiniteError that it read or gave NaN or infinity,
        from which any chain of removals, fit or error would be NaN.
        """
        sums = [tensor for moments in self.parts() for tensor in moments.tensors()]
        added_up(sums)
        for moments in self.parts():
            moments.complete()
        if not self.counted:
            raise DataError(
                "every module that may lose units must read tokens of the rows to refit on, but "
                f"{name} reads none, as texts reach no image tower; give other rows, or leave its tower out"
            )
        weights = [] if self.layer is None else self.layer.parameters(recurse=False)  # which give the targets later
        if not all(values.isfinite().all() for values in (*sums, *weights)):
            raise NonFiniteError(
                f"every input and output of {name}'s last layer must be finite to refit it, but over {self.counted} "
                "calibration tokens they add up to NaN or infinity; check the weights before it, the compensation rows "
                "and the model's dtype (float16 overflows where bfloat16 does not), or leave compensation out"
            )

    @property
    def counted(self) -> int:
        """Number of tokens."""
        return round(sum(moments.tokens.item() for moments in self.uniform))

    def spread(self, *, last: bool = False) -> Spread:
        """Return the mean of the inputs, and their covariance if `layer` has a bias; else their second moments.

        All tokens weigh one. With `last`, the products of inputs are overwritten and dropped, which saves memory.
        """
        fitting, held_out = self.uniform
        mean = (fitting.x + held_out.x) / self.counted
        second = (fitting.xx.add_(held_out.xx) if last else fitting.xx + held_out.xx).div_(self.counted)
        if last:
            fitting.xx = held_out.xx = second.new_empty(0, 0)
        centred = self.layer is not None and self.layer.bias is not None
        return Spread(mean, second.sub_(torch.outer(mean, mean)) if centred else second)

    def mixed(self, mix: float = 1.0, columns: Tensor | None = None) -> tuple[Moments, Moments]:
        """Return the moments to fit on and those held out; a token weighs mix + (1 - mix) q / mean(q), on average one.

        Here q is the squared norm of the gradient; if q is zero everywhere, because no output depends on the consumer,
        all tokens weigh one. With `columns`, (columns,) int64, the moments are of these inputs only.
        """
        if mix < 1 and self.weighted is None:
            raise RequestError(f"token weights of {mix:g} need weighted moments; collect them with weighted=True")

        def with_targets(moments: Moments) -> Moments:
            return moments if self.layer is None else moments.of_outputs(self.layer, columns)

        fitting, held_out = self.uniform
        mean_q = 0.0 if self.weighted is None else sum(part.tokens.item() for part in self.weighted) / self.counted
        if self.weighted is None or mix == 1 or mean_q == 0:
            return with_targets(fitting), with_targets(held_out)
        share, (fitting_q, held_out_q) = (1 - mix) / mean_q, self.weighted
        mixed_fitting = with_targets(fitting) * mix + with_targets(fitting_q) * share
        return mixed_fitting, with_targets(held_out) * mix + with_targets(held_out_q) * share


class MomentStore:
    """The moments of every consumer over some rows, collected block by block when first used.

    Those of all modules are kept for later uses if `keep` is set and they fit into half of the free memory; else each
    use collects them again. A module takes 16 bytes for each pair of inputs, twice that if `weighted`: tokens are then
    also weighted by the gradient of the prediction, which takes a walk backward, and a language model's labels if any.
    """

    def __init__(
        self,
        dense: PreTrainedModel,
        modules: Sequence[PrunableModule],
        batches: Sequence[dict[str, Tensor]],
        *,
        weighted: bool = False,
        keep: bool = True,
    ):
        check_samples(batches)
        self.weighted, self.kept = weighted, dict[str, LayerMoments]()  # `kept` once collected, if `keeps`
        self._dense, self._modules, self._batches = dense, modules, batches
        widths = [features_of(dense.get_submodule(module.consumer))[1] for module in modules]
        needed, device = 16 * (2 if weighted else 1) * sum(width**2 for width in widths), device_of_blocks(dense)
        on_gpu = device.type == "cuda"  # the free memory is that of one process, which decides for all of them
        free = on_main(lambda: torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available)
        self.keeps = keep and needed < SHARE_OF_FREE * free

    def each(
        self,
        work: Callable[[Sequence[PrunableModule], Mapping[str, LayerMoments]], None],
        names: Collection[str] | None = None,
        *,
        name: str = "moments",
        progress: Progress = SILENT,
    ) -> None:
        """Call `work` with modules and their moments, block by block, or once for all if these are kept already.

        `names` are those of the wanted modules, None for all; the loop over the blocks is shown as `name`.
        """
        wanted = [module for module in self._modules if names is None or module.name in names]
        if self.kept:
            work(wanted, self.kept)
            return
        first_samples, collected = [0, *accumulate(map(size_of, self._batches))], dict[str, LayerMoments]()

        def add_block(block_modules: list[PrunableModule], read: Read) -> None:
            layers = {module.name: self._dense.get_submodule(module.consumer) for module in block_modules}
            sums = {name: LayerMoments.zeros(layer, weighted=self.weighted) for name, layer in layers.items()}
            for number in own_batches(self._batches):
                for reading in read(number):
                    add_reading(sums[reading.name], reading, first_samples[number])
            for module_name, moments in sums.items():
                moments.add_up(module_name)
            if self.keeps:
                collected.update(sums)
            if chosen := [module for module in block_modules if module in wanted]:
                work(chosen, sums)

        modules = self._modules if self.keeps else wanted
        if self.weighted:
            Gradients(self._dense, self._batches, modules, "effect").collect(add_block, name=name, progress=progress)
        else:
            read_forward(self._dense, self._batches, modules, add_block, name=name, progress=progress)
        self.kept = collected


def add_reading(sums: LayerMoments, read: Reading, first: int, targets: Tensor | None = None) -> None:
    """Add a consumer's tokens in one batch, whose first sample has the number `first`, to the sums, in place.

    Tokens of samples that are held out go to the second of each pair. `targets` are (batch, tokens, outputs).
    """
    x = read.inputs
    held = torch.arange(first, first + len(x), device=x.device) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    for part, samples in enumerate((~held, held)):
        rows = (read.real & samples[:, None]).flatten().nonzero()[:, 0]  # tokens of these samples, of all tokens
        chosen = x.flatten(0, 1).index_select(0, rows)
        sums.uniform[part].add(chosen, None if targets is None else targets.flatten(0, 1).index_select(0, rows))
        if sums.weighted is not None:
            assert read.gradients is not None
            weights = read.gradients.float().square().sum(-1).flatten().index_select(0, rows)
            sums.weighted[part].add(chosen, weights=weights)


def check_samples(batches: Sequence[Mapping[str, Tensor]]) -> None:
    """Refuse batches with too few samples to hold one out."""
    samples = sum(map(size_of, batches))
    if samples < HELD_OUT_EVERY:
        raise DataError(
            f"compensation needs at least {HELD_OUT_EVERY} samples, one of them to hold out, got {samples}; "
            "raise compensation.samples"
        )
