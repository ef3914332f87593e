"""Small work on one thread, by a rule that time does not enter."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.cuts import moments_by_module
from support.models import bert, image_batch, llava, text_batch, vit

from hies_export import collect_statistics, count_flops, find_modules, score_compensated
from hies_export.evaluate.predict import predict
from hies_export.forms.machine import machine_facts
from hies_export.model import modes as threads


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that began with two threads, of which the environment says nothing."""
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_THREADS_AT_START", 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def seen_in(loop: str = "predict") -> set[int]:
    """Run a loop, and return the numbers of threads that a layer of the model ran on."""
    model, batches, seen = bert(num_hidden_layers=1), [text_batch(6)], set[int]()
    with threads.torch_threads(1):
        found = find_modules(model, batches[0])
    functions = {
        "score": lambda: collect_statistics(model, batches, found),
        "effects": lambda: score_compensated(model, batches, found),
        "moments": lambda: moments_by_module(model, found, batches),
        "predict": lambda: predict(model, batches),
    }
    layer = model.bert.encoder.layer[0].output.dense
    with layer.register_forward_hook(lambda *_: seen.add(torch.get_num_threads())):
        functions[loop]()
    return seen


@pytest.mark.parametrize("loop", ["score", "effects", "moments", "predict"])
def test_small_work_runs_on_one_thread_and_the_number_comes_back(loop: str) -> None:
    assert seen_in(loop) == {1}
    assert torch.get_num_threads() == 2


def test_large_work_keeps_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SMALL_FLOPS", 1.0)
    assert seen_in() == {2}


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_number_that_was_chosen_by_hand_is_kept(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_facts()["threads_of_small_work"] == 1
    monkeypatch.setenv(variable, "2")
    assert seen_in() == {2}
    assert machine_facts()["threads_of_small_work"] == 2
    monkeypatch.delenv(variable)
    torch.set_num_threads(3)
    assert seen_in() == {3}
    assert machine_facts()["threads_of_small_work"] == 3


def test_the_number_comes_back_after_an_error() -> None:
    def stop(*_: object) -> None:
        assert torch.get_num_threads() == 1
        raise RuntimeError("stopped")

    model = bert()
    model.register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="stopped"):
        predict(model, [text_batch(2)])
    assert torch.get_num_threads() == 2


def test_a_model_elsewhere_keeps_the_threads() -> None:
    with threads.threads_for(bert().to("meta"), [text_batch(2)]):
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("make", "batch"), [(bert, text_batch), (vit, image_batch)])
def test_the_estimate_is_near_what_torch_counts(make: Any, batch: Any) -> None:
    model, batches = make().eval(), [batch(8), batch(4)]
    counted = sum(count_flops(model, one) for one in batches) / 2
    # Attention products, convolutions and heads that read one token are not among the linear layers times tokens.
    assert 0.5 < threads.mean_flops(model, batches) / counted < 1.5


def test_inputs_of_another_kind_are_never_small() -> None:
    assert threads.mean_flops(llava(), [{"input_features": torch.zeros(1, 80, 30)}]) == float("inf")
