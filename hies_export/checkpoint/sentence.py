"""Read and write what a SentenceTransformer folder holds besides its encoder: pooling, dense layers, prompts.

The formats are those of sentence-transformers, which is not needed. What is written, its versions 5 and 6 read.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import RequestError, listed, quoted, refusing
from ..files import Rule, Schema, check, read_json
from ..model.internals import auto_classes, file_of, model_class_of, never_asking
from ..model.online import hub_or_cache
from ..model.sentence import (
    POOLING_MODES,
    Dense,
    Normalize,
    Pooling,
    PoolingMode,
    SentenceSettings,
    TextEncoder,
)
from ..model.tokens import longest_sequence
from .classes import AGAIN, find_model_class, load_config, read_config
from .companions import COMPANIONS, copy_companions, fetch_files
from .dense import load_dense
from .weights import load_weights, weight_files

MODULES_FILE = "modules.json"
OPTIONS_FILE = "config_sentence_transformers.json"
# The settings of the module Transformer; older folders name the file after the kind of encoder.
_TEXT_FILES = (
    "sentence_bert_config.json",
    *(f"sentence_{kind}_config.json" for kind in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta")),
)
# Where sentence-transformers 5 has its modules; 6 still finds them there.
_MODULES = "sentence_transformers.models"
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
# Name of a prompt in the folder -> the kind of text that it precedes.
_PROMPTS = {"query": "query", "passage": "document", "document": "document"}
_SENTENCE = Rule("a SentenceTransformer folder must hold what sentence-transformers wrote", AGAIN)
_WHY_NOT = {
    "Router": "routes texts through several encoders; load one of them, and save it as a folder of its own",
    "Asym": "routes texts through several encoders; load one of them, and save it as a folder of its own",
    "SpladePooling": "makes sparse embeddings; give a dense embedding model",
    "MLMTransformer": "makes sparse embeddings; give a dense embedding model",
    "SparseAutoEncoder": "makes sparse embeddings; give a dense embedding model",
    "CSRSparsity": "makes sparse embeddings; give a dense embedding model",
    "SparseStaticEmbedding": "makes sparse embeddings; give a dense embedding model",
    "MultiVectorMask": "keeps a vector per token; give a model of one embedding per text",
    "TokenPooling": "keeps a vector per token; give a model of one embedding per text",
    "CLIPModel": "also embeds images; give a model of texts",
    "WordEmbeddings": "has no attention to prune; give a Transformer",
    "StaticEmbedding": "has no attention to prune; give a Transformer",
    "BoW": "has no attention to prune; give a Transformer",
    "CNN": "is a layer that only training can fit to a pruned encoder; give a model without it",
    "LSTM": "is a layer that only training can fit to a pruned encoder; give a model without it",
    "WordWeights": "weighs tokens by their words; give a model without it",
    "WeightedLayerPooling": "reads all layers of the encoder; give a model that pools the last one",
}
# model_type in config_sentence_transformers.json -> what to do instead.
_OTHER_TYPES = {
    "SparseEncoder": "it makes sparse embeddings; give a dense embedding model",
    "MultiVectorEncoder": "it keeps a vector per token; give a model of one embedding per text",
    "CrossEncoder": "it scores pairs of texts; use the task text-classification",
}


class _Module(Schema):
    """An entry of modules.json."""

    path: str
    type: str


class _Options(Schema):
    """The fields of config_sentence_transformers.json that matter here."""

    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None
    model_type: str | None = None


class _Text(Schema):
    """The fields of sentence_bert_config.json that matter here."""

    max_seq_length: int | None = None
    do_lower_case: bool = False
    transformer_task: str = "feature-extraction"
    module_output_name: str = "token_embeddings"
    modality_config: dict[str, dict[str, Any]] | None = None


class _Pooling(Schema):
    """The config of a module Pooling: the mode's name, or a flag for each mode."""

    pooling_mode: str | list[str] | None = None
    pooling_mode_cls_token: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False
    include_prompt: bool = True


class _Layer(Schema):
    """The config of a module Dense, Normalize, LayerNorm or Dropout."""

    in_features: int | None = None
    out_features: int | None = None
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    module_input_name: str = "sentence_embedding"
    module_output_name: str | None = None
    use_residual: bool = False
    dimension: int | None = None
    dropout: float = 0.2


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
    return {} if file is None else _read(file, _Options)


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
    _refuse_type(options.get("model_type"), path)
    if not is_sentence_transformer(path, revision=revision):
        return _of_bare(path, pooling, normalize, revision)
    given = {"pooling": pooling, "normalize": normalize}
    if asked := [f"{name}: {value}" for name, value in given.items() if value is not None]:
        raise RequestError(
            f"pooling and normalize are for an encoder without {MODULES_FILE}, but {path} is a SentenceTransformer "
            f"with its own, got {listed(asked)}; leave them out"
        )
    modules = _modules(path, revision)
    first = modules[0].path
    patterns = [*_own_files(first), *(f"{module.path}/*" for module in modules[1:] if module.path)]
    if not first:
        read_config(path, revision=revision)
        weight_files(path, revision=revision)
    folder = fetch_files(path, patterns, revision)
    encoder = folder / first
    text = _text_settings(encoder, path)
    readout = _readout(folder, modules, options)
    return SentenceSettings(
        readout=readout,
        folder=folder,
        encoder=encoder,
        max_length=_max_length(encoder, text.get("max_seq_length")),
        prompts=prompts_by_kind(options, str(path)),
        lower=text.get("do_lower_case", False),
        options=options,
    )


def load_encoder(settings: SentenceSettings, *, dtype: str | None = None, device_map: str | None = None) -> TextEncoder:
    """Load the encoder of a SentenceTransformer with its readout; see `load_dense`."""
    assert settings.encoder is not None
    encoder = load_dense(settings.encoder, encoder_class(settings.encoder), dtype=dtype, device_map=device_map)
    return encoder_with(encoder, settings)


@never_asking()
def load_sentence(path: str | Path, *, revision: str | None = None, **kwargs: Any) -> TextEncoder:
    """Load a SentenceTransformer, slim or not, on the CPU, without executing code from its folder.

    Args:
        path: Folder or Hub id.
        revision: Revision of a Hub id.
        **kwargs: Passed to `from_pretrained`, such as `dtype` (default: the checkpoint's own).
    """
    settings = settings_of(path, revision=revision)
    assert settings.encoder is not None
    return encoder_with(load_weights(encoder_class(settings.encoder), settings.encoder, **kwargs), settings)


def encoder_with(encoder: PreTrainedModel, settings: SentenceSettings) -> TextEncoder:
    """Return an encoder with a copy of the readout, on its device and in its dtype."""
    model = TextEncoder(encoder, copy.deepcopy(list(settings.readout)), settings)
    model.readout.to(encoder.device, encoder.dtype)
    return model.eval()


def encoder_class(path: str | Path, **hub: Any) -> type[PreTrainedModel]:
    """Return the class that sentence-transformers loads an encoder by, or its slim version.

    A config may name a class with another head, such as BertForMaskedLM, or none: the base model is loaded.

    Raises:
        RequestError: The encoder takes more than texts.
    """
    found = _base_class(path, **hub)
    # A single one is a string.
    modalities: str | Sequence[str] = found.input_modalities
    _refuse_others({modalities} if isinstance(modalities, str) else {*modalities}, path)
    return found


def _base_class(path: str | Path, **hub: Any) -> type[PreTrainedModel]:
    config = load_config(path, **hub)
    if not config.architectures and (base := model_class_of(config, "AutoModel")) is not None:
        return base
    named = find_model_class(path, **hub)
    if "AutoModel" in auto_classes(named.__name__, config.model_type) and not config.is_encoder_decoder:
        return named
    found = model_class_of(config, "AutoModelForTextEncoding" if config.is_encoder_decoder else "AutoModel")
    if found is None or getattr(config, "hies_export", None) is not None:
        return named
    return found


def _refuse_others(modalities: Set[str], path: str | Path) -> None:
    """Refuse a model that embeds more than texts."""
    if others := sorted(modalities - {"text", "message"}):
        raise RequestError(f"an embedding model must embed texts alone, but {path} also takes {listed(others)}")


def _of_bare(path: str | Path, pooling: str | None, normalize: bool | None, revision: str | None) -> SentenceSettings:
    read_config(path, revision=revision)
    if pooling is None:
        raise RequestError(
            f"an encoder without {MODULES_FILE} needs pooling: {', '.join(POOLINGS)}, but {path} came without; give "
            "the one that it was trained with, and normalize: true if its embeddings have length 1"
        )
    weight_files(path, revision=revision)
    folder = fetch_files(path, _own_files(""), revision)
    return SentenceSettings(
        readout=tuple(make_readout(pooling, normalize=bool(normalize))),
        folder=folder,
        encoder=folder,
        max_length=_max_length(folder, None),
    )


def make_readout(pooling: str, *, normalize: bool = False) -> list[nn.Module]:
    """Return the readout of a bare encoder: pooling by mean, cls, last or max, and `Normalize` if asked for."""
    if pooling not in POOLINGS:
        raise RequestError(f"pooling must be one of {', '.join(POOLINGS)}, got {quoted(pooling)}")
    return [Pooling([POOLINGS[pooling]]), *([Normalize()] if normalize else [])]


def _own_files(module: str) -> list[str]:
    """Return patterns of the files that are read of a folder, beside the weights in its root."""
    files = ["*.json", "*.jinja", *COMPANIONS]
    return files if not module else [*files, f"{module}/*"]


def _modules(path: str | Path, revision: str | None) -> list[_Module]:
    """Return the entries of modules.json: a Transformer, a Pooling, and what may follow."""
    file = _file(path, MODULES_FILE, revision=revision)
    assert file is not None
    modules = [_Module.model_validate(entry) for entry in read_json(file, list[_Module], _SENTENCE)]
    for module in modules:
        where = Path(module.path)
        if where.is_absolute() or ".." in where.parts:
            raise _SENTENCE.refused(f"{file} names {quoted(module.path)}, which is outside the folder")
    check_modules([module.type for module in modules], where=str(path))
    return modules


def check_modules(types: Sequence[str], *, where: str) -> list[str]:
    """Return the classes of modules, given by their full names; refuse those that are no dense text encoder."""
    names = []
    for full in types:
        package, _, name = full.rpartition(".")
        if not package.startswith("sentence_transformers."):
            raise RequestError(
                f"the modules of an embedding model must be of sentence-transformers, as code in a checkpoint is "
                f"never run, but {where} has {quoted(full)}; give a model without it"
            )
        if name in _WHY_NOT:
            raise RequestError(
                f"the modules of {where} must be those of a dense text encoder, but {name} {_WHY_NOT[name]}"
            )
        names.append(name)
    if names[:2] != ["Transformer", "Pooling"] or set(names[2:]) - set(_LAYERS):
        raise RequestError(
            f"an embedding model must be a Transformer, a Pooling, and then any of {', '.join(_LAYERS)}, but {where} "
            f"is {listed(names) or 'empty'}; give a model of these modules"
        )
    return names


def _refuse_type(model_type: str | None, path: str | Path) -> None:
    if model_type in _OTHER_TYPES:
        raise RequestError(f"{path} must be a SentenceTransformer, but is a {model_type}: {_OTHER_TYPES[model_type]}")


def _read(file: Path, schema: type[Schema]) -> dict[str, Any]:
    """Return the content of a JSON file, empty if there is none."""
    found: dict[str, Any] = read_json(file, schema, _SENTENCE) if file.is_file() else {}
    return found


def _text_settings(encoder: Path, path: str | Path) -> dict[str, Any]:
    """Return the settings of the module Transformer, which must embed the tokens of texts."""
    file = next((encoder / name for name in _TEXT_FILES if (encoder / name).is_file()), encoder / _TEXT_FILES[0])
    found = _read(file, _Text)
    text = _Text.model_validate(found)
    _refuse_others({*(text.modality_config or {})}, path)
    wanted = {"method": "forward", "method_output_name": "last_hidden_state"}
    reads = (text.modality_config or {"text": wanted}).get("text", {})
    if (text.transformer_task, text.module_output_name) != ("feature-extraction", "token_embeddings") or any(
        reads.get(key) != value for key, value in wanted.items()
    ):
        raise RequestError(
            f"the Transformer of an embedding model must give the embeddings of its tokens (task feature-extraction, "
            f"output last_hidden_state), but that of {path} is for {text.transformer_task} and gives "
            f"{quoted(reads.get('method_output_name'))}; give a model that does"
        )
    return found


def _max_length(encoder: Path, asked: int | None) -> int | None:
    """Return the longest text: as the folder says, or what the tokenizer and the encoder's positions allow."""
    if asked is None:
        file = encoder / "tokenizer_config.json"
        asked = json.loads(file.read_text(encoding="utf-8")).get("model_max_length") if file.is_file() else None
    most = longest_sequence(load_config(encoder))
    lengths = [int(length) for length in (asked, most) if isinstance(length, (int, float)) and 0 < length < 1e9]
    return min(lengths, default=None)


def prompts_by_kind(options: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return the prompts by the kind of text; empty ones are left out."""
    prompts = options.get("prompts") or {}
    found = {kind: prompts[name] for name, kind in _PROMPTS.items() if prompts.get(name)}
    default = options.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise _SENTENCE.refused(f"{where} has no prompt named {quoted(default)}, its default")
    return found | ({"text": prompts[default]} if default is not None and prompts[default] else {})


Weights = Callable[[], dict[str, Tensor]]


def _readout(folder: Path, modules: list[_Module], options: Mapping[str, Any]) -> tuple[nn.Module, ...]:
    found: list[nn.Module] = []
    for module in modules[1:]:
        where = folder / module.path
        kind = module.type.rpartition(".")[2]
        config = _read(where / "config.json", _Pooling if kind == "Pooling" else _Layer)
        found.append(readout_module(kind, config, partial(_weights, where), where=str(where)))
    check_prompts(found[0], options.get("prompts") or {}, where=str(folder))
    return tuple(found)


def readout_module(kind: str, config: Mapping[str, Any], weights: Weights, *, where: str) -> nn.Module:
    """Return a module of a readout from its class, config and weights in sentence-transformers."""
    if kind == "Pooling":
        pooling = check(dict(config), _Pooling, _SENTENCE, where=where)
        return Pooling(_modes(pooling, where), include_prompt=pooling.include_prompt)
    layer = check(dict(config), _Layer, _SENTENCE, where=where)
    _check_layer(layer, kind, where)
    return _LAYERS[kind](layer, weights, where)


def check_prompts(pooling: nn.Module, prompts: Mapping[str, str | None], *, where: str) -> None:
    """Refuse a pooling that leaves the tokens of prompts out, if there are prompts."""
    assert isinstance(pooling, Pooling)
    if not pooling.include_prompt and any(prompts.values()):
        raise RequestError(
            f"pooling must include the prompt's tokens, but {where} leaves them out (include_prompt: false); give a "
            "model without prompts, or one that pools them too"
        )


def _modes(pooling: _Pooling, where: str) -> list[PoolingMode]:
    named = pooling.pooling_mode
    if named is None:
        return [mode for mode, flag in _FLAGS.items() if getattr(pooling, flag)] or ["mean"]
    asked = [named] if isinstance(named, str) else list(named)
    modes: list[PoolingMode] = [mode for name in asked for mode in get_args(PoolingMode) if mode == name]
    if not modes or len(modes) != len(asked):
        raise _SENTENCE.refused(
            f"{where} pools by {listed(asked) or 'nothing'}, and known are {', '.join(POOLING_MODES)}"
        )
    return modes


def _check_layer(layer: _Layer, kind: str, where: str) -> None:
    """Refuse a layer that does not turn one embedding per text into another."""
    output = layer.module_output_name or layer.module_input_name
    if (layer.module_input_name, output) != ("sentence_embedding", "sentence_embedding"):
        raise RequestError(
            f"{kind} must turn sentence_embedding into sentence_embedding, but that of {where} turns "
            f"{layer.module_input_name} into {output}; give a model of one embedding per text"
        )
    if layer.use_residual:
        raise RequestError(f"a Dense must have no residual, but that of {where} has one; give a model without it")


def _weights(folder: Path) -> dict[str, Tensor]:
    for name, load in (("model.safetensors", load_file), ("pytorch_model.bin", _load_bin)):
        if (folder / name).is_file():
            with refusing(f"{folder / name} must hold the weights of its module, but does not load", AGAIN):
                return load(folder / name)
    raise _SENTENCE.refused(f"{folder} has no model.safetensors or pytorch_model.bin")


def _load_bin(file: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return found


def _filled(layer: nn.Module, under: str, weights: Weights, where: str) -> None:
    """Load the weights of a module's layer, which has a name there."""
    named = {name.removeprefix(f"{under}."): tensor for name, tensor in weights().items()}
    with refusing(f"the weights of {where} must be those that its config describes, but are not", AGAIN):
        layer.load_state_dict(named)


def _dense(config: _Layer, weights: Weights, where: str) -> nn.Module:
    if config.in_features is None or config.out_features is None:
        raise _SENTENCE.refused(f"{where} has no in_features and out_features")
    linear = nn.Linear(config.in_features, config.out_features, bias=config.bias)
    _filled(linear, "linear", weights, where)
    return Dense(linear, _activation(config.activation_function, where))


def _activation(name: str, where: str) -> nn.Module:
    package, _, class_name = name.rpartition(".")
    found = None
    # Nothing else is imported: a folder must not say which code runs.
    if package == "torch.nn" or package.startswith("torch.nn.modules."):
        with refusing(f"the activation of {where} must be a class of torch.nn, but is {quoted(name)}", AGAIN):
            found = getattr(importlib.import_module(package), class_name)()
    if not isinstance(found, nn.Module):
        raise RequestError(
            f"the activation of a Dense must be a class of torch.nn, but that of {where} is {quoted(name)}; give a "
            "model with such a one"
        )
    return found


def _normalize(config: _Layer, weights: Weights, where: str) -> nn.Module:
    return Normalize()


def _layer_norm(config: _Layer, weights: Weights, where: str) -> nn.Module:
    if config.dimension is None:
        raise _SENTENCE.refused(f"{where} has no dimension")
    norm = nn.LayerNorm(config.dimension)
    _filled(norm, "norm", weights, where)
    return norm


def _dropout(config: _Layer, weights: Weights, where: str) -> nn.Module:
    return nn.Dropout(config.dropout)


# Class of a module that may follow the pooling -> what makes it.
_LAYERS: dict[str, Callable[[_Layer, Weights, str], nn.Module]] = {
    "Dense": _dense,
    "Normalize": _normalize,
    "LayerNorm": _layer_norm,
    "Dropout": _dropout,
}


# Write


def write_modules(model: TextEncoder, folder: Path) -> None:
    """Write what makes the folder of a saved encoder that of a SentenceTransformer.

    These are modules.json, a folder for every module of the readout, the length of texts and the prompts, and the
    tokenizer and the documents of the folder that the model comes from, without what is there already.
    """
    entries = [{"idx": 0, "name": "0", "path": "", "type": f"{_MODULES}.Transformer"}]
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
    """Write how texts are read: the longest one, in sentence_bert_config.json, and the prompts."""
    settings = model.settings
    write_json(folder / _TEXT_FILES[0], {"max_seq_length": settings.max_length, "do_lower_case": settings.lower})
    none: dict[str, Any] = {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write_json(folder / OPTIONS_FILE, dict(settings.options) or none)


def cross_encoder_files(activation: str, length: int | None, prompts: Mapping[str, str]) -> dict[str, Any]:
    """Return the JSON files, by name, that make the folder of a sequence classifier that of a CrossEncoder.

    They are those of sentence-transformers 6; version 5 reads the folder without them.
    """
    text = {"transformer_task": "sequence-classification"} | ({} if length is None else {"max_seq_length": length})
    return {
        MODULES_FILE: [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
        ],
        _TEXT_FILES[0]: text,
        OPTIONS_FILE: {
            "model_type": "CrossEncoder",
            "activation_fn": activation,
            "prompts": dict(prompts),
            "default_prompt_name": None,
        },
    }


def cross_encoder_in(folder: Path) -> dict[str, Any]:
    """Return the JSON files, by name, that make a checkpoint's folder that of a CrossEncoder; none if it is not."""
    names = (MODULES_FILE, _TEXT_FILES[0], OPTIONS_FILE)
    if not all((folder / name).is_file() for name in names):
        return {}
    if _read(folder / OPTIONS_FILE, _Options).get("model_type") != "CrossEncoder":
        return {}
    # Further modules would be a head of its own, with weights.
    modules = read_json(folder / MODULES_FILE, list[_Module], _SENTENCE)
    return {name: read_json(folder / name, Any, _SENTENCE) for name in names} if len(modules) == 1 else {}


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
            yield (
                "Dense",
                {
                    "in_features": linear.in_features,
                    "out_features": width,
                    "bias": linear.bias is not None,
                    "activation_function": f"{activation.__module__}.{activation.__name__}",
                },
                {f"linear.{name}": _stored(tensor) for name, tensor in linear.state_dict().items()},
            )
        elif isinstance(module, nn.LayerNorm):
            weights = {f"norm.{name}": _stored(tensor) for name, tensor in module.state_dict().items()}
            yield "LayerNorm", {"dimension": width}, weights
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


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous()


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file as sentence-transformers does."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
