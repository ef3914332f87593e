"""Text about an image."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import DataError, refusing
from .late import data, torch
from .prompts import answer_text, end_of_text, tokenize_spans
from .registry import register_task
from .task import AT_ONCE, Task, Use, batched
from .text_generation import TextGeneration, check_answer, with_positions

if TYPE_CHECKING:
    import datasets
    import PIL.Image
    from torch import Tensor

    from ..data import Batch

logger = logging.getLogger(__name__)

# Share of a data set's images that may fail to decode.
TOLERATED_SHARE = 0.01
# By what processors such as LLaVA's count the tokens of an image; files of older releases do not have them.
SIZE_OF_IMAGES = ("patch_size", "vision_feature_select_strategy")


@register_task
class ImageTextToText(TextGeneration):
    """Vision-language models: decoders of images and text.

    Labels are on the answer. Nothing is cut, because a prompt without its image's tokens or its first words is another
    prompt. One image in a hundred may fail to decode; such samples are left out.
    """

    name = "image-text-to-text"
    auto_class = "AutoModelForImageTextToText"
    reads = ("image prompt answer", "image prompt answer label")
    needs = "data.image, data.prompt and data.answer"
    images = True
    in_parts = True
    decodes_text = False

    metrics = ("exact_match", "perplexity")

    def check_targets(self, rows: datasets.Dataset) -> None:
        """Refuse also a processor that cannot count the tokens of an image, as old files of LLaVA make them."""
        super().check_targets(rows)
        if missing := [name for name in SIZE_OF_IMAGES if getattr(self.processor, name, "") is None]:
            raise DataError(
                f"a {type(self.processor).__name__} must know how many tokens an image takes, but has no "
                f"{' and no '.join(missing)}; set processor.patch_size = config.vision_config.patch_size, "
                "processor.vision_feature_select_strategy = config.vision_feature_select_strategy and "
                "processor.num_additional_image_tokens = 1 (if the vision model has a class token), and save it with "
                "save_pretrained"
            )

    def tokens(self, samples: datasets.Dataset) -> Iterator[Tensor]:
        """Yield the tokens of all prompts and answers, and of some with their images, to which processors add some."""
        yield from super().tokens(samples)
        if self.columns.image in samples.column_names:
            yield from Task.tokens(self, samples.select(range(min(AT_ONCE, len(samples)))))

    def batches(self, samples: datasets.Dataset, size: int, use: Use) -> Iterator[Batch]:
        """Yield batches of images, prompts and answers, of which nothing is cut."""
        tokenizer, limit = self.prepare_tokenizer()
        data.give_padding(tokenizer)
        samples, choices = self.with_one_answer(samples, use)
        texts, column = self.texts(samples), str(self.columns.image)
        end = end_of_text(tokenizer) if choices is None else ""
        good = _decodable(data.as_images(samples, column), column)
        for part in batched(good, size):
            rows = [row for row, _ in part]
            written, answer_tokens = [], []
            for row in rows:
                prompt, answer = self.prompt_and_answer(texts[row], None if choices is None else choices.text[row])
                written.append(prompt + answer_text(prompt, answer, end))
                _, judged = tokenize_spans(written[-1], [(len(prompt), len(written[-1]))], tokenizer)
                check_answer(judged, data.row_name(samples, row), limit)
                answer_tokens.append(sum(judged))
            encoded = self._encode_checked(samples, part, written, tokenizer)
            for row, length in zip(rows, encoded["attention_mask"].sum(-1).tolist(), strict=True):
                if limit is not None and length > limit:
                    raise DataError(
                        f"image, prompt and answer must fit into max_length ({limit} tokens), but "
                        f"{data.row_name(samples, row)} has {length}; raise max_length, or shorten the prompt"
                    )
            data.check_vocabulary(encoded["input_ids"], self.config)
            # The answers' tokens are the last real ones, no matter how many tokens the image took before them.
            mask = encoded["attention_mask"]
            tokens_to_the_end = mask.flip(-1).cumsum(-1).flip(-1)
            is_answer = mask.bool() & (tokens_to_the_end <= torch.tensor(answer_tokens)[:, None])
            labels = encoded["input_ids"].where(is_answer, data.IGNORED)
            batch = with_positions(encoded, self.config, labels)
            yield batch if choices is None else batch | choices.of(rows)

    def prompt_and_answer(self, row: dict[str, Any], choice: str | None = None) -> tuple[str, str]:
        """Return the prompt of a row, with a place for the image, and its answer or the given choice."""
        prompt, answer = super().prompt_and_answer(row, choice)
        return with_image_token(prompt, self.processor), answer

    def _encode_checked(
        self,
        samples: datasets.Dataset,
        part: Sequence[tuple[int, PIL.Image.Image]],
        texts: Sequence[str],
        tokenizer: Any,
    ) -> Batch:
        """Return a batch of texts, prompt and answer, and their images; `part` has each image with its row's number.

        Raises:
            DataError: The processor fails on a row, or its text has no place for the image, which only some check.
        """
        from ..model.tokens import placeholders

        must = "a row must have one place for its image, in the prompt, but"
        remedy = "write the model's image token into data.prompt, and take it out of columns, or mend the chat template"
        try:
            encoded = self._encode([image for _, image in part], texts, tokenizer)
        except Exception:  # each processor raises its own kinds; row by row, to name the one that fails
            for (row, image), text in zip(part, texts, strict=True):
                with refusing(f"{must} the processor fails on {data.row_name(samples, row)}", remedy, DataError):
                    self._encode([image], [text], tokenizer)
            raise
        places = placeholders(self.config).to(encoded["input_ids"])
        for (row, _), ids in zip(part, encoded["input_ids"], strict=True):
            if len(places) and not torch.isin(ids, places).any():
                raise DataError(f"{must} {data.row_name(samples, row)} has none; {remedy}")
        return encoded

    def _encode(self, images: Sequence[PIL.Image.Image], texts: Sequence[str], tokenizer: Any) -> Batch:
        # Chat templates write the begin-of-text token themselves.
        special = not (tokenizer.bos_token and texts[0].startswith(tokenizer.bos_token))
        return dict(
            self.processor(
                images=[[image] for image in images],
                text=list(texts),
                padding=True,
                add_special_tokens=special,
                return_tensors="pt",
            )
        )


def with_image_token(prompt: str, processor: Any) -> str:
    """Place the image in a prompt: where the prompt says, by the chat template, or in a line before it."""
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
            image = data.image_of_row(rows, column, row)
        except DataError as error:
            failures.append(f"{data.row_name(rows, row)}: {error.__cause__}")
            if len(failures) > TOLERATED_SHARE * len(rows):
                raise DataError(
                    f"at most {TOLERATED_SHARE:.0%} of the images may fail to decode, but of the first {row + 1} of "
                    f"{len(rows)} samples {len(failures)} in {column!r} do: {'; '.join(failures[:5])}"
                ) from error
        else:
            yield row, image
    if failures:
        logger.warning(
            "%d of %d images in %r do not decode and are left out: %s",
            len(failures),
            len(rows),
            column,
            "; ".join(failures),
        )
