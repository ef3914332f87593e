"""SentenceTransformer folders: read as sentence-transformers does, written with every module, refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from support.cuts import random_neurons
from support.hub import Hub
from support.models import bert, text_batch
from support.runs import hies
from support.sentences import MEAN, WIDTH, bert_encoder, dense, sentence_folder, t5_batch, t5_encoder
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertModel

from hies_export import RequestError, apply_plan, find_modules, load, prune_units, save_slim
from hies_export.checkpoint.folders import Contents, contents
from hies_export.checkpoint.sentence import (
    cross_encoder_files,
    cross_encoder_of,
    encoder_class,
    is_sentence_transformer,
    load_encoder,
    load_sentence,
    settings_of,
)
from hies_export.model.text_encoder import TextEncoder
from hies_export.select.plan import PruningPlan


def tokens_of(folder: Path, batch: dict[str, Tensor]) -> list[Tensor]:
    """Return the embeddings of the real tokens of every text, by transformers alone."""
    with torch.no_grad():
        hidden = BertModel.from_pretrained(folder).eval()(**batch).last_hidden_state
    return [row[mask.bool()] for row, mask in zip(hidden, batch["attention_mask"], strict=True)]


def embed(model: TextEncoder, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found = model(**batch).sentence_embedding
    assert found is not None
    return found


POOLINGS = {
    "flags": (MEAN, lambda x: x.mean(0)),
    "no flag": ({"word_embedding_dimension": WIDTH}, lambda x: x.mean(0)),
    "name": ({"embedding_dimension": WIDTH, "pooling_mode": "cls", "include_prompt": True}, lambda x: x[0]),
    "last": ({"word_embedding_dimension": WIDTH, "pooling_mode_lasttoken": True}, lambda x: x[-1]),
    "two flags": (
        MEAN | {"pooling_mode_max_tokens": True},
        lambda x: torch.cat([x.max(0).values, x.mean(0)]),
    ),
    "two names": (
        {"embedding_dimension": WIDTH, "pooling_mode": ["mean", "cls"]},
        lambda x: torch.cat([x.mean(0), x[0]]),
    ),
}


@pytest.mark.parametrize("name", POOLINGS)
def test_pooling_is_read_and_written_in_both_forms(name: str, tmp_path: Path) -> None:
    config, pooled = POOLINGS[name]
    folder = sentence_folder(tmp_path / "dense", [], pooling=config)
    model = load_sentence(folder)
    batch = text_batch(labels=False)
    expected = torch.stack([pooled(row) for row in tokens_of(folder, batch)])
    torch.testing.assert_close(embed(model, batch), expected, atol=1e-6, rtol=1e-5)
    slim, plan = cut(model)
    save_slim(slim, tmp_path / "slim", plan=plan, batch=batch)
    written = json.loads((tmp_path / "slim/1_Pooling/config.json").read_text())
    modes = [mode for mode in model.readout[0].modes]
    named = written.get("pooling_mode", modes)
    assert ([named] if isinstance(named, str) else named) == modes
    # What text-embeddings-inference parses.
    assert (written["pooling_mode_mean_tokens"], written["pooling_mode_cls_token"]) == ("mean" in modes, "cls" in modes)
    assert load_sentence(tmp_path / "slim").readout[0].modes == model.readout[0].modes


def cut(model: TextEncoder) -> tuple[TextEncoder, PruningPlan]:
    modules = find_modules(model, text_batch(labels=False), kinds=("attention", "mlp"))
    kept = random_neurons(modules, uniform=False)
    slim = prune_units(model, kept, modules)
    assert isinstance(slim, TextEncoder)
    return slim, PruningPlan(kept=kept, criterion="random")


def test_every_module_and_file_is_kept_in_the_slim_folder(tmp_path: Path) -> None:
    norm = {"norm.weight": torch.rand(20) + 0.5, "norm.bias": torch.randn(20)}
    layers = [
        ("Dropout", {"dropout": 0.5}, {}),
        dense(WIDTH, 20, nn.GELU),
        ("LayerNorm", {"dimension": 20}, norm),
        ("Normalize", {}, {}),
    ]
    options = {
        "prompts": {"query": "q: ", "passage": "p: "},
        "default_prompt_name": "query",
        "similarity_fn_name": "dot",
    }
    text = {"max_seq_length": 12, "do_lower_case": True}
    folder = sentence_folder(tmp_path / "dense", layers, options=options, text=text)
    (folder / "data_config.json").write_text("[]")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_text("of the dense model")
    settings = settings_of(folder)
    assert (settings.max_length, settings.lower, settings.encoder) == (12, True, folder)
    assert settings.prompts == {"query": "q: ", "text": "q: "}  # as sentence-transformers, which reads no "passage"

    model = load_encoder(settings, dtype="float32")
    batch = text_batch(labels=False)
    linear = dict(layers[1][2].items())
    pooled = torch.stack([row.mean(0) for row in tokens_of(folder, batch)])
    y = nn.functional.gelu(pooled @ linear["linear.weight"].T + linear["linear.bias"])
    y = nn.functional.layer_norm(y, (20,), norm["norm.weight"], norm["norm.bias"])
    torch.testing.assert_close(embed(model, batch), y / y.norm(dim=1, keepdim=True), atol=1e-6, rtol=1e-5)

    slim, plan = cut(model)
    assert save_slim(slim, tmp_path / "slim", plan=plan, batch=batch) < 1e-5
    modules = json.loads((tmp_path / "slim/modules.json").read_text())
    assert [m["type"].removeprefix("sentence_transformers.models.") for m in modules] == [
        *("Transformer", "Pooling", "Dropout", "Dense", "LayerNorm", "Normalize")
    ]
    # The Hub keeps no empty folders.
    assert all((tmp_path / "slim" / module["path"] / "config.json").is_file() for module in modules)
    assert json.loads((tmp_path / "slim/sentence_bert_config.json").read_text()) == text
    assert json.loads((tmp_path / "slim/config_sentence_transformers.json").read_text()) == options
    kept = {path.name for path in (tmp_path / "slim").iterdir()}
    assert {"data_config.json", "tokenizer.json", "modeling_hies.py", "hies_plan.json"} <= kept
    assert "onnx" not in kept
    again = load_sentence(tmp_path / "slim")
    torch.testing.assert_close(embed(again, batch), embed(slim, batch))
    assert again.settings.prompts == settings.prompts
    assert type(load(tmp_path / "slim")).__name__ == "BertModel"


@pytest.mark.parametrize("types", ["sentence_transformers.models.", "sentence_transformers.base.modules.x."])
def test_old_and_new_names_of_modules(types: str, tmp_path: Path) -> None:
    settings = settings_of(sentence_folder(tmp_path / "dense", types=types))
    assert [type(module).__name__ for module in settings.readout] == ["Pooling", "Normalize"]
    assert settings.max_length == 16


def test_a_bare_encoder_needs_a_pooling(tmp_path: Path) -> None:
    bert_encoder().save_pretrained(tmp_path / "bare")
    with pytest.raises(RequestError, match=r"needs pooling: mean, cls, last, max, but .*bare came without"):
        settings_of(tmp_path / "bare")
    with pytest.raises(RequestError, match="pooling must be one of mean, cls, last, max, got 'sum'"):
        settings_of(tmp_path / "bare", pooling="sum")
    settings = settings_of(tmp_path / "bare", pooling="last", normalize=True)
    batch = text_batch(labels=False)
    last = torch.stack([row[-1] for row in tokens_of(tmp_path / "bare", batch)])
    expected = last / last.norm(dim=1, keepdim=True)
    torch.testing.assert_close(embed(load_encoder(settings), batch), expected, atol=1e-6, rtol=1e-5)
    assert settings.max_length == 64
    folder = sentence_folder(tmp_path / "whole")
    with pytest.raises(RequestError, match=r"whole is a SentenceTransformer with its own, got pooling: mean; leave"):
        settings_of(folder, pooling="mean")


def test_an_encoder_that_was_saved_with_another_head_and_no_pooler(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=100, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=6)
    masked = BertForMaskedLM(config).eval()
    folder = sentence_folder(tmp_path / "dense", [], encoder=masked)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    model = load_sentence(folder)
    batch = text_batch(labels=False)
    with torch.no_grad():
        hidden = masked.bert(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    torch.testing.assert_close(embed(model, batch), (hidden * mask).sum(1) / mask.sum(1), atol=1e-6, rtol=1e-5)
    slim, plan = cut(model)
    save_slim(slim, tmp_path / "slim", plan=plan, batch=batch)
    torch.testing.assert_close(embed(load_sentence(tmp_path / "slim"), batch), embed(slim, batch))
    assert load(tmp_path / "slim").pooler is None


def test_a_config_that_names_no_class(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "dense")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "architectures"}))
    assert type(load_sentence(folder).auto_model) is BertModel


def test_weights_of_older_folders_are_read(tmp_path: Path) -> None:
    layer = dense(WIDTH, 8)
    folder = sentence_folder(tmp_path / "dense", [layer])
    (folder / "2_Dense/model.safetensors").unlink()
    torch.save(layer[2], folder / "2_Dense/pytorch_model.bin")
    torch.testing.assert_close(load_sentence(folder).readout[1].linear.weight.data, layer[2]["linear.weight"])
    save_file({"linear.weight": torch.ones(3, 3)}, folder / "2_Dense/model.safetensors")
    with pytest.raises(RequestError, match="2_Dense must be those that its config describes"):
        settings_of(folder)
    for name in ("model.safetensors", "pytorch_model.bin"):
        (folder / "2_Dense" / name).unlink()
    with pytest.raises(RequestError, match="2_Dense must hold the weights of its module, but .*: FileNotFoundError"):
        settings_of(folder)


def test_a_damaged_tokenizer_config_is_refused(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "dense", text={"max_seq_length": None})
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 5')
    with pytest.raises(RequestError, match="tokenizer_config.json is no JSON"):
        settings_of(folder)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "colbert": (
        {"layers": [], "options": {"model_type": "MultiVectorEncoder"}},
        "must be a SentenceTransformer, .* but is a MultiVectorEncoder",
    ),
    "sparse": (
        {"layers": [("SpladePooling", {}, {})]},
        "must be a Transformer, a Pooling, .*SpladePooling",
    ),
    "own code": ({"types": "modeling_own."}, "code in a checkpoint is never run, but .* is modeling_own.Transformer"),
    "two poolings": ({"layers": [("Pooling", {}, {})]}, "must be a Transformer, a Pooling, and then any of Dense"),
    "prompt left out": (
        {"pooling": MEAN | {"include_prompt": False}, "options": {"prompts": {"query": "q: "}}},
        "pooling must include the prompt's tokens",
    ),
    "dense of tokens": (
        {"layers": [dense(WIDTH, 4, module_input_name="token_embeddings")]},
        "2_Dense module_input_name: Input should be 'sentence_embedding', got 'token_embeddings'; give",
    ),
    "residual": (
        {"layers": [dense(WIDTH, WIDTH, use_residual=True)]},
        "use_residual: Input should be False",
    ),
    "activation": (
        {"layers": [dense(WIDTH, 4, activation_function="os.system")]},
        "must be a class of torch.nn that needs no arguments, but that of .* is 'os.system'",
    ),
    "mode": ({"pooling": {"pooling_mode": "median"}}, "pooling_mode.* Input should be 'cls', .*, got 'median'"),
    "images": (
        {"text": {"modality_config": {"image": {}, "text": {}}}},
        "must embed texts as they are, but .* takes image, text",
    ),
    "no default prompt": (
        {"options": {"prompts": {}, "default_prompt_name": "other"}},
        "has no prompt named 'other', its default; correct it there",
    ),
    "damaged": ({"text": {"max_seq_length": "long"}}, "max_seq_length: .* got 'long'"),
    "similarity": ({"options": {"similarity_fn_name": "maxsim"}}, "'manhattan', got 'maxsim'; correct it there"),
    "chat": (
        {"text": {"modality_config": {"message": {}, "text": {}}}},
        "must embed texts as they are, but .* takes message, text",
    ),
    "unknown field": (
        {"text": {"pooling": "x"}},
        "may change the embeddings, but in .* pooling: is not known, got 'x'",
    ),
    "expansion": ({"text": {"query_expansion": {"strategy": "fixed"}}}, "query_expansion: Input should be None"),
    "other tokenizer": ({"text": {"tokenizer_name_or_path": "a/b"}}, "tokenizer_name_or_path: Input should be None"),
    "other config": (
        {"text": {"config_args": {"num_hidden_layers": 1}}},
        "has config_kwargs with num_hidden_layers: 1; take it out .*, or write what is the model's",
    ),
    "tokenizer's class": (
        {"text": {"tokenizer_args": {"do_lower_case": True}}},
        "do_lower_case: is not known, got True",
    ),
    "tokenizer's call": (
        {"text": {"processing_kwargs": {"text": {"truncation": "only_first"}}}},
        "processing_kwargs.text.truncation: Input should be True or 'longest_first'",
    ),
    "model's class": (
        {"text": {"model_args": {"rope_theta": 7}}},
        "model_kwargs.rope_theta.*: Input should be 'dtype'",
    ),
    "pooling": ({"pooling": MEAN | {"weights": [1]}}, r"1_Pooling weights: is not known, got \[1\]"),
}


def test_what_a_folder_asks_of_texts_is_read_and_kept(tmp_path: Path) -> None:
    kept = {
        "query_length": 9,
        "document_length": 700,
        "tokenizer_args": {"model_max_length": 14, "truncation_side": "left", "use_fast": True},
        "model_args": {"dtype": "float32"},
        "processing_kwargs": {"text": {"add_special_tokens": False}, "image": {"size": 2}},
    }
    nothing = {"config_args": {"hidden_size": WIDTH}, "modality_config": None}
    options = {"similarity_fn_name": "manhattan", "truncate_dim": 5}
    text = {"max_seq_length": 16} | kept | nothing
    model = load_sentence(sentence_folder(tmp_path / "dense", [], text=text, options=options))
    asked = model.settings
    assert asked.lengths == {"query": 9, "document": 64}  # what the model takes
    assert (asked.max_length, asked.special_tokens, asked.tokenizer) == (14, False, {"truncation_side": "left"})
    assert (asked.similarity, asked.truncate_dim, model.dimension) == ("manhattan", 5, 5)
    batch = text_batch(labels=False)
    pooled = torch.stack([row.mean(0) for row in tokens_of(tmp_path / "dense", batch)])
    torch.testing.assert_close(embed(model, batch), pooled[:, :5], atol=1e-6, rtol=1e-5)
    slim, plan = cut(model)
    save_slim(slim, tmp_path / "slim", plan=plan, batch=batch)
    written = {"max_seq_length": 14, "do_lower_case": False} | kept
    assert json.loads((tmp_path / "slim/sentence_bert_config.json").read_text()) == written
    assert json.loads((tmp_path / "slim/config_sentence_transformers.json").read_text()) == options
    again = settings_of(tmp_path / "slim")
    names = ("max_length", "prompts", "lower", "lengths", "special_tokens", "tokenizer")
    assert [getattr(again, name) for name in names] == [getattr(asked, name) for name in names]
    assert every_length(tmp_path / "every") == dict.fromkeys(("query", "document", "text"), 8)


def every_length(folder: Path) -> dict[str, int]:
    """Return the lengths that a folder asks for by arguments of the tokenizer's call, of which the common ones win."""
    called = {"text": {"max_length": 9}, "common": {"max_length": 8}}
    found = settings_of(sentence_folder(folder, text={"query_length": 5, "processing_kwargs": called}))
    return dict(found.lengths)


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_pruned_is_refused(name: str, tmp_path: Path) -> None:
    given, message = BAD[name]
    with pytest.raises(RequestError, match=message):
        settings_of(sentence_folder(tmp_path / "model", **given))


def test_a_plan_applies_to_a_sentence_transformer(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "dense", [dense(WIDTH, 8), ("Normalize", {}, {})])
    slim, plan = cut(load_sentence(folder))
    applied = apply_plan(plan, folder, tmp_path / "slim")
    assert applied.slim_bytes < applied.dense_bytes
    batch = text_batch(labels=False)
    torch.testing.assert_close(embed(load_sentence(tmp_path / "slim"), batch), embed(slim, batch))


def test_a_transformer_in_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "dense")
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "0_Transformer").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(folder / "0_Transformer" / name)
    (folder / "sentence_bert_config.json").rename(folder / "0_Transformer" / "sentence_bert_config.json")
    assert settings_of(folder).encoder == folder / "0_Transformer"
    slim, plan = cut(load_sentence(folder))
    apply_plan(plan, folder, tmp_path / "slim")
    batch = text_batch(labels=False)
    torch.testing.assert_close(embed(load_sentence(tmp_path / "slim"), batch), embed(slim, batch))
    assert (tmp_path / "slim/tokenizer.json").is_file()
    assert settings_of(tmp_path / "slim").max_length == 16
    # The commands take the folder too.
    assert contents(folder) is Contents.CHECKPOINT
    assert hies("inspect", folder) == 0


def test_the_files_of_a_cross_encoder_come_along(tmp_path: Path) -> None:
    model = bert(num_labels=1)
    model.save_pretrained(tmp_path / "dense")
    files = cross_encoder_files({"activation_fn": "torch.nn.modules.linear.Identity", "prompts": {}}, 32)
    for name, content in files.items():
        (tmp_path / "dense" / name).write_text(json.dumps(content))
    modules = find_modules(model, text_batch(labels=False), kinds=("attention",))
    plan = PruningPlan(kept=random_neurons(modules, uniform=False), criterion="random")
    apply_plan(plan, tmp_path / "dense", tmp_path / "slim")
    assert {name: json.loads((tmp_path / "slim" / name).read_text()) for name in files} == files


def test_what_a_cross_encoder_asks_for_is_read_or_refused(tmp_path: Path) -> None:
    model = bert(num_labels=1)
    model.save_pretrained(tmp_path / "dense")
    options = {"prompts": {"q": "query: "}, "default_prompt_name": None}

    def ask(options: dict[str, Any], **text: Any) -> Any:
        files = cross_encoder_files(options, 32)
        files["sentence_bert_config.json"] |= text
        for name, content in files.items():
            (tmp_path / "dense" / name).write_text(json.dumps(content))
        return cross_encoder_of(tmp_path / "dense", model.config)

    found = ask(options, processing_kwargs={"text": {"max_length": 9}}, do_lower_case=True, query_length=3)
    assert (found.max_length, found.lower) == (9, True)
    for asked, length in ((12.0, "12"), (1e30, "None")):  # as transformers writes a tokenizer without a limit
        assert repr(ask(options, processor_kwargs={"model_max_length": asked}).max_length) == length
    with pytest.raises(RequestError, match="must read its pairs without a prompt, but .* has 'q' by default; set its"):
        ask(options | {"default_prompt_name": "q"})
    with pytest.raises(RequestError, match="a CrossEncoder, has add_special_tokens: false; take it out"):
        ask(options, processing_kwargs={"text": {"add_special_tokens": False}})
    with pytest.raises(RequestError, match="for sequence-classification must give logits, but .* is for fill-mask"):
        ask(options, transformer_task="fill-mask")
    ask(options)
    entry = json.loads((tmp_path / "dense/modules.json").read_text())[0]
    head = entry | {"path": "1_Dense", "type": "sentence_transformers.base.modules.dense.Dense"}
    (tmp_path / "dense/modules.json").write_text(json.dumps([entry, head]))
    with pytest.raises(
        RequestError, match="must be a single Transformer with its own head, but .* is Transformer, Den"
    ):
        cross_encoder_of(tmp_path / "dense", model.config)


@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("kind", ["T5", "MT5", "UMT5", "LongT5"])
def test_the_encoder_of_an_encoder_decoder(kind: str, decodes: bool, tmp_path: Path) -> None:
    encoder = t5_encoder(kind)
    folder = sentence_folder(tmp_path / "dense", [], encoder=encoder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_encoder_decoder": decodes}))
    model, batch = load_sentence(folder), t5_batch()
    assert type(model.auto_model) is type(encoder)
    with torch.no_grad():
        hidden, mask = encoder(**batch).last_hidden_state, batch["attention_mask"][..., None]
    torch.testing.assert_close(embed(model, batch), (hidden * mask).sum(1) / mask.sum(1), atol=1e-5, rtol=1e-5)
    modules = find_modules(model, batch, kinds=("attention", "mlp"))
    kept = random_neurons(modules, uniform=False)
    slim = prune_units(model, kept, modules)
    save_slim(slim, tmp_path / "slim", plan=PruningPlan(kept=kept, criterion="random"), batch=batch)
    # sentence-transformers would load the stock class, whose layers are of one size.
    assert json.loads((tmp_path / "slim/modules.json").read_text())[0]["type"] == "modeling_hies.Transformer"
    assert isinstance(slim, TextEncoder)
    torch.testing.assert_close(embed(load_sentence(tmp_path / "slim"), batch), embed(slim, batch))


def test_an_encoder_whose_class_is_not_exported_is_refused(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "dense")
    (folder / "config.json").write_text(json.dumps({"model_type": "marian", "architectures": ["MarianModel"]}))
    with pytest.raises(RequestError, match="a class of its own that transformers exports, but that of marian, which"):
        encoder_class(folder)


def test_models_on_the_hub_and_then_in_its_cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sentence_folder(tmp_path / "dense", [dense(WIDTH, 8), ("Normalize", {}, {})])
    bert_encoder().save_pretrained(tmp_path / "bare")
    for name, source in (("user/embedder", folder), ("user/bare", tmp_path / "bare")):
        files = {str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*") if path.is_file()}
        hub.add(name, files)
    ids = torch.tensor([[2, 5, 6, 3]])
    expected = load_sentence(folder)(ids).sentence_embedding
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        torch.testing.assert_close(load_sentence("user/embedder")(ids).sentence_embedding, expected)
        assert not is_sentence_transformer("user/bare")
        assert settings_of("user/bare", pooling="cls").max_length == 64
