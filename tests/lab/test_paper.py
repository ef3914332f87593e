"""The scripts of the paper's tables, reduced, and the numbers they show beside."""

import json
import re
from pathlib import Path

import pytest
from support.runs import run_script

PAPER = Path(__file__).parents[2] / "recipes" / "paper"
PUBLISHED = json.loads((PAPER / "published.json").read_text())


def test_every_published_task_has_a_recipe_and_averages_are_the_papers() -> None:
    for name in PUBLISHED.keys() - {"source"}:
        tasks = {*PUBLISHED[name]["quality"], *PUBLISHED[name]["stability"]}
        assert all((PAPER / f"{name}-{task}.yaml").is_file() for task in tasks)
    # The last columns of Tables 1 and 2, which are not stored.
    averages = {
        ("quality", "hies"): (86.50, 85.20, 81.43),
        ("quality", "his"): (86.42, 84.47, 79.50),
        ("quality", "slicegpt-tuned"): (74.59, 71.23, 68.58),
        ("stability", "hies"): (96.20, 91.90, 83.91),
        ("stability", "ad"): (95.47, 71.58, 60.51),
    }
    for (what, criterion), expected in averages.items():
        tasks = PUBLISHED["glue"][what].values()
        found = [sum(task[criterion][sparsity] for task in tasks) / 8 for sparsity in ("0.1", "0.3", "0.5")]
        assert found == pytest.approx(expected, abs=0.006)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "task", "row"),
    [
        ("glue", "stsb", r"\| stsb \| pearson \| hies \| 94.00 \| -?\d+\.\d\d \| 93.89 \| -?\d+\.\d\d \|"),
        ("llama", "gsm8k", r"\| gsm8k \| perplexity \| his \|  \| \d+\.\d\d \|"),  # the paper gives it in a figure only
        ("llava", "vizwiz", r"\| vizwiz \| exact_match \| his \| 48.00 \| \d+\.\d\d \|"),
    ],
    ids=["glue", "llama", "llava"],
)
def test_tables_run_reduced(
    table: str, task: str, row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hies_export.pipeline.stages.ALPHAS", (0.3, 0.9))  # fewer to judge
    monkeypatch.setattr("hies_lab.sweep.sweep.write_page", lambda folder: None)
    run_script(PAPER / "table.py", table, "--smoke", "--tasks", task, "-o", tmp_path)
    page = (tmp_path / f"{table}.md").read_text()
    assert re.search(row, page), page
    assert page in capsys.readouterr().out
