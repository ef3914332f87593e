"""The pretend GPUs refuse what CUDA refuses; that they compute what the CPU does is tested by all that uses them."""

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from support.pretend import Gpus, pretend_gpus
from torch import Tensor


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    with pretend_gpus(2) as found:
        yield found


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], object], str]] = {
    "two GPUs": (lambda g, h, c: g + h, "same device, but aten::add"),
    "GPU and CPU": (lambda g, h, c: g * c, "same device, but aten::mul"),
    "a condition": (lambda g, h, c: torch.where(c > 0, g, g), "same device, but aten::where"),
    "joined": (lambda g, h, c: torch.cat([g, c]), "same device, but aten::cat"),
    "an index on the GPU": (lambda g, h, c: c[torch.tensor([0]).cuda()], "same device, but aten::index"),
    "a sum on the CPU": (lambda g, h, c: c.sum().add_(g.sum()), "same device, but aten::add_"),
    "NumPy": (lambda g, h, c: g.numpy(), "can't convert cuda:0 device type tensor to numpy"),
    "a generator": (lambda g, h, c: torch.rand(2, generator=torch.Generator(), device="cuda"), "'cuda' device type"),
    "no values": (lambda g, h, c: torch.empty(2, device="meta").to("cuda"), "Cannot copy out of meta tensor"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cuda_refuses_is_refused(gpus: Gpus, what: str) -> None:
    do, message = REFUSED[what]
    x = torch.ones(2, 2)
    with pytest.raises((RuntimeError, TypeError), match=re.escape(message)):
        do(x.cuda(), x.to("cuda:1"), x)


def test_memory_is_counted_and_may_end() -> None:
    with pretend_gpus(memory_bytes=1000) as gpus:
        x = torch.zeros(100, device="cuda")  # 400 bytes
        view = x[:50]
        y = x + 1
        assert (gpus.held, torch.cuda.memory_allocated()) == ([800], 800)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 400 bytes"):
            x + y
        del x, y
        assert gpus.held == [400], "the view still holds the memory"
        del view
        assert (gpus.held, torch.cuda.max_memory_allocated()) == ([0], 800)
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.mem_get_info() == (1000, 1000)
        assert torch.cuda.max_memory_allocated() == 0


def test_fused_attention_demands_aligned_rows(gpus: Gpus) -> None:
    query, key, value = (torch.randn(2, 3, 7, 8, device="cuda") for _ in range(3))
    bias = torch.zeros(2, 1, 7, 16, device="cuda")
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    attend(query, key, value, bias[..., :7].expand(2, 3, 7, 7), True, 0.0, False, scale=1.0)
    with pytest.raises(RuntimeError, match="attn_bias is not correctly aligned"):
        attend(query, key, value, bias[..., :7].contiguous().expand(2, 3, 7, 7), True, 0.0, False, scale=1.0)
    with pytest.raises(RuntimeError, match="query is not correctly aligned"):
        attend(query[..., :5].contiguous(), key[..., :5].contiguous(), value, None, True, 0.0, False, scale=1.0)
    with pytest.raises(NotImplementedError, match="for_cpu' with arguments from the 'CUDA' backend"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
