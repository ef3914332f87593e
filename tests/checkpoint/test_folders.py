"""What may be replaced, and what is left of a process that was killed while it wrote."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hies_export.checkpoint import leftovers
from hies_export.checkpoint.folders import new_folder, refuse_existing, refuse_other_file, replace_file
from hies_export.checkpoint.marker import MARKER
from hies_export.errors import OutputExistsError


def write(folder: Path, text: str = "text") -> Path:
    with new_folder(folder, overwrite=True) as temporary:
        (temporary / "a.json").write_text(text)
        (temporary / "sub").mkdir()
        (temporary / "sub" / "b.json").write_text(text)
    return folder


def test_what_appears_is_on_the_disk_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power loss, a name on the disk without its bytes would be a checkpoint of zeros."""
    seen: list[str] = []
    fsync, move = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        seen.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def moved(self: Path, target: Path) -> Path:
        seen.append(f"to {target.name}")
        return move(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", moved)
    write(tmp_path / "temporary")
    assert seen == ["to temporary"]
    seen.clear()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    write(tmp_path / "out")
    place = seen.index("to out")
    assert sorted(seen[:place]) == [MARKER, "a.json", "b.json", "out", "sub"]
    assert seen[place + 1 :] == [tmp_path.name]
    seen.clear()
    replace_file(tmp_path / "page.html", "text")
    assert seen == ["page.html", "to page.html", tmp_path.name]
    seen.clear()
    with new_folder(tmp_path / "run") as run:
        write(run / "slim")
        assert seen == ["to slim"], "the run's own end is soon enough"
    assert "a.json" in seen


# What --overwrite replaces.


def test_a_folder_that_was_written_here_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    assert json.loads((tmp_path / "out" / MARKER).read_text())["files"] == ["a.json", "sub/b.json"]
    (tmp_path / "out" / ".DS_Store").touch()
    write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "sub" / "b.json").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_part_of_what_was_written_here_is_replaced_by_itself(tmp_path: Path) -> None:
    """A run writes `slim/` with a marker, and later the card into it."""
    with new_folder(tmp_path / "run") as run:
        write(run / "slim")
        (run / "slim" / "README.md").write_text("card")
    write(tmp_path / "run" / "slim", "new")
    assert not (tmp_path / "run" / "slim" / "README.md").exists()


def no_marker(folder: Path) -> None:
    (folder / MARKER).unlink()


def damaged_marker(folder: Path) -> None:
    (folder / MARKER).write_text('{"files": 5}')


def added(folder: Path) -> None:
    (folder / "sub" / "notes.txt").write_text("mine")


def link_added(folder: Path) -> None:
    (folder / "data").symlink_to(folder.parent)


def changed(folder: Path) -> None:
    (folder / "a.json").write_text("fine-tuned")
    later = time.time() + 60
    os.utime(folder / "a.json", (later, later))


def a_file(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.write_text("a file")


def dangling(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("nowhere"))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (no_marker, "has no .hies_export, the file that marks what hies-export wrote"),
        (damaged_marker, "holds a.json, which hies-export did not write with it"),
        (added, "holds sub/notes.txt, which hies-export did not write with it"),
        (link_added, "holds data, which hies-export did not write with it"),
        (changed, "holds a.json, which was changed after hies-export wrote it"),
        (a_file, "is not a folder"),
        (dangling, "is not a folder"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_was_not_written_here_is_kept(spoil, said: str, tmp_path: Path) -> None:
    write(tmp_path / "out")
    spoil(tmp_path / "out")
    before = sorted((p, p.read_bytes() if p.is_file() else None) for p in tmp_path.rglob("*"))
    with pytest.raises(OutputExistsError, match=f"{said}; choose another folder, or move or delete"):
        write(tmp_path / "out", "new")
    assert sorted((p, p.read_bytes() if p.is_file() else None) for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("error", [OSError("stop"), KeyboardInterrupt("stop")], ids=lambda error: type(error).__name__)
def test_the_old_folder_is_back_if_the_new_one_cannot_take_its_place(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out", "old")

    def fails(self: Path, target: Path) -> Path:
        raise error

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(type(error), match="stop"):
        write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "sub" / "b.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("content", ["[" * 100_000, '"files"'])
def test_a_marker_that_is_no_json_object_counts_as_damaged(content: str, tmp_path: Path) -> None:
    write(tmp_path / "out")
    (tmp_path / "out" / MARKER).write_text(content)
    with pytest.raises(OutputExistsError, match="holds a.json, which hies-export did not write with it"):
        write(tmp_path / "out", "new")


def test_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert (write(tmp_path / "out") / "a.json").is_file()


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


# What a killed process leaves, and what the next one does.

# Forks a process for every moment at which Python asks the operating system for something, and kills it there.
KILLED = """
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_folders import write

def state(base):
    return {str(p.relative_to(base)): p.read_text() for p in sorted(base.rglob("*.json"))}

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
    found.append([after, state(base), sorted(os.listdir(base))])
    moment += 1
print(json.dumps(found))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here, with which to kill at every moment in short time")
def test_killed_at_every_moment(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent)]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(made.stdout)
    assert len(found) > 30
    whole = [{"out/a.json": text, "out/sub/b.json": text} for text in ("old", "new", "next")]
    between = 0
    for after, later, listed in found:
        in_place = {name: text for name, text in after.items() if name.startswith("out/")}
        if not in_place:  # killed between the two renames: both are whole, in the hidden folder
            between += 1
            assert sorted(after.values()) == ["new", "new", "old", "old"]
        else:
            assert in_place in whole[:2]
        assert (later, listed) == (whole[2], ["out"])
    assert between >= 1
    assert "removed" in made.stderr
    assert "was complete when its run was killed, and was moved into place" in made.stderr


WAITS = """
import sys, time
from pathlib import Path
from hies_export.checkpoint.folders import new_folder
with new_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("written")
    print(folder.parent, flush=True)
    time.sleep(3600)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that writes tmp_path/out, and the hidden folder in which it does."""
    command = [sys.executable, "-c", WAITS, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_only_what_no_process_writes_is_removed(
    writer: tuple[subprocess.Popen[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process, hidden = writer
    refuse_existing(tmp_path / "out")
    assert (hidden / "out" / "half").is_file()
    assert not caplog.messages
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert (hidden / "out" / "half").is_file()
    write(tmp_path / "another")  # of any name in the same folder
    assert sorted(p.name for p in tmp_path.iterdir()) == ["another"]
    assert caplog.messages == [f"removed {hidden}, which a killed run left behind"]


def test_another_machine_and_an_older_version_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in (".out-remote01", ".out-older123", ".out-nothing0", ".other-older12", ".config-12345678"):
        (tmp_path / name).mkdir()
    (tmp_path / ".out-remote01" / leftovers.OWNER).write_text("another-machine")
    (tmp_path / ".out-older123" / "out").mkdir()
    (tmp_path / ".other-older12" / "other").mkdir()
    with caplog.at_level(logging.WARNING):
        write(tmp_path / "out")
    kept = [".config-12345678", ".other-older12", ".out-older123", ".out-remote01", "out"]
    assert sorted(p.name for p in tmp_path.iterdir()) == kept
    older, remote = caplog.messages
    assert "older123 may be left over from a killed run; delete it if nothing writes there" in older
    assert "remote01 belongs to a run on another-machine; delete it if that has ended" in remote


def test_without_locks_nothing_is_removed(
    writer: tuple[subprocess.Popen[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, hidden = writer
    process.kill()
    process.wait()
    monkeypatch.setattr(leftovers, "fcntl", None)
    write(tmp_path / "out")
    assert hidden.is_dir()


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_who_may_read_one_file_may_read_all(tmp_path: Path) -> None:
    with new_folder(tmp_path / "slim") as staging:
        (staging / "config.json").write_text("{}")
        (staging / "part").mkdir()
        for file in (staging / "model.safetensors", staging / "part" / "refit.safetensors"):
            file.write_bytes(b"weights")
            file.chmod(0o600)
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "slim").rglob("*") if file.is_file()}
    (tmp_path / "plain").write_text("")
    assert modes == {(tmp_path / "plain").stat().st_mode & 0o777}


def test_an_output_below_a_file_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file" / "out", tmp_path / "file" / "a" / "out"):
        with pytest.raises(OutputExistsError, match="must lie in folders, but .*file above .*out is none"):
            refuse_existing(place)
