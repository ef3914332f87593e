from typing import Any

import numpy as np
import pytest
import torch

from hies_export.forms import form, on_rows
from hies_export.forms.form import Form
from hies_export.forms.on_rows import time_on_rows
from hies_export.forms.runtimes.base import Runtime


class Compiling(Runtime):
    """Take a while for every new shape, as a runtime does that compiles kernels for it, and the same time after."""

    provider, dtype, threads = "fake", "float32", 2

    def __init__(self, milliseconds: float, first: float):
        self.milliseconds, self.first = milliseconds, first
        self.shapes: set[tuple[int, ...]] = set()

    def prepare(self, batch: Any) -> Any:
        return tuple(batch["input_ids"].shape)

    def run(self, feed: Any) -> Any:
        self.shapes.add(feed)

    def time_ns(self, feed: Any) -> int:
        new = feed not in self.shapes
        self.run(feed)
        return round(1e6 * (self.milliseconds * feed[1] + (self.first if new else 0)))

    def fetch(self, result: Any) -> dict[str, np.ndarray]:
        return {}


@pytest.mark.parametrize("batches", [7, 100])
def test_the_first_run_of_a_shape_is_not_timed(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    made = {"plain": (2.0, 0.0), "compiling": (1.0, 500.0)}
    monkeypatch.setattr(form, "load_runtime", lambda name, source, **_: Compiling(*made[source]))
    lengths = torch.randint(5, 60, (batches,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = {size: [{"input_ids": torch.zeros(size, length)} for length in lengths] for size in (1, 8)}
    forms = [Form(name, "openvino", name) for name in made]
    for size, (plain, compiling) in time_on_rows(forms, rows).items():
        assert plain.ratio.median == 1
        assert compiling.ratio.median == pytest.approx(0.5)
        assert compiling.ms == pytest.approx(plain.ms / 2)
        assert compiling.batches == max(batches, on_rows.LEAST), size
