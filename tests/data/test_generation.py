"""Batches of text to generate, against tokens counted by hand and the model's own processor."""

import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pytest
import tokenizers
import torch
from support.generative import png
from support.models import GENERATIVE_WORDS, causal_lm, generative_tokenizer, llava, llava_processor, shake
from support.reading import reading
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, PreTrainedModel

from hies_export.data.batches import by_length
from hies_export.data.processors import load_processor
from hies_export.data.rows import load_rows
from hies_export.errors import DataError
from hies_export.recipe.sections import Columns
from hies_export.tasks import TASKS, Task

TEXT = Columns(text=("text",))
ASKED = Columns(prompt="Q {question} A", answer="answer")
CONFIG = LlamaConfig(vocab_size=32, pad_token_id=0, max_position_embeddings=64)


def rows_of(**columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns)


def words(ids: torch.Tensor) -> str:
    return " ".join(repr(w)[1:-1] if w == "\n" else w for w in (GENERATIVE_WORDS[i] for i in ids.tolist()))


def read(reader: Task, rows: datasets.Dataset, batch_size: int) -> list[Any]:
    reader.check_rows(rows)
    return reader.read(reader.draw(rows), size=batch_size)


def batches_of(rows: datasets.Dataset, columns: Columns = TEXT, *, batch_size: int = 8, **options: Any) -> list[Any]:
    usual = {"config": CONFIG, "processor": generative_tokenizer()}
    return read(reading("text-generation", columns=columns, **(usual | options)), rows, batch_size)


def labelled(batch: dict[str, torch.Tensor]) -> list[str]:
    """The label tokens of each sample, which must stand where they stand among the inputs."""
    where = batch["labels"] != -100
    assert torch.equal(batch["labels"][where], batch["input_ids"][where])
    assert not (where & (batch["attention_mask"] == 0)).any()
    return [words(ids[row]) for ids, row in zip(batch["labels"], where, strict=True)]


def test_texts_are_joined_by_the_end_token_and_cut_into_equal_blocks() -> None:
    (batch,) = batches_of(rows_of(text=["a b c", "d e", "f g h i"]), max_length=4, bos=False)
    assert [words(row) for row in batch["input_ids"]] == ["a b c </s>", "d e </s> f"]  # g h i is incomplete
    (alone,) = batches_of(rows_of(text=["a b c"]), max_length=4, bos=False)
    assert words(alone["input_ids"][0]) == "a b c"
    # Without an end token, the begin token joins them.
    rows = rows_of(text=["a", "b"])
    (batch,) = batches_of(rows, processor=generative_tokenizer(eos_token=None))
    assert words(batch["input_ids"][0]) == "<s> a <s> b"
    with pytest.raises(DataError, match="end-of-text or begin-of-text token, but it has neither"):
        batches_of(rows, processor=generative_tokenizer(eos_token=None, bos_token=None))
    with pytest.raises(DataError, match="at least two tokens .* but 'text' has fewer"):
        batches_of(rows_of(text=["a"]))


def test_blocks_begin_as_the_tokenizer_begins_a_text_unless_told_otherwise() -> None:
    rows, usual, plain = rows_of(text=["a b c d e f"]), generative_tokenizer(), generative_tokenizer()
    plain.backend_tokenizer.post_processor = tokenizers.processors.Sequence([])
    for tokenizer, bos in ((usual, "auto"), (usual, True), (plain, True)):
        (batch,) = batches_of(rows, processor=tokenizer, bos=bos, max_length=4)
        assert [words(row) for row in batch["input_ids"]] == ["<s> a b c", "<s> d e f"]
        assert labelled(batch) == ["a b c", "d e f"]
        assert batch["attention_mask"].all()
    for tokenizer, bos in ((usual, False), (plain, "auto"), (plain, False)):
        (batch,) = batches_of(rows, processor=tokenizer, bos=bos, max_length=3)
        assert labelled(batch) == [words(row) for row in batch["input_ids"]] == ["a b c", "d e f"]
    with pytest.raises(DataError, match="without begin-of-text token, got true"):
        batches_of(rows, processor=generative_tokenizer(bos_token=None), bos=True)


def test_lines_of_a_text_file_keep_their_line_breaks(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write("a b\nc\n\nd e\n")
    rows = load_rows(files={"train": tmp_path / "a.txt.gz"}, split="train")
    (batch,) = batches_of(rows)
    assert words(batch["input_ids"][0]) == r"<s> a b \n c \n \n d e \n"
    # WikiText on the Hub: rows are lines that end in their line break, and blank ones are empty.
    (batch,) = batches_of(rows_of(text=["", "a b\n", "", "c\n"]))
    assert words(batch["input_ids"][0]) == r"<s> \n a b \n \n c \n"


def test_block_length_by_default() -> None:
    rows = rows_of(text=["a b c d " * 300])
    for positions, length in ((2048, 512), (100, 100)):
        config = GPT2Config(vocab_size=32, n_positions=positions)
        (batch,) = batches_of(rows, config=config, batch_size=99)
        assert batch["input_ids"].shape == (1200 // length, length)
    with pytest.raises(DataError, match=r"max_length must be in \[1, 100\].*got 101"):
        batches_of(rows, config=config, max_length=101)


def test_blocks_are_the_samples_that_are_counted() -> None:
    how: dict[str, Any] = {"config": CONFIG, "processor": generative_tokenizer(), "max_length": 2, "bos": False}
    reader = reading("text-generation", columns=TEXT, **how)
    rows = rows_of(text=["a b c d e f g h i j"])
    blocks = reader.draw(rows, samples=3, shuffle_seed=1)
    expected = [[["a b", "c d", "e f", "g h", "i j"][i] for i in np.random.default_rng(1).permutation(5)[:3]]]
    batches = reader.read(blocks, size=2)
    assert [[words(row) for b in batches for row in b["input_ids"]]] == expected
    assert [len(b["input_ids"]) for b in batches] == [2, 1]
    assert len(reader.draw(rows, samples=99)) == 5


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_are_padded_on_the_right_whatever_the_side_of_the_tokenizer(side: str) -> None:
    rows = rows_of(question=["a b c", "d"], answer=["e", "f"])
    (batch,) = batches_of(rows, ASKED, processor=generative_tokenizer(padding_side=side))
    assert [words(r) for r in batch["input_ids"]] == ["<s> Q a b c A e </s>", "<s> Q d A f </s> <pad> <pad>"]
    assert labelled(batch) == ["e </s>", "f </s>"]


def gpt2() -> PreTrainedModel:
    """Return a decoder whose positions are absolute."""
    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return shake(GPT2LMHeadModel(GPT2Config(vocab_size=32, bos_token_id=2, eos_token_id=3, **sizes)))


@pytest.mark.parametrize("make", [causal_lm, gpt2, llava])
def test_padding_changes_no_logits(make: Callable[[], PreTrainedModel]) -> None:
    model, texts = make(), {"question": ["a b c d", "e"], "answer": ["f", "g h"]}
    if make is llava:
        processor = llava_processor()
        processor.tokenizer.padding_side = "left"
        (batch,) = shown(rows_of(image=[png(0), png(1)], **texts), processor=processor)
    else:
        how: dict[str, Any] = {"config": model.config, "processor": generative_tokenizer(padding_side="left")}
        (batch,) = batches_of(rows_of(**texts), ASKED, **how)
    del batch["labels"]
    real = batch.pop("attention_mask").bool()
    assert real[:, 0].all()
    assert not real.all()
    padded = model(attention_mask=real.long(), **batch).logits
    for row, of_row in enumerate(real):
        alone = {key: value[row : row + 1] for key, value in batch.items()}
        alone["input_ids"] = alone["input_ids"][:, of_row]
        torch.testing.assert_close(padded[row, of_row], model(**alone).logits[0], rtol=1e-4, atol=1e-5)


def test_rows_sorted_by_length_are_padded_no_more_than_needed() -> None:
    rows = rows_of(question=["a b c", "a b d", "a", "a b c d e"], answer=["f"] * 4)  # the first two need no padding
    found = by_length(batches_of(rows, ASKED, batch_size=2), config=CONFIG)
    texts = ["a A f </s> <pad> <pad>", "a b c A f </s>", "a b d A f </s> <pad> <pad>", "a b c d e A f </s>"]
    assert [words(row) for batch in found for row in batch["input_ids"]] == [f"<s> Q {text}" for text in texts]


def test_padding_by_the_end_token_is_no_answer() -> None:
    rows, tokenizer = rows_of(question=["a b", "c"], answer=["d", "e"]), generative_tokenizer(pad_token=None)
    (batch,) = batches_of(rows, ASKED, processor=tokenizer, config=LlamaConfig(vocab_size=32))
    assert words(batch["input_ids"][1]) == "<s> Q c A e </s> </s>"
    assert labelled(batch) == ["d </s>", "e </s>"]


def test_only_the_answer_is_a_label() -> None:
    (batch,) = batches_of(rows_of(question=["a b", "c"], answer=["yes", "no d"]), ASKED)
    assert [words(r) for r in batch["input_ids"]] == ["<s> Q a b A yes </s>", "<s> Q c A no d </s>"]
    assert labelled(batch) == ["yes </s>", "no d </s>"]


def test_a_long_prompt_loses_its_beginning_but_for_the_begin_token() -> None:
    rows = rows_of(question=["a b c d"], answer=["e f"])
    for limit, expected in ((8, "<s> b c d A e f </s>"), (5, "<s> A e f </s>"), (4, "A e f </s>")):
        (batch,) = batches_of(rows, ASKED, max_length=limit)
        assert words(batch["input_ids"][0]) == expected
        assert labelled(batch) == ["e f </s>"]


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"prompt": "{qestion}", "answer": "answer"}, "the column 'qestion', but it has .*; did you mean 'question'"),
        ({"prompt": "{question", "answer": "answer"}, "must be a template such as"),
        ({"prompt": "{question}", "answer": "anser"}, "the column 'anser', .*; did you mean 'answer'"),
        ({"prompt": "{question}"}, r"needs data\.text \(one column\), data\.messages, or data\.prompt and data"),
        ({}, r"needs data\.text \(one column\), data.*; the data has question, answer, hint"),
    ],
)
def test_what_a_template_lacks_is_said(columns: dict[str, Any], match: str) -> None:
    rows = rows_of(question=["a"], answer=["b"], hint=[7])
    with pytest.raises(DataError, match=match):
        reading("text-generation", columns=Columns(**columns), config=CONFIG).check_rows(rows)


def test_of_several_answers_the_most_frequent_is_taken() -> None:
    (batch,) = batches_of(rows_of(question=["a", "b"], answer=[["no", "yes", "yes"], ["c", "d"]]), ASKED)
    assert labelled(batch) == ["yes </s>", "c </s>"]


SHOWN = Columns(image="image", prompt="Q {question} A", answer="answer")


def shown(rows: datasets.Dataset, columns: Columns = SHOWN, *, batch_size: int = 8, processor: Any = None) -> list[Any]:
    how: dict[str, Any] = {"config": llava().config, "processor": processor or llava_processor()}
    return read(reading("image-text-to-text", columns=columns, **how), rows, batch_size)


def test_an_image_takes_its_tokens_and_only_the_answer_is_a_label() -> None:
    processor = llava_processor()
    rows = rows_of(image=[png(0), png(1)], question=["a b", "c"], answer=["yes", "no"])
    (batch,) = shown(rows, processor=processor)
    image = " ".join(["<image>"] * 16)
    assert words(batch["input_ids"][0]) == rf"<s> {image} \n Q a b A yes </s>"
    assert labelled(batch) == ["yes </s>", "no </s>"]
    pixels = processor.image_processor([PIL.Image.open(io.BytesIO(png(1)))], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(batch["pixel_values"][1:], pixels)
    assert torch.isfinite(llava()(**batch).loss)


def test_the_place_of_the_image() -> None:
    rows = rows_of(image=[png(0)], question=["a"], answer=["b"])
    template = (
        "<s>{% for m in messages %}{% for c in m.content %}{{ '<image>' if c.type == 'image' else ' ' + c.text }}"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %} k{% endif %}"
    )
    image = " ".join(["<image>"] * 16)
    (batch,) = shown(rows, processor=llava_processor(chat_template=template))
    assert words(batch["input_ids"][0]) == f"<s> {image} Q a A k b </s>"  # one begin token, the template's
    own = Columns(image="image", prompt="c <image> {question}", answer="answer")
    (batch,) = shown(rows, own, processor=llava_processor(chat_template=template))
    assert words(batch["input_ids"][0]) == f"<s> c {image} a b </s>"


@pytest.mark.parametrize(
    ("prompt", "answer", "template", "wrong"),
    [
        ("<image> a <image>", "b", None, "the processor fails on row 1 .*32 <image> tokens|2 <image> tokens"),
        ("<image> a", "b <image>", None, "the processor fails on row 1"),
        ("a", "b", "{% for m in messages %}{{ m.content }}{% endfor %}", "the processor fails on row 0"),
        ("a", "b", "{% for m in messages %}a{% endfor %}", "the processor fails on row 0"),
    ],
)
def test_a_row_without_one_place_for_its_image_is_named(
    prompt: str, answer: str, template: str | None, wrong: str
) -> None:
    rows = rows_of(image=[png(0), png(1)], question=["a", prompt], answer=["b", answer])
    with pytest.raises(DataError, match=f"must have one place for its image, in the prompt, but {wrong}"):
        shown(rows, processor=llava_processor(chat_template=template))


def test_a_processor_that_counts_no_tokens_or_does_not_look_for_their_place_is_refused() -> None:
    rows = rows_of(image=[png(0)], question=["a"], answer=["b"])
    for name in ("patch_size", "vision_feature_select_strategy"):
        processor = llava_processor()
        setattr(processor, name, None)
        match = f"a LlavaProcessor must know how many tokens an image takes, but has no {name}; set processor.patch_si"
        with pytest.raises(DataError, match=match):
            shown(rows, processor=processor)
    processor = llava_processor(chat_template="{% for m in messages %}a{% endfor %}")
    processor.validate_inputs = lambda **given: None
    with pytest.raises(DataError, match=r"but row 0 \(from 0\) has none; write the model's image token into data"):
        shown(rows, processor=processor)


def test_processors_are_loaded_from_their_folders(tmp_path: Path) -> None:
    llava_processor().save_pretrained(tmp_path / "both")
    rows = rows_of(image=[png(0)], question=["a"], answer=["b"])
    loaded = load_processor(tmp_path / "both", task=TASKS["image-text-to-text"])
    assert type(loaded.image_processor).__name__ == "CLIPImageProcessorPil"
    (expected,), (found,) = shown(rows), shown(rows, processor=loaded)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    generative_tokenizer().save_pretrained(tmp_path / "text")
    assert load_processor(tmp_path / "text", task=TASKS["text-generation"])("a")["input_ids"] == [2, 6]
    with pytest.raises(DataError, match="needs a processor of images and text"):
        load_processor(tmp_path / "text", task=TASKS["image-text-to-text"])


def test_the_right_choice_is_the_answer() -> None:
    columns = Columns(prompt="Q {question} A", answer="choices", label="label")
    rows = rows_of(question=["a b", "c"], choices=[["d", "e"], ["f", "g"]], label=["1", "0"])
    (batch,) = batches_of(rows, columns)
    assert labelled(batch) == ["e </s>", "f </s>"]
    with pytest.raises(DataError, match="leave data.label out if there is one answer"):
        batches_of(rows_of(question=["a"], choices=["d"], label=["0"]), columns)
