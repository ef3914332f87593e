"""Rows as chat models are tuned on them, against transformers' own masks, and tokens written by hand."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import tokenizers
import torch
from rich.console import Console
from support.models import causal_lm, generative_tokenizer
from support.reading import reading
from transformers import PreTrainedTokenizerFast

from hies_export import prune
from hies_export.cli.arguments import Options, read_recipe
from hies_export.cli.main import build_parser
from hies_export.errors import DataError, RequestError
from hies_export.pipeline.recipe import PruningRecipe
from hies_export.recipe.sections import Columns
from hies_export.tasks.given import batches_of
from hies_export.tasks.prompts import answer_text
from hies_export.tasks.registry import task_of

WORDS = ["<pad>", "<unk>", "<s>", "</s>", "user", "assistant", "system", ":", "\n", *"abcdefghijkQA#"]
TURN = "{{ m.role + ' : ' + m.content + ' </s>\\n' }}"
PROMPTED = "{% if add_generation_prompt %}assistant :{% endif %}"
EACH = "{{% for m in messages %}}{}{{% endfor %}}"
PLAIN = EACH.format(TURN) + PROMPTED
TAGGED = EACH.format(
    "{{ m.role + ' : ' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + ' </s>' }}{% endgeneration %}"
    "{% else %}{{ m.content + ' </s>' }}{% endif %}{{ '\n' }}"
)
# Begins otherwise the longer the conversation is, so that none of its beginnings is one of the whole.
COUNTING = "{% for m in messages %}{{ '# ' }}{% endfor %}" + PLAIN
# Has no prompt for the assistant, which writes its role itself.
SILENT = EACH.format(TURN)
# Shows the assistant's answers without `b` unless they come last, as templates leave thoughts out.
SHORTER = TURN.replace("m.content", "m.content|replace('b ', '')")
THINKING = EACH.format("{% if loop.last %}" + TURN + "{% else %}" + SHORTER + "{% endif %}") + PROMPTED


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def chatting(template: str | None = PLAIN, **options: Any) -> PreTrainedTokenizerFast:
    return generative_tokenizer(WORDS, chat_template=template, **options)


def read(columns: Columns, tokenizer: Any, **rows: Any) -> list[tuple[str, str]]:
    """Return the words of each row, and those that are labels."""
    task = reading("text-generation", columns=columns, config=causal_lm().config, processor=tokenizer)
    given = datasets.Dataset.from_dict(rows)
    task.check_rows(given)
    (batch,) = task.read(task.draw(given), size=8)
    words = tokenizer.convert_ids_to_tokens
    return [
        (" ".join(words(ids[mask != 0].tolist())), " ".join(words(labels[labels != -100].tolist())))
        for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True)
    ]


TALK = Columns(messages=("messages",))
LONG = said("a", "b c", "d", "e")


@pytest.mark.parametrize(
    ("template", "labels"),
    [
        (PLAIN, "b c </s> e </s>"),
        (TAGGED, "b c </s> e </s>"),
        (SILENT, "assistant : b c </s> assistant : e </s>"),
        (THINKING, "e </s>"),
    ],
)
def test_the_assistants_tokens_are_labels(template: str, labels: str) -> None:
    tokenizer = chatting(template)
    expected = tokenizer.convert_ids_to_tokens(tokenizer.apply_chat_template(LONG, return_dict=True)["input_ids"])
    assert read(TALK, tokenizer, messages=[LONG]) == [(" ".join(expected), labels)]
    if template == TAGGED:
        found = tokenizer.apply_chat_template(LONG, return_dict=True, return_assistant_tokens_mask=True)
        masked = [token for token, mask in zip(found["input_ids"], found["assistant_masks"], strict=True) if mask]
        assert " ".join(tokenizer.convert_ids_to_tokens(masked)) == labels


def test_other_rows_of_chats() -> None:
    shared = [{"from": ("human", "gpt")[n % 2], "value": m["content"]} for n, m in enumerate(LONG)]
    as_shared = read(Columns(messages=("conversations",)), chatting(), conversations=[shared])
    assert as_shared == read(TALK, chatting(), messages=[LONG])
    # What is asked may hold answers, which are none of this row's.
    pair = Columns(messages=("prompt", "completion"))
    ((_, labels),) = read(pair, chatting(), prompt=[LONG[:3]], completion=[LONG[3:]])
    assert labels == "e </s>"
    # Without a chat template, text is joined as it is, and ended once.
    found = read(pair, chatting(None), prompt=["a", "b "], completion=[" c </s>", "d"])
    assert found == [("<s> a c </s>", "c </s>"), ("<s> b d </s>", "d </s>")]
    # Fields that only other messages have are no part of this one.
    tools = EACH.format("{{ m.content }} {% for call in m.tool_calls %}{{ '# ' * call|length }}{% endfor %}")
    calls = [[{"role": "assistant", "content": "a", "tool_calls": [call]}] for call in ({"x": 1}, {"x": 1, "y": 2})]
    assert [tokens for tokens, _ in read(TALK, chatting(tools), messages=calls)] == ["a #", "a # #"]


def test_a_long_conversation_loses_its_beginning() -> None:
    limited = TALK.model_copy(update={"max_length": 4})
    ((tokens, labels),) = read(limited, chatting(), messages=[[*LONG, {"role": "user", "content": "a b c d"}]])
    assert (tokens, labels) == ("assistant : e </s>", "e </s>")


@pytest.mark.parametrize(
    ("messages", "template", "match"),
    [
        (LONG, None, "its tokenizer has none; set tokenizer.chat_template"),
        ([{"role": "human", "content": "a"}, *LONG], PLAIN, "the role of every message must be one of .*rename"),
        ([], PLAIN, "the assistant must say something, but row 1"),
        (said("a", " "), PLAIN, "the assistant must say something, but row 1"),
        (LONG, "{{ raise_exception('no turn') }}", r"but fails on row 0 \(from 0\): .*no turn"),
        (LONG, TAGGED.replace("'assistant'", "'model'"), "tells to be the assistant's, but row 0 .* has none; give"),
        (said("a", "b"), COUNTING, "tokens that the chat template tells to be the assistant's, but row 0"),
    ],
)
def test_what_cannot_be_read_is_named(messages: list[Any], template: str | None, match: str) -> None:
    with pytest.raises(DataError, match=match):
        read(TALK, chatting(template), messages=[LONG, messages])


def test_columns_that_hold_no_conversation() -> None:
    with pytest.raises(DataError, match="must name a column of lists of messages, .* but 'messages' holds string"):
        read(TALK, chatting(), messages=["a"])
    with pytest.raises(DataError, match="no text may be blank, but row 0"):
        read(Columns(messages=("a", "b")), chatting(), a=["a"], b=[" "])


def test_the_advice_for_other_columns_works_when_followed(tmp_path: Path) -> None:
    causal_lm().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(5 * (json.dumps({"question": "a", "reply": "b"}) + "\n"))

    def proposed(*arguments: str) -> PruningRecipe:
        options = build_parser().parse_args([*asked, *arguments], Options())
        options.console = Console(quiet=True)
        return read_recipe(options)

    asked = ["prune", str(tmp_path / "model"), "--data", f"train={tmp_path}/rows.jsonl", "--flops", "0.9"]
    with pytest.raises(DataError, match="""as in --set 'data.prompt="Question: {question}"' --set data.answer="""):
        proposed()
    recipe = proposed("--set", 'data.prompt="Question: {question}"', "--set", "data.answer=reply")
    assert (recipe.data.prompt, recipe.data.answer, recipe.data.text) == ("Question: {question}", "reply", ())
    with pytest.raises(RequestError, match="prompt: Input should be a valid string.*quote a text"):
        proposed("--set", "data.prompt={question}")


def test_conversations_are_pruned_in_memory_and_judged_token_by_token() -> None:
    rows = datasets.Dataset.from_dict({"messages": [said("a", "b c"[: 1 + 2 * (n % 2)], "d", "e f") for n in range(8)]})
    model = causal_lm()
    task = task_of(model)
    (batch,) = batches_of(model, rows, what="batches", task=task, processor=chatting(), columns=None)
    with torch.no_grad():
        logits = task.output(model, batch)
    found = task.join([task.keep(logits, batch)], [batch])
    assert (len(found.values), found.joint) == (4 * (2 + 3) + 4 * (3 + 3), False)
    how: dict[str, Any] = {"budget": {"heads": 0.5}, "alpha": 0.5, "processor": chatting()}
    by_name = prune(model, rows, columns={"messages": "messages"}, **how)
    assert prune(model, rows, **how).plan.kept == by_name.plan.kept


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        ("Answer:", "red", "Answer: red </s>"),
        ("Answer:", " red", "Answer: red </s>"),
        ("Answer:\n", "red", "Answer:\nred </s>"),
        ("问题：", "红色", "问题：红色 </s>"),
        ("Farbe:", "红色", "Farbe:红色 </s>"),
        ("คำตอบ", "แดง", "คำตอบแดง </s>"),
        ("답:", "빨간색", "답: 빨간색 </s>"),
        ("Answer:", "red </s>", "Answer: red </s>"),
    ],
)
def test_prompt_and_answer_are_parted_by_one_space_where_words_are(prompt: str, answer: str, text: str) -> None:
    assert prompt + answer_text(prompt, answer, " </s>") == text


def test_what_is_read_is_tokenised_as_one_text() -> None:
    letters = {character: number for number, character in enumerate(["<pad>", "</s>", *sorted({*"Answer: red\nblue"})])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="<pad>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")
    asked, expected = Columns(prompt="{q}", answer="a"), ("A n s w e r :   r e d </s>", "  r e d </s>")
    assert read(asked, tokenizer, q=["Answer:"] * 2, a=["red", " red"]) == [expected] * 2
    choices = asked.model_copy(update={"label": "right"})
    assert read(choices, tokenizer, q=["Answer:"], a=[[" blue", " red"]], right=[1]) == [expected]


@pytest.mark.parametrize("name", ["qas.question", "q[0]", "0", "a:b", "q!r"])
def test_a_template_names_columns_exactly(name: str) -> None:
    asked = Columns(prompt=f"Q {{{{ {{{name}}} }}}} A", answer="a")
    assert read(asked, chatting(None), **{name: ["c"], "a": ["d"]}) == [("<s> Q <unk> c <unk> A d </s>", "d </s>")]
