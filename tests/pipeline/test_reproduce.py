"""A run repeated from its report: the same machine keeps the same units, and whatever was changed is said."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models import save_project
from support.runs import hies, without_tracing
from support.tolerance import assert_same_plan, assert_same_text

from hies_export.errors import ReproductionError
from hies_export.pipeline import reproduce as reproducing
from hies_export.pipeline.reproduce import reproduce
from hies_export.recipe import PruningRecipe
from hies_export.report.report import Report
from hies_export.values import PruningPlan


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that was run, with its output in out/."""
    folder = save_project(
        tmp_path_factory.mktemp("project"),
        train=40,
        validation=20,
        calibration={"samples": 8, "batch_size": 3},
        prune={"alpha": 0.5, "budget": {"heads": 0.4}, "compensation": {"samples": 24}},
        measure={"runtimes": ["torch"], "shapes": [[2, 16]], "repeats": 4},
    )
    with without_tracing():
        assert hies("run", folder / "recipe.yaml", "--set", "prune.min_heads=2") == 0
    return folder


@pytest.fixture
def project(made: Path, tmp_path: Path) -> Path:
    """A copy of that project, at another place."""
    return Path(shutil.copytree(made, tmp_path / "moved"))


@pytest.fixture
def repeated(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PruningRecipe]]:
    """Instead of running, give what the project gave; the recipes that would be run."""
    asked: list[PruningRecipe] = []

    def give(recipe: PruningRecipe, **_: Any) -> Report:
        asked.append(recipe)
        shutil.copytree(made / "out", recipe.output)
        return Report.from_file(recipe.output)

    monkeypatch.setattr(reproducing, "run", give)
    return asked


def edit(file: Path, *path: str | int, value: Any) -> None:
    """Change one value of a JSON file."""
    written = json.loads(file.read_text())
    inner = written
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text(json.dumps(written))


@pytest.mark.usefixtures("untraced")
def test_on_the_same_machine_units_are_equal_and_numbers_near(
    made: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.move(made / "model", made / "elsewhere")  # it must be the moved project that is read
    try:
        assert hies("reproduce", project / "out") == 0
    finally:
        shutil.move(made / "elsewhere", made / "model")
    printed = capsys.readouterr().out
    table = {line[:30].strip(): line for line in printed.splitlines()}
    judged = [line for line in printed.splitlines() if line.rstrip().endswith((" yes", " NO"))]
    assert len(judged) >= 12
    assert not [line for line in judged if line.rstrip().endswith("NO")]
    allowed = {line[:30].strip(): line.split()[-2] for line in judged}
    assert {name for name in allowed if allowed[name] == "0.0001"} == {
        *("scores", "stability", "accuracy, dense", "accuracy, slim")
    }
    assert set(allowed.values()) == {"0", "0.0001"}
    assert table["refitted layers"].endswith("shown only")
    assert any("shown only" in line for line in table.values() if line.startswith("time slim / dense, torch"))
    assert "the same machine and versions: units must be equal, and numbers to rounding" in printed
    again = project / "out-again"
    plans = [replace(PruningPlan.from_file(f / "plan.json"), compensation={}) for f in (again, made / "out")]
    assert_same_plan(*plans)
    assert_same_text((again / "scores.json").read_text(), (made / "out" / "scores.json").read_text())
    # The recipe was the recorded one, with what --set had changed, and is recorded once more.
    record = json.loads((again / "report.json").read_text())["details"]["run"]
    assert record["recipe"]["prune"]["min_heads"] == 2
    assert record["command"] == f"hies-export reproduce {project / 'out'}"
    first = json.loads((made / "out" / "report.json").read_text())["details"]["run"]
    assert first["command"] == f"hies-export run {made / 'recipe.yaml'} --set prune.min_heads=2"
    assert first["digests"].keys() == {"model", "data.files.train", "data.files.validation"}
    assert first["digests"] == record["digests"]


@pytest.mark.parametrize(
    ("file", "path", "change", "named"),
    [
        ("report.json", ("quality", "slim"), lambda v: v + 0.05, "accuracy, slim"),
        ("report.json", ("stability",), lambda v: v - 0.05, "stability"),
        ("report.json", ("parameters", "slim"), lambda v: v + 1, "parameters, slim"),
        ("report.json", ("flops", "dense"), lambda v: v - 1, "flops, dense"),
        ("report.json", ("details", "metrics", "f1", "slim"), lambda v: 2.0, "f1, slim"),
        ("plan.json", ("kept", "bert.encoder.layer.0.attention.self", "units"), lambda v: v[1:], "units kept"),
        ("plan.json", ("calibration", "fingerprint"), lambda v: "0" * 64, "calibration batches"),
        ("plan.json", ("compensation", "refit"), lambda v: "0" * 64, None),
        ("scores.json", ("scores", "bert.encoder.layer.1.attention.self", 0), lambda v: v + 1e-3, "scores"),
        ("scores.json", ("scores", "bert.encoder.layer.1.attention.self", 0), lambda v: v + 1e-6, None),
    ],
)
@pytest.mark.usefixtures("repeated")
def test_what_was_edited_is_named(
    project: Path, file: str, path: tuple[Any, ...], change: Any, named: str | None
) -> None:
    value = json.loads((project / "out" / file).read_text())
    if "f1" in path:
        edit(project / "out" / file, "details", "metrics", "f1", value={"dense": 0.5, "slim": 0.5})
    else:
        for key in path:
            value = value[key]
    edit(project / "out" / file, *path, value=change(value))
    found = reproduce(project / "out", project / "again")
    names = [row.name for row in found.rows if not row.holds]
    if named is None:  # within rounding, or shown only
        assert names == []
        return
    assert named in names
    assert len(names) == (2 if "f1" in path else 1)
    with pytest.raises(ReproductionError, match=f"the results of its report, but .*{named}.* differ; compare it"):
        found.check()


@pytest.mark.usefixtures("repeated")
def test_another_machine_may_round_differently(
    project: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    report = project / "out" / "report.json"
    edit(report, "environment", "torch", value="1.0")
    written = json.loads(report.read_text())
    edit(report, "quality", "slim", value=written["quality"]["slim"] * 1.005)
    edit(report, "stability", value=written["stability"] - 0.015)
    edit(project / "out" / "plan.json", "compensation", "refit", value="0" * 64)
    assert hies("reproduce", project / "out", "-o", project / "again") == 0
    assert "warning: the run was made with torch 1.0, and this is" in " ".join(capsys.readouterr().err.split())
    edit(report, "stability", value=written["stability"] - 0.03)
    assert hies("reproduce", project / "out", "-o", project / "once more") == 1
    said = capsys.readouterr()
    assert "stability" in said.err
    assert "another machine or other versions: small differences are allowed" in said.out


def test_other_data_and_other_models_are_refused(
    project: Path, repeated: list[PruningRecipe], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = project / "train.jsonl"
    before = rows.read_text()
    rows.write_text(before.replace('"label": 1', '"label": 0', 1))
    assert hies("reproduce", project / "out") == 2
    assert "data.files.train must be what the run read, but" in (said := capsys.readouterr().err)
    assert "train.jsonl has changed: its SHA-256 is" in said
    rows.write_text(before)
    config = project / "model" / "config.json"
    config.write_text(config.read_text() + " ")
    assert hies("reproduce", project / "out") == 2
    assert "error: model must be what the run read" in capsys.readouterr().err
    assert not repeated
    config.write_text(config.read_text()[:-1])
    assert hies("reproduce", project / "out") == 0
    assert repeated[0].model == str(project / "model")


def test_what_is_no_run_is_refused(project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hies("reproduce", tmp_path) == 2
    assert "a report must be a report.json or a run's folder" in capsys.readouterr().err
    assert hies("reproduce", project / "out", "-o", project / "out", "--overwrite") == 2
    assert "must not delete what is read" in capsys.readouterr().err
    scores = (project / "out" / "scores.json").read_text()
    (project / "out" / "scores.json").write_text("[1]")
    assert hies("reproduce", project / "out") == 2
    assert "a run must have its scores.json to be compared" in capsys.readouterr().err
    (project / "out" / "scores.json").write_text(scores)
    edit(project / "out" / "report.json", "details", "run", value={"recipe": 5})
    assert hies("reproduce", project / "out") == 2
    assert "a run must have recorded its recipe to be repeated" in capsys.readouterr().err


def test_a_quickstart_is_found_and_its_inputs_lie_beside_it(
    project: Path, repeated: list[PruningRecipe], tmp_path: Path
) -> None:
    folder = tmp_path / "quick"
    folder.mkdir()
    for name in ("model", "train.jsonl", "validation.jsonl"):
        shutil.move(project / name, folder / name)
    shutil.move(project / "out", folder / "run")
    # A quickstart works in a hidden folder, which is renamed when it is done.
    edit(folder / "run" / "report.json", "details", "run", "folder", value=str(tmp_path / ".hidden" / "quick" / "run"))
    record = json.loads((folder / "run" / "report.json").read_text())["details"]["run"]["recipe"]
    hidden = tmp_path / ".hidden" / "quick"
    files = {split: str(hidden / Path(file).name) for split, file in record["data"]["files"].items()}
    edit(folder / "run" / "report.json", "details", "run", "recipe", "data", "files", value=files)
    edit(folder / "run" / "report.json", "details", "run", "recipe", "model", value=str(hidden / "model"))
    reproduce(folder, tmp_path / "again").check()
    assert repeated[0].model == str(folder / "model")
