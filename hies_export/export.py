"""Export an encoder to ONNX, and keep the file only if it computes what torch computes."""

from __future__ import annotations

import copy
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from .errors import DataError, RecipeError, UnsupportedModelError
from .folders import new_folder, refuse_existing
from .onnx_trace import trace_onnx, trace_sample
from .parity import check_parity, parity_batches
from .quiet import quiet
from .runtimes import ONNX_FILE, require_onnxruntime
from .twin import forward_inputs, share_weights

# From the Hub, older Optimum only fetches weights under this name.
WEIGHTS_FILE = "model.onnx_data"
PROTOBUF_LIMIT_BYTES = 2**31 - 2**24

PROVIDERS = ("cpu", "cuda")
DTYPES = {"float32": torch.float32, "float16": torch.float16}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnnxExport:
    """An exported model that agreed with torch.

    Attributes:
        folder: The folder, with graph, config.json and the processor's files.
        file: The graph, `model.onnx`.
        bytes: Size of graph and weights, in bytes.
        max_abs: Largest absolute difference from torch over all outputs of all checked batches.
        provider: The provider the graph is fused for, `cpu` or `cuda`.
        checked_on: The execution provider the comparison ran on.
        inputs: Names of the graph's inputs.
        outputs: Names of the graph's outputs.
        fused_ops: ONNX Runtime's own operators in the graph, with their number.
    """

    folder: Path
    file: Path
    bytes: int
    max_abs: float
    provider: str
    checked_on: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fused_ops: dict[str, int]


def export_onnx(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    batch: Mapping[str, Any],
    processor: Any = None,
    provider: Literal["cpu", "cuda"] = "cpu",
    dtype: str = "float32",
    overwrite: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> OnnxExport:
    """Write an encoder as `folder/model.onnx` under Optimum's names, and compare it with torch.

    The batch axis is dynamic, and for text the sequence axis too. The file is run in ONNX Runtime on
    the given batch, on a padded one, and on a batch of 1 (for text, another length). The model is left alone.

    Args:
        model: A text or image encoder, with or without a classification head; layers may differ in heads.
        folder: Where to write; must not exist, unless `overwrite`.
        batch: A sample of shape (batch, sequence) for text or (batch, channels, height, width) for images;
            labels are ignored.
        processor: Tokenizer or image processor, saved beside the graph.
        provider: What to fuse the graph for, `cpu` or `cuda`.
        dtype: Weights and floating inputs and outputs, `float32` or `float16`. Compared with float32 torch
            within 1e-3, or 2e-2 times max(1, largest output) for float16.
        overwrite: Replace an existing folder.
        progress: Called with (steps done, steps in all).

    Raises:
        RecipeError: Unknown provider or dtype.
        OutputExistsError: `folder` is already there.
        MissingRuntimeError: ONNX Runtime is not installed.
        UnsupportedModelError: The model generates text.
        DataError: The batch has nothing the model reads.
        ExportError: The exporter failed.
        ParityError: The graph computes something else than torch.
    """
    target = Path(folder)
    _check_request(model, provider, dtype)
    refuse_existing(target, overwrite=overwrite)
    require_onnxruntime("cpu" if provider == "cpu" else "gpu")
    given = forward_inputs(model, batch)
    if model.main_input_name not in given:
        raise DataError(f"the batch must have {model.main_input_name!r}, got {', '.join(sorted(batch))}")
    report = progress or (lambda done, total: None)

    report(0, 3)
    reference = _float32_copy(model)
    traced = _traceable_copy(reference, provider, DTYPES[dtype])
    sample = trace_sample(model, given)
    with new_folder(target, overwrite=overwrite) as staging:
        with quiet(verbose=logger.isEnabledFor(logging.DEBUG)):
            program = trace_onnx(traced, sample, provider)
        report(1, 3)
        with quiet(verbose=logger.isEnabledFor(logging.DEBUG)):
            _save(program, staging / ONNX_FILE)
        _write_companions(staging, traced, processor)
        report(2, 3)
        with quiet(verbose=logger.isEnabledFor(logging.DEBUG)):
            max_abs, checked_on = check_parity(staging, reference, parity_batches(given, sample), dtype)
        size = sum((staging / name).stat().st_size for name in _graph_files(staging))
    report(3, 3)
    return OnnxExport(
        folder=target,
        file=target / ONNX_FILE,
        bytes=size,
        max_abs=max_abs,
        provider=provider,
        checked_on=checked_on,
        inputs=tuple(value.name for value in program.graph.inputs),
        outputs=tuple(value.name for value in program.graph.outputs),
        fused_ops=dict(Counter(node.op_type for node in program.graph.all_nodes() if node.domain == "com.microsoft")),
    )


def _check_request(model: PreTrainedModel, provider: str, dtype: str) -> None:
    """Refuse what cannot be done before any work."""
    problems = []
    if provider not in PROVIDERS:
        problems.append(f"export.provider must be one of {', '.join(PROVIDERS)}, got {provider!r}")
    if dtype not in DTYPES:
        problems.append(f"export.dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if problems:
        raise RecipeError(problems)
    if model.can_generate():
        raise UnsupportedModelError(
            f"export_onnx needs an encoder, and {type(model).__name__} generates text: "
            "export its base model or a classification model"
        )


def _float32_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The reference: float32, in evaluation mode, torch's own attention; the caller's model left alone."""
    copied = _in_dtype(share_weights(model), torch.float32).eval()
    copied.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    return copied


def _traceable_copy(reference: PreTrainedModel, provider: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model to trace, with the attention that the exporter fuses best for the provider."""
    copied = _in_dtype(share_weights(reference), dtype)
    # For the CPU the exporter takes an sdpa trace apart again (microsoft/onnxruntime#33873), while an eager
    # trace becomes one Attention operator per layer. Latency eager / sdpa, one run, ONNX Runtime 1.31, 2 cores:
    # 0.93 to 0.97 on BERT and 0.90 to 0.95 on ViT; at batch 8 the 95 % interval still reached 1.
    if provider == "cpu":
        copied.set_attn_implementation("eager")
    return copied


def _in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model itself when it is in this dtype, else a converted copy."""
    if all(parameter.dtype == dtype for parameter in model.parameters()):
        return model
    converted = copy.deepcopy(model)
    torch.nn.Module.to(converted, dtype)
    return converted


def _save(program: Any, file: Path) -> None:
    """Write the graph with its weights inside, or beside it where protobuf cannot hold them."""
    import onnx_ir

    weight_bytes = sum(v.const_value.nbytes for v in program.graph.initializers.values() if v.const_value is not None)
    if weight_bytes < PROTOBUF_LIMIT_BYTES:
        onnx_ir.save(program, file)
    else:
        onnx_ir.save(program, file, external_data=WEIGHTS_FILE)


def _graph_files(folder: Path) -> list[str]:
    return [name for name in (ONNX_FILE, WEIGHTS_FILE) if (folder / name).exists()]


def _write_companions(folder: Path, model: PreTrainedModel, processor: Any) -> None:
    """Write config.json and the processor's files so that older Optimum and transformers 4 read them."""
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    # The code it points to is not in this folder.
    if hasattr(config, "auto_map"):
        del config.auto_map
    config.to_json_file(folder / "config.json")
    if processor is None:
        return
    processor.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    if not file.exists():
        return
    settings = json.loads(file.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
