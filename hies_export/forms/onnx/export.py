"""Export a model to ONNX, and keep the files only if their outputs equal torch's."""

from __future__ import annotations

import gc
import logging
import shutil
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedModel

from ...checkpoint.beside import copy_documents, use_version4_names, write_config
from ...checkpoint.folders import new_folder, refuse_existing
from ...errors import DataError, ExportError, ParityError, RequestError, UnsupportedModelError
from ...files import Rule, check
from ...model.copies import convert, parameter_bytes, share_weights
from ...model.internals import configs_in, exact_products, fused_attention_fits
from ...model.memory import give_back_memory
from ...model.modes import output_alone
from ...model.tokens import forward_inputs, longest_sequence, refuse_encoder_decoder, short_samples
from ...progress import quiet
from ...recipe.sections import ExportSection
from ..formats import Export
from ..runtimes.base import Provider
from ..runtimes.ort import ONNX_FILE, WEIGHTS_SUFFIX, require_onnxruntime
from ..traces import Traces
from .decoder import check_decoder, left_padded, trace_decoder
from .multimodal import check_vision_language, is_vision_language, trace_vision_language
from .parity import COMPARED_TOKENS, SPARE_POSITIONS, check_parity, comparison_runtime, continued, parity_batches
from .trace import trace_encoder, trace_sample

# Most bytes of weights inside of a graph. protobuf takes less than 2 GiB, and while it writes, memory for them twice.
INSIDE_BYTES = 2**30

# Common model types that are known to be exported; a model of another type is traced before a run, to see.
EXPORTED = {
    *("albert", "beit", "bert", "bloom", "camembert", "clip", "cohere", "data2vec-text", "data2vec-vision"),
    *("deberta", "deberta-v2", "deit", "dinov2", "distilbert", "electra", "ernie", "gemma", "gemma2"),
    *("gemma3_text", "gpt2", "gpt_neo", "gpt_neox", "gptj", "granite", "llama", "llava", "ministral"),
    *("mistral", "mixtral", "modernbert", "mpnet", "nomic_bert", "olmo", "opt", "phi", "phi3", "qwen2"),
    *("qwen3", "roberta", "roberta-prelayernorm", "siglip", "smollm3", "stablelm", "starcoder2", "swin"),
    *("vit", "wav2vec2", "xlm-roberta", "xlm-roberta-xl"),
}

_OPTIONS = Rule("the options of an export must be those of a recipe's", "see its section export")
Kind = Literal["encoder", "decoder", "vision-language"]

logger = logging.getLogger(__name__)


def export_onnx(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    batch: Mapping[str, Any],
    processor: Any = None,
    provider: Provider = "cpu",
    dtype: str = "float32",
    traces: Traces | None = None,
    overwrite: bool = False,
) -> Export:
    """Write a model as ONNX graphs with Optimum's file names, and compare them with torch.

    An encoder becomes `folder/model.onnx`. Its batch axis is dynamic, and for text its sequence axis too. It is
    compared on the given batch, on a padded one, and on a batch of 1 (for text, of another length). Texts are compared
    on their first 128 tokens.

    A decoder becomes `folder/model.onnx`, a graph from tokens, attention mask, cache and, if the model takes them,
    positions to logits and cache. A prompt starts with an empty cache. Layers may differ in the heads of their cache.
    It is compared on the first two of the given rows.

    A vision-language model becomes `vision_encoder.onnx` (with the projector), `embed_tokens.onnx` and
    `decoder_model_merged.onnx`. It is compared like a decoder, as `generate_text` runs them: prompts (as given, padded
    on the left, a single one), then a chunk of two tokens, then single tokens.

    Args:
        model: A text or image encoder, with or without a classification head; a decoder; or a vision-language model
            with a projector. Layers may differ in heads. The model is not changed.
        folder: Where to write; must not exist, unless `overwrite`.
        batch: A sample of shape (batch, sequence) for text or (batch, channels, height, width) for images. A
            vision-language model needs both, with one image per row. Labels are ignored.
        processor: Tokenizer or image processor to save beside the graph.
        provider: The execution provider to fuse the graphs for, `cpu` or `cuda`.
        dtype: Dtype of weights and of floating inputs and outputs, `float32` or `float16`. Outputs must agree with
            torch in float32 within 1e-3, or for `float16` within 2e-2 times max(1, largest output).
        traces: Graphs of other cuts of the same model. If this one's graph follows from them, it is not traced; the
            comparison is the same. A graph that is traced is added to them.
        overwrite: Replace an existing folder.

    Returns:
        The files that were written, and the largest difference of their outputs from torch's.

    Raises:
        RequestError: Unknown provider or dtype.
        OutputExistsError: `folder` already exists.
        MissingRuntimeError: ONNX Runtime is not installed.
        UnsupportedModelError: The model is an encoder-decoder, has no key/value cache, or needs more than pixels to
            compute the features of images.
        DataError: The batch has no input of the model, or image tokens that do not match the images.
        ExportError: The exporter failed.
        ParityError: An output of a graph differs from torch's beyond the tolerance.

    Examples:
        >>> exported = export_onnx(slim, folder / "onnx", batch=batches[0])
        >>> exported.files, exported.max_abs < 1e-3
        (('model.onnx',), True)
    """
    target = Path(folder)
    how = check({"provider": provider, "dtype": dtype}, ExportSection, _OPTIONS, where="export")
    refuse_existing(target, overwrite=overwrite)
    require_onnxruntime("cpu" if provider == "cpu" else "gpu")
    kind, sample, compared = _samples(model, batch)
    traced = _traceable_copy(_float32_copy(model), provider, getattr(torch, dtype))
    without_weights = share_weights(traced, device="meta")  # for the config, as it is before the trace

    def write(programs: dict[str, Any], done_with: PreTrainedModel | None = None) -> Export:
        """Write graphs, given by file name, free them and the traced copy `done_with`, and compare the files."""
        with new_folder(target, overwrite=overwrite) as staging:
            size = sum(save_program(program, staging / name) for name, program in programs.items())
            _write_beside(without_weights, processor, staging)
            contents = _contents(programs)
            # A graph has copies of the weights, transposed or joined; the comparison reads the files.
            _release(programs, done_with, model)
            if size >= INSIDE_BYTES:  # copies of graphs are cycles, which hold their weights until they are collected
                gc.collect()
                give_back_memory()
            with quiet(verbose=logger.isEnabledFor(logging.DEBUG)), exact_products():
                reference, runtime = partial(_float32_copy, model), comparison_runtime(provider)
                max_abs = check_parity(staging, reference, compared, dtype, runtime, generates=kind != "encoder")
        return Export(
            format="onnx",
            folder=target,
            file=target / contents["files"][-1],
            bytes=size,
            how=how,
            max_abs=max_abs,
            checked_on=runtime.name if len(contents["files"]) == 1 else None,
            **contents,
        )

    # No runtime reads the three graphs of a vision-language model, so it is not exported often. To learn from the graph
    # of a large model takes the memory of its weights.
    if kind == "vision-language" or parameter_bytes(traced) >= INSIDE_BYTES:
        traces = None
    key = kind, provider, dtype, *sample
    if traces is not None:
        programs = {ONNX_FILE: traces.resized(key, traced)}
        if programs[ONNX_FILE] is not None:
            try:
                return write(programs)
            except (ExportError, ParityError) as error:
                logger.debug("the model is traced, as the graph that was made for it is wrong: %s", error)
    programs = _trace(kind, traced, sample, provider)
    if traces is not None:
        traces.add(key, traced, programs[ONNX_FILE])
    return write(programs, traced)


def _write_beside(model: PreTrainedModel, processor: Any, folder: Path) -> None:
    """Write the config and the documents of a model, and its processor if there is one, into a folder."""
    write_config(model, folder)
    copy_documents(model, folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.to_json_file(folder / "generation_config.json")
    if processor is not None:
        processor.save_pretrained(folder)
        use_version4_names(folder)


def check_traceable(model: PreTrainedModel, batch: Mapping[str, Any]) -> None:
    """Refuse, by a RequestError, a model that cannot be traced on two short rows; one that `_is_known` is not tried."""
    if _is_known(model):
        return
    try:
        samples = _samples(model, short_samples(batch))
        _trace(samples.kind, _traceable_copy(_float32_copy(model), "cpu", torch.float32), samples.traced, "cpu")
    except (ExportError, UnsupportedModelError) as error:
        raise RequestError(
            "a run writes its models in ONNX, too, which this one cannot be in; prune it by the command prune, which "
            f"needs no export: {error}"
        ) from error


def _is_known(model: PreTrainedModel) -> bool:
    """Return whether a model's type is in `EXPORTED`, and its rotary embedding is not of type dynamic."""
    return model.config.model_type in EXPORTED and not any(
        "dynamic" in str(getattr(config, "rope_parameters", None)) for config in configs_in(model.config)
    )


def _contents(programs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an `Export` that say what is in graphs, given by file name, the main one last."""
    main = list(programs.values())[-1].graph
    inputs, outputs = tuple(value.name for value in main.inputs), tuple(value.name for value in main.outputs)
    nodes = [node for program in programs.values() for node in program.graph.all_nodes()]
    fused = dict(Counter(node.op_type for node in nodes if node.domain == "com.microsoft"))
    return {"files": tuple(programs), "inputs": inputs, "outputs": outputs, "facts": {"fused": fused}}


class _Samples(NamedTuple):
    kind: Kind  # the export that fits the model
    traced: dict[str, torch.Tensor]  # the batch to trace
    compared: dict[str, dict[str, torch.Tensor]]  # the batches to compare graphs on, by their names in messages


def _samples(model: PreTrainedModel, batch: Mapping[str, Any]) -> _Samples:
    """Return what to trace a model on, and what to compare it on; raises as `export_onnx`."""
    given = {name: tensor.cpu() for name, tensor in forward_inputs(model, batch).items()}
    if model.main_input_name not in given:
        raise DataError(f"the batch must have {model.main_input_name!r}, got {', '.join(sorted(batch))}")
    refuse_encoder_decoder(model.config, type(model).__name__)
    if model.can_generate():
        check_decoder(model)
        return _generating_samples(model, {"attention_mask": torch.ones_like(given["input_ids"]), **given})
    shape = given["input_ids"].shape if "input_ids" in given else None
    given |= {name: tensor[:, :COMPARED_TOKENS] for name, tensor in given.items() if tensor.shape[:2] == shape}
    sample = trace_sample(model, given)
    return _Samples("encoder", sample, parity_batches(given, sample))


def _generating_samples(model: PreTrainedModel, given: dict[str, torch.Tensor]) -> _Samples:
    """Return the samples of a decoder or a vision-language model, as `_samples` does."""
    kind: Kind = "vision-language" if is_vision_language(model) else "decoder"
    image_token_id = None
    if kind == "vision-language":
        names = ("input_ids", "attention_mask", "pixel_values")
        given = {name: given[name] for name in names if name in given}
        check_vision_language(model, given)
        image_token_id = model.config.image_token_id
    else:
        # The comparison continues the prompt by a few tokens, which need positions too.
        positions = longest_sequence(model.config)
        length = COMPARED_TOKENS if positions is None else min(COMPARED_TOKENS, max(1, positions - SPARE_POSITIONS))
        given = {name: given[name][:2, :length] for name in ("input_ids", "attention_mask")}
    padded = left_padded(given, image_token_id=image_token_id)
    prompts = parity_batches(given, padded, shorten=False)
    return _Samples(kind, padded, {label: continued(batch, image_token_id) for label, batch in prompts.items()})


def _trace(kind: Kind, model: PreTrainedModel, sample: dict[str, torch.Tensor], fusions: Provider) -> dict[str, Any]:
    """Trace a model without the exporter's messages; return the graphs by file name, the decoder last."""
    with quiet(verbose=logger.isEnabledFor(logging.DEBUG)), output_alone(model, cache=kind != "encoder"):
        if kind == "vision-language":
            return trace_vision_language(model, sample, fusions)
        trace = trace_encoder if kind == "encoder" else trace_decoder
        return {ONNX_FILE: trace(model, sample, fusions)}


def _float32_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy to compare with: in float32, on the CPU, in evaluation mode, with torch's own attention."""
    copied = convert(model, dtype=torch.float32, device="cpu").eval()
    # transformers refuses "sdpa" if one module of the model lacks it, and "eager" computes the same. The copy that is
    # traced for a GPU keeps this setting.
    copied.set_attn_implementation("sdpa" if fused_attention_fits(model) else "eager")
    return copied


def _traceable_copy(reference: PreTrainedModel, provider: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a copy in a dtype, with the attention that the exporter fuses best for a provider."""
    copied = convert(reference, dtype=dtype)
    # For the CPU, the exporter decomposes an sdpa trace (microsoft/onnxruntime#33873), while an eager
    # trace becomes one Attention operator per layer. Latency eager / sdpa, one run, ONNX Runtime 1.31, 2 cores:
    # 0.93 to 0.97 on BERT and 0.90 to 0.95 on ViT; at batch 8 the 95 % interval still reached 1.
    if provider == "cpu":
        copied.set_attn_implementation("eager")
    return copied


def _release(programs: dict[str, Any], traced: PreTrainedModel | None, model: PreTrainedModel) -> None:
    """Free the weights of graphs, and those tensors of the traced copy that it does not share with the model.

    To drop our references is not enough: graphs are cycles, which hold their weights until they are collected.
    """
    for program in programs.values():
        for value in program.graph.initializers.values():
            value.const_value = None
    programs.clear()
    if traced is None:
        return
    used = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    for tensor in (*traced.parameters(), *traced.buffers()):
        if tensor.untyped_storage().data_ptr() not in used:
            tensor.data = tensor.data.new_empty(0)


def save_program(program: Any, file: Path) -> int:
    """Write a graph with its weights inside, or beside it from `INSIDE_BYTES` on; return the size of all in bytes."""
    import onnx_ir

    weight_bytes = sum(v.const_value.nbytes for v in program.graph.initializers.values() if v.const_value is not None)
    if weight_bytes < INSIDE_BYTES:
        # The weights of a graph that was read from a file may still be in a file beside that one.
        onnx_ir.save(onnx_ir.external_data.load_to_model(program), file)
    else:
        onnx_ir.save(program, file, external_data=f"{file.name}{WEIGHTS_SUFFIX}")
    return sum(written.stat().st_size for written in file.parent.glob(f"{file.name}*"))


def copy_beside(exported: Export, folder: Path) -> None:
    """Copy all files in the folder of an export into another folder, except the graph and its weights."""
    ignored = shutil.ignore_patterns(f"{exported.file.name}*")
    shutil.copytree(exported.folder, folder, ignore=ignored, dirs_exist_ok=True)
