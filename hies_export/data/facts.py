"""What a report says of the rows that a run read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Which rows units were scored on, plans were judged on (held out), and metrics were measured on.

    `labels` are "data" or the model's own "predictions"; `evaluation_of` is how many samples the split has; without
    labels (`evaluation_labelled`), metrics compare both models with the dense model's own predictions; held-out rows
    are `further` rows if they come from the calibration split; `name` is on the Hub, and `fingerprint` is that of the
    calibration batches.
    """

    labels: str
    calibration_samples: int
    calibration_batch: int
    calibration_batch_asked: int
    compensation_samples: int
    evaluation_samples: int
    evaluation_of: int
    evaluation_rows: Literal["drawn", "first"]
    evaluation_split: str
    evaluation_labelled: bool = True
    held_out_samples: int
    held_out_split: str
    held_out_further: bool
    name: str | None
    file: str | None
    fingerprint: str
