"""Classes of several tasks for one model type each; `scripts/task_heads` proves all of them."""

import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.task_heads import TASK_CLASSES, Head, Proof, heads_of, prove

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "task_heads"
# What is particular about the inputs of each.
CUT = {
    ("bert", "fill-mask"): "the output layer is tied to the embeddings",
    ("clip", "image-classification"): "the image size is in the config of a part",
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    # What transformers warns of concerns dimensions as small as these.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def only_head(model_type: str, task: str) -> Head:
    (head,) = heads_of(model_type, {task: TASK_CLASSES[task]})
    return head


@pytest.mark.parametrize(("model_type", "task"), CUT)
def test_a_head_is_cut_saved_and_loaded(model_type: str, task: str) -> None:
    assert prove(only_head(model_type, task)) == Proof(cut=["attention", "mlp"])


def test_refused_units_are_named_with_the_reason() -> None:
    proof = prove(only_head("xlnet", "text-classification"))
    assert (proof.verdict, proof.cut, list(proof.refused)) == ("neurons", ["mlp"], ["attention"])
    assert "computes its own" in proof.refused["attention"]


def test_inputs_that_do_not_fit_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.task_heads.sample_batch", lambda *_, **__: {"input_ids": torch.tensor([[10**6]])})
    assert prove(only_head("bert", "text-classification")).failed.startswith("inputs: IndexError")


def test_the_printed_table_says_why_not() -> None:
    script = runpy.run_path(str(SCRIPT))
    head, other = Head("a", "text-generation", "AForCausalLM"), Head("b", "text-generation", "BForCausalLM")
    shown = script["table"]({head: Proof(cut=["mlp"], refused={"attention": "of a reason"}), other: Proof(failed="no")})
    assert "AForCausalLM (a): attention refused: of a reason" in shown
    assert "BForCausalLM (b): FAILED: no" in shown
