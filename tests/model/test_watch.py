"""Watched and replaced inputs of layers; what they are is tested where they are used, in tests/calibrate."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hies_export.model.modes import intercept, watch

LAYERS = {"early": "first", "late": "block.last"}


class Net(nn.Module):
    """Three layers, of which `first` is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential()
        self.block.add_module("last", nn.Linear(4, 2))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(self.first(x).tanh()).tanh())


class Scaled(nn.Module):
    """A layer that takes more than one argument."""

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return x * factor


@pytest.fixture
def net() -> Net:
    return Net()


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_layer_that_was_compiled_in_place_is_seen(net: Net) -> None:
    x = torch.randn(3, 4)
    net.compile(backend="eager")
    net(x)
    with watch(net, LAYERS) as seen:
        net(x)
    assert len(seen["early"]) == 2
    assert net._compiled_call_impl is not None


def test_other_arguments_reach_the_layer() -> None:
    model = nn.Module()
    model.scaled = Scaled()
    with intercept(model, {"key": "scaled"}, lambda key, x: x + 1):
        assert model.scaled(torch.tensor(2.0), 5.0).item() == 15


@pytest.mark.parametrize("name", ["watch", "intercept"])
def test_an_exception_or_an_unknown_layer_takes_the_hooks_away(net: Net, name: str) -> None:
    blocks: dict[str, AbstractContextManager[Any]] = {
        "watch": watch(net, LAYERS, gradients=True),
        "intercept": intercept(net, LAYERS, lambda key, x: x),
    }

    def fail_inside() -> None:
        with blocks[name]:
            assert hooks(net) > 0
            net(torch.randn(3, 5))

    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        fail_inside()
    assert hooks(net) == 0
    with pytest.raises(AttributeError, match="nowhere"), watch(net, {**LAYERS, "x": "nowhere"}):
        pass
    assert hooks(net) == 0
