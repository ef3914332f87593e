"""Served by older Optimum: our exports in transformers 4 with optimum-onnx, and their pruned checkpoints here.

`scripts/try interop` makes the environment and runs this; `HIES_INTEROP_PYTHON` names its interpreter.
"""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from PIL import Image
from support.architectures import tiny
from support.checkpoints import saved_by_version4
from support.cuts import random_cut, random_neurons
from support.hub import TOKEN, Hub
from support.models import bert, causal_lm, generative_tokenizer, image_batch, save_text_model, shake, text_batch, vit
from support.reports import make_report
from support.tiers import run_in, table_of
from transformers import AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import hies_export
from hies_export import PruningPlan, find_modules, load_runtime, prune_units, push_to_hub, quantize_onnx, save_slim
from hies_export.data.batches import first_output
from hies_export.forms.onnx import export
from hies_export.kinds import BOTH, MLP
from hies_export.slim.config import is_slim

ROOT = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("HIES_INTEROP_PYTHON", ROOT / ".interop" / "bin" / "python"))

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not PYTHON.is_file(), reason="no environment of transformers 4: run scripts/try interop"),
    # What the Hub's client says of itself where it sends bytes.
    pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning"),
]


table = table_of("HIES_INTEROP_TABLE", "model", "loaded by", "from", "max abs difference", "pipeline")


def old_stack(*arguments: object, environment: dict[str, str]) -> None:
    run_in(PYTHON, "old_stack.py", *arguments, environment=environment)


def make_bert(folder: Path) -> tuple[PreTrainedModel, Any, dict[str, torch.Tensor], list[str]]:
    tokenizer = AutoTokenizer.from_pretrained(save_text_model(folder / "model"))
    return bert(num_labels=2), tokenizer, text_batch(labels=False), ["good nice dull", "bad"]


def make_vit(folder: Path) -> tuple[PreTrainedModel, Any, dict[str, torch.Tensor], list[str]]:
    processor = ViTImageProcessorPil(size={"height": 16, "width": 16}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    names = ["one.png", "two.png"]
    for name in names:
        Image.fromarray(np.random.default_rng(len(name)).integers(0, 255, (16, 16, 3), np.uint8)).save(folder / name)
    return vit(), processor, image_batch(labels=False), names


def make_llama(folder: Path) -> tuple[PreTrainedModel, Any, dict[str, torch.Tensor], list[str]]:
    """Head width 8 where hidden size by heads is 4; after the cut the layers differ in key/value heads."""
    model = causal_lm(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    batch = {"input_ids": torch.randint(6, 32, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.int64)}
    return model, generative_tokenizer(padding_side="left"), batch, ["a b c", "d"]


CASES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "bert": (make_bert, "ORTModelForSequenceClassification", "text-classification"),
    "vit": (make_vit, "ORTModelForImageClassification", "image-classification"),
    "llama": (make_llama, "ORTModelForCausalLM", "text-generation"),
}


# Model type -> its rotary parameters, beside a base of 500.
PLAIN: dict[str, dict[str, Any]] = {
    "llama": {
        **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "qwen2": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    # Not the defaults of transformers 4.
    **{name: {"partial_rotary_factor": 0.25} for name in ("glm", "nemotron", "phi", "phi3", "stablelm")},
    "gpt_neox": {"partial_rotary_factor": 1.0},
    **{name: {} for name in ("arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "glm4", "granite")},
    **{name: {} for name in ("hunyuan_v1_dense", "ministral", "mistral", "olmo", "qwen3", "seed_oss", "smollm3")},
    "starcoder2": {},
    **{name: {} for name in ("apertus", "gemma2", "vaultgemma")},
}
# The default attention of transformers 4 has no soft cap of the scores, of which these have one.
CAPPED = ("gemma2", "vaultgemma")


def class_of(model_type: str) -> str:
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def answers_here(model: PreTrainedModel, processor: Any, task: str, folder: Path, asked: list[str]) -> Any:
    """What the pipeline of this transformers makes of the torch model."""
    from transformers import pipeline

    if task == "image-classification":
        ask = pipeline(task, model=model, image_processor=processor)
        return ask([Image.open(folder / name) for name in asked], top_k=None)
    options = {"max_new_tokens": 12, "do_sample": False} if task == "text-generation" else {"top_k": None}
    return pipeline(task, model=model, tokenizer=processor)(asked, **options)


@pytest.mark.filterwarnings("ignore")  # the pipelines' own
@pytest.mark.parametrize("place", ["folder", "Hub"])
@pytest.mark.parametrize("name", CASES)
def test_exports_of_uneven_heads_are_served(
    name: str, place: str, hub: Hub, table: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, class_name, task = CASES[name]
    dense, processor, batch, asked = make(tmp_path)
    slim, plan, _ = random_cut(dense, batch)
    heads = [len(kept.kept_groups) for kept in plan.kept.values()]
    assert len(set(heads)) > 1
    if place == "Hub":
        # As large exports are: weights beside the graph.
        monkeypatch.setattr(export, "INSIDE_BYTES", 0)
    run = tmp_path / "run"
    save_slim(slim, run / "slim", plan=plan, batch=batch, processor=processor)
    export.export_onnx(slim, run / "onnx", batch=batch, processor=processor)
    assert (run / "onnx" / "model.onnx_data").exists() == (place == "Hub")
    np.savez(tmp_path / "inputs.npz", **{key: value.numpy() for key, value in batch.items()})
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    source, subfolder = str(run / "onnx"), ""
    environment = hub.environment(tmp_path / "home", TOKEN if place == "Hub" else None)
    if place == "Hub":
        (run / "report.json").write_text(replace(make_report(), task=task).to_json())
        push_to_hub(run, "user/slim", license="mit", private=True)
        source, subfolder = "user/slim", "onnx"
    else:
        environment["HF_HUB_OFFLINE"] = "1"
    old_stack("load", class_name, task, source, subfolder, tmp_path, environment=environment)
    found = torch.from_numpy(np.load(tmp_path / "output.npz")["logits"])
    difference = (found - first_output(slim, batch)).abs().max().item()
    here = answers_here(slim, processor, task, tmp_path, asked)
    there = json.loads((tmp_path / "answers.json").read_text())
    if task == "text-generation":
        tokens = slim.generate(**batch, max_new_tokens=12, do_sample=False)
        assert np.load(tmp_path / "output.npz")["tokens"].tolist() == tokens.tolist()
        # The pipeline of transformers 4 joins prompt and answer without the space between the words of this tokenizer.
        texts = [[row[0]["generated_text"].replace(" ", "") for row in answers] for answers in (here, there)]
        assert texts[0] == texts[1]
        said = f"equal tokens ({tokens.shape[0]} x {tokens.shape[1] - batch['input_ids'].shape[1]}), equal text"
    else:
        labels = [[entry["label"] for entry in row] for row in here]
        assert [[entry["label"] for entry in row] for row in there] == labels
        pairs = zip(here, there, strict=True)
        apart = max(abs(a["score"] - b["score"]) for x, y in pairs for a, b in zip(x, y, strict=True))
        assert apart < 1e-5
        said = f"equal labels, scores {apart:.1e}"
    shown = f"{name}, {'/'.join(map(str, heads))} heads"
    table.append((shown, class_name, place + (", external weights" if subfolder else ""), f"{difference:.1e}", said))
    assert difference < 1e-4


def test_eight_bits_are_served_and_made_by_optimum(hub: Hub, table: list[Any], tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 192, "num_labels": 2}
    dense, batch = bert(**sizes), text_batch(labels=False)
    slim, _, _ = random_cut(dense, batch)
    exported = export.export_onnx(slim, tmp_path / "onnx", batch=batch)
    own = quantize_onnx(exported, tmp_path / "onnx-int8", batch=batch)
    np.savez(tmp_path / "inputs.npz", **{key: value.numpy() for key, value in batch.items()})
    environment = hub.environment(tmp_path / "home", None) | {"HF_HUB_OFFLINE": "1"}
    old_stack("quantise", tmp_path, environment=environment)
    expected, found = first_output(slim, batch).numpy(), np.load(tmp_path / "output.npz")
    runtime = load_runtime("onnxruntime-cpu-int8", own.folder)
    here = runtime.fetch(runtime.run(runtime.prepare(batch)))["logits"]
    assert np.abs(found["onnx-int8"] - here).max() < 1e-4 * np.abs(here).max()
    # Optimum's quantiser sees every linear layer, queries, keys and values among them.
    theirs = [node.op_type for node in onnx.load(tmp_path / "optimum" / "model_quantized.onnx").graph.node]
    assert theirs.count("MatMul") + theirs.count("Gemm") == 0
    for name, who in (("onnx-int8", "in 8 bits by hies_export"), ("optimum", "in 8 bits by ORTQuantizer")):
        apart = np.sqrt(np.mean((found[name] - expected) ** 2) / np.mean(expected**2))
        assert apart < 0.3
        shown = f"{np.abs(found[name] - expected).max():.1e}"
        table.append(("bert, uneven heads", "ORTModelForSequenceClassification", who, shown, ""))


@pytest.mark.parametrize("model_type", PLAIN)
def test_plain_checkpoints_load_without_code(model_type: str, hub: Hub, table: list[Any], tmp_path: Path) -> None:
    dimensions = tiny(model_type, class_of(model_type))[0].config.to_dict()
    rotary = dimensions["rope_parameters"] | {"rope_theta": 500.0} | PLAIN[model_type]
    # Phi-3 has the factor in a field of its own as well.
    dimensions |= {key: value for key, value in rotary.items() if key in dimensions}
    stock = getattr(transformers, class_of(model_type))
    made = shake(stock(stock.config_class.from_dict(dimensions | {"rope_parameters": rotary})))
    dense = saved_by_version4(made, tmp_path / "dense")
    if model_type == "apertus":  # transformers 4 computes the factors of xIELU in bfloat16 whatever the model is in
        dense = stock.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16)
    batch = {"input_ids": torch.randint(6, 32, (2, 12))}
    # The configs of these two have no field for the width of a head.
    modules = find_modules(dense, batch, kinds=(MLP,) if model_type in ("gpt_neox", "stablelm") else BOTH)
    plan = PruningPlan(kept=random_neurons(modules, uniform=True), criterion="random")
    slim = prune_units(dense, plan, modules)
    assert not is_slim(slim)
    tokenizer = generative_tokenizer()
    save_slim(slim, tmp_path / "slim", plan=plan, batch=batch, processor=tokenizer)
    np.savez(tmp_path / "inputs.npz", **{key: value.numpy() for key, value in batch.items()})
    (tmp_path / "asked.json").write_text(json.dumps(["a b c", "d"]))
    environment = hub.environment(tmp_path / "home") | {"HF_HUB_OFFLINE": "1"}
    attention = "eager" if model_type in CAPPED else ""
    old_stack("plain", attention, tmp_path / "slim", tmp_path, environment=environment)
    found = torch.from_numpy(np.load(tmp_path / "output.npz")["logits"])
    difference = (found - first_output(slim, batch).float()).abs().max().item()
    shown = f"{model_type} without code, RoPE {rotary['rope_type']}{', eager' if attention else ''}"
    shown += ", bfloat16" if slim.dtype == torch.bfloat16 else ""
    tokens = json.loads((tmp_path / "answers.json").read_text())
    assert tokens == tokenizer(["a b c", "d"])["input_ids"]
    table.append((shown, "AutoModelForCausalLM", "folder", f"{difference:.1e}", "equal tokens of texts"))
    assert difference < 1e-4


@pytest.mark.parametrize("model_type", ["bert", "roberta", "electra", "vit", "deit"])
def test_heads_pruned_by_transformers_4_load_here(model_type: str, hub: Hub, table: list[Any], tmp_path: Path) -> None:
    batch = image_batch(labels=False) if model_type in ("vit", "deit") else text_batch(labels=False)
    np.savez(tmp_path / "inputs.npz", **{key: value.numpy() for key, value in batch.items()})
    environment = hub.environment(tmp_path / "home") | {"HF_HUB_OFFLINE": "1"}
    old_stack("prune", model_type, tmp_path, environment=environment)
    assert json.loads((tmp_path / "pruned" / "config.json").read_text())["pruned_heads"]
    expected = torch.from_numpy(np.load(tmp_path / "output.npz")["logits"])
    model = hies_export.load(tmp_path / "pruned")
    difference = (first_output(model, batch) - expected).abs().max().item()
    model.save_pretrained(tmp_path / "slim")
    again = (first_output(hies_export.load(tmp_path / "slim"), batch) - expected).abs().max().item()
    row = (f"{model_type}, pruned_heads", "hies_export.load", "transformers 4", f"{difference:.1e}")
    table.append((*row, f"as slim checkpoint {again:.1e}"))
    assert max(difference, again) < 1e-5
