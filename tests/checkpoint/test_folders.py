"""Outputs appear whole or not at all, and replace nothing that this package did not write."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.models import bert

from hies_export.checkpoint.beside import write_config
from hies_export.checkpoint.folders import new_folder, refuse_existing, refuse_other_file, replace_file
from hies_export.errors import OutputExistsError


def write(folder: Path, text: str = "text") -> Path:
    with new_folder(folder, overwrite=True) as temporary:
        (temporary / "hies_plan.json").write_text(text)
        (temporary / "sub").mkdir()
        (temporary / "sub" / "b.json").write_text(text)
    return folder


def of(*names: str) -> Callable[[Path], object]:
    """Return a function that puts empty files into a folder."""

    def make(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()

    return make


WRITTEN_HERE: dict[str, Callable[[Path], object]] = {
    "a slim checkpoint": write,
    "a run": of("plan.json", "scores.json", "notes.txt"),
    "a quickstart": of("recipe.yaml", "vit-digits/config.json"),
    "an export": lambda folder: write_config(bert(), folder),
    "nothing": of(),
}


@pytest.mark.parametrize("what", WRITTEN_HERE)
def test_what_was_written_here_is_replaced_whole(what: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    WRITTEN_HERE[what](tmp_path / "out")
    write(tmp_path / "out", "new")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["hies_plan.json", "sub"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def a_file(folder: Path) -> None:
    folder.rmdir()
    folder.write_text("a file")


def a_link_to_nowhere(folder: Path) -> None:
    folder.rmdir()
    folder.symlink_to(folder.with_name("nowhere"))


ANYTHING_ELSE: dict[str, Callable[[Path], object]] = {
    "a plan among other files": of("plan.json", "report.json", "thesis.md"),
    "a project with a run": of("run/plan.json", "run/scores.json"),
    "a checkpoint": lambda folder: bert().save_pretrained(folder),
    "a file": a_file,
    "a link to nowhere": a_link_to_nowhere,
}


@pytest.mark.parametrize("what", ANYTHING_ELSE)
def test_anything_else_is_kept(what: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    ANYTHING_ELSE[what](tmp_path / "out")
    before = sorted((p, p.read_bytes() if p.is_file() else None) for p in tmp_path.rglob("*"))
    with pytest.raises(OutputExistsError, match="out is something else; choose another folder, or move or delete"):
        write(tmp_path / "out", "new")
    assert sorted((p, p.read_bytes() if p.is_file() else None) for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("output", [Path.cwd().anchor, ".", "..", "../../out"])
def test_what_cannot_be_renamed_is_refused_first(output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount, or a folder that holds the working one: else a run would be lost when it is moved there, at its end."""
    write(tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out" / "sub")
    with pytest.raises(OutputExistsError, match=r"can be renamed, .* new folder inside it, such as .*run$"):
        refuse_existing(output, overwrite=True)


@pytest.mark.parametrize("error", [OSError("stop"), KeyboardInterrupt("stop")], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["while writing", "while moving"])
def test_the_old_folder_stays_if_the_new_one_fails(
    where: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out", "old")

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(*((Path, "replace") if where == "while moving" else (Path, "write_text")), fails)
    with pytest.raises(type(error), match="stop"):
        write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "sub" / "b.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# Forks a process for every moment at which Python asks the operating system for something, and kills it there.
# In a process without torch, which is begun and copied in no time.
KILLED = f"""
import json, os, signal, sys
from pathlib import Path
from hies_export.checkpoint.folders import new_folder

{inspect.getsource(write)}
def state(base):
    return {{str(p.relative_to(base)): p.read_text() for p in sorted(base.rglob("*.json"))}}

def child(work):
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])

moment, killed, found = 0, True, []
while killed:
    base = Path(sys.argv[1]) / str(moment)
    base.mkdir()
    child(lambda: write(base / "out", "old"))

    def work(left=[moment]):
        def hook(*_):
            left[0] -= 1
            if left[0] == -1:  # os.kill is an event as well
                os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        write(base / "out", "new")

    killed = child(work)
    after = state(base)
    child(lambda: write(base / "out", "next"))
    found.append([after, state(base / "out")])
    moment += 1
print(json.dumps(found))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here, with which to kill at every moment in short time")
def test_killed_at_every_moment(tmp_path: Path) -> None:
    """The output is the old or the new one, whole; between the two renames, both are in the hidden folder."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    root = Path(__file__).parents[2]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout)
    assert len(found) > 30
    between = 0
    for after, later in found:
        in_place = {name: text for name, text in after.items() if name.startswith("out/")}
        if not in_place:
            between += 1
            assert sorted(after.values()) == ["new", "new", "old", "old"]
        else:
            assert in_place in [{"out/hies_plan.json": text, "out/sub/b.json": text} for text in ("old", "new")]
        assert later == {"hies_plan.json": "next", "sub/b.json": "next"}
    assert between >= 1


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_who_may_read_one_file_may_read_all(tmp_path: Path) -> None:
    with new_folder(tmp_path / "slim") as staging:
        (staging / "part").mkdir()
        for file in (staging / "model.safetensors", staging / "part" / "refit.safetensors"):
            file.write_bytes(b"weights")
            file.chmod(0o600)
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "slim").rglob("*") if file.is_file()}
    (tmp_path / "plain").write_text("")
    assert modes == {(tmp_path / "plain").stat().st_mode & 0o777}


def test_other_files_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "page.html"

    def check() -> None:
        refuse_other_file(file, "a page", lambda text: text == "ours")

    check()
    replace_file(file, "ours")
    check()
    for content in (b"theirs", b"\xff\xfe"):
        file.write_bytes(content)
        with pytest.raises(OutputExistsError, match=r"only if it is a page, but .*page.html is something else"):
            check()
    file.unlink()
    os.mkfifo(file)  # reading it would wait for ever
    with pytest.raises(OutputExistsError, match="something else"):
        check()
