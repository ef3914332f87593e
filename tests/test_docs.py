"""The pages: their commands and links work, their tables follow the code, and the site is built without a warning."""

import ast
import html
import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pytest

import hies_export
from hies_export import PruningRecipe
from hies_export.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
REFERENCE = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "reference")))
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py") if path.name != "tiny.py")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def commands(text: str) -> list[str]:
    """What a reader would type: lines of shell blocks, continued ones joined, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(hies-export [a-z][^`|]*)`", text)
    parts = [part.strip() for line in lines for part in line.partition(" #")[0].split("&&") if "hies-export " in part]
    return [part for part in parts if not part.endswith("...")]


def test_every_command_is_one() -> None:
    typed = [shlex.split(re.sub(r"[][]", "", command)) for path in PAGES for command in commands(path.read_text())]
    assert len(typed) > 20
    for program, *arguments in typed:
        if program == "hies-export":
            build_parser().parse_args(arguments)


@pytest.mark.parametrize("path", [ROOT / "README.md", DOCS / "reference" / "commands.md"], ids=name_of)
def test_every_command_is_listed(path: Path) -> None:
    available = re.findall(r"^    ([a-z]+)\b", build_parser().format_help().partition("COMMAND\n")[2], re.MULTILINE)
    table = path.read_text().partition("| `hies-export ...` |")[2].partition("\n\n")[0]
    listed = [name for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert "run" in available
    assert sorted(listed) == sorted(available)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_python_on_a_page_imports_what_there_is(path: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "hies_export":
                assert {alias.name for alias in node.names} <= set(hies_export.__all__)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.is_file(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings], link


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_what_a_page_includes_is_there(path: Path) -> None:
    """A formatter once wrote "--8 < --", which the site shows as it is."""
    for line in re.findall(r"^.*\b8 *<.*$", path.read_text(), re.MULTILINE):
        if path.name == "CONTRIBUTING.md":
            assert re.fullmatch(r"<!-- --8<-- \[(start|end):\w+\] -->", line), line
            continue
        include = re.fullmatch(r'--8<-- "([\w./]+)(?::(\w+))?"', line)
        assert include is not None, line
        text = (ROOT / include[1]).read_text()
        assert include[2] is None or f"[start:{include[2]}]" in text


def test_the_reference_has_every_public_name() -> None:
    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    listed = set(re.findall(r"^::: hies_export\.(\w+)$", text, re.MULTILINE))
    errors = {name for name in hies_export.__all__ if name.endswith("Error")}
    assert listed == (set(hies_export.__all__) - errors) | {"errors"}


@pytest.mark.parametrize("path", REFERENCE.TABLES, ids=name_of)
def test_tables_are_those_of_the_code(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert page == REFERENCE.with_table(page, REFERENCE.TABLES[path]()), "run scripts/reference"


def test_every_field_of_a_recipe_has_a_meaning() -> None:
    for path, model in REFERENCE.sections(PruningRecipe):
        assert [name for name in model.model_fields if not REFERENCE.meaning(model, name)] == [], path


class Page(HTMLParser):
    """A page of the site: its text, what can be linked to, and what it links to."""

    def __init__(self, path: Path):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        source = path.read_text(encoding="utf-8")
        self.feed(source)
        self.text = " ".join(html.unescape(re.sub(r"<[^>]+>", "", source)).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.ids |= {attributes[key] or "" for key in ("id", "name") if key in attributes}
        link = attributes.get("href") or attributes.get("src")
        if link and tag == "a":
            self.links.append(link)
        elif link and attributes.get("rel") != "canonical":
            self.loaded.append(link)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `mkdocs build` writes it."""
    for name in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f'no {name} here: pip install "hies-export[docs]"')
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def site(folder: Path) -> dict[str, Page]:
    """The pages of the site by their path in it."""
    return {path.relative_to(folder).as_posix(): Page(path) for path in folder.rglob("*.html")}


@pytest.mark.slow
def test_the_site_shows_the_examples_and_parts_of_contributing(site: dict[str, Page]) -> None:
    for example in EXAMPLES:
        page = {"custom_criterion.py": "criterion", "custom_task.py": "task"}.get(example, "examples")
        source = (ROOT / "examples" / example).read_text()
        assert " ".join(source.split()) in site[f"guides/{page}/index.html"].text, example
    for page in ("criterion", "architecture"):
        part = (ROOT / "CONTRIBUTING.md").read_text().partition(f"[start:{page}] -->")[2].partition("```")[0]
        words = re.sub(r"[`*]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", part))
        assert " ".join(words.split()) in site[f"guides/{page}/index.html"].text
    for path, shown in site.items():
        for left in ("--8<--", "--8 <", ":::", "<autoref", "][hies_export"):
            assert left not in shown.text, f"{path}: {left}"


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(site: dict[str, Page], folder: Path) -> None:
    for path, page in site.items():
        assert [link for link in page.loaded if re.match(r"(https?:)?//", link)] == [], f"{path} loads from elsewhere"
        if path == "404.html":  # it is served at any depth, with links from the root
            continue
        for link in (*page.links, *page.loaded):
            if re.match(r"[a-z]+:", link):
                continue
            file, _, anchor = unquote(link).partition("#")
            target = Path(os.path.normpath(folder / path / ".." / file)) if file else folder / path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path}: {link}"
            if anchor:
                assert anchor in site[target.relative_to(folder).as_posix()].ids, f"{path}: {link}"
