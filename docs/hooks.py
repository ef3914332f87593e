"""Show files beside docs/ on the site, where pages link to them as in the repository: ../bench/results/bits.txt."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add every file outside docs/ that a page links to, under its path in the repository."""
    root = Path(config.config_file_path).parent
    for page in list(files.documentation_pages()):
        for target in LINK.findall(page.content_string):
            path = _outside(page.src_uri, target[1])
            if path and (root / path).is_file() and files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Point these links at where the site has the files."""

    def moved(found: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, found[2])
        return found[1] + (posixpath.relpath(path, posixpath.dirname(page.file.src_uri) or ".") if path else found[2])

    return LINK.sub(moved, markdown)


def _outside(page: str, link: str) -> str | None:
    """The path in the repository that a link of a page leads to, if that is not in docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") else path
