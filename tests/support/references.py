"""Compute the formulas of the paper and of DESIGN the slow way; only the places of the heads come from the package."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from hies_export import PrunableModule, PruningPlan
from hies_export.kinds import ATTENTION
from support.exported import run_onnx
from support.models import generative_tokenizer
from support.neurons import one_by_one

RIDGE = 0.1


class NotApplicable(Exception):
    """Say that there is nothing to compare with."""


def kept_columns(plan: PruningPlan, site: PrunableModule) -> list[int]:
    """Return the input columns of the output projection that a plan keeps."""
    width = site.unit_width
    return [head * width + j for head in plan.kept[site.name].units for j in range(width)]


def design_formula(
    layer: Any, x: np.ndarray, kept: list[int], ridge: float, *, of_all: bool = False
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return W'_K and b' as DESIGN writes them, by numpy, from all inputs x of shape (tokens, columns).

    The ridge is relative to the mean variance of the kept columns, or of all of them.
    """
    w, b = (None if p is None else p.detach().double().numpy() for p in (layer.weight, layer.bias))
    removed = sorted(set(range(x.shape[1])) - set(kept))
    mean = x.mean(0) if b is not None else np.zeros(x.shape[1])
    c = (x - mean).T @ (x - mean) / len(x)
    c_kk, c_mk = c[np.ix_(kept, kept)], c[np.ix_(removed, kept)]
    damping = ridge * (c if of_all else c_kk).diagonal().mean() * np.eye(len(kept))
    new = w[:, kept] + w[:, removed] @ c_mk @ np.linalg.inv(c_kk + damping)
    if b is None:
        return new, None
    return new, b + w[:, removed] @ mean[removed] + (w[:, kept] - new) @ mean[kept]


def layer_tokens(
    model: PreTrainedModel, layer: str, batches: Sequence[dict[str, Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a layer reads and what it writes, each (tokens, features) in double, of every unpadded sample."""
    seen: list[tuple[Tensor, Tensor]] = []
    handle = model.get_submodule(layer).register_forward_hook(lambda _, x, y: seen.append((x[0], y)))
    with torch.no_grad():
        for one in one_by_one(batches):
            model(**{key: value for key, value in one.items() if key != "labels"})
    handle.remove()
    read, written = ([t.double().flatten(0, -2) for t in part] for part in zip(*seen, strict=True))
    return read, written


def labels_of(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Return the labels of a batch, by default the text after its first token, without padding and images."""
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids))
    read = (mask != 0) & (mask.roll(1, -1) != 0) & (ids != getattr(model.config, "image_token_id", -1))
    return batch.get("labels", ids.where(read, -100))


def drawn_in(model: PreTrainedModel, number: int, batch: dict[str, Tensor]) -> list[int]:
    """Return the tokens that the package draws at the places of a batch's labels, row by row."""
    with torch.no_grad():
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits[:, :-1]
    found = logits[labels_of(model, batch)[:, 1:] != -100].log_softmax(-1)
    generator = torch.Generator(found.device).manual_seed(number)
    return found.exp().multinomial(1, generator=generator)[:, 0].tolist()


def bounds(x: np.ndarray, h: np.ndarray) -> np.ndarray:
    """Return factors, (tokens, 1), that make no token's x * h longer than it is at all but 2 % of the tokens."""
    sizes = np.sqrt(((x * h) ** 2).sum(1))
    reaching = np.sort(sizes[sizes > 0])
    border = reaching[-1 - int(0.02 * len(reaching))] if len(reaching) else 0.0
    return np.array([[border / size if size > border else 1.0] for size in sizes])


def read_by_sample(
    model: PreTrainedModel, module: PrunableModule, batches: Sequence[dict[str, Tensor]]
) -> list[tuple[np.ndarray, ...]]:
    """Return inputs and outputs of a consumer, and the prediction's gradients to both, for every unpadded sample.

    Each is (tokens, features). The prediction is computed here from the logits. Only the tokens that a language model
    draws are the package's.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    handle = model.get_submodule(module.consumer).register_forward_hook(lambda m, x, y: seen.append((x[0], y)))
    found, tokens = [], None
    for one in one_by_one(batches):
        logits = model(**{k: v for k, v in one.items() if k != "labels"}).logits[0]
        read = seen.pop()
        if logits.dim() == 2:
            tokens = tokens or iter(
                [token for number, batch in enumerate(batches) for token in drawn_in(model, number, batch)]
            )
            wanted = labels_of(model, one)[0]
            places = [t for t in range(1, len(wanted)) if wanted[t] != -100]
            prediction = torch.stack([logits[t - 1].log_softmax(-1)[next(tokens)] for t in places]).sum()
        elif len(logits) == 1:
            prediction = logits[0]
        else:
            ordered = logits.sort(descending=True).values
            prediction = ordered[0] - ordered[1]
        gradients = torch.autograd.grad(prediction, read, allow_unused=True, materialize_grads=True)
        found.append(tuple(t.detach().double().flatten(0, -2).numpy() for t in (*read, *gradients)))
    handle.remove()
    return found


def read_tokens(model: PreTrainedModel, module: PrunableModule, batches: Sequence[dict[str, Tensor]]) -> Any:
    """Return the four arrays of `read_by_sample`, each of the tokens of all samples."""
    return [np.concatenate(part) for part in zip(*read_by_sample(model, module, batches), strict=True)]


def naive_effect(
    model: PreTrainedModel,
    module: PrunableModule,
    samples: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
    groups: list[int],
    *,
    per_sample: bool = True,
) -> float:
    """Return E_x of sum_t d_t^2, plus (sum_t d_t)^2 if `per_sample`, with d_t = <g_t, delta_t>.

    The compensated layer is built for the kept groups. A sample is the inputs, outputs and output gradients of the
    layer, each of shape (tokens, features).
    """
    width = module.group_size * module.unit_width
    kept = [g * width + j for g in groups for j in range(width)]
    every = np.concatenate([x for x, _, _ in samples])
    new, shift = design_formula(model.get_submodule(module.consumer), every, kept, RIDGE, of_all=True)
    effect = 0.0
    for x, y, g in samples:
        d = ((x[:, kept] @ new.T + (0 if shift is None else shift) - y) * g).sum(1)
        effect += float(d @ d) + (float(d.sum()) ** 2 if per_sample else 0.0)
    return effect / len(samples)


def same_in_onnxruntime(dense: Path, file: Path, rows: Sequence[dict[str, Tensor]], *, tolerance: float) -> list[bool]:
    """Return which numbers of a graph in plain ONNX Runtime are those of a dense regressor within a tolerance."""
    same = []
    model = AutoModelForSequenceClassification.from_pretrained(dense)
    for batch in rows:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        found = run_onnx(file, inputs)["logits"]
        with torch.no_grad():
            same += ((model(**inputs).logits - torch.from_numpy(found)).abs() <= tolerance).flatten().tolist()
    return same


def choice_likelihoods(model: PreTrainedModel, prompt: str, choices: Sequence[str]) -> list[float]:
    """Return the log-likelihood of every choice after a prompt, each from a forward pass of its own."""
    tokenizer, found = generative_tokenizer(), []
    start = tokenizer(prompt).input_ids
    for choice in choices:
        ids = start + tokenizer(choice, add_special_tokens=False).input_ids
        with torch.no_grad():
            logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found.append(sum(logs[t - 1, ids[t]].item() for t in range(len(start), len(ids))))
    return found


def naive_statistics(
    model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], modules: Sequence[PrunableModule]
) -> dict[str, dict[str, Tensor]]:
    """Return "his", "fisher", "activation_l2" and "entropy" per unit, of samples one at a time.

    There is a mask before each consumer, and attention is eager. A row's entropy is relative to the number of keys that
    the map gives any weight; NotApplicable without eager maps.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return _naive_statistics(model, batches, modules)
    finally:
        model.set_attn_implementation(before)


def _naive_statistics(
    model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], modules: Sequence[PrunableModule]
) -> dict[str, dict[str, Tensor]]:
    samples: dict[str, dict[str, list[Tensor]]] = {what: {} for what in ("his", "fisher", "entropy")}
    read: dict[str, list[Tensor]] = {m.name: [] for m in modules}
    for batch in batches:
        for i in range(len(batch["labels"])):
            one = {key: value[i : i + 1] for key, value in batch.items()}
            masks = {m.name: torch.ones(m.units, requires_grad=True) for m in modules}
            maps: dict[str, list[Tensor]] = {m.name: [] for m in modules if m.kind == ATTENTION}
            hooks = []
            for module in modules:
                gate = _multiply(masks[module.name], module, read[module.name])
                hooks.append(model.get_submodule(module.consumer).register_forward_pre_hook(gate))
                if module.name in maps:
                    keep = _keep_map(maps[module.name], module)
                    hooks.append(model.get_submodule(module.name).register_forward_hook(keep))
            try:
                loss = _with_maps(model, one).loss
            except RuntimeError as error:
                raise NotApplicable(f"transformers' eager attention fails: {error}") from error
            finally:
                for hook in hooks:
                    hook.remove()
            gradients = torch.autograd.grad(loss, list(masks.values()), allow_unused=True, materialize_grads=True)
            for name, gradient in zip(masks, gradients, strict=True):
                samples["his"].setdefault(name, []).append(gradient.abs().double())
                samples["fisher"].setdefault(name, []).append(gradient.double().square())
            for name, found in maps.items():
                if not found:
                    raise NotApplicable(f"{name} does not return its attention map")
                sinks = getattr(model.get_submodule(name), "sinks", None) is not None
                windows = [window[None] for p in found for window in p]
                means = [_mean_entropy(p, one.get("attention_mask"), sinks) for p in windows]
                samples["entropy"].setdefault(name, []).append(torch.stack(means).mean(0))
    found = {what: {n: torch.stack(rows).mean(0) for n, rows in of.items()} for what, of in samples.items()}
    return found | {"activation_l2": {n: torch.cat(tokens).norm(dim=-1).mean(0) for n, tokens in read.items()}}


def _multiply(mask: Tensor, module: PrunableModule, read: list[Tensor]) -> Callable[..., Tensor]:
    def hook(layer: torch.nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        units = inputs[0].unflatten(-1, (module.units, module.unit_width))
        read.append(units.detach().flatten(0, -3).double())
        return (units * mask[:, None]).flatten(-2)

    return hook


def _keep_map(found: list[Tensor], site: PrunableModule) -> Callable[..., None]:
    def hook(module: torch.nn.Module, inputs: object, outputs: object) -> None:
        tensors = [o for o in outputs if isinstance(o, Tensor)] if isinstance(outputs, (tuple, list)) else []
        maps = [o.detach() for o in tensors if o.dim() == 4 and o.shape[1] == site.units]
        maps = [o for o in maps if torch.allclose(o.sum(-1), torch.ones(()), atol=1e-3) or len(maps) == 1]  # no bias
        if len(maps) == 1:  # some cut one map into that of the tokens and that of an encoder's
            found.append(maps[0])

    return hook


def _with_maps(model: PreTrainedModel, one: dict[str, Tensor]) -> Any:
    """Return what a model returns; some make no attention map unless they are asked to return it."""
    try:
        return model(**one, output_attentions=True)
    except TypeError:  # a class that takes no such argument
        return model(**one)


def _mean_entropy(p: Tensor, mask: Tensor | None, sinks: bool) -> Tensor:
    """(1, heads, rows, keys) -> (heads,): mean over real rows of entropy over its maximum; `mask` (1, tokens)."""
    rows = p[0].double()
    # A weight may underflow in some head, a masked one is zero in all.
    seen = (rows > 0).any(0)
    if rows.shape[-2] == rows.shape[-1]:
        real = seen.any(0)  # nobody sees a padding token, or other padding tokens alone do
        if mask is not None and mask.shape[1] == len(real):
            real = real & mask[0].bool()
        rows, seen = rows[:, real], seen[real]
    keys = seen.sum(-1)
    counted = keys > 1
    if not counted.any():
        return torch.zeros(rows.shape[0], dtype=torch.float64)
    rows, keys = rows[:, counted], keys[counted]
    h = torch.special.entr(rows).sum(-1)
    if sinks:
        if (rows.sum(-1) > 1 - 1e-6).all():
            raise NotApplicable("its eager attention map leaves the sink out")
        h, keys = h + torch.special.entr((1 - rows.sum(-1)).clamp(min=0)), keys + 1
    return (h / keys.double().log()).mean(-1)


def dcg(gains: Any) -> float:
    """Return the discounted gain of the first ten."""
    return sum(gain / np.log2(rank + 2) for rank, gain in enumerate(gains[:10]))


def ranked(scores: np.ndarray, dense: np.ndarray, grades: np.ndarray | None, depth: int) -> dict[str, float]:
    """Return the metrics of one query whose candidates have different scores, beside the dense model's ranking."""
    order, own = np.argsort(-scores), np.argsort(-dense)
    deep = dense[own[:depth]]
    gains = np.clip((dense - deep[-1]) / (deep[0] - deep[-1]), 0, 1)
    found = {
        "own_ndcg": dcg(gains[order]) / dcg(gains[own]),
        "top1": float(order[0] == own[0]),
        "top10": len(set(order[:10]) & set(own[:10])) / min(10, len(own)),
    }
    if grades is not None:
        ideal = dcg(np.sort(grades)[::-1])
        right = [rank for rank, place in enumerate(order[:10], 1) if grades[place] > 0]
        found["ndcg"] = dcg(grades[order]) / ideal if ideal else 0.0
        found["recall"] = len(right) / max(1, int((grades > 0).sum()))
        found["mrr"] = 1 / right[0] if right else 0.0
        if ideal:
            assert found["ndcg"] == pytest.approx(sklearn.metrics.ndcg_score([grades], [scores], k=10))
    return found
