"""Another package brings a criterion, a task, a metric, a runtime and a format by its entry points."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import bert, save_project, text_batch
from support.runs import hies

from hies_export import CRITERIA, RecipeError, Report, RequestError, load, prune
from hies_export.entry_points import Registry
from hies_export.evaluate.metrics import METRICS
from hies_export.forms.deployment import find_ways
from hies_export.forms.formats import FORMATS
from hies_export.forms.runtimes.base import RUNTIMES
from hies_export.pipeline.recipe import PruningRecipe
from hies_export.tasks import TASKS

GROUPS = {"criteria": CRITERIA, "tasks": TASKS, "metrics": METRICS, "runtimes": RUNTIMES, "formats": FORMATS}
MODULE = """
from pathlib import Path

from hies_export import criterion, load
from hies_export.evaluate.metrics import register_metric
from hies_export.forms.formats import FORMATS, Export, Format
from hies_export.forms.runtimes.base import register_runtime
from hies_export.forms.runtimes.pytorch import TorchRuntime
from hies_export.tasks import TextClassification, register_task


@criterion(name="other", needs=("his",))
def score(statistics):
    return statistics["his"]


@register_task
class OtherTask(TextClassification):
    name = "other"


@register_metric("other", of="classes")
def half_right(predictions, references, *, num_labels):
    return float((predictions == references).mean()) / 2


@register_runtime("other")
class OtherRuntime(TorchRuntime):
    reads_models, format, bits = False, "other", ("float32",)

    def __init__(self, source, *, threads):
        super().__init__(load(source), threads=threads)


def write(model, folder, how, given, *, overwrite=False):
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    return Export("other", folder, file, (file.name,), file.stat().st_size, how, 0.0, checked_on="other")


FORMATS["other"] = Format(title="a folder of another", require=list, check=lambda *_, **__: None, write=write)
"""


def install(site: Path, **modules: str) -> None:
    """Write a package with an entry point in each group for every name, and forget those that were read before."""
    info = site / "other-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    points = "".join(f"{name} = {module}\n" for name, module in modules.items())
    (info / "entry_points.txt").write_text("".join(f"[hies_export.{group}]\n{points}" for group in GROUPS))
    (info / "METADATA").write_text("Name: other\nVersion: 1.0\n")
    (site / "other.py").write_text(MODULE)
    for table in GROUPS.values():
        vars(table).pop("_points", None)


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages, with one that brings `other` of each kind."""
    for table in GROUPS.values():
        [*table.values()]  # looked up now, as a module registers itself only once
        monkeypatch.setattr(table, "data", dict(table.data))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    install(tmp_path / "site", other="other")
    yield tmp_path / "site"
    sys.modules.pop("other", None)
    for table in GROUPS.values():
        vars(table).pop("_points", None)


def test_a_criterion_is_found_by_prune() -> None:
    assert "other" not in sys.modules
    model, batches = bert(), [text_batch(4, 8) for _ in range(2)]
    found, own = (prune(model, batches, criterion=name, budget={"heads": 0.5}) for name in ("other", "his"))
    assert (found.plan.criterion, found.plan.kept) == ("other", own.plan.kept)


def test_a_run_uses_a_task_a_metric_a_runtime_and_a_format(tmp_path: Path) -> None:
    sections = {
        "prune": {"budget": {"heads": 0.5}},
        "calibration": {"samples": 8, "batch_size": 8},
        "evaluation": {"split": "validation", "metrics": ["other", "accuracy"]},
        "export": {"format": "other"},
        "measure": {"runtimes": ["other"], "shapes": [[2, 16]], "repeats": 2},
    }
    folder = save_project(tmp_path, train=16, validation=12, **sections)
    assert hies("run", folder / "recipe.yaml", "--set", "task=other") == 0
    report = Report.from_file(folder / "out")
    assert (report.task, report.quality.metric) == ("other", "other")
    assert report.quality.slim == pytest.approx(report.metrics["accuracy"].slim / 2)
    assert {row.runtime for row in report.latency} == {"other"}
    assert report.exported is not None
    assert (report.exported.format, report.exported.file) == ("other", "other/model.safetensors")
    assert report.exported.quality is not None
    assert report.exported.quality.value == pytest.approx(report.quality.slim)
    assert report.onnx_max_abs is None
    assert load(folder / "out" / "other").num_parameters() == report.parameters.slim


def test_the_command_exports_to_a_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bert().save_pretrained(tmp_path / "model")
    assert hies("export", tmp_path / "model", "--format", "other", "-o", tmp_path / "made") == 0
    assert (tmp_path / "made" / "model.safetensors").is_file()
    assert hies("export", tmp_path / "model", "--format", "others", "-o", tmp_path / "more") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--format must be one of onnx, openvino, gguf, other, got 'others'; did you mean" in said


def test_names_are_listed_without_an_import_and_unknown_ones_refused() -> None:
    for table in GROUPS.values():
        assert "other" in set(table)
        assert "another" not in table
        assert table.get("another") is None
    assert "other" not in sys.modules
    fields = {"model": "m", "task": "text-classification", "data": {"files": {"train": "a.csv"}, "text": "a"}}
    with pytest.raises(RecipeError, match=r"format must be one of onnx, openvino, gguf, other, got 'othr'"):
        PruningRecipe.model_validate({**fields, "prune": {"budget": {"heads": 0.5}}, "export": {"format": "othr"}})


def test_a_package_that_does_not_bring_what_it_says_is_named(site: Path) -> None:
    install(site, broken="other_broken", unnamed="other")
    with pytest.raises(RequestError, match=r"entry point broken of hies_export\.tasks .* No module named 'other_b"):
        TASKS["broken"]
    with pytest.raises(RequestError, match=r"entry point unnamed of hies_export\.tasks .* but other registers "):
        TASKS["unnamed"]


def test_deploy_tries_a_runtime_in_its_bits() -> None:
    assert find_ways(TASKS["text-classification"], ["other"]) == [("other", "float32")]


def test_a_table_of_names_alone_is_a_mapping() -> None:
    table: Registry[int] = Registry("nothing")
    table["one"] = 1
    assert (dict(table), len(table), list(table.items()), table.get("two", 2)) == ({"one": 1}, 1, [("one", 1)], 2)
    with pytest.raises(KeyError, match="two"):
        table["two"]
