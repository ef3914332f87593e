"""Read conversations as chat models are tuned on them: rendered by the chat template, with the assistant's tokens."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import DataError, listed
from ..late import datasets
from .late import data
from .prompts import tokenize_spans

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
# ShareGPT's names of roles -> those of chat templates.
_SHAREGPT = {"human": "user", "gpt": "assistant"}
# The columns of what is asked and what follows, as TRL names them.
_PAIR = ("prompt", "completion")
# The tag by which a chat template tells what the assistant says.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def columns_of_chats(features: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the columns to read, by the fields of `data`; None for other features.

    A data set may have conversations, TRL's prompt and completion, or Alpaca's instruction, input and output.
    """
    talks = [name for name, feature in features.items() if _holds_messages(feature)]
    texts = [name for name, feature in features.items() if data.holds_text(feature)]
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
    """Refuse columns that hold no conversations, blank ones, unknown roles, and a tokenizer without chat template.

    `columns` are one of conversations, or two of prompts and completions. Without a `processor`, none is looked at.
    """
    features, leave_out = [rows.features[column] for column in columns], "leave such rows out"
    if len(columns) == 2 and all(map(data.holds_text, features)):
        for column in columns:
            data.check_each(rows, column, data.has_text, "no text may be blank", leave_out)
        return
    if not all(map(_holds_messages, features)):
        given = listed(f"{column!r} holds {data.kind_of(rows.features[column])}" for column in columns)
        raise DataError(
            "data.messages must name a column of lists of messages, each with role and content (or from and value), "
            f"or two, what is asked and what follows, both of messages or both of text, but {given}"
        )
    must = f"the role of every message must be one of {', '.join(ROLES)}"
    for column in columns:
        data.check_each(rows, column, lambda v: all(m.get("role") in ROLES for m in _messages(v)), must, "rename it")
    data.check_each(rows, columns[-1], _has_an_answer, "the assistant must say something", leave_out)
    if processor is not None and not data.tokenizer_of(processor).chat_template:
        raise DataError(
            "conversations are rendered by the model's chat template, but its tokenizer has none; set "
            "tokenizer.chat_template and save it with the model, or name columns of text"
        )


def _holds_messages(feature: Any) -> bool:
    fields = data.item_feature(feature) if data.is_list(feature) else None
    return isinstance(fields, dict) and ({"role", "content"} <= fields.keys() or {"from", "value"} <= fields.keys())


def _has_an_answer(value: Any) -> bool:
    said = (message for message in _messages(value) if message["role"] == "assistant")
    return any(str(message.get("content", "")).strip() or message.get("tool_calls") for message in said)


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a conversation as chat templates take them, those of ShareGPT renamed."""
    found = [_without_none(message) or {} for message in value or []]
    return [
        {"role": _SHAREGPT.get(m["from"], m["from"]), "content": m.get("value", "")} if "from" in m else m
        for m in found
    ]


def _without_none(value: Any) -> Any:
    """Return a value without the fields that are None at any depth: `datasets` adds those that only other rows have."""
    if isinstance(value, dict):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def tokenize_conversation(parts: Sequence[Any], tokenizer: Any, end: str) -> tuple[list[int], list[bool], bool]:
    """Return the token ids of a conversation, a mask of the assistant's, and whether it is known which these are.

    `parts` are a list of messages, or a prompt and a completion, which is the assistant's: two such lists, or two
    texts, of which the second gets the `end`. The assistant's tokens are known if the chat template has
    `{% generation %}`, or where it renders the beginning of a conversation as in the whole; else all pass for them. The
    end-of-text token after a turn is the assistant's, and what follows it is not.
    """
    if isinstance(parts[0], str):
        prompt, completion = parts
        text = prompt + completion.removesuffix(end) + end
        return *tokenize_spans(text, [(len(prompt), len(text))], tokenizer), True
    turns = [_messages(part) for part in parts]
    messages = list(itertools.chain(*turns))
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    if len(parts) == 1 and _GENERATION.search(tokenizer.get_chat_template()):
        found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return list(found["input_ids"]), list(map(bool, found["assistant_masks"])), True
    said = [(place, place + 1) for place, message in enumerate(messages) if message["role"] == "assistant"]
    text, spans, last_token = render(messages), [], tokenizer.eos_token
    for first, last in said if len(parts) == 1 else [(len(turns[0]), len(messages))]:
        known = messages[:first]
        begins = [render(known, add_generation_prompt=True), render(known)] if known else [""]
        begin, until = next(filter(text.startswith, begins), None), render(messages[:last])
        if begin is not None and text.startswith(until):
            ended_at = text.rfind(last_token, len(begin), len(until)) if last_token else -1
            spans.append((len(begin), len(until) if ended_at < 0 else ended_at + len(last_token)))
    return *tokenize_spans(text, spans or [(0, len(text))], tokenizer, special=False), bool(spans)
