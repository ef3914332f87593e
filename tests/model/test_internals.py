"""The package works with what a release of transformers has, and says what is missing."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from hies_export.errors import MissingRuntimeError
from hies_export.forms.formats import require_exporters
from hies_export.model import internals


def test_a_model_may_set_flags_of_cudnn_where_products_are_exact() -> None:
    with internals.exact_products(), torch.backends.cudnn.flags(enabled=False):
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    with torch.backends.cudnn.flags(enabled=False):
        pass


def test_export_is_refused_where_there_is_no_exporter_or_it_asks_for_another_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Demanding:
        def __init__(self) -> None:
            raise ImportError("To use OnnxExporter, please upgrade torch>=99.0 (found 2.8.0).")

    require_exporters({"onnx"})
    monkeypatch.setattr(transformers.exporters, "OnnxExporter", Demanding)
    with pytest.raises(MissingRuntimeError, match=r"please upgrade torch>=99\.0"):
        require_exporters({"onnx"})
    monkeypatch.setitem(sys.modules, "transformers.exporters", None)
    with pytest.raises(MissingRuntimeError, match=r'ONNX export needs the exporter .*"transformers>=5\.13"'):
        require_exporters({"onnx"})
    require_exporters({"gguf"})


@dataclass
class OlderOnnxConfig:
    """The options of releases that fuse nothing."""

    dynamic: bool = False
    dynamic_shapes: object = None


def test_exporters_that_fuse_nothing_are_not_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class OlderOnnxExporter:
        def export(self, module: nn.Module, sample: dict[str, object], config: OlderOnnxConfig) -> SimpleNamespace:
            asked.append((module, sample, config))
            return SimpleNamespace(model="graph")

    monkeypatch.setattr(transformers.exporters, "OnnxConfig", OlderOnnxConfig)
    monkeypatch.setattr(transformers.exporters, "OnnxExporter", OlderOnnxExporter)
    module = nn.Linear(2, 2)
    assert internals.exported_program(module, {"x": 1}, "cpu", {"x": {0: "batch"}}) == "graph"
    assert asked == [(module, {"x": 1}, OlderOnnxConfig(True, {"x": {0: "batch"}}))]
