"""`--help`: complete for every command, and answered at once."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hies_export import cli
from hies_export.cli.main import main

SHARED = {"__init__", "main", "arguments", "terminal", "digits"}
COMMANDS = sorted({path.stem for path in Path(cli.__file__).parent.glob("*.py")} - SHARED)


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit, match="^0$"):
        main([*arguments, "--help"])
    return capsys.readouterr().out


def test_every_file_is_a_command_with_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    listed = dict(re.findall(r"^    (\w+)\s+(\S.*)$", help_of(capsys), re.MULTILINE))
    assert sorted(listed) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_is_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, name)
    assert text.startswith(f"usage: hies-export {name} ")
    _, *sections = re.split(r"^(?:positional arguments|options):\n", text, flags=re.MULTILINE)
    entries = re.split(r"\n  (?=\S)", "\n" + "".join(section.split("\n\n")[0] for section in sections))[1:]
    assert any(entry.startswith("-v, --verbose") for entry in entries)
    assert [entry for entry in entries if not re.search(r"\S\s{2,}\S", entry)] == []
    # A command with a result prints it as JSON.
    returns = inspect.signature(importlib.import_module(f"hies_export.cli.{name}").run).return_annotation
    assert ("--json" in text) == (returns != "None")


def test_help_needs_no_library_and_few_modules() -> None:
    """Importing is what takes time; how much depends on what else the machine does, and the modules do not."""
    code = f"""
import sys
from hies_export.cli.main import main
for arguments in [], *([name] for name in {COMMANDS}):
    try:
        main([*arguments, "--help"])
    except SystemExit:
        pass
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.splitlines()[-1].split()
    assert not {"torch", "transformers", "datasets", "numpy", "pydantic", "yaml"} & set(modules)
    assert len(modules) < 500  # 200, and 100 of coverage; torch brings 1000
