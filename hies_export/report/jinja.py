"""Fill the templates. HTML escapes whatever it is given; Markdown escapes by the filters `md` and `code`,
and by `line` and `literal` in blocks of code."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, select_autoescape

from .lead import lead_text
from .maps import unit_maps
from .report import Report
from .rows import latency_table, layer_table, pair_text, ratio_text, row_name, tried_table
from .text import (
    alpha_text,
    budget_text,
    counts_text,
    criterion_text,
    environment_text,
    family_text,
    held_out_rows,
    kinds_text,
    latency_text,
    method_text,
    model_name,
    title,
    tried_text,
)


def render(template: str, **values: Any) -> str:
    """Fill a template of `report/templates/`."""
    return environment().get_template(template).render(values)


def render_report(template: str, report: Report, **values: Any) -> str:
    """Fill a template with what every page about a run shows, and with further values."""
    details, layers = report.details, report.details.flops_per_layer
    return render(
        template,
        report=report,
        title=title(report),
        lead=lead_text(report),
        name=model_name(report),
        criterion=criterion_text(report),
        budget=budget_text(report),
        method=method_text(report),
        family=family_text(report),
        machine=environment_text(report.environment),
        alpha_note=alpha_text(report),
        tried_note=tried_text(report),
        counts=counts_text(report),
        kinds=kinds_text(report),
        kinds_or=kinds_text(report, joined="or"),
        tried=tried_table(report),
        held_out=held_out_rows(report),
        maps=unit_maps(report),
        latency=latency_table(report.latency) if report.latency else None,
        latency_note=latency_text(report.latency) if report.latency else "",
        layers=layer_table(layers.dense, layers.slim) if layers else None,
        layers_shape=layers.shape if layers else None,
        auto_class=details.auto_class,
        custom_code=details.custom_code,
        **values,
    )


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
    made.filters |= {"row_name": row_name, "ratio_text": ratio_text, "pair_text": pair_text}
    return made


def one_line(text: object) -> str:
    """Return text without line breaks; within a code block no such text can end the block."""
    return " ".join(str(text).splitlines())


def escape_markdown(text: object) -> str:
    """Return text as a line of Markdown in which nothing becomes a cell, a link, HTML, emphasis or another element.

    Source: https://spec.commonmark.org/0.31.2/#backslash-escapes, and https://github.github.com/gfm/ for "|" and "~".
    """
    line = one_line(text)
    # Underscores within words, and brackets without an address, are nothing to Markdown.
    line = re.sub(r"[\\|`*~$]|(?<!\w)_|_(?!\w)|\](?=[(\[:])", r"\\\g<0>", line)
    return re.sub(r"&(?=#?\w+;)", "&amp;", line).replace("<", "&lt;")


def code_span(text: object) -> str:
    """Return a line of text as a code span of Markdown, with a fence that no run of backticks in it ends."""
    line = one_line(text)
    longest = max(map(len, re.findall("`+", line)), default=0)
    fence, space = "`" * (longest + 1), " " * bool(longest)
    return f"{fence}{space}{line}{space}{fence}"
