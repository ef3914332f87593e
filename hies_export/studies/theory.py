"""What the theory behind HIES says of a model, beside what is measured; `hies-export inspect RECIPE --theory`.

After "Entropy Meets Importance: A Unified Head Importance-Entropy Score for Stable and Efficient Transformer Pruning"
(Choi et al., https://arxiv.org/abs/2510.13832): Lemma 4.1 and Appendix B.1 (loss), Eq. 5 (entropy), Appendix D.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..calibrate.collect import collect_statistics
from ..data.targets import is_regression, size_of
from ..evaluate.predict import Predictions, TokenPredictions, predict, predicted, references
from ..model.linear import weight_of
from ..model.modes import evaluating, without_cache
from ..model.tokens import real_tokens
from ..model.watch import watch
from ..score.criteria import score_units
from ..select.select import select_units
from ..slim.mask import masked_units
from ..values import PrunableModule, Selection, Statistics

SHARES = (0.1, 0.3, 0.5)
# Greatest curvature of a loss in its logits: of p (1 - p), of diag(p) - p p^T (Appendix B.1.4), and of a square. With
# two classes the softmax is a sigmoid of the difference of the logits.
CURVATURE = {"binary cross-entropy": 0.25, "softmax cross-entropy": 0.5, "squared error": 2.0}


@dataclass(frozen=True)
class Orthogonality:
    """Moments of the two terms of HIES over the heads of a model (Appendix D.1, Tables 7 and 8).

    Attributes:
        mean_u: Mean of u, HIS of each head divided by the sum over heads: one over the number of heads.
        mean_v: Mean of v, the attention entropy of each head in [0, 1].
        covariance: Of u and v, over heads (divided by their number).
        mean_product: Mean of u v, which is covariance + mean_u mean_v.
        correlation: Of u and v; 0 where either is the same for all heads.
    """

    mean_u: float
    mean_v: float
    covariance: float
    mean_product: float
    correlation: float


@dataclass(frozen=True)
class ModuleNorms:
    """Of one attention module.

    Attributes:
        output: Spectral norm of the output projection W_O.
        blocks: (heads,) of its columns that belong to each head.
        activation: (heads,) E |A_h|^2, over samples of the mean over real tokens of what the head gives, squared.
        deficit: (heads,) 1 - AE_h, how far attention is from looking everywhere alike (Eq. 5).
    """

    output: float
    blocks: Tensor
    activation: Tensor
    deficit: Tensor


@dataclass(frozen=True)
class LossIncrease:
    """What removing heads does to the loss, in its own unit.

    Attributes:
        criterion: What the heads were chosen by.
        share: Share of heads removed.
        first_order: Sum of the removed heads' HIS.
        quadratic: c / 2 sum |W_O|^2 E |A_h|^2, with c from `CURVATURE`; with `first_order` the bound of Eq. 4.
        quadratic_blocks: The same with the norms of the heads' own blocks of W_O (Appendix B.1.3).
        measured: Mean loss of the masked model less that of the dense one, on the calibration samples.
    """

    criterion: str
    share: float
    first_order: float
    quadratic: float
    quadratic_blocks: float
    measured: float


@dataclass(frozen=True)
class Theory:
    """Everything `theory` finds out.

    Attributes:
        orthogonality: Over all heads.
        loss: Key of `CURVATURE`.
        modules: By attention module.
        increases: By criterion and share.
    """

    orthogonality: Orthogonality
    loss: str
    modules: Mapping[str, ModuleNorms]
    increases: tuple[LossIncrease, ...]


def theory(
    model: PreTrainedModel,
    batches: Sequence[dict[str, Tensor]],
    modules: Sequence[PrunableModule],
    *,
    alpha: float = 0.9,
) -> Theory:
    """Compare the paper's bound with the loss.

    The bound takes W_O for the last layer, logits z = y W_O, and so leaves out what stands between an attention module
    and the logits of a real model. It says how the terms compare; that the measured increase stays below it is not
    promised.

    Args:
        model: The dense model.
        batches: Calibration batches; without labels the model's own predictions are the labels.
        modules: The attention modules that may lose heads.
        alpha: Of HIES, whose choice of heads is shown beside that of HIS.

    Raises:
        DataError: As `collect_statistics`.
    """
    statistics = collect_statistics(model, batches, modules)
    loss = _loss_of(model)
    norms = {
        module.name: ModuleNorms(
            spectral_norm(weight_of(model.get_submodule(module.consumer))),
            torch.tensor([spectral_norm(block) for block in _blocks(model, module)], dtype=torch.float64),
            activation,
            1 - statistics["entropy"][module.name],
        )
        for module, activation in zip(modules, _activations(model, batches, modules), strict=True)
    }
    dense = predict(model, batches)
    labels = references(batches) if "labels" in batches[0] else predicted(dense)
    before = _mean_loss(dense, labels, loss)
    increases = []
    for criterion in ("his", "hies"):
        scores = score_units(statistics, criterion=criterion, alpha=alpha)
        for share in SHARES:
            selection = select_units(scores, modules, heads=share)
            with masked_units(model, selection, modules):
                after = _mean_loss(predict(model, batches), labels, loss)
            terms = _terms(selection, statistics, norms, CURVATURE[loss])
            increases.append(LossIncrease(criterion, share, *terms, after - before))
    return Theory(orthogonality(statistics), loss, norms, tuple(increases))


def orthogonality(statistics: Statistics) -> Orthogonality:
    """Return the moments of normalised HIS and attention entropy over the heads; see `Orthogonality`."""
    u, v = (torch.cat(list(values.values())) for values in (statistics["his"], statistics["entropy"]))
    u = u / u.sum().clamp(min=torch.finfo(u.dtype).tiny)
    covariance = ((u - u.mean()) * (v - v.mean())).mean()
    differ = u.min() < u.max() and v.min() < v.max()
    correlation = covariance / (u.std(correction=0) * v.std(correction=0)) if differ else torch.zeros(())
    return Orthogonality(*(x.item() for x in (u.mean(), v.mean(), covariance, (u * v).mean(), correlation)))


def spectral_norm(matrix: Tensor) -> float:
    """Return the largest singular value of a matrix, (rows, columns) of any floating dtype (Appendix B.1.3)."""
    return torch.linalg.matrix_norm(matrix.detach().double(), ord=2).item()


def _blocks(model: PreTrainedModel, module: PrunableModule) -> tuple[Tensor, ...]:
    """Return the columns of the output projection that each head is multiplied by, (width, unit_width) each."""
    return weight_of(model.get_submodule(module.consumer)).split(module.unit_width, dim=1)


def _activations(
    model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], modules: Sequence[PrunableModule]
) -> list[Tensor]:
    """Return E |A_h|^2 of every module, (units,) each."""
    totals = [torch.zeros(module.units, dtype=torch.float64) for module in modules]
    samples = 0
    consumers = {module.name: module.consumer for module in modules}
    with evaluating(model), without_cache(model), watch(model, consumers) as seen, torch.no_grad():
        for batch in batches:
            on_device = {key: value.to(model.device) for key, value in batch.items() if key != "labels"}
            seen.clear()
            model(**on_device)
            samples += size_of(batch)
            for total, module in zip(totals, modules, strict=True):
                x = seen.inputs[module.name][-1]
                real = real_tokens(model, module.name, on_device, x).double()  # (batch, tokens)
                squares = x.double().unflatten(-1, (module.units, -1)).pow(2).sum(-1)  # (batch, tokens, units)
                total += (torch.einsum("bt,bth->bh", real, squares) / real.sum(-1, keepdim=True)).sum(0).cpu()
    return [total / samples for total in totals]


def _loss_of(model: PreTrainedModel) -> str:
    if model.can_generate():
        return "softmax cross-entropy"
    if is_regression(model.config):
        return "squared error"
    return "binary cross-entropy" if model.config.num_labels == 2 else "softmax cross-entropy"


def _mean_loss(predictions: Predictions, labels: Tensor, loss: str) -> float:
    """Return the mean over samples of each sample's loss, which of text is the mean over its label tokens."""
    if isinstance(predictions, TokenPredictions):
        tokens = predictions.per_sample(torch.ones_like(predictions.nll))
        return (predictions.per_sample(predictions.nll) / tokens).mean().item()
    logits = predictions.double()
    if loss == "squared error":
        return (logits.flatten() - labels).pow(2).mean().item()
    return nn.functional.cross_entropy(logits, labels).item()


def _terms(
    selection: Selection, statistics: Statistics, modules: Mapping[str, ModuleNorms], curvature: float
) -> tuple[float, float, float]:
    first = whole = blocks = 0.0
    for name, norms in modules.items():
        gone = torch.ones(len(norms.blocks), dtype=torch.float64)
        gone[list(selection[name].units)] = 0
        first += (gone @ statistics["his"][name]).item()
        whole += curvature / 2 * norms.output**2 * (gone @ norms.activation).item()
        blocks += curvature / 2 * (gone @ (norms.blocks.pow(2) * norms.activation)).item()
    return first, whole, blocks
