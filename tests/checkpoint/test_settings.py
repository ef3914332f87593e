"""Settings that transformers leaves out of a saved folder, and that are added for readers who need them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import tiny
from support.checkpoints import saved_by_version4, without_version5
from support.cuts import random_cut, random_neurons
from support.families import decoder
from support.models import bert, causal_lm, generative_tokenizer, llava
from support.tolerance import assert_near
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from hies_export import PruningPlan, find_modules, load, prune_units, save_slim
from hies_export.checkpoint.beside import complete_settings, use_version4_names, write_config
from hies_export.checkpoint.classes import load_config
from hies_export.data.batches import first_output
from hies_export.forms.onnx.multimodal import image_text_batch
from hies_export.kinds import MLP

LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 8},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
BASE = {"rope_type": "default", "rope_theta": 500.0}
BATCH = {"input_ids": torch.arange(6, 30).view(2, 12)}


@pytest.mark.parametrize(
    ("make", "rotary"),
    [
        (causal_lm, BASE),
        (causal_lm, LLAMA3),
        (llava, LLAMA3),
        # It has names of its own for them.
        ("GPTNeoX", BASE | {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}),
        ("Phi", BASE | {"partial_rotary_factor": 0.25}),
    ],
)
def test_rotary_parameters_are_where_transformers_4_looks(
    make: str | Callable[..., PreTrainedModel], rotary: dict[str, Any], tmp_path: Path
) -> None:
    dense = decoder(make, rope_parameters=rotary)() if isinstance(make, str) else make(rope_parameters=rotary)
    dense = saved_by_version4(dense, tmp_path / "dense")
    batch = image_text_batch(dense) if make is llava else BATCH
    modules = [module for module in find_modules(dense, batch, kinds=(MLP,)) if "vision" not in module.name]
    plan = PruningPlan(kept=random_neurons(modules, uniform=True), criterion="random")
    slim = prune_units(dense, plan, modules)
    expected = first_output(slim, batch)
    save_slim(slim, tmp_path / "slim", plan=plan, batch=batch)
    assert_near(first_output(load(tmp_path / "slim"), batch), expected)
    slim.save_pretrained(tmp_path / "by transformers")
    difference = {}
    for name in ("slim", "by transformers"):
        file = tmp_path / name / "config.json"
        config = json.loads(file.read_text())
        assert not {"auto_map", "hies_export"} & set(config)
        # transformers 4 warns of keys in it that it does not know.
        assert "rope_theta" not in (config.get("text_config", config).get("rope_scaling") or {})
        file.write_text(json.dumps(without_version5(config)))
        difference[name] = (first_output(load(tmp_path / name), batch) - expected).abs().max().item()
    assert difference["slim"] < 1e-5
    assert difference["by transformers"] > 1e-3


def test_parameters_that_were_changed_after_loading_are_not_contradicted(tmp_path: Path) -> None:
    saved_by_version4(causal_lm(rope_parameters=BASE | {"rope_type": "linear", "factor": 2.0}), tmp_path / "dense")
    config = load_config(tmp_path / "dense")
    config.rope_parameters = dict(LLAMA3)
    dense = LlamaForCausalLM.from_pretrained(tmp_path / "dense", config=config)
    slim, plan, _ = random_cut(dense, BATCH, uniform=True)
    save_slim(slim, tmp_path / "slim", plan=plan, batch=BATCH)
    written = json.loads((tmp_path / "slim" / "config.json").read_text())
    assert written["rope_parameters"] == LLAMA3
    assert not {"rope_theta", "rope_scaling"} & set(written)


@pytest.mark.parametrize("content", ["{", "5", "[" * 100_000], ids=["cut off", "number", "deep"])
def test_a_damaged_tokenizer_stays_as_it_is(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    use_version4_names(tmp_path)
    assert (tmp_path / "tokenizer_config.json").read_text() == content


def test_where_transformers_4_could_not_read_them_there_are_no_keys_for_it(tmp_path: Path) -> None:
    dense = causal_lm(num_attention_heads=8, num_key_value_heads=4, rope_parameters=BASE)
    slim, plan, _ = random_cut(saved_by_version4(dense, tmp_path / "dense"), BATCH)
    save_slim(slim, tmp_path / "slim", plan=plan, batch=BATCH)
    config = json.loads((tmp_path / "slim" / "config.json").read_text())
    assert "auto_map" in config
    assert not {"rope_theta", "rope_scaling"} & set(config)


def test_the_tokenizer_is_named_as_transformers_4_names_it(tmp_path: Path) -> None:
    slim, plan, _ = random_cut(causal_lm(), BATCH, uniform=True)
    tokenizer = generative_tokenizer()
    save_slim(slim, tmp_path / "slim", plan=plan, batch=BATCH, processor=tokenizer)
    settings = json.loads((tmp_path / "slim" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<image>"]
    again = AutoTokenizer.from_pretrained(tmp_path / "slim")
    assert again("a b <image> c")["input_ids"] == tokenizer("a b <image> c")["input_ids"]
    assert again.all_special_tokens == tokenizer.all_special_tokens


@pytest.mark.parametrize("label2id", [None, {"good": 0, "bad": 1}], ids=["missing", "contradicts"])
def test_labels_come_back_as_the_source_had_them(label2id: dict[str, int] | None, tmp_path: Path) -> None:
    """Except that what was missing is there."""
    model = bert(num_labels=2)
    model.config.id2label, model.config.label2id = {0: "bad", 1: "good"}, label2id
    slim, plan, _ = random_cut(model, BATCH)
    save_slim(slim, tmp_path / "slim", plan=plan, batch=BATCH)
    write_config(slim, tmp_path)
    for folder in (tmp_path / "slim", tmp_path):
        config = load_config(folder)
        assert config.id2label == {0: "bad", 1: "good"}
        assert config.label2id == (label2id or {"bad": 0, "good": 1})
    assert model.config.label2id == label2id


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_its_own_is_not_said_to_be_the_embeddings(tied: bool, tmp_path: Path) -> None:
    """transformers 5 reads both weights of such files, whatever the config says; others leave the head out."""
    model = causal_lm(tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path)
    complete_settings(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] == tied
    assert_near(load(tmp_path)(**BATCH).logits, model(**BATCH).logits)


def test_infinity_in_a_config_is_read_as_transformers_wrote_it(tmp_path: Path) -> None:
    model, _ = tiny("bamba")
    model.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    complete_settings(model, tmp_path)
    assert load_config(tmp_path).time_step_limit == model.config.time_step_limit
