"""Load embedding models and rerankers by sentence-transformers, which reads, runs and saves them.

No code of a folder is executed: this package loads the encoder, and sentence-transformers has the other modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

from ..data.processors import token_numbers
from ..errors import RequestError, listed, quoted, refusing, require_package, shortened
from ..files import Rule, Schema, read_json
from ..model.internals import layers_unwarned, model_class_of, never_asking, sentence_options
from ..model.text_encoder import ENCODERS, TextEncoder, Unwrapped
from ..model.tokens import longest_sequence, shortest_limit
from ..slim.config import slim_class
from .beside import MODULES_FILE, fetch, fetch_whole, write_json
from .classes import AGAIN, find_model_class, load_config, read_config
from .weights import load_weights

OPTIONS_FILE = "config_sentence_transformers.json"
# Classes of sentence-transformers that give one embedding for a text, or one score for a pair, and others.
EMBEDDER, RERANKER = "SentenceTransformer", "CrossEncoder"
_OTHERS = ("SparseEncoder", "MultiVectorEncoder")
# The module in a slim folder whose encoder sentence-transformers would load by a stock class; see `modeling_hies`.
_SLIM_ENCODER = "modeling_hies.Transformer"
# The widest embeddings have some thousands of features.
MOST_FEATURES = 1 << 17
_AFTER_POOLING = ("Dense", "Normalize", "LayerNorm", "Dropout")
_REMEDY = "correct its files, or save it again"
# How a folder of sentence-transformers is made from the encoder {path}.
_MAKE = """\
  from sentence_transformers import SentenceTransformer
  from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
  encoder = Transformer("{path}")
  pooling = Pooling(encoder.get_embedding_dimension(), "mean")
  SentenceTransformer(modules=[encoder, pooling, Normalize()]).save_pretrained("FOLDER")"""
_SENTENCE = Rule("a folder of sentence-transformers must hold what that wrote", AGAIN)
Load = Callable[[type[PreTrainedModel], Path, Any], PreTrainedModel]
"""Loads a model of a class from a folder with a config."""


class _Module(Schema):
    """An entry of modules.json."""

    path: str
    type: str


class _Options(Schema):
    """The field of config_sentence_transformers.json that says how to load the folder."""

    model_type: str | None = None


def kind_in(path: str | Path) -> str | None:
    """Return the class name by which sentence-transformers saved a folder or Hub id; None without a modules.json."""
    folder = fetch(path)
    if not (folder / MODULES_FILE).is_file():
        return None
    options = folder / OPTIONS_FILE
    settings = read_json(options, _Options, _SENTENCE) if options.is_file() else {}
    return str(settings.get("model_type") or EMBEDDER)


def is_sentence_transformer(path: str | Path) -> bool:
    """Return whether a folder or Hub id has the modules of a SentenceTransformer; a CrossEncoder has other ones."""
    return kind_in(path) not in (None, RERANKER)


@layers_unwarned()
@never_asking()
def load_sentence(
    path: str | Path, *, revision: str | None = None, device: str = "cpu", load: Load | None = None, **kwargs: Any
) -> Unwrapped:
    """Load a SentenceTransformer or CrossEncoder, slim or not.

    Args:
        path: Folder or Hub id.
        revision: Revision of a Hub id, whose files are fetched.
        device: Where the model is put.
        load: Loads the encoder; by default with `kwargs` for `from_pretrained`, such as `dtype`.

    Raises:
        MissingRuntimeError: sentence-transformers is not installed.
        RequestError: The folder has no modules.json, is damaged, or has modules that are not supported.
    """
    extra = "sentence-transformers"
    require_package("sentence_transformers", who="an embedding model needs", package=extra, extra=extra)
    import sentence_transformers

    load = load or (lambda model_class, folder, config: load_weights(model_class, folder, config=config, **kwargs))
    folder = fetch_whole(path, revision=revision)
    kind = kind_in(folder)
    if kind is None:
        read_config(folder)
        raise RequestError(
            f"an embedding model must be a folder of sentence-transformers, but {path} has no {MODULES_FILE}; make one "
            "with the pooling that the encoder was trained with (mean, cls, lasttoken or max), and without Normalize "
            f"if its embeddings do not have length 1:\n{_MAKE.format(path=path)}"
        )
    entries = read_json(folder / MODULES_FILE, list[_Module], _SENTENCE)
    modules = [_Module.model_validate(entry) for entry in entries]
    _check_modules(kind, [module.type for module in modules], str(path))
    for module in modules[1:]:
        _check_sizes(folder / module.path / "config.json")
    with refusing(f"sentence-transformers must load {path}, but fails", _REMEDY):
        from sentence_transformers.base.modules import Transformer

        base = getattr(sentence_transformers, kind)
        # Classes that modules.json names are looked up in `_module_classes` before they are imported.
        loading_class: Any = type(kind, (base,), {"_module_classes": {modules[0].type: _loading(Transformer, load)}})
        loaded = loading_class(str(folder), device=device, local_files_only=True)
        loaded.__class__, loaded[0].__class__ = base, Transformer  # the subclasses are for loading only
        return replace(unwrap(loaded, where=str(path)), folder=folder / modules[0].path)


def _check_sizes(file: Path) -> None:
    """Refuse a module with implausibly large sizes before its weights, which would fill the memory, are made."""
    sizes = read_json(file, dict[str, Any], _SENTENCE) if file.is_file() else {}
    for name, size in sizes.items():
        if isinstance(size, int) and size > MOST_FEATURES:
            raise RequestError(f"a size must be at most {MOST_FEATURES:,}, but {file} has {name}: {quoted(size)}")


def _loading(transformer: Any, load: Load) -> Any:
    """Return a subclass of the module class Transformer of sentence-transformers that loads its model by `load`."""

    def load_model(self: Any, path: str, task: str, config: Any, *_: Any, subfolder: str = "", **__: Any) -> Any:
        folder = Path(path) / subfolder
        model_class = encoder_class(folder) if task == "feature-extraction" else find_model_class(folder)
        return load(model_class, folder, config)

    return type("Transformer", (transformer,), {"_load_model": load_model, "__module__": transformer.__module__})


def encoder_class(path: Path) -> type[PreTrainedModel]:
    """Return the class by which sentence-transformers loads an encoder, or its slim version.

    It is the base model's, even if the config names a class with a head, such as BertForMaskedLM, or none. Raises a
    RequestError if the encoder takes more than texts, or is a part of an encoder-decoder that has no own class.
    """
    config = load_config(path)
    part = ENCODERS.get(config.model_type)  # the encoder of an encoder-decoder
    stock_class = model_class_of(config, "AutoModel") if part is None else getattr(transformers, part)
    if stock_class is None or (part is None and config.is_encoder_decoder):
        raise RequestError(f"an embedding model must be an encoder, but {path} is a {config.model_type}; give another")
    _refuse_other_modalities(stock_class.input_modalities, str(path))
    return stock_class if getattr(config, "hies_export", None) is None else slim_class(stock_class)


def _refuse_other_modalities(modalities: str | Sequence[str], where: str) -> None:
    """Refuse a model that embeds other things than texts, or that puts texts into a chat template ("message")."""
    taken = {modalities} if isinstance(modalities, str) else {*modalities}  # a single one is a string
    if taken != {"text"}:
        raise RequestError(
            f"an embedding model must embed texts as they are, but {where} takes {listed(sorted(taken))}"
        )


def unwrap(model: Any, where: str = "") -> Unwrapped:
    """Return the model of transformers in a SentenceTransformer or CrossEncoder, or a model that is one itself.

    The object is not changed; messages call it `where`.
    """
    classes = [c for c in type(model).__mro__ if c.__module__.split(".")[0] == "sentence_transformers"]
    kind = next((c.__name__ for c in classes if c.__name__ in (EMBEDDER, RERANKER, *_OTHERS)), None)
    if kind is None:
        return Unwrapped(model)
    where = where or f"this {type(model).__name__}"
    _check_modules(kind, [f"{type(m).__module__}.{type(m).__name__}" for m in model], where)
    if not isinstance(model[0].model, PreTrainedModel):
        raise RequestError(
            f"the encoder must be a model of transformers in torch, but {where} has none; load it with backend='torch'"
        )
    _refuse_other_modalities(model[0].modalities, where)
    with refusing(f"the tokenizer of {where} must be one that can be copied, but is not", _REMEDY):
        token_numbers(model.tokenizer)
    return _of_embedder(model, where) if kind == EMBEDDER else _of_reranker(model, where)


def _check_modules(kind: str, types: Sequence[str], where: str) -> None:
    """Refuse a SentenceTransformer or CrossEncoder with other modules than those of a text encoder or classifier.

    `types` are the full names of the modules' classes, and `where` names the object in messages.
    """
    names = [full.rpartition(".")[2] for full in types]
    known = all(full.startswith("sentence_transformers.") or full.endswith(_SLIM_ENCODER) for full in types)
    is_embedder = names[:2] == ["Transformer", "Pooling"] and set(names[2:]) <= set(_AFTER_POOLING)
    if kind not in (EMBEDDER, RERANKER):
        raise RequestError(
            f"the model must give one embedding for a text or one score for a pair, but {where} is a {kind}, which "
            f"gives others; give a {EMBEDDER} or a {RERANKER}"
        )
    if kind == RERANKER and names != ["Transformer"]:
        raise RequestError(
            f"a CrossEncoder must be a single Transformer with its own head, but {where} is "
            f"{shortened(listed(names)) or 'empty'}; give one of a model for sequence classification"
        )
    if not known or (kind == EMBEDDER and not is_embedder):
        raise RequestError(
            f"an embedding model must be a Transformer, a Pooling, and then any of {', '.join(_AFTER_POOLING)} of "
            f"sentence-transformers, as code in a checkpoint is never run, but {where} is "
            f"{shortened(listed(types)) or 'empty'}; give a model of these modules"
        )


def _of_embedder(given: Any, where: str) -> Unwrapped:
    """Unwrap a SentenceTransformer; refuse settings of its prompts and modules that are not supported."""
    if not given[1].include_prompt and any(given.prompts.values()):
        raise RequestError(
            f"pooling must include the prompt's tokens, but {where} leaves them out (include_prompt: false); give a "
            "model without prompts, or one that pools them too"
        )
    for module in [*given][2:]:
        fields = {getattr(module, name, "sentence_embedding") for name in ("module_input_name", "module_output_name")}
        if fields != {"sentence_embedding"}:
            raise RequestError(
                f"a module after the pooling must turn one embedding per text into another, but a "
                f"{type(module).__name__} of {where} is of {shortened(listed(sorted(map(str, fields))))}; give another"
            )
    width = given.truncate_dim or 1
    if not isinstance(width, int) or width < 1:
        raise RequestError(f"truncate_dim must be a number of at least 1, got {quoted(width)} in {where}; correct it")
    # A copy, as a tokenizer keeps how it was last called, and saves that.
    tokenizer = copy.deepcopy(given.tokenizer)
    return Unwrapped(TextEncoder(given), tokenizer, lambda slim, new_tokenizer: slim.wrapped(new_tokenizer))


def _of_reranker(given: Any, where: str) -> Unwrapped:
    """Unwrap a CrossEncoder; refuse a default prompt, and settings of its tokenizer that are not supported."""
    transformer, model, default = given[0], given[0].model, given.default_prompt_name
    if default is not None and given.prompts.get(default):
        raise RequestError(
            f"a CrossEncoder must read its pairs without a prompt, but {where} has {quoted(default)} by default; set "
            "its default_prompt_name to None, and put the prompt into the texts"
        )
    settings = transformer.processing_kwargs
    unsupported = {**settings.get("text", {}), **settings.get("common", {})}  # once max_length is taken out
    length = unsupported.pop("max_length", transformer.max_seq_length)
    if unsupported or transformer.transformer_task != "sequence-classification":
        asked = listed(unsupported) or transformer.transformer_task
        raise RequestError(f"a CrossEncoder must classify pairs that its tokenizer cuts, but {where} asks for {asked}")

    def wrap(slim: nn.Module, tokenizer: Any) -> Any:
        memo: dict[int, Any] = {id(model): slim}  # deepcopy takes what its memo already holds for the finished copy
        if tokenizer is not None:
            memo[id(transformer.tokenizer)] = tokenizer
        return copy.deepcopy(given, memo)

    limit = shortest_limit(length, longest_sequence(model.config))
    return Unwrapped(model, copy.deepcopy(given.tokenizer), wrap, limit)


SERVED_FILE = "hies_served.json"
_CLASS = "hies_export.served.OnnxEncoder"
_RULE = Rule("the settings of a served model must be what hies_export wrote", "export the model again")


class Served(Schema):
    """The content of hies_served.json."""

    file: str  # name of the graph's file
    dimension: int  # width of the embeddings
    runtime: str = "onnxruntime-cpu"  # as for `load_runtime`
    dtype: str | None = None  # to compute in, if the runtime offers others than the graph's
    threads: int | None = None  # of the CPU; None for as many as torch has


def write_served(folder: Path, model: TextEncoder, *, file: str, runtime: str, dtype: str | None = None) -> None:
    """Make the folder of an exported model, with its graph and tokenizer, loadable by sentence-transformers.

    modules.json, the settings of its module and the prompts are added. `file`, `runtime` and `dtype` are as in
    `Served`.
    """
    write_json(folder / MODULES_FILE, [{"idx": 0, "name": "0", "path": "", "type": _CLASS}])
    served = Served(file=file, dimension=model.dimension, runtime=runtime, dtype=dtype)
    write_json(folder / SERVED_FILE, served.model_dump())
    write_json(folder / OPTIONS_FILE, sentence_options(model.reader.given))
    model.reader.given[0].save_config(str(folder))


def read_served(folder: Path) -> Served:
    """Return the settings of a folder that `write_served` wrote; refuse a graph outside of the folder."""
    served = Served.model_validate(read_json(folder / SERVED_FILE, Served, _RULE))
    if served.file in ("", "..") or Path(served.file).name != served.file:
        raise _RULE.refused(f"{folder / SERVED_FILE} names {served.file}, which is not in its folder")
    return served
