"""Text about an image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import DataError, refusing
from ..late import Tensor, datasets, torch
from .late import Batch, data
from .registry import register_task
from .task import AT_ONCE, Task, Use, batched
from .text_generation import TextGeneration

if TYPE_CHECKING:
    import PIL.Image

# By what processors such as LLaVA's count the tokens of an image; files of older releases do not have them.
SIZE_OF_IMAGES = ("patch_size", "vision_feature_select_strategy")


@register_task
class ImageTextToText(TextGeneration):
    """Vision-language models: decoders of images and text.

    Labels are on the answer. Nothing is cut, because a prompt without its image's tokens or its first words is another
    prompt.
    """

    name = "image-text-to-text"
    auto_class = "AutoModelForImageTextToText"
    reads = ("image prompt answer", "image prompt answer label")
    needs = "data.image, data.prompt and data.answer"
    images = in_parts = True
    decodes_text = False

    metrics = ("exact_match", "perplexity")

    def check_targets(self, rows: datasets.Dataset) -> None:
        """Refuse also a processor that does not know how many tokens an image takes, as of old files of LLaVA."""
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
        """Yield the tokens of all prompts and answers, then those of the first `AT_ONCE` samples with their images."""
        yield from super().tokens(samples)
        if self.columns.image in samples.column_names:  # a few show which tokens the processor adds for an image
            yield from Task.tokens(self, samples.select(range(min(AT_ONCE, len(samples)))))

    def batches(self, samples: datasets.Dataset, size: int, use: Use) -> Iterator[Batch]:
        """Yield batches of images, prompts and answers, uncut; a DataError refuses rows beyond the token limit."""
        tokenizer, limit = data.tokenizer_of(self.processor), self._limit()
        data.give_padding(tokenizer)
        tokenizer.padding_side = "right"
        samples, choices = self.with_one_answer(samples, use)
        texts, column = self.texts(samples), str(self.columns.image)
        shown = data.as_images(samples, column)
        for rows in batched(range(len(samples)), size):
            images = [data.image_of_row(shown, column, row) for row in rows]
            prompts = list(self.tokenized(samples, ((row, texts[row]) for row in rows), choices, limit))
            batch = self._encode_checked(samples, rows, images, [text for text, _ in prompts])
            ids, mask = batch["input_ids"], batch["attention_mask"]
            for row, length in zip(rows, mask.sum(-1).tolist(), strict=True):
                if limit is not None and length > limit:
                    raise DataError(
                        f"image, prompt and answer must fit into max_length ({limit} tokens), but "
                        f"{data.row_name(samples, row)} has {length}; raise max_length, or shorten the prompt"
                    )
            data.check_vocabulary(ids, self.config)
            # The answers' tokens are the last real ones, no matter how many tokens the image took before them.
            answer_lengths = torch.tensor([sum(tokens.judged) for _, tokens in prompts])
            tokens_to_end = mask.flip(-1).cumsum(-1).flip(-1)
            is_answer = mask.bool() & (tokens_to_end <= answer_lengths[:, None])
            batch["labels"] = ids.where(is_answer, data.IGNORED)
            yield batch if choices is None else batch | choices.describe(rows)

    def prompt_and_answer(self, row: dict[str, Any], choice: str | None = None) -> tuple[str, str]:
        """Return the prompt of a row, with the token of its image, and the row's answer or the given choice."""
        prompt, answer = super().prompt_and_answer(row, choice)
        token = getattr(self.processor, "image_token", None)
        if token is not None and token in prompt:
            return prompt, answer
        if getattr(self.processor, "chat_template", None):
            content = [{"type": "image"}, {"type": "text", "text": prompt}]
            messages = [{"role": "user", "content": content}]
            return str(self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)), answer
        if token is None:
            raise DataError(
                f"an image needs a place in the prompt, but {type(self.processor).__name__} has neither a chat "
                "template nor an image token; write the model's own placeholder into data.prompt"
            )
        return f"{token}\n{prompt}", answer

    def _encode_checked(
        self, samples: datasets.Dataset, rows: Sequence[int], images: Sequence[PIL.Image.Image], texts: Sequence[str]
    ) -> Batch:
        """Return the images and texts of some rows as a batch; a DataError names a row that is unfit."""
        from ..model.tokens import placeholders

        must = "a row must have one place for its image, in the prompt, but"
        remedy = "write the model's image token into data.prompt, and take it out of columns, or mend the chat template"
        try:
            encoded = self._encode(images, texts)
        except Exception:  # each processor raises its own kinds; row by row, to name the one that fails
            for row, image, text in zip(rows, images, texts, strict=True):
                with refusing(f"{must} the processor fails on {data.row_name(samples, row)}", remedy, DataError):
                    self._encode([image], [text])
            raise
        places = placeholders(self.config).to(encoded["input_ids"])  # few processors check that a text has one
        for row, ids in zip(rows, encoded["input_ids"], strict=True):
            if len(places) and not torch.isin(ids, places).any():
                raise DataError(f"{must} {data.row_name(samples, row)} has none; {remedy}")
        return encoded

    def _encode(self, images: Sequence[PIL.Image.Image], texts: Sequence[str]) -> Batch:
        """Return what the processor gives for images and texts, one image to a text, padded on the right."""
        tokenizer = data.tokenizer_of(self.processor)
        # Chat templates write the begin-of-text token themselves.
        special = not (tokenizer.bos_token and texts[0].startswith(tokenizer.bos_token))
        # Many processors pad on the left by default, whatever the tokenizer's side.
        options = {"padding": True, "padding_side": "right", "add_special_tokens": special, "return_tensors": "pt"}
        return dict(self.processor(images=[[image] for image in images], text=list(texts), **options))
