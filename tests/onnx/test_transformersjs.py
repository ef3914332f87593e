"""Our graphs in transformers.js, compared with torch: in Node, and in the ONNX Runtime of browsers.

`scripts/try transformersjs` installs it and runs this; `HIES_NODE_TRANSFORMERS` names the folder that has it.
"""

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.cuts import random_neurons
from support.models import (
    GENERATIVE_WORDS,
    bert,
    causal_lm,
    generative_tokenizer,
    image_batch,
    save_text_model,
    text_batch,
    vit,
)
from support.stories import stories
from support.tiers import table_of
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer, PreTrainedModel
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from hies_export import PruningPlan, find_modules, load_runtime, prune_units, quantize_onnx, save_slim
from hies_export.data.batches import first_output
from hies_export.forms.formats import add_graphs
from hies_export.forms.onnx import export
from hies_export.forms.runtimes.base import Runtime

PACKAGES = Path(os.environ.get("HIES_NODE_TRANSFORMERS", Path(__file__).parents[2] / ".transformersjs"))
WORKER = Path(__file__).parents[1] / "support" / "transformersjs.mjs"

pytestmark = [
    pytest.mark.transformersjs,
    pytest.mark.skipif(
        not (PACKAGES / "node_modules" / "@huggingface" / "transformers").is_dir(),
        reason="no @huggingface/transformers: run scripts/try transformersjs",
    ),
]

# How far a graph in 8 bits may be from itself on another processor, as a share of the largest logit.
NEAR = 1e-2

table = table_of(
    "HIES_TRANSFORMERSJS_TABLE", "model", "dtype", "ONNX Runtime for", "outputs differ by", "greedy tokens equal"
)


@dataclass(frozen=True)
class Case:
    """A model with its processor, a batch, and what to ask a pipeline of transformers.js, and what it must answer."""

    model: PreTrainedModel
    processor: Any
    batch: dict[str, torch.Tensor]
    loads: str
    task: str
    asked: str
    wanted: Callable[[PreTrainedModel], Any]
    new_tokens: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)


def shares(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    return {model.config.id2label[i]: p for i, p in enumerate(first_output(model, batch)[0].softmax(-1).tolist())}


def bert_case(folder: Path) -> Case:
    tokenizer, text = AutoTokenizer.from_pretrained(save_text_model(folder / "model")), "good nice dull"
    classify = {"loads": "AutoModelForSequenceClassification", "task": "text-classification"}
    return Case(
        bert(num_labels=2),
        tokenizer,
        text_batch(labels=False),
        **classify,
        asked=text,
        wanted=lambda model: shares(model, dict(tokenizer(text, return_tensors="pt"))),
        arguments={"top_k": None},
    )


def vit_case(folder: Path) -> Case:
    processor = ViTImageProcessorPil(size={"height": 16, "width": 16}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8))
    image.save(folder / "image.png")
    return Case(
        vit(),
        processor,
        image_batch(labels=False),
        loads="AutoModelForImageClassification",
        task="image-classification",
        asked=str(folder / "image.png"),
        wanted=lambda model: shares(model, dict(processor(image, return_tensors="pt"))),
        arguments={"top_k": None},
    )


def decoder_case(
    model: PreTrainedModel, tokenizer: Any, batch: dict[str, torch.Tensor], text: str, new_tokens: int
) -> Case:
    def wanted(slim: PreTrainedModel) -> str:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        return str(tokenizer.decode(generate(slim, {"input_ids": ids}, new_tokens)[0], skip_special_tokens=True))

    how = {"loads": "AutoModelForCausalLM", "task": "text-generation", "asked": text}
    # Without being told, the pipeline begins a text as the tokenizer does only where its config has `add_bos_token`.
    arguments = {"max_new_tokens": new_tokens, "do_sample": False, "add_special_tokens": True}
    return Case(model, tokenizer, batch, **how, wanted=wanted, new_tokens=new_tokens, arguments=arguments)


def llama_case(folder: Path) -> Case:
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :3] = 0
    batch = {"input_ids": torch.randint(6, 22, (2, 9)) * mask, "attention_mask": mask}
    # Heads of width 8 where the config's width by heads is 4, and no token that ends a text.
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    model = causal_lm(vocab_size=len(GENERATIVE_WORDS), eos_token_id=None, **sizes)
    tokenizer = generative_tokenizer()
    # Splits that remove what they split at keep it in transformers.js.
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    return decoder_case(model, tokenizer, batch, "a b c", 16)


def generate(model: PreTrainedModel, batch: dict[str, torch.Tensor], new_tokens: int) -> list[list[int]]:
    with torch.no_grad():
        tokens = model.generate(**batch, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)
    return list(tokens.tolist())


def in_transformersjs(folder: Path, case: Case, runs: Sequence[dict[str, Any]], asked: Sequence[dict[str, Any]]) -> Any:
    """Return what transformers.js answers about models in a folder."""
    kinds = {name: "float32" if t.is_floating_point() else "int64" for name, t in case.batch.items()}
    inputs = {
        name: {"type": kinds[name], "dims": list(t.shape), "data": t.flatten().tolist()}
        for name, t in case.batch.items()
    }
    request = {"root": f"{folder}/", "class": case.loads, "inputs": inputs, "new_tokens": case.new_tokens}
    (folder / "request.json").write_text(json.dumps(request | {"runs": runs, "asked": asked}))
    command = ["node", str(WORKER), str(PACKAGES), str(folder / "request.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def apart(case: Case, found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference of logits, of a decoder's at the tokens that are no padding."""
    difference = (found - wanted).abs()
    return float((difference[case.batch["attention_mask"].bool()] if case.new_tokens else difference).max())


def equal(found: Sequence[Sequence[int]] | None, wanted: Sequence[Sequence[int]], case: Case) -> str:
    """Say how many of the new tokens are equal up to the first that is not."""
    if found is None:
        return ""
    length = case.batch["input_ids"].shape[1]
    rows = [[a == b for a, b in zip(f, w, strict=True)][length:] for f, w in zip(found, wanted, strict=True)]
    return f"{sum(len(row) if all(row) else row.index(False) for row in rows)} of {len(rows) * case.new_tokens}"


def below_the_best(runtime: Runtime, case: Case, tokens: Sequence[Sequence[int]]) -> float:
    """Return how far below the largest logit that of a generated token is, at most."""
    ids, length = torch.tensor(tokens), case.batch["input_ids"].shape[1]
    mask = torch.cat([case.batch["attention_mask"], torch.ones_like(ids[:, length:])], dim=1)
    logits = runtime.prediction({"input_ids": ids, "attention_mask": mask})[:, length - 1 : -1]
    return float((logits.amax(-1) - logits.gather(-1, ids[:, length:, None])[..., 0]).max())


CASES: dict[str, Callable[[Path], Case]] = {"bert": bert_case, "vit": vit_case, "llama": llama_case}


@pytest.mark.parametrize("name", CASES)
def test_a_folder_computes_in_transformersjs_what_torch_does(name: str, tmp_path: Path, table: list[Any]) -> None:
    case = CASES[name](tmp_path)
    modules = find_modules(case.model, case.batch, kinds=("attention", "mlp"))
    plan = PruningPlan(kept=random_neurons(modules, uniform=False), criterion="random")
    slim = prune_units(case.model, plan, modules)
    save_slim(slim, tmp_path / "slim", plan=plan, batch=case.batch, processor=case.processor)
    check(f"tiny {name}, uneven", case, slim, tmp_path, table)


@pytest.mark.parametrize("how", ["dense", "uniform", "uneven"])
def test_the_real_llama_writes_what_torch_writes(how: str, tmp_path: Path, table: list[Any]) -> None:
    model, tokenizer = stories(how)
    batch = dict(tokenizer(["Once upon a time"], return_tensors="pt", return_token_type_ids=False))
    model.save_pretrained(tmp_path / "slim")
    tokenizer.save_pretrained(tmp_path / "slim")
    check(f"stories260K, {how}", decoder_case(model, tokenizer, batch, "Once upon a time", 64), model, tmp_path, table)


def check(name: str, case: Case, slim: PreTrainedModel, folder: Path, table: list[Any]) -> None:
    """Put the graphs into the checkpoint's folder, as a run does, and compare what transformers.js computes there."""
    exported = export.export_onnx(slim, folder / "onnx", batch=case.batch, processor=case.processor)
    quantised = quantize_onnx(exported, folder / "onnx-int8", batch=case.batch, smallest=1)
    add_graphs([exported, quantised], folder / "slim")
    runs = [
        {"folder": "slim", "options": {"dtype": dtype}, "web": str(file) if web else None}
        for dtype, file in (("fp32", exported.file), ("q8", quantised.file))
        for web in (False, True)
    ]
    flat = {"dtype": "fp32", "subfolder": ""}
    ask = {"task": case.task, "folder": "onnx", "options": flat, "input": case.asked, "arguments": case.arguments}
    answer = in_transformersjs(folder, case, runs, [ask])
    wanted = first_output(slim, case.batch)
    tokens = generate(slim, case.batch, case.new_tokens) if case.new_tokens else None
    here = load_runtime("onnxruntime-cpu", quantised.folder)
    for run, found in zip(runs, answer["runs"], strict=True):
        logits, dtype = torch.tensor(found["logits"]).view_as(wanted), run["options"]["dtype"]
        off = apart(case, logits, wanted)
        said = "" if tokens is None else equal(found["tokens"], tokens, case)
        table.append((name, dtype, "browsers" if run["web"] else "Node", f"{off:.1e}", said))
        if dtype == "fp32":
            assert off < 1e-4
            assert found["tokens"] == tokens
            continue
        # Rounding to 8 bits changes tokens, but transformers.js must compute what the graph computes here.
        near = NEAR * float(wanted.abs().max())
        assert apart(case, logits, here.prediction(case.batch)) < near
        assert tokens is None or below_the_best(here, case, found["tokens"]) < near
    (said,) = answer["asked"]
    expected = case.wanted(slim)
    if case.new_tokens:
        assert said[0]["generated_text"] == expected
    else:
        assert {row["label"]: row["score"] for row in said} == pytest.approx(expected, abs=1e-4)


def test_weights_beside_a_graph_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "INSIDE_BYTES", 0)
    case = llama_case(tmp_path)
    exported = export.export_onnx(case.model, tmp_path / "onnx", batch=case.batch, processor=case.processor)
    assert (exported.folder / "model.onnx_data").is_file()
    options = {"dtype": "fp32", "subfolder": "", "use_external_data_format": True}
    answer = in_transformersjs(tmp_path, case, [{"folder": "onnx", "options": options, "web": None}], [])
    assert answer["runs"][0]["tokens"] == generate(case.model, case.batch, case.new_tokens)
