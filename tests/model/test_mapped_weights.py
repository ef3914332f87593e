"""A model's weights where other work has their memory, and products of half precision on a CPU."""

from pathlib import Path

import pytest
import torch

from hies_export.model import copies, memory
from hies_export.model.memory import let_go, map_weights
from hies_export.model.modes import wide_products


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads the maps of Linux")
def test_weights_are_mapped_and_what_was_read_of_them_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.Linear(1024, 2048)), tmp_path / "weights"
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def unchanged() -> bool:
        return all(map(torch.equal, model.parameters(), before))

    map_weights(model, file)
    assert not file.exists()  # a small model stays where it is
    monkeypatch.setattr(memory, "LARGE_BYTES", 0)
    map_weights(model, file)
    assert unchanged()
    assert resident(file) >= 8 * 1024
    let_go(copies.share_weights(model))  # a copy has the very parameters
    assert resident(file) < 2 * 1024
    assert unchanged()


def resident(file: Path) -> int:
    """Return how many KB of a file are in this process's memory."""
    parts = Path("/proc/self/smaps").read_text().split(str(file))[1:]
    return sum(int(part.split("Rss:")[1].split()[0]) for part in parts)


def test_half_precision_is_multiplied_in_float32() -> None:
    layer = torch.nn.Linear(300, 40).bfloat16()
    x = torch.randn(7, 300).bfloat16()
    expected = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    with torch.no_grad(), wide_products(layer):
        found = layer(x)
    assert found.dtype == torch.bfloat16
    half_a_step = 2**-8 * expected.abs()  # what rounding the exact sum to bfloat16 may change, at most
    assert ((found.double() - expected).abs() <= half_a_step + 1e-5).all()
    assert "forward" not in vars(layer)
