"""The pages: every command on them is one, and the site builds without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import hies_export
from hies_export.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(text: str) -> list[str]:
    """What a reader would type: lines of shell blocks, continued ones joined, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(hies-export [a-z][^`|]*)`", text)
    return [part.strip() for line in lines for part in line.partition(" #")[0].split("&&") if "hies-export " in part]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_command_is_one(path: Path) -> None:
    for command in commands(path.read_text()):
        program, *arguments = shlex.split(command.replace("[", "").replace("]", ""))
        if program == "hies-export":
            build_parser().parse_args(arguments)


def test_commands_are_found() -> None:
    assert len([c for path in PAGES for c in commands(path.read_text())]) > 20


def test_the_reference_has_every_public_name() -> None:
    text = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    listed = set(re.findall(r"^::: hies_export\.(\w+)$", text, re.MULTILINE))
    errors = {name for name in hies_export.__all__ if name.endswith("Error")}
    assert listed == (set(hies_export.__all__) - errors) | {"errors"}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for name in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f'no {name} here: pip install "hies-export[docs]"')
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    stages = (tmp_path / "site" / "reference" / "stages" / "index.html").read_text()
    for name in ("score_heads", "OnnxGenerator"):
        assert f'id="hies_export.{name}"' in stages
    # Docstrings are rendered: sections as tables, examples as code.
    assert stages.count("Parameters:") >= 15
    assert "collect_statistics(model, batches, sites)" in re.sub(r"<[^>]+>", "", stages)
    assert (tmp_path / "site" / "img" / "line.svg").is_file()
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r'(?:src|<link[^>]* href)="(https?://[^"]+)', page.read_text())
        assert loaded == [], page
