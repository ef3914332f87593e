"""Compare the theory behind HIES with measurements on a model: `hies-export sweep RECIPE --theory`.

Source: "Entropy Meets Importance: A Unified Head Importance-Entropy Score for Stable and Efficient Transformer Pruning"
(Choi et al., https://arxiv.org/abs/2510.13832): Lemma 4.1 and Appendix B.1 (loss), Eq. 5 (entropy), Appendix D.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table as RichTable
from torch import Tensor, nn
from transformers import PreTrainedModel

from hies_export.calibrate.readings import Read, read_forward
from hies_export.calibrate.statistics import Statistics, collect_statistics
from hies_export.data.batches import size_of
from hies_export.errors import DataError, UnsupportedModelError
from hies_export.evaluate.predict import predict
from hies_export.model.linear import weight_of
from hies_export.report.tables import plain_table
from hies_export.score.criteria import score_units
from hies_export.select.select import select_units
from hies_export.slim.check import masked_units
from hies_export.tasks import Predictions, task_of
from hies_export.tasks.classification import problem_of
from hies_export.units.units import PrunableModule, Selection

SHARES = (0.1, 0.3, 0.5)
# Largest curvature of a loss in its logits: the maximum of p (1 - p), the largest eigenvalue of diag(p) - p p^T
# (Appendix B.1.4), and 2 for a square. With two classes, the softmax is a sigmoid of the difference of the logits. The
# binary cross-entropy of label sets is the mean over labels, whose curvature is largest for a single label.
CURVATURE = {"binary cross-entropy": 0.25, "softmax cross-entropy": 0.5, "squared error": 2.0}


@dataclass(frozen=True)
class Orthogonality:
    """Moments over heads of the two terms of HIES (Appendix D.1, Tables 7 and 8).

    u is the HIS of a head divided by the sum over all heads; v is its attention entropy, in [0, 1]. `mean_product` is
    the mean of u v; `correlation` is 0 if u or v is the same for all heads.
    """

    mean_u: float
    mean_v: float
    covariance: float
    mean_product: float
    correlation: float


@dataclass(frozen=True)
class ModuleNorms:
    """The norms of one attention module that the bound is made of.

    `output` is the spectral norm of the output projection W_O, `blocks` that of each head's columns of W_O.
    `activation` is E |A_h|^2, the squared norm of a head's output, mean over real tokens, then over samples. `deficit`
    is 1 - AE_h (Eq. 5). Tensors are (heads,).
    """

    output: float
    blocks: Tensor
    activation: Tensor
    deficit: Tensor


@dataclass(frozen=True)
class LossIncrease:
    """The increase of the loss after removing a share of heads by a criterion, bounded and measured.

    Attributes:
        first_order: Sum of the HIS of the removed heads.
        quadratic: c / 2 sum |W_O|^2 E |A_h|^2, with c from `CURVATURE`. The bound of Eq. 4 is first_order + quadratic.
        quadratic_blocks: The same with the norm of each head's block of W_O (Appendix B.1.3).
        measured: Mean loss of the masked model minus that of the dense model, on the calibration samples.
    """

    criterion: str
    share: float
    first_order: float
    quadratic: float
    quadratic_blocks: float
    measured: float


@dataclass(frozen=True)
class Theory:
    """Moments over all heads, the name of the loss, the norms of each module, and an increase per criterion and share.

    `loss` is a key of `CURVATURE`.
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
    """Compare the paper's bound on the loss increase with the measured increase.

    The bound assumes that W_O is the last layer, with logits z = y W_O. A real model has further layers between an
    attention module and the logits. So the bound shows how the terms compare, but the measured increase may exceed it.

    Args:
        model: The dense model.
        batches: Calibration batches; without labels, the model's own predictions serve as labels.
        modules: The attention modules that may lose heads.
        alpha: Weight of HIS in HIES. Heads are chosen once by HIS and once by HIES.

    Raises:
        DataError: As in `collect_statistics`, or a regression has no labels.
    """
    loss = _loss_of(model)
    if loss == "squared error" and batches and "labels" not in batches[0]:
        raise DataError("a regression needs labels to have a loss, but the batches have none; set data.label")
    statistics = collect_statistics(model, batches, modules)
    if "entropy" not in statistics.values:
        raise UnsupportedModelError(
            f"the theory needs the entropy of attention maps, which {type(model).__name__} does not return"
        )
    norms = {}
    for module, activation in zip(modules, _activations(model, batches, modules), strict=True):
        weight = weight_of(model.get_submodule(module.consumer)).detach().double().cpu()
        # The spectral norm is the largest singular value (Appendix B.1.3).
        whole = torch.linalg.matrix_norm(weight, ord=2).item()
        blocks = torch.linalg.matrix_norm(torch.stack(weight.split(module.unit_width, 1)), ord=2)
        norms[module.name] = ModuleNorms(whole, blocks, activation, 1 - statistics["entropy"][module.name])
    dense = predict(model, batches)
    task = task_of(model)
    labels = task.references(batches) if "labels" in batches[0] else task.decide(dense)
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


def theory_tables(found: Theory) -> list[RichTable | str]:
    """Return what a terminal shows: norms of every module, moments over heads, and increases of the loss."""
    modules = [
        (
            name,
            *(f"{number:.3g}" for number in (n.output, n.blocks.max(), n.activation.mean())),
            f"{n.deficit.min():.2f} to {n.deficit.max():.2f}",
        )
        for name, n in found.modules.items()
    ]
    o = found.orthogonality
    moments = (
        f"\nHIS (u, sum 1) and entropy (v): mean u {o.mean_u:.3g}, mean v {o.mean_v:.3g}, covariance "
        f"{o.covariance:.3g}, mean u v {o.mean_product:.3g}, correlation {o.correlation:.3f}\n"
    )
    increases = [
        (
            f"{i.criterion}, {i.share:.0%}",
            *(f"{value:.4g}" for value in (i.first_order, i.quadratic, i.quadratic_blocks, i.measured)),
        )
        for i in found.increases
    ]
    return [
        plain_table(
            ("attention module", "|W_O|", "largest |W_O,h|", "mean |A_h|^2", "entropy deficit of heads"), modules
        ),
        moments,
        plain_table(("heads removed by", "sum of HIS", "+ quadratic", "(by blocks)", "measured increase"), increases),
        f"of the {found.loss}; the bound takes W_O for the model's last layer",
    ]


def orthogonality(statistics: Statistics) -> Orthogonality:
    """Return the moments over heads of normalised HIS and attention entropy."""
    u, v = (torch.cat(list(values.values())) for values in (statistics["his"], statistics["entropy"]))
    u = u / u.sum().clamp(min=torch.finfo(u.dtype).tiny)
    covariance = ((u - u.mean()) * (v - v.mean())).mean()
    differ = u.min() < u.max() and v.min() < v.max()
    correlation = covariance / (u.std(correction=0) * v.std(correction=0)) if differ else torch.zeros(())
    return Orthogonality(*(x.item() for x in (u.mean(), v.mean(), covariance, (u * v).mean(), correlation)))


def _activations(
    model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], modules: Sequence[PrunableModule]
) -> list[Tensor]:
    """Return E |A_h|^2 of every module, (units,) each."""
    totals = {module.name: torch.zeros(module.units, dtype=torch.float64) for module in modules}

    def add(_: Sequence[PrunableModule], read: Read) -> None:
        for number in range(len(batches)):
            for call in read(number):
                real, units = call.real.double(), len(totals[call.name])  # (batch, tokens)
                squares = call.inputs.double().unflatten(-1, (units, -1)).pow(2).sum(-1)  # (batch, tokens, units)
                means = torch.einsum("bt,bth->bh", real, squares) / real.sum(-1, keepdim=True)
                totals[call.name] += means.sum(0).cpu()

    read_forward(model, batches, modules, add)
    samples = sum(map(size_of, batches))
    return [total / samples for total in totals.values()]


def _loss_of(model: PreTrainedModel) -> str:
    """Return the name of a model's loss, a key of `CURVATURE`."""
    if model.can_generate():
        return "softmax cross-entropy"
    kind = problem_of(model.config)
    if kind == "numbers":
        return "squared error"
    return "binary cross-entropy" if kind == "labels" or model.config.num_labels == 2 else "softmax cross-entropy"


def _mean_loss(predictions: Predictions, labels: Tensor, loss: str) -> float:
    """Return the mean loss over samples; for generated text, a sample's loss is the mean over its label tokens."""
    if predictions.nll is not None:
        tokens = predictions.per_sample(torch.ones_like(predictions.nll))
        return (predictions.per_sample(predictions.nll) / tokens).mean().item()
    logits = predictions.values.double()
    if loss == "squared error":
        return (logits.flatten() - labels).pow(2).mean().item()
    if labels.dim() == 2:
        return nn.functional.binary_cross_entropy_with_logits(logits, labels.double()).item()
    return nn.functional.cross_entropy(logits, labels).item()


def _terms(
    selection: Selection, statistics: Statistics, modules: Mapping[str, ModuleNorms], curvature: float
) -> tuple[float, float, float]:
    """Return `first_order`, `quadratic` and `quadratic_blocks` of a `LossIncrease`."""
    first = whole = blocks = 0.0
    for name, norms in modules.items():
        removed = torch.ones(len(norms.blocks), dtype=torch.float64)
        removed[list(selection[name].units)] = 0
        first += (removed @ statistics["his"][name]).item()
        whole += curvature / 2 * norms.output**2 * (removed @ norms.activation).item()
        blocks += curvature / 2 * (removed @ (norms.blocks.pow(2) * norms.activation)).item()
    return first, whole, blocks
