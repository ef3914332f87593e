"""Fill the templates. HTML escapes whatever it is given; Markdown escapes by the filters `md` and `code`."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, select_autoescape


def render(template: str, **values: Any) -> str:
    """Fill a template of `report/templates/`."""
    return environment().get_template(template).render(values)


@cache
def environment(*packages: str) -> Environment:
    """Return the environment of the report's templates.

    Args:
        packages: Dotted names of packages that have a folder `templates` of their own, which is searched too.
    """
    loaders = [PackageLoader(package) for package in (*packages, "hies_export.report")]
    made = Environment(
        loader=ChoiceLoader(loaders),
        autoescape=select_autoescape(("html.j2",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"md": escape_markdown, "code": code_span}
    return made


def escape_markdown(text: object) -> str:
    """Return text as a line of Markdown in which nothing becomes a cell, a code span or an HTML element."""
    line = " ".join(str(text).splitlines())
    return re.sub(r"([|`])", r"\\\1", line).replace("<", "&lt;")


def code_span(text: object) -> str:
    """Return a line of text as a code span of Markdown, with a fence that no run of backticks in it ends."""
    line = " ".join(str(text).splitlines())
    longest = max(map(len, re.findall("`+", line)), default=0)
    fence, space = "`" * (longest + 1), " " * bool(longest)
    return f"{fence}{space}{line}{space}{fence}"
