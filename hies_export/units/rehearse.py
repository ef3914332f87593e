"""Translate kept units into rows and columns, and rehearse a cut, to find the attributes that must change.

A cut is rehearsed on a weightless copy of the model, whose own code decides. With fewer features everywhere, it must
compute exactly what the kept units computed before; a subclass of `Rehearsal` says what that means for a kind of unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from ..equal import FEW_STEPS, Difference
from ..errors import UnsupportedModelError
from ..kinds import KINDS
from ..model import modeling_hies
from .probe import Call, Probe
from .reads import LinearObserver, sample, signature, tensors_in
from .units import AttributeCount, Kept, PrunableModule


def feature_cuts(module: PrunableModule, kept: Kept) -> list[tuple[str, int, Tensor]]:
    """Return the linear layers that lose features: name, 0 (output) or 1 (input), and what stays, (features,) int64."""
    cuts = _cuts(module, kept, parameters=False)
    if len(kept.units) < module.units:
        cuts.append((module.consumer, 1, module.columns(kept.units)))
    return cuts


def parameter_cuts(module: PrunableModule, kept: Kept) -> list[tuple[str, int, Tensor]]:
    """Return the parameters outside of linear layers that lose indices: name, axis, what stays, (indices,) int64."""
    return _cuts(module, kept, parameters=True)


def _cuts(module: PrunableModule, kept: Kept, *, parameters: bool) -> list[tuple[str, int, Tensor]]:
    """Return name, axis and what stays of the producers, or else of the parameters, that lose indices."""
    by_tensor = {piece.tensor: piece for piece in module.slices if piece.parameter == parameters}  # one for each
    staying = {name: module.staying(name, kept) for name in by_tensor}
    return [(n, by_tensor[n].axis, index) for n, index in staying.items() if len(index) < len(by_tensor[n].owner)]


def set_attributes(owner: nn.Module, module: PrunableModule, kept: Kept) -> dict[str, Any]:
    """Set the attributes of a module that count units or groups to the numbers that stay; return those that changed."""
    changed = {}
    for name, count in module.attributes.items():
        value = count.value(units=len(kept.units), groups=len(kept.kept_groups))
        if modeling_hies.get_attribute(owner, name) != value:
            modeling_hies.set_attribute(owner, name, value)
            changed[name] = value
    return changed


def narrow_arguments(owner: nn.Module, module: PrunableModule, kept: Kept) -> dict[str, list[Any]]:
    """Let a module take the heads that stay from shared arguments; return its entry in `modeling_hies`' `narrowed`."""
    before = getattr(owner, "narrowed", {})
    narrowed = {}
    for name, (axis, total) in module.narrowed.items():
        heads = before[name][2] if name in before else range(total)
        narrowed[name] = [axis, total, [heads[unit] for unit in kept.units]]
    modeling_hies.narrow(owner, narrowed)
    return narrowed


Dense = TypeVar("Dense")
Mismatch = tuple[PrunableModule, str]  # a module for which two runs differ, and how


@dataclass(frozen=True)
class Meanings:
    """Which attributes of a module may hold a number of its units, such as `num_heads`."""

    by_name: Mapping[str, AttributeCount]  # name of an attribute -> what it counts if it has a fitting value
    # What any attribute with a fitting value counts, in a class that fails a rehearsal otherwise.
    by_value: list[AttributeCount]


class Rehearsal(Generic[Dense]):
    """A run of the probe with fewer units, compared with what was observed in the dense run."""

    def __init__(
        self, dense: Dense, probe: Probe, keep: Callable[[PrunableModule], Kept], modules: Sequence[PrunableModule]
    ):
        self.dense, self.probe, self.modules = dense, probe, modules
        self.kept = {module.name: keep(module) for module in modules}
        # The modules that were not compared yet, by any key, in the order of the dense run.
        self.pending = {module.name: module for module in modules}
        self.latest = modules[0]  # compared last, to blame if an error comes after all were compared
        self.mismatches: list[Mismatch] = []

    def run(self, batch: Mapping[str, Tensor]) -> Mismatch | None:
        """Run the probe with fewer units, and return the first module for which this and the dense run differ."""
        try:
            with units_left_out(self.probe, self.modules, self.kept):
                self.compare(batch)
        except Exception as error:  # whatever the model's own code raises on shapes it does not expect
            reason = " ".join(str(error).split())[:200]
            self.mismatches.append((next(iter(self.pending.values()), self.latest), reason))
        return self.mismatches[0] if self.mismatches else None

    def compare(self, batch: Mapping[str, Tensor]) -> None:
        """Run the probe, and add differences from the dense run to `mismatches`."""
        raise NotImplementedError


class ConsumerRehearsal(Rehearsal[LinearObserver]):
    """With fewer units, consumers read those that stay, and all other layers and the outputs are as before."""

    def compare(self, batch: Mapping[str, Tensor]) -> None:
        """Run the probe, and compare with the dense run what every linear layer reads, and then the outputs."""
        self._by_consumer = {module.consumer: module for module in self.modules}
        self.pending = dict(self._by_consumer)
        returned = self.probe.run(batch, before=self._before)
        if not _close(signature(*tensors_in(returned)), self.dense.outputs):
            self.mismatches.append((self.latest, "the model's outputs change"))

    def _before(self, call: Call, x: Tensor) -> None:
        """Add a mismatch if a consumer does not read the dense run's kept columns, or if another layer reads others."""
        name, dense = call[0], self.dense.reads.get(call)
        if (module := self._by_consumer.get(name)) is not None:
            self.pending.pop(name, None)  # gone already in a second call
            self.latest = module
            columns = module.columns(self.kept[module.name].units)
            if dense is None or dense.rows is None or not same(sample(x), dense.rows[:, columns]):
                self.mismatches.append((module, f"it computes other {KINDS[module.kind].units}"))
        elif dense is None or not _close(signature(x), dense.signature):
            self.mismatches.append((self.latest, f"{name} reads something else"))


def rehearsed(
    label: str,
    probe: Probe,
    modules: Sequence[PrunableModule],
    meanings: Callable[[PrunableModule], Meanings],
    rehearsals: Sequence[Callable[[Sequence[PrunableModule]], Rehearsal[Any]]],
    batch: Mapping[str, Tensor],
    *,
    supported: str,
) -> tuple[PrunableModule, ...]:
    """Return modules, each with the attributes that a cut must change.

    These are attributes known by name and, in classes of modules that fail a rehearsal without them, all that have a
    fitting value. If a module fails even so, an UnsupportedModelError names `label` and what is `supported`.
    """
    owners: dict[str, Any] = {module.name: probe.model.get_submodule(module.name) for module in modules}
    reads = {name: set(probe.config_reads.get(owner, ())) for name, owner in owners.items()}
    matched_by_value: set[type] = set()  # classes whose attributes are not matched by name alone
    while True:
        described = []
        for module in modules:
            owner = owners[module.name]
            values = vars(owner) | {f"config.{n}": getattr(owner.config, n, None) for n in reads[module.name]}
            counting = _counting(module, values, meanings(module), by_value=type(owner) in matched_by_value)
            described.append(replace(module, attributes=counting))
        runs = (rehearsal(described).run(batch) for rehearsal in rehearsals)  # lazily: none after one that fails
        mismatch = next((found for found in runs if found is not None), None)
        if mismatch is None:
            return tuple(described)
        module, reason = mismatch
        failed = type(owners[module.name])
        if failed in matched_by_value:
            raise UnsupportedModelError(
                f"{label} cannot be cut: with fewer {KINDS[module.kind].units} the code of {failed.__name__} "
                f"({module.name}) does not do what it did ({reason}); supported are {supported}"
            )
        matched_by_value.add(failed)


def _counting(
    module: PrunableModule, attributes: Mapping[str, Any], known: Meanings, *, by_value: bool
) -> dict[str, AttributeCount]:
    """Return what attributes count, for those whose name and value fit, or with `by_value` whose value alone fits."""
    counting = {}
    for name, value in attributes.items():
        named = known.by_name.get(name.removeprefix("config."))
        for count in [named, *known.by_value] if by_value else [named]:
            if count and type(value) is int and value == count.value(units=module.units, groups=module.groups):
                counting[name] = count
                break
    return counting


@contextmanager
def units_left_out(probe: Probe, modules: Sequence[PrunableModule], kept: Mapping[str, Kept]) -> Iterator[None]:
    """Let a probe run, inside the block, as if the units that are not kept had been cut."""
    pairs = [(probe.model.get_submodule(module.name), module) for module in modules]
    narrowed_before = [getattr(owner, "narrowed", {}) for owner, _ in pairs]
    try:
        for owner, module in pairs:
            units = kept[module.name]
            set_attributes(owner, module, units)
            # Axis 0 is that of outputs. Inputs need no cut: the probe's layers return features whatever they read.
            probe.kept |= {name: index for name, axis, index in feature_cuts(module, units) if axis == 0}
            probe.kept_of_parameters |= {name: (axis, index) for name, axis, index in parameter_cuts(module, units)}
            narrow_arguments(owner, module, units)
        yield
    finally:
        probe.kept, probe.kept_of_parameters = {}, {}
        for (owner, module), before in zip(pairs, narrowed_before, strict=True):
            set_attributes(owner, module, module.kept(range(module.units)))
            modeling_hies.narrow(owner, before)


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of a few operations."""
    return Difference.of(one, other).within(FEW_STEPS)


def _close(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether two `signature`s are equal up to rounding, relative to the sum of absolute values in `other`."""
    return all(Difference(abs(a - b), other[1]).within(FEW_STEPS) for a, b in zip(one, other, strict=True))
