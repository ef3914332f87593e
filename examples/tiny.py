"""Make the tiny models and data of the examples, in seconds and without network."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from transformers import (
    BertConfig,
    BertForNextSentencePrediction,
    BertForSequenceClassification,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

GOOD = ["good", "fine", "great", "nice", "bright"]
BAD = ["bad", "poor", "awful", "dull", "dark"]
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "white": (240, 240, 240)}
STORY = [
    *("the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "sat", "on", "the", "cat"),
    *("while", "the", "sun", "was", "low"),
]


def sentiment(folder: Path) -> Path:
    """Train a BERT to tell whether a sentence has more good or bad words ("not" negates one); return its folder."""
    generator = random.Random(0)
    rows = []
    for _ in range(640):
        drawn = [(generator.choice(GOOD + BAD), generator.random() < 0.3) for _ in range(generator.randint(2, 6))]
        good = sum((word in GOOD) != negated for word, negated in drawn)
        sentence = " ".join(f"not {word}" if negated else word for word, negated in drawn)
        rows.append({"sentence": sentence, "label": int(2 * good > len(drawn))})
    _write(folder / "train.jsonl", rows[:512])
    _write(folder / "validation.jsonl", rows[512:])
    tokenizer = word_tokenizer([*GOOD, *BAD, "not"])
    torch.manual_seed(0)
    model = BertForSequenceClassification(_encoder_config(tokenizer))
    batch = dict(tokenizer([row["sentence"] for row in rows[:512]], padding=True, return_tensors="pt"))
    _train(model, batch | {"labels": torch.tensor([row["label"] for row in rows[:512]])}, steps=300)
    return _save(folder / "model", model, tokenizer)


def counting(folder: Path) -> Path:
    """Train a BERT to tell whether the halves of a text that counts up are swapped; write text.txt; return its folder.

    The numbers are words, and each text counts from one of them on.
    """
    words = [f"w{number:02}" for number in range(40)]
    texts = [words[start : start + length] for start in range(28) for length in range(4, 12)]
    (folder / "text.txt").write_text("\n".join(" ".join(text) for text in texts))
    tokenizer = word_tokenizer(words)
    pairs = [(" ".join(text[: len(text) // 2]), " ".join(text[len(text) // 2 :])) for text in texts]
    swapped = [pair[::-1] for pair in pairs]
    batch = tokenizer(*map(list, zip(*pairs, *swapped, strict=True)), padding=True, return_tensors="pt")
    torch.manual_seed(0)
    model = BertForNextSentencePrediction(_encoder_config(tokenizer))
    labels = torch.arange(2).repeat_interleave(len(pairs))
    _train(model, dict(batch) | {"labels": labels}, steps=150)
    return _save(folder / "model", model, tokenizer)


def _encoder_config(tokenizer: PreTrainedTokenizerFast) -> BertConfig:
    return BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        intermediate_size=96,
        max_position_embeddings=32,
        pad_token_id=tokenizer.pad_token_id,
    )


def story(folder: Path) -> Path:
    """Train a LLaMA of four query heads in two key/value groups on one sentence; write text.txt; return its folder."""
    tokenizer = word_tokenizer(sorted(set(STORY)))
    (folder / "text.txt").write_text("\n".join(" ".join(STORY[i % 4 :]) for i in range(80)))
    torch.manual_seed(0)
    model = LlamaForCausalLM(decoder_config(tokenizer))
    ids = torch.tensor([tokenizer(" ".join(STORY * 2)).input_ids])
    _train(model, {"input_ids": ids, "labels": ids}, steps=80)
    return _save(folder / "model", model, tokenizer)


def colours(folder: Path) -> Path:
    """Make a LLaVA with random weights, and rows that ask what colour an image has; return its folder."""
    from datasets import Dataset, Image
    from PIL.Image import new

    tokenizer = word_tokenizer(["what", "colour", "?", *COLOURS], "<image>", "\n")
    names = [list(COLOURS)[i % 4] for i in range(40)]
    columns = {"image": [new("RGB", (16, 16), COLOURS[name]) for name in names], "answer": names}
    rows = Dataset.from_dict({**columns, "question": ["what colour ?"] * 40}).cast_column("image", Image())
    rows.to_parquet(folder / "rows.parquet")
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, image_size=16, patch_size=4
    )
    config = LlavaConfig(
        text_config=decoder_config(tokenizer),
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return _save(folder / "model", LlavaForConditionalGeneration(config), processor)


def decoder_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Return a config of two layers with four query heads each, which share key/value heads in pairs."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def word_tokenizer(words: Sequence[str], *special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per word, whose texts begin with <s>."""
    tokens = ["<pad>", "<unk>", "<s>", "</s>", *special, *words]
    numbers = {token: number for number, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Split("\n", "isolated"), tokenizers.pre_tokenizers.Split(" ", "removed")]
    )
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=[name for name in special if name.startswith("<")],
        model_max_length=64,
    )


def _train(model: PreTrainedModel, batch: dict[str, torch.Tensor], *, steps: int) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rows = len(batch["labels"])
    for _ in range(steps):
        some = torch.randperm(rows)[:64]
        model(**{name: values[some] for name, values in batch.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def _save(folder: Path, model: PreTrainedModel, processor: object) -> Path:
    model.save_pretrained(folder)
    processor.save_pretrained(folder)  # type: ignore[attr-defined]
    return folder


def _write(path: Path, rows: Sequence[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
