"""Do once a process what is the same for several models: read operators, trace a graph of a config, count FLOPs."""

import copy
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hies_export.forms.onnx import trace
from hies_export.forms.onnx.export import export_onnx
from hies_export.forms.traces import Traces
from hies_export.units import counts

# What a cut changes in a config, and what says nothing of the graph.
NOT_OF_THE_GRAPH = {
    *("hies_export", "auto_map", "per_layer_config", "allow_global_per_layer_attribute_access", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("_name_or_path", "architectures", "dtype", "transformers_version"),
}


def keyed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let graphs be made of those of a model of the same config only."""

    def of_config(traces: Traces, key: Any, model: Any, *program: Any) -> Any:
        config = {name: value for name, value in model.config.to_dict().items() if name not in NOT_OF_THE_GRAPH}
        known = json.dumps(config, sort_keys=True, default=str), str(getattr(model, "readout", None))
        return method(traces, (key, type(model).__name__, known), model, *program)

    return of_config


TEMPLATES: dict[Any, Any] = {}
COUNTS: dict[Any, dict[str, int]] = {}


@contextmanager
def traced_once() -> Iterator[None]:
    """Let all exports of this process share one `Traces`, whose graphs are compared with torch as those of a trace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Traces, "__init__", lambda traces: vars(traces).update(_templates=TEMPLATES))
        for name in ("add", "resized"):
            patch.setattr(Traces, name, keyed(getattr(Traces, name)))
        patch.setitem(export_onnx.__kwdefaults__, "traces", Traces())
        yield


@functools.cache
def _operators(read: Callable[..., Any], *version: Any, **options: Any) -> Any:
    return read(*version, **options)


@contextmanager
def operators_read_once() -> Iterator[None]:
    """Let torch parse onnxscript's operators once, not half a second in every export."""
    export = trace.exported_program

    def exported(*arguments: Any) -> Any:
        from torch.onnx._internal.exporter._registration import ONNXRegistry  # takes seconds

        read = ONNXRegistry.from_torchlib

        def copied(cls: Any, *version: Any, **options: Any) -> Any:
            registry = copy.copy(_operators(read, *version, **options))
            registry.functions = {target: [*found] for target, found in registry.functions.items()}  # exports add some
            return registry

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ONNXRegistry, "from_torchlib", classmethod(copied))
            return export(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "exported_program", exported)
        yield


@contextmanager
def counted_once() -> Iterator[None]:
    """Count the FLOPs of models of the same code, config and shapes once: a count takes ten times a forward pass."""
    count = counts._count

    def known(model: Any, inputs: Any) -> dict[str, int]:
        shapes = [(name, tuple(t.shape)) for name, t in (*model.named_parameters(), *inputs.items())]
        code = [(type(m), type(m).forward, getattr(m.forward, "__func__", m.forward)) for m in model.modules()]
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        config = model.config.to_json_string(use_diff=False), str(getattr(model, "readout", None))
        key = (*config, hooks, *code, *shapes)
        if key not in COUNTS:
            COUNTS[key] = count(model, inputs)
        return dict(COUNTS[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "_count", known)
        yield
