"""Make the tiny models, tokenizers, batches and projects that test files share."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import tokenizers
import torch
import yaml
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    OPTConfig,
    OPTForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
)

SHARED = Path(__file__).resolve().parents[3] / "shared"


def shake(model: PreTrainedModel) -> PreTrainedModel:
    """Add noise to the weights, so that heads differ: freshly initialised attention is nearly uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name.lower():
                parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()


SIX_HEADS = {
    **{"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 64},
    "num_labels": 3,
}
# Query heads that share key/value heads in pairs.
FOUR_HEADS = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 32, "pad_token_id": 0},
}


def bert(**options: object) -> BertForSequenceClassification:
    config = SIX_HEADS | {"vocab_size": 100, "max_position_embeddings": 64}
    return shake(BertForSequenceClassification(BertConfig(**(config | options))))


def vit(**options: object) -> ViTForImageClassification:
    return shake(ViTForImageClassification(ViTConfig(**(SIX_HEADS | {"image_size": 16, "patch_size": 4} | options))))


def llama(**options: object) -> PreTrainedModel:
    """Return a classifier whose projections have no bias."""
    config = LlamaConfig(**(FOUR_HEADS | {"vocab_size": 100, "num_labels": 3} | options))
    return shake(LlamaForSequenceClassification(config))


def opt() -> PreTrainedModel:
    """Return a model whose feed-forward blocks flatten the tokens of all samples."""
    options = {"word_embed_proj_dim": 32, "max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 3}
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 48, "num_attention_heads": 4}
    return OPTForSequenceClassification(OPTConfig(**sizes, **options)).eval()


def causal_lm(**options: object) -> PreTrainedModel:
    """Return a decoder whose projections have no bias."""
    tokens = {"vocab_size": 32, "max_position_embeddings": 64, "bos_token_id": 2, "eos_token_id": 3}
    return shake(LlamaForCausalLM(LlamaConfig(**(FOUR_HEADS | tokens | options))))


def llava(**options: object) -> PreTrainedModel:
    """Return a LLaVA: an image tower of 16 patches and a class token, in front of the decoder of `causal_lm`."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlavaConfig(
        text_config=causal_lm(**options).config,
        vision_config=CLIPVisionConfig(**vision, image_size=16, patch_size=4),
        image_token_index=4,
        pad_token_id=0,
    )
    return shake(LlavaForConditionalGeneration(config))


GENERATIVE_WORDS = ["<pad>", "<unk>", "<s>", "</s>", "<image>", "\n", *"abcdefghijkl", "yes", "no", "Q", "A"]


def generative_tokenizer(words: Sequence[str] = GENERATIVE_WORDS, **options: object) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per word, question mark and line break; it begins a text with <s>."""
    numbers = {word: number for number, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    parts = (("\n", "isolated"), ("?", "isolated"), (" ", "removed"))
    splits = [tokenizers.pre_tokenizers.Split(pattern, behavior) for pattern, behavior in parts]
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(splits)
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, additional_special_tokens=["<image>"], **(special | options)
    )


def llava_processor(
    tokenizer: PreTrainedTokenizerFast | None = None, *, patch_size: int = 4, **options: object
) -> LlavaProcessor:
    """Return a processor for `llava`, by which an image takes 16 tokens."""
    return LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer or generative_tokenizer(),
        patch_size=patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        **options,
    )


def cut_bert(model: PreTrainedModel, kept_heads: Sequence[int]) -> PreTrainedModel:
    """Keep the first heads of each layer, a different number in each: by hand, without the package's own cut."""
    for layer, heads in zip(model.base_model.encoder.layer, kept_heads, strict=True):
        attention, width = layer.attention.self, heads * layer.attention.self.attention_head_size
        for linear in (attention.query, attention.key, attention.value):
            linear.weight = torch.nn.Parameter(linear.weight[:width].detach().clone())
            linear.bias = torch.nn.Parameter(linear.bias[:width].detach().clone())
            linear.out_features = width
        output = layer.attention.output.dense
        output.weight = torch.nn.Parameter(output.weight[:, :width].detach().clone())
        output.in_features = width
        attention.num_attention_heads, attention.all_head_size = heads, width
    return model


def text_batch(
    size: int = 4, length: int = 10, *, padding: bool = True, labels: bool = True
) -> dict[str, torch.Tensor]:
    batch = {
        "input_ids": torch.randint(3, 100, (size, length)),
        "attention_mask": torch.ones(size, length, dtype=torch.int64),
    }
    if padding:
        for row in range(1, size):
            batch["attention_mask"][row, length - 2 * row :] = 0
    if labels:
        batch["labels"] = torch.arange(size) % 3
    return batch


def zero_padding(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the batch with zeros for padding: decoders find the last token of a row by that number."""
    return batch | {"input_ids": batch["input_ids"] * batch["attention_mask"]}


def image_batch(size: int = 4, *, labels: bool = True) -> dict[str, torch.Tensor]:
    batch = {"pixel_values": torch.randn(size, 3, 16, 16)}
    if labels:
        batch["labels"] = torch.arange(size) % 3
    return batch


WORDS = ["good", "bad", "fine", "poor", "great", "awful", "nice", "dull", "bright", "dark"]


def word_tokenizer(words: Sequence[str], **options: object) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words, numbered from 4; it writes [CLS] one [SEP], and [CLS] one [SEP] other [SEP]."""
    numbers = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **(special | options))


def save_text_model(folder: Path, **options: object) -> Path:
    """Write a tiny BERT and its tokenizer of ten words as a checkpoint folder."""
    bert(**({"num_labels": 2} | options)).save_pretrained(folder)
    word_tokenizer(["[MASK]", *WORDS], model_max_length=64).save_pretrained(folder)
    return folder


def save_project(folder: Path, *, train: int, validation: int, **sections: object) -> Path:
    """Write a folder with a tiny BERT, rows of sentence pairs, and a recipe.yaml whose sections may be replaced."""
    save_text_model(folder / "model")
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "validation.jsonl", validation)
    files = {"train": "train.jsonl", "validation": "validation.jsonl"}
    data = {"files": files, "text": ["sentence", "other"], "label": "label"}
    write_recipe(folder, "text-classification", **({"data": data} | sections))
    return folder


def save_regressor(folder: Path, *, layers: int = 3, **sections: object) -> Path:
    """Write a project with a tiny BERT of one label, whose predictions all differ, and 150 and 40 rows of numbers.

    Predictions count as the same within 0.02; the recipe draws 20 rows to score on, and measures at (2, 16).
    """
    torch.manual_seed(0)
    usual = {
        "calibration": {"samples": 20, "batch_size": 10},
        "evaluation": {"stability_tolerance": 0.02},
        "measure": {"shapes": [[2, 16]], "repeats": 2, "runtimes": ["torch"]},
    }
    save_project(folder, train=150, validation=40, **(usual | sections))
    save_text_model(folder / "model", num_labels=1, num_hidden_layers=layers)
    for name, count in (("train", 150), ("validation", 40)):
        write_rows(folder / f"{name}.jsonl", count, lambda i: (i * 37 % 23) / 23)
    return folder


def write_recipe(folder: Path, task: str, **sections: object) -> Path:
    """Write folder/recipe.yaml, for the model in folder/model."""
    recipe = {"model": "model", "task": task, "output": "out"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | sections))
    return folder / "recipe.yaml"


def save_stories(folder: Path, *, lines: int, **sections: object) -> Path:
    """Write a folder with `causal_lm`, lines of letters, and a recipe.yaml with these sections; return the recipe."""
    causal_lm().save_pretrained(folder / "model")
    generative_tokenizer().save_pretrained(folder / "model")
    letters = "abcdefghijkl"
    text = [" ".join(letters[(i * 5 + j * (1 + i % 3)) % 12] for j in range(4 + i % 9)) for i in range(lines)]
    (folder / "text.txt").write_text("\n".join(text))
    data = {"files": {"train": "text.txt"}, "text": "text", "max_length": 24}
    return write_recipe(folder, "text-generation", **({"data": data} | sections))


def write_rows(path: Path, count: int, label: Callable[[int], object] = lambda i: i % 2) -> Path:
    """Write rows of two sentences and a label, and return the file."""
    with path.open("w") as file:
        for i in range(count):
            words = [WORDS[(i * 7 + j * 3) % 10] for j in range(2 + i % 5)]
            row = {"sentence": " ".join(words), "other": " ".join(reversed(words)), "label": label(i)}
            file.write(json.dumps(row) + "\n")
    return path
