"""A model's weights where other work has their memory, and products of half precision on a CPU."""

from pathlib import Path

import pytest
import torch
from support.models import bert, text_batch

from hies_export.evaluate.predict import predict
from hies_export.model import copies, memory
from hies_export.model.memory import let_go, map_weights
from hies_export.model.modes import wide_products


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads the maps of Linux")
def test_mapped_weights_are_those_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = bert(), text_batch(2)
    before, logits = {n: p.clone() for n, p in model.named_parameters()}, predict(model, [batch]).values
    map_weights(model, tmp_path / "small")
    assert not (tmp_path / "small").exists()  # a small model stays where it is
    monkeypatch.setattr(memory, "LARGE_BYTES", 0)
    map_weights(model, tmp_path / "weights")
    assert str(tmp_path / "weights") in Path("/proc/self/maps").read_text()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert torch.equal(predict(model, [batch]).values, logits)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads the maps of Linux")
def test_what_was_read_of_mapped_weights_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LARGE_BYTES", 0)
    layer, file = torch.nn.Linear(1024, 2048, bias=False), tmp_path / "weights"
    before = layer.weight.detach().clone()
    map_weights(layer, file)
    assert torch.equal(layer.weight, before)
    assert resident(file) >= 8 * 1024
    let_go(copies.share_weights(layer))  # a copy has the very parameters
    assert resident(file) < 2 * 1024
    assert torch.equal(layer.weight, before)


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
