"""--overwrite replaces results, never what a command reads."""

from pathlib import Path
from typing import Any

import pytest
from support.models import save_project
from support.reports import make_report

import hies_export
from hies_export import OutputExistsError, PruningRecipe
from hies_export.checkpoint.folders import refuse_existing


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_project(tmp_path_factory.mktemp("project"), train=4, validation=4, prune={"budget": {"heads": 0.5}})
    (folder / "model" / "inside").mkdir()
    (folder / "link").symlink_to(folder / "model")
    (folder / "plan.json").write_text("{}")
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.md").write_text("mine")
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.parametrize(
    ("command", "output", "said"),
    [
        ("run recipe.yaml", ".", "is, holds or lies inside the recipe"),
        ("run recipe.yaml", "recipe.yaml", "is, holds or lies inside the recipe"),
        ("prune recipe.yaml", "model", "is, holds or lies inside the model"),
        ("prune recipe.yaml", "model/inside", "is, holds or lies inside the model"),
        ("score recipe.yaml", "link", "is, holds or lies inside the model"),
        ("score recipe.yaml", "train.jsonl", "is, holds or lies inside the data.files.train"),
        ("apply plan.json model", "model", "is, holds or lies inside the model"),
        ("apply plan.json model", ".", "is, holds or lies inside the plan"),
        ("apply plan.json model", "plan.json", "is, holds or lies inside the plan"),
        ("export model", "model/inside", "is, holds or lies inside the model"),
        ("upgrade model", ".", "is, holds or lies inside the model"),
        # No command has begun its work by then: the plan is none, and the model has no pruned heads.
        *((command, "mine", "is something else") for command in ("score recipe.yaml", "apply plan.json model")),
        *((command, "mine", "is something else") for command in ("export model", "upgrade model", "quickstart")),
    ],
)
def test_what_a_command_reads_and_what_is_the_users_is_not_replaced(
    command: str, output: str, said: str, project: Path, told: Any
) -> None:
    before = contents(project)
    name, *inputs = command.split()
    code, err, _ = told(name, *(project / given for given in inputs), "-o", project / output, "--overwrite")
    assert (code, f"{project / output} {said}" in err) == (2, True), err
    assert contents(project) == before


def test_a_page_is_written_over_pages_only(tmp_path: Path, told: Any) -> None:
    (tmp_path / "report.json").write_text(make_report().to_json())
    for _ in range(2):
        assert told("report", tmp_path, "--html", tmp_path / "page.html")[0] == 0
    before = contents(tmp_path)
    code, err, _ = told("report", tmp_path, "--html", tmp_path / "report.json")
    assert (code, "a file is replaced only if it is a page of hies-export, but" in err) == (2, True)
    assert contents(tmp_path) == before


def test_python_is_refused_as_well(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = PruningRecipe.from_yaml(project / "recipe.yaml", {"output": project})
    with pytest.raises(OutputExistsError, match="is, holds or lies inside the model"):
        hies_export.run(recipe, overwrite=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows").mkdir()
    with pytest.raises(OutputExistsError, match="rows is, holds or lies inside the data"):
        refuse_existing(tmp_path / "rows", overwrite=True, inputs={"data": Path("~/rows")})
