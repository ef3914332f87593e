import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.loading import load_pruning
from support.reading import share_same
from support.sweeps import save_sweep_project, sweep_row
from support.tolerance import assert_same_text
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hies_export import Constraints, PruningRecipe, compensate, count_flops, prune_units
from hies_export.cli.main import main
from hies_export.errors import OutputExistsError, RequestError
from hies_export.evaluate.judge import Judge
from hies_export.evaluate.predict import predict
from hies_export.pipeline.choose import choose
from hies_export.pipeline.load_recipe import load_recipe
from hies_export.pipeline.stages import calibrate, compare
from hies_export.tasks import task_of
from hies_lab.baselines.channels import channel_taylor, masked_channels, select_channels
from hies_lab.baselines.names import JUDGED_ONLY
from hies_lab.baselines.slicing import collect_bases, fine_tuned, sliced
from hies_lab.sweep.cells import redrawn, weighted_area
from hies_lab.sweep.grid import SweepGrid
from hies_lab.sweep.journal import Journal
from hies_lab.sweep.page import write_page
from hies_lab.sweep.results import render_markdown, sweep_tables, terminal_table
from hies_lab.sweep.sweep import SweepResult, sweep


@pytest.fixture(autouse=True)
def _no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than a small sweep."""
    monkeypatch.setattr("hies_lab.sweep.sweep.write_page", lambda folder: None)


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    return save_sweep_project(tmp_path, budget={"heads": 0.4})


@pytest.mark.slow
def test_rows_are_what_a_single_run_of_each_finds(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hies_export.pipeline.stages.ALPHAS", (0.0, 0.3, 0.9))  # fewer to judge
    recipe = PruningRecipe.from_yaml(recipe_file)
    grid = SweepGrid(
        criteria=("hies", "random", "compensated"),
        alphas=(0.3, "auto"),
        sparsities=(0.5,),
        seeds=(3,),
        calibration_sizes=(8, 12),
        compensations=("none", "least_squares"),
    )
    result = sweep(recipe, grid, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "sweep.json").read_text()) == result.rows
    # hies at two alphas and random for every size, compensated once; x compensations.
    assert len(result.rows) == (3 * 2 + 1) * 2
    assert result.evaluations < len(result.rows)
    needed = {"criterion", "alpha", "sparsity", "seed", "calibration_samples", "compensation", "quality", "stability"}
    assert all(needed | {"flops_ratio"} <= set(row) for row in result.rows)
    assert {r["calibration_samples"] for r in result.rows if r["criterion"] == "compensated"} == {40}
    named = ("criterion", "alpha_by", "calibration_samples", "compensation")
    rows = {tuple(row[name] for name in named): row for row in result.rows}
    for criterion, by, samples, compensation in (
        ("hies", "given", 12, "none"),
        ("hies", "auto", 8, "least_squares"),
        ("random", None, 12, "least_squares"),
    ):
        row = rows[criterion, by, samples, compensation]
        fields = recipe.model_dump()
        fields["calibration"] |= {"seed": 3, "samples": samples}
        fields["prune"] |= {"criterion": criterion, "alpha": "auto" if by == "auto" else 0.3, "budget": {"heads": 0.5}}
        if compensation == "none":
            fields["prune"]["compensation"] = None
        prepared = load_pruning(PruningRecipe(**fields))
        plan = choose(prepared, calibrate(prepared)).plan
        assert plan.alpha == row["alpha"]
        slim = prune_units(prepared.model, plan, prepared.modules)
        if compensation != "none":
            compensate(prepared.model, slim, plan, prepared.modules, prepared.rows.refit)
        found = compare(prepared, slim)
        assert row["quality"] == found.metrics["accuracy"].slim
        assert row["stability"] == found.stability
        batch = next(iter(prepared.shapes.values()))
        assert row["flops_ratio"] == count_flops(slim, batch) / count_flops(prepared.model, batch)


def test_baselines_that_cut_no_heads_are_judged_beside_the_others(recipe_file: Path, tmp_path: Path) -> None:
    recipe = PruningRecipe.from_yaml(recipe_file, {"calibration.seed": 1})
    grid = SweepGrid(
        criteria=("his", *JUDGED_ONLY),
        sparsities=(0.5,),
        seeds=(1,),
        calibration_sizes=(8,),
        compensations=("none", "least_squares"),
    )
    result = sweep(recipe, grid, tmp_path / "out")
    rows = {(row["criterion"], row["compensation"]): row for row in result.rows}
    assert list(rows) == [("his", "none"), *((name, "none") for name in JUDGED_ONLY), ("his", "least_squares")]
    prepared = load_pruning(recipe)
    model, sites, evaluation = prepared.model, prepared.modules, prepared.rows.evaluation
    dense = predict(model, evaluation)
    taylor = channel_taylor(model, prepared.rows.score, sites)
    stay = select_channels(taylor, sites, heads=0.5, constraints=Constraints())
    unlabelled = prepared.rows.refit
    bases, targets = collect_bases(model, unlabelled, sites), predict(model, unlabelled)
    found = {}
    with masked_channels(model, sites, stay):
        found["llm-pruner-channel"] = predict(model, evaluation)
    with sliced(model, sites, bases, share=0.5):
        found["slicegpt"] = predict(model, evaluation)
        with fine_tuned(model, sites, unlabelled, targets):
            found["slicegpt-tuned"] = predict(model, evaluation)
    judge = Judge(evaluation, dense, ("accuracy",), task_of(model))
    for name, logits in found.items():
        row = rows[name, "none"]
        assert row["quality"] == judge.of(logits).metrics["accuracy"]
        assert row["stability"] == share_same(dense, logits)
        assert (row["flops_ratio"], row["heads_removed"]) == (None, None)
        assert row["calibration_samples"] == (8 if name == "llm-pruner-channel" else 40)


def test_killed_half_way_it_ends_with_the_same_file(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hies_lab.sweep.sweep.write_page", write_page)
    options = ["--criteria", "hies,compensated", "--alphas", "0.2", "--sparsities", "0.6"]
    options += ["--seeds", "0,1", "--compensations", "none,least_squares"]

    def command(folder: str) -> list[str]:
        return ["sweep", str(recipe_file), "-o", str(tmp_path / folder), *options]

    # What lies on the disk after a row is what a kill leaves there.
    whole, killed, add = tmp_path / "whole", tmp_path / "killed", Journal.add
    rows = 0

    def add_and_look(journal: Journal, key: str, row: Any) -> None:
        nonlocal rows
        add(journal, key, row)
        rows += 1
        if rows == 5:
            shutil.copytree(whole, killed)

    monkeypatch.setattr(Journal, "add", add_and_look)
    assert main(command("whole")) == 0
    journal = killed / "journal.jsonl"
    assert not (killed / "sweep.json").exists()
    assert journal.read_bytes().count(b'"kind": "row"') == 5
    with journal.open("ab") as file:
        file.write(b'{"kind": "row", "key": "cut of')  # as a kill in the middle of a line leaves it
    assert main(command("killed")) == 0
    for name in ("sweep.json", "details.json", "tables.md", "sweep.csv", "sweep.html"):
        assert_same_text((killed / name).read_text(), (whole / name).read_text())
    lines = [json.loads(line) for line in journal.read_bytes().splitlines()]
    keys = [line["key"] for line in lines if line["kind"] == "row"]
    assert len(keys) == len(set(keys)) == len(json.loads((whole / "sweep.json").read_text())) == 8


def test_a_journal_serves_a_wider_grid_but_no_other_recipe_or_files(tmp_path: Path) -> None:
    project = save_sweep_project(tmp_path / "project", modules=["attention", "mlp"], budget={"flops": 0.7})
    recipe = PruningRecipe.from_yaml(project)

    def swept(*sparsities: float, of: PruningRecipe = recipe, **how: Any) -> SweepResult:
        grid = SweepGrid(criteria=("his",), calibration_sizes=(8,), seeds=(0,), sparsities=sparsities)
        return sweep(of, grid, tmp_path / "out", **how)

    narrow, wide = swept(0.2), swept(0.2, 0.5)
    assert (narrow.evaluations, wide.evaluations) == (1, 1)
    assert wide.rows[0] == narrow.rows[0]
    # Shares of heads are of heads alone, whatever the recipe cuts: half of two layers of six.
    assert [wide.rows[1][name] for name in ("modules", "heads_removed", "neurons_removed")] == ["attention", 6, 0]
    other = PruningRecipe.from_yaml(project, {"data.max_length": 5, "prune.min_heads": 2})
    with pytest.raises(RequestError, match="of the same recipe to go on with it, but it has another data, prune;"):
        swept(0.2, of=other)
    rows = Path(recipe.inputs["data.files.validation"])
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[::2]))
    with pytest.raises(RequestError, match=r"another content of data.files.validation; .* --overwrite"):
        swept(0.2)
    model = AutoModelForSequenceClassification.from_pretrained(recipe.model)
    model.classifier.weight.data.neg_()
    model.save_pretrained(recipe.model)
    with pytest.raises(RequestError, match=r"another .*content of model\b"):
        swept(0.2)
    assert swept(0.2, overwrite=True).evaluations == 1


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("")
    for overwrite in (False, True):
        with pytest.raises(OutputExistsError, match="holds something else; choose another"):
            Journal(tmp_path, asked={}, overwrite=overwrite)
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_what_is_finished_is_said_to_be_kept_when_a_sweep_is_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(error: BaseException, *, rows: int) -> None:
        result = {"metric": "accuracy", "quality": 0.9, "quality_dense": 0.9, "stability": 1.0}
        with Journal(tmp_path / "out", asked={"a": 1}) as journal:
            for number in range(rows):
                journal.add(str(number), {"judged": "-", "alpha": None, "samples": 8, "result": result})
            raise error

    with pytest.raises(KeyboardInterrupt, match="stopped"):
        stop(KeyboardInterrupt("stopped"), rows=0)
    with pytest.raises(RequestError, match="refused"):
        stop(RequestError("refused"), rows=2)
    assert not caplog.messages
    with pytest.raises(KeyboardInterrupt, match="stopped"):
        stop(KeyboardInterrupt("stopped"), rows=2)
    assert caplog.messages == [f"2 finished rows are kept in {tmp_path / 'out'}; run the same command again to resume"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["no json"], ""),
        (['{"asked": []}'], "line 1 of .* asked: Input should be"),
        (['{"asked": {}}', "[1]"], "line 2 of .* Input should be"),
        (['{"asked": {}}', '{"kind": "row", "key": "a", "value": {"judged": "a"}}'], "line 2 .* alpha: Field required"),
    ],
)
def test_a_damaged_journal_is_refused_by_line(lines: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(RequestError, match=f"a journal must be lines of JSON written by hies-export sweep.*{message}"):
        Journal(tmp_path, asked={})


def test_weighted_area_is_the_integral() -> None:
    # s * value(s) = s, s * s: by trapezoids with many points, the integrals over [0.2, 0.8].
    points = [0.2 + 0.6 * i / 2000 for i in range(2001)]
    assert weighted_area(points, [1.0] * 2001) == pytest.approx(1.0)
    expected = ((0.8**3 - 0.2**3) / 3) / ((0.8**2 - 0.2**2) / 2)
    assert weighted_area(points[::-1], points[::-1]) == pytest.approx(expected, rel=1e-6)
    assert weighted_area([0.5], [0.7]) == 0.7


def table_rows() -> list[dict[str, Any]]:
    qualities = {"hies": (0.8, 0.9), "his": (0.7, 0.7), "ad": (0.1, 0.3)}
    return [
        sweep_row(criterion, seed=seed, sparsity=sparsity, quality=quality, stability=0.5)
        for criterion, by_seed in qualities.items()
        for seed, quality in enumerate(by_seed)
        for sparsity in (0.3, 0.5)
    ]


def test_tables_say_mean_deviation_best_second_and_gain() -> None:
    text = render_markdown(sweep_tables(table_rows()))
    assert "| heads removed | 30% | 50% |" in text
    assert "| hies (α 0.5) | **85.00** ± 7.07 | **85.00** ± 7.07 |" in text
    assert "| his | <u>70.00</u> ± 0.00 |" in text
    assert "| ad | 20.00 ± 14.14 |" in text
    assert "| gain of hies (α 0.5) | +21.4% | +21.4% |" in text
    # Equal values share their rank.
    assert "| ad | **50.00** ± 0.00 |" in text.split("### Stability")[1]
    # Of perplexities the lowest is best, and what is lower is a gain.
    lower = [{**row, "metric": "perplexity", "quality": 10 * row["quality"]} for row in table_rows()]
    text = render_markdown(sweep_tables(lower))
    assert "| ad | **2.00** ± 1.41 |" in text
    assert "| gain of hies (α 0.5) | -21.4% |" in text


def test_names_in_tables_are_text_and_ranks_are_styles() -> None:
    rows = [{**row, "criterion": row["criterion"].replace("ad", "[red]a|d[/]")} for row in table_rows()]
    table, _ = sweep_tables(rows)
    out = io.StringIO()
    Console(file=out, width=140, force_terminal=True).print(terminal_table(table))
    assert "\x1b[1m85.00\x1b[0m ± 7.07" in out.getvalue()
    assert "[red]a|d[/]" in out.getvalue()
    assert r"| [red]a\|d[/] | 20.00 ± 14.14 |" in render_markdown([table])


def test_the_command_prints_tables_and_one_line_of_json(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--criteria", "hies,l2", "--alphas", "0.5", "--sparsities", "0.4", "--seeds", "1"]
    assert main(["sweep", str(recipe_file), *options, "--json"]) == 0
    printed = capsys.readouterr().out.splitlines()
    result = json.loads(printed[-1])
    out = tmp_path / "out"
    assert result["rows"] == json.loads((out / "sweep.json").read_text())
    with (out / "sweep.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["criterion"], float(line["quality"])) for line in lines] == [
        (row["criterion"], row["quality"]) for row in result["rows"]
    ]
    with pytest.raises(SystemExit, match="^2$"):
        main(["sweep", str(recipe_file), "--seeds", "one"])
    assert "--seeds: must be whole numbers, separated by commas, got 'one'" in capsys.readouterr().err
    # By hand: l2's heads masked in the stock model.
    details = json.loads((out / "details.json").read_text())
    kept = next(p["kept"] for p in details["plans"] if p["criterion"] == "l2")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rows = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    batch = tokenizer([r["sentence"] for r in rows], [r["other"] for r in rows], padding=True, return_tensors="pt")
    with torch.no_grad():
        dense = model(**batch).logits.argmax(-1)
        for name, heads in kept.items():
            weight = model.get_submodule(name.removesuffix("self") + "output.dense").weight
            for head in set(range(6)) - set(heads):
                weight[:, head * 8 : (head + 1) * 8] = 0
        masked = model(**batch).logits.argmax(-1)
    assert result["rows"][1]["stability"] == (masked == dense).double().mean().item()


def test_another_seed_draws_other_rows_for_the_same_model(recipe_file: Path) -> None:
    first, delivery = load_recipe(PruningRecipe.from_yaml(recipe_file))
    again = redrawn(first, delivery, PruningRecipe.from_yaml(recipe_file, {"calibration.seed": 5}))
    assert again.model is first.model
    assert again.rows.evaluation is first.rows.evaluation
    ids = [found.rows.score[0]["input_ids"] for found in (first, again)]
    assert not torch.equal(*ids)
