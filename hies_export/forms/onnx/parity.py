"""Compare exported graphs with torch, on more batches than the one they were traced with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ...equal import OTHER_PROGRAM, Difference
from ...errors import MissingRuntimeError, ParityError
from ...model.memory import let_go
from ..runtimes.ort import OnnxRuntime
from ..runtimes.ort_gpu import CudaOnnxRuntime
from ..runtimes.pytorch import TorchRuntime
from .decoder import text_tokens
from .generator import OnnxGenerator

# By provider, the runtime that graphs for it are compared on, if this machine has it.
RUNTIMES: dict[str, type[OnnxRuntime]] = {"cpu": OnnxRuntime, "cuda": CudaOnnxRuntime}

# Positions that the comparison adds to the given prompts: 3 in front and 4 generated.
SPARE_POSITIONS = 7

# Most tokens of a text to compare on: the logits of more tokens take GB of memory.
COMPARED_TOKENS = 128


def parity_batches(
    given: Mapping[str, torch.Tensor], sample: Mapping[str, torch.Tensor], *, shorten: bool = True
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the batches to compare on, by name: as given, the padded sample, and the sample's first row.

    With `shorten`, that row gets another number of tokens than the given batch has, as an axis of them that was traced
    as fixed would show only there. Prompts of `left_padded` are longer than the given ones already.
    """
    single = {name: tensor[:1] for name, tensor in sample.items()}
    if shorten and "input_ids" in sample:
        given_length = given["input_ids"].shape[1]
        length = 4 if given_length == 3 else max(3, given_length // 2)
        tokens = single["input_ids"].shape
        single = {name: t[:, :length] if t.shape[:2] == tokens else t for name, t in single.items()}
    return {"the given batch": dict(given), "a padded batch": dict(sample), "a batch of 1": single}


def continued(batch: Mapping[str, torch.Tensor], image_token_id: int | None) -> dict[str, torch.Tensor]:
    """Return prompts with four more tokens of text."""
    further = text_tokens(batch["input_ids"], 4, image_token_id=image_token_id)
    tokens = torch.cat([batch["input_ids"], further], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(further)], dim=1)
    return {**batch, "input_ids": tokens, "attention_mask": mask}


def compared_on(provider: str) -> type[OnnxRuntime]:
    """Return the runtime to compare a graph for a provider on: the provider's own, or the CPU's if that is missing."""
    try:
        RUNTIMES[provider].require()
    except MissingRuntimeError:
        return OnnxRuntime
    return RUNTIMES[provider]


def check_parity(
    folder: Path,
    reference: Callable[[], PreTrainedModel],
    batches: Mapping[str, Mapping[str, torch.Tensor]],
    dtype: str,
    runtime: type[OnnxRuntime] = OnnxRuntime,
    *,
    generates: bool = False,
) -> float:
    """Return the largest absolute difference between a graph and torch; raises ParityError if it is too large.

    If the model `generates`, batches are prompts, as `continued` returns them. The graphs take the prompt, then a chunk
    of two tokens, then two single tokens, each with the cache of the tokens before. Torch takes all tokens in one
    forward pass. Logits and cache are compared.

    `reference` makes the model in torch, which is not in memory together with the graph.
    """
    wanted = _in_torch(reference, batches.values())
    run: Callable[[Mapping[str, torch.Tensor]], dict[str, np.ndarray]]
    if generates:
        run = partial(_in_pieces, OnnxGenerator.from_folder(folder, runtime=runtime))
    else:
        run = runtime(folder, threads=torch.get_num_threads()).compute
    worst = 0.0
    for want, (label, batch) in zip(wanted, batches.items(), strict=True):
        got = run(batch)
        if generates:
            want, got = _logits_and_cache(want, got)
        both = (without_padding(outputs, batch) for outputs in (want, got))
        worst = max(worst, compare_outputs(*both, label=label, dtype=dtype))
    return worst


def _in_torch(
    reference: Callable[[], PreTrainedModel], batches: Iterable[Mapping[str, torch.Tensor]]
) -> list[dict[str, np.ndarray]]:
    """Return the outputs of a model on batches, and free the model."""
    model = reference()
    runtime = TorchRuntime(model, threads=torch.get_num_threads())
    outputs = [runtime.compute(batch) for batch in batches]
    let_go(model)
    return outputs


def without_padding(outputs: Mapping[str, np.ndarray], batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return outputs of a batch with zeros at its padding, where nobody reads them, and programs may differ.

    This is for outputs by token: of shape (batch, sequence, width), the scores of where an answer starts and ends,
    (batch, sequence), and the cache of a decoder, (batch, key/value heads, sequence, width).
    """
    real = np.asarray(batch["attention_mask"].cpu(), dtype=bool) if "attention_mask" in batch else np.array(True)
    if real.all():
        return dict(outputs)

    def zeroed(name: str, array: np.ndarray) -> np.ndarray:
        if name.startswith("present."):
            return np.where(real[:, None, -array.shape[2] :, None], array, 0)
        if array.shape[:2] == real.shape and (array.ndim == 3 or name in ("start_logits", "end_logits")):
            return np.where(real[..., None] if array.ndim == 3 else real, array, 0)
        return array

    return {name: zeroed(name, array) for name, array in outputs.items()}


def _in_pieces(exported: OnnxGenerator, batch: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Run a prompt, a chunk of two tokens and two single tokens; return all logits and the final cache in float32."""
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    cache, logits, length = None, [], tokens.shape[1]
    for start, stop in pairwise((0, length - 4, length - 2, length - 1, length)):
        inputs = exported.prompt(tokens[:, start:stop], batch.get("pixel_values") if start == 0 else None)
        piece, cache = exported.step(inputs, mask[:, :stop], cache)
        logits.append(piece)
    presents = {name.replace("past_key_values", "present"): value.numpy() for name, value in (cache or {}).items()}
    in_float32 = {name: array.astype(np.float32, copy=False) for name, array in presents.items()}
    return {"logits": torch.cat(logits, dim=1).numpy(), **in_float32}


def _logits_and_cache(
    want: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the logits and the cache of torch and of the graph.

    With a sliding window, torch keeps only the last tokens in the cache and the graph all, so the graph's is cut.
    """
    wanted = {name: array for name, array in want.items() if name == "logits" or name.startswith("present.")}
    found = dict(got)
    for name in wanted.keys() & found.keys() - {"logits"}:  # a name that one of them lacks is refused afterwards
        found[name] = found[name][:, :, -wanted[name].shape[2] :]
    return wanted, found


def compare_outputs(want: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray], *, label: str, dtype: str) -> float:
    """Return the largest absolute difference; raises ParityError if it is too large, or names or shapes differ."""
    shapes = ["; ".join(f"{name} {array.shape}" for name, array in sorted(outputs.items())) for outputs in (want, got)]
    if shapes[0] != shapes[1]:
        raise ParityError(f"the graph's outputs must be torch's; on {label} torch has {shapes[0]}, it has {shapes[1]}")
    found = {name: Difference.of(torch.from_numpy(got[name]), torch.from_numpy(want[name])) for name in want}
    tolerance = OTHER_PROGRAM[dtype]
    remedy = "report the model" if dtype == "float32" else "export in float32, or report the model"
    for name, difference in found.items():
        if not difference.within(tolerance):
            raise ParityError(
                f"the graph's {name} must be torch's within {tolerance:g} of the largest number, but on {label} differ "
                f"by {difference}; nothing was kept: {remedy}"
            )
    return max(difference.max_abs for difference in found.values())
