"""Write folders as older and newer releases of sentence-transformers do, and make embedding models in memory."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedModel

from hies_export.checkpoint.sentence import load_sentence, unwrap
from hies_export.model.text_encoder import TextEncoder
from support.models import SIX_HEADS, shake, word_tokenizer

WORDS = [f"w{number}" for number in range(90)]
WIDTH = 48
MEAN = {"word_embedding_dimension": WIDTH, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
Layer = tuple[str, dict[str, Any], dict[str, torch.Tensor]]


def bert_encoder(**options: object) -> PreTrainedModel:
    """Return a tiny encoder without a head."""
    config = SIX_HEADS | {"vocab_size": 100, "max_position_embeddings": 64}
    return shake(BertModel(BertConfig(**(config | options))))


def t5_encoder(kind: str) -> PreTrainedModel:
    """Return a tiny encoder of an encoder-decoder: T5, MT5, UMT5 or LongT5."""
    sizes = {"vocab_size": 100, "d_model": WIDTH, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 6}
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "local_radius": 5}
    config = getattr(transformers, f"{kind}Config")(**sizes, **buckets, pad_token_id=0)
    return shake(getattr(transformers, f"{kind}EncoderModel")(config))


def embedder(encoder: PreTrainedModel, tokenizer: Any, **options: Any) -> TextEncoder:
    """Return an embedding model in memory with mean pooling; the options are attributes of its SentenceTransformer."""
    given = in_memory(encoder, tokenizer)
    for name, value in options.items():
        setattr(given[0] if name.endswith("_length") else given, name, value)
    model: TextEncoder = unwrap(given).model
    return model


def in_memory(encoder: PreTrainedModel, tokenizer: Any, *further: nn.Module) -> SentenceTransformer:
    """Return a SentenceTransformer in memory, with mean pooling and further modules."""
    with TemporaryDirectory() as folder:
        encoder.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        first = Transformer(folder)
    return SentenceTransformer(
        modules=[first, Pooling(first.get_embedding_dimension(), "mean"), *further], device="cpu"
    )


def load_embedder(folder: Path) -> TextEncoder:
    """Return the embedding model in a folder."""
    model: TextEncoder = load_sentence(folder).model
    return model


def dense(inputs: int, outputs: int, activation: type[nn.Module] = nn.Tanh, **config: Any) -> Layer:
    """Return the module Dense, with random weights."""
    linear = nn.Linear(inputs, outputs)
    settings = {"in_features": inputs, "out_features": outputs, "bias": True}
    named = {"activation_function": f"{activation.__module__}.{activation.__name__}"}
    return "Dense", settings | named | config, {f"linear.{k}": v.detach() for k, v in linear.state_dict().items()}


def sentence_folder(
    folder: Path,
    layers: Sequence[Layer] = (("Normalize", {}, {}),),
    *,
    pooling: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    types: str = "sentence_transformers.models.",
    encoder: PreTrainedModel | None = None,
) -> Path:
    """Write a SentenceTransformer with a pooling and further layers; a `Normalize` has no folder, as in older ones."""
    (encoder or bert_encoder()).save_pretrained(folder)
    word_tokenizer(WORDS, model_max_length=64).save_pretrained(folder)
    entries = [{"idx": 0, "name": "0", "path": "", "type": f"{types}Transformer"}]
    for index, (name, config, weights) in enumerate([("Pooling", pooling or MEAN, {}), *layers], start=1):
        path = f"{index}_{name}"
        entries.append({"idx": index, "name": str(index), "path": path, "type": f"{types}{name}"})
        if config:
            (folder / path).mkdir()
            (folder / path / "config.json").write_text(json.dumps(config))
        if weights:
            save_file(weights, folder / path / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "sentence_bert_config.json").write_text(json.dumps(text or {"max_seq_length": 16}))
    if options is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(options))
    return folder
