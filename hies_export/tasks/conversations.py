"""Read conversations as chat models are tuned on them: rendered by the chat template, with the assistant's tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import DataError, listed
from ..late import datasets
from .late import data
from .prompts import Tokens, tokenize_spans

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
# ShareGPT's names of roles -> those of chat templates.
_SHAREGPT = {"human": "user", "gpt": "assistant"}
# The columns of what is asked and what follows, as TRL names them.
_PAIR = ("prompt", "completion")
# The tag by which a chat template tells what the assistant says.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def columns_of_chats(features: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return which columns of a chat data set to read, by the fields of `data`; None for other features."""
    chats = [name for name, feature in features.items() if _holds_messages(feature)]
    texts = [name for name, feature in features.items() if data.holds_text(feature)]
    if {*_PAIR} <= {*chats} or {*_PAIR} <= {*texts}:
        return {"messages": _PAIR}
    if named := [name for name in chats if name in ("messages", "conversations") or len(chats) == 1]:
        return {"messages": (named[0],)}
    if {"instruction", "output"} <= {*texts}:  # Alpaca's columns, and its prompt
        section = "### Input:\n{input}\n\n" if "input" in texts else ""
        prompt = "### Instruction:\n{instruction}\n\n" + section + "### Response:\n"
        return {"prompt": prompt, "answer": "output"}
    return None


def check_conversations(rows: datasets.Dataset, columns: Sequence[str], processor: Any) -> None:
    """Refuse columns that hold no conversations, blank ones, unknown roles, and a tokenizer without chat template.

    `columns` are one of conversations, or two of prompts and completions. Without a `processor`, only rows are checked.
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
    """Return whether a column holds lists of messages, with the fields of chat templates or of ShareGPT."""
    fields = data.item_feature(feature) if data.is_list(feature) else None
    return isinstance(fields, dict) and ({"role", "content"} <= fields.keys() or {"from", "value"} <= fields.keys())


def _has_an_answer(value: Any) -> bool:
    """Return whether the assistant writes a text or calls a tool in a conversation."""
    of_assistant = (message for message in _messages(value) if message["role"] == "assistant")
    return any(str(message.get("content", "")).strip() or message.get("tool_calls") for message in of_assistant)


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a conversation, None for none, as chat templates take them: ShareGPT's fields renamed."""
    messages = []
    for given in value or []:
        message = _without_none(given) or {}
        if "from" in message:
            message = {"role": _SHAREGPT.get(message["from"], message["from"]), "content": message.get("value", "")}
        messages.append(message)
    return messages


def _without_none(value: Any) -> Any:
    """Return a value without the fields that are None at any depth: `datasets` adds those that only other rows have."""
    if isinstance(value, dict):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def tokenize_conversation(values: Sequence[Any], tokenizer: Any, end: str) -> Tokens:
    """Return the tokens of a conversation, of which those that are known to be the assistant's are labels.

    `values` are a list of messages, or a prompt and a completion, which is the assistant's: two such lists, or two
    texts, of which the second gets the `end`.
    """
    if isinstance(values[0], str):
        prompt, completion = values
        text = prompt + completion.removesuffix(end) + end
        return tokenize_spans(text, [(len(prompt), len(text))], tokenizer)
    messages = [message for value in values for message in _messages(value)]
    if len(values) == 2:
        ranges = [(len(_messages(values[0])), len(messages))]
    elif _GENERATION.search(tokenizer.get_chat_template()):
        found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return Tokens(list(found["input_ids"]), list(map(bool, found["assistant_masks"])))
    else:
        ranges = [(number, number + 1) for number, message in enumerate(messages) if message["role"] == "assistant"]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = _assistant_spans(messages, ranges, text, tokenizer)
    return tokenize_spans(text, spans, tokenizer, special=False)


def _assistant_spans(
    messages: list[dict[str, Any]], ranges: Sequence[tuple[int, int]], text: str, tokenizer: Any
) -> list[tuple[int, int]]:
    """Return the characters of `ranges` of messages, the assistant's, in the `text` that all messages render to.

    They are known where the template renders the beginning of a conversation as in the whole. The end-of-text token
    after a turn is the assistant's, and what follows it is not.
    """
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    spans, end_token = [], tokenizer.eos_token
    for first, after_last in ranges:
        before = messages[:first]
        prefixes = [render(before, add_generation_prompt=True), render(before)] if before else [""]
        prefix = next(filter(text.startswith, prefixes), None)
        through = render(messages[:after_last])
        if prefix is not None and text.startswith(through):
            end_at = text.rfind(end_token, len(prefix), len(through)) if end_token else -1
            spans.append((len(prefix), len(through) if end_at < 0 else end_at + len(end_token)))
    return spans
