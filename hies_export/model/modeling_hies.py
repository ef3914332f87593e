"""Model classes of transformers with pruned layers: a stock class, resized to the shapes that config.json names.

hies_export writes this file into every checkpoint whose config cannot describe its shapes otherwise. It works for every
architecture, and needs torch and transformers only. It reads five entries of `config.hies_export`, four of them by
dotted names under the base model:

linear       resized Linear or Conv1D -> [out_features, in_features]
parameters   resized parameter of another layer -> its shape
attributes   module -> changed attribute -> its value; "config.NAME" is a value that this module reads from its config
narrowed     module -> argument with values for every head of the stock model, such as a position bias that layers share
             -> [axis of the heads, their number, those that the module has]

The fifth, `per_layer_config`, says the numbers of heads and neurons again, in transformers' schema for layers that
differ. A copy of it stands at the top of config.json, where servers read it.

Licence: Apache-2.0.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import shutil

import torch
import transformers


class LayerConfig:
    """The config of a model with other values for one layer."""

    def __init__(self, config, **own):
        """Let values of its `own` hide those of `config`."""
        self.__dict__.update(own, _config=config)

    def __getattr__(self, name):
        if name.startswith("__") or "_config" not in self.__dict__:  # asked while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self._config, name)


def get_attribute(module, name):
    """Return an attribute of a module, or for "config.NAME" a value of its config."""
    for part in name.split("."):
        module = getattr(module, part)
    return module


def set_attribute(module, name, value):
    """Set an attribute of a module, or for "config.NAME" what this module alone reads from its config."""
    if name.startswith("config."):
        module.config = LayerConfig(module.config, **{name.removeprefix("config."): value})
    else:
        setattr(module, name, value)


class Narrow:
    """A mixin in front of a module's class, which takes from its `narrowed` arguments the values of its own heads."""


@functools.cache
def _narrow_class(stock):
    """Return a class that narrows its arguments, and then computes as `stock`; its bases are `Narrow` and `stock`."""
    names = list(inspect.signature(stock.forward).parameters)[1:]  # without `self`

    @functools.wraps(stock.forward)
    def forward(self, *args, **kwargs):
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        narrowed = {}
        for name, (axis, total, heads) in self.narrowed.items():
            if given.get(name) is not None:
                by_head = given[name].unflatten(axis, (-1, total))
                index = torch.tensor(heads, device=by_head.device)
                narrowed[name] = by_head.index_select(axis + 1, index).flatten(axis, axis + 1)
        outputs = stock.forward(self, **{**given, **narrowed})
        # A layer may return an argument for the next one, which needs the values of all heads.
        full = {id(value): given[name] for name, value in narrowed.items()}
        return tuple(full.get(id(o), o) for o in outputs) if isinstance(outputs, tuple) else outputs

    return type(stock.__name__, (Narrow, stock), {"__module__": __name__, "__doc__": stock.__doc__, "forward": forward})


def narrow(module, arguments):
    """Let a module take its heads from some arguments, as an entry of `narrowed` says; from none, it is stock again."""
    stock = type(module).__mro__[2] if isinstance(module, Narrow) else type(module)
    module.__class__ = _narrow_class(stock) if arguments else stock
    module.__dict__.pop("narrowed", None)
    if arguments:
        module.narrowed = arguments


def describe_layers(config, layers):
    """Let a config's file, but not the config in memory, say what each layer has; without `layers`, remove that again.

    In memory the config has one number for all layers, which the code of a stock class reads before its layers are
    resized. transformers would refuse such reads of a config whose layers differ, or warn of them where
    `allow_global_per_layer_attribute_access` allows them.
    """
    fields = vars(config)
    if layers:
        if getattr(config, "is_heterogeneous", False):  # as it is when it was read from a file
            config.per_layer_config = None
        # Not by `setattr`, by which the layers of the config would differ in memory too.
        fields.update(per_layer_config=layers, allow_global_per_layer_attribute_access=True)
    elif "per_layer_config" in fields:
        del fields["per_layer_config"]
        fields.pop("allow_global_per_layer_attribute_access", None)


def keep_layers_for_files(config):
    """Give a config that was read from a slim folder one number for all layers in memory; see `describe_layers`."""
    layers = (getattr(config, "hies_export", None) or {}).get("per_layer_config")
    if layers and getattr(config, "is_heterogeneous", False):
        describe_layers(config, layers)


def _set_by_name(model, name, value):
    """Replace the layer or parameter of a dotted name."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, value)


def _resize_linear(model, shapes):
    """Replace the linear layers in `shapes`, and those that share their weights, by new ones of these shapes."""
    base = model.base_model
    named = [base.get_submodule(name) for name in shapes]
    for name, (out_features, in_features) in shapes.items():
        old = base.get_submodule(name)
        if isinstance(old, torch.nn.Linear):
            new = torch.nn.Linear(in_features, out_features, bias=old.bias is not None)
        elif isinstance(old, transformers.Conv1D):
            new = transformers.Conv1D(out_features, in_features)
        else:
            raise TypeError(f"config.hies_export must name linear layers, got {name}, a {type(old).__name__}")
        new = new.to(old.weight.device, old.weight.dtype)
        # Layers with the same weight may have no entry, such as those of an auxiliary loss.
        same = [n for n, m in model.named_modules() if getattr(m, "weight", None) is old.weight and m not in named]
        _set_by_name(base, name, new)
        for other in same:
            _set_by_name(model, other, new)


class SlimModel:
    """A mixin in front of a stock class, which builds the stock model and then resizes its pruned layers."""

    def __init__(self, config, *args, **kwargs):
        """Build the stock model of `config`, and resize the layers that `config.hies_export` names."""
        # transformers keeps a class that it loaded with its code, and may build a model without the block from it.
        block = getattr(config, "hies_export", None) or {"linear": {}, "attributes": {}}
        keep_layers_for_files(config)
        super().__init__(config, *args, **kwargs)
        _resize_linear(self, block["linear"])
        for name, shape in block.get("parameters", {}).items():
            old = self.base_model.get_parameter(name)
            new = torch.nn.Parameter(torch.zeros(shape, dtype=old.dtype, device=old.device))
            _set_by_name(self.base_model, name, new)
        for name, attributes in block["attributes"].items():
            module = self.base_model.get_submodule(name)
            for attribute, value in attributes.items():
                if not isinstance(value, int) or not isinstance(get_attribute(module, attribute), int):
                    raise TypeError(
                        f"config.hies_export must give numbers to numbers, got {name}.{attribute} = {value}"
                    )
                set_attribute(module, attribute, value)
        for name, arguments in block.get("narrowed", {}).items():
            narrow(self.base_model.get_submodule(name), arguments)

    def _heads_differ(self):
        """Return whether some attention has other numbers of heads than the config, by which caches are sized."""
        block = getattr(self.config, "hies_export", None) or {"linear": {}}
        parents = {name.rpartition(".")[0] for name in block["linear"]}
        return any(hasattr(self.base_model.get_submodule(parent), "layer_idx") for parent in parents)

    def _get_static_cache_init_shape(self):
        """Let the first keys of each layer size a static cache, as the config cannot."""
        return None if self._heads_differ() else super()._get_static_cache_init_shape()

    def init_continuous_batching(self, *args, **kwargs):
        """Start what `generate_batch` uses; a ValueError if layers differ in the heads that its one cache has."""
        if self._heads_differ():
            raise ValueError(
                "continuous batching needs layers with the same number of heads, and those of this model differ; call "
                "generate, or prune with allocation: uniform"
            )
        return super().init_continuous_batching(*args, **kwargs)

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Save as the stock class does, with this file, and the weights under the names of the modules."""
        if getattr(self.config, "hies_export", None) is None:
            return super().save_pretrained(save_directory, *args, **kwargs)
        os.makedirs(save_directory, exist_ok=True)
        target = os.path.join(save_directory, "modeling_hies.py")
        if not os.path.exists(target) or not os.path.samefile(__file__, target):
            shutil.copyfile(__file__, target)
        # On loading, transformers renames older keys for its own classes only, and this is none of them.
        kwargs["save_original_format"] = False
        return super().save_pretrained(save_directory, *args, **kwargs)


def _sentence_transformer_module():
    """Return sentence-transformers' class `Transformer`, changed to load the model class that config.json names.

    The stock one loads a stock class for encoder-decoders, whose layers have other sizes.
    """
    # Imported late: only sentence-transformers, by modules.json, asks for this class.
    stock = importlib.import_module("sentence_transformers.base.modules").Transformer

    def load_encoder(self, path, config, **kwargs):
        return __getattr__(config.architectures[0]).from_pretrained(path, config=config, **kwargs)

    # modules.json names the class by the file in its folder, not by this package.
    attributes = {"__module__": __name__.removeprefix("hies_export.model."), "__doc__": stock.__doc__}
    return type("Transformer", (stock,), attributes | {"_load_encoder_only_model": load_encoder})


def __getattr__(name):
    """Make the slim class of a model class of transformers, with the same name, when it is first asked for."""
    if name == "Transformer":
        return globals().setdefault(name, _sentence_transformer_module())
    stock = getattr(transformers, name, None) if not name.startswith("_") else None
    if not (isinstance(stock, type) and issubclass(stock, transformers.PreTrainedModel)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    slim = type(name, (SlimModel, stock), {"__module__": __name__, "__doc__": stock.__doc__})
    return globals().setdefault(name, slim)
