"""Fill the templates. HTML escapes everything by itself; Markdown escapes by the filters `md` and `code`,
and by `line` and `literal` in blocks of code."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, select_autoescape

from . import drawing, frontier, lead, maps, tables, text
from .report import Report


def render(template: str, **values: Any) -> str:
    """Fill a template of `report/templates/`."""
    return environment().get_template(template).render(values)


def render_report(template: str, report: Report, **values: Any) -> str:
    """Fill a template about a run; the template calls `text`, `rows` and `maps` on the report."""
    return render(template, report=report, details=report.details, title=text.title(report), **values)


def render_markdown(report: Report) -> str:
    """Return report.md: the report as a page of Markdown."""
    return render_report("report.md.j2", report).rstrip() + "\n"


@cache
def environment(*packages: str) -> Environment:
    """Return the environment of the report's templates, and of those in `templates/` of further packages."""
    loaders = [PackageLoader(package) for package in (*packages, "hies_export.report")]
    made = Environment(
        loader=ChoiceLoader(loaders),
        autoescape=select_autoescape(("html.j2", "svg.j2")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"md": escape_markdown, "code": code_span, "line": one_line, "literal": json.dumps}
    made.filters |= {"row_name": tables.row_name, "ratio_text": tables.ratio_text, "pair_text": tables.pair_text}
    made.globals |= {
        "drawing": drawing,
        "frontier": frontier,
        "lead": lead,
        "maps": maps,
        "tables": tables,
        "text": text,
    }
    return made


def one_line(value: object) -> str:
    """Return text without line breaks; within a code block no such text can end the block."""
    return " ".join(str(value).splitlines())


def escape_markdown(value: object) -> str:
    """Return text as a line of Markdown in which nothing becomes a cell, a link, HTML, emphasis or another element.

    Source: https://spec.commonmark.org/0.31.2/#backslash-escapes, and https://github.github.com/gfm/ for "|" and "~".
    """
    line = one_line(value)
    # Underscores within words, and brackets without an address, are nothing to Markdown.
    line = re.sub(r"[\\|`*~$]|(?<!\w)_|_(?!\w)|\](?=[(\[:])", r"\\\g<0>", line)
    return re.sub(r"&(?=#?\w+;)", "&amp;", line).replace("<", "&lt;")


def code_span(value: object) -> str:
    """Return a line of text as a code span of Markdown, with a fence that no run of backticks in it ends."""
    line = one_line(value)
    longest = max(map(len, re.findall("`+", line)), default=0)
    fence, space = "`" * (longest + 1), " " * bool(longest)
    return f"{fence}{space}{line}{space}{fence}"
