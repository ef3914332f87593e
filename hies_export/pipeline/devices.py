"""Check where a recipe wants the layers of the model."""

from __future__ import annotations

import torch

from ..errors import RequestError, quoted, root_cause

# What accelerate understands beside the names of devices.
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def check_device_map(device_map: str | None) -> None:
    """Refuse a device map that means nothing on this machine."""
    if device_map is None or device_map in DEVICE_MAPS:
        return
    try:
        reason = "it holds no weights" if torch.empty(0, device=device_map).is_meta else None
    except (RuntimeError, AssertionError) as error:  # torch that was built without CUDA raises the latter
        reason = root_cause(error)
    if reason is not None:
        raise RequestError(
            f"device_map must be one of {', '.join(DEVICE_MAPS)} or a device of this machine, got "
            f"{quoted(device_map)}: {reason}"
        )
