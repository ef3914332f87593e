"""A model's weights where other work has their memory, and products of half precision on a CPU."""

from pathlib import Path

import pytest
import torch
from support.models import bert, text_batch

from hies_export.evaluate.predict import predict
from hies_export.model import copies
from hies_export.model.copies import map_weights
from hies_export.model.modes import wide_products


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads the maps of Linux")
def test_mapped_weights_are_those_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = bert(), text_batch(2)
    before, logits = {n: p.clone() for n, p in model.named_parameters()}, predict(model, [batch]).values
    map_weights(model, tmp_path / "small")
    assert not (tmp_path / "small").exists()  # a small model stays where it is
    monkeypatch.setattr(copies, "LARGE_BYTES", 0)
    map_weights(model, tmp_path / "weights")
    assert str(tmp_path / "weights") in Path("/proc/self/maps").read_text()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert torch.equal(predict(model, [batch]).values, logits)


def test_half_precision_is_multiplied_in_float32() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(300, 40).bfloat16()
    x = torch.randn(7, 300).bfloat16()
    expected = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    with torch.no_grad(), wide_products(layer):
        found = layer(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected.to(torch.bfloat16))
    assert "forward" not in vars(layer)
