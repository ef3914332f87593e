"""Use what transformers, torch and the Hub's clients keep private, or what their releases do differently.

Everything of this kind that the package needs is here, each a function named for what it does; `scripts/lint` refuses
such names in other files. A release is asked for a feature, never for its version. `scripts/quality/versions`
runs a contract on the oldest and the newest release.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, cache_utils, dynamic_module_utils
from transformers.core_model_loading import build_glob_alternation
from transformers.integrations.sdpa_attention import create_position_bias_mask as create_position_bias_mask
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto import modeling_auto
from transformers.models.auto.image_processing_auto import AutoImageProcessor as AutoImageProcessor

from ..errors import ExportError, RequestError, first_line
from ..progress import quiet


@contextmanager
def attributes_set(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, each an owner, a name and a value, inside the block, and afterwards put the old values back."""
    changes = list(changes)
    before = [getattr(owner, name) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(changes, before, strict=True):
            setattr(owner, name, value)


def buffers_as_loaded(model: nn.Module) -> AbstractContextManager[None]:
    """Give a model inside the block the buffers that it would have if it were loaded, where a cast has rounded them.

    `model.to(torch.bfloat16)` rounds the frequencies of rotary embeddings too. No checkpoint has them, and
    `from_pretrained(dtype=torch.bfloat16)` leaves them in float32.
    """
    changes: list[tuple[nn.Module, str, Tensor]] = []
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        unsaved = {name: buffers[name] for name in buffers if name in module._non_persistent_buffers_set}
        rounded = {name: b for name, b in unsaved.items() if b.is_floating_point() and b.element_size() < 4}
        if rounded and isinstance(getattr(module, "config", None), PreTrainedConfig):
            with suppress(Exception):  # whatever a class raises that takes more than a config
                new = dict(type(module)(module.config).named_buffers(recurse=False))
                exact = {name: new[name].to(buffer.device) for name, buffer in rounded.items()}
                # A buffer that differs by more than the rounding was set by somebody, and stays.
                changes += [(module, n, t) for n, t in exact.items() if torch.equal(t.to(rounded[n]), rounded[n])]
    return attributes_set(changes)


@contextmanager
def forwards_set(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let modules compute by other functions inside the block, and afterwards as before."""
    # A module has a `forward` of its own where accelerate, for example, wrapped that of its class.
    before = {module: vars(module)["forward"] for module in forwards if "forward" in vars(module)}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module in forwards:
            vars(module).pop("forward", None)
            if module in before:
                module.forward = before[module]


def _loaded_by(model_type: str) -> dict[str, str | tuple[str, ...]]:
    """Return name of an AutoModel class -> the name or names of the classes that it loads for a model type."""
    mappings = {name: getattr(auto, "_model_mapping", None) for name, auto in vars(modeling_auto).items()}
    # The inner mapping holds names of classes, so that no model has to be imported.
    return {
        name: mapping._model_mapping.get(model_type, ())
        for name, mapping in mappings.items()
        if name.startswith("AutoModel") and mapping is not None
    }


def auto_classes(name: str, model_type: str) -> list[str]:
    """Return the names of the AutoModel classes that load a model class, which is given by its name."""
    loaded = _loaded_by(model_type).items()
    return [auto for auto, names in loaded if name == names or (not isinstance(names, str) and name in names)]


def heads_on(stock: type[PreTrainedModel], model_type: str) -> dict[str, str]:
    """Return the classes that put a task head on the same base as `stock`: AutoModelFor class -> what it loads."""
    heads = {}
    for auto, name in _loaded_by(model_type).items():
        if auto.startswith("AutoModelFor") and isinstance(name, str):
            head = getattr(transformers, name, None)
            if getattr(head, "base_model_prefix", None) == stock.base_model_prefix:
                heads[auto] = name
    return heads


def has_auto_base(model: PreTrainedModel) -> bool:
    """Return whether `AutoModel` can load the base model of a model.

    For some types it loads another class, and the heads of some detectors put their own layers into their base model.
    """
    base: Any = model.base_model
    if "AutoModel" not in auto_classes(type(base).__name__, model.config.model_type):
        return False
    names = {name for name, _ in base.named_parameters()}
    return base is model or names <= {name for name, _ in empty_model(type(base), base.config).named_parameters()}


def model_class_of(config: PreTrainedConfig, *auto_names: str) -> type[PreTrainedModel] | None:
    """Return the model class of a config, by the first Auto class that knows it; None if none of them does."""
    mappings = (getattr(transformers, name)._model_mapping for name in auto_names)
    return next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)


@contextmanager
def layers_unwarned() -> Iterator[None]:
    """Silence transformers' warning, inside the block, of code that reads one number from a config whose layers differ.

    transformers cannot know that a slim class gives each layer its own size afterwards.
    """
    logger = logging.getLogger("transformers.integrations.heterogeneity.configuration_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def never_asking() -> Iterator[None]:
    """Refuse a checkpoint's own code, inside the block, by a RequestError; transformers would ask on standard input.

    `trust_remote_code=False` does not reach all loaders: `AutoProcessor` does not pass it to the image processor, nor a
    model to the models of its sub-configs. For these, a timeout of zero means no.
    """
    try:
        with attributes_set([(dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0)]):
            yield
    except ValueError as error:
        cause: BaseException | None = error
        while cause is not None and "trust_remote_code=True" not in str(cause):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise RequestError(
            "a checkpoint must load with the classes of transformers, as code in it is never run, but a part of this "
            "one needs code of its own (auto_map); save it as a class of transformers"
        ) from error


@never_asking()
def empty_model(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Return a model of a config, which is copied, on the meta device; its dtype is the config's by default."""
    options = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):
        return model_class._from_config(copy.deepcopy(config), **options)


def dtypes_in(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return name -> dtype of a model's tensors when its checkpoint is loaded in a dtype; some may stay float32."""
    skeleton = empty_model(type(model), model.config, dtype)
    dtypes = {name: tensor.dtype for name, tensor in (*skeleton.named_parameters(), *skeleton.named_buffers())}
    exceptions = skeleton._get_dtype_plan(dtype)  # pattern of names -> the dtype that these keep
    if exceptions:
        # One regular expression for all patterns, in which each is a named group.
        any_pattern, pattern_of_group, _ = build_glob_alternation(list(exceptions))
        for name in skeleton.state_dict():
            match = any_pattern.search(name)
            if match is not None and name in dtypes and match.lastgroup is not None:
                dtypes[name] = exceptions[pattern_of_group[match.lastgroup]]
    return dtypes


def saved_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors that `save_pretrained` saves, by their names in the model; tied parameters occur twice."""
    ignored = set(model._keys_to_ignore_on_save or ())
    return {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}


def reads_old_names(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass that loads tensors under their older names too.

    transformers renames them only for the classes that it takes to be its own.
    """
    return type(model_class.__name__, (model_class,), {"is_custom_code": classmethod(lambda cls: False)})


def commit_of(path: str | Path) -> str | None:
    """Return the commit of a file or folder in the Hub's cache; None for one elsewhere.

    Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    match = re.search(r"/models--[^/]+/snapshots/([^/]+)", Path(path).as_posix())
    return None if match is None else match[1]


def register_attention(name: str, function: Callable[..., Any], *, additive_mask: bool) -> None:
    """Register an attention function under a name that models can select.

    With `additive_mask` every call gets such a mask, (batch, 1, query, keys); else it gets a boolean mask or None.
    """
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, eager_mask if additive_mask else sdpa_mask)


def fused_attention_fits(model: PreTrainedModel) -> bool:
    """Return whether a model and all its submodels can compute attention by torch's fused function."""
    return all(submodel._supports_sdpa for submodel in model.modules() if isinstance(submodel, PreTrainedModel))


def attention_name(config: PreTrainedConfig) -> str:
    """Return the name of the attention function that a config selects."""
    return config._attn_implementation


def select_attention(config: PreTrainedConfig, like: PreTrainedConfig) -> None:
    """Let a config select the same attention function as the config `like`."""
    config._attn_implementation = like._attn_implementation


def configs_in(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a config and all its sub-configs."""
    children = [getattr(config, key, None) for key in config.sub_configs]
    return sum((configs_in(child) for child in children if child is not None), start=[config])


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """Return the configs of a model and its submodels, and all their sub-configs, each once."""
    outer = [submodel.config for submodel in model.modules() if isinstance(submodel, PreTrainedModel)]
    by_id = {id(config): config for outermost in outer for config in configs_in(outermost)}
    return list(by_id.values())


def attention_restored(configs: Iterable[PreTrainedConfig]) -> AbstractContextManager[None]:
    """Give configs back, after the block, the attention function that each had before."""
    # set_attn_implementation can restore neither None nor submodels that differ; this attribute can.
    name = "_attn_implementation_internal"
    return attributes_set([(config, name, getattr(config, name)) for config in configs])


def use_torch_attention(config: PreTrainedConfig) -> dict[str, Any]:
    """Change a config that names other attention than torch's own; return the options that load a model accordingly.

    A file may name the function that the model was trained with, such as FlashAttention. That one needs a package, a
    GPU or half precision, and its choice is no part of the model.
    """
    if all(inner._attn_implementation in (None, "eager", "sdpa") for inner in configs_in(config)):
        return {}
    config._attn_implementation = None
    return {"attn_implementation": None}


def attention_undecided(configs: Iterable[PreTrainedConfig]) -> AbstractContextManager[None]:
    """Let configs select no attention function inside the block, as after reading them from a file.

    A config may ask for attention weights and select a function that returns none: transformers loads such a model, but
    refuses to save or validate its config.
    """
    return attributes_set([(config, "_attn_implementation_internal", None) for config in configs])


@contextmanager
def attention_maps(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute attention eagerly inside the block and return its maps, in all submodels that can."""
    configs = configs_of(model)
    with attention_restored(configs):
        with quiet():  # transformers warns of submodels that have one attention function only
            model.set_attn_implementation("eager")
        with attributes_set((config, "_output_attentions", True) for config in configs):
            yield


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 numbers in full float32 inside the block, even if torch was told to round them, as to TF32.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
    """
    backends: Any = torch.backends
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    operations = (backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv)
    changes: list[tuple[Any, str, Any]] = [(operation, "fp32_precision", "ieee") for operation in operations]
    # This older flag must agree with the others, or torch.backends.cudnn.flags fails, which code of models may call.
    with suppress(RuntimeError):  # raised by torch where only the newer flags were set
        if cudnn.allow_tf32 is not None:
            changes = [(cudnn, "allow_tf32", False), *changes]
    with attributes_set(changes):
        yield


def multiplies_bfloat16() -> bool:
    """Return whether the CPU has instructions that multiply bfloat16 numbers and add the products in float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def bfloat16_products() -> AbstractContextManager[None]:
    """Round float32 numbers to bfloat16 before a CPU multiplies them inside the block, if `multiplies_bfloat16`.

    Products of numbers that are bfloat16 already stay exact, and are added in float32.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return attributes_set([(matmul, "fp32_precision", "bf16")] if multiplies_bfloat16() else [])


def products_in_tf32() -> bool:
    """Return whether torch was told to multiply float32 numbers on a GPU in TF32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def graphs_skipped() -> int:
    """Return how often in this process torch compiled a graph but gave up capturing a CUDA graph of it."""
    import torch._dynamo.utils

    return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"])


def forget_hooks(module: nn.Module) -> None:
    """Remove from a copied module the hooks and the forwards that were put on the original."""
    vars(module).pop("forward", None)
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()
    # transformers installs its hooks for hidden states on the first forward pass only, and sets this mark.
    vars(module).pop("_output_capturing_hooks_installed", None)


def share_tensors(model: nn.Module, other: nn.Module) -> None:
    """Replace a model's parameters and buffers by those of another model, whose modules have the same names."""
    for name, module in other.named_modules():
        if module._parameters or module._buffers:
            target = model.get_submodule(name)
            target._parameters.update(module._parameters)
            target._buffers.update(module._buffers)


def with_backend(tokenizer: Any, backend: Any) -> Any:
    """Return a copy of a tokenizer that computes with another tokenizer of `tokenizers`."""
    copied = copy.deepcopy(tokenizer)
    copied._tokenizer = backend
    return copied


def without_compiler(model: Any) -> Any:
    """Return the model that `torch.compile` wrapped; any other model as it is."""
    return getattr(model, "_orig_mod", model)


def uncompiled(model: nn.Module) -> AbstractContextManager[None]:
    """Run, inside the block, the uncompiled code of modules that were compiled in place by `nn.Module.compile`.

    Compiled code ignores hooks that were registered after its first run.
    """
    compiled = [module for module in model.modules() if module._compiled_call_impl]
    return attributes_set([(module, "_compiled_call_impl", None) for module in compiled])


@contextmanager
def refused_compilations(who: str) -> Iterator[None]:
    """Raise an error of torch's compiler inside the block as an ExportError whose message begins with `who`."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        raise ExportError(f"{who} must compile the model, and torch refused: {first_line(error)}") from error


def compile_many_shapes(most: int) -> None:
    """Set torch's limit on how many shapes of a model are compiled, for the whole process."""
    limits: Any = torch._dynamo.config
    limits.recompile_limit = limits.accumulated_recompile_limit = most


def ask_for_output_alone(configs: Iterable[PreTrainedConfig], *, cache: bool = False) -> Callable[[], None]:
    """Change configs so that a model returns its output alone, and with `cache` also its keys and values.

    It then returns no hidden states, attention weights, router logits or plain tuples. The function that is returned
    puts the old values back.
    """
    wanted = {"use_cache": cache, "return_dict": True, "return_loss": False}
    wanted |= {"output_hidden_states": False, "_output_attentions": False, "output_router_logits": False}
    changed = []
    for fields in [vars(config) for config in configs]:
        before = {name: fields[name] for name in wanted if name in fields}
        fields.update({name: wanted[name] for name in before})
        changed.append((fields, before))

    def put_back() -> None:
        for fields, before in changed:
            fields.update(before)

    return put_back


def cache_name(model: nn.Module) -> str | None:
    """Return the name of the argument by which the model's forward takes its cache, or None."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in accepted), None)


def cache_of(output: Mapping[str, Any]) -> Any:
    """Return the cache in a model's output, or None."""
    return next((output[name] for name in ("cache", "past_key_values") if output.get(name) is not None), None)


def keys_and_values(output: Mapping[str, Any]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the keys and values in the cache of a model's output: number of the layer -> both, if it has any."""
    layers = enumerate(getattr(cache_of(output), "layers", ()))
    return {number: (layer.keys, layer.values) for number, layer in layers if getattr(layer, "keys", None) is not None}


def keeps_recurrent_state(config: PreTrainedConfig) -> bool:
    """Return whether a model's cache has layers with a recurrent state in place of keys and values."""
    layers = DynamicCache(config=config).layers
    return any(isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin) for layer in layers)


def exported_program(module: Any, sample: Mapping[str, Any], fusions: str, shapes: Mapping[str, Any] | None) -> Any:
    """Export a module by transformers to an `onnx_ir.Model`.

    `sample` has inputs by keyword: tensors, a cache, or flags, which do not become inputs of the graph. `fusions` is
    the provider whose fused operators may be used, "cpu" or "cuda". `shapes` has the dynamic axes of each input; None
    makes all axes dynamic that can be.
    """
    from transformers.exporters import OnnxConfig, OnnxExporter

    options: dict[str, Any] = {"dynamic": True, "dynamic_shapes": shapes, "ort_fusions": fusions}
    with _matching_last_nodes():
        return OnnxExporter().export(module, dict(sample), OnnxConfig(**options)).program


@contextmanager
def _matching_last_nodes() -> Iterator[None]:
    """Let onnxscript try a pattern only at nodes of the operator that the pattern ends in, inside the block.

    For a pattern with two last nodes, it otherwise lists all pairs of nodes of the graph before it compares the first.
    Matchers keep their last match, and with it the weights in its graph; these are freed after the block.
    """
    from onnxscript.rewriter import _basics, _matcher

    matcher: Any = _matcher.SimplePatternMatcher
    match, used = matcher.match, set[Any]()

    def match_last(self: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        last = self.pattern.output_nodes[0]
        if last.op.matches(node.op_type) and last.domain.matches(node.domain):
            used.add(self)
            return match(self, model, graph, node, **options)
        return _basics.MatchResult().fail("the node has another operator than the pattern's last one", node)

    try:
        with attributes_set([(matcher, "match", match_last)]):
            yield
    finally:
        for matcher_of_pattern in used:
            matcher_of_pattern._graph = matcher_of_pattern._current_node = matcher_of_pattern._match = None


def sentence_options(model: Any) -> dict[str, Any]:
    """Return what a SentenceTransformer writes into config_sentence_transformers.json."""
    return model._get_model_config()


def lacks_pooler(model: PreTrainedModel, missing: Iterable[str]) -> bool:
    """Return whether the missing weights are those of the optional pooler alone, which embeddings of texts do not use.

    Encoders that were trained as embedding models from a masked language model have none.
    """
    names = list(missing)
    classes = type(model).__mro__[:-1]  # without `object`, which has no signature
    is_optional = any("add_pooling_layer" in inspect.signature(one_class).parameters for one_class in classes)
    return is_optional and bool(names) and all(name.startswith("pooler.") for name in names)
