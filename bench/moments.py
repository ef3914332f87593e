"""Measure what moments of feed-forward blocks cost: memory of a layer, seconds to add tokens, seconds to refit.

python bench/moments.py [--widths 384 1024 4096] [--tokens 256] [--kept 384 1536 4096] [--repeats 3]

Random inputs of a consumer with 4 x width inputs and width outputs, and two ways to add up their moments:
  float64  the products of all inputs and outputs in float64, as of heads
  stream   what `MomentStream` does: products of inputs only, in float32 above the diagonal, their sum in float64
Memory is what a layer's sums take, fitting and held out; `weighted` doubles it. The peak is that of one batch, from a
profile. Below, the time of a refit for each ridge that is tried: by `torch.linalg.solve`, and by `Moments.fits`.
Times are medians of interleaved rounds on one thread, so only ratios within a row are meant to be read. Ends in one
JSON line.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from scoring import peak_megabytes
from torch import Tensor, nn

from hies_export.calibrate.moments import Moments, MomentStream, bytes_of
from hies_export.measure.environment import environment
from hies_export.model.watch import watch
from hies_export.progress import SILENT
from hies_export.units import PrunableModule
