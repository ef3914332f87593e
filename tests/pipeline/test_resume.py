"""A run that was killed goes on where it was; one that failed, or was asked for something else, starts anew."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models import causal_lm, save_stories
from support.runs import hies, without_tracing
from support.tolerance import REFITTED, assert_near, assert_same_plan

from hies_export import PruningPlan, PruningRecipe
from hies_export.pipeline import journal
from hies_export.pipeline.load_recipe import load_recipe
from hies_export.pipeline.run import _journal

# Heads and neurons of four blocks.
MODULES = 8


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that ranks by `compensated` and refits layer by layer, run to its end into `whole`."""
    folder = tmp_path_factory.mktemp("story")
    recipe = save_stories(
        folder,
        lines=200,
        calibration={"split": "train[:60%]", "samples": 8, "batch_size": 4},
        evaluation={"split": "train[60%:]"},
        prune={
            "budget": {"parameters": 0.9},
            "compensation": {"method": "least_squares", "samples": 12, "sequential": True},
        },
        measure={"runtimes": ["torch"], "shapes": [[1, 8]], "repeats": 2},
    )
    causal_lm(num_hidden_layers=MODULES // 2).save_pretrained(folder / "model")
    assert _run(recipe, "whole") == 0
    return recipe


@pytest.fixture(scope="module")
def killed(story: Path) -> Path:
    """What a run in another process left, which killed itself after it had refitted two modules."""
    command = [sys.executable, "-m", "support.killed", MODULES + 2, "run", story, "-o", story.parent / "killed"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (story.parent / "killed").exists()
    left = story.parent / "killed.resume"
    (kept,) = left.iterdir()
    assert [len([*(kept / name).glob("*.pt")]) for name in ("ranked", "refitted")] == [MODULES, 2]
    return left


def _left(killed: Path, name: str) -> Path:
    """Return a copy of what the killed run left, as if left by a run into a folder of that name."""
    return shutil.copytree(killed, killed.with_name(f"{name}.resume"))


def _run(recipe: Path, name: str, *more: str) -> int:
    with without_tracing():
        return hies("run", recipe, "-o", recipe.parent / name, *more)


def _assert_same(recipe: Path, name: str) -> None:
    one, other = recipe.parent / name, recipe.parent / "whole"
    # The digest of refitted layers is of bytes, which some processors round differently.
    assert_same_plan(*(replace(PruningPlan.from_file(of / "plan.json"), compensation={}) for of in (one, other)))
    assert_near(*(load_file(of / "slim" / "model.safetensors") for of in (one, other)), within=REFITTED)
    assert not (recipe.parent / f"{name}.resume").exists()


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The modules that were ranked and refitted in this process, as they are kept."""
    names, kept = defaultdict(list), journal._FileMapping.__setitem__

    def counted(self: Any, name: str, value: Any) -> None:
        names[self._folder.name].append(name)
        kept(self, name, value)

    monkeypatch.setattr(journal._FileMapping, "__setitem__", counted)
    return names


def test_killed_while_units_are_ranked(
    story: Path, killed: Path, found: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (left,) = _left(killed, "ranking").iterdir()
    shutil.rmtree(left / "refitted")
    for file in (left / "ranked").glob("model.layers.[123].*"):
        file.unlink()
    (left / "ranked" / ".half.tmp-1").mkdir()  # as a kill leaves one while a file is written
    assert _run(story, "ranking") == 0
    assert "was killed: 2 modules were ranked, and 0 refitted" in " ".join(capsys.readouterr().err.split())
    assert [name.split(".")[2] for name in found["ranked"]] == ["3", "3", "2", "2", "1", "1"]
    _assert_same(story, "ranking")


def test_killed_while_layers_are_refitted(
    story: Path, killed: Path, found: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    _left(killed, "refitting")
    assert _run(story, "refitting") == 0
    assert f"was killed: {MODULES} modules were ranked, and 2 refitted" in " ".join(capsys.readouterr().err.split())
    assert not found["ranked"]
    assert 0 < len(found["refitted"]) <= MODULES - 2
    _assert_same(story, "refitting")


def test_other_options_start_anew(story: Path, killed: Path) -> None:
    left = _left(killed, "other")
    asked = {"prune.budget.parameters": 0.8}
    pruning, _ = load_recipe(PruningRecipe.from_yaml(story, asked))
    with _journal(pruning, story.parent / "other") as kept:
        assert not kept.chains
        assert not kept.fits
        assert not left.exists()


def test_an_error_leaves_nothing(
    story: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save, before = torch.save, {*story.parent.iterdir()}

    def fails(value: Any, file: Path) -> None:
        if len([*story.parent.glob("failed.resume/*/*/*.pt")]) == 3:
            raise OSError(errno.ENOSPC, "full")
        save(value, file)

    monkeypatch.setattr(torch, "save", fails)
    assert _run(story, "failed") == 1
    assert {*story.parent.iterdir()} == before
    said = " ".join(capsys.readouterr().err.split())
    assert "must fit on the disk of its output" in said
    assert "free space there, or choose an output on another disk" in said


def test_a_folder_of_the_users_own_stays(story: Path) -> None:
    folder = story.parent / "mine.resume"
    folder.mkdir()
    (folder / "letter.txt").write_text("mine")
    assert _run(story, "mine") == 0
    assert [(file.name, file.read_text()) for file in folder.iterdir()] == [("letter.txt", "mine")]


def test_a_damaged_file_is_said_and_removed(story: Path, killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = _left(killed, "damaged")
    next(left.glob("*/ranked/*.pt")).write_bytes(b"")
    assert _run(story, "damaged") == 1
    assert "run the same command again, which starts anew" in " ".join(capsys.readouterr().err.split())
    assert not left.exists()
