"""Test a model type step by step, each against a reference: score, cut, reload, train, onnx.

A step takes a `Subject` and returns nothing; it raises `Broken`, or an error of hies_export, with the reason. `STEPS`
are for heads, `NEURON_STEPS` for the neurons of feed-forward blocks; the last of these cuts heads and neurons at once.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hies_export import PruningPlan, export_onnx, find_modules, load, masked_units, prune_units, quantize_onnx
from hies_export.calibrate.statistics import collect_statistics
from hies_export.checkpoint.save import check_reload, save_slim
from hies_export.data.batches import first_output
from hies_export.equal import Difference
from hies_export.errors import ReloadMismatchError, UnsupportedModelError
from hies_export.forms.onnx.multimodal import is_vision_language
from hies_export.kinds import ATTENTION, BOTH, KINDS
from hies_export.slim.check import compare_cut
from hies_export.slim.config import is_slim
from hies_export.units.units import PrunableModule
from support.architectures import tiny
from support.cuts import random_neurons, random_plan
from support.references import NotApplicable, naive_statistics


class Broken(AssertionError):
    """Say that a step of the contract fails."""


@dataclass
class Subject:
    """Hold a tiny model of one type, inputs of it, the kinds of units that are cut, and what the steps share."""

    model: PreTrainedModel
    batch: dict[str, Tensor]
    kinds: tuple[str, ...] = (ATTENTION,)

    @classmethod
    def of(cls, model_type: str, *kinds: str) -> Subject:
        """Return a tiny random model of a type, or of a class of it ("type/class"), with a batch for it."""
        model_type, _, name = model_type.partition("/")
        return cls(*tiny(model_type, name or None), kinds or (ATTENTION,))

    def with_kinds(self, *kinds: str) -> Subject:
        """Return the same model, for cuts of other kinds of units."""
        return replace(self, kinds=kinds)

    @cached_property
    def modules(self) -> tuple[PrunableModule, ...]:
        """Return the modules that are cut; they are found once."""
        return find_modules(self.model, self.batch, kinds=self.kinds)

    def plan(self, uniform: bool) -> PruningPlan:
        """Return the plan of a cut, uneven or uniform."""
        if self.kinds == (ATTENTION,):
            return random_plan(self.modules, uniform=uniform)
        return PruningPlan(kept=random_neurons(self.modules, uniform=uniform), criterion="random")

    @cached_property
    def slim(self) -> dict[bool, PreTrainedModel]:
        """Return the uneven (False) and the uniform (True) cut."""
        return {u: prune_units(self.model, self.plan(u), self.modules) for u in (False, True)}

    @property
    def units(self) -> str:
        """Return what is cut, in messages."""
        return " and ".join(KINDS[kind].units for kind in self.kinds)

    def refusal(self) -> str | None:
        """Return why the package refuses the model, or None if it does not."""
        try:
            self.modules  # noqa: B018
        except UnsupportedModelError as error:
            return short_reason(error)
        return None

    def config_alone(self) -> bool:
        """Return whether stock transformers loads a uniform cut without code from this package."""
        kept = self.plan(True).kept.values()
        counts = {(k.kind, len(k.units), len(k.kept_groups)) for k in kept}
        return len(counts) == len(self.kinds) and not is_slim(self.slim[True])


def score(subject: Subject) -> None:
    """Compare HIS, and the entropy of heads, of one pass over a batch with eager attention, one sample at a time."""
    batch = labelled(subject.model, subject.batch)
    expected = naive_statistics(subject.model, [batch], subject.modules)
    found = collect_statistics(subject.model, [batch], subject.modules)
    largest = max(v.max() for v in expected["his"].values())
    for what, values, reference, scale, bound in (
        ("HIS", found["his"], expected["his"], largest, 1e-3),
        ("entropy", found["entropy"], expected["entropy"], 1.0, 2e-4),
    ):
        for name, value in reference.items():
            difference = (values[name] - value).abs().max() / scale
            if not difference < bound:
                raise Broken(f"{what} of {name} differs from the naive reference by {difference:.1e}")


def cut(subject: Subject) -> None:
    """Compare both cuts with the masked dense model, and check that they have fewer units and weights."""
    model, batch = subject.model, subject.batch
    dense_output = first_output(model, batch)
    for uniform, slim in subject.slim.items():
        plan = subject.plan(uniform)
        with masked_units(model, plan, subject.modules):
            masked = first_output(model, batch)
        if Difference.of(masked, dense_output).max_abs < 1e-4:
            raise Broken(f"removed {subject.units} do not change the output, so that nothing is proved")
        compare_cut(model, slim, plan, subject.modules, batch)
        counts = [(name, len(k.units), len(k.kept_groups)) for name, k in plan.kept.items()]
        if [(s.name, s.units, s.groups) for s in find_modules(slim, batch, kinds=subject.kinds)] != counts:
            raise Broken(f"the slim model does not have the {subject.units} of the plan")
        if not parameters(slim) < parameters(model):
            raise Broken("the slim model has no fewer parameters")
    if Difference.of(first_output(model, batch), dense_output).max_abs != 0:
        raise Broken("the dense model was changed")


def reload(subject: Subject) -> None:
    """Save both cuts, load them in every way (this package's, both Auto classes), and the uneven one a second time."""
    for uniform, slim in subject.slim.items():
        with TemporaryDirectory() as folder:
            once, twice, dense = (Path(folder) / name for name in ("once", "twice", "dense"))
            try:
                save_slim(slim, once, plan=subject.plan(uniform), batch=subject.batch)
            except ReloadMismatchError:
                subject.model.save_pretrained(dense)
                try:
                    check_reload(subject.model, dense, subject.batch)
                except ReloadMismatchError as error:
                    raise Broken(f"in transformers, the dense model does not come back either: {error}") from error
                raise
            loaded = load(once)
            if type(loaded).__name__ != type(slim).__name__ or is_slim(loaded) != is_slim(slim):
                raise Broken(f"a {type(slim).__name__} came back as another class")
            if not uniform:  # the other is a stock model, or has the same code
                loaded.save_pretrained(twice)
                check_reload(loaded, twice, subject.batch)


def train(subject: Subject) -> None:
    """Check that every gradient of the slim model is finite, and that one gradient step lowers its loss."""
    model = copy.deepcopy(subject.slim[False])
    loss = _loss(model, subject.batch)
    loss.backward()
    with torch.no_grad():
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if not all(torch.isfinite(g).all() for g in gradients):
            raise Broken("a gradient is not finite")
        dense = copy.deepcopy(subject.model)
        with torch.enable_grad():
            _loss(dense, subject.batch).backward()
        lost = {n for n, p in dense.named_parameters() if p.grad is not None} - {
            n for n, p in model.named_parameters() if p.grad is not None
        }
        if lost:
            raise Broken(f"{min(lost)} takes no gradient any more")
        square = sum(g.double().square().sum().item() for g in gradients)
        for part in (2e-3, 2e-5):  # the loss of a detector jumps where it chooses other queries
            # To first order such a step takes this part off the loss.
            step = part * loss.abs().item() / square
            _move(model, -step)
            after = _loss(model, subject.batch)
            if after < loss:
                return
            _move(model, step)
    raise Broken(f"a step against the gradient takes the loss from {loss:.6g} to {after:.6g}")


def _move(model: PreTrainedModel, step: float) -> None:
    """Add a multiple of their gradients to the parameters."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.add_(parameter.grad, alpha=step)


def onnx(subject: Subject) -> None:
    """Compare the uneven cut in ONNX Runtime with the same cut in torch."""
    with TemporaryDirectory() as folder:
        export_onnx(subject.slim[False], Path(folder) / "onnx", batch=subject.batch)


def int8(subject: Subject) -> None:
    """Export the uneven cut in 8 bits, its smallest layers too, and compare it with the cut in float32."""
    if is_vision_language(subject.model):
        raise NotApplicable("its export has several graphs")
    with TemporaryDirectory() as folder:
        exported = export_onnx(subject.slim[False], Path(folder) / "onnx", batch=subject.batch)
        quantize_onnx(exported, Path(folder) / "int8", batch=subject.batch, smallest=1)


def together(subject: Subject) -> None:
    """Cut heads and neurons at once, and take both cuts through `cut` and `reload`."""
    if subject.with_kinds(ATTENTION).refusal() is not None:
        raise NotApplicable("its heads are not cut")
    both = subject.with_kinds(*BOTH)
    cut(both)
    reload(both)


Step = Callable[[Subject], None]

STEPS: dict[str, Step] = {s.__name__: s for s in (score, cut, reload, train, onnx)}
NEURON_STEPS: dict[str, Step] = {s.__name__: s for s in (score, cut, reload, train, onnx, together)}


# Steps of which the table of model types says nothing.
MORE_STEPS: dict[str, Step] = {s.__name__: s for s in (int8,)}


def labelled(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch with labels for the model's loss, as many in each row."""
    rows = len(next(iter(batch.values())))
    candidates = [torch.arange(rows) % 3]
    for name in ("decoder_input_ids", "input_ids"):
        if name in batch:
            tokens = batch[name].clone()
            # The same number in each row: real tokens, neither padding nor images.
            real = batch.get("attention_mask", torch.ones_like(tokens)) if name == "input_ids" else tokens >= 0
            real = real.bool() & (tokens < 90)
            real &= real.flip(1).cumsum(1).flip(1) <= 4
            candidates.append(tokens.where(real, -100))
            break
    for labels in candidates:
        try:
            with torch.no_grad():
                loss = model(**batch, labels=labels).loss
        except Exception:  # labels of another shape, or none at all
            continue
        if loss is not None and loss.dim() == 0 and torch.isfinite(loss):
            return {**batch, "labels": labels}
    raise NotApplicable("its class has no loss with labels")


def _loss(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Return the model's own loss, or the mean square of its output if it has none."""
    try:
        loss: Tensor = model(**labelled(model, batch)).loss
    except NotApplicable:
        loss = model(**batch)[0].square().mean()
    return loss


def short_reason(error: BaseException) -> str:
    """Return at most 300 characters of an error's message in one line, without its standard end and local paths."""
    text = " ".join(str(error).split())
    for boilerplate in (
        r"; supported are models whose.*",
        r"; nothing was (saved|kept).*",
        r"StrictDataclassClassValidationError: Class validation error for validator '\w+': ",
        r"; this model cannot be scored yet",
    ):
        text = re.sub(boilerplate, "", text)
    return re.sub(r"(/[\w.-]+){3,}", "...", text)[:300]


def parameters(model: PreTrainedModel) -> int:
    """Return the number of parameters."""
    return sum(p.numel() for p in model.parameters())
