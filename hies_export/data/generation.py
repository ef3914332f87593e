"""Batches of the tasks whose output is text: labels are tokens, -100 where no loss is wanted."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import PIL.Image
import torch

from ..errors import DataError
from .images import as_images, rgb_image
from .prompts import answer_text, filled, template_fields, tokenise
from .targets import IGNORED
from .tokens import check_vocabulary, position_ids

logger = logging.getLogger(__name__)

# Of the images of a data set, how many may fail to decode.
TOLERATED_SHARE = 0.01

Batch = dict[str, torch.Tensor]


def block_batches(rows: datasets.Dataset, *, config: Any, batch_size: int) -> list[Batch]:
    """Batches of packed blocks: every token is real and is a label."""
    batches = []
    for start in range(0, len(rows), batch_size):
        ids = torch.tensor(rows[start : start + batch_size]["input_ids"])
        check_vocabulary(ids, config)
        batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()})
    return batches


def text_batches(
    rows: datasets.Dataset, *, column: str, config: Any, tokenizer: Any, batch_size: int, limit: int | None
) -> list[Batch]:
    """Batches of one text per row, cut on the right; every real token is a label. Blank rows are left out."""
    samples = []
    for row, text in enumerate(rows[column][:]):
        if not text.strip():
            continue
        ids = tokenizer(text, truncation=limit is not None, max_length=limit, verbose=False)["input_ids"]
        if len(ids) < 2:
            raise DataError(
                f"a text must have at least two tokens to predict one from the other, but row {row} (from 0) of "
                f"{column!r} has {len(ids)}; remove it, raise max_length or pack the texts into blocks"
            )
        samples.append((ids, len(ids)))
    if not samples:
        raise DataError(f"at least one row must have text, but all of {column!r} are blank")
    if len(samples) < len(rows):
        logger.warning("%d of %d rows are blank in %r and left out", len(rows) - len(samples), len(rows), column)
    return _padded_batches(samples, config=config, tokenizer=tokenizer, batch_size=batch_size)


def answer_batches(
    rows: datasets.Dataset,
    *,
    prompt: str,
    answer: str,
    config: Any,
    tokenizer: Any,
    batch_size: int,
    limit: int | None,
) -> list[Batch]:
    """Batches of prompts with their answers, labels on the answer; too long prompts lose their beginning."""
    samples = []
    for number, row in enumerate(_texts(rows, prompt=prompt, answer=answer)):
        ids, answer_tokens = tokenise(*filled(row, prompt=prompt, answer=answer), tokenizer)
        _check_answer(len(ids), answer_tokens, number, limit)
        if limit is not None and len(ids) > limit:
            begin = ids[:1] if ids[0] == tokenizer.bos_token_id and limit > answer_tokens + 1 else []
            ids = begin + ids[len(ids) - limit + len(begin) :]
        samples.append((ids, answer_tokens))
    return _padded_batches(samples, config=config, tokenizer=tokenizer, batch_size=batch_size)


def _texts(rows: datasets.Dataset, *, prompt: str, answer: str) -> datasets.Dataset:
    """Only what is filled in: reading a row decodes the images it has."""
    return rows.select_columns(list(dict.fromkeys([*template_fields(prompt), answer])))


def _check_answer(tokens: int, answer_tokens: int, row: int, limit: int | None) -> None:
    if answer_tokens == 0 or answer_tokens == tokens:
        what = "an answer" if answer_tokens == 0 else "a prompt"
        raise DataError(f"every row must have {what} of at least one token, but row {row} (from 0) has none")
    if limit is not None and answer_tokens >= limit:
        raise DataError(
            f"answers are never cut and need a token before them, but row {row} (from 0) has {answer_tokens} answer "
            f"tokens and max_length is {limit}; raise max_length"
        )


def _padded_batches(
    samples: Sequence[tuple[list[int], int]], *, config: Any, tokenizer: Any, batch_size: int
) -> list[Batch]:
    """Batches of (tokens, how many at the end are labels), padded on the tokenizer's side to the longest of each."""
    batches = []
    for start in range(0, len(samples), batch_size):
        part = samples[start : start + batch_size]
        width = max(len(ids) for ids, _ in part)
        input_ids = torch.full((len(part), width), tokenizer.pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        labels = torch.full_like(input_ids, IGNORED)
        for row, (ids, counted) in enumerate(part):
            end = width if tokenizer.padding_side == "left" else len(ids)
            # A text's first token is foretold by nothing; as a label it would be by the padding before it.
            counted = min(counted, len(ids) - 1) if end > len(ids) else counted
            input_ids[row, end - len(ids) : end] = torch.tensor(ids)
            attention_mask[row, end - len(ids) : end] = 1
            labels[row, end - counted : end] = torch.tensor(ids[len(ids) - counted :])
        check_vocabulary(input_ids, config)
        batches.append(_with_positions({"input_ids": input_ids, "attention_mask": attention_mask}, config, labels))
    return batches


def _with_positions(batch: Batch, config: Any, labels: torch.Tensor) -> Batch:
    positions = position_ids(batch["attention_mask"], config)
    return batch | ({} if positions is None else {"position_ids": positions}) | {"labels": labels}


def image_text_batches(
    rows: datasets.Dataset,
    *,
    image: str,
    prompt: str,
    answer: str,
    config: Any,
    processor: Any,
    batch_size: int,
    limit: int | None,
) -> list[Batch]:
    """Batches of an image, a prompt and its answer, by the model's own processor; labels on the answer.

    Nothing is cut: without its image's tokens or its first words a prompt is another prompt.
    """
    tokenizer, batches = processor.tokenizer, []
    texts_only = _texts(rows, prompt=prompt, answer=answer)
    good = _decodable(as_images(rows, image), image)
    while part := list(itertools.islice(good, batch_size)):
        texts, answers = [], []
        for row, _ in part:
            question, reply = filled(texts_only[row], prompt=prompt, answer=answer)
            question = with_image_token(question, processor)
            texts.append(question + answer_text(question, reply, tokenizer))
            ids, answer_tokens = tokenise(question, reply, tokenizer)
            _check_answer(len(ids), answer_tokens, row, limit)
            answers.append(answer_tokens)
        # Chat templates write the begin-of-text token themselves.
        special = not (tokenizer.bos_token and texts[0].startswith(tokenizer.bos_token))
        encoded = processor(
            images=[[picture] for _, picture in part],
            text=texts,
            padding=True,
            add_special_tokens=special,
            return_tensors="pt",
        )
        batch = dict(encoded)
        mask = batch["attention_mask"]
        for (row, _), length in zip(part, mask.sum(-1).tolist(), strict=True):
            if limit is not None and length > limit:
                raise DataError(
                    f"image, prompt and answer must fit into max_length ({limit} tokens), but row {row} (from 0) has "
                    f"{length}; raise max_length, or shorten the prompt"
                )
        check_vocabulary(batch["input_ids"], config)
        # The answer is the last real tokens, whatever the image took in front of them.
        after = mask.flip(-1).cumsum(-1).flip(-1)  # real tokens from here to the end
        is_answer = mask.bool() & (after <= torch.tensor(answers)[:, None])
        labels = batch["input_ids"].where(is_answer, IGNORED)
        batches.append(_with_positions(batch, config, labels))
    return batches


def with_image_token(prompt: str, processor: Any) -> str:
    """Say in a prompt where the image is: as it says itself, by the chat template, else in a line before it."""
    token = getattr(processor, "image_token", None)
    if token is not None and token in prompt:
        return prompt
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
        turn = [{"role": "user", "content": content}]
        return str(processor.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))
    if token is None:
        raise DataError(
            f"an image needs a place in the prompt, but {type(processor).__name__} has neither a chat template nor an "
            "image token; write the model's own placeholder into data.prompt"
        )
    return f"{token}\n{prompt}"


def _decodable(rows: datasets.Dataset, column: str) -> Iterator[tuple[int, PIL.Image.Image]]:
    """Row and image of every row whose image decodes; one in a hundred may not."""
    failures: list[str] = []
    for row in range(len(rows)):
        try:
            image = rgb_image(rows, column, row)
        except DataError as error:
            failures.append(f"row {row} ({error.__cause__})")
            if len(failures) > TOLERATED_SHARE * len(rows):
                raise DataError(
                    f"at most {TOLERATED_SHARE:.0%} of the images may fail to decode, but of the first {row + 1} of "
                    f"{len(rows)} rows {len(failures)} in {column!r} do (counted from 0): {', '.join(failures[:5])}"
                ) from error
        else:
            yield row, image
    if failures:
        logger.warning(
            "%d of %d images in %r do not decode and are left out: %s",
            len(failures),
            len(rows),
            column,
            ", ".join(failures),
        )
