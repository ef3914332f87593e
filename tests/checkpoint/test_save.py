"""Slim checkpoints written, loaded in every way, and refused; folders that appear whole or not at all."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import tiny
from support.cuts import random_cut, random_plan
from support.models import bert, causal_lm, image_batch, text_batch, vit
from transformers import AutoModel, BertForSequenceClassification, PreTrainedModel

from hies_export import ReloadMismatchError, RequestError, find_modules, load, prune_units, save_slim
from hies_export.checkpoint import save
from hies_export.checkpoint.classes import load_config
from hies_export.checkpoint.save import check_reload
from hies_export.data.batches import first_output
from hies_export.kinds import ATTENTION
from hies_export.model import modeling_hies

# This package cannot be imported here, as on a machine that has only torch and transformers.
ELSEWHERE = """
import json, sys
sys.modules["hies_export"] = None
import torch, transformers
for name, auto_class, remote in json.loads(sys.argv[1]):
    options = {"trust_remote_code": True} if remote else {}
    model = getattr(transformers, auto_class).from_pretrained(name + "/slim", **options).eval()
    torch.save(model(**torch.load(name + "/batch.pt"))[0].detach(), name + "/output.pt")
    print(type(model).__module__)
"""
FOLDERS = {
    "uneven bert": (bert, "AutoModelForSequenceClassification", False, True),
    "uneven bert without its head": (bert, "AutoModel", False, True),
    "uniform bert": (bert, "AutoModelForSequenceClassification", True, True),
    "uneven vit": (vit, "AutoModelForImageClassification", False, True),
    "uniform vit": (vit, "AutoModelForImageClassification", True, False),
}


def test_a_fresh_process_without_this_package(tmp_path: Path) -> None:
    expected = {}
    for name, (make, auto_class, uniform, _) in FOLDERS.items():
        dense = make()
        batch = text_batch(labels=False) if make is bert else image_batch(labels=False)
        slim, plan, _ = random_cut(dense, batch, uniform=uniform)
        save_slim(slim, tmp_path / name / "slim", plan=plan, batch=batch)
        torch.save(batch, tmp_path / name / "batch.pt")
        expected[name] = first_output(slim if auto_class != "AutoModel" else slim.base_model, batch)
    asked = json.dumps([(name, auto_class, remote) for name, (_, auto_class, _, remote) in FOLDERS.items()])
    command = [sys.executable, "-c", ELSEWHERE, asked]
    modules = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout.splitlines()
    for (name, (*_, remote)), module in zip(FOLDERS.items(), modules, strict=True):
        assert module.startswith("transformers_modules." if remote else "transformers.models."), name
        torch.testing.assert_close(torch.load(tmp_path / name / "output.pt"), expected[name], atol=1e-5, rtol=1e-5)


def test_without_trust_stock_classes_fail_loudly_and_load_runs_no_code(tmp_path: Path) -> None:
    slim, plan, _ = random_cut(bert(), text_batch())
    save_slim(slim, tmp_path / "slim", plan=plan, batch=text_batch())
    with pytest.raises(RuntimeError, match="size mismatch|ignore_mismatched_sizes"):
        BertForSequenceClassification.from_pretrained(tmp_path / "slim")
    (tmp_path / "slim" / "modeling_hies.py").write_text("raise RuntimeError('executed')")
    load(tmp_path / "slim")


def test_the_shipped_code_imports_only_torch_and_transformers() -> None:
    tree = ast.parse(Path(modeling_hies.__file__).read_text())
    imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported - set(sys.stdlib_module_names) == {"torch", "transformers"}
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchModel'"):
        modeling_hies.NoSuchModel  # noqa: B018


def test_a_head_that_reshapes_its_batch(tmp_path: Path) -> None:
    """Its base model does not see the row of choices of a sample as such."""

    def choices(model: PreTrainedModel) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 90, (3, 4, 9))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    model, batch = tiny("bert", "BertForMultipleChoice", choices)
    modules = find_modules(model, batch, kinds=(ATTENTION,))
    assert all(module.name.startswith(f"{model.base_model_prefix}.") for module in modules)
    plan = random_plan(modules, uniform=False)
    slim = prune_units(model, plan, modules)
    assert save_slim(slim, tmp_path / "slim", plan=plan, batch=batch) < 1e-4
    with torch.no_grad():
        assert torch.allclose(load(tmp_path / "slim")(**batch)[0], slim(**batch)[0], atol=1e-4)


def test_two_saves_keep_every_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5 renames keys on loading for its own classes only, which can lose weights without an error."""
    batch = image_batch()
    slim, plan, _ = random_cut(vit(), batch)
    save_slim(slim, tmp_path / "one", plan=plan, batch=batch)
    load(tmp_path / "one").save_pretrained(tmp_path / "two")
    load(tmp_path / "two").save_pretrained(tmp_path / "three")
    assert check_reload(slim, tmp_path / "three", batch) < 1e-5
    assert set(load_file(tmp_path / "three" / "model.safetensors")) == set(slim.state_dict())
    # One that AutoModel alone does not find is lost, whether an output shows it or not.
    loads, lost = AutoModel.from_pretrained, {"missing_keys": ["layernorm.weight"], "mismatched_keys": []}
    monkeypatch.setattr(AutoModel, "from_pretrained", lambda *args, **options: (loads(*args, **options)[0], lost))
    with pytest.raises(ReloadMismatchError, match=r"through AutoModel \['vit.layernorm.weight'\] did not"):
        check_reload(slim, tmp_path / "three", batch)


@pytest.mark.parametrize("way", ["loaded", "in half", "large"])
@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_save_that_loads_as_another_model_is_not_kept(
    damage: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "LARGE_BYTES", 0 if way == "large" else save.LARGE_BYTES)
    dtype = torch.float16 if way == "in half" else None
    batch = image_batch()
    slim, plan, _ = random_cut(vit(), batch)
    whole = type(slim).save_pretrained

    def save_damaged(self: PreTrainedModel, path: Path) -> None:
        whole(self, path)
        folder = Path(path)
        weights = load_file(folder / "model.safetensors")
        name = "vit.layers.1.attention.q_proj.weight"
        weights[name] = weights[name] * 1.5
        if damage == "missing":
            del weights[name]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(type(slim), "save_pretrained", save_damaged)
    changed = "has others for vit.layers.1.attention.q_proj" if way == "large" else "differs by"
    match = "q_proj.weight'] did not" if damage == "missing" else changed
    with pytest.raises(ReloadMismatchError, match=match):
        save_slim(slim, tmp_path / "slim", plan=plan, batch=batch, dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_a_large_model_is_not_loaded_beside_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are compared with it, tied and in half precision too, and what the classes make of its config."""
    monkeypatch.setattr(save, "LARGE_BYTES", 0)
    dense = causal_lm(tie_word_embeddings=True).bfloat16()
    batch = {"input_ids": torch.randint(3, 32, (2, 12))}
    for uniform in (True, False):
        slim, plan, _ = random_cut(dense, batch, uniform=uniform)
        folder = tmp_path / str(uniform)
        with monkeypatch.context() as during:
            during.setattr(PreTrainedModel, "from_pretrained", None)
            assert save_slim(slim, folder, plan=plan, batch=batch) == 0
        config = json.loads((folder / "config.json").read_text())
        for field, value, message in (("rms_norm_eps", 0.5, "differs by"), ("vocab_size", 7, "did not")):
            (folder / "config.json").write_text(json.dumps(config | {field: value}))
            with pytest.raises(ReloadMismatchError, match=message):
                check_reload(slim, folder, batch)


BERT = {"model_type": "bert"}
WHOLE = bert().config.to_dict() | {"architectures": ["BertForSequenceClassification"]}


@pytest.mark.parametrize(
    ("config", "read", "message"),
    [
        (None, load, "a model must be a folder with a config.json or a Hub id"),
        (BERT, load, "names none; upgrade transformers, or write the class"),
        (WHOLE | {"architectures": ["TFBertModel"]}, load, r"\['TFBertModel'\]; upgrade .* mean 'BertModel'"),
        (
            WHOLE | {"architectures": ["JinaBertModel"], "auto_map": {"AutoModel": "own.JinaBertModel"}},
            load,
            r"names \['JinaBertModel'\]; it needs code of its own \(auto_map\)",
        ),
        (WHOLE | {"model_type": "bert9"}, load_config, "type known to .* did you mean 'bert'"),
        (WHOLE | {"model_type": None}, load_config, "type known to .* has None; upgrade"),
        (WHOLE | {"use_return_dict": False}, load, "values that its class takes.*; correct it there"),
        (WHOLE | {"quantization_config": {}}, load, "remove quantization_config from its config.json"),
        (WHOLE, load, "must load, but does not: OSError"),
    ],
    ids=["no config", "no class", "old", "own code", "unknown type", "no type", "property", "quantised", "no weights"],
)
def test_a_folder_without_a_model_is_refused(config: Any, read: Any, message: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=message):
        read(tmp_path if config is not None else tmp_path / "nothing")


def test_the_attention_of_a_file_is_torchs(tmp_path: Path) -> None:
    bert(num_hidden_layers=1).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, name in (("attn_implementation", "kernels-community/flash-attn"), ("_attn_implementation", "fast")):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: name}))
        assert load(tmp_path).config._attn_implementation == "sdpa"
        assert load(tmp_path, attn_implementation="eager").config._attn_implementation == "eager"
        assert load_config(tmp_path)._attn_implementation is None
