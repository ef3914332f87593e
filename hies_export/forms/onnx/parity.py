"""Compare exported graphs with torch, on more batches than the one they were traced with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
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
from .decoder import FRONT, text_tokens
from .generator import OnnxGenerator

# By provider, the runtime that graphs for it are compared on, if this machine has it.
RUNTIMES: dict[str, type[OnnxRuntime]] = {"cpu": OnnxRuntime, "cuda": CudaOnnxRuntime}

# Tokens that `continued` adds at the end of prompts, and all positions that the comparison adds to them.
CONTINUED = 4
SPARE_POSITIONS = FRONT + CONTINUED

# Most tokens of a text to compare on: the logits of more tokens take GB of memory.
COMPARED_TOKENS = 128


def parity_batches(
    given: Mapping[str, torch.Tensor], sample: Mapping[str, torch.Tensor], *, shorten: bool = True
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the batches to compare on, by name: as given, the padded sample, and the sample's first row.

    `sample` is what was traced. With `shorten`, its first row gets another number of tokens than the given batch has,
    to show a token axis that the trace fixed. A sample of `left_padded` is longer than the given batch already.
    """
    single = {name: tensor[:1] for name, tensor in sample.items()}
    if shorten and "input_ids" in sample:
        given_length = given["input_ids"].shape[1]
        length = 4 if given_length == 3 else max(3, given_length // 2)  # the sample has at least 4 tokens
        shape = single["input_ids"].shape
        single |= {name: tensor[:, :length] for name, tensor in single.items() if tensor.shape[:2] == shape}
    return {"the given batch": dict(given), "a padded batch": dict(sample), "a batch of 1": single}


def continued(batch: Mapping[str, torch.Tensor], image_token_id: int | None) -> dict[str, torch.Tensor]:
    """Return prompts with `CONTINUED` more tokens of text at their end."""
    further = text_tokens(batch["input_ids"], CONTINUED, image_token_id=image_token_id)
    tokens = torch.cat([batch["input_ids"], further], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(further)], dim=1)
    return {**batch, "input_ids": tokens, "attention_mask": mask}


def comparison_runtime(provider: str) -> type[OnnxRuntime]:
    """Return the runtime that runs a graph for a provider in a comparison: the CPU's if the provider's is missing."""
    with suppress(MissingRuntimeError):
        RUNTIMES[provider].require()
        return RUNTIMES[provider]
    return OnnxRuntime


def check_parity(
    folder: Path,
    reference: Callable[[], PreTrainedModel],
    batches: Mapping[str, Mapping[str, torch.Tensor]],
    dtype: str,
    runtime: type[OnnxRuntime] = OnnxRuntime,
    *,
    generates: bool = False,
) -> float:
    """Return the largest absolute difference between exported graphs and torch; raises ParityError if it is too large.

    If the model `generates`, batches are prompts, as `continued` returns them. The graphs take the prompt, then a chunk
    of two tokens, then two single tokens, each with the cache of the tokens before. Torch takes all tokens in one
    forward pass. Logits and cache are compared. `reference` makes the model in torch, which is not in memory together
    with the graph.
    """
    wanted = _torch_outputs(reference, batches.values())
    run: Callable[[Mapping[str, torch.Tensor]], dict[str, np.ndarray]]
    if generates:
        run = partial(_run_in_steps, OnnxGenerator.from_folder(folder, runtime=runtime))
    else:
        run = runtime(folder, threads=torch.get_num_threads()).compute
    worst = 0.0
    for want, (label, batch) in zip(wanted, batches.items(), strict=True):
        got = run(batch)
        if generates:
            want, got = _logits_and_cache(want, got)
        want, got = without_padding(want, batch), without_padding(got, batch)
        worst = max(worst, compare_outputs(want, got, label=label, dtype=dtype))
    return worst


def _torch_outputs(
    reference: Callable[[], PreTrainedModel], batches: Iterable[Mapping[str, torch.Tensor]]
) -> list[dict[str, np.ndarray]]:
    """Return the outputs on batches of the model that `reference` makes, and free the model."""
    model = reference()
    runtime = TorchRuntime(model, threads=torch.get_num_threads())
    outputs = [runtime.compute(batch) for batch in batches]
    let_go(model)
    return outputs


def without_padding(outputs: Mapping[str, np.ndarray], batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return outputs of a batch with zeros at its padding, where nobody reads them and programs may differ.

    Only outputs by token change: of shape (batch, sequence, width), the scores of where an answer starts and ends,
    (batch, sequence), and the cache of a decoder, (batch, key/value heads, sequence, width).
    """
    if "attention_mask" not in batch or batch["attention_mask"].all():
        return dict(outputs)
    real = np.asarray(batch["attention_mask"].cpu(), dtype=bool)
    zeroed = dict(outputs)
    for name, array in outputs.items():
        if name.startswith("present."):  # the cache, which may have dropped the first tokens
            zeroed[name] = np.where(real[:, None, -array.shape[2] :, None], array, 0)
        elif array.shape[:2] == real.shape and array.ndim == 3:
            zeroed[name] = np.where(real[..., None], array, 0)
        elif array.shape[:2] == real.shape and name in ("start_logits", "end_logits"):
            zeroed[name] = np.where(real, array, 0)
    return zeroed


def _run_in_steps(generator: OnnxGenerator, batch: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Run a prompt, a chunk of two tokens and two single tokens; return all logits and the final cache in float32."""
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    cache: dict[str, Any] = {}
    logits, length = [], tokens.shape[1]
    for start, stop in pairwise((0, length - 4, length - 2, length - 1, length)):
        inputs = generator.decoder_inputs(tokens[:, start:stop], batch.get("pixel_values") if start == 0 else None)
        step_logits, cache = generator.step(inputs, mask[:, :stop], cache)
        logits.append(step_logits)
    presents = {name.replace("past_key_values", "present"): value.numpy() for name, value in cache.items()}
    in_float32 = {name: array.astype(np.float32, copy=False) for name, array in presents.items()}
    return {"logits": torch.cat(logits, dim=1).numpy(), **in_float32}


def _logits_and_cache(
    want: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return torch's logits and cache among its outputs `want`, and those of a graph's outputs `got`.

    With a sliding window, torch keeps only the last tokens in the cache and the graph all, so the graph's is cut.
    """
    of_torch = {name: array for name, array in want.items() if name == "logits" or name.startswith("present.")}
    of_graph = dict(got)
    for name in of_torch.keys() & of_graph.keys() - {"logits"}:  # a name that one of them lacks is refused afterwards
        of_graph[name] = of_graph[name][:, :, -of_torch[name].shape[2] :]
    return of_torch, of_graph


def compare_outputs(want: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray], *, label: str, dtype: str) -> float:
    """Return the largest absolute difference of outputs; raise ParityError beyond the limit, or if shapes differ."""
    wanted = "; ".join(f"{name} {array.shape}" for name, array in sorted(want.items()))
    found = "; ".join(f"{name} {array.shape}" for name, array in sorted(got.items()))
    if wanted != found:
        raise ParityError(f"the graph's outputs must be torch's; on {label} torch has {wanted}, it has {found}")
    differences = {name: Difference.of(torch.from_numpy(got[name]), torch.from_numpy(want[name])) for name in want}
    tolerance = OTHER_PROGRAM[dtype]
    remedy = "report the model" if dtype == "float32" else "export in float32, or report the model"
    for name, difference in differences.items():
        if not difference.within(tolerance):
            raise ParityError(
                f"the graph's {name} must be torch's within {tolerance:g} of the largest number, but on {label} differ "
                f"by {difference}; nothing was kept: {remedy}"
            )
    return max(difference.max_abs for difference in differences.values())
