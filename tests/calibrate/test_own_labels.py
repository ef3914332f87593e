"""Labels that a language model gives its own texts, against each text by itself."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.generative import padded, with_images
from support.models import causal_lm, llava
from torch import Tensor
from transformers import PreTrainedModel

from hies_export.tasks import TextGeneration, task_of
from hies_export.tasks.text_generation import text_labels


class Fixed:
    """A model that predicts the tokens 3, 1, 2 and 0 whatever it reads."""

    def __init__(self, **options: Any):
        self.logits = torch.eye(4)[torch.tensor([[3, 1, 2, 0]])]
        self.config = SimpleNamespace(num_labels=2, get_text_config=SimpleNamespace, **options)

    def __call__(self, **batch: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits)

    def parameters(self) -> Iterator[Tensor]:
        return iter([self.logits])


@pytest.mark.parametrize(("make", "side"), [(causal_lm, "right"), (causal_lm, "left"), (llava, "left")])
def test_own_labels_are_those_of_each_text_by_itself(make: Callable[[], PreTrainedModel], side: str) -> None:
    """Nothing real predicts a text's first token, and no label is an image's part, whatever is padded."""
    model, batch = make(), padded([9, 4, 6], side)
    batch = with_images(batch) if make is llava else batch
    del batch["labels"]
    expected = torch.full_like(batch["input_ids"], -100)
    for row, mask in enumerate(batch["attention_mask"]):
        places = [place for place, real in enumerate(mask.tolist()) if real]
        alone = {"input_ids": batch["input_ids"][row, places][None]}
        alone |= {"pixel_values": batch["pixel_values"][row : row + 1]} if make is llava else {}
        likeliest = model(**alone).logits[0].argmax(-1)
        for before, place in enumerate(places[1:]):
            if batch["input_ids"][row, place] != 4 or make is causal_lm:
                expected[row, place] = likeliest[before]
    found = task_of(model).with_labels(model, batch)["labels"]
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["image_token_id", "image_token_index", "video_token_id", "audio_token_id"])
def test_no_label_is_a_placeholder_of_any_kind(name: str) -> None:
    model: Any = Fixed(**{name: 7})
    batch = {"input_ids": torch.tensor([[5, 7, 6, 7]])}
    assert TextGeneration(model.config).with_labels(model, batch)["labels"].tolist() == [[-100, -100, 1, -100]]
    assert text_labels(model, batch).tolist() == [[5, -100, 6, -100]]


def test_the_text_that_an_encoder_reads_hides_no_label_of_the_decoder() -> None:
    model: Any = Fixed()
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    batch["decoder_input_ids"] = torch.tensor([[1, 2, 3, 1]])
    assert TextGeneration(model.config).with_labels(model, batch)["labels"].tolist() == [[-100, 3, 1, 2]]
