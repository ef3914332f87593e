"""Answer with a slim model, and with its dense model if the slim one is unsure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from ...checkpoint.folders import refuse_existing
from ...data.batches import Batch, samples_of
from ...errors import RequestError
from ...evaluate.predict import logits_by
from ...model.tokens import first_samples
from ..formats import Export
from ..onnx.export import export_onnx
from ..onnx.quantize import Quantize, check_quantizable
from ..runtimes.base import Runtime, load_runtime
from .export import CascadeForm, check_classes
from .threshold import Promise, check_disagreement, check_rows, choose_threshold, margins

Model = Runtime | PreTrainedModel


class Cascade:
    """Two classifiers of the same classes: the dense one answers the rows that the slim one is unsure of.

    Attributes:
        threshold: Rows whose margin, the distance of the two largest logits, is at most this go on to the dense model.
        promise: The promise that the threshold was chosen for; None for a given threshold.
        rows: Number of rows that were answered so far.
        passed_on: Number of them that went on to the dense model.

    Examples:
        >>> cascade = Cascade(slim, model, threshold=0.5)
        >>> cascade.logits(batches[0]).shape, cascade.rows
        (torch.Size([4, 3]), 4)
    """

    def __init__(self, slim: Model, dense: Model, *, threshold: float):
        """Take two models, in torch or as `load_runtime` returns them.

        Raises:
            RequestError: A model is not loaded or no classifier, their classes differ, or the threshold is negative.
        """
        if not threshold >= 0:
            raise RequestError(f"threshold must be the distance of two logits, 0 or more, got {threshold}")
        check_classes(*(model for model in (slim, dense) if isinstance(model, PreTrainedModel)))
        self._models = slim, dense
        self._slim, self._dense = (
            model if isinstance(model, Runtime) else load_runtime("torch", model) for model in (slim, dense)
        )
        # Set by `choose`: the held-out rows, the dense model's logits on them, and what to save beside a graph.
        self._batches: Sequence[Batch] = ()
        self._answers = torch.empty(0)
        self._processor: Any = None
        self.threshold = threshold
        self.promise: Promise | None = None
        self.rows = self.passed_on = 0

    @classmethod
    def choose(
        cls, slim: Model, dense: Model, batches: Sequence[Batch], *, disagreement: float, processor: Any = None
    ) -> Cascade:
        """Return a cascade with the threshold, chosen on held-out rows, that limits the share of answers that change.

        Args:
            slim, dense: As for the constructor.
            batches: Rows like those to be served, which neither model was trained on.
            disagreement: Largest share of answers that may differ, with 95 % confidence, in (0, 1).
            processor: Tokenizer or image processor, which `export_onnx` saves.

        Raises:
            RequestError: The models' classes differ, or the rows are too few for the promise.
        """
        cascade = cls(slim, dense, threshold=0.0)
        check_disagreement(disagreement)
        check_rows(samples_of(batches), disagreement)
        found, answers = (logits_by(one.prediction, batches) for one in (cascade._slim, cascade._dense))
        cascade._batches, cascade._answers, cascade._processor = batches, answers, processor
        cascade.promise = choose_threshold(found, answers, disagreement)
        cascade.threshold = cascade.promise.threshold
        return cascade

    def logits(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the logits of a batch, (rows, classes), float32; those of unsure rows are the dense model's."""
        found = self._slim.prediction(batch).float()
        unsure = margins(found) <= self.threshold
        self.rows += len(found)
        self.passed_on += int(unsure.sum())
        if unsure.any():
            found = found.clone()  # the runtime may own its memory
            found[unsure] = self._dense.prediction({name: value[unsure] for name, value in batch.items()}).float()
        return found

    def export_onnx(
        self, folder: str | Path, *, processor: Any = None, quantize: Quantize | None = None, overwrite: bool = False
    ) -> Export:
        """Write both models as one ONNX graph for the CPU; its threshold is chosen by the graphs' answers.

        The output `logits` is as in `export_onnx`; `passed_on`, (rows,), marks the rows that the dense part answered.

        Args:
            folder: Where to write; appears only when everything is written and checked.
            processor: Tokenizer or image processor to save with the graph; by default the one given to `choose`.
            quantize: "int8" writes the linear layers of the slim part in 8 bits.
            overwrite: Replace an existing folder.

        Raises:
            RequestError: The cascade is not of two PyTorch models, or its threshold was not chosen on rows.
            OutputExistsError: The folder exists and `overwrite` is off.
            MissingRuntimeError: onnx or onnxruntime is not installed.
            ParityError: The file answers differently from the two models; nothing is kept.
        """
        slim, dense = self._models
        if self.promise is None or isinstance(slim, Runtime) or isinstance(dense, Runtime):
            raise RequestError(
                "a cascade is exported from two PyTorch models and held-out rows, got a given threshold or a loaded "
                "runtime; make it with Cascade.choose() or result.cascade()"
            )
        refuse_existing(Path(folder), overwrite=overwrite)
        if quantize is not None:
            check_quantizable(slim, quantize)
        sample = first_samples(self._batches[0])
        with TemporaryDirectory(prefix="hies-cascade-") as temporary:
            first, second = (
                export_onnx(model, Path(temporary) / name, batch=sample, processor=processor or self._processor)
                for name, model in (("slim", slim), ("dense", dense))
            )
            asked = CascadeForm(disagreement=self.promise.disagreement, bits=quantize or "float32")
            return asked.join(first, second, folder, batches=self._batches, answers=self._answers, overwrite=overwrite)
