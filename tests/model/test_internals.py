"""The package leaves flags of torch as it found them."""

import torch

from hies_export.model import internals


def test_a_model_may_set_flags_of_cudnn_where_products_are_exact() -> None:
    with internals.exact_products(), torch.backends.cudnn.flags(enabled=False):
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    with torch.backends.cudnn.flags(enabled=False):
        pass
