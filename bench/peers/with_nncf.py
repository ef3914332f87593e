"""Quantise for OpenVINO by NNCF's post-training mode for Transformers, by its defaults.

Source: OpenVINO's notebook language-quantize-bert, and of https://github.com/openvinotoolkit/nncf the pages on
post-training quantisation and on accuracy control.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import openvino
from peers.plain import INPUTS, load
from peers.program import Given, Way, main

CALIBRATION = 300  # rows, the default of its `subset_size`


def converted(given: Given) -> Any:
    """Return the dense model in OpenVINO's form, converted from torch."""
    import torch

    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 12:] = 0
    rows = {"input_ids": torch.ones_like(mask), "attention_mask": mask, "token_type_ids": torch.zeros_like(mask)}
    shape, kind = openvino.PartialShape([-1, -1]), openvino.Type.i64
    return openvino.convert_model(
        load(given.checkpoint), example_input=rows, input=[(name, shape, kind) for name in INPUTS]
    )


def inputs(row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a row without its label."""
    return {name: row[name] for name in INPUTS}


def quantised(given: Given, out: Path) -> None:
    """Quantise from the calibration rows."""
    rows = nncf.Dataset(given.rows(CALIBRATION), inputs)
    made = nncf.quantize(converted(given), rows, model_type=nncf.ModelType.TRANSFORMER)
    openvino.save_model(made, str(out / "model.xml"))


def controlled(given: Given, out: Path) -> None:
    """Quantise, and return layers to float until the metric of further rows falls by no more than 0.01, its default."""
    rows = given.rows(2 * CALIBRATION)

    def metric(compiled: Any, validation: Iterable[dict[str, np.ndarray]]) -> tuple[float, None]:
        """Return the correlation of numbers with their labels, or the share of right classes."""
        found, wanted = [], []
        for row in validation:
            found.append(np.asarray(compiled(inputs(row))[0])[0])
            wanted.append(row["labels"][0])
        predicted = np.stack(found)
        if predicted.shape[-1] == 1:
            return float(np.corrcoef(predicted[:, 0], wanted)[0, 1]), None
        return float(np.mean(predicted.argmax(-1) == np.asarray(wanted))), None

    made = nncf.quantize_with_accuracy_control(
        converted(given),
        nncf.Dataset(rows[:CALIBRATION], inputs),
        nncf.Dataset(rows[CALIBRATION:]),
        validation_fn=metric,
        model_type=nncf.ModelType.TRANSFORMER,
    )
    openvino.save_model(made, str(out / "model.xml"))


WAYS = {
    "default": Way("NNCF", "int8", quantised),
    "controlled": Way("NNCF with accuracy control", "int8", controlled),
}

if __name__ == "__main__":
    main(WAYS)
