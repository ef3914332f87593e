"""What a config asks a model to return beside its output: off in every pass, and as it was in what is saved."""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import bert, causal_lm, image_batch, llama, llava, text_batch, vit
from transformers import PreTrainedModel

from hies_export import prune
from hies_export.forms.onnx.export import export_onnx
from hies_export.forms.runtimes.pytorch import TorchRuntime
from hies_export.model.internals import cache_of, configs_of
from hies_export.model.modes import output_alone

ASKING = {"output_attentions": True, "output_hidden_states": True, "return_dict": False}


def asking(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return a model, of which every part is asked for all that it can return, as by a checkpoint's config."""
    model = make()
    for config in configs_of(model):
        vars(config).update(_output_attentions=True, output_hidden_states=True, return_dict=False)
    return model


@pytest.mark.parametrize("make", [bert, vit, llama, causal_lm, llava])
def test_the_output_alone_and_then_all_again(make: Callable[[], PreTrainedModel]) -> None:
    model = asking(make)
    before = [copy.deepcopy(vars(config)) for config in configs_of(model)]
    batch: dict[str, Any] = image_batch(2, labels=False) if make is vit else text_batch(2, labels=False)
    if make in (causal_lm, llava):
        batch["input_ids"] %= 32
    with torch.no_grad(), output_alone(model):
        assert list(model(**batch)) == ["logits"]
    with torch.no_grad(), output_alone(model, cache=True):
        assert (cache_of(model(**batch)) is None) == (make in (bert, vit))
    assert [vars(config) for config in configs_of(model)] == before


def test_prune_leaves_what_a_config_asks_for(tmp_path: Path) -> None:
    model, batches = asking(partial(bert, num_hidden_layers=2)), [text_batch() for _ in range(2)]
    before = model.config.to_dict()
    result = prune(model, batches, criterion="his", budget={"heads": 0.5}, held_out=[])
    assert model.config.to_dict() == before
    with torch.no_grad():
        dense, slim = (m(**batches[0]) for m in (model, result.model))
    assert [type(part) for part in slim] == [type(part) for part in dense]
    assert isinstance(slim, tuple)
    assert len(slim[-2]) == len(dense[-2]) > 1  # hidden states; fused attention has no weights to return
    result.save_pretrained(tmp_path / "slim")
    saved = json.loads((tmp_path / "slim" / "config.json").read_text())
    assert {name: saved[name] for name in ASKING} == ASKING


def test_a_graph_returns_the_output_alone(tmp_path: Path) -> None:
    model, batch = asking(partial(bert, num_hidden_layers=1)), text_batch(2, labels=False)
    assert export_onnx(model, tmp_path / "onnx", batch=batch).outputs == ("logits",)
    assert TorchRuntime(model, threads=1).compute(batch).keys() == {"logits"}
