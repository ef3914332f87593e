"""Memory of calibration grows with a sample's length, and not with its square."""

from typing import Any

import torch
from support.models import causal_lm
from torch.utils._python_dispatch import TorchDispatchMode

from hies_export.calibrate.collect import collect_statistics
from hies_export.prunable.find import find_modules


class Largest(TorchDispatchMode):
    """Remember how many elements the largest tensor has that any operation of the block writes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return result


def test_no_tensor_of_a_long_sample_has_an_element_per_pair_of_tokens() -> None:
    model = causal_lm(max_position_embeddings=2048)

    def largest(length: int) -> int:
        ids = torch.randint(4, 32, (1, length))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        modules = find_modules(model, {k: v[:, :8] for k, v in batch.items()}, kinds=("attention", "mlp"))
        with Largest() as seen:
            collect_statistics(model, [batch], modules)
        return seen.elements

    short, long = largest(512), largest(2048)
    assert short > 512 * 8
    assert long <= 4 * short
    assert long < 2048 * 2048
