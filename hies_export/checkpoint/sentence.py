"""Read and write what a SentenceTransformer folder holds besides its encoder: pooling, dense layers, prompts.

The formats are those of sentence-transformers, which is not needed. What is written, its versions 5 and 6 read.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import transformers
from pydantic import ConfigDict, Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import RequestError, listed, quoted, refusing, shortened
from ..files import Rule, Schema, check, read_json
from ..model.internals import auto_classes, file_of, model_class_of, never_asking
from ..model.online import hub_or_cache
from ..model.text_encoder import (
    Dense,
    Normalize,
    Pooling,
    PoolingMode,
    SentenceSettings,
    Similarity,
    TextEncoder,
)
from ..model.tokens import longest_sequence
from ..slim.config import is_slim, slim_class
from .beside import COMPANIONS, SENTENCE_FILES, copy_companions, fetch, fetch_files, write_json
from .classes import AGAIN, CORRECT, find_model_class, load_config, read_config
from .load import load_dense
from .weights import load_weights

logger = logging.getLogger(__name__)

MODULES_FILE = "modules.json"
OPTIONS_FILE = "config_sentence_transformers.json"
# The settings of the module Transformer; older folders name the file after the kind of encoder.
_TEXT_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Where sentence-transformers 5 has its modules; 6 still finds them there.
_MODULES = "sentence_transformers.models"
# The module in a slim folder whose encoder sentence-transformers would load by a stock class; see `modeling_hies`.
_SLIM_ENCODER = "modeling_hies.Transformer"
# What pooling may be asked for of an encoder without modules.json -> the name of the mode.
POOLINGS: dict[str, PoolingMode] = {"mean": "mean", "cls": "cls", "last": "lasttoken", "max": "max"}
# Mode of pooling -> its flag in the older configs, in the order in which several modes are joined.
_FLAGS: dict[PoolingMode, str] = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
# Types of encoder-decoders -> the class that sentence-transformers loads in place of that of `AutoModel`.
_ENCODERS = {
    **{"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel", "longt5": "LongT5EncoderModel"},
    **{"switch_transformers": "SwitchTransformersEncoderModel", "t5gemma": "T5GemmaEncoderModel"},
    "prophetnet": "ProphetNetEncoder",
}
# Types of models whose encoders sentence-transformers loads by classes that transformers does not export.
_NO_ENCODERS = (
    *("blenderbot", "blenderbot-small", "m2m_100", "pegasus", "pegasus_x", "marian"),
    *("t5gemma2", "t5gemma2_encoder", "t5gemma2_text"),
)
# What is read of a folder, beside the weights in its root and the folders of its modules.
_OWN_FILES = ("*.json", "*.jinja", *COMPANIONS)
# Kinds of text whose prompts have their names.
_KINDS = ("query", "document")
# Older names of fields in the settings of the module Transformer.
_OLDER = {"model_args": "model_kwargs", "tokenizer_args": "processor_kwargs", "config_args": "config_kwargs"}
# Those of its fields that a slim folder has too; the others are said by its other files, or by `SentenceSettings`.
_KEPT = ("query_length", "document_length", "unpad_inputs", "processing_kwargs", "processor_kwargs", "model_kwargs")
# Task of a Transformer -> what its module gives, and which output of its model that is.
_OUTPUTS = {
    "feature-extraction": ("token_embeddings", "last_hidden_state"),
    "sequence-classification": ("scores", "logits"),
}
_SENTENCE = Rule("a SentenceTransformer folder must hold what sentence-transformers wrote", AGAIN)
_OPTIONS = Rule(f"{OPTIONS_FILE} must ask for what sentence-transformers knows", CORRECT)
_READOUT = Rule(
    "a module after the pooling must be known here, and turn one embedding per text into another",
    "give a model of such modules, or save it again",
)
_TEXT = Rule(
    "what the settings of a Transformer ask for must be known here, as it may change the embeddings",
    "take it out if they are the same without, or write what is the model's or the tokenizer's into its own config",
)


class _Module(Schema):
    """An entry of modules.json."""

    path: str
    type: str


class _Options(Schema):
    """The fields of config_sentence_transformers.json that matter here."""

    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None
    model_type: str | None = None
    similarity_fn_name: Similarity | None = None
    truncate_dim: int | None = Field(None, ge=1)


class _Known(Schema):
    """Base of schemas that allow no unknown field; fields of type Any do not affect the embeddings."""

    model_config = ConfigDict(strict=True, extra="forbid")


class _Called(_Known):
    """How the tokenizer is called."""

    max_length: int | None = Field(None, ge=1)
    add_special_tokens: bool = True
    truncation: Literal[True, "longest_first"] = True
    padding: Literal[True, "longest", "max_length"] = True
    pad_to_multiple_of: Any = None
    return_tensors: Literal["pt"] = "pt"
    verbose: Any = None


class _Processing(Schema):
    """How the processors are called; of these, only the tokenizer is given texts."""

    text: _Called | None = None
    common: _Called | None = None


class _Tokenizer(_Known):
    """How the tokenizer is made."""

    model_max_length: float | None = Field(None, ge=1)
    padding_side: Literal["left", "right"] | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_fast: Any = None
    clean_up_tokenization_spaces: Any = None
    trust_remote_code: Any = None


# How the encoder is loaded, as far as it changes no embedding.
_Loaded = Literal[
    "dtype",
    "torch_dtype",
    "attn_implementation",
    "device_map",
    "low_cpu_mem_usage",
    "use_safetensors",
    "add_pooling_layer",
    "trust_remote_code",
]


class _Text(_Known):
    """The settings of the module Transformer, all that sentence-transformers 6 knows: it fails with others."""

    max_seq_length: int | None = Field(None, ge=1)
    do_lower_case: bool = False
    query_length: int | None = Field(None, ge=1)
    document_length: int | None = Field(None, ge=1)
    query_expansion: None = None  # of models with a vector per token
    tokenizer_name_or_path: None = None
    unpad_inputs: Any = None
    transformer_task: str = "feature-extraction"
    module_output_name: str | None = None
    modality_config: dict[str, dict[str, Any]] | None = None
    processing_kwargs: _Processing | None = None
    processor_kwargs: _Tokenizer | None = None
    config_kwargs: dict[str, Any] | None = None
    model_kwargs: dict[_Loaded, Any] | None = None


class _Pooling(_Known):
    """The config of a module Pooling: the mode's name, or a flag for each mode."""

    embedding_dimension: Any = None
    word_embedding_dimension: Any = None
    pooling_mode: PoolingMode | Annotated[list[PoolingMode], Field(min_length=1)] | None = None
    pooling_mode_cls_token: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False
    include_prompt: bool = True


class _Layer(Schema):
    """The config of a module Normalize, and what those of the other layers have too."""

    module_input_name: Literal["sentence_embedding"] = "sentence_embedding"
    module_output_name: Literal["sentence_embedding"] | None = None


class _Dense(_Layer):
    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    use_residual: Literal[False] = False


class _LayerNorm(_Layer):
    dimension: int


class _Dropout(_Layer):
    dropout: float = Field(0.2, ge=0, le=1)


# Class of a module that may follow the pooling -> what its config has.
_LAYERS: dict[str, type[_Layer]] = {
    "Dense": _Dense,
    "Normalize": _Layer,
    "LayerNorm": _LayerNorm,
    "Dropout": _Dropout,
}


# Read


def is_sentence_transformer(path: str | Path, **hub: Any) -> bool:
    """Return whether a folder or Hub id has the modules of a SentenceTransformer; a CrossEncoder has other ones."""
    if _file(path, MODULES_FILE, **hub) is None:
        return False
    return _options(path, **hub).get("model_type") != "CrossEncoder"


def _file(path: str | Path, name: str, **hub: Any) -> Path | None:
    """Return a file of a folder or Hub id; None if it is neither on the Hub nor in its cache."""
    if Path(path).is_absolute() or Path(path).exists():
        file = Path(path) / name
        return file if file.is_file() else None
    try:
        with hub_or_cache(path, "model"):
            return file_of(path, name, **hub)
    except (RequestError, OSError):  # what reads the config says that there is no model
        return None


def _options(path: str | Path, **hub: Any) -> dict[str, Any]:
    file = _file(path, OPTIONS_FILE, **hub)
    options: dict[str, Any] = {} if file is None else read_json(file, _Options, _OPTIONS)
    return options


def settings_of(
    path: str | Path, *, pooling: str | None = None, normalize: bool | None = None, revision: str | None = None
) -> SentenceSettings:
    """Read how an embedding model turns texts into embeddings.

    Args:
        path: A SentenceTransformer folder, the folder of a bare encoder, or the Hub id of either, which is fetched.
        pooling: For a bare encoder, how its token embeddings are pooled: mean, cls, last or max.
        normalize: For a bare encoder, whether embeddings are scaled to length 1; by default not.
        revision: Revision of a Hub id.

    Raises:
        RequestError: The folder is damaged, or has modules that are not supported; or a bare encoder comes without
            `pooling`, or a SentenceTransformer with it.
    """
    options = _options(path, revision=revision)
    if (kind := options.get("model_type")) not in (None, "SentenceTransformer"):
        raise RequestError(f"{path} must be a SentenceTransformer, which gives one embedding per text, but is a {kind}")
    if (listing := _file(path, MODULES_FILE, revision=revision)) is None:
        return _of_bare(path, pooling, normalize, revision)
    given = {"pooling": pooling, "normalize": normalize}
    if asked := [f"{name}: {value}" for name, value in given.items() if value is not None]:
        raise RequestError(
            f"pooling and normalize are for an encoder without {MODULES_FILE}, but {path} is a SentenceTransformer "
            f"with its own, got {listed(asked)}; leave them out"
        )
    modules = _modules(listing, where=str(path))
    first = modules[0].path
    patterns = [*_OWN_FILES, *(f"{module.path}/*" for module in modules if module.path)]
    folder = fetch_files(path, patterns, revision) if first else fetch(path, revision, patterns)
    encoder = folder / first
    config = load_config(encoder)
    text = text_settings(_text_fields(encoder), config, where=str(path))
    text["max_length"] = _max_length(encoder, config, text["max_length"])
    readout = _readout(folder, modules, options)
    return SentenceSettings(readout, folder, encoder, **text, **of_options(options, str(path)))


def load_encoder(settings: SentenceSettings, *, dtype: str | None = None, device_map: str | None = None) -> TextEncoder:
    """Load the encoder of a SentenceTransformer with its readout; see `load_dense`."""
    assert settings.encoder is not None
    encoder = load_dense(settings.encoder, encoder_class(settings.encoder), dtype=dtype, device_map=device_map)
    return encoder_with(encoder, settings)


@never_asking()
def load_sentence(path: str | Path, **kwargs: Any) -> TextEncoder:
    """Load a SentenceTransformer, slim or not, on the CPU, without executing code from its folder.

    Args:
        path: Folder or Hub id.
        **kwargs: Passed to `from_pretrained`, such as `dtype` (default: the checkpoint's own).
    """
    settings = settings_of(path)
    assert settings.encoder is not None
    return encoder_with(load_weights(encoder_class(settings.encoder), settings.encoder, **kwargs), settings)


def encoder_with(encoder: PreTrainedModel, settings: SentenceSettings) -> TextEncoder:
    """Return an encoder with a copy of the readout, on its device and in its dtype."""
    model = TextEncoder(encoder, copy.deepcopy(list(settings.readout)), settings)
    model.readout.to(encoder.device, encoder.dtype)
    return model.eval()


def encoder_class(path: Path) -> type[PreTrainedModel]:
    """Return the class that sentence-transformers loads an encoder by, or its slim version.

    A config may name a class with another head, such as BertForMaskedLM, or none: the base model is loaded.

    Raises:
        RequestError: The encoder takes more than texts.
    """
    found = _base_class(path)
    modalities: str | Sequence[str] = found.input_modalities  # a single one is a string
    _refuse_others({modalities} if isinstance(modalities, str) else {*modalities}, path)
    return found


def _base_class(path: Path) -> type[PreTrainedModel]:
    config = load_config(path)
    slim = getattr(config, "hies_export", None) is not None
    if config.model_type in _NO_ENCODERS:
        raise RequestError(
            f"the encoder of an embedding model must be a class of its own that transformers exports, but that of "
            f"{config.model_type}, which {path} is, is none; give another model"
        )
    if (own := _ENCODERS.get(config.model_type)) is not None:
        stock = getattr(transformers, own)
        return slim_class(stock) if slim else stock
    base = model_class_of(config, "AutoModel")
    if base is not None and not config.architectures:
        return base
    named = find_model_class(path)
    if base is None or slim or "AutoModel" in auto_classes(named.__name__, config.model_type):
        return named
    return base


def _refuse_others(modalities: Set[str], path: str | Path) -> None:
    """Refuse a model that embeds more than texts, or puts these into a chat template ("message")."""
    if modalities and modalities != {"text"}:
        raise RequestError(
            f"an embedding model must embed texts as they are, but {path} takes {listed(sorted(modalities))}"
        )


def _of_bare(path: str | Path, pooling: str | None, normalize: bool | None, revision: str | None) -> SentenceSettings:
    read_config(path, revision=revision)
    if pooling is None:
        raise RequestError(
            f"an encoder without {MODULES_FILE} needs pooling: {', '.join(POOLINGS)}, but {path} came without; give "
            "the one that it was trained with, and normalize: true if its embeddings have length 1"
        )
    folder = fetch(path, revision, _OWN_FILES)
    readout = make_readout(pooling, normalize=bool(normalize))
    return SentenceSettings(tuple(readout), folder, folder, max_length=_max_length(folder, load_config(folder)))


def make_readout(pooling: str, *, normalize: bool = False) -> list[nn.Module]:
    """Return the readout of a bare encoder: pooling by mean, cls, last or max, and `Normalize` if asked for."""
    if pooling not in POOLINGS:
        raise RequestError(f"pooling must be one of {', '.join(POOLINGS)}, got {quoted(pooling)}")
    return [Pooling([POOLINGS[pooling]]), *([Normalize()] if normalize else [])]


def _modules(file: Path, *, where: str) -> list[_Module]:
    """Return the entries of modules.json: a Transformer, a Pooling, and what may follow."""
    modules = [_Module.model_validate(entry) for entry in read_json(file, list[_Module], _SENTENCE)]
    check_modules([module.type for module in modules], where=where)
    return modules


def check_modules(types: Sequence[str], *, where: str) -> list[str]:
    """Return the classes of modules, given by their full names; refuse those that are no dense text encoder."""
    names = [full.rpartition(".")[2] for full in types]
    own = all(full.startswith("sentence_transformers.") or full == _SLIM_ENCODER for full in types)
    if not own or names[:2] != ["Transformer", "Pooling"] or set(names[2:]) - set(_LAYERS):
        raise RequestError(
            "an embedding model must be a Transformer, a Pooling, and then any of "
            f"{', '.join(_LAYERS)} of sentence-transformers, as code in a checkpoint is never run, but {where} is "
            f"{shortened(listed(types)) or 'empty'}; give a model of these modules"
        )
    return names


def _text_fields(encoder: Path) -> dict[str, Any]:
    """Return the settings of the module Transformer: those of the first file that has any."""
    found = (read_json(encoder / name, dict[str, Any], _SENTENCE) for name in _TEXT_FILES if (encoder / name).is_file())
    return next(filter(None, found), {})


def text_settings(
    fields: Mapping[str, Any], config: Any, *, where: str, task: str = "feature-extraction"
) -> dict[str, Any]:
    """Return what the settings of a module Transformer ask for, by the fields of `SentenceSettings`.

    Args:
        fields: The content of sentence_bert_config.json, or as much of it as a module in memory has.
        config: The encoder's.
        where: Name of the folder or the object, for refusals.
        task: What the module must be for.

    Raises:
        RequestError: A field or its value is not known here, or the module is for something else.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    named = {name: value for name, value in fields.items() if name not in _OLDER}
    named |= {_OLDER[name]: value for name, value in fields.items() if name in _OLDER}
    text: _Text = check(named, _Text, _TEXT, where=f"{_TEXT_FILES[0]} of {where}")
    _check_output(text, task, where)
    for name, value in (text.config_kwargs or {}).items():
        if name != "trust_remote_code" and getattr(config, name, ...) != value:
            raise _TEXT.refused(
                f"{_TEXT_FILES[0]} of {where} has config_kwargs with {shortened(name)}: {quoted(value)}"
            )
    processing, tokenizer = text.processing_kwargs or _Processing(), text.processor_kwargs or _Tokenizer()
    called: dict[str, Any] = {}
    for part in (processing.text, processing.common):
        called |= {} if part is None else part.model_dump(exclude_unset=True)
    own = {"query": text.query_length, "document": text.document_length, "text": None}
    lengths, most = {kind: called.get("max_length") or n for kind, n in own.items()}, longest_sequence(config)
    return {
        "max_length": tokenizer.model_max_length or text.max_seq_length,
        "lower": text.do_lower_case,
        "lengths": {kind: min(length, most or length) for kind, length in lengths.items() if length},
        "special_tokens": called.get("add_special_tokens", True),
        "tokenizer": tokenizer.model_dump(include={"padding_side", "truncation_side"}, exclude_none=True),
        "text": {name: value for name, value in fields.items() if _OLDER.get(name, name) in _KEPT},
    }


def _check_output(text: _Text, task: str, where: str) -> None:
    """Refuse a Transformer that is not for a task, or reads more than the tokens of texts as they are."""
    modalities = text.modality_config or {}
    _refuse_others({*modalities}, where)
    output, method_output = _OUTPUTS[task]
    wanted = {"method": "forward", "method_output_name": method_output}
    reads = modalities.get("text", wanted)
    asked = text.transformer_task, text.module_output_name or output
    if asked != (task, output) or any(reads.get(key) != value for key, value in wanted.items()):
        raise RequestError(
            f"a Transformer for {task} must give {method_output}, but that of {where} is for "
            f"{shortened(text.transformer_task)} and gives {quoted(reads.get('method_output_name'))}"
        )


def _max_length(encoder: Path, config: Any, asked: int | None = None) -> int | None:
    """Return the longest text: as the folder says, or what the tokenizer and the encoder's positions allow."""
    if asked is None:
        file = encoder / "tokenizer_config.json"
        asked = read_json(file, dict[str, Any], _SENTENCE).get("model_max_length") if file.is_file() else None
    return shortest_limit(asked, longest_sequence(config))


def shortest_limit(*limits: Any) -> int | None:
    """Return the smallest of limits in tokens; None where all are None, or so large that they stand for no limit."""
    return min((int(n) for n in limits if isinstance(n, (int, float)) and 0 < n < 1e9), default=None)


def of_options(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what config_sentence_transformers.json asks for, by the fields of `SentenceSettings`."""
    prompts = options.get("prompts") or {}
    # As `encode_query`, `encode_document` and `encode` choose them.
    found = {kind: prompts[kind] for kind in _KINDS if prompts.get(kind)}
    if other := [name for name in ("passage", "corpus") if prompts.get(name) and "document" not in found]:
        logger.warning(
            "the prompt %r of %s is read by no document, as in sentence-transformers: name it document if it should be",
            *(other[0], where),
        )
    default = options.get("default_prompt_name")
    if default is not None and default not in (*prompts, *_KINDS):
        raise _OPTIONS.refused(f"{where} has no prompt named {quoted(default)}, its default")
    if default is not None and prompts.get(default):
        found["text"] = prompts[default]
    return {
        "prompts": found,
        "similarity": options.get("similarity_fn_name") or "cosine",
        "truncate_dim": options.get("truncate_dim"),
        "options": options,
    }


Weights = Callable[[], dict[str, Tensor]]
Layer = TypeVar("Layer", bound=nn.Module)


def _readout(folder: Path, modules: list[_Module], options: Mapping[str, Any]) -> tuple[nn.Module, ...]:
    found: list[nn.Module] = []
    for module in modules[1:]:
        where = folder / module.path
        file = where / "config.json"
        config = read_json(file, dict[str, Any], _SENTENCE) if file.is_file() else {}
        kind = module.type.rpartition(".")[2]
        found.append(readout_module(kind, config, partial(_weights, where), where=str(where)))
    check_prompts(found[0], options.get("prompts") or {}, where=str(folder))
    return tuple(found)


def readout_module(kind: str, config: Mapping[str, Any], weights: Weights, *, where: str) -> nn.Module:
    """Return a module of a readout from its class, config and weights in sentence-transformers."""
    if kind == "Pooling":
        pooling: _Pooling = check(dict(config), _Pooling, _SENTENCE, where=where)
        by_flags = [mode for mode, flag in _FLAGS.items() if getattr(pooling, flag)]
        modes = pooling.pooling_mode or by_flags or ["mean"]
        return Pooling([modes] if isinstance(modes, str) else modes, include_prompt=pooling.include_prompt)
    layer = check(dict(config), _LAYERS[kind], _READOUT, where=where)
    if isinstance(layer, _Dense):
        linear = partial(nn.Linear, layer.in_features, layer.out_features, bias=layer.bias)
        activation = _activation(layer.activation_function, where)
        return Dense(_filled(linear, "linear", weights, where), activation)
    if isinstance(layer, _LayerNorm):
        return _filled(partial(nn.LayerNorm, layer.dimension), "norm", weights, where)
    return nn.Dropout(layer.dropout) if isinstance(layer, _Dropout) else Normalize()


def check_prompts(pooling: nn.Module, prompts: Mapping[str, str | None], *, where: str) -> None:
    """Refuse a pooling that leaves the tokens of prompts out, if there are prompts."""
    assert isinstance(pooling, Pooling)
    if not pooling.include_prompt and any(prompts.values()):
        raise RequestError(
            f"pooling must include the prompt's tokens, but {where} leaves them out (include_prompt: false); give a "
            "model without prompts, or one that pools them too"
        )


def _weights(folder: Path) -> dict[str, Tensor]:
    safe, older = folder / "model.safetensors", folder / "pytorch_model.bin"
    with refusing(f"{folder} must hold the weights of its module, but they do not load", AGAIN):
        return load_file(safe) if safe.is_file() else dict(torch.load(older, map_location="cpu", weights_only=True))


def _filled(layer: Callable[[], Layer], under: str, weights: Weights, where: str) -> Layer:
    """Return a module's layer, which has a name there, with its weights; without memory for other ones."""
    with refusing(f"the weights of {where} must be those that its config describes, but are not", AGAIN):
        named = {name.removeprefix(f"{under}."): tensor for name, tensor in weights().items()}
        with torch.device("meta"):
            made = layer()
        made.load_state_dict(named, assign=True)
    return made


def _activation(name: str, where: str) -> nn.Module:
    package, _, class_name = name.rpartition(".")
    made = None
    # Nothing is imported: a folder must not say which code runs.
    if package == "torch.nn" or package.startswith("torch.nn.modules."):
        with suppress(Exception):
            made = getattr(nn, class_name)()
    if not isinstance(made, nn.Module):
        raise RequestError(
            f"the activation of a Dense must be a class of torch.nn that needs no arguments, but that of {where} is "
            f"{quoted(name)}; give a model that has one"
        )
    return made


# Write


def write_modules(model: TextEncoder, folder: Path) -> None:
    """Write what makes the folder of a saved encoder that of a SentenceTransformer.

    These are modules.json, a folder for every module of the readout, the length of texts and the prompts, and the
    tokenizer and the documents of the folder that the model comes from, without what is there already.
    """
    encoder = model.auto_model
    by_own = is_slim(encoder) and encoder.config.model_type in _ENCODERS
    entries = [{"idx": 0, "name": "0", "path": "", "type": _SLIM_ENCODER if by_own else f"{_MODULES}.Transformer"}]
    for index, (name, config, weights) in enumerate(_written(model), start=1):
        path = f"{index}_{name}"
        entries.append({"idx": index, "name": str(index), "path": path, "type": f"{_MODULES}.{name}"})
        (folder / path).mkdir()
        write_json(folder / path / "config.json", config)
        if weights:
            save_file(weights, folder / path / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / MODULES_FILE, entries)
    write_text_settings(model, folder)
    for own in dict.fromkeys((model.settings.folder, model.settings.encoder)):
        if own is not None:
            copy_companions(own, folder)


def write_text_settings(model: TextEncoder, folder: Path) -> None:
    """Write how texts are read, in sentence_bert_config.json, and the prompts."""
    settings = model.settings
    lengths = {"max_seq_length": settings.max_length, "do_lower_case": settings.lower}
    write_json(folder / _TEXT_FILES[0], lengths | dict(settings.text))
    none: dict[str, Any] = {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write_json(folder / OPTIONS_FILE, dict(settings.options) or none)


def cross_encoder_files(
    options: Mapping[str, Any], length: int | None, settings: SentenceSettings | None = None
) -> dict[str, Any]:
    """Return the JSON files, by name, that make the folder of a sequence classifier that of a CrossEncoder.

    They are those of sentence-transformers 6; version 5 reads the folder without them.
    """
    text = {"transformer_task": "sequence-classification"} | ({} if length is None else {"max_seq_length": length})
    text |= {} if settings is None else {"do_lower_case": settings.lower, **settings.text}
    return {
        MODULES_FILE: [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
        ],
        _TEXT_FILES[0]: text,
        OPTIONS_FILE: {"model_type": "CrossEncoder", **options},
    }


def cross_encoder_in(folder: Path) -> dict[str, Any]:
    """Return the JSON files, by name, that make a checkpoint's folder that of a CrossEncoder; none if it is not.

    Raises a RequestError if it has further modules, which would be a head of its own.
    """
    if not (folder / MODULES_FILE).is_file() or _options(folder).get("model_type") != "CrossEncoder":
        return {}
    types = [entry["type"].rpartition(".")[2] for entry in read_json(folder / MODULES_FILE, list[_Module], _SENTENCE)]
    check_cross_encoder_modules(types, where=str(folder))
    return {name: read_json(folder / name, Any, _SENTENCE) for name in SENTENCE_FILES if (folder / name).is_file()}


def check_cross_encoder_modules(names: Sequence[str], *, where: str) -> None:
    """Refuse a CrossEncoder whose modules, given by their classes, are not a single Transformer."""
    if [*names] != ["Transformer"]:
        raise RequestError(
            f"a CrossEncoder must be a single Transformer with its own head, but {where} is "
            f"{shortened(listed(names)) or 'empty'}; give one of a model for sequence classification"
        )


def cross_encoder_of(path: str | Path, config: Any, **hub: Any) -> SentenceSettings | None:
    """Return how the texts of a CrossEncoder, a folder or Hub id, become tokens; None if it is none."""
    if _options(path, **hub).get("model_type") != "CrossEncoder":
        return None
    folder = fetch_files(path, SENTENCE_FILES, hub.get("revision"))
    files = cross_encoder_in(folder)
    return None if not files else cross_encoder_settings(files[OPTIONS_FILE], _text_fields(folder), config, str(path))


def cross_encoder_settings(
    options: Mapping[str, Any], fields: Mapping[str, Any], config: Any, where: str
) -> SentenceSettings:
    """Return how the texts of a CrossEncoder become tokens, by the settings of the object and of its Transformer."""
    default = options.get("default_prompt_name")
    if default is not None and (options.get("prompts") or {}).get(default):
        raise RequestError(
            f"a CrossEncoder must read its pairs without a prompt, but {where} has {quoted(default)} by default; set "
            "its default_prompt_name to None, and put the prompt into the texts"
        )
    found = SentenceSettings((), **text_settings(fields, config, where=where, task="sequence-classification"))
    if not found.special_tokens:
        raise _TEXT.refused(f"{_TEXT_FILES[0]} of {where}, a CrossEncoder, has add_special_tokens: false")
    # `predict` says of no text that it is a query.
    return replace(found, max_length=shortest_limit(found.lengths.get("text", found.max_length)), options=options)


def _written(model: TextEncoder) -> Iterator[tuple[str, dict[str, Any], dict[str, Tensor]]]:
    """Yield class, config and weights of every module of a readout, as sentence-transformers 5 and 6 read them."""
    width = model.config.get_text_config().hidden_size
    for module in model.readout:
        if isinstance(module, Pooling):
            yield "Pooling", _pooling_config(module, width), {}
            width *= len(module.modes)
        elif isinstance(module, Dense):
            linear, activation = module.linear, type(module.activation)
            width = linear.out_features
            config = {
                "in_features": linear.in_features,
                "out_features": width,
                "bias": linear.bias is not None,
                "activation_function": f"{activation.__module__}.{activation.__name__}",
            }
            yield "Dense", config, _tensors(linear, "linear")
        elif isinstance(module, nn.LayerNorm):
            yield "LayerNorm", {"dimension": width}, _tensors(module, "norm")
        elif isinstance(module, nn.Dropout):
            yield "Dropout", {"dropout": module.p}, {}
        else:
            assert isinstance(module, Normalize)
            yield "Normalize", {}, {}


def _pooling_config(pooling: Pooling, width: int) -> dict[str, Any]:
    """Return the config of a pooling, with the flags that older readers parse.

    Several modes are named by the flags alone if these give their order, as version 5 takes a single name only.
    """
    modes = list(pooling.modes)
    named: Any = modes[0] if len(modes) == 1 else modes
    by_flags = len(modes) > 1 and modes == [mode for mode in _FLAGS if mode in modes]
    return {
        "word_embedding_dimension": width,
        **({} if by_flags else {"pooling_mode": named}),
        **{flag: mode in modes for mode, flag in _FLAGS.items()},
        "include_prompt": pooling.include_prompt,
    }


def _tensors(layer: nn.Module, under: str) -> dict[str, Tensor]:
    """Return the weights of a module's layer as safetensors stores them, by the names that `_filled` reads."""
    return {f"{under}.{name}": tensor.detach().cpu().contiguous() for name, tensor in layer.state_dict().items()}
