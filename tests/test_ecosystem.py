"""A slim model is an ordinary model: pipelines, Trainer, PEFT, torch.compile, half precision, and pruning again.

All are uneven, so their folders carry code, and each is used as it comes back from disk.
"""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from support.cuts import plan_of, random_cut
from support.models import WORDS, bert, causal_lm, generative_tokenizer, save_text_model, shake, text_batch, vit
from support.tolerance import assert_near, max_abs
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import hies_export
from hies_export.checkpoint.save import check_reload
from hies_export.data.batches import first_output
from hies_export.slim.config import is_slim

SENTENCES = ["good fine", "bad poor dull", "great", "nice bright dark awful"]
IDS = {"input_ids": torch.arange(20).view(2, 10) + 5}
THREE_GROUPS = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
WORD_IDS = {"input_ids": IDS["input_ids"] % 15}


def save_cut(dense: PreTrainedModel, batch: dict[str, torch.Tensor], folder: Path, processor: Any) -> Path:
    """Remove four heads of ten and save."""
    slim, plan, _ = random_cut(dense, batch)
    assert is_slim(slim)
    hies_export.save_slim(slim, folder, plan=plan, batch=batch, processor=processor)
    return folder


@pytest.fixture(scope="module")
def slim_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT classifier with its tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("bert")
    dense = save_text_model(folder / "dense", num_hidden_layers=2)
    return save_cut(hies_export.load(dense), WORD_IDS, folder / "slim", AutoTokenizer.from_pretrained(dense))


@pytest.fixture(scope="module")
def slim_decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA of three key/value groups of two, as a folder."""
    return save_cut(causal_lm(**THREE_GROUPS), IDS, tmp_path_factory.mktemp("decoder") / "slim", generative_tokenizer())


def test_a_text_pipeline(slim_bert: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(slim_bert)
    model = hies_export.load(slim_bert)
    with torch.no_grad():
        logits = model(**tokenizer(SENTENCES, padding=True, return_tensors="pt")).logits
    expected = logits.softmax(-1).max(-1)
    # By the folder's own code, and around a model that is already here.
    for options in ({"model": str(slim_bert), "trust_remote_code": True}, {"model": model, "tokenizer": tokenizer}):
        found = pipeline("text-classification", **options)(SENTENCES, batch_size=4)
        assert [row["label"] for row in found] == [f"LABEL_{i}" for i in expected.indices]
        assert [row["score"] for row in found] == pytest.approx(expected.values.tolist(), abs=1e-5)


def test_an_image_pipeline(tmp_path: Path) -> None:
    processor = ViTImageProcessorPil(size={"height": 16, "width": 16})
    images = [PIL.Image.fromarray(np.random.default_rng(i).integers(0, 256, (20, 24, 3), np.uint8)) for i in (0, 1)]
    pixels = processor(images, return_tensors="pt")
    folder = save_cut(vit(num_hidden_layers=2), pixels, tmp_path / "slim", processor)
    with torch.no_grad():
        expected = hies_export.load(folder)(**pixels).logits.softmax(-1)
    found = pipeline("image-classification", model=str(folder), top_k=3, trust_remote_code=True)(images)
    for rows, probabilities in zip(found, expected, strict=True):
        by_label = [row["score"] for row in sorted(rows, key=lambda row: row["label"])]
        assert by_label == pytest.approx(probabilities.tolist(), abs=1e-5)


def test_a_generation_pipeline_equals_greedy_steps_by_hand(slim_decoder: Path) -> None:
    writer = pipeline("text-generation", model=str(slim_decoder), trust_remote_code=True)
    (found,) = writer("a b c", max_new_tokens=6, min_new_tokens=6, do_sample=False, return_tensors=True)
    model, ids = hies_export.load(slim_decoder), writer.tokenizer("a b c", return_tensors="pt").input_ids
    for _ in range(6):  # without a cache
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[:, -1]
        logits[:, model.config.eos_token_id] = -torch.inf  # what min_new_tokens does
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], -1)
    assert found["generated_token_ids"] == ids[0].tolist()


def test_caches_that_the_config_would_size(slim_decoder: Path) -> None:
    """A static cache filled in chunks is sized layer by layer; continuous batching has one size for all layers."""
    uneven = hies_export.load(slim_decoder)
    how: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    found = uneven.generate(IDS["input_ids"], **how, cache_implementation="static", prefill_chunk_size=4)
    assert torch.equal(found, uneven.generate(IDS["input_ids"], **how, cache_implementation="dynamic"))
    with pytest.raises(ValueError, match="allocation: uniform"):
        uneven.generate_batch(IDS["input_ids"].tolist(), max_new_tokens=6)


@pytest.mark.slow
def test_fine_tuning_with_trainer(slim_bert: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(slim_bert)
    texts = [f"{one} {other}" for one in WORDS for other in WORDS] * 4
    rows = datasets.Dataset.from_dict({"text": texts, "labels": [int(t < "f") for t in texts]})
    rows = rows.map(lambda row: tokenizer(row["text"]), remove_columns="text")
    before, trained = hies_export.load(slim_bert), hies_export.load(slim_bert)
    quiet: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "epoch"}
    how = {"num_train_epochs": 1, "learning_rate": 2e-3, "per_device_eval_batch_size": 100}
    arguments = TrainingArguments(output_dir=str(tmp_path / "checkpoints"), **how, **quiet)
    trainer = Trainer(trained, arguments, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
    loss_before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.8 * loss_before
    trainer.save_model(str(tmp_path / "final"))
    trained.save_pretrained(tmp_path / "by-hand")
    batch = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    expected = first_output(trained, batch)
    assert max_abs(expected, first_output(before, batch)) > 0.1
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    for folder in (tmp_path / "final", tmp_path / "by-hand", checkpoint):
        assert_near(first_output(hies_export.load(folder), batch), expected)
        remote = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
        assert_near(first_output(remote, batch), expected)
        assert check_reload(trained, folder, batch) < 1e-5  # AutoModel and no missing key, too


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it by the old name
def test_lora(slim_decoder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="no peft here: pip install peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(hies_export.load(slim_decoder), config)
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(3):
        loss = tuned(**IDS, labels=IDS["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    tuned.save_pretrained(tmp_path / "adapter")
    expected = first_output(tuned, IDS)
    again = peft.PeftModel.from_pretrained(hies_export.load(slim_decoder), tmp_path / "adapter")
    assert max_abs(first_output(again, IDS), expected) < 1e-5
    assert max_abs(first_output(hies_export.load(slim_decoder), IDS), expected) > 1e-2
    merged = again.merge_and_unload()
    assert type(merged) is type(hies_export.load(slim_decoder))
    assert max_abs(first_output(merged, IDS), expected) < 1e-5
    merged.save_pretrained(tmp_path / "merged")
    assert check_reload(merged, tmp_path / "merged", IDS) < 1e-5


@pytest.mark.slow
def test_torch_compile_in_one_graph(slim_bert: Path) -> None:
    # Without the compiler behind it, which takes seconds for each layer and is torch's own.
    model = hies_export.load(slim_bert)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.inference_mode():
        torch.testing.assert_close(compiled(**WORD_IDS).logits, model(**WORD_IDS).logits, atol=1e-5, rtol=1e-5)


def test_half_precision(slim_decoder: Path, tmp_path: Path) -> None:
    full, model = first_output(hies_export.load(slim_decoder), IDS), hies_export.load(slim_decoder).bfloat16()
    allowed = 10 * torch.finfo(torch.bfloat16).eps * full.abs().max().item()
    assert 0 < max_abs(first_output(model, IDS), full) < allowed
    model.save_pretrained(tmp_path / "small")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small", trust_remote_code=True)
    assert again.dtype == torch.bfloat16
    weights = model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in again.state_dict().items())
    assert max_abs(first_output(again, IDS), full) < allowed


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_what_was_pruned_is_pruned_again(kind: str, tmp_path: Path) -> None:
    """Score, select, cut, save and reload, twice; each cut is judged by masks on the model before it."""
    model, batch = bert(), text_batch()
    if kind == "llama":
        model, batch = causal_lm(**THREE_GROUPS), IDS | {"labels": IDS["input_ids"]}
    stock = type(model)
    groups = []
    for step in ("once", "twice"):
        modules = hies_export.find_attention(model, batch)
        groups.append(sum(module.groups for module in modules))
        statistics = hies_export.collect_statistics(model, [batch], modules)
        scores = hies_export.score_units(statistics, criterion="hies", alpha=0.5)
        plan = plan_of(scores, modules, heads=0.3)
        slim = hies_export.prune_units(model, plan, modules)
        assert hies_export.compare_cut(model, slim, plan, modules, batch) < 1e-4
        hies_export.save_slim(slim, tmp_path / step, plan=plan, batch=batch)
        model = hies_export.load(tmp_path / step)
    groups.append(sum(module.groups for module in hies_export.find_attention(model, batch)))
    assert groups == [groups[0], groups[0] - round(0.3 * groups[0]), groups[1] - round(0.3 * groups[1])]
    assert type(model).__mro__[2] is stock
    assert shake(model)(**batch).loss.requires_grad
