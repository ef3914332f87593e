"""Forms: what is exported once, copied when and timed beside what; which `deploy` tries, and how it names files."""

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import bert, text_batch

from hies_export.errors import ExportError, RecipeError
from hies_export.forms import measured
from hies_export.forms.deployment import count_reduced_precision, find_ways
from hies_export.forms.form import Form, Forms
from hies_export.forms.formats import Export, Exporter, Given, export_options, options_for_runtime
from hies_export.forms.judged import judge_exported, keep_file
from hies_export.forms.measured import MeasureOptions, measure_both
from hies_export.forms.runtimes.base import RUNTIMES
from hies_export.recipe.sections import ExportSection
from hies_export.tasks import TASKS
from hies_export.units.counts import Both


class Recording(Exporter):
    """Write nothing, and remember what was asked for; a dtype in `failing` fails."""

    def __init__(self, failing: str = ""):
        super().__init__(ExportSection(), Given(text_batch(2, 6)))
        object.__setattr__(self, "made", [])
        object.__setattr__(self, "failing", failing)

    def export(self, model: Any, folder: Path, options: ExportSection) -> Export:
        self.made.append((folder.name, options.dtype))  # type: ignore[attr-defined]
        if options.dtype == self.failing:  # type: ignore[attr-defined]
            raise ExportError(f"no graph in {options.dtype}")

        return Export("onnx", folder, folder / "file", ("file",), 7, options)


def test_a_model_is_exported_once_for_all_runtimes_that_read_the_same(tmp_path: Path) -> None:
    exporter = Recording()
    forms = Forms({"dense": bert()}, exporter, tmp_path)
    one, two = forms.form("dense", "onnxruntime-cpu", "float32"), forms.form("dense", "openvino", "bfloat16")
    assert one == Form("dense", "onnxruntime-cpu", tmp_path / "dense-0", "float32", 7)
    assert (two.source, two.bits) == (one.source, "bfloat16")
    assert exporter.made == [("dense-0", "float32")]  # type: ignore[attr-defined]
    assert forms.has_plain("dense")


def test_a_runtime_reads_a_graph_in_a_dtype_that_it_runs() -> None:
    half, names = ExportSection(dtype="float16"), ("onnxruntime-cpu", "openvino", "onnxruntime-cpu-int8")
    stored = [options_for_runtime(half, name).dtype for name in names]
    assert stored == ["float16", "float32", "float32"]


def test_the_neurons_that_an_export_leaves_in_float32_are_told(tmp_path: Path) -> None:
    rows: Any = SimpleNamespace(metrics=("accuracy",))
    how = export_options(quantize="int8")
    for facts, told in (({}, 0), ({"float_neurons": 32}, 32)):
        exported = Export("onnx", tmp_path, tmp_path / "file", ("file",), 7, how, facts=facts)
        assert judge_exported(exported, tmp_path, rows, []).float_neurons == told


def test_an_export_that_failed_is_not_tried_again(tmp_path: Path) -> None:
    exporter = Recording(failing="float32")
    forms = Forms({"dense": bert()}, exporter, tmp_path)
    for runtime in ("onnxruntime-cpu", "openvino", "onnxruntime-cpu"):
        with pytest.raises(ExportError, match="no graph in float32"):
            forms.form("dense", runtime, "float32")
    assert len(exporter.made) == 1  # type: ignore[attr-defined]
    assert not forms.has_plain("dense")
    assert forms.form("dense", "onnxruntime-cuda", "float16").bytes == 7
    assert not forms.has_plain("dense")


def test_exports_come_before_copies_and_copies_live_for_one_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, batch = Recording(), text_batch(2, 6, labels=False)
    copies: list[weakref.ref[Any]] = []

    def timed(forms: list[Form], batches: Any, **_: Any) -> list[Any]:
        assert batches == {(2, 6): [batch]}
        dense, slim = forms
        assert [name for name, _ in exporter.made] == ["slim-0", "dense-0"]  # type: ignore[attr-defined]
        # Those of the runtime before are gone.
        gc.collect()
        assert [copy() for copy in copies] == [None] * len(copies)
        if dense.runtime == "torch":
            assert isinstance(dense.source, torch.nn.Module)
            assert dense.source.dtype == getattr(torch, str(dense.bits))
            copies.extend(weakref.ref(form.source) for form in (dense, slim))
        return [[], []]

    monkeypatch.setattr(measured, "time", timed)
    ways = (("torch", "bfloat16"), ("torch", "float16"), ("onnxruntime-cpu", "float32"))
    forms = Forms({"dense": bert(), "slim": bert()}, exporter, tmp_path)
    measure_both(forms, MeasureOptions(ways), batches={(2, 6): batch}, stored=Both(1, 1))
    assert len(copies) == 4


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
    assert count_reduced_precision(TASKS[task], []) == len(ways) > 0
    assert count_reduced_precision(TASKS[task], ["onnxruntime-cpu", "openvino"]) == 2


def test_the_file_of_a_model_in_torch_is_its_checkpoint(tmp_path: Path) -> None:
    forms = Forms({}, Exporter(ExportSection(), Given({})), tmp_path)
    for model, same, file in (("slim", False, "slim"), ("dense", True, "slim"), ("dense", False, None)):
        form: Any = SimpleNamespace(model=model, runtime="torch-compile", bits="float16")
        assert keep_file(forms, form, tmp_path, same=same) == file
