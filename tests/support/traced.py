"""Trace every model once a process: graphs of the same model with other weights or widths are made of the first."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hies_export.forms.onnx.export import export_onnx
from hies_export.forms.traces import Traces

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


@contextmanager
def traced_once() -> Iterator[None]:
    """Let all exports of this process share one `Traces`, whose graphs are compared with torch as those of a trace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Traces, "__init__", lambda traces: vars(traces).update(_templates=TEMPLATES))
        for name in ("add", "resized"):
            patch.setattr(Traces, name, keyed(getattr(Traces, name)))
        patch.setitem(export_onnx.__kwdefaults__, "traces", Traces())
        yield
