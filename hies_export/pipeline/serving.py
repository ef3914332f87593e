"""Predict batches with a model as a runtime serves it: exported, in the runtime's own kernels and bits."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from .. import processes
from ..data.batches import Batch
from ..evaluate.predict import Predictions, predict, predict_by
from ..measure.forms import Forms
from ..recipe import TimedSection
from ..runtimes.registry import Served
from .prepare import Prepared
from .search import Predictor


def predict_served(served: Served, batches: Sequence[Batch]) -> Predictions:
    """Predict batches on a runtime, in this process alone."""
    return predict_by(served.load().logits, batches)


def predictor(prepared: Prepared, asked: TimedSection | None) -> Predictor:
    """Return what predicts as a runtime will: it exports each model for that; without a runtime, torch does."""
    if asked is None:
        return predict

    def served(model: PreTrainedModel, batches: Sequence[Batch]) -> Predictions:
        with tempfile.TemporaryDirectory(prefix="hies-served-") as folder:
            forms = Forms({"model": model}, prepared.exporter, Path(folder))
            return predict_served(forms.served("model", asked.runtime, asked.dtype), batches)

    return lambda model, batches: processes.on_main(lambda: served(model, batches))
