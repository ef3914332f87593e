"""Quickstart's training, on one thread whatever the number of threads."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tolerance import assert_near

from hies_export.cli.digits import MODEL, prepare_quickstart
from hies_export.progress import Silent


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def train(folder: Path, *, threads: int) -> dict[str, torch.Tensor]:
    folder.mkdir()
    torch.set_num_threads(threads)
    prepare_quickstart(folder, epochs=1)
    assert torch.get_num_threads() == threads
    return load_file(folder / MODEL / "model.safetensors")


@pytest.mark.usefixtures("threads")
def test_the_weights_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    one, two = (train(tmp_path / str(count), threads=count) for count in (1, 2))
    assert one.keys() == two.keys()
    # Training amplifies rounding, most where gradients are nothing else, as of the keys' biases.
    assert_near(*(torch.cat([weight.flatten() for weight in found.values()]) for found in (two, one)), within=1e-3)


class Interrupted(Silent):
    def track(self, items: object, name: str) -> Iterator[int]:  # type: ignore[override]
        assert torch.get_num_threads() == 1
        raise RuntimeError("stopped")


@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_comes_back_when_training_is_interrupted(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    with pytest.raises(RuntimeError, match="stopped"):
        prepare_quickstart(tmp_path, progress=Interrupted())
    assert torch.get_num_threads() == 2
