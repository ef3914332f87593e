"""What the tool says of files that were damaged in ways that people reported; scripts/quality/fuzz finds more."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cuts import random_cut
from support.fields import used_checkpoints
from support.models import bert, causal_lm, generative_tokenizer, text_batch
from support.reads import Read, outcome
from support.reports import make_report
from support.runs import hies
from torch import Tensor
from transformers import PreTrainedModel

from hies_export import PlanError, PruningPlan, Report, RequestError, generate_text, load


def change(file: Path, *place: Any, to: Any) -> None:
    """Replace a value in a JSON file."""
    whole = value = json.loads(file.read_text())
    for key in place[:-1]:
        value = value[key]
    value[place[-1]] = to
    file.write_text(json.dumps(whole))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file, or a checkpoint, of every kind in `KINDS`."""
    folder = tmp_path_factory.mktemp("files")
    slim, plan, _ = random_cut(bert(), text_batch())
    slim.save_pretrained(folder / "slim")
    bert().save_pretrained(folder / "dense")
    (folder / "plan.json").write_text(plan.to_json())
    (folder / "report.json").write_text(make_report().to_json())
    return folder


# What is damaged -> what reads it, the error, and how its sentence begins.
KINDS: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "plan.json": (PruningPlan.from_file, PlanError, "a plan must be JSON written by hies_export .*plan.json .*"),
    "report.json": (Report.from_file, RequestError, "a report must be a report.json or a run's folder.*"),
    "slim/config.json": (lambda file: load(file.parent), RequestError, "the model at .*slim must load, but does not: "),
    "dense/config.json": (lambda file: load(file.parent), RequestError, ""),
}
MODULE, LAYER = "bert.encoder.layer.0.attention.self", "encoder.layer.0.attention.self"
KEPT, UNITS = ("kept", MODULE), ("kept", MODULE, "units")
LINEAR, ATTRIBUTES = ("hies_export", "linear"), ("hies_export", "attributes")


@pytest.mark.parametrize(
    ("kind", "place", "to", "message"),
    [
        ("plan.json", UNITS, [0, 99], r"units must be ascending indices in \[0, 6\), got \[0, 99\]"),
        ("plan.json", (*KEPT, "total"), 10**12, "total: Input should be less than or equal to 1048576"),
        ("plan.json", (*KEPT, "groups"), 4, "total must be a multiple of groups, got 6 and 4"),
        ("plan.json", ("compensation",), {"method": '<img src="http://x/y.png">'}, "compensation.method"),
        # What would be another layer, or another computation, without an error.
        ("slim/config.json", LINEAR, {"embeddings.LayerNorm": [4, 4]}, "TypeError: .*LayerNorm, a LayerNorm"),
        ("slim/config.json", ATTRIBUTES, {LAYER: {"forward": 2}}, "TypeError: .*self.forward = 2"),
        ("slim/config.json", ATTRIBUTES, {LAYER: {"num_attention_heads": "2"}}, "TypeError: .*num_attention_heads = 2"),
        ("slim/config.json", ATTRIBUTES, {LAYER: {"num_attention_head": 2}}, "AttributeError: .*num_attention_head'"),
        ("slim/config.json", LINEAR, {f"{LAYER}.query": [4]}, "ValueError"),
        ("dense/config.json", ("hidden_size",), "wide", "values that its class takes, but .*hidden_size"),
        ("dense/config.json", ("num_attention_heads",), 5, "must load, but does not: ValueError: .*not a multiple"),
        ("dense/config.json", ("pruned_heads",), {"x": [1]}, "pruned_heads .*: ValueError"),
        # What would fill the memory.
        ("dense/config.json", ("num_hidden_layers",), 10**9, "num_hidden_layers must be at most 1000, got"),
        ("dense/config.json", ("num_labels",), 10**9, "num_labels must be at most 1000000, got"),
        ("dense/config.json", ("vocab_size",), 10**9, r"\d{2},.* parameters, and its files hold \d{2},\d{3};"),
        ("report.json", ("parameters", "dense"), 0, "parameters.dense: Input should be greater than 0, got 0"),
        ("report.json", ("latency", 0, "ratio"), float("nan"), "latency.0.ratio: Input should be a finite number"),
    ],
)
def test_a_value_that_does_not_fit(kind: str, place: Any, to: Any, message: str, files: Path, tmp_path: Path) -> None:
    file = shutil.copytree(files, tmp_path / "copy") / kind
    change(file, *place, to=to)
    read, error, beginning = KINDS[kind]
    with pytest.raises(error, match=beginning + message):
        read(file)
    if command := {"plan.json": "inspect", "report.json": "report"}.get(kind):
        assert hies(command, file) == 2


def test_truncated_weights(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = shutil.copytree(files / "dense", tmp_path / "copy") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert hies("inspect", weights.parent) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search("weights must be a safetensors file, but .*SafetensorError: .*incomplete", said)


@pytest.mark.parametrize("saved", ["model.safetensors", "pytorch_model.bin"])
def test_weights_of_another_shape_than_the_config_says(saved: str, tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors") | {"classifier.bias": torch.zeros(7)}
    (tmp_path / "model.safetensors").unlink()
    save = torch.save if saved.endswith(".bin") else partial(save_file, metadata={"format": "pt"})
    save(weights, tmp_path / saved)
    with pytest.raises(
        RequestError, match=r"shapes that the config describes, but .* holds classifier.bias \[7\], not \[3\]; "
    ):
        load(tmp_path)
    assert load(tmp_path, ignore_mismatched_sizes=True).num_labels == 3


RELATIVE = "bert.encoder.layer.0.attention.self.distance_embedding.weight"
KEYS = "model.layers.1.self_attn.k_proj."


UNREAD = {"bert.embeddings.position_ids": torch.arange(64)[None], "cls.predictions.bias": torch.ones(9)}


@pytest.mark.parametrize(
    ("model", "config", "weights", "refused", "said"),
    [
        # What the class was trained with and computes without.
        (bert, {"num_hidden_layers": 1}, {}, "bert.encoder.layer.1, bert.encoder.layer.2,", ""),
        (bert, {"position_embedding_type": "relative_key"}, {RELATIVE: torch.ones(63, 8)}, "distance_embedding,", ""),
        (causal_lm, {}, {KEYS + "bias": torch.ones(16)}, "k_proj.bias,", ""),
        (causal_lm, {}, {KEYS + "lora_A.weight": torch.ones(2, 32)}, "k_proj.lora_A,", ""),
        (bert, {}, {"bert.embeddings.other_embeddings.weight": torch.ones(2, 32)}, "embeddings.other_embeddings,", ""),
        # What changes nothing.
        (bert, {}, UNREAD, "", ""),
        (causal_lm, {}, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, "", ""),
        (causal_lm, {}, {"model.vision_tower.x.weight": torch.ones(2)}, "", "model.vision_tower, which LlamaForCausal"),
    ],
)
def test_weights_that_the_class_does_not_read(
    model: Callable[[], PreTrainedModel],
    config: dict[str, Any],
    weights: dict[str, Tensor],
    refused: str,
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model().save_pretrained(tmp_path)
    for name, value in config.items():
        change(tmp_path / "config.json", name, to=value)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | weights, file, metadata={"format": "pt"})
    if refused:
        with pytest.raises(RequestError, match=f"all of its tensors, but the files of .* hold .*{refused} which .* do"):
            load(tmp_path)
    else:
        load(tmp_path)
        assert bool(caplog.records) is bool(said)
        assert said in caplog.text


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Read]:
    return {read.name: read for read in used_checkpoints(tmp_path_factory.mktemp("used"))}


@pytest.mark.parametrize(
    ("name", "place", "to", "message"),
    [
        ("a BERT: config.json", ("text_config",), "x", "text_encoder must be a config, got 'x'"),
        ("a ViT: config.json", ("num_attention_heads",), -1, "a model must run on one random image of .*, but ViT"),
        ("a BERT: tokenizer_config.json", ("model_max_length",), "64", "a tokenizer that works, .* TypeError"),
        # A library in Rust panics.
        ("a BERT: tokenizer.json", ("post_processor", "special_tokens"), {}, "PanicException: no entry found for key"),
        ("a ViT: preprocessor_config.json", ("size", "width"), [], "an image processor that works, .*'height' and"),
        ("a ViT: preprocessor_config.json", ("image_mean",), float("inf"), "makes NaN or infinity .* pixel_values"),
    ],
)
def test_a_field_that_the_first_use_looks_at(
    name: str, place: Any, to: Any, message: str, used: dict[str, Read]
) -> None:
    """The file loads; the tokenizer, the processor or the model made of it would fail in the middle of a run."""
    before = used[name].file.read_bytes()
    try:
        change(used[name].file, *place, to=to)
        came, error = outcome(used[name].read)
    finally:
        used[name].file.write_bytes(before)
    assert came == "refused"
    assert re.search(message, str(error))


def test_a_generation_config(tmp_path: Path) -> None:
    """transformers would end texts elsewhere without a word, or stop with a traceback."""
    causal_lm().save_pretrained(tmp_path)
    generative_tokenizer().save_pretrained(tmp_path)
    change(tmp_path / "generation_config.json", "eos_token_id", to={"x": 1})
    assert hies("generate", tmp_path, "--prompt", "a") == 2
    (tmp_path / "model.onnx").write_text("")
    with pytest.raises(RequestError, match="a generation config must be what transformers wrote, but that of"):
        generate_text(tmp_path, ["a"])
    (tmp_path / "model.onnx").unlink()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2')
    with pytest.raises(RequestError, match=r"must load, but does not: .*generation_config.json"):
        load(tmp_path)


@pytest.mark.parametrize("lacking", ["head_map", "heads", "metrics", "tried"])
def test_a_report_shows_what_it_has(lacking: str, tmp_path: Path) -> None:
    values = json.loads(make_report().to_json())
    del values["details"][lacking]
    (tmp_path / "report.json").write_text(json.dumps(values))
    assert hies("report", tmp_path, "--html", tmp_path / "page.html") == 0


def test_a_folder_of_checkpoints_is_refused_with_one_of_them(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "checkpoint-5")
    with pytest.raises(RequestError, match=r"is something else; give .*checkpoint-5"):
        load(tmp_path)
