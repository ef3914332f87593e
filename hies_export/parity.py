"""Compare an exported graph with torch, on more batches than the one it was traced with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from .errors import ParityError
from .runtimes import OnnxRuntime, TorchRuntime

# Half precision keeps 11 bits, so its bound grows with the largest output; single precision's does not.
TOLERANCE_FP32 = 1e-3
TOLERANCE_FP16 = 2e-2


def parity_batches(
    given: Mapping[str, torch.Tensor], sample: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    """Batches to compare on: as given, padded, and a single row, of another length for text."""
    single = {name: tensor[:1] for name, tensor in sample.items()}
    if "input_ids" in sample:
        length = max(3, given["input_ids"].shape[1] // 2)
        length += length == given["input_ids"].shape[1]
        single = {name: tensor[:, :length] for name, tensor in single.items()}
        # The first row of the sample is unpadded, the short one therefore too.
    return {"the given batch": dict(given), "a padded batch": dict(sample), "a batch of 1": single}


def check_parity(
    folder: Path, reference: PreTrainedModel, batches: Mapping[str, Mapping[str, torch.Tensor]], dtype: str
) -> tuple[float, str]:
    """Largest absolute difference between the file and torch, and the provider the file ran on.

    Raises:
        ParityError: It is beyond the tolerance, not finite, or the outputs have other names or shapes.
    """
    exported = OnnxRuntime(folder, threads=torch.get_num_threads())
    dense = TorchRuntime(reference, threads=torch.get_num_threads())
    worst = 0.0
    for label, batch in batches.items():
        want = dense.fetch(dense.run(dense.prepare(batch)))
        got = exported.fetch(exported.run(exported.prepare(batch)))
        worst = max(worst, compare_outputs(want, got, label=label, dtype=dtype))
    return worst, exported.provider


def compare_outputs(want: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray], *, label: str, dtype: str) -> float:
    """Largest absolute difference between torch's outputs and the graph's.

    Raises:
        ParityError: It is beyond the tolerance, not finite, or the outputs have other names or shapes.
    """
    shapes: Sequence[str] = [
        "; ".join(f"{name} {array.shape}" for name, array in sorted(outputs.items())) for outputs in (want, got)
    ]
    if shapes[0] != shapes[1]:
        raise ParityError(f"the graph's outputs must be torch's; on {label} torch has {shapes[0]}, it has {shapes[1]}")
    differences = [float(np.abs(want[name] - got[name]).max(initial=0.0)) for name in want]
    # np.max, unlike max, does not lose a NaN.
    max_abs = float(np.max(differences))
    tolerance = TOLERANCE_FP32
    if dtype == "float16":
        tolerance = TOLERANCE_FP16 * max(1.0, *(float(np.abs(array).max(initial=0.0)) for array in want.values()))
    if not max_abs <= tolerance:
        raise ParityError(
            f"the graph must agree with torch within {tolerance:.1e}, and differs by {max_abs:.1e} "
            f"on {label}; nothing was kept: export in float32, or report the model"
        )
    return max_abs
