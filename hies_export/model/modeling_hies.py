"""A model of transformers whose attention lost heads: the stock class, rebuilt to the shapes named in config.json.

This file knows no architecture and travels with every checkpoint whose config alone cannot describe its shapes.
`config.hies_export` maps each resized Linear or Conv1D (dotted name under the base model) to [out_features,
in_features], each resized parameter of other layers to its shape, and each changed attribute of a module to its value;
"config.NAME" is what that module alone reads from its config. Apache-2.0.
"""

from __future__ import annotations

import os
import shutil

import torch
import transformers


class LayerConfig:
    """The config of a model as one layer sees it: a few values of its own, everything else the model's."""

    def __init__(self, config, **own):
        """Put `own` before `config`."""
        self.__dict__.update(own, _config=config)

    def __getattr__(self, name):
        if name.startswith("__") or "_config" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._config, name)


def get_attribute(module, name):
    """The value of an attribute of a module, or of its config for "config.NAME"."""
    for part in name.split("."):
        module = getattr(module, part)
    return module


def set_attribute(module, name, value):
    """Set an attribute of a module; what it reads from its config is set for this module alone."""
    if name.startswith("config."):
        module.config = LayerConfig(module.config, **{name.removeprefix("config."): value})
    else:
        setattr(module, name, value)


class SlimModel:
    """Put before a stock class: builds it, then gives the cut layers their sizes."""

    def __init__(self, config, *args, **kwargs):
        """Build the stock model of `config` and resize what `config.hies_export` names."""
        super().__init__(config, *args, **kwargs)
        # A class loaded with its code may be asked for a model without the block too: transformers remembers it.
        block = getattr(config, "hies_export", None) or {"linear": {}, "attributes": {}}
        for name, (out_features, in_features) in block["linear"].items():
            old = self.base_model.get_submodule(name)
            if isinstance(old, torch.nn.Linear):
                new = torch.nn.Linear(in_features, out_features, bias=old.bias is not None)
            else:
                new = type(old)(out_features, in_features)
            owner, _, attribute = name.rpartition(".")
            setattr(self.base_model.get_submodule(owner), attribute, new.to(old.weight.device, old.weight.dtype))
        for name, shape in block.get("parameters", {}).items():
            old = self.base_model.get_parameter(name)
            owner, _, attribute = name.rpartition(".")
            new = torch.nn.Parameter(torch.zeros(shape, dtype=old.dtype, device=old.device))
            setattr(self.base_model.get_submodule(owner), attribute, new)
        for name, attributes in block["attributes"].items():
            for attribute, value in attributes.items():
                set_attribute(self.base_model.get_submodule(name), attribute, value)

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Save as the stock class does, with this file beside the weights and keys that are module names."""
        if getattr(self.config, "hies_export", None) is None:
            return super().save_pretrained(save_directory, *args, **kwargs)
        os.makedirs(save_directory, exist_ok=True)
        target = os.path.join(save_directory, "modeling_hies.py")
        if not os.path.exists(target) or not os.path.samefile(__file__, target):
            shutil.copyfile(__file__, target)
        # transformers renames older keys on loading by class, and skips classes from outside, such as this one.
        kwargs["save_original_format"] = False
        return super().save_pretrained(save_directory, *args, **kwargs)


def __getattr__(name):
    """The slim class of any model class of transformers, under the same name."""
    stock = getattr(transformers, name, None) if not name.startswith("_") else None
    if not (isinstance(stock, type) and issubclass(stock, transformers.PreTrainedModel)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    slim = type(name, (SlimModel, stock), {"__module__": __name__, "__doc__": stock.__doc__})
    return globals().setdefault(name, slim)
