"""What tests of one pretend GPU and of several share: models with a batch each, and their modules."""

from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedModel

from hies_export import PrunableModule
from hies_export.units.find import find_modules
from support.generative import padded, with_images
from support.models import causal_lm, image_batch, llava, vit

BOTH = ["attention", "mlp"]
Batch = dict[str, Tensor]
# How to make a model, and a batch for it.
Makers = tuple[Callable[[], PreTrainedModel], Callable[[], Batch]]

SHARED_MODELS: dict[str, Makers] = {
    "image": (lambda: vit(num_hidden_layers=2), image_batch),
    "decoder, padded left": (causal_lm, lambda: padded([9, 4, 6], "left")),
    "images and text": (llava, lambda: with_images(padded([9, 6], "left", answers=[2, 5]))),
}


def found_alike(
    makers: Makers, move: Callable[[PreTrainedModel], PreTrainedModel]
) -> tuple[PreTrainedModel, PreTrainedModel, Batch, tuple[PrunableModule, ...]]:
    """Return a model on the CPU, itself moved, a batch, and the modules, which must be found in both alike."""
    make_model, make_batch = makers
    model, batch = make_model(), make_batch()
    modules = find_modules(model, batch, kinds=BOTH)
    moved = move(model)
    assert find_modules(moved, batch, kinds=BOTH) == modules
    return model, moved, batch, modules
