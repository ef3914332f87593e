"""Rounding by moments: a naive descent by hand, less change of outputs than rounding to nearest, and the spreads."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support.models import llama
from torch import Tensor, nn

from hies_export.calibrate.moments import Spread
from hies_export.forms import rounding
from hies_export.forms.rounding import DAMPING, Blocks, fit_blocks, grouped, read_layers, spreads
from hies_export.model.modes import torch_threads

SIZE, COUNT, OUTPUTS = 4, 3, 5


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def example(inputs: int = SIZE * COUNT) -> tuple[Tensor, Blocks, Tensor]:
    """A matrix, its levels by rounding to nearest, and the moments of inputs that depend on each other."""
    x = drawn(200, inputs) @ drawn(inputs, inputs)
    matrix = torch.zeros(COUNT * SIZE, OUTPUTS, dtype=torch.float64)
    matrix[:inputs] = drawn(inputs, OUTPUTS)
    matrix = matrix.view(COUNT, SIZE, OUTPUTS)
    low, high = matrix.amin(1).clamp(max=0), matrix.amax(1).clamp(min=0)
    scale = (high - low) / 15
    return matrix, Blocks.nearest(matrix, scale, (-low / scale).round()), x.T @ x / len(x)


def naive(matrix: np.ndarray, start: Blocks, moments: np.ndarray, sweeps: int) -> tuple[np.ndarray, np.ndarray]:
    """For each output alone, try all 16 levels of every weight in turn, and fit every scale by least squares."""
    hessian = moments + DAMPING * np.mean(np.diag(moments)) * np.eye(len(moments))
    levels, scale, zero = start.levels.numpy().copy(), start.scale.numpy().copy(), start.zero.numpy()

    def change(output: int) -> float:
        values = (levels[:, :, output] - zero[:, None, output]) * scale[:, None, output]
        error = (matrix[:, :, output] - values).flatten()
        return error @ hessian @ error

    for output in range(OUTPUTS):
        for _ in range(sweeps):
            for block in range(COUNT):
                for place in range(SIZE):
                    found = []
                    for level in range(16):
                        levels[block, place, output] = level
                        found.append(change(output))
                    levels[block, place, output] = np.argmin(found)
                root = np.linalg.cholesky(hessian).T
                rest = matrix[:, :, output] - (levels[:, :, output] - zero[:, None, output]) * scale[:, None, output]
                rest[block] = matrix[block, :, output]
                steps = np.zeros_like(rest)
                steps[block] = levels[block, :, output] - zero[block, output]
                if steps.any():
                    scale[block, output] = np.linalg.lstsq(
                        (root @ steps.flatten())[:, None], root @ rest.flatten(), rcond=None
                    )[0][0]
    return levels, scale


def test_the_descent_is_that_of_a_naive_loop() -> None:
    matrix, start, moments = example()
    found = fit_blocks(matrix, start, moments, sweeps=3)
    levels, scale = naive(matrix.numpy(), start, moments.numpy(), 3)
    np.testing.assert_array_equal(found.levels.numpy(), levels)
    np.testing.assert_allclose(found.scale.numpy(), scale, rtol=1e-9)
    assert not torch.equal(found.levels, start.levels)


def test_no_sweep_raises_the_change_and_the_outputs_change_less_than_by_rounding_to_nearest() -> None:
    def change(matrix: Tensor, blocks: Blocks, of: Tensor) -> float:
        error = (matrix - blocks.values).flatten(0, 1)
        return float((error * (of @ error)).sum())

    shares = []
    for matrix, start, moments in (example() for _ in range(3)):
        damped = moments + DAMPING * moments.diagonal().mean() * torch.eye(len(moments), dtype=torch.float64)
        fits = [start, *(fit_blocks(matrix, start, moments, sweeps=sweeps) for sweeps in range(1, 4))]
        changes = [change(matrix, fit, damped) for fit in fits]
        assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(changes))
        shares.append(change(matrix, fit_blocks(matrix, start, moments), moments) / change(matrix, start, moments))
    assert max(shares) < 1
    assert sum(shares) / len(shares) < 0.6, shares


def test_padding_and_inputs_that_are_always_zero_do_no_harm() -> None:
    matrix, start, moments = example(SIZE * COUNT - 3)
    found = fit_blocks(matrix, start, moments)
    assert torch.equal(found.values.flatten(0, 1)[-3:], torch.zeros(3, OUTPUTS, dtype=torch.float64))
    silent = fit_blocks(matrix, start, torch.zeros_like(moments))
    assert torch.isfinite(silent.values).all()
    assert (silent.values - matrix).square().sum() <= (start.values - matrix).square().sum()
    nothing = Blocks.nearest(torch.zeros_like(matrix), torch.full_like(start.scale, 1e-38), start.zero)
    assert torch.isfinite(fit_blocks(torch.zeros_like(matrix), nothing, moments).values).all()


def test_the_descent_takes_one_thread_and_puts_the_number_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    damped = rounding._damped
    monkeypatch.setattr(rounding, "_damped", lambda *given: seen.append(torch.get_num_threads()) or damped(*given))
    with torch_threads(2):
        fit_blocks(*example())
        assert (seen, torch.get_num_threads()) == ([1], 2)


def test_fixed_levels_and_their_scales_stay() -> None:
    matrix, start, moments = example()
    fixed = torch.rand(matrix.shape) < 0.5
    found = fit_blocks(matrix, start, moments, fixed=fixed)
    assert torch.equal(found.levels[fixed], start.levels[fixed])
    assert torch.equal(found.scale, start.scale)
    assert not torch.equal(found.levels, start.levels)


@pytest.mark.parametrize(("limit", "centred"), [(1e9, True), (1.0, False)], ids=["one pass", "a pass for each"])
def test_spreads_are_those_of_the_tokens_that_are_not_padding(limit: float, centred: bool) -> None:
    model = llama().eval()
    batches = [{"input_ids": torch.randint(1, 20, (2, 6))} for _ in range(3)]
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    batches[1]["attention_mask"] = mask
    name = "model.layers.1.mlp.down_proj"
    other = "model.layers.0.self_attn.q_proj"
    layers: dict[str, nn.Linear] = {key: model.get_submodule(key) for key in (name, other)}  # type: ignore[misc]
    widths = {key: layer.in_features for key, layer in layers.items()}
    seen: dict[str, list[Tensor]] = {key: [] for key in layers}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, key=key: seen[key].append(args[0].detach()))
        for key, layer in layers.items()
    ]
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for hook in hooks:
        hook.remove()
    found = dict(spreads(widths, read_layers(model), batches, centred=centred, limit_bytes=limit))
    assert list(found) == list(layers)
    for key, spread in found.items():
        seen[key][1] = seen[key][1][mask.bool()]
        wanted = Spread.of(torch.cat([x.flatten(0, -2) for x in seen[key]]), centred=centred)
        torch.testing.assert_close(spread.mean, wanted.mean)
        torch.testing.assert_close(spread.moments, wanted.moments)


def test_what_reads_one_group_is_gone_when_the_next_one_opens() -> None:
    class Session:
        def read(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"a": batch["x"], "b": batch["x"]}

    sessions: list[weakref.ref[Session]] = []

    @contextmanager
    def opened(names: Sequence[str]) -> Iterator[Any]:
        assert not any(session() for session in sessions)
        session = Session()
        sessions.append(weakref.ref(session))
        yield lambda batch: {name: session.read(batch)[name] for name in names}

    for _ in spreads({"a": 2, "b": 2}, opened, [{"x": torch.ones(1, 3, 2)}], centred=True, limit_bytes=8):
        pass
    assert len(sessions) == 2


def test_groups_fill_the_memory() -> None:
    assert [len(group) for group in grouped("abcdef", [2, 2, 2, 1, 9, 1], 4)] == [2, 2, 1, 1]
