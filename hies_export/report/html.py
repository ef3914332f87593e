"""Fill the templates: report.md, and report.html, one page that needs nothing but a browser, in light or dark.

HTML templates escape everything by themselves. Those of Markdown use the filter `md`, and in blocks of code `line` and
`literal`. Style and pictures (inline SVG) are in the page itself.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, select_autoescape

from . import figures, tables, words
from .drawing import for_page
from .report import Report


def render_html(report: Report, *, location: str = "slim") -> str:
    """Return the report as one self-contained HTML page; `location` is the folder or Hub id to load the model from."""
    return render_report(
        "report.html.j2",
        report,
        subtitle=f"{report.task} · {words.criterion_text(report)} · seed {report.seed}",
        location=location,
        on_hub="/" in location,  # an id is OWNER/NAME; the folder is beside the page
        pictures=figures.draw_report(report),
    )


def render_markdown(report: Report) -> str:
    """Return report.md: the report as a page of Markdown."""
    return render_report("report.md.j2", report).rstrip() + "\n"


def render_report(template: str, report: Report, **values: Any) -> str:
    """Fill a template about a run with its report, the parts of `report_parts`, the title and further values."""
    parts = tables.report_parts(report)
    return render(template, report=report, details=report.details, parts=parts, title=words.title(report), **values)


def render(template: str, **values: Any) -> str:
    """Fill a template of `report/templates/`."""
    return environment().get_template(template).render(values)


@cache
def environment(*packages: str) -> Environment:
    """Return the Jinja environment of the report's templates, and of those in `templates/` of further packages."""
    loaders = [PackageLoader(package) for package in (*packages, "hies_export.report")]
    jinja = Environment(
        loader=ChoiceLoader(loaders),
        autoescape=select_autoescape(("html.j2",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    jinja.filters |= {"md": escape_markdown, "line": one_line, "literal": json.dumps}
    jinja.filters["for_page"] = for_page
    jinja.globals |= {"figures": figures, "tables": tables, "words": words}
    return jinja


def one_line(value: object) -> str:
    """Return a value as text without line breaks, so that it cannot end a block of code that it stands in."""
    return " ".join(str(value).splitlines())


def escape_markdown(value: object) -> str:
    """Return text on one line, escaped so that Markdown shows it literally: no cell, link, HTML or emphasis.

    Source: https://spec.commonmark.org/0.31.2/#backslash-escapes, and https://github.github.com/gfm/ for "|" and "~".
    """
    line = one_line(value)
    # Underscores within words, and brackets without an address, mean nothing in Markdown.
    line = re.sub(r"[\\|`*~$]|(?<!\w)_|_(?!\w)|\](?=[(\[:])", r"\\\g<0>", line)
    return re.sub(r"&(?=#?\w+;)", "&amp;", line).replace("<", "&lt;")


def is_page(text: str) -> bool:
    """Return whether a text is a page that this package rendered, as its first 2,000 characters say."""
    return '<meta name="generator" content="hies-export">' in text[:2000]
