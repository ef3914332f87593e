"""What a report says of the rows that a run read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


def whole_split(split: str) -> str:
    """Return the split that a slice is of: "train" for "train[:80%]"."""
    return split.partition("[")[0]


def may_overlap(one: str, other: str) -> bool:
    """Return whether two splits share rows, unless they are slices that the user set apart."""
    return whole_split(one) == whole_split(other) and (one == other or "[" not in one or "[" not in other)


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

    @property
    def alike(self) -> bool:
        """Whether held-out and evaluated rows are of one split, or of slices of one."""
        return whole_split(self.held_out_split) == whole_split(self.evaluation_split)

    @property
    def apart(self) -> bool:
        """Whether no held-out row is evaluated; those of a recipe's `held_out` are left out of the evaluated rows."""
        return not (self.held_out_further and may_overlap(self.held_out_split, self.evaluation_split))
