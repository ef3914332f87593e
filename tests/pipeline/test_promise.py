"""Which rows a promise is made on, for `run` and `deploy` alike, and how often it then holds on others."""

from pathlib import Path

import pytest
import torch
from scipy.stats import binom
from support.loading import load_pruning, recipe_of
from support.models import save_project, save_regressor, save_stories
from support.runs import held_out_and_evaluated

from hies_export import PruningRecipe, RequestError
from hies_export.data.batches import samples_of
from hies_export.evaluate.interval import FAILURES, Looks, confidence_of_each, lower_share, queries_needed, rows_needed
from hies_export.pipeline.draw import Promise, all_looks
from hies_export.pipeline.fastest import looks_of
from hies_export.pipeline.load_recipe import as_drawn, load_recipe
from hies_export.pipeline.pruning import Pruning
from hies_export.recipe.sections import DeploySection
from hies_export.tasks import TASKS

ENCODER = TASKS["text-classification"]
FLOAT32 = ["onnxruntime-cpu"]
FEW = "too few to promise 99 % on some and to judge it on the others, which takes 636"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A regressor, 150 rows to score and 40 to evaluate, and a recipe whose promise needs 22."""
    prune = {"budget": {"keep": 0.8}, "criterion": "his", "compensation": None}
    return save_regressor(tmp_path_factory.mktemp("promise"), layers=1, prune=prune)


def counts(found: Pruning) -> tuple[int, int]:
    return samples_of(found.rows.held_out), samples_of(found.rows.evaluation)


@pytest.mark.parametrize(
    ("rows", "evaluated", "count"),
    [
        # Two thirds, at most 1,024; as many as a deployment needs with cascades (637), in two forms (615) or in one
        # (586), or a budget (477), if three quarters reach that.
        (3000, None, 1024),
        (1500, None, 1000),
        (850, None, 637),
        (849, None, 615),
        (820, None, 615),
        (819, None, 586),
        (782, None, 586),
        (781, None, 520),
        (636, None, 477),
        (635, None, 0),
        # Rows that are asked for are left, where the others are enough.
        (1500, 600, 900),
        (872, 395, 477),
        (872, 396, 637),
    ],
)
def test_two_thirds_are_held_out_or_as_many_as_are_needed(rows: int, evaluated: int | None, count: int) -> None:
    sizes = tuple(looks.rows(0.99, None) for looks in all_looks(ENCODER, None, classifies=True))
    assert sizes == (637, 615, 586, 477)
    assert Promise("99 %", sizes, 1024).count(rows, evaluated=evaluated) == count


def test_looks_have_the_confidence_of_all_that_may_fail() -> None:
    alone, both, cascades = Looks(), Looks(2), Looks(2, cascades=3, bits=4)
    assert [looks.confidence for looks in (alone, both, cascades)] == [confidence_of_each(n) for n in (3, 6, 13)]
    float32, openvino = (DeploySection(runtimes=names) for names in (FLOAT32, ["openvino"]))
    assert all_looks(ENCODER, float32, classifies=False) == (both, alone)
    assert all_looks(ENCODER, openvino, classifies=False) == (Looks(2, bits=2), Looks(bits=2))
    assert alone.rows(0.9, None) == rows_needed(0.9, confidence_of_each(FAILURES))
    assert alone.rows(0.9, "ndcg@10") == queries_needed(0.9, confidence_of_each(FAILURES))


@pytest.mark.parametrize(("keep", "forms", "classes"), [(0.8, 2, True), (0.82, 1, False)])
def test_run_and_deploy_promise_on_the_same_rows(
    folder: Path, tmp_path: Path, keep: float, forms: int, classes: bool
) -> None:
    if classes:
        folder = save_project(
            tmp_path,
            train=150,
            validation=40,
            prune={"budget": {"keep": 0.8}, "criterion": "his", "compensation": None},
        )
    recipe = recipe_of(folder, prune__budget={"keep": keep}, calibration__samples=20)
    (run, written), (deploy, delivery) = load_recipe(recipe), load_recipe(recipe.to_deploy(keep=keep))
    assert held_out_and_evaluated(run) == held_out_and_evaluated(deploy)
    assert written.splits.held_out == delivery.splits.held_out
    assert written.splits.held_out.split == "validation"  # type: ignore[union-attr]
    # Together they are the evaluated split.
    every = held_out_and_evaluated(load_pruning(recipe_of(folder, prune__budget={"heads": 0.5})))[1]
    assert sorted([*held_out_and_evaluated(run)[0], *held_out_and_evaluated(run)[1]]) == every
    looks = looks_of(deploy, delivery)
    assert (looks.forms, looks.cascades > 0) == (forms, classes and forms == 2)
    assert counts(run) == ((29, 11) if classes else (30, 10))
    # What was decided stands in the recipe that the run writes, and another seed divides in the same way.
    (folder / "again.yaml").write_text(as_drawn(recipe, written.splits).to_yaml())
    again = PruningRecipe.from_yaml(folder / "again.yaml")
    assert again.held_out == written.splits.held_out  # type: ignore[union-attr]
    assert held_out_and_evaluated(load_pruning(again)) == held_out_and_evaluated(run)
    other = load_pruning(recipe.with_overrides({"calibration.seed": 3}))
    assert held_out_and_evaluated(other) == held_out_and_evaluated(run)


@pytest.mark.parametrize("looks", [Looks(bits=6), Looks(2, bits=6)])
def test_all_that_a_deployment_looks_at_keeps_the_confidence(looks: Looks) -> None:
    """Three cuts in every form and one model in every form in fewer bits, all of which just break the promise."""
    count, false = 1024, 3 * looks.forms + looks.bits

    def passes(same: int) -> bool:
        return lower_share(torch.arange(count) < same, confidence=looks.confidence) >= 0.97

    least = next(same for same in range(int(0.97 * count), count + 1) if passes(same))
    assert 1 - binom.cdf(least - 1, count, 0.97) ** false <= 0.025


def test_rows_that_a_recipe_names_are_the_ones(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = recipe_of(folder, held_out={"split": "train[50%:]", "samples": 30})
    for recipe in (named, named.to_deploy(keep=0.8)):
        assert counts(load_pruning(recipe)) == (30, 40)
    asked = recipe_of(folder, evaluation__samples=17)
    for recipe in (asked, asked.to_deploy(keep=0.8, runtimes=FLOAT32)):
        assert counts(load_pruning(recipe)) == (23, 17)
    everything, delivery = load_recipe(recipe_of(folder, evaluation__samples=40))
    assert counts(everything) == (28, 12)
    assert delivery.splits.evaluation.samples == 12  # type: ignore[union-attr]
    for samples, expected in ((24, (24, 16)), (90, (28, 12))):
        assert not caplog.messages
        keep = {"keep": {"predictions": 0.8, "samples": samples}}
        assert counts(load_pruning(recipe_of(folder, prune__budget=keep))) == expected
    assert counts(load_pruning(recipe_of(folder, evaluation__samples=30))) == (28, 12)


def test_too_few_rows_are_said_by_name(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    few = recipe_of(folder, prune__budget={"keep": 0.93}, calibration__samples=20)
    assert rows_needed(0.93, Looks().confidence) == 66
    for recipe in (few, few.to_deploy(keep=0.93, runtimes=FLOAT32)):
        found, delivery = load_recipe(recipe)
        assert counts(found) == (130, 40)
        assert delivery.splits.held_out is None
        expected = (
            "the split 'validation' has 40 rows, too few to promise 93 % on some and to judge it on the others, which "
            "takes 88: 93 % is promised on further rows of 'train', and if the model was trained on these, it keeps "
            "less of new ones; evaluate on more rows, ask for less, or name rows as held_out"
        )
        assert caplog.messages == [expected]
        caplog.clear()
    for runtimes, rows in ((FLOAT32, 477), ([], 586)):
        said = f"keep: 0.99 can be promised with 95 % confidence from {rows} held-out rows"
        with pytest.raises(RequestError, match=said):
            load_pruning(few.to_deploy(keep=0.99, runtimes=runtimes))
    assert FEW in caplog.text
    caplog.clear()
    sliced = {"calibration__split": "train[:70%]", "evaluation__split": "train[70%:]"}
    assert counts(load_pruning(recipe_of(folder, **sliced))) == (85, 45)
    assert not caplog.messages


def test_a_loss_of_a_metric_is_promised_on_rows_of_the_evaluated_split(folder: Path, tmp_path: Path) -> None:
    loss = {"keep": {"metric": "pearson", "by": 0.1}}
    with pytest.raises(RequestError, match="keep: a loss of at most 0.1 of pearson can be .* from 200 held-out rows"):
        load_pruning(recipe_of(folder, prune__budget=loss))
    save_project(tmp_path, train=20, validation=300, prune={"budget": {"keep": {"metric": "accuracy", "by": 0.1}}})
    assert counts(load_pruning(recipe_of(tmp_path, calibration__samples=5))) == (200, 100)


def test_a_cascade_and_a_choice_have_a_part_each(tmp_path: Path) -> None:
    sections = {"calibration": {"samples": 20}, "cascade": {"disagreement": 0.3}}
    save_project(tmp_path, train=60, validation=40, prune={"budget": {"heads": 0.5}, "alpha": 0.5}, **sections)
    assert load_recipe(recipe_of(tmp_path))[1].splits.held_out.samples == 26  # type: ignore[union-attr]
    rows = load_pruning(recipe_of(tmp_path, prune__alpha="auto")).rows
    assert (samples_of(rows.held_out), samples_of(rows.promise)) == (13, 13)
    with pytest.raises(RequestError, match="cascade needs samples beyond the 60 to score on, .*, or leave it out"):
        load_pruning(recipe_of(tmp_path, calibration__samples=60, evaluation__split="train"))


def test_blocks_of_text_are_promised_on_and_judged(tmp_path: Path) -> None:
    recipe = save_stories(tmp_path, lines=60, prune={"budget": {"keep": 0.5}, "alpha": 0.5}, calibration={"samples": 4})
    (tmp_path / "validation.txt").write_text((tmp_path / "text.txt").read_text()[::-1])
    files = {"files": {"train": "text.txt", "validation": "validation.txt"}, "text": "text", "max_length": 24}
    asked = {"data": {**files, "files": {split: tmp_path / name for split, name in files["files"].items()}}}
    run = PruningRecipe.from_yaml(recipe, asked)
    every = samples_of(load_pruning(run.with_overrides({"prune.budget": {"heads": 0.5}})).rows.evaluation)
    found = load_pruning(run)
    # A block has many predictions: no more are held out than the ten that promise 50 % if they all agree.
    assert counts(found) == (10, every - 10)
    assert held_out_and_evaluated(found) == held_out_and_evaluated(load_pruning(run.to_deploy(keep=0.5)))
