"""Gates by hand: what they multiply, the gradient of each sample's own loss, and what is refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.generative import padded, with_images
from support.models import causal_lm, llava
from torch import Tensor
from transformers import PreTrainedModel

from hies_export.calibrate.gates import Gates, summed_loss, with_labels
from hies_export.data.targets import IGNORED, text_labels
from hies_export.errors import NonFiniteError, UnsupportedModelError
from hies_export.units import PrunableModule

MODULE = PrunableModule(name="m", units=3, unit_width=2, consumer="m.out")


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((4, 5, 6), {"samples": 4}),
        ((20, 6), {"samples": 4}),  # flattened in front of the consumer
        ((2, 2, 5, 6), {"samples": 2, "rows": 4}),
        ((1, 20, 6), {"samples": 4, "rows": 4}),
    ],
)
def test_every_unit_of_every_sample_has_a_gate(shape: tuple[int, ...], options: dict[str, int]) -> None:
    x = torch.arange(120.0).view(shape)
    gates = Gates([MODULE])
    found = gates.apply("m", x, **options)
    assert torch.equal(found, x)
    gate = gates.tensors["m"]
    assert (gate.shape, gate.requires_grad) == ((4, 3, 1, 1), True)
    # The gradient of a sum to a gate is the sum of what it multiplies.
    (gradient,) = torch.autograd.grad(found.sum(), gate)
    assert torch.equal(gradient[:, :, 0, 0], x.reshape(4, 5, 3, 2).sum((1, 3)))


def test_a_module_that_is_called_twice_has_one_gate() -> None:
    gates = Gates([MODULE])
    x = torch.ones(2, 4, 6)
    total = gates.apply("m", x, samples=2).sum() + gates.apply("m", 2 * x, samples=2).sum()
    (gradient,) = torch.autograd.grad(total, gates.tensors["m"])
    assert torch.equal(gradient, torch.full((2, 3, 1, 1), 3 * 8.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gates_of_half_precision_are_float32_and_change_no_dtype(dtype: torch.dtype) -> None:
    gates = Gates([MODULE])
    assert gates.apply("m", torch.ones(2, 4, 6, dtype=dtype), samples=2).dtype == dtype
    assert gates.tensors["m"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def applied(rows: int = 2) -> Gates:
    gates = Gates([MODULE])
    gates.apply("m", torch.ones(rows, 4, 6), samples=rows)
    return gates


def test_gradients_are_divided_by_the_losses_of_a_sample() -> None:
    gradient = torch.tensor([[2.0, 4, 6], [3, 6, -9], [1, 1, 1]]).view(3, 3, 1, 1)
    found = applied(3).per_sample({"m": gradient}, torch.tensor([2, 3, 0]), 0)["m"]
    # Without a loss there is nothing to divide by.
    assert torch.equal(found, torch.tensor([[1.0, 2, 3], [1, 2, -3], [1, 1, 1]], dtype=torch.float64))
    assert found.dtype == torch.float64
    assert torch.equal(applied().per_sample({"m": None}, torch.ones(2), 0)["m"], torch.zeros(2, 3).double())


def test_rows_that_are_no_samples_and_gradients_that_are_no_numbers_are_refused() -> None:
    gates, zeros = applied(4), torch.zeros(4, 3, 1, 1)
    with pytest.raises(UnsupportedModelError, match="but m sees 4 rows for 2 samples; give every sample one image"):
        gates.per_sample({"m": zeros}, torch.ones(2), 0)
    for value in (float("nan"), float("inf")):
        zeros[3, 1] = value
        with pytest.raises(NonFiniteError, match="but batch 7 gave NaN or infinity at the heads of m; check the rows"):
            gates.per_sample({"m": zeros}, torch.ones(4), 7)


class Fixed:
    """A model that gives the same logits and the same loss whatever it reads."""

    def __init__(self, logits: Tensor, loss: float = 0.5):
        self.logits, self.loss, self.config = logits, torch.tensor(loss), SimpleNamespace()

    def __call__(self, **batch: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits, loss=self.loss)


def test_labels_of_the_data_are_kept_and_else_predicted() -> None:
    classes = Fixed(torch.tensor([[0.0, 2, 1], [5, 2, 1]]))
    given = {"input_ids": torch.ones(2, 4), "labels": torch.tensor([1, 2])}
    assert with_labels(classes, given)["labels"].tolist() == [1, 2]  # type: ignore[arg-type]
    predicted = with_labels(classes, {"input_ids": given["input_ids"]})  # type: ignore[arg-type]
    assert predicted["labels"].tolist() == [1, 0]
    assert predicted["input_ids"] is given["input_ids"]
    # A token is labelled with what the model predicts from those before it.
    tokens = Fixed(torch.eye(4)[torch.tensor([[3, 1, 2, 0], [1, 1, 3, 3]])])
    batch = {"input_ids": torch.ones(2, 4), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])}
    assert with_labels(tokens, batch)["labels"].tolist() == [[IGNORED, 3, 1, 2], [IGNORED, 1, 1, IGNORED]]  # type: ignore[arg-type]
    del batch["attention_mask"]
    assert with_labels(tokens, batch)["labels"].tolist() == [[IGNORED, 3, 1, 2], [IGNORED, 1, 1, 3]]  # type: ignore[arg-type]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("make", [causal_lm, llava])
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
    found = with_labels(model, batch)["labels"]
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["image_token_id", "image_token_index", "video_token_id", "audio_token_id"])
def test_no_label_is_a_placeholder_of_any_kind(name: str) -> None:
    tokens = Fixed(torch.eye(4)[torch.tensor([[3, 1, 2, 0]])])
    tokens.config = SimpleNamespace(**{name: 7})
    batch = {"input_ids": torch.tensor([[5, 7, 6, 7]])}
    assert with_labels(tokens, batch)["labels"].tolist() == [[-100, -100, 1, -100]]  # type: ignore[arg-type]
    assert text_labels(tokens, batch).tolist() == [[5, -100, 6, -100]]  # type: ignore[arg-type]


def test_the_text_that_an_encoder_reads_hides_no_label_of_the_decoder() -> None:
    tokens = Fixed(torch.eye(4)[torch.tensor([[3, 1, 2, 0]])])
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    batch["decoder_input_ids"] = torch.tensor([[1, 2, 3, 1]])
    assert with_labels(tokens, batch)["labels"].tolist() == [[-100, 3, 1, 2]]  # type: ignore[arg-type]


def test_a_mean_loss_becomes_the_sum_of_its_losses() -> None:
    model: Any = Fixed(torch.zeros(2, 3), loss=0.5)
    total, losses = summed_loss(model, {"labels": torch.tensor([1, 2, 0])}, 0)
    assert (total.item(), losses.tolist()) == (1.5, [1, 1, 1])
    # The first token of a text is predicted from nothing.
    labels = torch.tensor([[4, 5, 6, IGNORED], [IGNORED, IGNORED, IGNORED, 7]])
    total, losses = summed_loss(model, {"labels": labels}, 0)
    assert (total.item(), losses.tolist()) == (1.5, [2, 1])
    with pytest.raises(NonFiniteError, match="must be finite, but batch 3 gave nan; check the rows of that batch"):
        summed_loss(Fixed(torch.zeros(2, 3), loss=float("nan")), {"labels": labels}, 3)  # type: ignore[arg-type]
