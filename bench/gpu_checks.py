"""What must hold on a GPU before its times mean anything; each check returns what it found, and whether it is `ok`.

They run on the CPU too (`bench/gpu.sh --dry`), where they compare the CPU with itself.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import BERT_BASE, LLAMA_1B, TINY, bert, llama, vit
from torch import Tensor, nn
from transformers import PreTrainedModel

from hies_export import CRITERIA, export_onnx, load_runtime, prune
from hies_export.calibrate.statistics import collect_statistics
from hies_export.forms.machine import machine_facts
from hies_export.model.attention import AttentionCall
from hies_export.model.copies import convert
from hies_export.model.internals import graphs_skipped
from hies_export.model.kernels import attend_with_entropy
from hies_export.score.criteria import needs_of
from hies_export.slim.check import compare_cut, masked_units
from hies_export.units.find import find_modules

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Relative to the largest number; half precision rounds to 2**-8 and 2**-11.
LIMITS = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 1e-2}
BOTH = ("attention", "mlp")
SHORT = {"vocab_size": 100, "max_position_embeddings": 64}

Batch = dict[str, Tensor]
Found = dict[str, Any]


def environment(device: str) -> Found:
    """The machine, and what torch was told about float32."""
    matmul: Any = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None) or matmul.allow_tf32
    return {**machine_facts(), "device": device, "float32 products": str(precision)}


# Attention


def kernels(device: str) -> Found:
    """Fused attention, its entropy and its gradients against float32 on the CPU, in 144 cases."""
    worst, beyond = dict.fromkeys(DTYPES, 0.0), []
    for name, width, keys, kind in product(DTYPES, (8, 20, 64, 80, 128, 256), (33, 64), MASKS):
        case = f"{name}, width {width}, {keys} keys, {kind}"
        try:
            error = _kernel_error(device, DTYPES[name], width, keys, kind)
        except Exception as failure:  # of one case; the others are still to be told
            beyond.append(f"{case}: {type(failure).__name__}: {str(failure)[:200]}")
            continue
        worst[name] = max(worst[name], error)
        if not error < LIMITS[name]:
            beyond.append(f"{case}: {error:.1e}")
    return {"cases": 144, "worst": {name: f"{error:.1e}" for name, error in worst.items()}, "beyond": beyond}


MASKS = ("no mask", "causal", "padded right", "padded left")


def _kernel_error(device: str, dtype: torch.dtype, width: int, keys: int, kind: str) -> float:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, heads, keys, width, generator=generator).to(dtype) for heads in (4, 2, 2)]
    mask = _mask(keys, kind)
    found, wanted = (_attention(given, mask, kind, *place) for place in ((device, dtype), ("cpu", torch.float32)))
    errors = [(one - two).abs().max() / two.abs().max().clamp(min=1e-9) for one, two in zip(found, wanted, strict=True)]
    return float(torch.stack(errors).max())  # NaN stays NaN


def _mask(keys: int, kind: str) -> Tensor | None:
    """Return a boolean mask in which the second row of the batch has five tokens of padding; None without one."""
    if not kind.startswith("padded"):
        return None
    real = torch.ones(2, 1, 1, keys, dtype=torch.bool)
    real[1, ..., slice(-5, None) if kind == "padded right" else slice(0, 5)] = False
    return real if kind == "padded right" else real & torch.ones(keys, keys, dtype=torch.bool).tril()


def _attention(given: list[Tensor], mask: Tensor | None, kind: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return output, entropy and gradients, (float64, CPU), with zeros in rows that see no key."""
    query, key, value = (one.to(device, dtype).requires_grad_() for one in given)
    placed = None if mask is None else mask.to(device)
    call = AttentionCall(nn.Identity(), query, key, value, placed, query.shape[-1] ** -0.5, kind == "causal")
    output, entropy, _ = attend_with_entropy(call)
    if placed is not None:
        output = output.masked_fill(~placed.any(-1, keepdim=True), 0)
    gradients = torch.autograd.grad(output.float().square().sum(), (query, key, value))
    return [one.detach().cpu().double() for one in (output, entropy, *gradients)]


# Statistics and cuts


def _tiny() -> Iterator[tuple[str, PreTrainedModel, list[Batch]]]:
    """Yield models of the kinds that scoring tells apart, on the CPU, with batches that are padded."""
    torch.manual_seed(0)
    decoder = {**TINY, **SHORT, "num_key_value_heads": 4}
    for shape in (bert("BERT", **TINY, **SHORT, num_labels=3), llama("LLaMA", **decoder), vit("ViT", 32, **TINY)):
        model = shape.build(device="cpu", dtype=torch.float32)
        with torch.no_grad():  # heads of fresh weights hardly differ
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        batches = [shape.batch(model, 4, 13) for _ in range(4)]
        for batch in batches:
            if "attention_mask" in batch:
                batch["attention_mask"][-1, slice(0, 4) if model.can_generate() else slice(-4, None)] = 0
            if not model.can_generate():
                batch["labels"] = torch.arange(4) % model.config.num_labels
        yield shape.name, model, batches


def statistics(device: str) -> Found:
    """Every statistic against the CPU's, relative to the largest."""
    found: Found = {}
    for name, model, batches in _tiny():
        modules = find_modules(model, batches[0], kinds=BOTH)
        needs = needs_of(*CRITERIA)
        wanted = collect_statistics(model, batches, modules, needs=needs).values
        for precision, dtype in DTYPES.items():
            there = convert(model, device=device, dtype=dtype)
            got = collect_statistics(there, batches, modules, needs=needs).values
            apart = {what: _apart(got[what], of_module) for what, of_module in wanted.items()}
            found[f"{name}, {precision}"] = {what: f"{error:.0e}" for what, error in apart.items()}
            if precision == "float32" and not max(apart.values()) < 1e-4:
                found.setdefault("beyond", []).append(f"{name}: {max(apart.values()):.1e}")
    return found


def _apart(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    most = [
        (found[name] - of_units).abs().max() / of_units.abs().max().clamp(min=1e-30)
        for name, of_units in wanted.items()
    ]
    return float(torch.stack(most).max())


OPTIONS: dict[str, dict[str, Any]] = {
    "hies": {"criterion": "hies", "budget": {"heads": 0.5}},
    "compensated": {
        **{"criterion": "compensated", "modules": BOTH, "budget": {"parameters": 0.8}},
        "compensation": {"method": "least_squares", "token_weights": 0.5},
    },
}


def cuts(device: str) -> Found:
    """Units that `prune` keeps, as on the CPU, and in half precision that it runs at all."""
    found: Found = {}
    for (name, model, batches), how in product(list(_tiny()), OPTIONS):
        wanted = prune(model, batches, **copy.deepcopy(OPTIONS[how])).plan.kept
        for precision, dtype in [*DTYPES.items()][: 3 if device == "cuda" else 2]:
            kept = prune(convert(model, device=device, dtype=dtype), batches, **copy.deepcopy(OPTIONS[how])).plan.kept
            same = sum(set(kept[module].units) == set(one.units) for module, one in wanted.items())
            found[f"{name}, {how}, {precision}"] = f"{same} of {len(wanted)} modules keep the same units"
            if precision == "float32" and same < len(wanted):
                found.setdefault("beyond", []).append(f"{name}, {how}")
    return found


def tf32(device: str) -> Found:
    """The check of a cut, to 1e-4, and the same difference without its guard, with TF32 off and on."""
    found: Found = {}
    for (name, model, batches), allowed in product(list(_tiny()), (False, True)):
        there = convert(model, device=device)
        modules = find_modules(there, batches[0])
        with _tf32(allowed):
            slim = prune(there, batches, budget={"heads": 0.5}, held_out=[])
            checked = compare_cut(there, slim.model, slim.plan, modules, batches[0])
            bare = _unguarded(there, slim.model, slim.plan, modules, batches[0])
        found[f"{name}, TF32 {'on' if allowed else 'off'}"] = {"checked": f"{checked:.1e}", "unguarded": f"{bare:.1e}"}
    return found


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    matmul: Any = torch.backends.cuda.matmul
    name, value = ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)
    before = getattr(matmul, name)
    try:
        if allowed:
            setattr(matmul, name, value)
        yield
    finally:
        setattr(matmul, name, before)


def _unguarded(dense: Any, slim: Any, plan: Any, modules: Any, batch: Batch) -> float:
    inputs = {name: value.to(dense.device) for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        with masked_units(dense, plan, modules):
            wanted = dense(**inputs)[0]
        return float((slim(**inputs)[0] - wanted).abs().max())


# Memory and clocks


def memory(device: str) -> Found:
    """Bytes beyond the weights while layers of a LLaMA of 1B are scored at 2 x 2,048, whole and with a padded row."""
    real, layers = device == "cuda", 4
    sizes = {**LLAMA_1B, "num_hidden_layers": layers} if real else {**TINY, **SHORT, "num_key_value_heads": 4}
    shape, (rows, tokens) = llama("LLaMA", **sizes), (2, 2048) if real else (2, 32)
    model, modules = shape.build(device=device, dtype=torch.bfloat16), shape.modules()
    found: Found = {"layers": sizes["num_hidden_layers"], "shape": [rows, tokens]}
    for what in ("whole", "padded"):
        batch = shape.batch(model, rows, tokens)
        batch["attention_mask"][-1, : tokens // 4 if what == "padded" else 0] = 0
        _synchronise(device)
        if real:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        started = time.perf_counter()
        collect_statistics(model, [batch], modules)
        _synchronise(device)
        peak = {"MB": (torch.cuda.max_memory_allocated() - held) / 1e6} if real else {}
        found[what] = {"seconds": time.perf_counter() - started, **peak}
    one_map = rows * sizes["num_attention_heads"] * tokens**2 * 2 / 1e6
    if real and found["padded"]["MB"] - found["whole"]["MB"] > one_map:
        found["beyond"] = [f"a padded row costs more than a map of {one_map:.0f} MB"]
    return found


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def clocks(device: str) -> Found:
    """A forward pass by CUDA's events, by the host's clock, and the sum of its kernels."""
    real = device == "cuda"
    shape = bert("BERT-base", **(BERT_BASE if real else {**TINY, **SHORT}))
    model = shape.build(device=device, dtype=torch.float16 if real else torch.float32)
    found: Found = {}
    for size in ((1, 128), (32, 128)) if real else ((2, 12),):
        runtime = load_runtime("torch", model)
        feed = runtime.prepare(shape.batch(model, *size))
        for _ in range(5):
            runtime.run(feed)
        events, host = [], []
        for _ in range(20):
            events.append(runtime.time_ns(feed) / 1e6)
            started = time.perf_counter()
            runtime.run(feed)
            host.append(1e3 * (time.perf_counter() - started))
        times = {"events ms": float(np.median(events)), "host ms": float(np.median(host))}
        found["x".join(map(str, size))] = {**times, **({"kernels ms": _kernels_ms(runtime, feed)} if real else {})}
    return found


def _kernels_ms(runtime: Any, feed: Any) -> float:
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        runtime.run(feed)
    on_device = (event for event in profile.events() if str(event.device_type).endswith("CUDA"))
    return sum(event.device_time_total for event in on_device) / 1e3


def compiled(device: str) -> Found:
    """What `torch-compile` captured, whether it computes the same, and its time."""
    if device != "cuda":
        return {"skipped": "CUDA graphs are of GPUs"}
    found: Found = {}
    for shape in (
        bert("BERT", **{**BERT_BASE, "num_hidden_layers": 2}),
        llama("LLaMA", **{**LLAMA_1B, "num_hidden_layers": 2}),
    ):
        model = shape.build(device=device, dtype=torch.float16)
        batch, before = shape.batch(model, 1, 128), graphs_skipped()
        eager, quick = load_runtime("torch", model), load_runtime("torch-compile", model)
        feeds = eager.prepare(batch), quick.prepare(batch)
        for _ in range(4):
            quick.run(feeds[1])
        one, two = (r.fetch(r.run(feed))["logits"] for r, feed in zip((eager, quick), feeds, strict=True))
        found[shape.name] = {
            **{"captured": quick.cuda_graph, "skipped": graphs_skipped() - before},
            "differs by": float(np.abs(one - two).max()),
            "ms": [
                float(np.median([r.time_ns(f) for _ in range(20)])) / 1e6
                for r, f in zip((eager, quick), feeds, strict=True)
            ],
        }
    return found


# ONNX Runtime


def onnx_runtime(device: str) -> Found:
    """Where operators run, whether graphs are captured, whether replays compute the same, and two decode shapes."""
    name = "onnxruntime-cuda" if device == "cuda" else "onnxruntime-cpu"
    found: Found = {}
    for (kind, model, batches), dtype in product(list(_tiny()), ("float32", "float16")[: 1 + (device == "cuda")]):
        case = f"{kind}, {dtype}"
        try:
            with tempfile.TemporaryDirectory() as folder:
                found[case] = _onnx(model, batches[0], dtype, name, Path(folder) / "onnx")
        except Exception as failure:  # of one graph; the others are still to be told
            found.setdefault("beyond", []).append(f"{case}: {type(failure).__name__}: {str(failure)[:300]}")
            continue
        largest = found[case].pop("largest")
        limit = 1e-3 if dtype == "float32" else 2e-2 * max(1.0, largest)
        apart = [found[case][key] for key in found[case] if key.startswith(("replay", "decode"))]
        if not max(apart) < limit:
            found.setdefault("beyond", []).append(f"{case}: {max(apart):.1e}")
    return found


def _onnx(model: PreTrainedModel, batch: Batch, dtype: str, name: str, folder: Path) -> Found:
    given = {key: value for key, value in batch.items() if key != "labels"}
    exported = export_onnx(model, folder, batch=given, provider="cuda", dtype=dtype)
    runtime, plain = load_runtime(name, folder), load_runtime("onnxruntime-cpu", folder)
    found: Found = {"compared on": exported.checked_on, "placed": _placed(runtime)}
    wanted = plain.compute(given)
    feed = runtime.prepare(given)
    found["captured"] = runtime.cuda_graph
    for replay in range(3):
        found[f"replay {replay}"] = _largest(runtime.fetch(runtime.run(feed)), wanted, given.get("attention_mask"))
    if runtime.decodes:
        steps = {length: {key: value[:, -length:] for key, value in given.items()} for length in (13, 7)}
        prepared = {length: runtime.prepare_step(step) for length, step in steps.items()}
        for length, step in steps.items():  # after both were prepared: neither replays the other's graph
            want = plain.fetch(plain.run(plain.prepare_step(step)))
            found[f"decode, {length}"] = _largest(runtime.fetch(runtime.run(prepared[length])), want)
    return {**found, "largest": max(float(np.abs(array).max(initial=0)) for array in wanted.values())}


def _placed(runtime: Any) -> dict[str, int]:
    if (
        not hasattr(runtime._session, "get_provider_graph_assignment_info")
        or runtime.provider == "CPUExecutionProvider"
    ):
        return {}
    parts = runtime._session.get_provider_graph_assignment_info()
    return {part.ep_name: sum(len(p.get_nodes()) for p in parts if p.ep_name == part.ep_name) for part in parts}


def _largest(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], mask: Tensor | None = None) -> float:
    """Return the largest difference of logits, or of the first output, at real tokens: padding has arbitrary numbers.

    In float16 on a GPU, the logits of a LLaMA at tokens that see no other differ by 2 from those on the CPU.
    """
    name = "logits" if "logits" in wanted else next(iter(wanted))
    apart = np.abs(found[name] - wanted[name])
    if mask is not None and apart.shape[:2] == mask.shape:
        apart = apart[mask.bool().numpy()]
    return float(apart.max(initial=0))


CHECKS: tuple[Callable[[str], Found], ...] = (
    *(environment, kernels, statistics, cuts, tf32, memory, clocks, compiled, onnx_runtime),
)
