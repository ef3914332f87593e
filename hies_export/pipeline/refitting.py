"""Refit cut models from the moments of the dense model, which are collected once if memory allows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from .. import processes
from ..calibrate.moments import MomentStream
from ..model.threads import threads_for
from ..progress import Progress
from ..recipe import PruneSection
from ..score.criteria import AUTO
from ..slim.refit import Compensation, LayerFit, refit
from ..units import PrunableModule, Selection
from .prepare import Prepared
from .quality import Refit

# Weights of tokens that `criterion: auto` tries, see `Compensation`.
TOKEN_WEIGHTS = (1.0, 0.3, 0.1)


class Refitting:
    """Refits of models cut from one dense model, with one of the weights of tokens in `tried`.

    Changed parameters are rounded to `dtype`, so that the judged model is the one that will be saved.
    """

    def __init__(self, prepared: Prepared, options: PruneSection, progress: Progress, dtype: torch.dtype | None = None):
        self._prepared, self._how, self._progress = prepared, options.compensation, progress
        self._dtype = dtype
        self.tried = self._token_weights(options)
        self._moments: MomentStream | None = None

    @property
    def moments(self) -> MomentStream | None:
        """The moments of the dense model; None without compensation."""
        if self._moments is None and self._how is not None:
            self._moments = MomentStream(
                self._prepared.model,
                self._prepared.modules,
                self._prepared.rows.compensation,
                limit_bytes=self._how.limit_bytes,
                weighted=min(self.tried) < 1,
                progress=self._progress,
            )
        return self._moments

    @property
    def collected(self) -> bool:
        """Whether moments are at hand, or were collected once and can be collected again."""
        return self._moments is not None and self._moments.passes > 0

    def _token_weights(self, options: PruneSection) -> tuple[float, ...]:
        how = options.compensation
        if how is None or how.method != "least_squares" or how.sequential:
            return (1.0,)
        if how.token_weights is not None:
            return (how.token_weights,)
        return TOKEN_WEIGHTS if options.criterion == AUTO else (1.0,)

    def compensation(self, token_weights: float | None = None) -> Compensation | None:
        """Return how to compensate; None not to."""
        return None if self._how is None else self._how.compensation(token_weights or self.tried[0])

    def by(self, token_weights: float | None = None) -> Refit | None:
        """Return what refits a cut model with the given weights of tokens; None without compensation."""
        how, moments, modules = self.compensation(token_weights), self.moments, self._prepared.modules
        if how is None or moments is None:
            return None

        def refitted(slim: PreTrainedModel, selection: Selection) -> list[LayerFit]:
            with threads_for(self._prepared.model, self._prepared.rows.compensation):
                fits = shared(slim, modules, lambda: refit(slim, selection, modules, moments, how))
            if self._dtype is not None:
                for name in changed_by(slim, modules, fits):
                    parameter = slim.get_parameter(name)
                    parameter.data = parameter.data.to(self._dtype).to(parameter.dtype)
            return fits

        return refitted


def changed_by(slim: PreTrainedModel, modules: Sequence[PrunableModule], fits: Sequence[LayerFit]) -> list[str]:
    """Return the names of the parameters that refits changed."""
    consumers = {module.name: module.consumer for module in modules}
    names = []
    for fit in fits:
        found = [name for name, _ in slim.get_submodule(consumers[fit.name]).named_parameters(recurse=False)]
        changed = {"none": (), "bias": ("bias",)}.get(fit.method, ("weight", "bias"))
        names += [f"{consumers[fit.name]}.{name}" for name in found if name in changed]
    return names


def shared(
    slim: PreTrainedModel, modules: Sequence[PrunableModule], refit_own: Callable[[], list[LayerFit]]
) -> list[LayerFit]:
    """Refit a model in several processes: each refits the consumers of its modules, and sends them to all."""
    if processes.world() == 1:
        return refit_own()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own = refit_own()
    found = processes.gather(({fit.name: fit for fit in own}, [(str(w.message), w.category) for w in caught]))
    for message, category in dict.fromkeys(note for _, notes in found for note in notes):
        if processes.rank() == 0:
            warnings.warn(message, category, stacklevel=2)
    fits = []
    for module in modules:
        owner = next((number for number, (of, _) in enumerate(found) if module.name in of), None)
        if owner is None:
            continue
        fits.append(found[owner][0][module.name])
        for parameter in slim.get_submodule(module.consumer).parameters(recurse=False):
            processes.broadcast(parameter, owner)
    return fits
