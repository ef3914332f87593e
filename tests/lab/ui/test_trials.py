"""The page on plans that a sweep or a run measured: all criteria, both kinds of units, and what was measured."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.sweeps import save_sweep_project

from hies_export.cli.main import main
from hies_export.lab.studies.explore import estimate, lost_share, read_exploration
from hies_export.lab.ui.app import MEASURED, _trial_table, draw, save
from hies_export.select.plan import PruningPlan

pytestmark = pytest.mark.filterwarnings("ignore::hies_export.slim.refit.FewTokensWarning")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep over heads and neurons."""
    folder = tmp_path_factory.mktemp("project")
    recipe = save_sweep_project(folder, modules=["attention", "mlp"], budget={"flops": 0.7})
    options = ["--criteria", "hies,fisher", "--alphas", "0.3", "--flops", "0.8,0.7", "--no-figures"]
    options += ["--modules", "attention,both", "--seeds", "1,2", "--compensations", "none,least_squares"]
    assert main(["sweep", str(recipe), "-o", str(folder / "sweep"), *options]) == 0
    return folder / "sweep"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the seed whose plans the folder has."""
    return [row for row in json.loads((folder / "sweep.json").read_text()) if row["seed"] == 1]


def text_of(page: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def test_every_plan_shows_what_was_measured_of_it(swept: Path) -> None:
    exploration = read_exploration(swept)
    assert len({trial.label for trial in exploration.trials}) == 8
    for row in rows_of(swept):
        modules = {"attention": "heads only", "attention+mlp": "heads and neurons"}[row["modules"]]
        alpha = ", alpha 0.3" if row["criterion"] == "hies" else ""
        label = f"{row['criterion']}{alpha}: {row['flops_target']:.0%} of the FLOPs left, {modules}"
        text = text_of(draw(exploration, 0.9, 0.9, "global", 0.0, label))
        made = "masked" if row["compensation"] == "none" else "cut and compensated (least_squares)"
        shown = re.search(
            rf"{MEASURED} [^.]*{re.escape(made)}.*? measured accuracy ([\d.]+) same predictions ([\d.]+)%", text
        )
        assert shown is not None, text
        assert float(shown[1]) == pytest.approx(row["quality"], abs=1e-4)
        assert float(shown[2]) == pytest.approx(100 * row["stability"], abs=0.1)
        assert "Predicted" not in text
        assert f"heads kept {12 - row['heads_removed']} of 12" in text
        assert f"neurons kept {128 - row['neurons_removed']} of 128" in text
        assert f"of dense {row['flops_ratio']:.3f}" in text
        assert "FLOPs are estimated" not in text


def test_what_a_run_measured_replaces_predictions(ran: Path) -> None:
    exploration = read_exploration(ran)
    report = json.loads((ran / "report.json").read_text())
    point = next(p for p in report["details"]["alpha_curve"] if p["alpha"] == report["alpha"])
    text = text_of(draw(exploration, report["alpha"], 0.4, "global"))
    own = f"accuracy {report['quality']['slim']:.4f} same predictions {report['stability']:.1%}"
    searched = f"accuracy {point['quality']:.4f} same predictions {point['stability']:.1%}"
    assert [*re.findall(r"measured (accuracy [\d.]+ same predictions [\d.]+%)", text)] == [own, searched]
    assert text.count(MEASURED) == 2
    assert "Predicted" not in text
    other = text_of(draw(exploration, report["alpha"], 0.6, "global"))
    assert MEASURED not in other
    assert "Predicted from" in other
    assert "FLOPs are estimated" in other


def test_the_table_has_all_criteria_and_both_kinds_of_units(swept: Path) -> None:
    table = _trial_table(read_exploration(swept))
    rows = rows_of(swept)
    assert len(table.rows) == len(rows)
    assert table.header[-2:] == ["heads removed", "neurons removed"]
    found = {tuple(line[-5:]) for line in table.rows}
    assert found == {
        (
            f"{row['quality']:.4f}",
            f"{row['stability']:.1%}",
            f"{row['flops_ratio']:.3f}",
            str(row["heads_removed"]),
            str(row["neurons_removed"]),
        )
        for row in rows
    }


def test_a_measured_plan_is_saved_as_it_was_cut(swept: Path, tmp_path: Path) -> None:
    exploration = read_exploration(swept)
    trial = next(t for t in exploration.trials if t.plan.criterion == "fisher" and t.plan.removed_neurons)
    text = save(exploration, tmp_path, 0.5, 0.5, "global", 0.0, trial.label)
    (file,) = tmp_path.glob("plan-fisher-*.json")
    assert PruningPlan.from_file(file).kept == trial.plan.kept
    # The sweep names its model, so the command can be copied.
    assert f"hies-export apply {file} {swept.parent / 'model'} -o SLIM" in text
    assert main(["apply", str(file), str(swept.parent / "model"), "-o", str(tmp_path / "slim")]) == 0


def test_the_dot_of_a_measured_plan_is_where_it_was_measured(swept: Path) -> None:
    exploration = read_exploration(swept)
    trial = next(t for t in exploration.trials if t.plan.criterion == "fisher")
    lost = lost_share(exploration.statistics["his"], trial.plan)
    measured = exploration.measured[0]
    assert measured.how == trial.how
    page = draw(exploration, 0.5, 0.5, "global", 0.0, trial.label)
    plot = page.split('class="plot')[2]
    marks = re.findall(r'<g class="(dot|chosen)">.*?<use [^>]*y="([\d.]+)"', plot)
    heights, chosen = [float(y) for _, y in marks], float(next(y for kind, y in marks if kind == "chosen"))
    values = [*measured.stability, trial.stability]
    low, high, span = min(values), max(values), max(heights) - min(heights)
    assert chosen == pytest.approx(min(heights) + span * (high - trial.stability) / (high - low or 1), abs=0.1)
    line = estimate(measured.lost, measured.stability, lost).value
    if line != trial.stability:
        assert chosen != pytest.approx(min(heights) + span * (high - line) / (high - low or 1), abs=0.01)
