"""Read plain YAML: mappings with text as keys, lists, text, numbers, truth values and null.

The rest of YAML is refused. A few lines of aliases can stand for gigabytes, tags ask for other types, and a key that is
given twice would lose one of its values. Dates stay text.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import yaml

from ..errors import RecipeError, quoted, shortened

# Far above any real recipe; they bound the time and the memory that reading takes.
MOST_BYTES = 1 << 16
DEEPEST = 20
LONGEST_NUMBER = 40

_TEXT = "tag:yaml.org,2002:str"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_RESOLVED = (*_NUMBERS, "tag:yaml.org,2002:bool", "tag:yaml.org,2002:null")


def read_yaml(path: Path) -> Any:
    """Return what a file holds; errors name the file and the line."""
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
    """Return the value of a text, which errors call `source`."""
    _check_size(len(text), source=source)
    try:
        return yaml.load(text, _Loader)
    except yaml.reader.ReaderError as error:
        _refuse(source, text.count("\n", 0, error.position), f"the character {error.character:#x} is not allowed")
    except yaml.MarkedYAMLError as error:
        problem = ", ".join(filter(None, [error.context, error.problem]))
        _refuse(source, error.problem_mark.line if error.problem_mark else 0, shortened(problem))


def _check_size(size: int, *, source: str) -> None:
    if size > MOST_BYTES:
        raise RecipeError([f"{source} must have at most {MOST_BYTES >> 10} KiB, got more"])


def _refuse(source: str, line: int, problem: str) -> NoReturn:
    raise RecipeError([f"{source} must be plain YAML, but in line {line + 1}: {problem}"]) from None


class _Loader(yaml.SafeLoader):
    """Builds plain values, and raises MarkedYAMLError for everything else."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {  # type: ignore[misc]
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _RESOLVED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: str):
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            _raise("anchors (&) and aliases (*) are not allowed; write the value out, in quotes if it is text", event)
        if event.tag is not None:
            _raise("tags (!) are not allowed; leave it out, or put text in quotes", event)
        if self._depth == DEEPEST:
            _raise(f"values may be at most {DEEPEST} levels deep", event)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag != _TEXT or not key.value.isprintable():
                given = quoted(key.value) if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
                _raise(f"a key must be printable text, in quotes if it looks like something else, got {given}", key)
            if key.value in lines:
                _raise(f"the key {quoted(key.value)} is given again, after line {lines[key.value] + 1}", key)
            lines[key.value] = key.start_mark.line
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag in _NUMBERS and len(node.value) > LONGEST_NUMBER:
            _raise(f"a number may have at most {LONGEST_NUMBER} characters; put text in quotes", node)
        try:
            return super().construct_object(node, deep)
        except ValueError:
            _raise(f"{quoted(node.value)} is no number; put text in quotes", node)


def _raise(problem: str, at: Any) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)
