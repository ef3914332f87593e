"""The pretend GPUs: they compute what the CPU does, and refuse what CUDA refuses."""

import math
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from support.pretend import Gpus, pretend_gpus
from torch import Tensor, nn


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    with pretend_gpus(2) as found:
        yield found


def test_gradients_cross_devices(gpus: Gpus) -> None:
    def loss(one: str, two: str) -> list[Tensor]:
        torch.manual_seed(0)
        a, b = (nn.Linear(4, 4).to(device) for device in (one, two))
        x = torch.randn(5, 4).to(one).requires_grad_()
        hidden = torch.relu(a(x)).to(two)
        made = b(hidden)[:, 1:] ** 2
        made[0] += 1  # in place, on a view
        return [g.cpu() for g in torch.autograd.grad(made.mean().to(one), [x, a.weight, b.weight])]

    for found, wanted in zip(loss("cuda:0", "cuda:1"), loss("cpu", "cpu"), strict=True):
        torch.testing.assert_close(found, wanted)


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


def test_what_cuda_allows_is_allowed(gpus: Gpus) -> None:
    x = torch.ones(2, 2)
    g = x.cuda()
    assert (g * torch.tensor(2.0)).sum().item() == 8  # a number on the CPU
    assert g[torch.tensor([0])].shape == (1, 2)  # an index on the CPU
    g[torch.tensor([0, 1])] = torch.tensor(3.0)
    x.copy_(g)
    assert torch.equal(x, torch.full((2, 2), 3.0))


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


def attention(masked: bool, values: int, generator: torch.Generator) -> list[Tensor]:
    """Return query, key, value, and a bias in which rows 3 see no key."""
    query, key = (torch.randn(2, 3, 7, 8, generator=generator) for _ in range(2))
    value = torch.randn(2, 3, 7, values, generator=generator)
    bias = torch.zeros(2, 1, 7, 16)
    bias[1, :, :, 5:], bias[:, :, 3] = -math.inf, -math.inf
    return [query, key, value, *([bias] if masked else [])]


@pytest.mark.parametrize(("masked", "values"), [(False, 8), (True, 12)])
def test_fused_attention_is_the_explicit_one(gpus: Gpus, masked: bool, values: int) -> None:
    query, key, value, *bias = attention(masked, values, torch.Generator().manual_seed(0))

    def explicit() -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        q, k, v = (one.double().requires_grad_() for one in (query, key, value))
        scores = q @ k.transpose(-1, -2) * 0.3
        hidden = torch.ones(7, 7).triu(1).bool()
        scores = scores + bias[0][..., :7].double() if bias else scores.masked_fill(hidden, -math.inf)
        p = torch.where(scores.isfinite().any(-1, keepdim=True), scores, 0).softmax(-1)
        p = p * scores.isfinite().any(-1, keepdim=True)
        return p @ v, scores.logsumexp(-1), torch.autograd.grad((p @ v).square().sum(), (q, k, v))

    output, logsumexp, gradients = explicit()
    q, k, v = (one.cuda().requires_grad_() for one in (query, key, value))
    given = bias[0].cuda()[..., :7].expand(2, 3, 7, 7) if bias else None
    found = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, given, True, 0.0, not bias, scale=0.3)
    torch.testing.assert_close(found[0].cpu().double(), output, rtol=1e-5, atol=1e-5)
    seen = logsumexp.isfinite()
    assert found[1].shape[-1] == 32
    torch.testing.assert_close(found[1].cpu()[..., :7][seen].double(), logsumexp[seen], rtol=1e-5, atol=1e-5)
    assert (found[1].cpu()[..., 7:] == math.inf).all()
    for one, wanted in zip(torch.autograd.grad(found[0].square().sum(), (q, k, v)), gradients, strict=True):
        torch.testing.assert_close(one.cpu().double(), wanted, rtol=1e-4, atol=1e-5)


def test_fused_attention_demands_aligned_rows(gpus: Gpus) -> None:
    query, key, value, bias = (one.cuda() for one in attention(True, 8, torch.Generator().manual_seed(0)))
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    with pytest.raises(RuntimeError, match="attn_bias is not correctly aligned"):
        attend(query, key, value, bias[..., :7].contiguous().expand(2, 3, 7, 7), True, 0.0, False, scale=1.0)
    with pytest.raises(RuntimeError, match="query is not correctly aligned"):
        attend(query[..., :5].contiguous(), key[..., :5].contiguous(), value, None, True, 0.0, False, scale=1.0)
    with pytest.raises(NotImplementedError, match="for_cpu' with arguments from the 'CUDA' backend"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
