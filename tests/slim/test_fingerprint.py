"""Whether a plan knows the weights it was made for from those of another fine-tuning of the same base."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.families import gpt2
from support.models import bert, llama, text_batch
from transformers import PreTrainedModel

from hies_export import PlanError, find_modules
from hies_export.select import fingerprint as fingerprints
from hies_export.select.fingerprint import check_weights, fingerprint, fingerprint_of

KINDS = ("attention", "mlp")


def naive(values: list[float], period: int) -> list[float]:
    """The fingerprint, number by number, in Python's integers."""

    def signed(number: int) -> int:
        return (number + 2**63) % 2**64 - 2**63

    sums = []
    for factor in fingerprints._FACTORS:
        total = 0.0
        for place, value in enumerate(values):
            hashed = signed(place % period * factor)
            hashed = signed((hashed ^ (hashed >> 29)) * fingerprints._MIX)
            total += -value if hashed < 0 else value
        sums.append(total)
    return [sum(value * value for value in values) ** 0.5, *sums]


@pytest.mark.parametrize("period", [100, 2**20])
def test_a_fingerprint_is_what_a_loop_finds(period: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "SIGN_PERIOD", period)
    fingerprints._signs.cache_clear()
    weight = torch.randn(37, 29)
    assert list(fingerprint_of(weight)) == pytest.approx(naive(weight.flatten().tolist(), period))
    fingerprints._signs.cache_clear()


def tuned(base: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Return the base with weights that moved by 3.5 % of their norm, so that two such differ by 5 %."""
    model, generator = copy.deepcopy(base), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            step = torch.randn(parameter.shape, generator=generator)
            parameter.add_(step * 0.035 * parameter.norm() / step.norm().clamp(min=1e-9))
    return model


@pytest.mark.parametrize("make", [bert, llama, gpt2], ids=["bert", "llama", "gpt2"])
def test_another_fine_tuning_of_one_base_is_refused(make: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    base = make()
    found = find_modules(base, text_batch(labels=False), kinds=KINDS)
    for seed, kinds in itertools.product(range(2), (("attention",), ("mlp",))):
        one, other = tuned(base, 2 * seed), tuned(base, 2 * seed + 1)
        modules = [module for module in found if module.kind in kinds]
        mine, theirs = fingerprint(one, modules), fingerprint(other, modules)
        # Norms alone would not tell them apart, for some layers at least.
        assert (
            min(abs(mine[name][0] / theirs[name][0] - 1) for name in mine) < 1e-3 < fingerprints.FINGERPRINT_TOLERANCE
        )
        for made, here in ((mine, theirs), (theirs, mine)):
            with pytest.raises(PlanError, match=r"differ from the ones it was made for, by about 0\.\d+ of their norm"):
                check_weights(made, here)
    # Saved in any precision and loaded again, weights are still the same.
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        copy.deepcopy(one).to(dtype).save_pretrained(tmp_path / "saved")
        check_weights(mine, fingerprint(type(one).from_pretrained(tmp_path / "saved"), modules))
