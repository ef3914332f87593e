"""Run one way of a tool from the command line: python -m peers.with_TOOL WAY GIVEN OUT.

GIVEN is what `other_tools.py give` wrote. OUT gets `model.onnx`, or OpenVINO's `model.xml`, and `form.json`, which says
what it is, or why there is none. Needs numpy alone, because every tool has an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Given:
    """What a tool starts from: the dense checkpoint in float32 with its tokenizer, and the training rows, shuffled."""

    folder: Path

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def flops(self) -> float:
        """Share of the dense model's FLOPs that a pruned model may have left."""
        return float(self._said["flops"])

    @property
    def count(self) -> int:
        """Number of rows that there are."""
        return int(self._said["rows"])

    @property
    def _said(self) -> dict[str, float]:
        return json.loads((self.folder / "given.json").read_text())

    def rows(self, count: int) -> list[dict[str, np.ndarray]]:
        """Return the first rows with their labels, each a batch of one without padding."""
        return self.batches(count, size=1)

    def batches(self, count: int, *, size: int, alike: bool = False) -> list[dict[str, np.ndarray]]:
        """Return the first rows with labels in batches, each padded to its longest; if `alike`, sorted by length."""
        with np.load(self.folder / "rows.npz") as stored:
            arrays = {name: stored[name][:count] for name in stored.files}
        if alike:
            order = arrays["attention_mask"].sum(-1).argsort(kind="stable")
            arrays = {name: array[order] for name, array in arrays.items()}
        found = []
        for start in range(0, len(arrays["labels"]), size):
            some = {name: array[start : start + size] for name, array in arrays.items()}
            longest = some["attention_mask"].sum(-1).max()
            found.append({name: array[:, :longest] if array.ndim == 2 else array for name, array in some.items()})
        return found


@dataclass(frozen=True)
class Way:
    """One way to use a tool: what the row of its file is called, its bits, and what writes the file."""

    title: str
    bits: str
    make: Callable[[Given, Path], None]


class Stopped(Exception):
    """What a tool that runs as a program of its own said when it stopped."""


def main(ways: Mapping[str, Way]) -> None:
    """Write one way's file; where that fails, the reason stands in `form.json`, and the status is 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=ways)
    parser.add_argument("given", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    way, out = ways[options.way], options.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    form = {"title": way.title, "bits": way.bits}
    try:
        way.make(Given(options.given), out)
    except Exception as error:  # a tool's own, of any class
        traceback.print_exc()
        kind = "" if isinstance(error, Stopped) else f"{type(error).__name__}: "
        form["problem"] = f"{kind}{error}".strip().splitlines()[0][:200]
    (out / "form.json").write_text(json.dumps(form))
    sys.exit("problem" in form)
