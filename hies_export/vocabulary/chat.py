"""Find what a chat template puts around texts: every role, the use of a tool, and all texts in the template."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jinja2

from ..data.processors import tokenizer_of

# Stands for what somebody says: a character that no template has.
_SAID = "\ue000"
_ARGUMENT = {"type": "string", "description": _SAID}
_PARAMETERS = {"type": "object", "properties": {_SAID: _ARGUMENT}, "required": [_SAID]}
_TOOL = {"type": "function", "function": {"name": _SAID, "description": _SAID, "parameters": _PARAMETERS}}
# Some templates want an identifier of nine letters or digits.
_CALL = {"type": "function", "id": "a" * 9, "function": {"name": _SAID, "arguments": {_SAID: _SAID}}}
_SYSTEM, _USER, _ASSISTANT = ({"role": role, "content": _SAID} for role in ("system", "user", "assistant"))
_CALLS = {**_ASSISTANT, "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "content": _SAID, "name": _SAID, "tool_call_id": "a" * 9}
# Turns and tools. Templates refuse some of them: a system's turn, or roles that do not alternate.
_CONVERSATIONS: tuple[tuple[list[dict[str, Any]], list[Any] | None], ...] = (
    ([_USER], None),
    ([_SYSTEM, _USER, _ASSISTANT, _USER], None),
    ([_USER, _ASSISTANT, _USER, _ASSISTANT], None),
    ([_USER, _CALLS, _RESULT, _ASSISTANT, _USER], [_TOOL]),
    ([_SYSTEM, _USER, _CALLS, _RESULT, _ASSISTANT], [_TOOL]),
)


def templates_of(processor: Any) -> list[str]:
    """Return the chat templates of a tokenizer, or of a processor and its tokenizer, each once."""
    templates: list[Any] = []
    for owner in (processor, tokenizer_of(processor)):
        template = getattr(owner, "chat_template", None)
        templates += list(template.values()) if isinstance(template, dict) else [template]
    return list(dict.fromkeys(template for template in templates if isinstance(template, str)))


def chat_texts(processor: Any) -> list[str]:
    """Return what is read around texts in a chat: conversations as rendered, and the template's own texts."""
    return [*_rendered(processor), *(text for template in templates_of(processor) for text in _literals(template))]


def wrapped_as_in_chat(processor: Any, texts: Sequence[str]) -> list[list[str]]:
    """Return, for each pair of characters that a chat puts next to a text, all texts between these characters.

    A token may begin with the space or the line's end before a text, and end with what is after it.
    """
    neighbours = set()
    for chat in _rendered(processor):
        neighbours |= {(before[-1:], after[:1]) for before, after in itertools.pairwise(chat.split(_SAID))}
    return [[before + text + after for text in texts] for before, after in sorted(neighbours)]


def _rendered(processor: Any) -> Iterator[str]:
    """Yield `_CONVERSATIONS` as each chat template renders them, with contents as texts and as lists of parts."""
    tokenizer = tokenizer_of(processor)
    for template in templates_of(processor):
        for (turns, tools), prompts in itertools.product(_CONVERSATIONS, (False, True)):
            options = {"chat_template": template, "tools": tools, "add_generation_prompt": prompts, "tokenize": False}
            for messages in (turns, [{**turn, "content": [{"type": "text", "text": _SAID}]} for turn in turns]):
                try:
                    yield str(tokenizer.apply_chat_template(messages, **options))
                except Exception:  # of many kinds: a template refuses what it does not take
                    continue


def _literals(template: str) -> Iterator[str]:
    """Yield the texts that a template writes, or compares with, such as its roles."""
    try:
        for _, kind, value in jinja2.Environment(autoescape=True).lex(template):
            if kind in ("data", "string"):
                yield ast.literal_eval(value) if kind == "string" else value
    except (jinja2.TemplateError, SyntaxError, ValueError):
        yield template
