"""Read a recipe's fields from YAML, override some, and say in words what pydantic finds wrong with them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ..errors import RecipeError, did_you_mean, quoted
from .plain_yaml import read_yaml

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
