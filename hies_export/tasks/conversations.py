"""Read conversations as chat models are tuned on them: rendered by the chat template, with the assistant's tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import DataError, listed
from .late import data, datasets
from .prompts import end_of_text, ended, is_list, tokenize_spans

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
# ShareGPT's names of roles -> those of chat templates.
_SHAREGPT = {"human": "user", "gpt": "assistant"}
# The columns of what is asked and what follows, as TRL names them.
_PAIR = ("prompt", "completion")
# The tag by which a chat template tells what the assistant says.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def columns_of_chats(features: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the columns to read if a data set has conversations, TRL's prompt and completion, or Alpaca's columns."""
    talks = [name for name, feature in features.items() if _holds_messages(feature)]
    texts = [name for name, feature in features.items() if _holds_text(feature)]
    if {*_PAIR} <= {*talks} or {*_PAIR} <= {*texts}:
        return {"messages": _PAIR}
    if named := [name for name in talks if name in ("messages", "conversations") or len(talks) == 1]:
        return {"messages": (named[0],)}
    if {"instruction", "output"} <= {*texts}:
        parts = {"Instruction": "{instruction}\n\n", "Input": "{input}\n\n", "Response": ""}
        asked = [f"### {part}:\n{text}" for part, text in parts.items() if part != "Input" or "input" in texts]
        return {"prompt": "".join(asked), "answer": "output"}
    return None


def check_conversations(rows: datasets.Dataset, columns: Sequence[str], processor: Any) -> None:
    """Refuse columns that hold no conversations, blank ones, unknown roles, and a tokenizer without chat template."""
    kinds = [_holds_messages(rows.features[column]) for column in columns]
    if not all(kinds) and not (len(columns) == 2 and all(_holds_text(rows.features[column]) for column in columns)):
        given = listed(f"{column!r} holds {data.kind_of(rows.features[column])}" for column in columns)
        raise DataError(
            "data.messages must name a column of lists of messages, each with role and content (or from and value), "
            f"or two, what is asked and what follows, both of messages or both of text, but {given}"
        )
    for column in columns:
        leave = "leave such rows out"
        if not all(kinds):
            data.check_each(rows, column, lambda text: text and text.strip(), "no text may be blank", leave)
            continue
        must = f"the role of every message must be one of {', '.join(ROLES)}"
        data.check_each(rows, column, _has_known_roles, must, "rename it")
        if column == columns[-1]:
            data.check_each(rows, column, _has_an_answer, "the assistant must say something", leave)
    if all(kinds) and processor is not None and not data.tokenizer_of(processor).chat_template:
        raise DataError(
            "conversations are rendered by the model's chat template, but its tokenizer has none; set "
            "tokenizer.chat_template and save it with the model, or name columns of text"
        )


def _holds_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in data.STRINGS


def _holds_messages(feature: Any) -> bool:
    fields = feature.feature if is_list(feature) else None
    return isinstance(fields, dict) and ({"role", "content"} <= fields.keys() or {"from", "value"} <= fields.keys())


def _has_known_roles(value: Any) -> bool:
    return all(message.get("role") in ROLES for message in _messages(value))


def _has_an_answer(value: Any) -> bool:
    said = (message for message in _messages(value) if message["role"] == "assistant")
    return any(str(message.get("content", "")).strip() or message.get("tool_calls") for message in said)


def _messages(value: Any) -> list[dict[str, Any]]:
    found = [_given(message) or {} for message in value or []]
    return [
        {"role": _SHAREGPT.get(m["from"], m["from"]), "content": m.get("value", "")} if "from" in m else m
        for m in found
    ]


def _given(value: Any) -> Any:
    """Return a value without the fields that it lacks: `datasets` fills them with None if others have them."""
    if isinstance(value, dict):
        return {name: _given(inner) for name, inner in value.items() if inner is not None}
    return [_given(inner) for inner in value] if isinstance(value, list) else value


class Conversations:
    """Tokenises conversations, and counts in `unclear` those of which all tokens are judged.

    The assistant's tokens are known if the chat template has `{% generation %}`, or where it renders the beginning of a
    conversation as in the whole. The end-of-text token after a turn is the assistant's, and what follows it is not.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.unclear = tokenizer, 0
        self.end = end_of_text(tokenizer)

    def tokens(self, parts: Sequence[Any]) -> tuple[list[int], list[bool]]:
        """Return the tokens of a conversation, and which are the assistant's; of two parts, those of the second."""
        if isinstance(parts[0], str):
            prompt, completion = parts
            text = prompt + ended(completion, self.end)
            return tokenize_spans(text, [(len(prompt), len(text))], self.tokenizer)
        turns = [_messages(part) for part in parts]
        messages = [message for part in turns for message in part]
        render = partial(self.tokenizer.apply_chat_template, tokenize=False)
        if len(parts) == 1 and _GENERATION.search(self.tokenizer.get_chat_template()):
            found = self.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            return list(found["input_ids"]), list(map(bool, found["assistant_masks"]))
        said = [(place, place + 1) for place, message in enumerate(messages) if message["role"] == "assistant"]
        text, spans = render(messages), []
        for first, last in said if len(parts) == 1 else [(len(turns[0]), len(messages))]:
            known = messages[:first]
            begins = [render(known, add_generation_prompt=True), render(known)] if known else [""]
            begin, until = next(filter(text.startswith, begins), None), render(messages[:last])
            if begin is not None and text.startswith(until):
                spans.append((len(begin), self._end(text, len(begin), len(until))))
        self.unclear += not spans
        return tokenize_spans(text, spans or [(0, len(text))], self.tokenizer, special=False)

    def _end(self, text: str, begin: int, end: int) -> int:
        """Return where the end-of-text token ends in a part of a text, or the end of the part if it has none."""
        last = self.tokenizer.eos_token
        found = text.rfind(last, begin, end) if last else -1
        return end if found < 0 else found + len(last)
