"""Make the tables of the reference from the code: recipe fields and criteria.

`scripts/reference` writes them between markers in the pages, and tests/test_docs.py holds the pages to them.
"""

import inspect
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hies_export import CRITERIA, PruningRecipe, score_compensated
from hies_export.lab.baselines.names import DIFFERENCES, FLAP, JUDGED_ONLY, KWON
from hies_export.score.criteria import COMPENSATED

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
SCALARS = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}
BOUNDS = {Ge: ("at least", "ge"), Gt: ("above", "gt"), Le: ("at most", "le"), Lt: ("below", "lt")}


def recipe_tables() -> str:
    """Return a heading, what the section is for, and a table of its fields, for the recipe and every section in it."""
    parts = []
    for path, model in sections(PruningRecipe):
        parts += [f"## `{path}`" if path else "## Top level", ""]
        if path:
            parts += [(inspect.getdoc(model) or "").partition("\nAttributes:")[0].strip(), ""]
        parts += ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
        for name, field in model.model_fields.items():
            cells = (f"`{name}`", _type(field, f"{path}.{name}".strip(".")), _default(field), meaning(model, name))
            parts.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
        parts.append("")
    return "\n".join(parts)


def sections(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the dotted path and the model of a section and of those inside it, in the order of their fields."""
    yield path, model
    for name, field in model.model_fields.items():
        for kind in _alternatives(field.annotation):
            if _is_section(kind):
                yield from sections(kind, f"{path}.{name}".strip("."))


def meaning(model: type[BaseModel], name: str) -> str:
    """Return what a field means: its description or its line under `Attributes:`, and of a section what it is for."""
    field = model.model_fields[name]
    known = [
        _attributes(inspect.getdoc(kind) or "") for kind in model.__mro__ if name in getattr(kind, "model_fields", ())
    ]
    described = field.description or next((one[name] for one in known if name in one), "")
    inner = [kind for kind in _alternatives(field.annotation) if _is_section(kind)]
    purpose = (inspect.getdoc(inner[0]) or "").partition("\n")[0] if inner else ""
    if reference := re.match(r"See `\w+`[.;] ?", described):
        return f"{purpose} {described[reference.end() :]}".strip()
    return described or purpose


def criteria_table() -> str:
    """Return a table of the criteria: name, options, and the first line of the docstring."""
    rows = ["| criterion | reads | score |", "| --- | --- | --- |"]
    for name, entry in CRITERIA.items():
        if entry.function.__module__.startswith("hies_export."):  # not those that a test or an example registered
            rows.append(_criterion_row(name, ", ".join(f"`{need}`" for need in entry.needs), entry.function))
    rows.append(_criterion_row(COMPENSATED, "a pass of its own", score_compensated))
    for what, names in (("are cut like its criteria", (KWON, FLAP)), ("are judged and not cut", JUDGED_ONLY)):
        rows += ["", f"Baselines of a sweep that {what}:", "", "| baseline | how it is done here |", "| --- | --- |"]
        rows += [f"| `{name}` | {_escaped(DIFFERENCES[name])} |" for name in names]
    rows.append("")
    return "\n".join(rows)


TABLES: dict[Path, Callable[[], str]] = {
    REFERENCE / "recipe.md": recipe_tables,
    REFERENCE / "criteria.md": criteria_table,
}


def with_table(page: str, table: str) -> str:
    """Return a page with the text between its two markers replaced by a table."""
    found = re.fullmatch(r"(.*<!-- generated -->\n).*(<!-- end of generated -->\n.*)", page, re.DOTALL)
    assert found is not None, "a page needs the lines <!-- generated --> and <!-- end of generated -->"
    return f"{found[1]}\n{table}\n{found[2]}"


def _attributes(docstring: str) -> dict[str, str]:
    text = docstring.partition("\nAttributes:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in found}


def _alternatives(annotation: Any) -> list[Any]:
    """Return the members of a union without None and without what only validates them."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return [kind for member in members for kind in _alternatives(member)]
    return [annotation]


def _is_section(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, BaseModel)


def _type(field: FieldInfo, path: str) -> str:
    words = " or ".join(_words(kind, path) for kind in _alternatives(field.annotation))
    for constraint in field.metadata:
        for kind, (relation, attribute) in BOUNDS.items():
            if isinstance(constraint, kind):
                words += f", {relation} {getattr(constraint, attribute)}"
    return words


def _words(kind: Any, path: str) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is Annotated:
        return _words(arguments[0], path)
    if origin is tuple:
        words = _words(arguments[0], path)
        return f"list of {words if words in SCALARS.values() else f'({words})'}"
    if origin is dict:
        return f"mapping of {_words(arguments[0], path)} to {_words(arguments[1], path)}"
    return f"[section](#{path.replace('.', '')})" if _is_section(kind) else SCALARS[kind]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, BaseModel):
        return "its defaults"
    if field.default is None:
        return "none"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    text = yaml.safe_dump(str(value) if isinstance(value, Path) else value, default_flow_style=True)
    return f"`{text.removesuffix('...' + chr(10)).strip()}`"


def _criterion_row(name: str, reads: str, entry: object) -> str:
    return f"| `{name}` | {reads} | {_escaped((inspect.getdoc(entry) or '').partition(chr(10))[0])} |"


def _escaped(text: str) -> str:
    return re.sub(r"([*_|])", r"\\\1", text)
