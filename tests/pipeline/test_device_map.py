"""Models that accelerate has spread over devices, as far as one CPU can show it."""

from pathlib import Path

import pytest
import torch
from support.models import causal_lm

from hies_export.checkpoint import load as dense
from hies_export.checkpoint.load import load_dense
from hies_export.errors import RequestError

hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")


def test_a_device_map_is_loaded(tmp_path: Path) -> None:
    model = causal_lm()
    model.save_pretrained(tmp_path)
    loaded = load_dense(tmp_path, type(model), device_map="auto")
    assert not any(p.is_meta for p in loaded.parameters())
    assert all(torch.equal(p.cpu(), q) for p, q in zip(loaded.parameters(), model.parameters(), strict=True))


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate would leave weights on the disk, and load them for every layer that runs."""
    model = causal_lm()
    model.save_pretrained(tmp_path / "model")
    size = sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(dense, "_max_memory", lambda _: {"cpu": 2 * size // 3})
    with pytest.raises(
        RequestError, match=r"device_map auto leaves \d[\d,]* of [\d,]+ parameters to the CPU or the disk"
    ):
        load_dense(tmp_path / "model", type(model), device_map="auto", offload_folder=str(tmp_path / "offloaded"))
