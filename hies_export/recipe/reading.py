"""Read a recipe's fields from YAML, override some, and say in words what pydantic finds wrong with them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.composer import MaxDepthExceededError
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from ..errors import RecipeError, did_you_mean, quoted, shortened

# Far above any real recipe; they bound the time and the memory that reading takes.
MOST_BYTES = 1 << 16
DEEPEST = 20
LONGEST_NUMBER = 40

# pydantic's kinds of errors that name Python's types -> what a recipe calls them.
_KINDS = {"model_type": "a mapping of fields", "dict_type": "a mapping", "tuple_type": "a list", "path_type": "a path"}


def read_fields(path: str | Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a recipe file, its relative paths made relative to the file, with dotted overrides."""
    path = Path(path)
    if not os.path.isfile(path):
        raise RecipeError([f"a recipe must be a YAML file, but there is no file {path}"])
    fields = read_yaml(path)
    if not isinstance(fields, dict):
        raise RecipeError([f"a recipe must be a mapping of fields, but {path} holds {type(fields).__name__}"])
    _resolve_paths(fields, path.parent)
    return overridden(fields, overrides)


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds; errors name the file and the line."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise RecipeError([f"{path} must be a file that can be read, but: {error.strerror}"]) from None
    _check_size(len(content), source=str(path))
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(str(path), content.count(b"\n", 0, error.start), "a byte is not UTF-8")
    return parse_yaml(text, source=str(path))


def parse_yaml(text: str, *, source: str) -> Any:
    """Return the value of a text in YAML 1.2, which errors call `source`: text, numbers, lists and mappings."""
    _check_size(len(text), source=source)
    reader = YAML(typ="safe", pure=True)
    reader.Constructor = _Constructor
    reader.max_depth = DEEPEST
    reader.composer.warn_double_anchors = False  # they are refused
    try:
        return reader.load(text)
    except ReaderError as error:
        _refuse(source, text.count("\n", 0, error.position), f"the character {error.character:#x} is not allowed")
    except MaxDepthExceededError as error:
        _refuse(source, error.problem_mark.line, f"values may be at most {DEEPEST} levels deep")
    except MarkedYAMLError as error:
        problem = ", ".join(filter(None, [error.context, error.problem]))
        mark = error.problem_mark or error.context_mark
        _refuse(source, mark.line if mark else 0, shortened(problem))
    except YAMLError as error:
        _refuse(source, 0, shortened(str(error)))


def _check_size(size: int, *, source: str) -> None:
    if size > MOST_BYTES:
        raise RecipeError([f"{source} must have at most {MOST_BYTES >> 10} KiB, got more"])


def _refuse(source: str, line: int, problem: str) -> NoReturn:
    raise RecipeError([f"{source} must be plain YAML, but in line {line + 1}: {problem}"]) from None


class _Constructor(SafeConstructor):
    """Builds plain values, with dates as text.

    A few lines of aliases can stand for gigabytes, and tags ask for other types: both are refused.
    """

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if node.anchor is not None:
            _raise("anchors (&) and aliases (*) are not allowed; write the value out, in quotes if it is text", node)
        if kind not in ("str", "int", "float", "bool", "null", "seq", "map", *_AS_TEXT):
            _raise("tags (!) are not allowed; leave it out, or put text in quotes", node)
        if kind in ("int", "float") and len(node.value) > LONGEST_NUMBER:
            _raise(f"a number may have at most {LONGEST_NUMBER} characters; put text in quotes", node)
        try:
            return super().construct_object(node, deep)
        except (ValueError, IndexError):  # of an empty one
            _raise(f"{quoted(node.value)} is no number; put text in quotes", node)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str" or not key.value.isprintable():
                given = quoted(key.value) if isinstance(key.value, str) else "a list or a mapping"
                _raise(f"a key must be printable text, in quotes if it looks like something else, got {given}", key)
        return super().construct_mapping(node, deep)


_AS_TEXT = ("timestamp", "value", "merge")
for _kind in _AS_TEXT:
    _Constructor.add_constructor(f"tag:yaml.org,2002:{_kind}", SafeConstructor.construct_yaml_str)


def _raise(problem: str, at: Any) -> NoReturn:
    raise ConstructorError(None, None, problem, at.start_mark)


def overridden(fields: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Set dotted fields, in place, and return all."""
    for key, value in overrides.items():
        _override(fields, key, value)
    return fields


def _resolve_paths(fields: dict[str, Any], folder: Path) -> None:
    """Make relative paths relative to the recipe's folder; a model that is no folder there is a Hub id."""
    # os.path.exists, unlike Path.exists, is false for names that no file system takes.
    if isinstance(fields.get("model"), str) and os.path.exists(folder / fields["model"]):
        fields["model"] = os.path.normpath(folder / fields["model"])
    if isinstance(fields.get("output"), str):
        fields["output"] = folder / fields["output"]
    evaluation = fields.get("evaluation")
    if isinstance(evaluation, dict) and isinstance(evaluation.get("lm_eval"), list):
        files = [folder / str(task) for task in evaluation["lm_eval"]]
        named = zip(evaluation["lm_eval"], files, strict=True)
        evaluation["lm_eval"] = [str(file) if file.suffix in (".yaml", ".yml") else task for task, file in named]
    if isinstance(evaluation, dict) and isinstance(evaluation.get("metrics"), list):
        evaluation["metrics"] = [
            str(folder / name) if "/" in str(name) and os.path.exists(folder / str(name)) else name
            for name in evaluation["metrics"]
        ]
    data = fields.get("data")
    if isinstance(data, dict) and isinstance(data.get("files"), dict):
        data["files"] = {k: folder / v if isinstance(v, str) else v for k, v in data["files"].items()}


def _override(fields: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        child = fields.setdefault(section, {})
        if not isinstance(child, dict):
            raise RecipeError([f"{dotted} cannot be set: {section} is a plain value in this recipe"])
        fields = child
    fields[last] = value


def sentences(error: ValidationError, recipe: type[BaseModel]) -> Iterator[str]:
    """Yield a sentence for each problem that pydantic found with the fields of a recipe, or of a section of one."""
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            known = list(_section_at(recipe, problem["loc"][:-1]).model_fields)
            nearest = did_you_mean(str(problem["loc"][-1]), known) or f"; the fields here are {', '.join(known)}"
            yield f"{where} is not a field of the recipe{nearest}"
        elif problem["type"] == "missing":
            yield f"{where} must be given"
        elif problem["type"] == "value_error":
            reason = str(problem["ctx"]["error"])
            yield f"{where}: {reason}" if where else reason
        else:
            message = _KINDS.get(problem["type"], problem["msg"].removeprefix("Input should be "))
            yield f"{where} must be {message}, got {quoted(problem['input'])}"


def _section_at(section: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel]:
    for part in location:
        annotation = section.model_fields[str(part)].annotation
        candidates = get_args(annotation) if get_origin(annotation) else (annotation,)
        section = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return section
