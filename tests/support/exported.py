"""Models that are exported to ONNX, and prompts for them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
import tokenizers
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from support.families import SMALL, decoder
from support.models import WORDS, shake

TEXT = SMALL | {"num_hidden_layers": 2, "num_key_value_heads": 3, "bos_token_id": 1, "eos_token_id": None}
VISION = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 16},
    **{"patch_size": 8, "projection_dim": 8},
}


def wide_bert(**options: object) -> BertForSequenceClassification:
    """Return a classifier of one layer whose linear layers, but the last, are wide enough for 8 bits."""
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 192, "num_hidden_layers": 1}
    sizes = {"vocab_size": 200, "max_position_embeddings": 32, "num_labels": 3, "initializer_range": 0.2}
    return BertForSequenceClassification(BertConfig(**(shape | sizes | options))).eval()


def run_onnx(file: Path, batch: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return the outputs of a graph by their names, by ONNX Runtime as its own users run it.

    Segment ids are zero if a batch has none, and what the graph does not read is left out.
    """
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    given = {name: value.numpy() for name, value in batch.items()}
    if "input_ids" in given:
        given = {"token_type_ids": np.zeros_like(given["input_ids"]), **given}
    names = [node.name for node in session.get_outputs()]
    found = session.run(names, {node.name: given[node.name] for node in session.get_inputs()})
    return dict(zip(names, found, strict=True))


def endless_llama(**options: object) -> PreTrainedModel:
    """Return a language model that knows no token to end at, so that it writes as much as it is asked for."""
    return decoder("Llama", **(TEXT | options))()


def endless_llava() -> PreTrainedModel:
    """Return one layer of `endless_llama` behind an image tower that makes 4 tokens of an image."""
    text = LlamaConfig(**TEXT | {"num_hidden_layers": 1})
    config = LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=text, image_token_index=99)
    return shake(LlavaForConditionalGeneration(config))


def padded_prompts(rows: int = 3, length: int = 9) -> dict[str, torch.Tensor]:
    """Return prompts padded on the left, each row by two tokens more than the one before."""
    ids = torch.randint(3, 99, (rows, length))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 2 * row] = 0
        ids[row, : 2 * row] = 0
    return {"input_ids": ids, "attention_mask": mask}


def prompt_tokenizer(pad_token: str | None = "<pad>") -> PreTrainedTokenizerFast:
    """Return a tokenizer of ten words, and of an image token with the id that `endless_llava` expects."""
    names = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    names += [f"w{i}" for i in range(len(names), 99)] + ["<image>"]
    vocabulary = tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    backend = tokenizers.Tokenizer(vocabulary)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": pad_token, "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=["<image>"], **special)
