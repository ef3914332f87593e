"""Which runtimes and bits `deploy` tries, and what it names as the file of a form in torch."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import bert

from hies_export.errors import ExportError, RecipeError
from hies_export.forms.cascade.export import CascadeForm
from hies_export.forms.deployment import fewer_bits, find_ways, join_sizes
from hies_export.forms.form import Forms
from hies_export.forms.formats import Exporter, Given
from hies_export.forms.judged import keep_file
from hies_export.forms.runtimes.base import RUNTIMES
from hies_export.recipe.sections import ExportSection
from hies_export.tasks import TASKS

COMPILED = [("torch-compile", "float16"), ("torch-compile", "bfloat16")]


def test_a_compiled_model_is_tried_on_a_gpu_only_and_last(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TASKS["text-classification"]
    on_cpu = find_ways(task, [])
    assert on_cpu[0] == ("onnxruntime-cpu", "float32")
    assert not [way for way in on_cpu if RUNTIMES[way[0]].reads_models]
    with pytest.raises(RecipeError, match="must be among onnxruntime-cpu, .*, got torch-compile"):
        find_ways(task, ["torch-compile"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_ways(task, []) == [*on_cpu, *COMPILED]
    assert find_ways(task, ["torch-compile"]) == COMPILED
    with pytest.raises(RecipeError, match="must be among .*, got torch$"):
        find_ways(task, ["torch"])


@pytest.mark.parametrize("task", ["text-classification", "text-generation"])
def test_the_forms_in_fewer_bits_are_those_of_a_machine_with_everything(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for runtime in RUNTIMES.values():
        monkeypatch.setattr(runtime, "require", lambda: None)
    ways = [way for way in find_ways(TASKS[task], []) if way[1] != "float32"]
    assert fewer_bits(TASKS[task], []) == len(ways) > 0
    assert fewer_bits(TASKS[task], ["onnxruntime-cpu", "openvino"]) == 2


@pytest.mark.parametrize(
    ("model", "same", "file"), [("slim", False, "slim"), ("dense", True, "slim"), ("dense", False, None)]
)
def test_the_file_of_a_model_in_torch_is_its_checkpoint(
    model: str, same: bool, file: str | None, tmp_path: Path
) -> None:
    forms = Forms({"dense": bert()}, Exporter(ExportSection(), Given({})), tmp_path)
    form: Any = SimpleNamespace(model=model, runtime="torch-compile", bits="float16")
    assert keep_file(forms, form, tmp_path, same=same) == file


def test_a_cascade_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def export(_: CascadeForm, slim: str, dense: str, place: Path, **__: Any) -> Any:
        if slim.startswith("0.8"):
            raise ExportError("ONNX Runtime must load model.onnx, and refused")
        return SimpleNamespace(facts={"promise": SimpleNamespace(passed_on=0.1, differ=0)}, folder=place, bytes=7)

    forms = Forms({"dense": bert()}, Exporter(ExportSection(), Given({})), tmp_path)
    monkeypatch.setattr(forms, "plain", lambda name: name)
    monkeypatch.setattr(CascadeForm, "join", export)
    rows: dict[str, Any] = {"batches": [], "answers": torch.zeros(0)}
    asked = CascadeForm(disagreement=0.1, shares=(0.8, 0.6))
    cut = join_sizes(forms, asked, lambda share: (share, bert(), share), **rows)
    assert [(one.tried.problem, one.form and one.form.bytes) for one in cut] == [
        ("ONNX Runtime must load model.onnx, and refused", None),
        (None, 7),
    ]
