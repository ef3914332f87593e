"""Folders of sentence-transformers: loaded by it without code of theirs, or refused in a sentence."""

import json
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from sentence_transformers import CrossEncoder
from support.cuts import random_neurons
from support.hub import Hub
from support.models import save_text_model, word_tokenizer
from support.runs import hies
from support.sentences import MEAN, WIDTH, WORDS, bert_encoder, dense, load_embedder, sentence_folder, t5_encoder
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, BertModel

from hies_export import MissingRuntimeError, RequestError, apply_plan, find_modules, load, prune_units, save_slim
from hies_export.checkpoint.folders import Contents, contents
from hies_export.checkpoint.sentence import encoder_class, is_sentence_transformer, load_sentence
from hies_export.model.text_encoder import TextEncoder
from hies_export.select.plan import PruningPlan

TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9"]


def embed(model: TextEncoder) -> Tensor:
    with torch.no_grad():
        found = model(**model.reader.read("text", TEXTS)).sentence_embedding
    assert found is not None
    return found


def cut(model: TextEncoder) -> tuple[TextEncoder, PruningPlan]:
    modules = find_modules(model, model.reader.read("text", TEXTS), kinds=("attention", "mlp"))
    kept = random_neurons(modules, uniform=False)
    slim = prune_units(model, kept, modules)
    assert isinstance(slim, TextEncoder)
    return slim, PruningPlan(kept=kept, criterion="random")


def test_the_refusal_of_a_bare_encoder_says_how_to_make_a_folder(tmp_path: Path) -> None:
    bert_encoder().save_pretrained(tmp_path / "bare")
    word_tokenizer(WORDS).save_pretrained(tmp_path / "bare")
    with pytest.raises(RequestError, match=r"bare has no modules.json; make one with the pooling") as refusal:
        load_sentence(tmp_path / "bare")
    _, *lines = str(refusal.value).splitlines()
    exec(dedent("\n".join(lines)).replace("FOLDER", str(tmp_path / "whole")))
    model = load_sentence(tmp_path / "whole").model
    inputs = model.reader.read("text", TEXTS[:1])
    with torch.no_grad():
        mean = model.auto_model(**inputs).last_hidden_state.mean(1)
    torch.testing.assert_close(embed(model)[:1], mean / mean.norm(dim=1, keepdim=True), atol=1e-6, rtol=1e-5)


def test_an_encoder_that_was_saved_with_another_head_and_no_pooler(tmp_path: Path) -> None:
    sizes = {"vocab_size": 100, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 6}
    folder = sentence_folder(tmp_path / "dense", [], encoder=BertForMaskedLM(BertConfig(**sizes)).eval())
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["BertForMaskedLM"]
    model = load_embedder(folder)
    slim, plan = cut(model)
    save_slim(slim, tmp_path / "slim", plan=plan, batch=model.reader.read("text", TEXTS))
    torch.testing.assert_close(embed(load_embedder(tmp_path / "slim")), embed(slim))
    assert load(tmp_path / "slim").pooler is None

    # A config that names no class.
    names_none = {name: value for name, value in config.items() if name != "architectures"}
    (folder / "config.json").write_text(json.dumps(names_none))
    assert type(load_embedder(folder).auto_model) is BertModel


def test_files_of_a_module_that_are_damaged(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "dense", [dense(WIDTH, 8)])
    save_file({"linear.weight": torch.ones(3, 3)}, folder / "2_Dense/model.safetensors")
    with pytest.raises(RequestError, match=r"sentence-transformers must load .*dense, but fails: .*; correct"):
        load_sentence(folder)
    folder = sentence_folder(tmp_path / "numbered")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["w1"] = 10**9
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(RequestError, match=r"can be copied, but is not: .*numbers a token 1,000,000,000"):
        load_sentence(folder)


FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "colbert": ({"options": {"model_type": "MultiVectorEncoder"}}, "one score for a pair, but .* is a MultiVectorEnc"),
    "sparse": ({"layers": [("SpladePooling", {}, {})]}, "must be a Transformer, a Pooling, .*SpladePooling"),
    "own code": ({"types": "modeling_own."}, "code in a checkpoint is never run, but .* is modeling_own.Transformer"),
    "prompt left out": (
        {"pooling": MEAN | {"include_prompt": False}, "options": {"prompts": {"query": "q: "}}},
        "pooling must include the prompt's tokens",
    ),
    "long name": (
        {"layers": [dense(WIDTH, 4, module_input_name="a" * 9000)]},
        "one embedding per text into another, but a Dense of .* is of a{500} [.]{3} a{500}; give",
    ),
    "wide": ({"layers": [("LayerNorm", {"dimension": 1 << 31}, {})]}, "at most 131,072, .* has dimension: 2147483648"),
    "images": (
        {"text": {"modality_config": {"image": {}, "text": {}}, "module_output_name": "token_embeddings"}},
        "but fails: .*modality_config entry for 'image'",
    ),
    "chat": (
        {
            "text": {
                "modality_config": dict.fromkeys(("message", "text"), FORWARD),
                "module_output_name": "token_embeddings",
            }
        },
        "must embed texts as they are, but .* takes message, text",
    ),
    "no default prompt": ({"options": {"default_prompt_name": "other"}}, "Default prompt name 'other' not found"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_pruned_is_refused(name: str, tmp_path: Path) -> None:
    given, message = BAD[name]
    with pytest.raises(RequestError, match=message):
        load_sentence(sentence_folder(tmp_path / "model", **given))


def test_without_sentence_transformers_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sentence_folder(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    monkeypatch.setattr("hies_export.errors.find_spec", lambda name: None)
    install = r'an embedding model needs sentence-transformers, .*: pip install "hies-export\[sentence-transformers\]"'
    with pytest.raises(MissingRuntimeError, match=install):
        load_sentence(folder)


def test_code_of_a_slim_folder_is_not_run_to_load_it(tmp_path: Path) -> None:
    model = load_embedder(sentence_folder(tmp_path / "dense", encoder=t5_encoder("T5")))
    slim, plan = cut(model)
    save_slim(slim, tmp_path / "slim", plan=plan, batch=model.reader.read("text", TEXTS))
    (tmp_path / "slim/modeling_hies.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    torch.testing.assert_close(embed(load_embedder(tmp_path / "slim")), embed(slim))
    assert not (tmp_path / "ran").exists()


def test_a_transformer_in_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "dense")
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "0_Transformer").mkdir()
    for file in [*folder.glob("*")]:
        if file.is_file() and file.name != "modules.json":
            file.rename(folder / "0_Transformer" / file.name)
    slim, plan = cut(load_embedder(folder))
    applied = apply_plan(plan, folder, tmp_path / "slim")
    assert applied.slim_bytes < applied.dense_bytes
    torch.testing.assert_close(embed(load_embedder(tmp_path / "slim")), embed(slim))
    # The commands take the folder too.
    assert contents(folder) is Contents.CHECKPOINT
    assert hies("inspect", folder) == 0


def test_a_plan_applies_to_a_cross_encoder_that_is_read_as_it_asks(tmp_path: Path) -> None:
    save_text_model(tmp_path / "bert", num_labels=1)
    asked = {"activation_fn": torch.nn.Identity(), "max_length": 9, "prompts": {"q": "query: "}}
    given = CrossEncoder(str(tmp_path / "bert"), device="cpu", **asked)
    given.save_pretrained(str(tmp_path / "dense"))
    found = load_sentence(tmp_path / "dense")
    modules = find_modules(found.model, found.processor("a b", return_tensors="pt"), kinds=("attention",))
    plan = PruningPlan(kept=random_neurons(modules, uniform=False), criterion="random")
    apply_plan(plan, tmp_path / "dense", tmp_path / "slim")
    again = CrossEncoder(str(tmp_path / "slim"), device="cpu", trust_remote_code=True)
    assert (type(again.activation_fn), again.max_seq_length, again.prompts["q"]) == (torch.nn.Identity, 9, "query: ")
    assert found.max_length == 9
    file = tmp_path / "dense/sentence_bert_config.json"
    text = json.loads(file.read_text())
    file.write_text(json.dumps(text | {"processing_kwargs": {"text": {"add_special_tokens": False}}}))
    with pytest.raises(RequestError, match="pairs that its tokenizer cuts, but .* asks for add_special_tokens"):
        load_sentence(tmp_path / "dense")
    file.write_text(json.dumps(text | {"processing_kwargs": {"text": {"max_length": 7}}}))
    assert load_sentence(tmp_path / "dense").max_length == 7
    given.default_prompt_name = "q"
    given.save_pretrained(str(tmp_path / "prompted"))
    with pytest.raises(RequestError, match="must read its pairs without a prompt, but .* has 'q' by default; set its"):
        load_sentence(tmp_path / "prompted")


def test_an_encoder_decoder_without_an_encoder_class_is_refused(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "dense")
    config = {"model_type": "marian", "architectures": ["MarianModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match="an embedding model must be an encoder, but .* is a marian; give"):
        encoder_class(folder)


def test_models_on_the_hub_and_then_in_its_cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sentence_folder(tmp_path / "dense", [dense(WIDTH, 8), ("Normalize", {}, {})])
    bert_encoder().save_pretrained(tmp_path / "bare")
    word_tokenizer(WORDS).save_pretrained(tmp_path / "bare")
    for name, source in (("user/embedder", folder), ("user/bare", tmp_path / "bare")):
        files = {str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*") if path.is_file()}
        hub.add(name, files)
    expected = embed(load_embedder(folder))
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        torch.testing.assert_close(embed(load_sentence("user/embedder").model), expected)
        assert not is_sentence_transformer("user/bare")
        with pytest.raises(RequestError, match="user/bare has no modules.json; make one"):
            load_sentence("user/bare")
