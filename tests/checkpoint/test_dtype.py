"""Checkpoints that are saved in another dtype than the model has; files and dtypes of checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.cuts import random_cut
from support.models import bert, image_batch, text_batch, vit
from transformers import BertForSequenceClassification, PreTrainedModel

from hies_export import load, save_slim
from hies_export.checkpoint.weights import stored_dtype, weight_files
from hies_export.data.batches import first_output
from hies_export.model.copies import convert, round_each
from hies_export.model.internals import dtypes_in


@pytest.mark.parametrize(("make", "uniform", "dtype"), [(bert, False, torch.float16), (vit, True, torch.bfloat16)])
def test_a_model_in_float32_is_saved_in_half(
    make: Callable[[], PreTrainedModel], uniform: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    batch = image_batch() if make is vit else text_batch()
    slim, plan, _ = random_cut(make(), batch, uniform=uniform)
    before = {name: tensor.clone() for name, tensor in slim.state_dict().items()}
    save_slim(slim, tmp_path / "whole", plan=plan, batch=batch)
    assert save_slim(slim, tmp_path / "slim", plan=plan, batch=batch, dtype=dtype) < 1e-5
    assert slim.dtype == torch.float32
    assert all(torch.equal(before[name], tensor) for name, tensor in slim.state_dict().items())
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "slim"))
    assert {name: tensor.to(dtype) for name, tensor in one.items()}.keys() == other.keys()
    assert all(torch.equal(one[name].to(dtype), tensor) for name, tensor in other.items())
    assert load(tmp_path / "slim").dtype == dtype
    assert load(tmp_path / "slim", dtype=torch.float32).dtype == torch.float32
    assert json.loads((tmp_path / "slim" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_what_transformers_keeps_in_float32_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dtype of every tensor is the one that `from_pretrained` gives it."""
    dtype = torch.bfloat16
    monkeypatch.setattr(BertForSequenceClassification, "_keep_in_fp32_modules_strict", {"classifier"})
    bert().save_pretrained(tmp_path / "dense")
    loaded = BertForSequenceClassification.from_pretrained(tmp_path / "dense", dtype=dtype)
    expected = {name: t.dtype for name, t in (*loaded.named_parameters(), *loaded.named_buffers())}
    assert set(expected.values()) >= {dtype, torch.float32}
    assert dtypes_in(load(tmp_path / "dense"), dtype) == expected
    slim, plan, _ = random_cut(load(tmp_path / "dense"), text_batch())
    save_slim(slim, tmp_path / "slim", plan=plan, batch=text_batch(), dtype=dtype)
    written = {name: t.dtype for name, t in load_file(tmp_path / "slim" / "model.safetensors").items()}
    assert written == {name: expected[name] for name in written}


def test_activations_too_large_for_float16_say_nothing_about_the_files(tmp_path: Path) -> None:
    model = bert()
    with torch.no_grad():
        model.bert.encoder.layer[0].intermediate.dense.bias.fill_(60000.0)
        model.bert.encoder.layer[0].output.dense.weight.mul_(100.0)
    slim, plan, _ = random_cut(model, text_batch())
    assert first_output(slim, text_batch()).isfinite().all()
    assert not first_output(random_cut(model, text_batch())[0].half(), text_batch()).isfinite().all()
    assert save_slim(slim, tmp_path / "slim", plan=plan, batch=text_batch(), dtype=torch.float16) < 1e-5


def test_rounding_is_what_saving_and_loading_does() -> None:
    model = bert()
    dtypes = dtypes_in(model, torch.float16)
    expected = {name: t.half().float() for name, t in model.state_dict().items() if t.is_floating_point()}
    shared = convert(model, dtype={})
    assert all(a is b for a, b in zip(shared.parameters(), model.parameters(), strict=True))
    assert round_each(model, dtypes) == []
    assert all(torch.equal(expected[name], model.state_dict()[name]) for name in expected)
    with torch.no_grad():
        model.classifier.bias[0] = 70000.0
    assert round_each(model, dtypes) == ["classifier.bias"]


@pytest.mark.parametrize(
    ("held", "named", "expected"),
    [("float16", "float32", torch.float16), ("float32", "bfloat16", torch.bfloat16), ("float16", None, torch.float16)],
)
def test_the_dtype_is_the_narrower_one_of_files_and_config(
    held: str, named: str | None, expected: torch.dtype, tmp_path: Path
) -> None:
    model = bert(num_hidden_layers=1).to(getattr(torch, held))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model*.safetensors"))
    (tmp_path / "model-of-another-kind.safetensors").write_bytes(b"no weights")
    files = weight_files(tmp_path)
    assert sorted(files) == shards
    config: Any = model.config
    config.dtype = named
    assert stored_dtype(files, config) == expected


def test_weights_of_torch_have_files_but_no_dtype(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    assert [file.name for file in weight_files(tmp_path)] == ["pytorch_model.bin"]
    assert stored_dtype(weight_files(tmp_path), object()) is None
    (tmp_path / "pytorch_model.bin").unlink()
    assert weight_files(tmp_path) == []
