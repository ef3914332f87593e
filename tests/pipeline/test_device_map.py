"""Models that accelerate has spread over devices, as far as one CPU can show it."""

from pathlib import Path

import pytest
import torch
from support.cuts import plan_of
from support.models import causal_lm
from support.tolerance import assert_near

from hies_export.calibrate.statistics import collect_statistics
from hies_export.checkpoint import load as dense
from hies_export.checkpoint.load import load_dense
from hies_export.errors import RequestError
from hies_export.score.criteria import score_units
from hies_export.slim.check import compare_cut
from hies_export.slim.cut import prune_units
from hies_export.units.heads import find_attention

hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")


def test_hooks_around_every_layer_change_nothing() -> None:
    model, plain = causal_lm(), causal_lm()
    plain.load_state_dict(model.state_dict())
    hooks.attach_align_device_hook(model, execution_device="cpu")
    assert sum(hasattr(module, "_hf_hook") for module in model.modules()) > 20
    ids = torch.randint(5, 32, (4, 12))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    sites = find_attention(model, batch)
    assert sites == find_attention(plain, batch)
    found, expected = (collect_statistics(m, [batch], sites) for m in (model, plain))
    assert_near(found["his"], expected["his"])
    plan = plan_of(score_units(found, alpha=0.5), sites, heads=0.5)
    assert compare_cut(model, prune_units(model, plan, sites), plan, sites, batch) < 1e-5


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
